//! Recorded events of an allocator, and snapshots of its memory, in PyTorch's formats.
//!
//! ```
//! use vramp_alloc::history::HistorySize;
//! use vramp_alloc::{Allocator, Bytes, Config};
//!
//! let device = vramp_alloc::open("sim:h200")?;
//! let allocator = Allocator::new(device, Config::default())?;
//! let stream = allocator.create_stream()?;
//! let recording = allocator.record_history(HistorySize::default(), None);
//! let block = allocator.malloc(Bytes::mib(64), stream)?;
//! let mut file = Vec::new();
//! allocator.snapshot(Some(&recording)).write_snapshot(&mut file)?;   // for pytorch.org/memory_viz
//! allocator.stop_history(&recording);
//! # allocator.free(block, stream)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use vramp_core::{Bytes, DeviceAddr, PartKind, StreamId, Stretch, StretchPart};
use vramp_driver::Driver;
use vramp_host::fork::is_forked;
use vramp_trace::{Block, EventKind, Frame, History, Record, Segment, StreamIndex};

pub use vramp_trace::{BlockState, HistorySize, Trace};

use crate::Allocator;
use crate::backend::BackendStretch;
use crate::error::QuarantinedMemory;
use crate::manager::Manager;
use crate::observe::{Event, Observers, Recorder, Registration};
use crate::shared::{Inner, Shared};
use crate::virtual_pool::VirtualPool;

/// A call stack, innermost frame first: function, file and line of each frame.
pub type OwnedFrames = Vec<(String, String, u32)>;

/// Function that captures the stack of the calling thread.
pub type StackSource = Arc<dyn Fn() -> OwnedFrames + Send + Sync>;

/// A recording of events: see [`Allocator::record_history`].
pub struct HistoryRecording {
    recorder: Arc<HistoryRecorder>,
    registration: Registration,
    joined: Mutex<Joined>,
}

/// Other pools of a recording.
#[derive(Default)]
struct Joined {
    /// By their numbers.
    pools: BTreeMap<u64, (Weak<Shared>, Registration)>,
    /// Number of these at which those that are gone are removed: twice what was left the last time.
    prune_at: usize,
}

/// # Recorded events and snapshots
impl Allocator {
    /// Records every event from now on in a ring of the last ones; with `stacks`, the call stack of
    /// each.
    ///
    /// `stacks` is user code, under the [rule of callbacks](crate::observe). Events of calls made
    /// inside it or inside an observer have no stack.
    ///
    /// Cost: a lock shared by all threads for each malloc and free, and the capture of a stack. For
    /// diagnosis. End it with [`Allocator::stop_history`].
    pub fn record_history(
        &self,
        size: HistorySize,
        stacks: Option<StackSource>,
    ) -> HistoryRecording {
        let history = Arc::new(Mutex::new(History::new(size)));
        let (sink, driver) = (Arc::clone(&history), Arc::clone(self.driver()));
        let recorder = Arc::new(HistoryRecorder { sink, driver, stacks });
        let registration = self.shared().observers.add_recorder(Arc::clone(&recorder) as _);
        HistoryRecording { recorder, registration, joined: Mutex::default() }
    }

    /// Adds the events of this pool from now on to a recording of another pool of its group, until that
    /// ends. Does nothing if they are part of it. O(log pools of the recording).
    pub fn join_history(&self, recording: &HistoryRecording) {
        let shared = self.shared();
        let mut joined = recording.joined.lock().unwrap_or_else(PoisonError::into_inner);
        let Joined { pools, prune_at } = &mut *joined;
        pools.entry(self.number()).or_insert_with(|| {
            let recorder = Arc::clone(&recording.recorder);
            (Arc::downgrade(shared), shared.observers.add_recorder(recorder))
        });
        if pools.len() >= *prune_at {
            pools.retain(|_, (pool, _)| pool.strong_count() > 0);
            *prune_at = (pools.len() * 2).max(16);
        }
    }

    /// Ends a recording. Its events can still be written. Returns false if it was ended before.
    /// Waits for the stack source as [`Allocator::unregister`] does for a callback.
    pub fn stop_history(&self, recording: &HistoryRecording) -> bool {
        let joined =
            std::mem::take(&mut *recording.joined.lock().unwrap_or_else(PoisonError::into_inner));
        for (pool, registration) in joined.pools.into_values() {
            if let Some(shared) = pool.upgrade() {
                shared.observers.remove_recorder(registration);
            }
        }
        self.shared().observers.remove_recorder(recording.registration)
    }

