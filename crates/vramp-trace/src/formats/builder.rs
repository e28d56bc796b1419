//! Builds a trace event by event, for every reader.

use std::collections::HashMap;

use crate::{ActionId, Event, EventKind, ReadError, ReadLimits, StreamIndex, Trace};

/// Valid range of a size, for messages.
pub(crate) const SIZE_RANGE: &str = "a whole number from 0 to 2^56";

/// A trace under construction. Numbers streams and unknown actions, and limits events.
pub(crate) struct TraceBuilder {
    pub trace: Trace,
    streams: HashMap<u64, StreamIndex>,
    last_stream: Option<(u64, StreamIndex)>,
    actions: HashMap<String, ActionId>,
    events_max: u32,
}

impl TraceBuilder {
    pub fn new(limits: &ReadLimits) -> TraceBuilder {
        TraceBuilder {
            trace: Trace::default(),
            streams: HashMap::new(),
            last_stream: None,
            actions: HashMap::new(),
            events_max: limits.events,
        }
    }

    /// Returns the index of the stream with this raw handle. Consecutive events mostly share a
    /// stream.
    pub fn stream(&mut self, raw: u64) -> StreamIndex {
        if let Some((last, index)) = self.last_stream
            && last == raw
        {
            return index;
        }
        let streams = &mut self.trace.streams;
        let index = *self.streams.entry(raw).or_insert_with(|| {
            streams.push(raw);
            let index = streams.len() - 1;
            StreamIndex(u32::try_from(index).expect("a trace has fewer than 2^32 streams"))
        });
        self.last_stream = Some((raw, index));
        index
    }

    /// Returns the kind of an action without a fixed name, or `None` if there are 65,536 already.
    pub fn unknown_action(&mut self, name: &str) -> Option<EventKind> {
        if let Some(&id) = self.actions.get(name) {
            return Some(EventKind::Unknown(id));
        }
        let id = ActionId(u16::try_from(self.trace.actions.len()).ok()?);
        self.trace.actions.push(name.to_owned());
        self.actions.insert(name.to_owned(), id);
        Some(EventKind::Unknown(id))
    }

    pub fn push(&mut self, event: Event, offset: u64) -> Result<(), ReadError> {
        if self.trace.events.len() >= self.events_max as usize {
            return Err(ReadError::Limit {
                limit: "events",
                what: "events",
                allowed: u64::from(self.events_max),
                offset,
            });
        }
        self.trace.events.push(event);
        Ok(())
    }
}
