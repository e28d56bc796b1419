//! The requests of one device, on numbered blocks, ready for a replay.
//!
//! Recordings begin in the middle and lose events. The life of a block in a workload:
//! 1. `Alloc`. A block that is older than the recording is allocated before the first event.
//! 2. `Free`: the program frees it (PyTorch's `free_requested`).
//! 3. `FreeCompleted`: no stream uses it any more (PyTorch's `free_completed`).
//!
//! Each occurs at most once and in this order. The last two may be missing at the end.

use std::collections::HashMap;
use std::ops::Range;

use vramp_core::{Bytes, DeviceAddr};

use crate::devices::DevicePart;
use crate::{
    Block, BlockState, Coverage, Event, EventKind, Label, Labels, OlderBlocks, Repairs, Segment,
    StackId, StreamIndex, Trace,
};

/// One request of a replay. Blocks and streams are numbered from zero within the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Allocate `size` bytes (may be zero) on `stream`, as block number `block`.
    Alloc {
        /// Number of the block. Each is allocated exactly once.
        block: u32,
        /// Requested bytes, before any rounding.
        size: Bytes,
        /// Index into [`Workload::streams`].
        stream: u32,
    },
    /// Free the block. Other streams may still use it until `FreeCompleted`.
    Free {
        /// Number of the block.
        block: u32,
    },
    /// All work on the freed block is complete.
    FreeCompleted {
        /// Number of the block.
        block: u32,
    },
    /// The recorded allocator failed to allocate `size` bytes here.
    Oom {
        /// Requested bytes.
        size: Bytes,
        /// Bytes that were free on the device, if recorded.
        device_free: Option<Bytes>,
        /// Index into [`Workload::streams`].
        stream: u32,
    },
}

/// The requests on one device of a trace, without addresses, for replay on any allocator.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Name of the trace.
    pub name: String,
    /// The device's ordinal in the trace.
    pub device: u32,
    /// Raw stream handles, in the order of their first request.
    pub streams: Vec<u64>,
    /// All requests in order. Every `Free` follows its `Alloc`, every `FreeCompleted` its `Free`.
    pub requests: Vec<Request>,
    /// Number of blocks. They are numbered from zero in the order of their `Alloc`.
    pub blocks: u32,
    /// Peak of the allocated bytes: the sizes of blocks between their `Alloc` and their `Free`, from the
    /// first event on. A block that was freed before it, or by it, does not count.
    pub peak_live: Bytes,
    /// Index in `requests` of the request that first reached the peak. Zero if there is none.
    pub peak_live_request: usize,
    /// Most bytes needed at once: the peak, or where that is more, what was allocated when a request
    /// failed, with that request.
    pub peak_demand: Bytes,
    /// Requests that were added or left out because the recording is incomplete.
    pub repairs: Repairs,
    /// Addresses of the first blocks, which were allocated before the first event.
    earlier: Vec<DeviceAddr>,
    /// Where the events and segments of the device are.
    part: DevicePart,
    /// Event of each request, or `NO_EVENT`. As long as `requests`.
    events: Vec<u32>,
    /// Where each block comes from.
    origins: Vec<Origin>,
    has_events: bool,
}

/// What is known of the request of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Origin {
    stack: Option<StackId>,
    /// Index in the trace's labels.
    label: Option<u32>,
}

/// Event of a request that was added before the first event.
const NO_EVENT: u32 = u32::MAX;

impl Workload {
    /// Returns the requests on `device` in `trace`. Empty if the trace has no such device.
    ///
    /// O(events), one pass; about 36 bytes per request and 12 per block. [`Workload::all`] takes one
    /// pass for all devices.
    pub fn from_trace(trace: &Trace, device: u32) -> Workload {
        let part = trace.parts().remove(&device).unwrap_or_default();
        Workload::of_part(trace, device, part)
    }

    /// Returns the requests on each device that has events or segments, ascending by device. One of them
    /// may have none.
    ///
    /// O(events + segments), whatever the number of devices.
    pub fn all(trace: &Trace) -> Vec<Workload> {
        let parts = trace.parts().into_iter();
        parts.map(|(device, part)| Workload::of_part(trace, device, part)).collect()
    }

    pub(crate) fn of_part(trace: &Trace, device: u32, part: DevicePart) -> Workload {
        let mut builder = Builder::default();
        for (index, event) in events_in(trace, device, &part) {
            builder.event(index, event, &trace.labels);
            builder.has_events = true;
        }
        for &index in &part.segments {
            let segment = &trace.segments[index as usize];
            for (number, block) in segment.blocks.iter().enumerate() {
                let label = trace.labels.index_of_block(index as usize, number);
                builder.block_at_end(block, segment.stream, label);
            }
        }
        builder.finish(trace, device, part)
    }