    /// Returns all memory by address, with the events of a recording. [`Trace::write_snapshot`]
    /// writes it for `torch/cuda/_memory_viz.py` and its viewer, [`Trace::write_perfetto`] as a
    /// timeline. There are no segments for the driver's pool. O(n log n).
    ///
    /// All of it is on the device with the number of the card in this process: N of `cuda:N`, and 0 on a
    /// simulated card. [`Trace::move_to_device`] gives it another number, and [`Trace::merge`] makes one
    /// snapshot of the allocators of several devices.
    pub fn snapshot(&self, recording: Option<&HistoryRecording>) -> Trace {
        let mut trace = match recording {
            // In a forked child a thread of the parent may hold the history's lock.
            Some(recording) if !is_forked() => {
                let sink = recording.recorder.sink.lock();
                let history = sink.unwrap_or_else(PoisonError::into_inner);
                let mut trace = history.to_trace();
                if history.overwritten() > 0 {
                    // As PyTorch's snapshots say it.
                    let setting = ("trace_alloc_overflowed".to_owned(), "True".to_owned());
                    trace.allocator_settings.push(setting);
                }
                trace
            }
            _ => Trace::default(),
        };
        trace.name = self.name().to_owned();
        trace.device_count = trace.device_count.max(1);
        let mut inner = self.shared().lock_anyway();
        segments(&mut inner, &mut trace);
        drop(inner);
        trace.move_to_device(device_number(&self.driver().info().id));
        trace
    }

    /// Adds the memory of this pool to a snapshot of another pool of its group, whose events it
    /// [joined](Allocator::join_history) or not. Its settings get the pool's name in front. O(n log n).
    pub fn add_to_snapshot(&self, trace: &mut Trace) {
        let (known, settings) = (trace.segments.len(), trace.allocator_settings.len());
        let mut inner = self.shared().lock_anyway();
        segments(&mut inner, trace);
        drop(inner);
        let device = device_number(&self.driver().info().id);
        trace.segments[known..].iter_mut().for_each(|segment| segment.device = device);
        for (name, _) in &mut trace.allocator_settings[settings..] {
            *name = format!("{}.{name}", self.name());
        }
    }
}

