//! What the recording says of the allocator that was recorded.

use vramp::Bytes;
use vramp_trace::{Event, EventKind, Request, Trace, Workload};

/// What the recorded allocator took, as far as the recording tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Events of the device.
    pub events: u64,
    /// The most memory it held; `None` if the recording says nothing of it.
    pub peak_reserved: Option<Bytes>,
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
}

impl Recorded {
    /// What `trace` says of the device of `workload`.
    ///
    /// What was held before the recording began follows from what was held at its end. O(events).
    pub fn of(trace: &Trace, workload: &Workload) -> Recorded {
        let on_device = |found: u16| u32::from(found) == workload.device;
        let mut recorded = Recorded::default();
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
                let oom = RecordedOom {
                    event: index,
                    size: event.size,
                    live: live_before(workload, index),
                };
                recorded.oom = Some(oom);
            }
        }
        let segments = trace.segments.iter().filter(|segment| on_device(segment.device));
        let sizes = segments.map(|segment| i128::from(segment.total_size.count()));
        let at_end = sizes.reduce(|sum, size| sum + size);
        known |= at_end.is_some();
        let at_start = at_end.map_or(0, |held| (held - change).max(0));
        let peak = u64::try_from(at_start + highest).ok();
        recorded.peak_reserved = peak.filter(|_| known).map(Bytes::new);
        recorded
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
        Request::UsesDone { .. } | Request::Oom { .. } => live,
    })
}
