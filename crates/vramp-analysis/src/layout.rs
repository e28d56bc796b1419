//! Where the recorded allocator's blocks lie in its segments at one moment, and what keeps the free
//! memory between them apart.
//!
//! 1. The segments of the moment follow from those at the end of the recording and the events of
//!    segments after it; without segments at the end, from the events before it.
//! 2. The blocks of the moment lie at their recorded addresses, rounded up as PyTorch rounds.
//! 3. The rest of each segment is *holes*. A hole is pinned by the blocks on both sides of it: its
//!    bytes are attributed to their sites, half each.
//!
//! In a segment of more than 2 MiB that cannot grow, PyTorch does not split off a rest of up to
//! 1 MiB. Such a rest behind a block counts as rounding, not as a hole.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use vramp::DeviceAddr;
use vramp::peers::torch::TorchConfig;
use vramp_trace::{Event, EventKind, PoolId, Request, StackId};

use crate::blocks::RequestIndex;
use crate::frames::SiteId;
use crate::job::Job;

/// Largest segment of PyTorch's pool for small blocks.
const SMALL_SEGMENT: u64 = 2 << 20;
/// Largest rest of a large block that PyTorch does not split off.
const UNSPLIT: u64 = 1 << 20;
/// Most rows of a list.
const TOP: usize = 8;

/// The free memory inside the recorded allocator's segments at one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Layout {
    /// Reserved bytes.
    pub reserved_bytes: u64,
    /// Number of segments.
    pub segments: u64,
    /// Bytes that blocks have beyond their requests.
    pub rounding_bytes: u64,
    /// Bytes of blocks that are freed, while other streams may still use them.
    pub waiting_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Number of holes.
    pub holes: u64,
    /// Bytes of the largest hole.
    pub largest_hole_bytes: u64,
    /// Free bytes in segments without a block, which `torch.cuda.empty_cache` releases.
    pub empty_segment_bytes: u64,
    /// Free bytes in private pools: those of CUDA graphs and of `MemPool`, which serve no other
    /// requests.
    pub private_free_bytes: u64,
    /// The same by stream, the most free bytes first.
    pub streams: Vec<StreamHoles>,
    /// The lines of the program whose blocks lie beside the holes, the most free bytes first.
    pub pinned_by: Vec<Pinner>,
}

/// Free memory in the segments of one stream.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamHoles {
    /// Raw handle of the stream.
    pub stream: u64,
    /// Reserved bytes.
    pub reserved_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Bytes of the largest hole.
    pub largest_hole_bytes: u64,
}

/// Blocks of one line of the program that lie beside holes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pinner {
    /// The line.
    pub site: String,
    /// Bytes of the holes that are attributed to it.
    pub free_bytes: u64,
    /// Number of its blocks beside holes.
    pub blocks: u64,
    /// Their bytes.
    pub block_bytes: u64,
}

#[derive(Clone, Copy)]
struct Range {
    end: u64,
    stream: u64,
    is_expandable: bool,
    is_private: bool,
}

struct Placed {
    end: u64,
    requested: u64,
    stack: Option<StackId>,
    is_waiting: bool,
}

impl Layout {
    /// Reconstructs the segments and blocks just before the request at `moment`. `None` if the
    /// segments of that time were not recorded. O(events + blocks log blocks).
    pub fn before(job: &Job<'_>, moment: RequestIndex) -> Option<Layout> {
        let segments = segments_before(job, moment);
        let blocks = blocks_before(job, moment);
        let mut all = Builder::default();
        let mut inside = 0;
        for (&start, range) in &segments {
            let here = blocks.range(start..range.end);
            inside += all.segment(job, start, range, here);
        }
        // Blocks outside of all segments: events of segments are missing.
        (inside == blocks.len() && !segments.is_empty()).then(|| all.finish(job))
    }
}

#[derive(Default)]
struct Builder {
    layout: Sums,
    streams: BTreeMap<u64, StreamHoles>,
    pinners: HashMap<SiteId, (u64, HashMap<u64, u64>)>,
}

#[derive(Default)]
struct Sums {
    reserved: u64,
    segments: u64,
    rounding: u64,
    waiting: u64,
    free: u64,
    holes: u64,
    largest: u64,
    private: u64,
    empty: u64,
}

