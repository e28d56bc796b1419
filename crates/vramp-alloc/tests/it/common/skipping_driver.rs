//! A device that skips calls of one kind, so that a rule that the pool relies on is broken.

use std::sync::{Arc, Mutex, PoisonError};

use vramp_alloc::Driver;
use vramp_driver::sim::Simulator;
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{Call, DriverResult, Event, Stream};

/// A simulator that skips calls of one kind and reports success.
pub struct SkippingDriver {
    sim: Arc<Simulator>,
    skipped: Mutex<Option<Call>>,
}

impl SkippingDriver {
    pub fn on(sim: Arc<Simulator>) -> Wrapped<SkippingDriver> {
        Wrapped(SkippingDriver { sim, skipped: Mutex::new(None) })
    }

    /// Skips calls of this kind from now on. A query then returns true.
    pub fn skip(&self, call: Call) {
        *self.skipped.lock().unwrap_or_else(PoisonError::into_inner) = Some(call);
    }

    /// Makes every call from now on.
    pub fn skip_nothing(&self) {
        *self.skipped.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn skips(&self, call: Call) -> bool {
        *self.skipped.lock().unwrap_or_else(PoisonError::into_inner) == Some(call)
    }
}

macro_rules! skipped {
    ($($call:ident => $method:ident($($argument:ident: $type:ty),*) -> $result:ty, $instead:expr;)*) => {
        $(fn $method(&self $(, $argument: $type)*) -> DriverResult<$result> {
            if self.skips(Call::$call) {
                return Ok($instead);
            }
            self.sim.$method($($argument),*)
        })*
    };
}

impl Wrapper for SkippingDriver {
    type Device = Simulator;

    fn device(&self) -> &Simulator {
        &self.sim
    }

    skipped! {
        Record => record(event: Event, stream: Stream) -> (), ();
        Record => record_outside(event: Event, stream: Stream) -> bool, true;
        Query => query(event: Event) -> bool, true;
        Wait => wait(stream: Stream, event: Event) -> (), ();
        SynchronizeEvent => synchronize_event(event: Event) -> (), ();
        SynchronizeStream => synchronize_stream(stream: Stream) -> (), ();
    }
}
