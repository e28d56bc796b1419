//! One direction of a mover: two streams, and what is in flight on them.
//!
//! A step is a few copies on one of the streams with an event behind them; steps take the streams
//! in turns. Each stream counts its steps, so a [`Ticket`] is a stream and a number, and whoever asks
//! about one step learns about all before it. So nobody has to ask for room to be found: a transfer
//! that its owner left alone holds nobody up.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;
use vramp_alloc::{Driver, DriverError};
use vramp_core::{Bytes, DeviceAddr};
use vramp_driver::{DeviceCopy, Event, HostSlice, Stream};

use crate::sync::{Mutex, lock};

/// One copy.
#[derive(Clone, Copy, Debug)]
pub(super) enum Piece {
    ToHost { from: DeviceAddr, to: HostSlice },
    ToDevice { from: HostSlice, to: DeviceAddr },
    Within(DeviceCopy),
}

impl Piece {
    fn len(&self) -> Bytes {
        match self {
            Piece::ToHost { to: slice, .. } | Piece::ToDevice { from: slice, .. } => slice.len,
            Piece::Within(copy) => copy.len,
        }
    }

    fn queue(&self, driver: &dyn Driver, stream: Stream) -> Result<(), DriverError> {
        match *self {
            Piece::ToHost { from, to } => driver.copy_to_host(stream, from, to),
            Piece::ToDevice { from, to } => driver.copy_to_device(stream, from, to),
            Piece::Within(copy) => driver.copy(stream, copy),
        }
    }
}

/// The copies of one step: one for each run of blocks.
pub(super) type Pieces = SmallVec<[Piece; 4]>;

/// A step that was queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    stream: usize,
    position: u64,
}

/// A step that was not queued, or not whole.
#[derive(Debug)]
pub(super) struct LaneError {
    pub error: DriverError,
    /// Nothing of the step is in flight.
    pub settled: bool,
}

/// Steps behind which one event was recorded.
struct Pending {
    event: Arc<Event>,
    bytes: Bytes,
    /// The order over both streams.
    number: u64,
}

#[derive(Default)]
struct Queue {
    done: u64,
    pending: VecDeque<Pending>,
}

impl Queue {
    fn end(&self) -> u64 {
        self.done + self.pending.len() as u64
    }

    /// The event behind a step; `None` if the step is known to be done.
    fn event(&self, position: u64) -> Option<&Arc<Event>> {
        let index = position.checked_sub(self.done + 1)?;
        self.pending.get(index as usize).map(|pending| &pending.event)
    }
}

#[derive(Default)]
struct State {
    queues: [Queue; 2],
    /// Events that nothing waits for, unless a thread still does; see [`State::unused`].
    stock: Vec<Arc<Event>>,
    in_flight: Bytes,
    steps: u64,
}

impl State {
    /// An event to record. One that another thread is about to wait for is left alone: it would
    /// wait for more than it has to.
    fn unused(&mut self, driver: &dyn Driver) -> Result<Arc<Event>, DriverError> {
        match self.stock.iter().position(|event| Arc::strong_count(event) == 1) {
            Some(at) => Ok(self.stock.swap_remove(at)),
            None => driver.create_event().map(Arc::new),
        }
    }

    /// Takes note that a stream is done up to `position`.
    fn finish(&mut self, Ticket { stream, position }: Ticket) {
        let queue = &mut self.queues[stream];
        while queue.done < position
            && let Some(pending) = queue.pending.pop_front()
        {
            queue.done += 1;
            self.in_flight -= pending.bytes;
            self.stock.push(pending.event);
        }
    }

    /// Takes note of what is done by now.
    fn sweep(&mut self, driver: &dyn Driver) -> Result<(), DriverError> {
        for stream in 0..self.queues.len() {
            while let Some(first) = self.queues[stream].pending.front() {
                if !driver.query(*first.event)? {
                    break;
                }
                let position = self.queues[stream].done + 1;
                self.finish(Ticket { stream, position });
            }
        }
        Ok(())
    }
}

pub(super) struct Lane {
    driver: Arc<dyn Driver>,
    streams: [Stream; 2],
    /// How much may be in flight; one step always may.
    most: Bytes,
    state: Mutex<State>,
}

impl Lane {
    pub fn new(driver: &Arc<dyn Driver>, most: Bytes) -> Result<Lane, DriverError> {
        let first = driver.create_stream()?;
        let second = driver.create_stream().inspect_err(|_| {
            // The first error is the one to tell.
            let _ = driver.destroy_stream(first);
        })?;
        let (driver, state) = (Arc::clone(driver), Mutex::default());
        Ok(Lane { driver, streams: [first, second], most, state })
    }

    pub fn streams(&self) -> [Stream; 2] {
        self.streams
    }

    /// Lets all later steps come behind what is queued on `stream` by now.
    pub fn order_behind_stream(&self, stream: Stream) -> Result<(), DriverError> {
        let mut state = lock(&self.state);
        let event = state.unused(&*self.driver)?;
        let ordered = self.driver.record(*event, stream);
        let ordered = ordered.and_then(|()| self.order_behind_event(*event));
        // Waiting streams remember the record, not the event.
        state.stock.push(event);
        ordered
    }

    /// Lets all later steps come behind an event's last record.
    pub fn order_behind_event(&self, event: Event) -> Result<(), DriverError> {
        self.streams.iter().try_for_each(|stream| self.driver.wait(*stream, event))
    }

