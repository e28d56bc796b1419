//! A device with one broken promise: what the pool's rules rest on fails from below.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use vramp_alloc::Driver;
use vramp_driver::sim::Simulator;
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{Call, CaptureInfo, DriverResult, Event, GraphNode, Stream};

/// A simulator that leaves out calls of one kind, and says that they went well.
pub struct Saboteur {
    sim: Arc<Simulator>,
    left_out: Mutex<Option<Call>>,
    /// Dependencies that each capture reported, by its number.
    told: Mutex<BTreeMap<u64, BTreeSet<GraphNode>>>,
}

impl Saboteur {
    pub fn on(sim: Arc<Simulator>) -> Wrapped<Saboteur> {
        Wrapped(Saboteur { sim, left_out: Mutex::new(None), told: Mutex::default() })
    }

    /// From now on calls of this kind do nothing; a query answers yes, and a question where a
    /// stream is in its capture tells of joins that were never made.
    pub fn leave_out(&self, call: Call) {
        *self.left_out.lock().unwrap_or_else(PoisonError::into_inner) = Some(call);
    }

    /// From now on every call is made.
    pub fn behave(&self) {
        *self.left_out.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn leaves_out(&self, call: Call) -> bool {
        *self.left_out.lock().unwrap_or_else(PoisonError::into_inner) == Some(call)
    }
}

macro_rules! left_out {
    ($($call:ident => $method:ident($($argument:ident: $type:ty),*) -> $result:ty, $lie:expr;)*) => {
        $(fn $method(&self $(, $argument: $type)*) -> DriverResult<$result> {
            if self.leaves_out(Call::$call) {
                return Ok($lie);
            }
            self.sim.$method($($argument),*)
        })*
    };
}

impl Wrapper for Saboteur {
    type Device = Simulator;

    fn device(&self) -> &Simulator {
        &self.sim
    }

    fn capture_info(&self, stream: Stream) -> DriverResult<Option<CaptureInfo>> {
        let mut info = self.sim.capture_info(stream)?;
        if let Some(CaptureInfo { capture, dependencies }) = &mut info {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            let all = told.entry(*capture).or_default();
            all.extend(dependencies.iter().copied());
            if self.leaves_out(Call::CaptureInfo) {
                *dependencies = all.iter().copied().collect();
            }
        }
        Ok(info)
    }

    left_out! {
        Record => record(event: Event, stream: Stream) -> (), ();
        Query => query(event: Event) -> bool, true;
        Wait => wait(stream: Stream, event: Event) -> (), ();
        SynchronizeEvent => synchronize_event(event: Event) -> (), ();
        SynchronizeStream => synchronize_stream(stream: Stream) -> (), ();
    }
}
