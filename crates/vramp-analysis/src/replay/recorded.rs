//! The recorded allocator: its reserved memory, its segments and its first failure.

use std::fmt;

use vramp::Bytes;
use vramp_trace::{Event, EventKind, Request, Trace, Workload};

use super::initial::initial_segments;
use super::{InitialSegment, SegmentChanges};

use crate::number::Count;

/// The recorded allocator, as far as it was recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Events of the device.
    pub events: u64,
    /// Peak of its reserved bytes; `None` if they were not recorded.
    pub peak_reserved: Option<Bytes>,
    /// Segments it allocated and freed.
    pub segments: SegmentChanges,
    /// Segments it had when the recording began.
    pub initial: Vec<InitialSegment>,
    /// Its settings in PyTorch's syntax, where recorded.
    pub settings: Option<String>,
    /// The first request that failed for lack of memory.
    pub oom: Option<RecordedOom>,
}

/// A request that failed in the recorded job for lack of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedOom {
    /// Index of its event in the trace.
    pub event: usize,
    /// Requested bytes.
    pub size: Bytes,
    /// Allocated bytes at that time.
    pub live: Bytes,
    /// Reserved bytes at that time; `None` if they were not recorded.
    pub reserved: Option<Bytes>,
    /// Free memory of the card at that time, where recorded.
    pub free: Option<Bytes>,
}

impl Recorded {
    /// Collects what `trace` has of the device of `workload`.
    ///
    /// The reserved bytes at the beginning follow from those at the end. O(events).
    pub fn of(trace: &Trace, workload: &Workload) -> Recorded {
        let on_device = |found: u16| u32::from(found) == workload.device;
        let settings = trace.allocator_settings.iter();
        let mut settings = settings.filter(|(key, _)| key == "PYTORCH_CUDA_ALLOC_CONF");
        let mut recorded = Recorded {
            segments: SegmentChanges::of(trace, workload),
            initial: initial_segments(trace, workload),
            settings: settings.next().map(|(_, value)| value.clone()),
            ..Recorded::default()
        };
        let mut change_at_oom = 0;
        // Relative to the beginning; signed and wide, as a recording may be inconsistent.
        let (mut change, mut highest, mut known) = (0i128, 0i128, false);
        for (index, event) in trace.events.iter().enumerate() {
            if !on_device(event.device) {
                continue;
            }
            recorded.events += 1;
            if let Some(step) = step(event) {
                change += step;
                highest = highest.max(change);
                known = true;
            } else if event.kind == EventKind::Oom && recorded.oom.is_none() {
                change_at_oom = change;
                recorded.oom = Some(RecordedOom {
                    event: index,
                    size: event.size,
                    live: live_before(workload, index),
                    reserved: None,
                    free: event.device_free(),
                });
            }
        }
        let segments = trace.segments.iter().filter(|segment| on_device(segment.device));
        let sizes = segments.map(|segment| i128::from(segment.total_size.count()));
        let at_end = sizes.reduce(|sum, size| sum + size);
        known |= at_end.is_some();
        let at_start = at_end.map_or(0, |reserved| (reserved - change).max(0));
        let reserved =
            |change: i128| u64::try_from(at_start + change).ok().filter(|_| known).map(Bytes::new);
        recorded.peak_reserved = reserved(highest);
        if let Some(oom) = &mut recorded.oom {
            oom.reserved = reserved(change_at_oom);
        }
        recorded
    }
}

impl fmt::Display for RecordedOom {
    /// Says what was requested, and whether fragmentation was the cause.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RecordedOom { event, size, live, reserved, free } = *self;
        let event = Count(event as u64);
        write!(
            f,
            "The recorded job ran out of memory at event {event}: it requested {size} with {live} \
             allocated."
        )?;
        let (Some(reserved), Some(needed)) = (reserved, live.checked_add(size)) else {
            return Ok(());
        };
        if needed <= reserved {
            return write!(
                f,
                " The {reserved} reserved were enough for both: the allocator's memory was \
                 fragmented."
            );
        }
        let Some(free) = free else { return Ok(()) };
        if size <= free {
            write!(
                f,
                " With {reserved} reserved and {free} free on the card, the job ran under a limit."
            )
        } else if reserved.checked_add(free).is_none_or(|all| needed <= all) {
            write!(
                f,
                " The {reserved} reserved and the {free} free on the card were enough for both: \
                 memory was fragmented."
            )
        } else {
            write!(
                f,
                " It needed {needed} in all, with {reserved} reserved and {free} free: no \
                 allocator could have served it on this card."
            )
        }
    }
}

