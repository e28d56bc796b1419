//! Writes a trace as a PyTorch memory snapshot.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

use indexmap::IndexMap;
use vramp_core::{Bytes, DeviceAddr};

use super::pickler::{Memo, Pickler};
use crate::formats::validate::validate;
use crate::{
    Annotation, Block, BlockState, Event, EventKind, Label, PoolId, Segment, StackId, StreamIndex,
    Trace,
};

/// Written for unknown free memory of the device, because PyTorch's viewer needs a number.
pub(super) const UNKNOWN_FREE: i64 = -1;

impl Trace {
    /// Writes the trace as a PyTorch memory snapshot, for `torch/cuda/_memory_viz.py` and the
    /// viewer at pytorch.org/memory_viz: a pickle of protocol 4, uncompressed. Reading it returns
    /// an equal trace except for the name, unused stacks, and the following:
    ///
    /// - Gaps between the blocks of a segment become inactive blocks, because the viewer assumes
    ///   that each block begins at the end of the one before.
    /// - A block whose requested size is unknown gets its size.
    ///
    /// One pass over the trace. Needs a few bytes for each text, frame and stack. Writes about 45
    /// bytes per event in small parts: use a [`std::io::BufWriter`].
    ///
    /// Without segments the viewer shows no state of the allocator: see [`Trace::infer_segments`].
    ///
    /// # Errors
    /// Errors of `out`; [`io::ErrorKind::InvalidInput`] if the index of a device, stream, action or
    /// stack is out of range, a size exceeds 64 PiB, or the blocks of a segment overlap or reach
    /// beyond it.
    pub fn write_snapshot(&self, out: impl Write) -> io::Result<()> {
        validate(self)?;
        let pickler = Pickler::new(out)?;
        let (frames, stacks) = (self.stacks.frames.len(), self.stacks.len());
        let mut writer = Writer {
            trace: self,
            pickler,
            frames: vec![None; frames],
            stacks: vec![None; stacks],
            no_stack: None,
            pools: HashMap::new(),
        };
        writer.snapshot()?;
        writer.pickler.finish()
    }
}

struct Writer<'a, W> {
    trace: &'a Trace,
    pickler: Pickler<'a, W>,
    frames: Vec<Option<Memo>>,
    stacks: Vec<Option<Memo>>,
    no_stack: Option<Memo>,
    pools: HashMap<PoolId, Memo>,
}

impl<'a, W: Write> Writer<'a, W> {
    /// Events come first. Their keys are then among the first 256 memo entries, and a reference
    /// takes two bytes instead of five.
    fn snapshot(&mut self) -> io::Result<()> {
        self.pickler.begin_dict()?;
        self.pickler.text("device_traces")?;
        self.histories()?;
        self.pickler.text("segments")?;
        self.pickler.empty_list()?;
        for (index, segment) in self.trace.segments.iter().enumerate() {
            self.segment(index, segment)?;
            self.pickler.append()?;
        }
        self.pickler.text("allocator_settings")?;
        self.settings()?;
        if !self.trace.annotations.is_empty() {
            self.pickler.text("external_annotations")?;
            self.annotations()?;
        }
        self.pickler.end_dict()
    }

    // --- events ---

    fn histories(&mut self) -> io::Result<()> {
        let trace = self.trace;
        let order = by_device(&trace.events);
        let mut events = (0..trace.events.len())
            .map(|place| order.as_ref().map_or(place, |order| order[place] as usize))
            .peekable();
        self.pickler.empty_list()?;
        for device in 0..trace.device_count {
            self.pickler.empty_list()?;
            let own = |&index: &usize| u32::from(trace.events[index].device) == device;
            while let Some(index) = events.next_if(own) {
                self.event(&trace.events[index], trace.labels.of_event(index))?;
                self.pickler.append()?;
            }
            self.pickler.append()?;
        }
        Ok(())
    }

    fn event(&mut self, event: &Event, label: Label<'a>) -> io::Result<()> {
        self.pickler.begin_dict()?;
        self.pickler.text("action")?;
        self.pickler.text(self.trace.action_name(event.kind))?;
        if event.kind == EventKind::Oom {
            self.pickler.text("device_free")?;
            match event.device_free() {
                Some(free) => self.pickler.unsigned(free.count())?,
                None => self.pickler.signed(UNKNOWN_FREE)?,
            }
        } else {
            self.number("addr", event.address.number())?;
        }
        self.number("size", event.size.count())?;
        self.stream(event.stream)?;
        self.number("time_us", event.time_us)?;
        self.label(label)?;
        self.frames(event.stack)?;
        self.pickler.end_dict()
    }

