//! What the recording says of the allocator that was recorded.

use std::fmt;

use vramp_alloc::Bytes;
use vramp_trace::{Event, EventKind, Request, Trace, Workload};

use super::start::earlier_segments;
use super::{EarlierSegment, Segments};

use crate::count::Count;

/// What the recorded allocator took, as far as the recording tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Events of the device.
    pub events: u64,
    /// The most memory it held; `None` if the recording says nothing of it.
    pub peak_reserved: Option<Bytes>,
    /// What it took from the driver and gave back.
    pub segments: Segments,
    /// Segments it held before the recording began.
    pub earlier: Vec<EarlierSegment>,
    /// Its settings in PyTorch's syntax, where recorded.
    pub settings: Option<String>,
    /// The first request it could not serve.
    pub oom: Option<RecordedOom>,
}

/// A request that the recorded allocator could not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedOom {
    /// The index of its event in the trace.
    pub event: usize,
    /// What was asked for.
    pub size: Bytes,
    /// What the program held then.
    pub live: Bytes,
    /// What the recorded allocator held then; `None` if the recording says nothing of it.
    pub held: Option<Bytes>,
    /// What was free on the card then, where recorded.
    pub free: Option<Bytes>,
}

impl Recorded {
    /// What `trace` says of the device of `workload`.
    ///
    /// What was held before the recording began follows from what was held at its end. O(events).
    pub fn of(trace: &Trace, workload: &Workload) -> Recorded {
        let on_device = |found: u16| u32::from(found) == workload.device;
        let settings = trace.allocator_settings.iter();
        let mut settings = settings.filter(|(key, _)| key == "PYTORCH_CUDA_ALLOC_CONF");
        let mut recorded = Recorded {
            segments: Segments::of(trace, workload),
            earlier: earlier_segments(trace, workload),
            settings: settings.next().map(|(_, value)| value.clone()),
            ..Recorded::default()
        };
        let mut change_at_oom = 0;
        // Counted against the beginning; signed and wide, for recordings may be wrong.
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
                    held: None,
                    free: event.device_free(),
                });
            }
        }
        let segments = trace.segments.iter().filter(|segment| on_device(segment.device));
        let sizes = segments.map(|segment| i128::from(segment.total_size.count()));
        let at_end = sizes.reduce(|sum, size| sum + size);
        known |= at_end.is_some();
        let at_start = at_end.map_or(0, |held| (held - change).max(0));
        let held =
            |change: i128| u64::try_from(at_start + change).ok().filter(|_| known).map(Bytes::new);
        recorded.peak_reserved = held(highest);
        if let Some(oom) = &mut recorded.oom {
            oom.held = held(change_at_oom);
        }
        recorded
    }
}

impl fmt::Display for RecordedOom {
    /// What happened, and whether there was memory enough.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RecordedOom { event, size, live, held, free } = *self;
        let event = Count(event as u64);
        write!(
            f,
            "The recorded job ran out of memory at event {event}: it asked for {size} with {live} \
             live."
        )?;
        let (Some(held), Some(needed)) = (held, live.checked_add(size)) else { return Ok(()) };
        if needed <= held {
            return write!(
                f,
                " The {held} that its allocator held were enough for both: they lay in fragments."
            );
        }
        let Some(free) = free else { return Ok(()) };
        if size <= free {
            write!(
                f,
                " Its allocator held {held} and the card had {free} free: the job ran under a limit."
            )
        } else if held.checked_add(free).is_none_or(|all| needed <= all) {
            write!(
                f,
                " The {held} that its allocator held and the {free} free on the card were enough \
                 for both: memory lay in fragments."
            )
        } else {
            write!(
                f,
                " It needed {needed} in all; its allocator held {held} and {free} were free: no \
                 allocator could have served it on this card."
            )
        }
    }
}

/// How much more the recorded allocator held after the event.
fn step(event: &Event) -> Option<i128> {
    let size = i128::from(event.size.count());
    match event.kind {
        EventKind::SegmentAlloc | EventKind::SegmentMap => Some(size),
        EventKind::SegmentFree | EventKind::SegmentUnmap => Some(-size),
        _ => None,
    }
}

/// What the program holds when it makes the request of an event.
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
    use vramp_alloc::DeviceAddr;
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
    fn what_was_held_before_the_recording_follows_from_its_end() {
        use EventKind::{SegmentAlloc, SegmentFree};
        let events = [(SegmentAlloc, 4), (SegmentFree, 3)];
        assert_eq!(recorded(&events, &[]).peak_reserved, Some(Bytes::gib(4)));
        assert_eq!(recorded(&events, &[5, 6]).peak_reserved, Some(Bytes::gib(14)));
        assert_eq!(recorded(&[], &[5, 6]).peak_reserved, Some(Bytes::gib(11)));
        assert_eq!(recorded(&[], &[]).peak_reserved, None);
    }

    #[test]
    fn the_failed_request_is_told_with_what_was_live_and_held() {
        use EventKind::{Alloc, Oom, SegmentAlloc};
        let oom =
            recorded(&[(SegmentAlloc, 8), (Alloc, 5), (Oom, 4), (Alloc, 1)], &[]).oom.unwrap();
        assert_eq!((oom.event, oom.live, oom.size), (2, Bytes::gib(5), Bytes::gib(4)));
        assert_eq!((oom.held, oom.free), (Some(Bytes::gib(8)), None));
    }

    #[test]
    fn whether_memory_lacked_or_lay_in_fragments_is_said() {
        let said = |size: u64, free: Option<u64>| {
            let oom = RecordedOom {
                event: 7,
                size: Bytes::gib(size),
                live: Bytes::gib(10),
                held: Some(Bytes::gib(14)),
                free: free.map(Bytes::gib),
            };
            oom.to_string()
        };
        assert!(said(3, None).ends_with("were enough for both: they lay in fragments."));
        assert!(said(5, Some(2)).ends_with("were enough for both: memory lay in fragments."));
        assert!(said(5, Some(6)).ends_with("the job ran under a limit."));
        assert!(said(9, Some(2)).contains("no allocator could have served it"));
        assert!(said(9, None).ends_with("10.00 GiB live."));
    }
}
