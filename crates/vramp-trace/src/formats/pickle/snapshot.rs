//! Converts the dicts of a snapshot to a trace.

use vramp_core::{Bytes, DeviceAddr};

use super::fields::{
    DICT, INTEGER, LIST, PAIR, Place, describe, key, pairs, pool_id, stream_bits, take_dict,
    unsigned,
};
use super::values::{Node, NodeId, TextId, Texts, Value, Values};
use super::write::UNKNOWN_FREE;
use crate::formats::builder::{SIZE_RANGE, TraceBuilder};
use crate::formats::memory::ENTRY;
use crate::trace::size;
use crate::{
    Event, EventKind, Frame, Label, PoolId, ReadError, ReadLimits, StackId, StreamIndex, Trace,
};

/// Maximum nesting of settings. PyTorch nests them once.
const SETTINGS_DEPTH: u32 = 4;

/// The trace so far.
pub struct Snapshot {
    pub(super) builder: TraceBuilder,
}

impl Snapshot {
    pub fn new(limits: &ReadLimits) -> Snapshot {
        Snapshot { builder: TraceBuilder::new(limits) }
    }

    // --- events ---

    /// Converts the dict of an event that is appended to `history`, and frees the dict.
    pub fn event_of_history(
        &mut self,
        values: &mut Values,
        history: NodeId,
        event: Value,
        offset: u64,
    ) -> Result<(), ReadError> {
        let Node::History { device, events } = values.node_mut(history) else {
            unreachable!("the caller checked that this node is a history");
        };
        let (device, index) = (*device, *events);
        *events = index.saturating_add(1);
        self.event(values, Place::Event { index, device }, device, event, offset)
    }

    fn event(
        &mut self,
        values: &mut Values,
        place: Place,
        device: u32,
        event: Value,
        offset: u64,
    ) -> Result<(), ReadError> {
        let fields = take_dict(values, event)
            .ok_or_else(|| place.bad("the event", Some(event), values, DICT))?;
        let event = self.event_of_fields(values, place, device, &fields, offset)?;
        let found = LabelFields::find(values, place, &fields)?;
        self.builder.push(event, &mut values.meter, offset)?;
        let (texts, meter) = values.texts_and_meter();
        self.builder.label_event(found.of(texts), meter, offset)?;
        values.recycle(fields);
        Ok(())
    }

    fn event_of_fields(
        &mut self,
        values: &mut Values,
        place: Place,
        device: u32,
        fields: &[Value],
        offset: u64,
    ) -> Result<Event, ReadError> {
        let (mut action, mut address, mut bytes, mut free) = (None, None, None, None);
        let (mut stream, mut time, mut frames) = (None, None, None);
        for (name, value) in pairs(fields) {
            match name {
                key::ACTION => action = Some(value),
                key::ADDR => address = Some(value),
                key::SIZE => bytes = Some(value),
                key::STREAM => stream = Some(value),
                key::TIME_US => time = Some(value),
                key::FRAMES => frames = Some(value),
                key::DEVICE_FREE => free = Some(value),
                _ => {}
            }
        }
        let kind = self.kind(values, place, action, offset)?;
        let about_memory =
            !matches!(kind, EventKind::Snapshot | EventKind::UserDefined | EventKind::Unknown(_));
        let required = |value: Option<Value>| value.is_some() || about_memory;

        let address = match kind {
            EventKind::Oom => match free {
                None | Some(Value::Int(UNKNOWN_FREE)) => Event::UNKNOWN_FREE,
                Some(value) => unsigned(value)
                    .and_then(size)
                    .map(|free| DeviceAddr::new(free.count()))
                    .ok_or_else(|| place.bad("device_free", free, values, SIZE_RANGE))?,
            },
            _ if required(address) => address
                .and_then(unsigned)
                .map(DeviceAddr::new)
                .ok_or_else(|| place.bad("addr", address, values, INTEGER))?,
            _ => DeviceAddr::new(0),
        };
        let size = match required(bytes) {
            true => bytes
                .and_then(unsigned)
                .and_then(size)
                .ok_or_else(|| place.bad("size", bytes, values, SIZE_RANGE))?,
            false => Bytes::ZERO,
        };
        let stream = self.stream(values, place, stream, offset)?;
        let time_us = match time {
            None => 0,
            Some(value) => {
                unsigned(value).ok_or_else(|| place.bad("time_us", time, values, INTEGER))?
            }
        };
        let stack = self.stack(values, place, frames, offset)?;
        let device = u16::try_from(device)
            .map_err(|_| ReadError::NotASnapshot { what: "it has more than 65,536 devices" })?;
        Ok(Event { kind, device, stream, address, size, time_us, stack })
    }

    fn kind(
        &mut self,
        values: &mut Values,
        place: Place,
        action: Option<Value>,
        offset: u64,
    ) -> Result<EventKind, ReadError> {
        let Some(Value::Text(name)) = action else {
            return Err(place.bad("action", action, values, "a text"));
        };
        // The first texts are the known actions.
        if let Some(kind) = EventKind::NAMED.get(name.0 as usize) {
            return Ok(*kind);
        }
        let (texts, meter) = values.texts_and_meter();
        self.builder
            .unknown_action(texts.get(name), meter, offset)?
            .ok_or(ReadError::NotASnapshot { what: "it has more than 65,536 kinds of events" })
    }