/// Returns the number of a card in this process, from its id: N of `cuda:N`. Zero for any other device.
fn device_number(id: &str) -> u16 {
    id.strip_prefix("cuda:").and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Records events in a ring. Its allocator has one device, which [`Allocator::snapshot`] numbers.
struct HistoryRecorder {
    sink: Arc<Mutex<History>>,
    driver: Arc<dyn Driver>,
    stacks: Option<StackSource>,
}

impl Recorder for HistoryRecorder {
    fn record(&self, event: &Event<'_>, user: Option<&Observers>) {
        let Some(mut record) = record_of(event) else { return };
        if record.kind == EventKind::Oom {
            let free = self.driver.memory_info().ok().map(|info| info.free.count());
            record.address = DeviceAddr::new(free.unwrap_or(u64::MAX));
        }
        let taken = user.zip(self.stacks.as_ref());
        let frames = taken.and_then(|(user, take)| user.run_user(|| take()));
        let mut history = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(frames) = &frames {
            record.stack = history.intern(frames.iter().map(|(name, filename, line)| Frame {
                name,
                filename,
                line: *line,
            }));
        }
        history.record(&record);
        // For the caller the block is free, also while other streams still use it.
        if record.kind == EventKind::FreeRequested {
            history.record(&Record { kind: EventKind::FreeCompleted, ..record });
        }
    }
}

/// Returns the history record of an event; `None` if PyTorch's format has no kind for it.
fn record_of(event: &Event<'_>) -> Option<Record> {
    let (kind, stream, address, size) = match *event {
        Event::Allocated { addr, len, stream, .. } => (EventKind::Alloc, stream, addr, len),
        Event::Freed { addr, len, stream, .. } => (EventKind::FreeRequested, stream, addr, len),
        Event::Grown { bytes } => {
            (EventKind::SegmentMap, StreamId::new(0), DeviceAddr::new(0), bytes)
        }
        Event::Shrunk { bytes } => {
            (EventKind::SegmentUnmap, StreamId::new(0), DeviceAddr::new(0), bytes)
        }
        Event::OutOfMemory(report) => {
            let unknown = DeviceAddr::new(u64::MAX);
            (EventKind::Oom, report.stream, unknown, report.shortage.requested)
        }
        Event::Remapped { .. } | Event::Short(_) => return None,
    };
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Some(Record {
        kind,
        device: 0,
        stream: stream.index() as u64,
        address,
        size,
        time_us: since.as_micros() as u64,
        stack: None,
    })
}

/// Adds the manager's memory: one segment for each slab, of small blocks, and for each stretch of other
/// memory without a gap.
fn segments(inner: &mut Inner, trace: &mut Trace) {
    if let Some(pool) = inner.manager.virtual_pool_mut() {
        // What threads have freed and keep for their next requests is free.
        pool.gather();
        segments_of_pool(pool, trace);
    }
    let (name, stretches) = match &inner.manager {
        Manager::Virtual { .. } => ("vramp", Vec::new()),
        Manager::Backend(backend) => match backend.stretches() {
            Some(stretches) => (backend.name(), stretches),
            None => return,
        },
    };
    for BackendStretch { start, memory, is_small, is_expandable } in stretches {
        let addr = |part: &StretchPart| start + Bytes::new(part.at.number() - memory.at.number());
        let blocks = memory.parts.iter().map(|part| block(part, addr(part))).collect();
        add_segment(trace, start, &memory, Shape { is_small, is_expandable }, blocks);
    }
    let counters = inner.manager.known_counters();
    let mut settings = vec![("allocator", name.to_owned()), ("reserved", bytes(counters.reserved))];
    let QuarantinedMemory { memory, addresses, failed_call } = inner.manager.quarantined();
    if !memory.is_zero() || !addresses.is_zero() {
        settings.push(("quarantined", bytes(memory)));
        settings.push(("quarantined_addresses", bytes(addresses)));
        settings.extend(failed_call.map(|failed| ("quarantined_by", failed.to_string())));
    }
    let named = settings.into_iter().map(|(name, value)| (name.to_owned(), value));
    trace.allocator_settings.extend(named);
}

fn segments_of_pool(pool: &VirtualPool, trace: &mut Trace) {
    let mut in_slabs: Vec<StretchPart> = Vec::new();
    for (_, heap) in pool.heaps.iter() {
        in_slabs.extend(heap.lock().parts());
    }
    in_slabs.sort_by_key(|part| part.at);
    for stretch in pool.pool.stretches() {
        // A run of parts of one kind becomes a segment, and each slab one of its own.
        let runs =
            stretch.parts.chunk_by(|a, b| a.kind != PartKind::Slab && b.kind != PartKind::Slab);
        for run in runs {
            let is_small = run[0].kind == PartKind::Slab;
            let pieces = if is_small { slab_pieces(&in_slabs, &run[0]) } else { run };
            let blocks = pieces.iter().map(|part| block(part, pool.exec.addr(part.at))).collect();
            let memory = Stretch {
                at: run[0].at,
                len: run.iter().map(|part| part.len).sum(),
                parts: pieces.to_vec(),
            };
            let shape = Shape { is_small, is_expandable: true };
            add_segment(trace, pool.exec.addr(memory.at), &memory, shape, blocks);
        }
    }
}

/// Returns what lies in a slab, of all pieces by address. A slab that no heap has used is free.
fn slab_pieces<'a>(pieces: &'a [StretchPart], slab: &'a StretchPart) -> &'a [StretchPart] {
    let end = slab.at + slab.len;
    let from = pieces.partition_point(|piece| piece.at < slab.at);
    let count = pieces[from..].partition_point(|piece| piece.at < end);
    match count {
        0 => std::slice::from_ref(slab),
        _ => &pieces[from..from + count],
    }
}

fn block(part: &StretchPart, address: DeviceAddr) -> Block {
    Block {
        address,
        size: part.len,
        requested_size: (part.kind == PartKind::Block).then_some(part.requested),
        state: match part.kind {
            PartKind::Block | PartKind::Arena => BlockState::Active,
            PartKind::Waiting => BlockState::PendingFree,
            PartKind::Free | PartKind::Slab => BlockState::Inactive,
        },
        stack: None,
    }
}

/// Attributes of a segment in PyTorch's format.
struct Shape {
    is_small: bool,
    is_expandable: bool,
}

fn add_segment(
    trace: &mut Trace,
    start: DeviceAddr,
    stretch: &Stretch,
    shape: Shape,
    blocks: Vec<Block>,
) {
    let stream = stretch.parts.first().map_or(0, |part| part.stream.index()) as u64;
    let stream = stream_index(trace, stream);
    trace.segments.push(Segment {
        device: 0,
        stream,
        address: start,
        total_size: stretch.len,
        segment_type: if shape.is_small { "small" } else { "large" }.to_owned(),
        is_expandable: shape.is_expandable,
        stack: None,
        blocks,
    });
}

fn bytes(amount: Bytes) -> String {
    amount.count().to_string()
}

fn stream_index(trace: &mut Trace, raw: u64) -> StreamIndex {
    let known = trace.streams.iter().position(|&stream| stream == raw);
    let index = known.unwrap_or_else(|| {
        trace.streams.push(raw);
        trace.streams.len() - 1
    });
    StreamIndex(index as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn a_recording_has_the_pools_that_joined_it_and_a_snapshot_those_that_were_added() {
        let device = crate::open("sim:h200").expect("it is simulated");
        let allocator = Allocator::new(device, Config::default()).expect("it is possible");
        let part = allocator.create_pool("part").expect("it can be made");
        let stream = allocator.create_stream().expect("a stream can be made");
        let recording = allocator.record_history(HistorySize::default(), None);
        let malloc =
            |pool: &Allocator, mib| pool.malloc(Bytes::mib(mib), stream).expect("there is memory");
        let free = |pool: &Allocator, block| pool.free(block, stream).expect("it is the pool's");
        let before = malloc(&part, 3);
        part.join_history(&recording);
        part.join_history(&recording);
        let (own, of_part) = (malloc(&allocator, 4), malloc(&part, 5));
        // Pools that are gone leave nothing.
        for _ in 0..100 {
            let gone = allocator.create_pool("gone").expect("it can be made");
            gone.join_history(&recording);
            gone.close().expect("it is empty");
            assert!(recording.joined.lock().expect("no thread panics").pools.len() <= 16);
        }
        let sizes = |trace: &Trace| {
            let events = trace.events.iter().filter(|event| event.kind == EventKind::Alloc);
            let events: Vec<u64> = events.map(|event| event.size.count() >> 20).collect();
            let blocks = trace.segments.iter().flat_map(|segment| &segment.blocks);
            let live = blocks.filter(|block| block.state == BlockState::Active);
            let mut live: Vec<u64> = live.map(|block| block.size.count() >> 20).collect();
            live.sort_unstable();
            (events, live)
        };
        let mut trace = allocator.snapshot(Some(&recording));
        assert_eq!(sizes(&trace), (vec![4, 5], vec![4]));
        part.add_to_snapshot(&mut trace);
        assert_eq!(sizes(&trace), (vec![4, 5], vec![3, 4, 5]));
        assert!(trace.allocator_settings.iter().any(|(name, _)| name == "part.reserved"));
        assert_eq!(trace.devices(), [0]);
        assert!(allocator.stop_history(&recording));
        free(&part, before);
        free(&part, of_part);
        free(&allocator, own);
        assert_eq!(allocator.snapshot(Some(&recording)).events.len(), trace.events.len());
        assert!(!allocator.stop_history(&recording));
    }

    #[test]
    fn a_snapshot_says_that_its_ring_was_full() {
        let device = crate::open("sim:h200").expect("it is simulated");
        let allocator = Allocator::new(device, Config::default()).expect("it is possible");
        let stream = allocator.create_stream().expect("a stream can be made");
        let recording =
            allocator.record_history(HistorySize { events: 8, ..HistorySize::default() }, None);
        let overflowed = || {
            let trace = allocator.snapshot(Some(&recording));
            let mut names = trace.allocator_settings.iter().map(|(name, _)| &name[..]);
            names.any(|name| name == "trace_alloc_overflowed")
        };
        for (pairs, expected) in [(1, false), (8, true)] {
            for _ in 0..pairs {
                let block = allocator.malloc(Bytes::mib(3), stream).expect("there is memory");
                allocator.free(block, stream).expect("it is the allocator's");
            }
            assert_eq!(overflowed(), expected);
        }
    }

    #[test]
    fn a_card_has_its_number_and_any_other_device_is_the_first() {
        for (id, number) in [("cuda:0", 0), ("cuda:7", 7), ("sim:h200", 0), ("cuda:x", 0), ("", 0)]
        {
            assert_eq!(device_number(id), number, "{id}");
        }
    }
}
