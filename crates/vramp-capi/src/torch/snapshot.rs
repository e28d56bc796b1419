//! History and snapshots of all devices of the process at once.
//!
//! 1. [`record_history_of_devices`] starts a recording on each open device, and notes the number of events
//!    for devices that are opened later.
//! 2. [`snapshot_of_devices`] writes one file, in which each device has its own events and segments under
//!    the number that PyTorch gives it.
//!
//! O(blocks + events) of all devices. A device that is not open is not in the file, and keeps its place:
//! the list of events at its number is empty.

use std::sync::atomic::Ordering;

use vramp_alloc::history::{HistorySize, Trace};

use super::{TORCH, Torch};
use crate::abi::vramp_status_t::VRAMP_ERROR_RANGE;
use crate::context::Context;
use crate::status::{Failure, Result, check_fork};
use crate::writing::write_trace;

impl Torch {
    /// Starts to record the last `events` events of each device, also of those that are opened later. Zero
    /// stops the recordings.
    pub(super) fn record_history(&self, events: u32) -> Result<()> {
        check_fork()?;
        if events > HistorySize::EVENTS_MAX {
            let max = HistorySize::EVENTS_MAX;
            let text = format!("{events} events would take too much memory: use at most {max}");
            return Err(Failure::new(VRAMP_ERROR_RANGE, text));
        }
        // While no device is being opened, so that each is either open or reads the number.
        let opening = self.opening.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.recorded_events.store(events, Ordering::Relaxed);
        let recorded = self.opened().try_for_each(|context| context.record_history(events));
        drop(opening);
        recorded
    }

    /// Starts the recording of a device that was just opened, if those of the others are recorded.
    pub(super) fn record_opened(&self, context: &Context) -> Result<()> {
        match self.recorded_events.load(Ordering::Relaxed) {
            0 => Ok(()),
            events => context.record_history(events),
        }
    }

    /// Returns blocks, segments and recorded events of all open devices.
    pub(super) fn snapshot(&self) -> Result<Trace> {
        check_fork()?;
        let traces: Result<Vec<Trace>> = self.opened().map(|context| context.snapshot()).collect();
        let mut merged = Trace::merge(traces?);
        merged.name = String::new();
        Ok(merged)
    }
}

/// Starts to record the last `events` events of each device that PyTorch, Python and C share.
pub(crate) fn record_history_of_devices(events: u32) -> Result<()> {
    TORCH.record_history(events)
}

/// Writes blocks, segments and recorded events of all these devices to a file.
pub(crate) fn snapshot_of_devices(path: &str) -> Result<()> {
    write_trace(&TORCH.snapshot()?, path)
}