impl Builder {
    /// Adds a segment with its blocks, and returns their number.
    fn segment<'a>(
        &mut self,
        job: &Job<'_>,
        start: u64,
        range: &Range,
        blocks: impl Iterator<Item = (&'a u64, &'a Placed)>,
    ) -> usize {
        let len = range.end - start;
        self.layout.reserved += len;
        self.layout.segments += 1;
        let stream = self.streams.entry(range.stream).or_insert(StreamHoles {
            stream: range.stream,
            reserved_bytes: 0,
            free_bytes: 0,
            largest_hole_bytes: 0,
        });
        stream.reserved_bytes += len;
        let keeps_rests = !range.is_expandable && len > SMALL_SEGMENT;
        let (mut next, mut before, mut count) = (start, None, 0);
        for (&at, block) in blocks {
            self.hole(job, range, (next, at), before, Some((at, block)), keeps_rests);
            let end = block.end.min(range.end);
            if block.is_waiting {
                self.layout.waiting += end - at;
            } else {
                self.layout.rounding += (end - at).saturating_sub(block.requested);
            }
            next = next.max(end);
            before = Some((at, block));
            count += 1;
        }
        self.hole(job, range, (next, range.end), before, None, keeps_rests);
        // A private pool keeps its segments.
        self.layout.empty += if count == 0 && !range.is_private { len } else { 0 };
        count
    }

    fn hole(
        &mut self,
        job: &Job<'_>,
        range: &Range,
        (from, to): (u64, u64),
        before: Option<(u64, &Placed)>,
        after: Option<(u64, &Placed)>,
        keeps_rests: bool,
    ) {
        let len = to.saturating_sub(from);
        if len == 0 {
            return;
        }
        if keeps_rests && len <= UNSPLIT && before.is_some() {
            self.layout.rounding += len;
            return;
        }
        self.layout.free += len;
        self.layout.holes += 1;
        self.layout.largest = self.layout.largest.max(len);
        self.layout.private += if range.is_private { len } else { 0 };
        if let Some(stream) = self.streams.get_mut(&range.stream) {
            stream.free_bytes += len;
            stream.largest_hole_bytes = stream.largest_hole_bytes.max(len);
        }
        let sides: Vec<(u64, &Placed)> = [before, after].into_iter().flatten().collect();
        for (index, (at, block)) in sides.iter().enumerate() {
            // The first side has the odd byte.
            let part =
                len / sides.len() as u64 + if index == 0 { len % sides.len() as u64 } else { 0 };
            let site = job.labels.site_of(block.stack);
            let (bytes, blocks) = self.pinners.entry(site).or_default();
            *bytes += part;
            blocks.insert(*at, block.requested);
        }
    }

    fn finish(self, job: &Job<'_>) -> Layout {
        let mut streams: Vec<StreamHoles> = self.streams.into_values().collect();
        streams.sort_by_key(|it| (std::cmp::Reverse(it.free_bytes), it.stream));
        let mut pinned_by: Vec<Pinner> = self
            .pinners
            .into_iter()
            .map(|(site, (free_bytes, blocks))| Pinner {
                site: job.labels.site(site).to_owned(),
                free_bytes,
                blocks: blocks.len() as u64,
                block_bytes: blocks.values().sum(),
            })
            .collect();
        pinned_by.sort_by(|a, b| b.free_bytes.cmp(&a.free_bytes).then_with(|| a.site.cmp(&b.site)));
        pinned_by.truncate(TOP);
        Layout {
            reserved_bytes: self.layout.reserved,
            segments: self.layout.segments,
            rounding_bytes: self.layout.rounding,
            waiting_bytes: self.layout.waiting,
            free_bytes: self.layout.free,
            holes: self.layout.holes,
            largest_hole_bytes: self.layout.largest,
            empty_segment_bytes: self.layout.empty,
            private_free_bytes: self.layout.private,
            streams,
            pinned_by,
        }
    }
}

/// Returns the index in the trace of the first event that is not before the request.
fn event_at(job: &Job<'_>, moment: RequestIndex) -> usize {
    let from = moment as usize;
    let found = (from..job.workload.requests.len()).find_map(|it| job.workload.event_of(it));
    found.unwrap_or(job.trace.events.len())
}

