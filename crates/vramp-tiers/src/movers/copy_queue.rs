//! The copy queue of one direction: two streams, and the steps in flight on them.
//!
//! A step is a few copies on one stream with an event behind them. Steps alternate between the
//! streams. Any thread that queries or waits records what is complete for all transfers, so a
//! transfer that its caller does not poll holds up no other.
//!
//! Where neither an event nor a wait for the stream tells the end of a copy, the queue counts it as *lost*
//! until a later wait for the stream succeeds ([`CopyQueue::settle_lost`]).

use std::sync::Arc;

use smallvec::SmallVec;
use vramp_alloc::{Driver, DriverError};
use vramp_core::{Bytes, DeviceAddr};
use vramp_driver::{DeviceCopy, Event, HostSlice, Stream};

use super::core::window::{StepId, StepWindow};
use crate::sync::{Mutex, lock};

/// One copy.
#[derive(Clone, Copy, Debug)]
pub(super) enum QueuedCopy {
    ToHost { from: DeviceAddr, to: HostSlice },
    ToDevice { from: HostSlice, to: DeviceAddr },
    Within(DeviceCopy),
}

impl QueuedCopy {
    fn len(&self) -> Bytes {
        match self {
            QueuedCopy::ToHost { to: slice, .. } | QueuedCopy::ToDevice { from: slice, .. } => {
                slice.len
            }
            QueuedCopy::Within(copy) => copy.len,
        }
    }

    fn queue(&self, driver: &dyn Driver, stream: Stream) -> Result<(), DriverError> {
        match *self {
            QueuedCopy::ToHost { from, to } => driver.copy_to_host(stream, from, to),
            QueuedCopy::ToDevice { from, to } => driver.copy_to_device(stream, from, to),
            QueuedCopy::Within(copy) => driver.copy(stream, copy),
        }
    }
}

/// Copies of one step: one for each run of blocks.
pub(super) type StepCopies = SmallVec<[QueuedCopy; 4]>;

/// Why a step was not queued, or not completely.
#[derive(Debug)]
pub(super) struct QueueError {
    pub error: DriverError,
    /// True if no copy of the step is in flight.
    pub settled: bool,
}

struct State {
    window: StepWindow<Arc<Event>>,
    /// Events for reuse. A thread may still wait for one; see [`State::spare_event`].
    spare_events: Vec<Arc<Event>>,
    /// For each stream, how often the end of a copy could not be waited for.
    lost: [u64; 2],
    /// For each stream, how many of those are known to be over.
    found: [u64; 2],
}

impl State {
    /// Returns an event to record. Skips events that another thread still waits for: a new record
    /// would make it wait longer.
    fn spare_event(&mut self, driver: &dyn Driver) -> Result<Arc<Event>, DriverError> {
        match self.spare_events.iter().position(|event| Arc::strong_count(event) == 1) {
            Some(at) => Ok(self.spare_events.swap_remove(at)),
            None => driver.create_event().map(Arc::new),
        }
    }

    /// Records that a step is complete.
    fn complete(&mut self, step: StepId) {
        self.window.complete(step, &mut self.spare_events);
    }

    /// Records the outcome of a wait for a stream that began when `lost` copies of it were lost.
    fn note_wait(&mut self, stream: usize, lost: u64, succeeded: bool) {
        match succeeded {
            true => self.found[stream] = self.found[stream].max(lost),
            false => self.lost[stream] += 1,
        }
    }

    /// Records which steps are complete by now.
    fn sweep(&mut self, driver: &dyn Driver) -> Result<(), DriverError> {
        for stream in [0, 1] {
            while let Some((step, event)) = self.window.first(stream) {
                if !driver.query(**event)? {
                    break;
                }
                self.complete(step);
            }
        }
        Ok(())
    }
}

/// Copies in one direction.
pub(super) struct CopyQueue {
    driver: Arc<dyn Driver>,
    streams: [Stream; 2],
    state: Mutex<State>,
}

impl CopyQueue {
    pub fn new(driver: &Arc<dyn Driver>, most: Bytes) -> Result<CopyQueue, DriverError> {
        let first = driver.create_stream()?;
        let second = driver.create_stream().inspect_err(|_| {
            // Return the first error.
            let _ = driver.destroy_stream(first);
        })?;
        let window = StepWindow::new(most);
        let state = State { window, spare_events: Vec::new(), lost: [0; 2], found: [0; 2] };
        let (driver, state) = (Arc::clone(driver), Mutex::new(state));
        Ok(CopyQueue { driver, streams: [first, second], state })
    }

    pub fn streams(&self) -> [Stream; 2] {
        self.streams
    }

    /// Orders all later steps behind the work queued on `stream` so far. Returns false if the stream
    /// captures: nothing is ordered then.
    pub fn order_behind_stream(&self, stream: Stream) -> Result<bool, DriverError> {
        let mut state = lock(&self.state);
        let event = state.spare_event(&*self.driver)?;
        let recorded = self.driver.record_outside(*event, stream);
        let ordered = recorded.and_then(|recorded| {
            let ordered = if recorded { self.order_behind_event(*event) } else { Ok(()) };
            ordered.map(|()| recorded)
        });
        // A wait that was queued refers to the record, so the event is free for reuse.
        state.spare_events.push(event);
        ordered
    }

    /// Orders all later steps behind the last record of `event`.
    pub fn order_behind_event(&self, event: Event) -> Result<(), DriverError> {
        self.streams.iter().try_for_each(|stream| self.driver.wait(*stream, event))
    }

