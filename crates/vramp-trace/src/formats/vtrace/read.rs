//! Reads a `.vtrace`. Every value is checked before it is used.

use std::io::Read;

use vramp_core::{Bytes, DeviceAddr};

use super::{
    KIND_BITS, KIND_UNKNOWN, LABELS, NEW_DEVICE, NEW_STACK, NEW_STREAM, SEGMENT_STACKS, VERSION,
};
use crate::formats::input::Input;
use crate::formats::memory::{ENTRY, Meter};
use crate::stacks::FrameKey;
use crate::trace::size;
use crate::{
    ActionId, Block, BlockState, Event, EventKind, Format, ReadError, ReadLimits, Segment, StackId,
    StreamIndex, Trace,
};

/// Event that the first event is encoded against.
pub(super) const FIRST: Event = Event {
    kind: EventKind::Alloc,
    device: 0,
    stream: StreamIndex(0),
    address: DeviceAddr::new(0),
    size: Bytes::ZERO,
    time_us: 0,
    stack: None,
};

/// Reads a file that begins with the magic bytes.
pub(crate) fn read<R: Read>(mut input: Input<R>, limits: &ReadLimits) -> Result<Trace, ReadError> {
    input.format = Format::Vtrace;
    input.array::<8>()?;
    let version = u16::from_le_bytes(input.array()?);
    if !(1..=VERSION).contains(&version) {
        return Err(ReadError::Version { found: version, supported: VERSION });
    }
    if u16::from_le_bytes(input.array()?) != 0 {
        return Err(input.malformed("unknown flags in the header"));
    }
    let len = u64::from_le_bytes(input.array()?);
    let stored = u32::from_le_bytes(input.array()?);
    let offset = input.offset();

    let failed = |cause| ReadError::Io { offset, cause };
    let contents = zstd::stream::read::Decoder::new(input).map_err(failed)?;
    let counted = Crc { source: contents, hasher: crc32fast::Hasher::new() };
    let mut body = Body {
        input: Input::new(counted, limits.contents),
        version,
        len,
        meter: Meter::new(limits),
        limits: *limits,
        trace: Trace::default(),
    };
    body.input.format = Format::Vtrace;
    body.read()?;
    let computed = body.input.into_source().hasher.finalize();
    if computed != stored {
        return Err(ReadError::Checksum { stored, computed });
    }
    Ok(body.trace)
}

/// Computes the checksum of everything that is read through it.
struct Crc<R> {
    source: R,
    hasher: crc32fast::Hasher,
}

impl<R: Read> Read for Crc<R> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let read = self.source.read(out)?;
        self.hasher.update(&out[..read]);
        Ok(read)
    }
}

/// The uncompressed contents and the trace read from them.
pub(super) struct Body<R> {
    input: Input<R>,
    version: u16,
    len: u64,
    meter: Meter,
    limits: ReadLimits,
    pub trace: Trace,
}

impl<R: Read> Body<R> {
    fn read(&mut self) -> Result<(), ReadError> {
        self.trace.name = self.text()?;
        self.trace.device_count = self.number_up_to(1 << 16, "more than 65,536 devices")?;
        for _ in 0..self.count()? {
            let raw = self.number()?;
            self.push(|trace| &mut trace.streams, raw)?;
        }
        let actions = self.count()?;
        if actions > 1 << 16 {
            return Err(self.input.malformed("more than 65,536 unknown actions"));
        }
        for _ in 0..actions {
            let action = self.text()?;
            self.trace.actions.push(action);
        }
        self.stacks()?;
        for _ in 0..self.count()? {
            let setting = (self.text()?, self.text()?);
            self.push(|trace| &mut trace.allocator_settings, setting)?;
        }
        for _ in 0..self.count()? {
            let segment = self.segment()?;
            self.push(|trace| &mut trace.segments, segment)?;
        }
        self.events()?;
        if self.version >= LABELS {
            self.annotations()?;
            self.labels()?;
        }
        if self.input.offset() != self.len || !self.input.peek(1)?.is_empty() {
            return Err(self.input.malformed("the contents are not as long as the header says"));
        }
        Ok(())
    }

    // --- parts ---

