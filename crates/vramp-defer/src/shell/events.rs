//! Work that uses buffers: events on streams, and the tokens by which the planner names them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::planner::{StreamKey, UseToken};
use vramp_alloc::{Allocator, Driver, DriverError};
use vramp_driver::{Event, Stream};

/// Recorded events of every stream, oldest first, and unused events for reuse.
pub(super) struct Events {
    allocator: Arc<Allocator>,
    driver: Arc<dyn Driver>,
    streams: BTreeMap<StreamKey, Open>,
    stock: Vec<Event>,
}

#[derive(Default)]
struct Open {
    last: u64,
    events: VecDeque<(u64, Event)>,
}

/// Returns the planner's key of a stream.
pub(super) fn key(stream: Stream) -> StreamKey {
    StreamKey(stream.number())
}

impl Events {
    pub fn new(allocator: &Arc<Allocator>) -> Events {
        let (allocator, driver) = (Arc::clone(allocator), Arc::clone(allocator.driver()));
        Events { allocator, driver, streams: BTreeMap::new(), stock: Vec::new() }
    }

    /// Records an event on `stream`. Returns a token for all that is queued by now. At most two
    /// driver calls.
    pub fn note(&mut self, stream: Stream) -> Result<UseToken, DriverError> {
        let event = match self.stock.pop() {
            Some(event) => event,
            None => self.driver.create_event()?,
        };
        if let Err(error) = self.driver.record(event, stream) {
            self.stock.push(event);
            return Err(error);
        }
        let open = self.streams.entry(key(stream)).or_default();
        open.last += 1;
        open.events.push_back((open.last, event));
        Ok(UseToken { stream: key(stream), number: open.last })
    }

    /// Records an event, or, if that fails, waits for the stream and returns `None`. A device that
    /// can do neither runs no more work.
    pub fn note_or_wait(&mut self, stream: Stream) -> Option<UseToken> {
        let noted = self.note(stream);
        if noted.is_err() {
            let _ = self.driver.synchronize_stream(stream);
        }
        noted.ok()
    }

    /// Returns true if work queued on a stream becomes part of a graph.
    pub fn captures(&self, stream: Stream) -> bool {
        self.driver.is_capturing(stream).unwrap_or(false)
    }

    /// Returns the time of the device's clock.
    pub fn now_ns(&self) -> u64 {
        self.driver.now_ns()
    }

    /// Returns the event of a token; `None` once its work is known to be complete.
    pub fn of(&self, token: UseToken) -> Option<Event> {
        let open = self.streams.get(&token.stream)?;
        // The token's own event: a later one would make the waiter wait for later work too.
        open.events.iter().find(|(number, _)| *number == token.number).map(|&(_, event)| event)
    }

    /// Returns true if the work is complete. If that is not known yet, one query and one call for
    /// each stream.
    pub fn is_over(&self, token: UseToken) -> bool {
        let Some(event) = self.of(token) else { return true };
        // Work that cannot be queried counts as in flight.
        !self.allocator.any_captures().unwrap_or(true) && self.driver.query(event).unwrap_or(false)
    }

    /// Returns the last event of each stream with work in flight.
    pub fn last(&self) -> impl Iterator<Item = Event> {
        self.streams.values().filter_map(|open| open.events.back().map(|&(_, event)| event))
    }

    /// Returns the work of each stream that completed since the last call, and whether all queries
    /// succeeded. While a stream captures there are none.
    ///
    /// One query for a stream whose work is all complete; for another one, a query for each event
    /// up to the first that is not.
    pub fn poll(&mut self) -> (Vec<UseToken>, Result<(), DriverError>) {
        let mut over = Vec::new();
        if self.last().next().is_none() {
            return (over, Ok(()));
        }
        let asked = match self.allocator.any_captures() {
            Ok(true) => Ok(()),
            Ok(false) => self.ask(&mut over),
            Err(error) => Err(error),
        };
        (over, asked)
    }

    fn ask(&mut self, over: &mut Vec<UseToken>) -> Result<(), DriverError> {
        let Events { driver, streams, stock, .. } = self;
        for (&stream, open) in streams.iter_mut() {
            let Some(&(last, event)) = open.events.back() else { continue };
            if driver.query(event)? {
                stock.extend(open.events.drain(..).map(|(_, event)| event));
                over.push(UseToken { stream, number: last });
                continue;
            }
            let mut asked = Ok(true);
            while let Some(&(number, event)) = open.events.front() {
                asked = driver.query(event);
                if !matches!(asked, Ok(true)) {
                    break;
                }
                stock.push(event);
                open.events.pop_front();
                match over.last_mut() {
                    Some(token) if token.stream == stream => token.number = number,
                    _ => over.push(UseToken { stream, number }),
                }
            }
            asked?;
        }
        Ok(())
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let open = std::mem::take(&mut self.streams).into_values().flat_map(|open| open.events);
        for event in self.stock.drain(..).chain(open.map(|(_, event)| event)) {
            // No caller is left to report to. The device destroys what stays.
            let _ = self.driver.destroy_event(event);
        }
    }
}
