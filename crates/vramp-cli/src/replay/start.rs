//! What the recorded allocator held when the recording began.

use std::collections::BTreeMap;

use vramp_alloc::{Bytes, DeviceAddr};
use vramp_trace::{EventKind, Request, Trace, Workload};

/// A segment that was there before the first event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EarlierSegment {
    /// Where it began.
    pub start: DeviceAddr,
    /// How long it is.
    pub len: Bytes,
    /// The raw number of its stream.
    pub raw_stream: u64,
    /// Blocks in users' hands, in address order: the workload's number of each.
    pub blocks: Vec<u32>,
}

/// Segments that were there before the first event, in address order: those at the end that were
/// not made meanwhile, and those that were given back without having been made. Expandable ones are
/// left out. O(events).
pub(super) fn earlier_segments(trace: &Trace, workload: &Workload) -> Vec<EarlierSegment> {
    let on_device = |device: u16| u32::from(device) == workload.device;
    let at_end = trace.segments.iter().filter(|s| on_device(s.device) && !s.is_expandable);
    let mut segments: BTreeMap<DeviceAddr, EarlierSegment> =
        at_end.map(|s| (s.address, segment(trace, s.address, s.total_size, s.stream))).collect();
    // Backwards in time: what was made was not there before, what was given back was.
    for event in trace.events.iter().rev().filter(|event| on_device(event.device)) {
        match event.kind {
            EventKind::SegmentAlloc => drop(segments.remove(&event.address)),
            EventKind::SegmentFree => {
                let given_back = segment(trace, event.address, event.size, event.stream);
                segments.insert(event.address, given_back);
            }
            _ => {}
        }
    }
    for request in &workload.requests {
        let &Request::Alloc { block, .. } = request else { continue };
        let Some(at) = workload.initial_address(block) else { break };
        if let Some((start, found)) = segments.range_mut(..=at).next_back()
            && at < *start + found.len
        {
            found.blocks.push(block);
        }
    }
    segments.into_values().collect()
}

fn segment(
    trace: &Trace,
    start: DeviceAddr,
    len: Bytes,
    stream: vramp_trace::StreamIndex,
) -> EarlierSegment {
    let raw_stream = trace.raw_stream(stream).unwrap_or_default();
    EarlierSegment { start, len, raw_stream, blocks: Vec::new() }
}