/// Returns the change of the reserved bytes by the event.
fn step(event: &Event) -> Option<i128> {
    let size = i128::from(event.size.count());
    match event.kind {
        EventKind::SegmentAlloc | EventKind::SegmentMap => Some(size),
        EventKind::SegmentFree | EventKind::SegmentUnmap => Some(-size),
        _ => None,
    }
}

/// Returns the live bytes at the request of an event.
fn live_before(workload: &Workload, event: usize) -> Bytes {
    let sizes = workload.block_sizes();
    let before = |&(index, _): &(usize, &Request)| {
        workload.event_of(index).is_none_or(|found| found < event)
    };
    let requests = workload.requests.iter().enumerate().take_while(before);
    requests.fold(Bytes::ZERO, |live, (_, request)| match *request {
        Request::Alloc { size, .. } => live + size,
        Request::Free { block } => live - sizes[block as usize],
        Request::FreeCompleted { .. } | Request::Oom { .. } => live,
    })
}

#[cfg(test)]
mod tests {
    use vramp::DeviceAddr;
    use vramp_trace::{Segment, StreamIndex};

    use super::*;

    fn recorded(events: &[(EventKind, u64)], at_end: &[u64]) -> Recorded {
        let events = events.iter().map(|&(kind, size)| Event {
            kind,
            device: 0,
            stream: StreamIndex(0),
            address: if kind == EventKind::Oom { Event::UNKNOWN_FREE } else { DeviceAddr::new(64) },
            size: Bytes::gib(size),
            time_us: 0,
            stack: None,
        });
        let segments = at_end.iter().map(|&size| Segment {
            stack: None,
            device: 0,
            stream: StreamIndex(0),
            address: DeviceAddr::new(1 << 40),
            total_size: Bytes::gib(size),
            segment_type: "large".to_owned(),
            is_expandable: false,
            blocks: Vec::new(),
        });
        let trace = Trace {
            device_count: 1,
            streams: vec![0],
            events: events.collect(),
            segments: segments.collect(),
            ..Trace::default()
        };
        Recorded::of(&trace, &Workload::from_trace(&trace, 0))
    }

    #[test]
    fn the_initially_reserved_bytes_follow_from_those_at_the_end() {
        use EventKind::{SegmentAlloc, SegmentFree};
        let events = [(SegmentAlloc, 4), (SegmentFree, 3)];
        assert_eq!(recorded(&events, &[]).peak_reserved, Some(Bytes::gib(4)));
        assert_eq!(recorded(&events, &[5, 6]).peak_reserved, Some(Bytes::gib(14)));
        assert_eq!(recorded(&[], &[5, 6]).peak_reserved, Some(Bytes::gib(11)));
        assert_eq!(recorded(&[], &[]).peak_reserved, None);
    }

    #[test]
    fn the_failed_request_has_the_live_and_the_reserved_bytes() {
        use EventKind::{Alloc, Oom, SegmentAlloc};
        let oom =
            recorded(&[(SegmentAlloc, 8), (Alloc, 5), (Oom, 4), (Alloc, 1)], &[]).oom.unwrap();
        assert_eq!((oom.event, oom.live, oom.size), (2, Bytes::gib(5), Bytes::gib(4)));
        assert_eq!((oom.reserved, oom.free), (Some(Bytes::gib(8)), None));
    }

    #[test]
    fn the_text_says_whether_memory_was_fragmented() {
        let text = |size: u64, free: Option<u64>| {
            let oom = RecordedOom {
                event: 7,
                size: Bytes::gib(size),
                live: Bytes::gib(10),
                reserved: Some(Bytes::gib(14)),
                free: free.map(Bytes::gib),
            };
            oom.to_string()
        };
        assert!(
            text(3, None).ends_with("were enough for both: the allocator's memory was fragmented.")
        );
        assert!(text(5, Some(2)).ends_with("were enough for both: memory was fragmented."));
        assert!(text(5, Some(6)).ends_with("the job ran under a limit."));
        assert!(text(9, Some(2)).contains("no allocator could have served it"));
        assert!(text(9, None).ends_with("10.00 GiB allocated."));
    }
}
