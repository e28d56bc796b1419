//! A device with hooks in set-access, before records and after waits for events.

use std::sync::{Arc, Mutex, PoisonError};

use vramp_alloc::Driver;
use vramp_core::AddrRange;
use vramp_driver::sim::Simulator;
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{DriverResult, Event, Stream};

type Hook = Box<dyn Fn(AddrRange) + Send>;

/// A simulator with hooks.
pub struct Hooked {
    sim: Arc<Simulator>,
    hook: Mutex<Option<Hook>>,
    waited: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    recording: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Hooked {
    pub fn on(sim: Arc<Simulator>) -> Wrapped<Hooked> {
        let (hook, waited, recording) = Default::default();
        Wrapped(Hooked { sim, hook, waited, recording })
    }

    /// Called in each set-access from now on; `None` for no more.
    pub fn set(&self, hook: Option<Hook>) {
        *self.hook.lock().unwrap_or_else(PoisonError::into_inner) = hook;
    }

    /// Called once, when the next wait for an event has ended and before its thread continues.
    pub fn after_wait(&self, hook: impl FnOnce() + Send + 'static) {
        *self.waited.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
    }

    /// Called once, just before the next record of an event.
    pub fn before_record(&self, hook: impl FnOnce() + Send + 'static) {
        *self.recording.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
    }

    fn hook_record(&self) {
        let hook = self.recording.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(hook) = hook {
            hook();
        }
    }
}

impl Wrapper for Hooked {
    type Device = Simulator;

    fn device(&self) -> &Simulator {
        &self.sim
    }

    fn set_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()> {
        if let Some(hook) = &*self.hook.lock().unwrap_or_else(PoisonError::into_inner) {
            hook(range);
        }
        self.sim.set_access(range, peers)
    }

    fn record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        self.hook_record();
        self.sim.record(event, stream)
    }

    fn record_outside(&self, event: Event, stream: Stream) -> DriverResult<bool> {
        self.hook_record();
        self.sim.record_outside(event, stream)
    }

    fn synchronize_event(&self, event: Event) -> DriverResult<()> {
        let waited = self.sim.synchronize_event(event);
        let hook = self.waited.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(hook) = hook {
            hook();
        }
        waited
    }
}
