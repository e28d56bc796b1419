//! Segments that the recorded allocator had when the recording began.

use std::collections::BTreeMap;

use vramp::{Bytes, DeviceAddr};
use vramp_trace::{EventKind, Request, Trace, Workload};

/// A segment that existed before the first event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitialSegment {
    /// First address.
    pub start: DeviceAddr,
    /// Length.
    pub len: Bytes,
    /// Raw number of its stream in the trace.
    pub raw_stream: u64,
    /// Numbers of the live blocks in the workload, in address order.
    pub blocks: Vec<u32>,
}

/// Returns the segments that existed before the first event, in address order: those at the end
/// that were not allocated meanwhile, and those that were freed without having been allocated.
/// Expandable ones are left out. O(events of the device).
pub(super) fn initial_segments(trace: &Trace, workload: &Workload) -> Vec<InitialSegment> {
    let at_end = workload.device_segments(trace).map(|(_, s)| s).filter(|s| !s.is_expandable);
    let mut segments: BTreeMap<DeviceAddr, InitialSegment> =
        at_end.map(|s| (s.address, segment(trace, s.address, s.total_size, s.stream))).collect();
    // Backwards in time: an allocated segment did not exist before, a freed one did.
    for (_, event) in workload.device_events(trace).rev() {
        match event.kind {
            EventKind::SegmentAlloc => drop(segments.remove(&event.address)),
            EventKind::SegmentFree => {
                let freed = segment(trace, event.address, event.size, event.stream);
                segments.insert(event.address, freed);
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
) -> InitialSegment {
    let raw_stream = trace.raw_stream(stream).unwrap_or_default();
    InitialSegment { start, len, raw_stream, blocks: Vec::new() }
}