/// Returns the segments just before the request, by address.
fn segments_before(job: &Job<'_>, moment: RequestIndex) -> BTreeMap<u64, Range> {
    let raw = |stream| job.trace.raw_stream(stream).unwrap_or_default();
    let private = |pool: PoolId| pool != PoolId::default();
    let range = |(index, event): (usize, &Event), is_expandable| Range {
        end: event.address.number().saturating_add(event.size.count()),
        stream: raw(event.stream),
        is_expandable,
        is_private: private(job.trace.labels.of_event(index).pool),
    };
    let events = || job.workload.device_events(job.trace);
    let at = event_at(job, moment);
    let mut ranges = BTreeMap::new();
    let mut at_end = job.workload.device_segments(job.trace).peekable();
    if at_end.peek().is_none() {
        for (index, event) in events().take_while(|(index, _)| *index < at) {
            let start = event.address.number();
            match event.kind {
                EventKind::SegmentAlloc => add(&mut ranges, start, range((index, event), false)),
                EventKind::SegmentMap => add(&mut ranges, start, range((index, event), true)),
                EventKind::SegmentFree | EventKind::SegmentUnmap => {
                    remove(&mut ranges, start, range((index, event), false).end);
                }
                _ => {}
            }
        }
        return ranges;
    }
    for (index, segment) in at_end {
        let start = segment.address.number();
        let range = Range {
            end: start.saturating_add(segment.total_size.count()),
            stream: raw(segment.stream),
            is_expandable: segment.is_expandable,
            is_private: private(job.trace.labels.of_segment(index).pool),
        };
        add(&mut ranges, start, range);
    }
    // Backwards in time.
    for (index, event) in events().rev().take_while(|(index, _)| *index >= at) {
        let start = event.address.number();
        match event.kind {
            EventKind::SegmentAlloc | EventKind::SegmentMap => {
                remove(&mut ranges, start, range((index, event), false).end);
            }
            EventKind::SegmentFree => add(&mut ranges, start, range((index, event), false)),
            EventKind::SegmentUnmap => add(&mut ranges, start, range((index, event), true)),
            _ => {}
        }
    }
    ranges
}

/// Adds a range. Expandable ranges of one stream that touch are one segment.
fn add(ranges: &mut BTreeMap<u64, Range>, start: u64, mut range: Range) {
    let mut start = start;
    remove(ranges, start, range.end);
    let joins =
        |other: &Range| range.is_expandable && other.is_expandable && other.stream == range.stream;
    let next = ranges.get(&range.end).copied().filter(joins);
    let before = ranges.range(..start).next_back().map(|(&at, &found)| (at, found));
    let before = before.filter(|(_, found)| found.end == start && joins(found));
    if let Some(next) = next {
        ranges.remove(&range.end);
        range.end = next.end;
    }
    if let Some((at, _)) = before {
        start = at;
    }
    if range.end > start {
        ranges.insert(start, range);
    }
}

/// Removes the addresses from `start` to `end` from all ranges.
fn remove(ranges: &mut BTreeMap<u64, Range>, start: u64, end: u64) {
    // An event of no bytes would cut the range that it lies in.
    if start >= end {
        return;
    }
    while let Some((&at, &range)) = ranges.range(..end).next_back() {
        if range.end <= start {
            return;
        }
        ranges.remove(&at);
        if range.end > end {
            ranges.insert(end, range);
        }
        if at < start {
            ranges.insert(at, Range { end: start, ..range });
            return;
        }
    }
}

/// Returns the blocks just before the request, by address: the live ones, and freed ones that other
/// streams may still use.
fn blocks_before(job: &Job<'_>, moment: RequestIndex) -> BTreeMap<u64, Placed> {
    let torch = job.recorded.settings.as_deref().map(TorchConfig::parse);
    let torch = torch.and_then(Result::ok).unwrap_or_default();
    let mut blocks = BTreeMap::new();
    let mut place = |number: u32, is_waiting| {
        let block = job.blocks.get(number);
        let address = match job.workload.event_of(block.alloc as usize) {
            Some(event) => Some(job.trace.events[event].address),
            None => job.workload.initial_address(number),
        };
        let Some(start) = address.map(DeviceAddr::number) else { return };
        let rounded = torch.round(block.size).unwrap_or(block.size).count();
        let end = start.saturating_add(rounded);
        let requested = block.size.count();
        blocks.insert(start, Placed { end, requested, stack: block.stack, is_waiting });
    };
    for (number, _) in job.blocks.live_before(moment) {
        place(number, false);
    }
    for number in waiting_before(job, moment) {
        place(number, true);
    }
    blocks
}