    /// Lets what is queued on `stream` later come behind these steps.
    pub fn order_before(&self, stream: Stream, steps: &[Ticket]) -> Result<(), DriverError> {
        let state = lock(&self.state);
        steps.iter().try_for_each(|step| match state.queues[step.stream].event(step.position) {
            Some(event) => self.driver.wait(stream, **event),
            None => Ok(()),
        })
    }

    /// Queues a step. `None` if too much is in flight.
    pub fn queue(&self, step: &[Piece]) -> Result<Option<Ticket>, LaneError> {
        let refused = |error| LaneError { error, settled: true };
        let mut state = lock(&self.state);
        let bytes = step.iter().map(Piece::len).sum();
        if !self.has_room(&state, bytes) {
            state.sweep(&*self.driver).map_err(refused)?;
            if !self.has_room(&state, bytes) {
                return Ok(None);
            }
        }
        let stream = (state.steps % 2) as usize;
        self.queue_on(&mut state, stream, step).map(Some)
    }

    /// Queues steps that belong together, whatever is in flight. One event for each stream.
    pub fn queue_all(&self, steps: &[Pieces]) -> Result<SmallVec<[Ticket; 2]>, LaneError> {
        let mut state = lock(&self.state);
        let begin = state.steps as usize;
        let mut tickets = SmallVec::new();
        let mut settled = true;
        for turn in 0..steps.len().min(2) {
            let own: Pieces = steps.iter().skip(turn).step_by(2).flatten().copied().collect();
            match self.queue_on(&mut state, (begin + turn) % 2, &own) {
                Ok(ticket) => tickets.push(ticket),
                Err(LaneError { error, settled: own }) => {
                    drop(state);
                    // What was queued on the other stream before.
                    for ticket in tickets {
                        settled &= self.wait(ticket).or_else(|_| self.settle(ticket)).is_ok();
                    }
                    return Err(LaneError { error, settled: settled && own });
                }
            }
        }
        Ok(tickets)
    }

    fn has_room(&self, state: &State, bytes: Bytes) -> bool {
        state.in_flight.is_zero() || state.in_flight + bytes <= self.most
    }

    fn queue_on(
        &self,
        state: &mut State,
        stream: usize,
        step: &[Piece],
    ) -> Result<Ticket, LaneError> {
        let (driver, on) = (&*self.driver, self.streams[stream]);
        let event = state.unused(driver).map_err(|error| LaneError { error, settled: true })?;
        let queued = step.iter().try_for_each(|piece| piece.queue(driver, on));
        if let Err(error) = queued.and_then(|()| driver.record(*event, on)) {
            state.stock.push(event);
            // A part of the step may be under way, and nothing is recorded behind it.
            let settled = driver.synchronize_stream(on);
            if settled.is_ok() {
                let position = state.queues[stream].end();
                state.finish(Ticket { stream, position });
            }
            return Err(LaneError { error, settled: settled.is_ok() });
        }
        let bytes = step.iter().map(Piece::len).sum();
        state.in_flight += bytes;
        state.steps += 1;
        let number = state.steps;
        let queue = &mut state.queues[stream];
        queue.pending.push_back(Pending { event, bytes, number });
        Ok(Ticket { stream, position: queue.end() })
    }

    /// True if the step is done. Never blocks.
    pub fn is_done(&self, step: Ticket) -> Result<bool, DriverError> {
        let mut state = lock(&self.state);
        if state.queues[step.stream].event(step.position).is_some() {
            state.sweep(&*self.driver)?;
        }
        Ok(state.queues[step.stream].event(step.position).is_none())
    }

    /// Waits for a step, with no lock held.
    pub fn wait(&self, step: Ticket) -> Result<(), DriverError> {
        let event = lock(&self.state).queues[step.stream].event(step.position).map(Arc::clone);
        let Some(event) = event else { return Ok(()) };
        self.driver.synchronize_event(*event)?;
        lock(&self.state).finish(step);
        Ok(())
    }

    /// Waits for a step by its stream, for when its event does not tell.
    pub fn settle(&self, step: Ticket) -> Result<(), DriverError> {
        self.driver.synchronize_stream(self.streams[step.stream])?;
        lock(&self.state).finish(step);
        Ok(())
    }

    /// Waits for the step that was queued first, whosever it is.
    pub fn wait_for_room(&self) -> Result<(), DriverError> {
        let oldest = {
            let state = lock(&self.state);
            let first = |(stream, queue): (usize, &Queue)| {
                let number = queue.pending.front()?.number;
                Some((number, Ticket { stream, position: queue.done + 1 }))
            };
            state.queues.iter().enumerate().filter_map(first).min_by_key(|(number, _)| *number)
        };
        oldest.map_or(Ok(()), |(_, step)| self.wait(step))
    }

    /// How much is in flight, as far as is known.
    pub fn in_flight(&self) -> Bytes {
        lock(&self.state).in_flight
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        let State { queues, stock, .. } = &mut *state;
        let pending = queues.iter_mut().flat_map(|queue| queue.pending.drain(..));
        let events = pending.map(|pending| pending.event).chain(stock.drain(..));
        // Nobody is left to tell. Work that was queued still runs.
        events.for_each(|event| drop(self.driver.destroy_event(*event)));
        self.streams.iter().for_each(|stream| drop(self.driver.destroy_stream(*stream)));
    }
}
