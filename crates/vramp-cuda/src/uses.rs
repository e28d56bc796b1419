//! Work of the device that uses a pinned buffer.
//!
//! No manual of NVIDIA says that freeing or unpinning host memory waits for copies from or to it. So
//! the device keeps the memory until they are over:
//!
//! 1. A copy on a stream records an event behind itself, one for each stream and buffer, which the
//!    next copy records again. Freeing the buffer waits for its events, and for no other work.
//! 2. A copy on a capturing stream becomes a node of a graph. The capture, its graph and what is
//!    instantiated from it hold the buffer, so freeing it is refused until they are destroyed. A
//!    launch counts as a copy on its stream.
//! 3. A copy in a capture that other code began becomes part of a graph that this device never sees.
//!    The buffer then stays pinned, and its memory allocated, until the process ends.
//!
//! Grows by one event for each stream that copied. Whenever their number has doubled, those whose
//! copies are over are destroyed, so streams that are gone leave none behind.

use std::sync::{Arc, MutexGuard, PoisonError};

use vramp_driver::{Call, DriverResult};

use crate::capture_mode::{CaptureNow, capture_now};
use crate::device::{CudaDriver, symbol};
use crate::error::invalid_id;
use crate::pinned::{Captured, Marks, Pinned, Uses};
use crate::raw::RawStream;
use crate::stream;
use crate::sys::{CUevent, CUresult};
use crate::table::Opaque;
use crate::turns::Turn;

/// Number of events that are kept without looking for complete ones.
const FEW: usize = 8;

impl Uses {
    /// Waits for the work that uses the buffer. The caller has claimed the buffer, so no call adds
    /// work meanwhile.
    pub(crate) fn finish(&self, driver: &CudaDriver, call: Call) -> DriverResult<()> {
        if self.never_end() {
            return Err(invalid_id(
                call,
                "host buffer: a capture of other code copies from or to it, so it stays pinned",
            ));
        }
        let mut marks = self.marks();
        while let Some((&id, event)) = marks.events.first_key_value() {
            // While other streams capture, waiting is refused to a thread that is not relaxed.
            let what = || "waiting for copies of host memory".into();
            driver.beside_captures(|| stream::wait_for(driver, call, event.0, what))?;
            if let Some(event) = marks.events.remove(&id) {
                destroy(driver, event.0);
            }
        }
        Ok(())
    }
}

impl Marks {
    /// Returns the event for `stream`, created if there is none.
    fn event(&mut self, driver: &CudaDriver, call: Call, stream: u64) -> DriverResult<CUevent> {
        if let Some(event) = self.events.get(&stream) {
            return Ok(event.0);
        }
        if self.events.len() >= self.prune_at.max(FEW) {
            self.prune(driver);
        }
        let event = stream::raw_event(driver, call)?;
        self.events.insert(stream, Opaque(event));
        Ok(event)
    }

    /// Destroys the events whose copies are over.
    fn prune(&mut self, driver: &CudaDriver) {
        if let Ok(query) = driver.cuda.cuEventQuery.as_ref() {
            self.events.retain(|_, event| {
                // SAFETY: the event is in the table, so it is live.
                let over = driver.beside_captures(|| unsafe { query(event.0) });
                if over == CUresult::CUDA_SUCCESS {
                    destroy(driver, event.0);
                }
                over != CUresult::CUDA_SUCCESS
            });
        }
        self.prune_at = self.events.len() * 2;
    }
}

fn destroy(driver: &CudaDriver, event: CUevent) {
    if let Ok(destroy) = driver.cuda.cuEventDestroy_v2.as_ref() {
        // SAFETY: the caller removed the event from its table, so no other code has it.
        let _ = unsafe { destroy(event) };
    }
}

/// Queues work on `stream` that uses `buffers`, and keeps them until it is over. `queue` makes the
/// driver call.
pub(crate) fn queue_using(
    driver: &CudaDriver,
    call: Call,
    (id, stream): (u64, &RawStream),
    buffers: &[Arc<Pinned>],
    queue: impl FnOnce() -> DriverResult<()>,
) -> DriverResult<()> {
    let turn = driver.turn();
    if buffers.is_empty() {
        return queue();
    }
    match capture_now(driver, stream) {
        CaptureNow::Outside => queue_marked(driver, call, (id, stream), buffers, queue),
        // If the call fails, they are kept without need until the capture ends.
        CaptureNow::In(capture) => {
            keep_captured(driver, &turn, capture, buffers);
            queue()
        }
        // The driver refuses the work. If it does not, nothing tells its end.
        CaptureNow::Unknown => {
            queue().inspect(|()| buffers.iter().for_each(|buffer| buffer.uses.set_forever()))
        }
    }
}

/// Queues work outside of captures, with an event behind it for each buffer.
fn queue_marked(
    driver: &CudaDriver,
    call: Call,
    (id, stream): (u64, &RawStream),
    buffers: &[Arc<Pinned>],
    queue: impl FnOnce() -> DriverResult<()>,
) -> DriverResult<()> {
    let record = symbol!(driver, call, cuEventRecord);
    // Created first, so that nothing is queued if that fails.
    for buffer in buffers {
        buffer.uses.marks().event(driver, call, id)?;
    }
    queue()?;
    for buffer in buffers {
        let mut marks = buffer.uses.marks();
        // Created again if another thread found the event complete and destroyed it.
        let recorded = marks.event(driver, call, id).and_then(|event| {
            // SAFETY: the stream is held and the event is in the table, so both are live.
            let code = unsafe { record(event, stream.raw()) };
            driver.settle(call, code, String::new)
        });
        // The work is queued, so the call succeeded. Without an event its end is waited for here.
        if recorded.is_err() && stream::synchronize(driver, call, stream).is_err() {
            buffer.uses.set_forever();
        }
    }
    Ok(())
}

/// Keeps buffers that a capture copies from or to.
fn keep_captured(driver: &CudaDriver, turn: &Turn<'_>, capture: u64, buffers: &[Arc<Pinned>]) {
    if !turn.is_own(capture) {
        buffers.iter().for_each(|buffer| buffer.uses.set_forever());
        return;
    }
    let mut captured = driver.captured();
    let kept = captured.entry(capture).or_default();
    for buffer in buffers {
        kept.entry(Arc::as_ptr(buffer).addr()).or_insert_with(|| Arc::clone(buffer));
    }
}

impl CudaDriver {
    /// Forgets a capture that this device began and other code ended. Its graph is out of reach, so
    /// nothing tells when the buffers that it copies from or to are no longer used.
    pub(crate) fn forget_capture(&self, capture: u64) {
        let kept = self.captured().remove(&capture).unwrap_or_default();
        kept.into_values().for_each(|buffer| buffer.uses.set_forever());
    }

    /// Locks the buffers of captures. Never held during a driver call.
    pub(crate) fn captured(&self) -> MutexGuard<'_, Captured> {
        // Nothing panics while holding the lock, so the content is consistent.
        self.captured.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