/// Returns the blocks that are freed just before the request, but not completely.
fn waiting_before(job: &Job<'_>, moment: RequestIndex) -> Vec<u32> {
    let mut waiting = std::collections::BTreeSet::new();
    for request in job.workload.requests.iter().take(moment as usize) {
        match *request {
            Request::Free { block } => drop(waiting.insert(block)),
            Request::FreeCompleted { block } => drop(waiting.remove(&block)),
            Request::Alloc { .. } | Request::Oom { .. } => {}
        }
    }
    waiting.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use vramp::{Bytes, DeviceAddr};
    use vramp_trace::{StreamIndex, Trace};

    use super::*;
    use crate::testing::trace;

    const MIB: u64 = 1 << 20;

    fn at(kind: EventKind, mib: u64, size: u64) -> Event {
        let size = Bytes::new(size);
        let address = DeviceAddr::new(mib * MIB);
        let (device, stream) = (0, StreamIndex(0));
        Event { kind, device, stream, address, size, time_us: 0, stack: None }
    }

    fn layout(made: &Trace, moment: u32) -> Option<Layout> {
        Layout::before(&Job::of(made, 0), moment)
    }

    #[test]
    fn holes_lie_between_blocks_and_small_rests_are_rounding() {
        use EventKind::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc};
        let made = trace(&[
            at(SegmentAlloc, 100, 20 * MIB),
            at(Alloc, 100, 4 * MIB - 100),
            at(Alloc, 104, 8 * MIB),
            at(Alloc, 112, 7 * MIB + MIB / 2),
            at(FreeRequested, 104, 8 * MIB),
            at(FreeCompleted, 104, 8 * MIB),
        ]);
        let found = layout(&made, 5).unwrap();
        assert_eq!((found.free_bytes, found.holes), (8 * MIB, 1));
        assert_eq!(found.rounding_bytes, 100 + MIB / 2);
        assert_eq!((found.segments, found.reserved_bytes), (1, 20 * MIB));
        assert_eq!(found.pinned_by[0].free_bytes, 8 * MIB);
        assert_eq!((found.pinned_by[0].blocks, found.waiting_bytes), (2, 0));
        assert_eq!(layout(&made, 4).unwrap().waiting_bytes, 8 * MIB);
        assert_eq!(layout(&made, 1).unwrap().free_bytes, 16 * MIB);
        assert_eq!(layout(&made, 1).unwrap().empty_segment_bytes, 0);
        assert_eq!(layout(&made, 0).unwrap().empty_segment_bytes, 20 * MIB);
    }

    #[test]
    fn the_past_follows_from_the_segments_at_the_end() {
        use EventKind::{Alloc, SegmentFree, SegmentMap, SegmentUnmap};
        let mut made = trace(&[
            at(SegmentFree, 1000, 20 * MIB),
            at(Alloc, 100, 4 * MIB),
            at(SegmentUnmap, 110, 10 * MIB),
            at(SegmentMap, 200, 2 * MIB),
            at(Alloc, 104, MIB),
        ]);
        made.segments.push(vramp_trace::Segment {
            device: 0,
            stream: StreamIndex(0),
            address: DeviceAddr::new(100 * MIB),
            total_size: Bytes::mib(10),
            segment_type: "large".to_owned(),
            is_expandable: true,
            stack: None,
            blocks: Vec::new(),
        });
        let found = |moment| layout(&made, moment).map(|it| (it.segments, it.reserved_bytes / MIB));
        assert_eq!(found(0), Some((1, 20)));
        assert_eq!(found(1), Some((1, 10)));
    }

    #[test]
    fn an_event_of_no_bytes_does_not_cut_a_segment() {
        use EventKind::{Alloc, SegmentAlloc, SegmentUnmap};
        let made = trace(&[
            at(SegmentAlloc, 100, 20 * MIB),
            at(SegmentUnmap, 110, 0),
            at(Alloc, 100, 4 * MIB),
        ]);
        assert_eq!(layout(&made, 1).unwrap().segments, 1);
    }

    #[test]
    fn blocks_outside_of_segments_show_that_segments_are_missing() {
        let made = trace(&[at(EventKind::Alloc, 100, MIB)]);
        assert_eq!(layout(&made, 1), None);
    }
}
