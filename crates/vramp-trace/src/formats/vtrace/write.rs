//! Writes a `.vtrace`.

use std::io::{self, Write};

use super::{KIND_UNKNOWN, MAGIC, NEW_DEVICE, NEW_STACK, NEW_STREAM, VERSION};
use crate::formats::validate::validate;
use crate::{Block, BlockState, Event, EventKind, Segment, StackId, Trace};

/// Small files at moderate cost: 1.2 million events take about a second.
const ZSTD_LEVEL: i32 = 9;

impl Trace {
    /// Writes the trace in the compact format of this project. Reading it returns an equal trace.
    ///
    /// Needs memory for the uncompressed contents, about 10 bytes per event.
    ///
    /// # Errors
    /// Errors of `out`; [`io::ErrorKind::InvalidInput`] if the index of a device, stream, action or
    /// stack is out of range, or a size exceeds 64 PiB.
    pub fn write_vtrace(&self, mut out: impl Write) -> io::Result<()> {
        let body = Body::of(self)?.0;
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&0u16.to_le_bytes())?;
        out.write_all(&(body.len() as u64).to_le_bytes())?;
        out.write_all(&crc32fast::hash(&body).to_le_bytes())?;
        let mut encoder = zstd::stream::write::Encoder::new(out, ZSTD_LEVEL)?;
        encoder.write_all(&body)?;
        encoder.finish()?.flush()
    }
}

/// The uncompressed contents.
pub(super) struct Body(Vec<u8>);

impl Body {
    fn of(trace: &Trace) -> io::Result<Body> {
        validate(trace)?;
        let mut body = Body(Vec::with_capacity(trace.events.len() * 12));
        body.text(&trace.name);
        body.number(u64::from(trace.device_count));
        body.all(&trace.streams, |body, &raw| body.number(raw));
        body.all(&trace.actions, |body, action| body.text(action));
        body.all(&trace.stacks.texts, |body, text| body.text(text));
        body.all(&trace.stacks.frames, |body, frame| {
            body.number(u64::from(frame.name));
            body.number(u64::from(frame.filename));
            body.number(u64::from(frame.line));
        });
        body.all(&trace.stacks.stacks, |body, frames| {
            body.all(&frames[..], |body, &frame| body.number(u64::from(frame)));
        });
        body.all(&trace.allocator_settings, |body, (name, value)| {
            body.text(name);
            body.text(value);
        });
        body.all(&trace.segments, Body::segment);
        let mut before = super::read::FIRST;
        body.all(&trace.events, |body, event| {
            body.event(event, &before);
            before = *event;
        });
        body.annotations(&trace.annotations);
        body.labels(&trace.labels);
        Ok(body)
    }

    /// Writes seven bits per byte, lowest first. The top bit is set if more follow.
    pub(super) fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    /// Writes the difference modulo 2^64, zigzag-encoded, so that small differences are short.
    pub(super) fn step(&mut self, from: u64, to: u64) {
        let delta = to.wrapping_sub(from).cast_signed();
        self.number(((delta << 1) ^ (delta >> 63)).cast_unsigned());
    }

    pub(super) fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
    }

    fn stack(&mut self, stack: Option<StackId>) {
        self.number(stack.map_or(0, |stack| stack.index() as u64 + 1));
    }

    pub(super) fn all<T, I>(&mut self, items: I, mut one: impl FnMut(&mut Body, T))
    where
        I: IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
    {
        let items = items.into_iter();
        self.number(items.len() as u64);
        for item in items {
            one(self, item);
        }
    }

    fn segment(&mut self, segment: &Segment) {
        self.number(u64::from(segment.device));
        self.number(u64::from(segment.stream.0));
        self.number(segment.address.number());
        self.number(segment.total_size.count());
        self.text(&segment.segment_type);
        self.number(u64::from(segment.is_expandable));
        self.stack(segment.stack);
        let mut next = segment.address.number();
        self.all(&segment.blocks, |body, block| {
            body.block(block, next);
            next = block.address.number().wrapping_add(block.size.count());
        });
    }

    fn block(&mut self, block: &Block, next: u64) {
        self.step(next, block.address.number());
        self.number(block.size.count());
        self.number(block.requested_size.map_or(0, |size| size.count() + 1));
        self.number(match block.state {
            BlockState::Active => 0,
            BlockState::PendingFree => 1,
            BlockState::Inactive => 2,
        });
        self.stack(block.stack);
    }

    fn event(&mut self, event: &Event, before: &Event) {
        let named = EventKind::NAMED.iter().position(|&kind| kind == event.kind);
        let mut head = named.map_or(KIND_UNKNOWN, |number| number as u8);
        for (differs, bit) in [
            (event.device != before.device, NEW_DEVICE),
            (event.stream != before.stream, NEW_STREAM),
            (event.stack != before.stack, NEW_STACK),
        ] {
            if differs {
                head |= bit;
            }
        }
        self.0.push(head);
        if let EventKind::Unknown(action) = event.kind {
            self.number(u64::from(action.0));
        }
        if head & NEW_DEVICE != 0 {
            self.number(u64::from(event.device));
        }
        if head & NEW_STREAM != 0 {
            self.number(u64::from(event.stream.0));
        }
        if head & NEW_STACK != 0 {
            self.stack(event.stack);
        }
        self.step(before.address.number(), event.address.number());
        self.number(event.size.count());
        self.step(before.time_us, event.time_us);
    }
}

#[cfg(test)]
mod tests {
    use vramp_core::{Bytes, DeviceAddr};

    use super::*;
    use crate::StreamIndex;

    #[test]
    fn the_contents_are_as_documented() {
        let event = Event {
            kind: EventKind::Alloc,
            device: 0,
            stream: StreamIndex(0),
            address: DeviceAddr::new(4096),
            size: Bytes::new(512),
            time_us: 1,
            stack: None,
        };
        let trace = Trace {
            name: "a".to_owned(),
            device_count: 1,
            streams: vec![0],
            events: vec![event],
            ..Trace::default()
        };
        let documented = include_str!("../../../tests/data/trace-format.md");
        let (_, example) = documented.split_once("```text\n01 61").expect("the example");
        let (example, _) = example.split_once("```").expect("its end");
        let bytes: Vec<u8> = format!("01 61{example}")
            .lines()
            .flat_map(|line| line[..16.min(line.len())].split_whitespace())
            .map(|byte| u8::from_str_radix(byte, 16).unwrap())
            .collect();
        assert_eq!(Body::of(&trace).unwrap().0, bytes);
        assert_eq!(bytes.len(), 24);
    }
}