    /// Orders work queued on `stream` later behind these steps.
    pub fn order_before(&self, stream: Stream, steps: &[StepId]) -> Result<(), DriverError> {
        let state = lock(&self.state);
        steps.iter().try_for_each(|step| match state.window.event(*step) {
            Some(event) => self.driver.wait(stream, **event),
            None => Ok(()),
        })
    }

    /// Queues a step. Returns `None` if too much is in flight.
    pub fn queue(&self, step: &[QueuedCopy]) -> Result<Option<StepId>, QueueError> {
        let refused = |error| QueueError { error, settled: true };
        let mut state = lock(&self.state);
        let bytes = step.iter().map(QueuedCopy::len).sum();
        if !state.window.admits(bytes) {
            state.sweep(&*self.driver).map_err(refused)?;
            if !state.window.admits(bytes) {
                return Ok(None);
            }
        }
        self.queue_next(&mut state, step).map(Some)
    }

    /// Queues steps that belong together, without a bound on what is in flight. One event for each
    /// stream.
    pub fn queue_all(&self, steps: &[StepCopies]) -> Result<SmallVec<[StepId; 2]>, QueueError> {
        let mut state = lock(&self.state);
        let mut queued = SmallVec::new();
        let mut settled = true;
        for turn in 0..steps.len().min(2) {
            let own: StepCopies = steps.iter().skip(turn).step_by(2).flatten().copied().collect();
            match self.queue_next(&mut state, &own) {
                Ok(step) => queued.push(step),
                Err(QueueError { error, settled: own }) => {
                    drop(state);
                    // Wait for what was already queued on the other stream.
                    for step in queued {
                        settled &= self.wait(step).or_else(|_| self.settle(step)).is_ok();
                    }
                    return Err(QueueError { error, settled: settled && own });
                }
            }
        }
        Ok(queued)
    }

    /// Queues a step on the stream whose turn it is.
    fn queue_next(&self, state: &mut State, step: &[QueuedCopy]) -> Result<StepId, QueueError> {
        let stream = state.window.next_stream();
        let (driver, on) = (&*self.driver, self.streams[stream]);
        let event =
            state.spare_event(driver).map_err(|error| QueueError { error, settled: true })?;
        let queued = step.iter().try_for_each(|copy| copy.queue(driver, on));
        if let Err(error) = queued.and_then(|()| driver.record(*event, on)) {
            state.spare_events.push(event);
            // Copies of the step may be in flight without an event behind them.
            let settled = driver.synchronize_stream(on).is_ok();
            state.note_wait(stream, state.lost[stream], settled);
            if settled {
                state.complete(state.window.last(stream));
            }
            return Err(QueueError { error, settled });
        }
        let bytes = step.iter().map(QueuedCopy::len).sum();
        Ok(state.window.push(stream, bytes, event))
    }

    /// Returns true if the step is complete. Never blocks.
    pub fn is_done(&self, step: StepId) -> Result<bool, DriverError> {
        let mut state = lock(&self.state);
        if state.window.event(step).is_some() {
            state.sweep(&*self.driver)?;
        }
        Ok(state.window.event(step).is_none())
    }

    /// Waits for a step. No lock is held meanwhile.
    pub fn wait(&self, step: StepId) -> Result<(), DriverError> {
        let event = lock(&self.state).window.event(step).map(Arc::clone);
        let Some(event) = event else { return Ok(()) };
        self.driver.synchronize_event(*event)?;
        lock(&self.state).complete(step);
        Ok(())
    }

    /// Waits for the whole stream of a step, after its event failed.
    pub fn settle(&self, step: StepId) -> Result<(), DriverError> {
        self.wait_for_stream(step.stream)?;
        lock(&self.state).complete(step);
        Ok(())
    }

    /// Waits for the copies whose end could not be waited for, of any transfer. No driver call if there are
    /// none.
    pub fn settle_lost(&self) -> Result<(), DriverError> {
        for stream in [0, 1] {
            let is_known = {
                let state = lock(&self.state);
                state.lost[stream] == state.found[stream]
            };
            if !is_known {
                self.wait_for_stream(stream)?;
            }
        }
        Ok(())
    }

    /// Waits for all that is queued on a stream. No lock is held meanwhile.
    fn wait_for_stream(&self, stream: usize) -> Result<(), DriverError> {
        let lost = lock(&self.state).lost[stream];
        let waited = self.driver.synchronize_stream(self.streams[stream]);
        lock(&self.state).note_wait(stream, lost, waited.is_ok());
        waited
    }

    /// Waits for the step queued first, of any transfer.
    pub fn wait_for_capacity(&self) -> Result<(), DriverError> {
        let oldest = lock(&self.state).window.oldest();
        oldest.map_or(Ok(()), |step| self.wait(step))
    }

    /// Returns the bytes in flight, as of the last query.
    pub fn in_flight(&self) -> Bytes {
        lock(&self.state).window.in_flight()
    }
}

impl Drop for CopyQueue {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        let State { window, spare_events, .. } = &mut *state;
        let events = window.drain().chain(spare_events.drain(..));
        // Dropping cannot report errors. Queued copies still run.
        events.for_each(|event| drop(self.driver.destroy_event(*event)));
        self.streams.iter().for_each(|stream| drop(self.driver.destroy_stream(*stream)));
    }
}
