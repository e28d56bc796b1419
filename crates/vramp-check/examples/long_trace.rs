//! Writes the recording of a training job that never ran, as large as wanted, to measure `vramp
//! report`: `cargo run --release -p vramp-check --example long_trace -- OUT.vtrace [EVENTS]`.
//!
//! Each iteration allocates activations of random lengths layer by layer, frees them backwards with
//! gradients in between, and steps an optimizer. About 2,000 stacks. The addresses are those of a
//! best-fit allocator that splits and coalesces.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs::File;
use std::io::BufWriter;

use vramp::{Bytes, DeviceAddr};
use vramp_trace::{Event, EventKind, Frame, StackId, StreamIndex, Trace};

const LAYERS: usize = 48;
/// Operations of a layer that allocate, forward and backward.
const OPS: usize = 14;
/// Largest block that shares a segment of this size.
const SEGMENT: u64 = 20 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: long_trace OUT.vtrace [EVENTS]")?;
    let events = arguments.next().map_or(Ok(5_000_000), |text| text.parse())?;
    let trace = Job::new(events).run();
    println!("{} events, {} stacks", trace.events.len(), trace.stacks.len());
    trace.write_vtrace(BufWriter::new(File::create(path)?))?;
    Ok(())
}

struct Job {
    trace: Trace,
    events: usize,
    random: fastrand::Rng,
    time_us: u64,
    next_segment: u64,
    /// Free ranges: length by address, and addresses by length.
    free: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    forward: Vec<Option<StackId>>,
    backward: Vec<Option<StackId>>,
    other: Vec<Option<StackId>>,
}

impl Job {
    fn new(events: usize) -> Job {
        let mut trace = Trace {
            name: "long_trace".to_owned(),
            device_count: 1,
            streams: vec![0],
            ..Trace::default()
        };
        let mut stacks = |pass: &str, count: usize| -> Vec<Option<StackId>> {
            (0..count).map(|op| stack(&mut trace, pass, op)).collect()
        };
        let forward = stacks("forward", LAYERS * OPS);
        let backward = stacks("backward", LAYERS * OPS);
        let other = stacks("step", LAYERS * OPS);
        Job {
            trace,
            events,
            random: fastrand::Rng::with_seed(1),
            time_us: 1_700_000_000_000_000,
            next_segment: 0x7f00_0000_0000,
            free: BTreeMap::new(),
            by_len: BTreeSet::new(),
            forward,
            backward,
            other,
        }
    }

    fn run(mut self) -> Trace {
        let parameters: Vec<(u64, u64)> =
            (0..LAYERS * 4).map(|op| self.alloc(8 << 20, self.other[op])).collect();
        let mut states = Vec::new();
        while self.trace.events.len() < self.events {
            let length = self.random.u64(256..4096);
            let mut activations = Vec::new();
            for op in 0..self.forward.len() {
                let width = 512 * (1 + op as u64 % 7);
                let size = length * width + self.random.u64(0..64) * 512;
                activations.push(self.alloc(size, self.forward[op]));
                if op % 3 == 0 {
                    let size = self.random.u64(1..1 << 20);
                    let scratch = self.alloc(size, self.forward[op]);
                    self.free(scratch);
                }
            }
            let mut gradients = Vec::new();
            for op in (0..self.backward.len()).rev() {
                let temporary = self.alloc(length * 1024, self.backward[op]);
                if op % OPS < 4 {
                    gradients.push(self.alloc(8 << 20, self.backward[op]));
                }
                if let Some(activation) = activations.pop() {
                    self.free(activation);
                }
                self.free(temporary);
            }
            if states.is_empty() {
                states = (0..parameters.len() * 2)
                    .map(|op| self.alloc(8 << 20, self.other[LAYERS * 4 + op % LAYERS]))
                    .collect();
            }
            for (op, gradient) in gradients.into_iter().enumerate() {
                let temporary = self.alloc(8 << 20, self.other[op % self.other.len()]);
                self.free(temporary);
                self.free(gradient);
            }
        }
        self.trace
    }

    fn alloc(&mut self, size: u64, stack: Option<StackId>) -> (u64, u64) {
        let rounded = size.next_multiple_of(512);
        let found = self.by_len.range((rounded, 0)..).next().copied();
        let (len, address) = found.unwrap_or_else(|| {
            let len = rounded.next_multiple_of(2 << 20).max(SEGMENT);
            let address = self.next_segment;
            self.next_segment += len + (2 << 20);
            self.event(EventKind::SegmentAlloc, address, len, stack);
            (len, address)
        });
        self.take(address, len);
        if len > rounded {
            self.give(address + rounded, len - rounded);
        }
        self.event(EventKind::Alloc, address, size, stack);
        (address, size)
    }

    fn free(&mut self, (address, size): (u64, u64)) {
        self.event(EventKind::FreeRequested, address, size, None);
        self.event(EventKind::FreeCompleted, address, size, None);
        let (mut start, mut len) = (address, size.next_multiple_of(512));
        if let Some((&before, &before_len)) = self.free.range(..start).next_back()
            && before + before_len == start
        {
            self.take(before, before_len);
            (start, len) = (before, len + before_len);
        }
        if let Some(&after_len) = self.free.get(&(start + len)) {
            self.take(start + len, after_len);
            len += after_len;
        }
        self.give(start, len);
    }

    fn take(&mut self, address: u64, len: u64) {
        self.free.remove(&address);
        self.by_len.remove(&(len, address));
    }

    fn give(&mut self, address: u64, len: u64) {
        self.free.insert(address, len);
        self.by_len.insert((len, address));
    }

    fn event(&mut self, kind: EventKind, address: u64, size: u64, stack: Option<StackId>) {
        self.time_us += self.random.u64(3..40);
        self.trace.events.push(Event {
            kind,
            device: 0,
            stream: StreamIndex(0),
            address: DeviceAddr::new(address),
            size: Bytes::new(size),
            time_us: self.time_us,
            stack,
        });
    }
}

fn stack(trace: &mut Trace, pass: &str, op: usize) -> Option<StackId> {
    let layer = op / OPS;
    let torch = "/venv/lib/python3.12/site-packages/torch/nn/modules";
    let names = [
        (format!("{torch}/linear.py"), format!("{pass}_op{}", op % OPS), 100 + op % OPS),
        (format!("{torch}/module.py"), "_call_impl".to_owned(), 1790),
        ("/job/layer.py".to_owned(), format!("layer{layer}_{pass}"), 20 + layer),
        ("/job/model.py".to_owned(), pass.to_owned(), 80),
        ("/job/train.py".to_owned(), "train_step".to_owned(), 42),
        ("/job/train.py".to_owned(), "main".to_owned(), 120),
    ];
    let frames = names.iter().map(|(filename, name, line)| Frame {
        name,
        filename,
        line: u32::try_from(*line).unwrap_or(0),
    });
    trace.stacks.add(frames)
}