    pub(super) fn stream(
        &mut self,
        values: &mut Values,
        place: Place,
        stream: Option<Value>,
        offset: u64,
    ) -> Result<StreamIndex, ReadError> {
        let raw = match stream {
            None => 0,
            Some(value) => stream_bits(value)
                .ok_or_else(|| place.bad("stream", stream, values, "an integer"))?,
        };
        self.builder.stream(raw, &mut values.meter, offset)
    }

    // --- stacks ---

    /// Returns the id of a list of frames. A shared list is converted once.
    pub(super) fn stack(
        &mut self,
        values: &mut Values,
        place: Place,
        frames: Option<Value>,
        offset: u64,
    ) -> Result<Option<StackId>, ReadError> {
        let id = match frames {
            None | Some(Value::None) => return Ok(None),
            Some(Value::Node(id)) => id,
            Some(_) => return Err(place.bad("frames", frames, values, LIST)),
        };
        let items = match values.node_mut(id) {
            Node::Stack(stack) => return Ok(Some(*stack)),
            Node::List(items) if items.is_empty() => return Ok(None),
            Node::List(items) => std::mem::take(items),
            _ => return Err(place.bad("frames", frames, values, LIST)),
        };
        let cost = items.len() * size_of::<u32>() + ENTRY;
        values.meter.take(cost, offset)?;
        let mut keys = Vec::with_capacity(items.len());
        for &frame in &items {
            keys.push(self.frame(values, place, frame, offset)?);
        }
        values.recycle(items);
        let before = self.builder.trace.stacks.len();
        let stack = self
            .builder
            .trace
            .stacks
            .add_keys(keys.into_boxed_slice())
            .ok_or(ReadError::NotASnapshot { what: "it has more than 2^32 call stacks" })?;
        if self.builder.trace.stacks.len() == before {
            values.meter.release(cost);
        }
        *values.node_mut(id) = Node::Stack(stack);
        Ok(Some(stack))
    }

    fn frame(
        &mut self,
        values: &mut Values,
        place: Place,
        frame: Value,
        offset: u64,
    ) -> Result<u32, ReadError> {
        let bad = |values: &Values| place.bad("a frame", Some(frame), values, DICT);
        let Value::Node(id) = frame else { return Err(bad(values)) };
        if let Node::Frame(index) = values.node(id) {
            return Ok(*index);
        }
        let fields = take_dict(values, frame).ok_or_else(|| bad(values))?;
        let (mut name, mut filename, mut line) = ("", "", 0);
        for (field, value) in pairs(&fields) {
            match (field, value) {
                (key::NAME, Value::Text(text)) => name = values.text(text),
                (key::FILENAME, Value::Text(text)) => filename = values.text(text),
                (key::LINE, Value::Int(int)) => line = u32::try_from(int).unwrap_or(0),
                _ => {}
            }
        }
        let stacks = &mut self.builder.trace.stacks;
        let before = (stacks.texts.len(), stacks.frames.len());
        let cost = name.len() + filename.len() + 3 * ENTRY;
        let index = stacks
            .add_frame(Frame { name, filename, line })
            .ok_or(ReadError::NotASnapshot { what: "it has more than 2^32 frames" })?;
        values.recycle(fields);
        let stacks = &self.builder.trace.stacks;
        if (stacks.texts.len(), stacks.frames.len()) != before {
            values.meter.take(cost, offset)?;
        }
        *values.node_mut(id) = Node::Frame(index);
        Ok(index)
    }

    // --- the outermost dict ---

    /// Converts devices, settings and segments, once the pickle has ended with `root`.
    pub fn finish(mut self, values: &mut Values, root: Value) -> Result<Trace, ReadError> {
        let Value::Node(id) = root else {
            return Err(ReadError::NotASnapshot { what: "its outermost value is not a dict" });
        };
        let (mut histories, mut segments, mut settings) = (None, None, None);
        let mut annotations = None;
        match values.take(id, Node::Taken) {
            Node::Dict(items) => {
                for (name, value) in pairs(&items) {
                    match name {
                        key::DEVICE_TRACES => histories = Some(value),
                        key::SEGMENTS => segments = Some(value),
                        key::ALLOCATOR_SETTINGS => settings = Some(value),
                        key::EXTERNAL_ANNOTATIONS => annotations = Some(value),
                        _ => {}
                    }
                }
                if histories.is_none() && segments.is_none() {
                    return Err(ReadError::NotASnapshot {
                        what: "it has neither device_traces nor segments",
                    });
                }
            }
            // Before histories were recorded, a snapshot was a plain list of segments.
            Node::List(items) => {
                *values.node_mut(id) = Node::List(items);
                segments = Some(root);
            }
            _ => return Err(ReadError::NotASnapshot { what: "its outermost value is not a dict" }),
        }
        let read = self.builder.trace.events.len() as u64;
        let found = match histories {
            Some(histories) => self.histories(values, histories)?,
            None => 0,
        };
        // Events may be in a list that the outermost dict does not contain.
        if found != read {
            return Err(ReadError::NotASnapshot { what: "it has events outside device_traces" });
        }
        if let Some(segments) = segments {
            self.segments(values, segments)?;
        }
        if let Some(settings) = settings {
            self.settings(values, settings, "", SETTINGS_DEPTH)?;
        }
        if let Some(annotations) = annotations {
            self.annotations(values, annotations)?;
        }
        Ok(self.builder.trace)
    }