    fn stacks(&mut self) -> Result<(), ReadError> {
        let twice = "a duplicate text, frame or stack";
        for _ in 0..self.count()? {
            let text = self.text()?;
            if !self.trace.stacks.texts.insert(text.into()) {
                return Err(self.input.malformed(twice));
            }
        }
        for _ in 0..self.count()? {
            let frame = FrameKey {
                name: self.index(self.trace.stacks.texts.len())?,
                filename: self.index(self.trace.stacks.texts.len())?,
                line: self.number_up_to(u32::MAX, "a line number beyond 32 bits")?,
            };
            self.charge_entry(size_of::<FrameKey>())?;
            if !self.trace.stacks.frames.insert(frame) {
                return Err(self.input.malformed(twice));
            }
        }
        for _ in 0..self.count()? {
            let mut frames = Vec::new();
            self.charge_entry(0)?;
            for _ in 0..self.count()? {
                let frame = self.index(self.trace.stacks.frames.len())?;
                self.meter.push(&mut frames, frame, self.input.offset())?;
            }
            if !self.trace.stacks.stacks.insert(frames.into_boxed_slice()) {
                return Err(self.input.malformed(twice));
            }
        }
        Ok(())
    }

    fn segment(&mut self) -> Result<Segment, ReadError> {
        let device = self.device()?;
        let stream = self.stream()?;
        let address = DeviceAddr::new(self.number()?);
        let total_size = self.size()?;
        let segment_type = self.text()?;
        let is_expandable = match self.number()? {
            0 => false,
            1 => true,
            _ => return Err(self.input.malformed("a flag that is neither 0 nor 1")),
        };
        let stack = if self.version >= SEGMENT_STACKS { self.stack()? } else { None };
        let mut blocks = Vec::new();
        let mut next = address.number();
        for _ in 0..self.count()? {
            let block = self.block(next)?;
            next = block.address.number().wrapping_add(block.size.count());
            self.meter.push(&mut blocks, block, self.input.offset())?;
        }
        Ok(Segment {
            device,
            stream,
            address,
            total_size,
            segment_type,
            is_expandable,
            stack,
            blocks,
        })
    }

    fn block(&mut self, next: u64) -> Result<Block, ReadError> {
        let address = DeviceAddr::new(self.step(next)?);
        let size_of_block = self.size()?;
        let requested_size = match self.number()?.checked_sub(1) {
            None => None,
            Some(count) => Some(self.checked_size(count)?),
        };
        let state = match self.number()? {
            0 => BlockState::Active,
            1 => BlockState::PendingFree,
            2 => BlockState::Inactive,
            _ => return Err(self.input.malformed("a block in an unknown state")),
        };
        let stack = self.stack()?;
        Ok(Block { address, size: size_of_block, requested_size, state, stack })
    }

    fn events(&mut self) -> Result<(), ReadError> {
        let count = self.count()?;
        if count > u64::from(self.limits.events) {
            return Err(ReadError::Limit {
                limit: "events",
                what: "events",
                allowed: u64::from(self.limits.events),
                offset: self.input.offset(),
            });
        }
        // `count` checked that at least one byte per event is left, so the loop is bounded by the
        // file.
        let mut before = FIRST;
        for _ in 0..count {
            before = self.event(&before)?;
            self.push(|trace| &mut trace.events, before)?;
        }
        Ok(())
    }

    fn event(&mut self, before: &Event) -> Result<Event, ReadError> {
        let head = self.input.byte()?;
        let kind = match head & KIND_BITS {
            KIND_UNKNOWN => {
                let action = self.index(self.trace.actions.len())?;
                EventKind::Unknown(ActionId(action as u16))
            }
            number => match EventKind::NAMED.get(usize::from(number)) {
                Some(kind) => *kind,
                None => return Err(self.input.malformed("an event of an unknown kind")),
            },
        };
        if head & !(KIND_BITS | NEW_DEVICE | NEW_STREAM | NEW_STACK) != 0 {
            return Err(self.input.malformed("an event with an unknown bit in its head"));
        }
        let device = if head & NEW_DEVICE != 0 { self.device()? } else { before.device };
        let stream = if head & NEW_STREAM != 0 { self.stream()? } else { before.stream };
        let stack = if head & NEW_STACK != 0 { self.stack()? } else { before.stack };
        let inside = u32::from(device) < self.trace.device_count
            && (stream.0 as usize) < self.trace.streams.len();
        if !inside {
            return Err(self.input.malformed("an event with a device or stream out of range"));
        }
        Ok(Event {
            kind,
            device,
            stream,
            address: DeviceAddr::new(self.step(before.address.number())?),
            size: self.size()?,
            time_us: self.step(before.time_us)?,
            stack,
        })
    }

