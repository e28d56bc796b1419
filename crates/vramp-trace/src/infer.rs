//! The segments of a recording that holds events alone, such as an RMM log.
//!
//! 1. Events of segments say where the allocator held memory; blocks say where else it must have.
//! 2. What only blocks tell of was there before the recording began. Stretches less than a page
//!    apart are taken for one segment.
//! 3. Blocks that nobody freed lie in their segments at the end; the rest of these is inactive.

use std::collections::BTreeMap;

use vramp_core::{Bytes, DeviceAddr};

use crate::trace::SIZE_MAX;
use crate::{Block, BlockState, Event, EventKind, Segment, StackId, StreamIndex, Trace};

/// PyTorch's names for segments go by this size; it is the page of every card measured too.
const SMALL_SEGMENT: u64 = 2 << 20;
/// Blocks take multiples of this in PyTorch's allocator.
const BLOCK_ALIGN: u64 = 512;

impl Trace {
    /// Gives each device that has events but no segments the segments that its events show, and
    /// says how many. Sizes are lower bounds where no event tells of the segment itself; blocks
    /// get their requested sizes rounded up to 512 bytes.
    ///
    /// Viewers need this to show the state of the allocator. A replay does not.
    ///
    /// O(events log events) in time; holds what is live.
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

/// Memory that the allocator holds, by its first address.
#[derive(Clone, Copy)]
struct Held {
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

/// One device as far as its events tell.
#[derive(Default)]
struct State {
    /// What events of segments say.
    told: BTreeMap<u64, Held>,
    /// What blocks outside of these say. Apart from each other and from what is told.
    shown: BTreeMap<u64, Held>,
    live: BTreeMap<u64, Live>,
}

impl State {
    fn event(&mut self, event: &Event) {
        let (start, size) = (event.address.number(), event.size.count());
        let Some(end) = start.checked_add(size) else { return };
        let held =
            |is_expandable| Held { end, stream: event.stream, stack: event.stack, is_expandable };
        match event.kind {
            EventKind::SegmentAlloc => self.take(start, held(false)),
            EventKind::SegmentMap => self.take(start, held(true)),
            EventKind::SegmentFree | EventKind::SegmentUnmap => {
                cut(&mut self.told, start, end);
                cut(&mut self.shown, start, end);
            }
            EventKind::Alloc => {
                self.show(start, held(false));
                let state = BlockState::Active;
                self.live.insert(start, Live { size, stack: event.stack, state });
            }
            EventKind::FreeRequested => {
                self.show(start, held(false));
                let stack = event.stack;
                let live = self.live.entry(start);
                let live = live.or_insert(Live { size, stack, state: BlockState::Active });
                live.state = BlockState::PendingFree;
            }
            EventKind::FreeCompleted => {
                self.show(start, held(false));
                self.live.remove(&start);
            }
            EventKind::Snapshot
            | EventKind::Oom
            | EventKind::UserDefined
            | EventKind::Unknown(_) => {}
        }
    }

    /// The driver gave memory, so nothing held it before.
    fn take(&mut self, start: u64, mut new: Held) {
        cut(&mut self.told, start, new.end);
        cut(&mut self.shown, start, new.end);
        // A segment that grows in place stays one.
        let mut start = start;
        if new.is_expandable {
            let joins = |old: &Held| old.is_expandable && old.stream == new.stream;
            if let Some(next) = self.told.get(&new.end).copied().filter(joins) {
                self.told.remove(&new.end);
                new.end = next.end;
            }
            let before = self.told.range(..start).next_back().map(|(&at, &old)| (at, old));
            if let Some((at, old)) = before.filter(|(_, old)| old.end == start && joins(old)) {
                start = at;
                new.stack = old.stack;
            }
        }
        self.told.insert(start, new);
    }

    /// A block shows that its memory is held, whoever told of it.
    fn show(&mut self, start: u64, mut block: Held) {
        // A request for nothing stands somewhere too.
        block.end = block.end.max(start.saturating_add(1));
        if let Some((&next, _)) = self.told.range(start..block.end).next() {
            block.end = next;
        }
        if covered(&self.told, start) || covers(&self.shown, start, block.end) {
            return;
        }
        let mut start = start;
        while let Some((at, old)) = overlap(&self.shown, start, block.end) {
            self.shown.remove(&at);
            start = start.min(at);
            block = Held { end: block.end.max(old.end), ..old };
        }
        self.shown.insert(start, block);
    }

    fn segments(mut self, device: u16) -> Vec<Segment> {
        self.join_neighbours();
        let mut held = self.told;
        held.append(&mut self.shown);
        held.into_iter()
            .map(|(start, held)| {
                // No card has more, and no reader takes more.
                let total = (held.end - start).min(SIZE_MAX);
                Segment {
                    device,
                    stream: held.stream,
                    address: DeviceAddr::new(start),
                    total_size: Bytes::new(total),
                    segment_type: if total <= SMALL_SEGMENT { "small" } else { "large" }.to_owned(),
                    is_expandable: held.is_expandable,
                    stack: held.stack,
                    blocks: blocks(&self.live, start, start + total),
                }
            })
            .collect()
    }

    /// Makes one of stretches that blocks show with less than a page between them.
    fn join_neighbours(&mut self) {
        let mut joined: BTreeMap<u64, Held> = BTreeMap::new();
        for (start, held) in std::mem::take(&mut self.shown) {
            if let Some((_, last)) = joined.iter_mut().next_back()
                && start - last.end < SMALL_SEGMENT
                && self.told.range(last.end..start).next().is_none()
            {
                last.end = held.end;
                continue;
            }
            joined.insert(start, held);
        }
        // Its last block is rounded up too, as far as there is room.
        let mut starts = joined.keys().copied().skip(1).collect::<Vec<u64>>().into_iter();
        for held in joined.values_mut() {
            let next = starts.next().unwrap_or(u64::MAX);
            let told = self.told.range(held.end..).next().map_or(u64::MAX, |(&at, _)| at);
            let rounded = held.end.checked_next_multiple_of(BLOCK_ALIGN).unwrap_or(held.end);
            held.end = rounded.min(next).min(told);
        }
        self.shown = joined;
    }
}

/// The blocks that live in a stretch, and what lies between them.
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
    let mut here = live.range(start..end).filter(|(_, live)| live.size > 0).peekable();
    while let Some((&at, live)) = here.next() {
        let limit = here.peek().map_or(end, |&(&at, _)| at);
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

fn covered(held: &BTreeMap<u64, Held>, address: u64) -> bool {
    held.range(..=address).next_back().is_some_and(|(_, held)| held.end > address)
}

fn covers(held: &BTreeMap<u64, Held>, start: u64, end: u64) -> bool {
    held.range(..=start).next_back().is_some_and(|(_, held)| held.end >= end)
}

/// The last stretch that touches or overlaps this one.
fn overlap(held: &BTreeMap<u64, Held>, start: u64, end: u64) -> Option<(u64, Held)> {
    let (&at, &found) = held.range(..=end).next_back()?;
    (found.end >= start).then_some((at, found))
}

/// Takes a stretch out of everything that holds a part of it.
fn cut(all: &mut BTreeMap<u64, Held>, start: u64, end: u64) {
    if start == end {
        return;
    }
    while let Some((&at, &held)) = all.range(..end).next_back() {
        if held.end <= start {
            return;
        }
        all.remove(&at);
        if held.end > end {
            all.insert(end, Held { ..held });
        }
        if at < start {
            all.insert(at, Held { end: start, ..held });
            return;
        }
    }
}