    /// Returns the events of the device in `trace`, which the workload was made from, with their indices.
    /// Each step is O(1) in a trace whose events are grouped by device.
    pub fn device_events<'a>(
        &self,
        trace: &'a Trace,
    ) -> impl DoubleEndedIterator<Item = (usize, &'a Event)> + use<'a> {
        events_in(trace, self.device, &self.part)
    }

    /// Returns the indices in [`Trace::events`] from the first event of the device to after the last one.
    /// No other device has an event there if the events are grouped by device.
    pub fn event_range(&self) -> Range<usize> {
        self.part.events.clone()
    }

    /// Returns the segments of the device in `trace`, which the workload was made from, with their
    /// indices. Each step is O(1).
    pub fn device_segments<'a>(
        &'a self,
        trace: &'a Trace,
    ) -> impl Iterator<Item = (usize, &'a Segment)> {
        let indices = self.part.segments.iter().map(|&index| index as usize);
        indices.filter_map(|index| Some((index, trace.segments.get(index)?)))
    }

    /// Returns the index in [`Trace::events`] of the event that a request came from, or `None` for
    /// a request that was added before the first event.
    pub fn event_of(&self, request: usize) -> Option<usize> {
        self.events.get(request).filter(|&&event| event != NO_EVENT).map(|&event| event as usize)
    }

    /// Returns the number of a request's event among the events of its device, from 0. `None` for a
    /// request that was added before the first event.
    pub fn device_event_of(&self, request: usize) -> Option<usize> {
        self.event_of(request).map(|event| event - self.part.events.start)
    }

    /// Returns the address of a block that was allocated before the first event, `None` for later
    /// ones.
    pub fn initial_address(&self, block: u32) -> Option<DeviceAddr> {
        self.earlier.get(block as usize).copied()
    }

    /// Returns the call stack of the request of a block: of its `alloc` event, or of the block in the
    /// segments at the end of the recording. `None` if neither was recorded, as for a block that is
    /// older than the recording and was freed in it. O(1).
    pub fn stack_of(&self, block: u32) -> Option<StackId> {
        self.origins.get(block as usize)?.stack
    }

    /// Returns the labels of the request of a block (its metadata, category, pool and compile
    /// context), from the same places as [`Workload::stack_of`]. `labels` are those of the trace that
    /// the workload was made from. O(1).
    pub fn label_of<'a>(&self, labels: &'a Labels, block: u32) -> Label<'a> {
        labels.at(self.origins.get(block as usize).and_then(|origin| origin.label))
    }

    /// Returns how much of the device's past is recorded. O(blocks older than the recording).
    pub fn coverage(&self) -> Coverage {
        let sizes = self.requests.iter().take(self.earlier.len()).map(|request| match request {
            Request::Alloc { size, .. } => *size,
            _ => Bytes::ZERO,
        });
        let older = OlderBlocks {
            blocks: u32::try_from(self.earlier.len()).unwrap_or(u32::MAX),
            // Sizes in a broken recording may exceed the address space.
            bytes: sizes.fold(Bytes::ZERO, Bytes::saturating_add),
        };
        match (self.has_events, older.blocks) {
            (false, _) => Coverage::NoEvents { held: older },
            (true, 0) => Coverage::Whole,
            (true, _) => Coverage::FromTheMiddle { older },
        }
    }

    /// Returns the size of every block by its number. O(requests).
    pub fn block_sizes(&self) -> Vec<Bytes> {
        self.requests
            .iter()
            .filter_map(|request| match *request {
                Request::Alloc { size, .. } => Some(size),
                _ => None,
            })
            .collect()
    }
}