    // --- values ---

    pub fn number(&mut self) -> Result<u64, ReadError> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.input.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(self.input.malformed("a number beyond 64 bits"))
    }

    pub fn number_up_to(&mut self, max: u32, what: &'static str) -> Result<u32, ReadError> {
        match u32::try_from(self.number()?) {
            Ok(number) if number <= max => Ok(number),
            _ => Err(self.input.malformed(what)),
        }
    }

    /// Reads the length of a list. Each item takes at least a byte, so the bytes left bound it.
    pub fn count(&mut self) -> Result<u64, ReadError> {
        let count = self.number()?;
        if count > self.len.saturating_sub(self.input.offset()) {
            return Err(self.input.malformed("a list longer than the rest of the file"));
        }
        Ok(count)
    }

    /// Reads an index below `len`.
    pub fn index(&mut self, len: usize) -> Result<u32, ReadError> {
        match u32::try_from(self.number()?) {
            Ok(index) if (index as usize) < len => Ok(index),
            _ => Err(self.input.malformed("an index out of range")),
        }
    }

    pub fn step(&mut self, from: u64) -> Result<u64, ReadError> {
        let delta = self.number()?;
        Ok(from.wrapping_add((delta >> 1) ^ (delta & 1).wrapping_neg()))
    }

    fn size(&mut self) -> Result<Bytes, ReadError> {
        let count = self.number()?;
        self.checked_size(count)
    }

    fn checked_size(&self, count: u64) -> Result<Bytes, ReadError> {
        size(count).ok_or_else(|| self.input.malformed("a size of more than 64 PiB"))
    }

    pub fn text(&mut self) -> Result<String, ReadError> {
        let len = self.count()?;
        if len > self.limits.text.count() {
            return Err(ReadError::Limit {
                limit: "text",
                what: "bytes in one text",
                allowed: self.limits.text.count(),
                offset: self.input.offset(),
            });
        }
        self.charge_entry(len as usize)?;
        let mut bytes = Vec::new();
        self.input.consume(len, |piece| bytes.extend_from_slice(piece))?;
        String::from_utf8(bytes).map_err(|_| self.input.malformed("a text that is not UTF-8"))
    }

    fn device(&mut self) -> Result<u16, ReadError> {
        let device = self.number()?;
        match u16::try_from(device) {
            Ok(device) if u32::from(device) < self.trace.device_count => Ok(device),
            _ => Err(self.input.malformed("a device out of range")),
        }
    }

    fn stream(&mut self) -> Result<StreamIndex, ReadError> {
        self.index(self.trace.streams.len()).map(StreamIndex)
    }

    fn stack(&mut self) -> Result<Option<StackId>, ReadError> {
        match self.index(self.trace.stacks.len() + 1)? {
            0 => Ok(None),
            number => Ok(StackId::from_index(number as usize - 1)),
        }
    }

    /// Pushes an item to a list of the trace. Its memory counts against the limit.
    pub fn push<T>(
        &mut self,
        list: impl FnOnce(&mut Trace) -> &mut Vec<T>,
        item: T,
    ) -> Result<(), ReadError> {
        self.meter.push(list(&mut self.trace), item, self.input.offset())
    }

    /// Counts an entry of a table, or a text, and its contents against the memory limit.
    pub fn charge_entry(&mut self, contents: usize) -> Result<(), ReadError> {
        self.meter.take(ENTRY + contents, self.input.offset())
    }

    pub fn malformed(&self, what: &'static str) -> ReadError {
        self.input.malformed(what)
    }
}
