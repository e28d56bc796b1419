//! Infers the segments of a recording that has only events, such as an RMM log.
//!
//! 1. Segment events show where the allocator had memory. Blocks outside of these show more.
//! 2. Memory that only blocks show was reserved before the recording began. Ranges less than a page
//!    apart become one segment.
//! 3. Blocks that were never freed are active at the end. The rest of each segment is inactive.

use std::collections::BTreeMap;

use vramp_core::{Bytes, DeviceAddr};

use crate::trace::SIZE_MAX;
use crate::{Block, BlockState, Event, EventKind, Segment, StackId, StreamIndex, Trace};

/// Largest segment that PyTorch calls `small`. It is also the page size of every measured card.
const SMALL_SEGMENT: u64 = 2 << 20;
/// Block alignment of PyTorch's allocator.
const BLOCK_ALIGN: u64 = 512;

impl Trace {
    /// Adds the inferred segments of each device that has events but no segments, and returns their
    /// number. The size of a segment without segment events is a lower bound. Blocks get their
    /// requested sizes, rounded up to 512 bytes.
    ///
    /// Viewers need this to show the state of the allocator. A replay does not.
    ///
    /// O(n log n) in the number of events. Needs memory for the live blocks and segments.
    pub fn infer_segments(&mut self) -> usize {
        let before = self.segments.len();
        let mut known = vec![false; self.device_count as usize];
        for segment in &self.segments {
            if let Some(known) = known.get_mut(usize::from(segment.device)) {
                *known = true;
            }
        }
        let mut states: BTreeMap<u16, State> = BTreeMap::new();
        for event in &self.events {
            if known.get(usize::from(event.device)) == Some(&false) {
                states.entry(event.device).or_default().event(event);
            }
        }
        for (device, state) in states {
            self.segments.extend(state.segments(device));
        }
        self.segments.len() - before
    }
}

/// A range of reserved memory, keyed by its first address.
#[derive(Clone, Copy)]
struct Reserved {
    end: u64,
    stream: StreamIndex,
    stack: Option<StackId>,
    is_expandable: bool,
}

struct Live {
    size: u64,
    stack: Option<StackId>,
    state: BlockState,
}

/// State of one device, from its events.
#[derive(Default)]
struct State {
    /// Memory that segment events show.
    by_segments: BTreeMap<u64, Reserved>,
    /// Memory that blocks outside of `by_segments` show. No two ranges touch.
    by_blocks: BTreeMap<u64, Reserved>,
    live: BTreeMap<u64, Live>,
}

impl State {
    fn event(&mut self, event: &Event) {
        let (start, size) = (event.address.number(), event.size.count());
        let Some(end) = start.checked_add(size) else { return };
        let reserved = |is_expandable| Reserved {
            end,
            stream: event.stream,
            stack: event.stack,
            is_expandable,
        };
        match event.kind {
            EventKind::SegmentAlloc => self.reserve(start, reserved(false)),
            EventKind::SegmentMap => self.reserve(start, reserved(true)),
            EventKind::SegmentFree | EventKind::SegmentUnmap => {
                remove_range(&mut self.by_segments, start, end);
                remove_range(&mut self.by_blocks, start, end);
            }
            EventKind::Alloc => {
                self.show_block(start, reserved(false));
                let state = BlockState::Active;
                self.live.insert(start, Live { size, stack: event.stack, state });
            }
            EventKind::FreeRequested => {
                self.show_block(start, reserved(false));
                let stack = event.stack;
                let live = self.live.entry(start);
                let live = live.or_insert(Live { size, stack, state: BlockState::Active });
                live.state = BlockState::PendingFree;
            }
            EventKind::FreeCompleted => {
                self.show_block(start, reserved(false));
                self.live.remove(&start);
            }
            EventKind::Snapshot
            | EventKind::Oom
            | EventKind::UserDefined
            | EventKind::Unknown(_) => {}
        }
    }

    /// The allocator reserved this range, so none of it was reserved before.
    fn reserve(&mut self, start: u64, mut new: Reserved) {
        remove_range(&mut self.by_segments, start, new.end);
        remove_range(&mut self.by_blocks, start, new.end);
        // An expandable segment that grows stays one segment.
        let mut start = start;
        if new.is_expandable {
            let joins = |old: &Reserved| old.is_expandable && old.stream == new.stream;
            if let Some(next) = self.by_segments.get(&new.end).copied().filter(joins) {
                self.by_segments.remove(&new.end);
                new.end = next.end;
            }
            let before = self.by_segments.range(..start).next_back().map(|(&at, &old)| (at, old));
            if let Some((at, old)) = before.filter(|(_, old)| old.end == start && joins(old)) {
                start = at;
                new.stack = old.stack;
            }
        }
        self.by_segments.insert(start, new);
    }