    /// Writes the labels that differ from the default.
    fn label(&mut self, label: Label<'a>) -> io::Result<()> {
        if label.pool != PoolId::default() {
            self.pool("pool_id", label.pool)?;
        }
        for (key, text) in [
            ("user_metadata", label.metadata),
            ("compile_context", label.compile_context),
            ("category", label.category),
        ] {
            if !text.is_empty() {
                self.pickler.text(key)?;
                self.pickler.text(text)?;
            }
        }
        Ok(())
    }

    // --- annotations ---

    fn annotations(&mut self) -> io::Result<()> {
        let trace = self.trace;
        self.pickler.empty_list()?;
        for Annotation { stage, name, device, time_us } in &trace.annotations {
            self.pickler.begin_dict()?;
            self.pickler.text("stage")?;
            self.pickler.text(stage.name())?;
            self.pickler.text("name")?;
            self.pickler.text(name)?;
            self.pickler.text("device")?;
            self.pickler.signed(device.map_or(-1, i64::from))?;
            self.number("time_us", *time_us)?;
            self.pickler.end_dict()?;
            self.pickler.append()?;
        }
        Ok(())
    }

    // --- segments ---

    fn segment(&mut self, index: usize, segment: &'a Segment) -> io::Result<()> {
        let held = |block: &&Block| block.state != BlockState::Inactive;
        let allocated = segment.blocks.iter().filter(|block| block.state == BlockState::Active);
        self.pickler.begin_dict()?;
        self.number("device", u64::from(segment.device))?;
        self.number("address", segment.address.number())?;
        self.number("total_size", segment.total_size.count())?;
        self.number("allocated_size", sum(allocated.map(|block| block.size.count())))?;
        let active = segment.blocks.iter().filter(held).map(|block| block.size.count());
        self.number("active_size", sum(active))?;
        self.number("requested_size", sum(segment.blocks.iter().filter(held).map(requested)))?;
        self.stream(segment.stream)?;
        self.pickler.text("segment_type")?;
        self.pickler.text(&segment.segment_type)?;
        let label = self.trace.labels.of_segment(index);
        self.pool("segment_pool_id", label.pool)?;
        self.label(Label { pool: PoolId::default(), ..label })?;
        self.pickler.text("is_expandable")?;
        self.pickler.bool(segment.is_expandable)?;
        self.frames(segment.stack)?;
        self.pickler.text("blocks")?;
        self.blocks(index, segment)?;
        self.pickler.end_dict()
    }

    /// Writes the blocks, and inactive blocks for the gaps.
    fn blocks(&mut self, index: usize, segment: &'a Segment) -> io::Result<()> {
        let beyond = || {
            let what = format!(
                "segment {index} cannot be written: its blocks overlap, are out of order or reach \
                 beyond it"
            );
            io::Error::new(io::ErrorKind::InvalidInput, what)
        };
        let end = segment.address.checked_add(segment.total_size).ok_or_else(beyond)?;
        let mut next = segment.address;
        self.pickler.empty_list()?;
        for (number, block) in segment.blocks.iter().enumerate() {
            self.gap(next, block.address.checked_offset_from(next).ok_or_else(beyond)?)?;
            next = block.address.checked_add(block.size).ok_or_else(beyond)?;
            self.block(block, self.trace.labels.of_block(index, number))?;
        }
        self.gap(next, end.checked_offset_from(next).ok_or_else(beyond)?)
    }

    fn gap(&mut self, address: DeviceAddr, size: Bytes) -> io::Result<()> {
        if size.is_zero() {
            return Ok(());
        }
        let requested_size = Some(Bytes::ZERO);
        let state = BlockState::Inactive;
        self.block(&Block { address, size, requested_size, state, stack: None }, Label::default())
    }

    fn block(&mut self, block: &Block, label: Label<'a>) -> io::Result<()> {
        self.pickler.begin_dict()?;
        self.number("address", block.address.number())?;
        self.number("size", block.size.count())?;
        self.number("requested_size", requested(block))?;
        self.pickler.text("state")?;
        // PyTorch's writer and viewer use active_pending_free; its documentation says
        // active_awaiting_free.
        self.pickler.text(match block.state {
            BlockState::Active => "active_allocated",
            BlockState::PendingFree => "active_pending_free",
            BlockState::Inactive => "inactive",
        })?;
        self.label(label)?;
        self.frames(block.stack)?;
        self.pickler.end_dict()?;
        self.pickler.append()
    }