    /// Checks that each history is at the index of its device, and reads those that were not
    /// recognised as histories while they were built. Returns the number of events in the others.
    fn histories(&mut self, values: &mut Values, histories: Value) -> Result<u64, ReadError> {
        let what = "device_traces is not a list of histories";
        let Value::Node(id) = histories else { return Err(ReadError::NotASnapshot { what }) };
        let (Node::Histories(items) | Node::List(items)) = values.take(id, Node::Taken) else {
            return Err(ReadError::NotASnapshot { what });
        };
        let mut found = 0;
        for (index, &item) in items.iter().enumerate() {
            let Value::Node(id) = item else { return Err(ReadError::NotASnapshot { what }) };
            let place = u32::try_from(index).map_err(|_| ReadError::NotASnapshot { what })?;
            match values.take(id, Node::Taken) {
                Node::History { device, events } if device == place || events == 0 => {
                    found += u64::from(events);
                    *values.node_mut(id) = Node::History { device, events };
                }
                Node::History { .. } => {
                    let what = "two devices share one history";
                    return Err(ReadError::NotASnapshot { what });
                }
                Node::List(events) => {
                    for (index, &event) in (0..).zip(&events) {
                        let at = Place::Event { index, device: place };
                        self.event(values, at, place, event, 0)?;
                    }
                    let events = Node::History { device: place, events: 0 };
                    *values.node_mut(id) = events;
                }
                _ => return Err(ReadError::NotASnapshot { what }),
            }
            self.builder.trace.device_count = place + 1;
        }
        // Histories are in the order of their devices, unless the pickle built them separately.
        self.builder.sort_by_device(&mut values.meter)?;
        Ok(found)
    }

    /// Converts settings to texts. Names of nested settings are joined with a dot.
    fn settings(
        &mut self,
        values: &mut Values,
        settings: Value,
        prefix: &str,
        depth: u32,
    ) -> Result<(), ReadError> {
        let what = "allocator_settings is not a dict, or nested too deeply";
        let fields = take_dict(values, settings)
            .filter(|_| depth > 0)
            .ok_or(ReadError::NotASnapshot { what })?;
        for (name, value) in pairs(&fields) {
            values.meter.take(prefix.len() + values.text(name).len() + ENTRY, 0)?;
            let name = format!("{prefix}{}", values.text(name));
            let text = match value {
                Value::Node(id) if matches!(values.node(id), Node::Dict(_)) => {
                    self.settings(values, value, &format!("{name}."), depth - 1)?;
                    continue;
                }
                Value::Text(id) => {
                    values.meter.take(values.text(id).len(), 0)?;
                    values.text(id).to_owned()
                }
                other => describe(Some(other), values),
            };
            self.builder.trace.allocator_settings.push((name, text));
        }
        Ok(())
    }
}

/// The labels in a dict, not yet as texts.
pub(super) struct LabelFields {
    pool: PoolId,
    metadata: Option<TextId>,
    compile_context: Option<TextId>,
    category: Option<TextId>,
}

impl LabelFields {
    pub fn find(values: &Values, place: Place, fields: &[Value]) -> Result<LabelFields, ReadError> {
        let mut found = LabelFields {
            pool: PoolId::default(),
            metadata: None,
            compile_context: None,
            category: None,
        };
        for (name, value) in pairs(fields) {
            match (name, value) {
                (key::USER_METADATA, Value::Text(text)) => found.metadata = Some(text),
                (key::COMPILE_CONTEXT, Value::Text(text)) => {
                    found.compile_context = Some(text).filter(|&text| text != key::NO_CONTEXT);
                }
                (key::CATEGORY, Value::Text(text)) => found.category = Some(text),
                (key::POOL_ID | key::SEGMENT_POOL_ID, value) => {
                    let field = if name == key::POOL_ID { "pool_id" } else { "segment_pool_id" };
                    found.pool = pool_id(values, value)
                        .ok_or_else(|| place.bad(field, Some(value), values, PAIR))?;
                }
                _ => {}
            }
        }
        Ok(found)
    }

    pub fn of<'a>(&self, texts: &'a Texts) -> Label<'a> {
        let text = |id: Option<TextId>| id.map_or("", |id| texts.get(id));
        Label {
            pool: self.pool,
            metadata: text(self.metadata),
            compile_context: text(self.compile_context),
            category: text(self.category),
        }
    }
}