/// Returns the events of a device, with their indices in the trace.
fn events_in<'a>(
    trace: &'a Trace,
    device: u32,
    part: &DevicePart,
) -> impl DoubleEndedIterator<Item = (usize, &'a Event)> + use<'a> {
    let events = trace.events.get(part.events.clone()).unwrap_or_default();
    let numbered = events.iter().enumerate();
    let first = part.events.start;
    let own = numbered.filter(move |(_, event)| u32::from(event.device) == device);
    own.map(move |(index, event)| (first + index, event))
}

#[derive(Clone, Copy)]
enum State {
    Live,
    Pending,
    Done,
}

/// The block last seen at an address.
struct LastAt {
    block: u32,
    state: State,
}

/// A block that was allocated before the recording began.
struct Earlier {
    block: u32,
    size: Bytes,
    stream: StreamIndex,
    /// True if its free was requested before the recording began too.
    freed: bool,
}

/// Numbers blocks in order of discovery; [`Builder::finish`] renumbers them in order of `Alloc`.
#[derive(Default)]
struct Builder {
    last_at: HashMap<u64, LastAt>,
    earlier: Vec<(u64, Earlier)>,
    requests: Vec<Request>,
    events: Vec<u32>,
    blocks: u32,
    origins: Vec<Origin>,
    repairs: Repairs,
    has_events: bool,
}

impl Builder {
    fn event(&mut self, index: usize, event: &Event, labels: &Labels) {
        let at = u32::try_from(index).expect("a trace has fewer than 2^32 events");
        match event.kind {
            EventKind::Alloc => self.alloc(at, event, labels.index_of_event(at)),
            EventKind::FreeRequested => self.free_requested(at, event),
            EventKind::FreeCompleted => self.free_completed(at, event),
            EventKind::Oom => {
                let (size, stream) = (event.size, event.stream.0);
                self.push(at, Request::Oom { size, device_free: event.device_free(), stream });
            }
            EventKind::SegmentAlloc
            | EventKind::SegmentFree
            | EventKind::SegmentMap
            | EventKind::SegmentUnmap
            | EventKind::Snapshot
            | EventKind::UserDefined
            | EventKind::Unknown(_) => {}
        }
    }

    fn alloc(&mut self, at: u32, event: &Event, label: Option<u32>) {
        let block = self.new_block(Origin { stack: event.stack, label });
        let known = LastAt { block, state: State::Live };
        if let Some(before) = self.last_at.insert(event.address.number(), known) {
            match before.state {
                State::Live => {
                    self.repairs.frees_lost += 1;
                    self.push(at, Request::Free { block: before.block });
                    self.push(at, Request::FreeCompleted { block: before.block });
                }
                State::Pending => {
                    self.repairs.completions_lost += 1;
                    self.push(at, Request::FreeCompleted { block: before.block });
                }
                State::Done => {}
            }
        }
        self.push(at, Request::Alloc { block, size: event.size, stream: event.stream.0 });
    }

    fn free_requested(&mut self, at: u32, event: &Event) {
        let block = match self.last_at.get_mut(&event.address.number()) {
            Some(known) => {
                if !matches!(known.state, State::Live) {
                    self.repairs.frees_repeated += 1;
                    return;
                }
                known.state = State::Pending;
                known.block
            }
            None => {
                self.repairs.blocks_known_from_free += 1;
                self.earlier_block(event, State::Pending, false)
            }
        };
        self.push(at, Request::Free { block });
    }

    fn free_completed(&mut self, at: u32, event: &Event) {
        let block = match self.last_at.get_mut(&event.address.number()) {
            Some(known) => {
                let before = std::mem::replace(&mut known.state, State::Done);
                let block = known.block;
                match before {
                    State::Live => {
                        self.repairs.requests_lost += 1;
                        self.push(at, Request::Free { block });
                    }
                    State::Pending => {}
                    State::Done => {
                        self.repairs.frees_repeated += 1;
                        return;
                    }
                }
                block
            }
            None => {
                self.repairs.blocks_known_from_free += 1;
                self.earlier_block(event, State::Done, true)
            }
        };
        self.push(at, Request::FreeCompleted { block });
    }

    fn block_at_end(&mut self, block: &Block, stream: StreamIndex, label: Option<u32>) {
        let freed = match block.state {
            BlockState::Active => false,
            BlockState::PendingFree => true,
            BlockState::Inactive => return,
        };
        let address = block.address.number();
        match self.last_at.get(&address) {
            Some(LastAt { state: State::Done, .. }) => self.repairs.blocks_unexplained += 1,
            // With the context `state` PyTorch records only the stacks of live blocks.
            Some(known) => {
                let origin = &mut self.origins[known.block as usize];
                origin.stack = origin.stack.or(block.stack);
                origin.label = origin.label.or(label);
            }
            None => {
                self.repairs.blocks_known_from_segments += 1;
                let number = self.new_block(Origin { stack: block.stack, label });
                let size = block.requested_size.unwrap_or(block.size);
                self.earlier.push((address, Earlier { block: number, size, stream, freed }));
                let state = if freed { State::Pending } else { State::Live };
                self.last_at.insert(address, LastAt { block: number, state });
            }
        }
    }

    fn earlier_block(&mut self, event: &Event, state: State, freed: bool) -> u32 {
        // The event of a free has the stack of the free.
        let block = self.new_block(Origin::default());
        let address = event.address.number();
        let earlier = Earlier { block, size: event.size, stream: event.stream, freed };
        self.earlier.push((address, earlier));
        self.last_at.insert(address, LastAt { block, state });
        block
    }

    fn new_block(&mut self, origin: Origin) -> u32 {
        let block = self.blocks;
        self.origins.push(origin);
        self.blocks = block.checked_add(1).expect("a trace has fewer than 2^32 blocks");
        block
    }

    fn push(&mut self, event: u32, request: Request) {
        self.requests.push(request);
        self.events.push(event);
    }

    /// Puts the blocks from before the recording in front, in address order, and gives blocks and
    /// streams their final numbers.
    fn finish(mut self, trace: &Trace, device: u32, part: DevicePart) -> Workload {
        let mut requests = Vec::with_capacity(self.requests.len() + self.earlier.len());
        self.earlier.sort_by_key(|(address, _)| *address);
        for (_, Earlier { block, size, stream, .. }) in &self.earlier {
            requests.push(Request::Alloc { block: *block, size: *size, stream: stream.0 });
        }
        let earlier = self.earlier.iter().map(|(address, _)| DeviceAddr::new(*address)).collect();
        let freed = self.earlier.iter().filter(|(_, earlier)| earlier.freed);
        requests.extend(freed.map(|(_, earlier)| Request::Free { block: earlier.block }));
        let mut events = vec![NO_EVENT; requests.len()];
        requests.append(&mut self.requests);
        events.append(&mut self.events);

        let (streams, new_block) = renumber(&mut requests, self.blocks, trace);
        let mut origins = vec![Origin::default(); self.origins.len()];
        for (old, origin) in self.origins.iter().enumerate() {
            origins[new_block[old] as usize] = *origin;
        }
        let first = events.iter().take_while(|&&event| event == NO_EVENT).count();
        let Peak { peak_live, peak_live_request, peak_demand } =
            peak(&requests, first, self.blocks);
        Workload {
            name: trace.name.clone(),
            device,
            streams,
            requests,
            blocks: self.blocks,
            peak_live,
            peak_live_request,
            peak_demand,
            repairs: self.repairs,
            earlier,
            part,
            events,
            origins,
            has_events: self.has_events,
        }
    }
}

/// Numbers blocks in the order of their `Alloc`, and streams in the order of their first use.
/// Returns the raw handles of the streams, and the new numbers of the blocks.
fn renumber(requests: &mut [Request], blocks: u32, trace: &Trace) -> (Vec<u64>, Vec<u32>) {
    let mut new_block = vec![0u32; blocks as usize];
    let mut next_block = 0;
    let mut new_stream: HashMap<u32, u32> = HashMap::new();
    let mut raw = Vec::new();
    let mut stream_number = |stream: &mut u32| {
        *stream = *new_stream.entry(*stream).or_insert_with(|| {
            raw.push(trace.raw_stream(StreamIndex(*stream)).unwrap_or_default());
            u32::try_from(raw.len() - 1).expect("a trace has fewer than 2^32 streams")
        });
    };
    for request in requests {
        match request {
            Request::Alloc { block, stream, .. } => {
                new_block[*block as usize] = next_block;
                *block = next_block;
                next_block += 1;
                stream_number(stream);
            }
            Request::Free { block } | Request::FreeCompleted { block } => {
                *block = new_block[*block as usize];
            }
            Request::Oom { stream, .. } => stream_number(stream),
        }
    }
    (raw, new_block)
}

/// The peaks of a [`Workload`], by the names of its fields.
struct Peak {
    peak_live: Bytes,
    peak_live_request: usize,
    peak_demand: Bytes,
}

/// Finds the peaks from the first event on, which made request number `first`. Counts in 128 bits, because
/// a broken recording may request more than the address space.
fn peak(requests: &[Request], first: usize, blocks: u32) -> Peak {
    // What was allocated before the first event was allocated in the recording too, unless that event
    // freed a part of it.
    let frees_first = matches!(requests.get(first), Some(Request::Free { .. }));
    let counted_from = if frees_first { first } else { first.saturating_sub(1) };
    let mut sizes: Vec<u64> = Vec::with_capacity(blocks as usize);
    let (mut live, mut peak, mut peak_at, mut demand) = (0u128, 0u128, 0, 0u128);
    for (index, request) in requests.iter().enumerate() {
        match *request {
            Request::Alloc { size, .. } => {
                sizes.push(size.count());
                live += u128::from(size.count());
            }
            Request::Free { block } => live -= u128::from(sizes[block as usize]),
            Request::Oom { size, .. } => demand = demand.max(live + u128::from(size.count())),
            Request::FreeCompleted { .. } => {}
        }
        if live > peak && index >= counted_from {
            (peak, peak_at) = (live, index);
        }
    }
    let bytes = |count: u128| Bytes::new(u64::try_from(count).unwrap_or(u64::MAX));
    Peak {
        peak_live: bytes(peak),
        peak_live_request: peak_at,
        peak_demand: bytes(demand.max(peak)),
    }
}
