//! Builds a trace event by event, for every reader.

use std::collections::HashMap;

use crate::formats::memory::{ENTRY, Meter};
use crate::{ActionId, Event, EventKind, Label, Labels, ReadError, ReadLimits, StreamIndex, Trace};

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
    pub fn stream(
        &mut self,
        raw: u64,
        meter: &mut Meter,
        offset: u64,
    ) -> Result<StreamIndex, ReadError> {
        if let Some((last, index)) = self.last_stream
            && last == raw
        {
            return Ok(index);
        }
        let index = match self.streams.get(&raw) {
            Some(&index) => index,
            None => {
                meter.take(ENTRY, offset)?;
                let index = self.trace.streams.len();
                let index = u32::try_from(index).expect("a trace has fewer than 2^32 streams");
                self.trace.streams.push(raw);
                self.streams.insert(raw, StreamIndex(index));
                StreamIndex(index)
            }
        };
        self.last_stream = Some((raw, index));
        Ok(index)
    }

    /// Returns the kind of an action without a fixed name, or `None` if there are 65,536 already.
    pub fn unknown_action(
        &mut self,
        name: &str,
        meter: &mut Meter,
        offset: u64,
    ) -> Result<Option<EventKind>, ReadError> {
        if let Some(&id) = self.actions.get(name) {
            return Ok(Some(EventKind::Unknown(id)));
        }
        let Ok(id) = u16::try_from(self.trace.actions.len()) else { return Ok(None) };
        meter.take(2 * (name.len() + ENTRY), offset)?;
        self.trace.actions.push(name.to_owned());
        self.actions.insert(name.to_owned(), ActionId(id));
        Ok(Some(EventKind::Unknown(ActionId(id))))
    }

    pub fn push(&mut self, event: Event, meter: &mut Meter, offset: u64) -> Result<(), ReadError> {
        if self.trace.events.len() >= self.events_max as usize {
            return Err(ReadError::Limit {
                limit: "events",
                what: "events",
                allowed: u64::from(self.events_max),
                offset,
            });
        }
        meter.push(&mut self.trace.events, event, offset)
    }

    /// Groups the events by device. Most readers find them grouped.
    pub fn sort_by_device(&mut self, meter: &mut Meter) -> Result<(), ReadError> {
        let Trace { events, labels, .. } = &mut self.trace;
        if events.is_sorted_by_key(|event| event.device) {
            return Ok(());
        }
        // Memory for sorting: half of the events, and their order.
        let cost = events.len() * (size_of::<Event>() / 2 + 3 * size_of::<u32>());
        meter.take(cost, 0)?;
        let mut order: Vec<u32> = (0..).take(events.len()).collect();
        order.sort_by_key(|&index| events[index as usize].device);
        labels.reorder_events(&order);
        drop(order);
        events.sort_by_key(|event| event.device);
        meter.release(cost);
        Ok(())
    }

    /// Sets the labels of the last event.
    pub fn label_event(
        &mut self,
        label: Label<'_>,
        meter: &mut Meter,
        offset: u64,
    ) -> Result<(), ReadError> {
        if label == Label::default() {
            return Ok(());
        }
        let labels = &mut self.trace.labels;
        meter.reserve(&mut labels.events.0, 1, offset)?;
        charge_label(labels, label, meter, offset)?;
        labels.label_event(self.trace.events.len() - 1, label);
        Ok(())
    }
}

/// Counts the texts and the combination of a label, if they are new.
pub(crate) fn charge_label(
    labels: &Labels,
    label: Label<'_>,
    meter: &mut Meter,
    offset: u64,
) -> Result<(), ReadError> {
    let texts = [label.metadata, label.compile_context, label.category];
    let is_new = |text: &&str| !text.is_empty() && !labels.texts.contains(*text);
    let new: usize = texts.iter().filter(|text| is_new(text)).map(|text| text.len() + ENTRY).sum();
    let combination = if labels.has(label) { 0 } else { ENTRY };
    meter.take(new + combination, offset)
}
