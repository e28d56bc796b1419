//! Work that uses buffers: events on streams, and what the core calls them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use vramp::{Driver, DriverError};
use vramp_core::defer::{StreamKey, UseToken};
use vramp_driver::{Event, Stream};

/// Recorded events of every stream, oldest first, and a stock of unused ones.
pub(super) struct Events {
    driver: Arc<dyn Driver>,
    streams: BTreeMap<StreamKey, Open>,
    stock: Vec<Event>,
}

#[derive(Default)]
struct Open {
    last: u64,
    events: VecDeque<(u64, Event)>,
}

/// What the core calls a stream.
pub(super) fn key(stream: Stream) -> StreamKey {
    StreamKey(stream.number())
}

impl Events {
    pub fn new(driver: &Arc<dyn Driver>) -> Events {
        Events { driver: Arc::clone(driver), streams: BTreeMap::new(), stock: Vec::new() }
    }

    /// A name for all that is queued on `stream` by now. Two driver calls at most.
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

    /// The event that tells when the work is over; `None` once that is known.
    pub fn of(&self, token: UseToken) -> Option<Event> {
        let open = self.streams.get(&token.stream)?;
        open.events.iter().find(|(number, _)| *number >= token.number).map(|&(_, event)| event)
    }

    /// The work of each stream that is over and was not known to be. A query for each stream with
    /// work that was done with all of it; one for each event up to the first open one else.
    pub fn poll(&mut self) -> Result<Vec<UseToken>, DriverError> {
        let Events { driver, streams, stock } = self;
        let mut over = Vec::new();
        for (&stream, open) in streams.iter_mut() {
            let Some(&(last, event)) = open.events.back() else { continue };
            if driver.query(event)? {
                stock.extend(open.events.drain(..).map(|(_, event)| event));
                over.push(UseToken { stream, number: last });
                continue;
            }
            let mut reached = None;
            while let Some(&(number, event)) = open.events.front() {
                if !driver.query(event)? {
                    break;
                }
                stock.push(event);
                open.events.pop_front();
                reached = Some(number);
            }
            over.extend(reached.map(|number| UseToken { stream, number }));
        }
        Ok(over)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let open = std::mem::take(&mut self.streams).into_values().flat_map(|open| open.events);
        for event in self.stock.drain(..).chain(open.map(|(_, event)| event)) {
            // Nobody is left to tell; the device ends what stays.
            let _ = self.driver.destroy_event(event);
        }
    }
}