    /// A block shows that its memory is reserved.
    fn show_block(&mut self, start: u64, mut block: Reserved) {
        // A block of zero bytes has an address too.
        block.end = block.end.max(start.saturating_add(1));
        if let Some((&next, _)) = self.by_segments.range(start..block.end).next() {
            block.end = next;
        }
        if covered(&self.by_segments, start) || covers(&self.by_blocks, start, block.end) {
            return;
        }
        let mut start = start;
        while let Some((at, old)) = overlap(&self.by_blocks, start, block.end) {
            self.by_blocks.remove(&at);
            start = start.min(at);
            block = Reserved { end: block.end.max(old.end), ..old };
        }
        self.by_blocks.insert(start, block);
    }

    fn segments(mut self, device: u16) -> Vec<Segment> {
        self.join_neighbours();
        let mut ranges = self.by_segments;
        ranges.append(&mut self.by_blocks);
        ranges
            .into_iter()
            .map(|(start, range)| {
                // Readers refuse larger sizes.
                let total = (range.end - start).min(SIZE_MAX);
                Segment {
                    device,
                    stream: range.stream,
                    address: DeviceAddr::new(start),
                    total_size: Bytes::new(total),
                    segment_type: if total <= SMALL_SEGMENT { "small" } else { "large" }.to_owned(),
                    is_expandable: range.is_expandable,
                    stack: range.stack,
                    blocks: blocks(&self.live, start, start + total),
                }
            })
            .collect()
    }

    /// Joins ranges of `by_blocks` with less than a page between them.
    fn join_neighbours(&mut self) {
        let mut joined: BTreeMap<u64, Reserved> = BTreeMap::new();
        for (start, range) in std::mem::take(&mut self.by_blocks) {
            if let Some((_, last)) = joined.iter_mut().next_back()
                && start - last.end < SMALL_SEGMENT
                && self.by_segments.range(last.end..start).next().is_none()
            {
                last.end = range.end;
                continue;
            }
            joined.insert(start, range);
        }
        // The last block is rounded up too, up to the next range.
        let mut starts = joined.keys().copied().skip(1).collect::<Vec<u64>>().into_iter();
        for range in joined.values_mut() {
            let next = starts.next().unwrap_or(u64::MAX);
            let limit = self.by_segments.range(range.end..).next().map_or(u64::MAX, |(&at, _)| at);
            let rounded = range.end.checked_next_multiple_of(BLOCK_ALIGN).unwrap_or(range.end);
            range.end = rounded.min(next).min(limit);
        }
        self.by_blocks = joined;
    }
}

/// Returns the live blocks in a range, and inactive blocks between them.
fn blocks(live: &BTreeMap<u64, Live>, start: u64, end: u64) -> Vec<Block> {
    let block = |at: u64, size: u64, requested, state, stack| Block {
        address: DeviceAddr::new(at),
        size: Bytes::new(size),
        requested_size: Some(Bytes::new(requested)),
        state,
        stack,
    };
    let mut found = Vec::new();
    let mut next = start;
    let mut live_here = live.range(start..end).filter(|(_, live)| live.size > 0).peekable();
    while let Some((&at, live)) = live_here.next() {
        let limit = live_here.peek().map_or(end, |&(&at, _)| at);
        if at > next {
            found.push(block(next, at - next, 0, BlockState::Inactive, None));
        }
        let rounded = live.size.checked_next_multiple_of(BLOCK_ALIGN).unwrap_or(live.size);
        let size = rounded.min(limit - at);
        found.push(block(at, size, live.size.min(size), live.state, live.stack));
        next = at + size;
    }
    if next < end {
        found.push(block(next, end - next, 0, BlockState::Inactive, None));
    }
    found
}

fn covered(ranges: &BTreeMap<u64, Reserved>, address: u64) -> bool {
    ranges.range(..=address).next_back().is_some_and(|(_, range)| range.end > address)
}

fn covers(ranges: &BTreeMap<u64, Reserved>, start: u64, end: u64) -> bool {
    ranges.range(..=start).next_back().is_some_and(|(_, range)| range.end >= end)
}

/// Returns the last range that touches or overlaps this one.
fn overlap(ranges: &BTreeMap<u64, Reserved>, start: u64, end: u64) -> Option<(u64, Reserved)> {
    let (&at, &found) = ranges.range(..=end).next_back()?;
    (found.end >= start).then_some((at, found))
}

/// Removes the addresses from `start` to `end` from all ranges.
fn remove_range(ranges: &mut BTreeMap<u64, Reserved>, start: u64, end: u64) {
    if start == end {
        return;
    }
    while let Some((&at, &range)) = ranges.range(..end).next_back() {
        if range.end <= start {
            return;
        }
        ranges.remove(&at);
        if range.end > end {
            ranges.insert(end, Reserved { ..range });
        }
        if at < start {
            ranges.insert(at, Reserved { end: start, ..range });
            return;
        }
    }
}