    fn pool(&mut self, key: &'static str, pool: PoolId) -> io::Result<()> {
        self.pickler.text(key)?;
        if let Some(&memo) = self.pools.get(&pool) {
            return self.pickler.get(memo);
        }
        self.pickler.signed(pool.0)?;
        self.pickler.signed(pool.1)?;
        self.pickler.pair()?;
        let memo = self.pickler.memoize()?;
        self.pools.insert(pool, memo);
        Ok(())
    }

    // --- settings ---

    /// Names with a dot become nested dicts, unless another setting has the name before the dot.
    fn settings(&mut self) -> io::Result<()> {
        let settings = &self.trace.allocator_settings;
        let plain: HashSet<&str> = settings.iter().map(|(name, _)| &name[..]).collect();
        let mut groups: IndexMap<&str, Vec<(&str, &str)>> = IndexMap::new();
        for (name, value) in settings {
            let (group, key) = match name.split_once('.') {
                Some((group, key)) if !plain.contains(group) => (group, key),
                _ => (&name[..], ""),
            };
            groups.entry(group).or_default().push((key, value));
        }
        if groups.is_empty() {
            return self.pickler.empty_dict();
        }
        self.pickler.begin_dict()?;
        for (name, values) in groups {
            self.pickler.text(name)?;
            if plain.contains(name) {
                // For a duplicate key Python keeps the last value.
                let last = values.last().map_or("", |(_, value)| value);
                self.setting(last)?;
                continue;
            }
            self.pickler.begin_dict()?;
            for (key, value) in values {
                self.pickler.text(key)?;
                self.setting(value)?;
            }
            self.pickler.end_dict()?;
        }
        self.pickler.end_dict()
    }

    /// Writes a value as the type whose text is `value`.
    fn setting(&mut self, value: &'a str) -> io::Result<()> {
        match (value, value.parse::<i64>(), value.parse::<f64>()) {
            ("True" | "False", ..) => self.pickler.bool(value == "True"),
            (_, Ok(int), _) if int.to_string() == value => self.pickler.signed(int),
            (_, _, Ok(float)) if float.is_finite() && float.to_string() == value => {
                self.pickler.float(float)
            }
            _ => self.pickler.text(value),
        }
    }

    // --- common fields ---

    fn number(&mut self, key: &'static str, value: u64) -> io::Result<()> {
        self.pickler.text(key)?;
        self.pickler.unsigned(value)
    }

    /// PyTorch writes a stream, which is a pointer, as a signed integer.
    fn stream(&mut self, stream: StreamIndex) -> io::Result<()> {
        self.pickler.text("stream")?;
        let raw = self.trace.raw_stream(stream).expect("the trace was checked");
        self.pickler.signed(raw.cast_signed())
    }

    fn frames(&mut self, stack: Option<StackId>) -> io::Result<()> {
        self.pickler.text("frames")?;
        let known = match stack {
            Some(stack) => self.stacks[stack.index()],
            None => self.no_stack,
        };
        if let Some(memo) = known {
            return self.pickler.get(memo);
        }
        self.pickler.empty_list()?;
        let memo = self.pickler.memoize()?;
        match stack {
            Some(stack) => self.stacks[stack.index()] = Some(memo),
            None => self.no_stack = Some(memo),
        }
        let trace = self.trace;
        for (index, frame) in stack.into_iter().flat_map(|stack| trace.stacks.numbered(stack)) {
            match self.frames[index] {
                Some(memo) => self.pickler.get(memo)?,
                None => {
                    self.pickler.begin_dict()?;
                    self.pickler.text("name")?;
                    self.pickler.text(frame.name)?;
                    self.pickler.text("filename")?;
                    self.pickler.text(frame.filename)?;
                    self.number("line", u64::from(frame.line))?;
                    self.pickler.end_dict()?;
                    self.frames[index] = Some(self.pickler.memoize()?);
                }
            }
            self.pickler.append()?;
        }
        Ok(())
    }
}

/// Returns the order that groups events by device, or `None` if they are grouped.
fn by_device(events: &[Event]) -> Option<Vec<u32>> {
    if events.is_sorted_by_key(|event| event.device) {
        return None;
    }
    let mut order: Vec<u32> = (0..).take(events.len()).collect();
    order.sort_by_key(|&index| events[index as usize].device);
    Some(order)
}

fn requested(block: &Block) -> u64 {
    block.requested_size.unwrap_or(block.size).count()
}

/// Saturates, because sizes in a broken recording may exceed the address space.
fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}
