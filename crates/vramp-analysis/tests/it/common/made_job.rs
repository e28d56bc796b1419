//! Recordings of jobs that ran out of memory, made from a number: an allocator with segments as PyTorch's
//! serves random requests until one fails.

use vramp::{Bytes, DeviceAddr};
use vramp_trace::{Event, EventKind, Frame, StackId, StreamIndex, Trace};

const MIB: u64 = 1 << 20;

/// Why the job fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// Small blocks that stay keep segments of large ones.
    Fragmented,
    /// Nearly everything stays.
    Demanding,
    /// A few blocks stay at each step.
    Leaking,
    /// The card has much more than the process may use.
    Limited,
    /// As fragmented, on two streams and without call stacks.
    Streams,
}

const SHAPES: [Shape; 5] =
    [Shape::Fragmented, Shape::Demanding, Shape::Leaking, Shape::Limited, Shape::Streams];

/// A segment: its start, length, stream, and blocks by start with their lengths.
struct Segment {
    start: u64,
    len: u64,
    stream: u32,
    blocks: Vec<(u64, u64)>,
}

impl Segment {
    /// Returns the start of the first hole of at least `len`.
    fn hole(&self, len: u64) -> Option<u64> {
        let mut at = self.start;
        for &(start, size) in &self.blocks {
            if start - at >= len {
                return Some(at);
            }
            at = start + size;
        }
        (self.start + self.len - at >= len).then_some(at)
    }
}

/// Returns the recording of a job that failed. The same number gives the same one.
pub fn made_oom(seed: u64) -> Trace {
    let shape = SHAPES[(seed % SHAPES.len() as u64) as usize];
    let trace = Trace {
        device_count: 1,
        streams: vec![0, 7],
        name: format!("made {seed} {shape:?}"),
        ..Trace::default()
    };
    let random = fastrand::Rng::with_seed(seed);
    let capacity = 700 * MIB;
    let mut made = Made { trace, shape, random, capacity, segments: Vec::new(), next: 1 << 40 };
    made.run();
    made.trace
}

struct Made {
    trace: Trace,
    shape: Shape,
    random: fastrand::Rng,
    capacity: u64,
    segments: Vec<Segment>,
    next: u64,
}

impl Made {
    fn run(&mut self) {
        let stacks: Vec<Option<StackId>> = (1..6)
            .map(|line| {
                let inner = Frame { name: "op", filename: "torch/nn/functional.py", line };
                let outer = Frame { name: "train", filename: "job.py", line };
                self.trace.stacks.add([inner, outer])
            })
            .collect();
        let mut live: Vec<(u64, u64, u32)> = Vec::new();
        for step in 0.. {
            let stays = match self.shape {
                Shape::Demanding => 7,
                Shape::Leaking => 3,
                _ => 2,
            };
            let mut temporary = Vec::new();
            for request in 0..8 {
                let stream = match self.shape {
                    Shape::Streams => self.random.u32(0..2),
                    _ => 0,
                };
                let is_kept = request % 8 < stays;
                let size = match (is_kept, self.shape) {
                    (true, Shape::Demanding) => self.random.u64(8 * MIB..60 * MIB),
                    (true, _) => self.random.u64(MIB..8 * MIB),
                    // They grow, so that what was cached does not fit.
                    (false, _) => self.random.u64(12 * MIB..24 * MIB) + step * 2 * MIB,
                };
                let size = size / 512 * 512;
                let stack = match self.shape {
                    Shape::Streams => None,
                    _ => stacks[self.random.usize(0..stacks.len())],
                };
                let Some(at) = self.alloc(size, stream, stack) else { return };
                match is_kept {
                    true => live.push((at, size, stream)),
                    false => temporary.push((at, size, stream)),
                }
            }
            for (at, size, stream) in temporary {
                self.free(at, size, stream);
            }
            // Old state is replaced, but for a leak.
            while self.shape != Shape::Leaking && self.shape != Shape::Demanding && live.len() > 20
            {
                let (at, size, stream) = live.remove(self.random.usize(0..live.len()));
                self.free(at, size, stream);
            }
        }
    }

    fn event(&mut self, kind: EventKind, at: u64, size: u64, stream: u32, stack: Option<StackId>) {
        let time_us = 1000 * self.trace.events.len() as u64;
        self.trace.events.push(Event {
            kind,
            device: 0,
            stream: StreamIndex(stream),
            address: DeviceAddr::new(at),
            size: Bytes::new(size),
            time_us,
            stack,
        });
    }

    fn reserved(&self) -> u64 {
        self.segments.iter().map(|segment| segment.len).sum()
    }

    /// Serves a request, or records that it failed.
    fn alloc(&mut self, size: u64, stream: u32, stack: Option<StackId>) -> Option<u64> {
        let hole = |it: &Segment| (it.stream == stream).then(|| it.hole(size)).flatten();
        let found = self.segments.iter().enumerate().find_map(|(nth, it)| Some((nth, hole(it)?)));
        let (nth, at) = match found {
            Some(found) => found,
            None => {
                let len = if size < 10 * MIB { 20 * MIB } else { size.next_multiple_of(2 * MIB) };
                if self.reserved() + len > self.capacity {
                    self.release();
                }
                if self.reserved() + len > self.capacity {
                    let more = if self.shape == Shape::Limited { 8000 * MIB } else { 0 };
                    let free = self.capacity - self.reserved() + more;
                    self.event(EventKind::Oom, free, size, stream, stack);
                    return None;
                }
                let start = self.next;
                self.next += len.next_multiple_of(1 << 30) + (1 << 30);
                self.event(EventKind::SegmentAlloc, start, len, stream, stack);
                self.segments.push(Segment { start, len, stream, blocks: Vec::new() });
                (self.segments.len() - 1, start)
            }
        };
        let blocks = &mut self.segments[nth].blocks;
        blocks.push((at, size));
        blocks.sort_unstable();
        self.event(EventKind::Alloc, at, size, stream, stack);
        Some(at)
    }

    fn free(&mut self, at: u64, size: u64, stream: u32) {
        for segment in &mut self.segments {
            segment.blocks.retain(|&(start, _)| start != at);
        }
        self.event(EventKind::FreeRequested, at, size, stream, None);
        self.event(EventKind::FreeCompleted, at, size, stream, None);
    }

    /// Frees the segments without a block.
    fn release(&mut self) {
        let empty = |segment: &Segment| segment.blocks.is_empty();
        let freed: Vec<(u64, u64, u32)> = self
            .segments
            .iter()
            .filter(|segment| empty(segment))
            .map(|segment| (segment.start, segment.len, segment.stream))
            .collect();
        for (start, len, stream) in freed {
            self.event(EventKind::SegmentFree, start, len, stream, None);
        }
        self.segments.retain(|segment| !empty(segment));
    }
}
