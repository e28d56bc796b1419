//! The recorded allocator: its reserved memory, its segments, its first failure, and how much of the
//! job the recording shows.

use std::fmt;

use vramp::Bytes;
use vramp::peers::torch::TorchConfig;
use vramp_trace::{Coverage, Event, EventKind, OlderBlocks, Request, Trace, Workload};

use super::initial::initial_segments;
use super::{InitialSegment, SegmentChanges};

use crate::native;
use crate::number::{Count, plural};

/// The recorded allocator, as far as it was recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Events of the device.
    pub events: u64,
    /// Peak of its reserved bytes.
    pub reserved: Reserved,
    /// Whether the recording shows the whole job.
    pub past: Past,
    /// Segments it allocated and freed.
    pub segments: SegmentChanges,
    /// Segments it had when the recording began.
    pub initial: Vec<InitialSegment>,
    /// Its settings in PyTorch's syntax, where recorded and not the default.
    pub settings: Option<String>,
    /// True if the events are the driver's, as `vramp exec` records them: no allocator stood between.
    pub is_driver: bool,
    /// The last request that failed for lack of memory. Of several without a successful allocation
    /// between them the first, because those after it come from handling its error.
    pub oom: Option<RecordedOom>,
    /// Number of requests that failed.
    pub ooms: u64,
    /// Number of allocations after the last request that failed.
    pub allocations_after_oom: u64,
}

/// What is known of the recorded allocator's peak of reserved bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reserved {
    /// Neither segments nor their events were recorded.
    #[default]
    Unknown,
    /// It reserved at least so much: only the segments at the end were recorded, or events that
    /// account for less than was allocated.
    AtLeast(Bytes),
    /// Its peak.
    Peak(Bytes),
}

impl Reserved {
    /// Returns the peak, if it is known exactly.
    pub fn peak(self) -> Option<Bytes> {
        match self {
            Reserved::Peak(peak) => Some(peak),
            Reserved::AtLeast(_) | Reserved::Unknown => None,
        }
    }
}

/// How much of the job a recording shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Past {
    /// Blocks that are older than the first event.
    pub coverage: Coverage,
    /// Bytes that were reserved before the first event, if known and not zero.
    pub reserved: Option<Bytes>,
    /// The ring of the history was full: older events were overwritten.
    pub overwritten: bool,
}

impl Default for Past {
    fn default() -> Past {
        Past { coverage: Coverage::Whole, reserved: None, overwritten: false }
    }
}

impl Past {
    /// The [name](Past::name) of a recording without events.
    pub const MISSING: &str = "missing";

    /// Returns true if the peaks of other allocators can be compared with the recorded one: what is
    /// older than the recording is at most a twentieth of the peaks.
    pub fn supports_comparison(self, peak_live: Bytes, peak_reserved: Bytes) -> bool {
        let small = |part: Bytes, whole: Bytes| part.count() <= whole.count() / 20;
        let older = match self.coverage {
            Coverage::NoEvents { .. } => return false,
            Coverage::FromTheMiddle { older } => older.bytes,
            Coverage::Whole => Bytes::ZERO,
        };
        small(older, peak_live)
            && self.reserved.is_none_or(|reserved| small(reserved, peak_reserved))
    }

    /// Returns true if the recording has no events.
    pub fn is_missing(self) -> bool {
        matches!(self.coverage, Coverage::NoEvents { .. })
    }

    /// Returns its name in JSON: `whole`, `from_the_middle` or `missing`.
    pub fn name(self) -> &'static str {
        match (self.coverage, self.reserved) {
            (Coverage::NoEvents { .. }, _) => Past::MISSING,
            (Coverage::FromTheMiddle { .. }, _) | (Coverage::Whole, Some(_)) => "from_the_middle",
            (Coverage::Whole, None) if self.overwritten => "from_the_middle",
            (Coverage::Whole, None) => "whole",
        }
    }
}

impl fmt::Display for Past {
    /// Says what is missing and how to record it. Empty for a recording of the whole job.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let older = match self.coverage {
            Coverage::NoEvents { held } => {
                return write!(
                    f,
                    "The recording has no history: it shows only the {} ({}) allocated at its end. \
                     To record the history, call torch.cuda.memory._record_memory_history() before \
                     the job begins.",
                    plural(held.blocks as usize, "block"),
                    held.bytes
                );
            }
            Coverage::Whole if self.reserved.is_none() && !self.overwritten => return Ok(()),
            Coverage::Whole => OlderBlocks::default(),
            Coverage::FromTheMiddle { older } => older,
        };
        write!(
            f,
            "The recording begins in the middle of the job: {} ({}) are older than its first event",
            plural(older.blocks as usize, "block"),
            older.bytes
        )?;
        if let Some(reserved) = self.reserved {
            write!(f, ", and {reserved} were reserved already")?;
        }
        f.write_str(match self.overwritten {
            true => {
                ". The ring of the history was full, and older events are lost. To record all of it, \
                 give torch.cuda.memory._record_memory_history() a larger max_entries."
            }
            false => {
                ". To record all of it, call torch.cuda.memory._record_memory_history() before the \
                 job begins, with a larger max_entries if the ring was full."
            }
        })
    }
}

/// A request that failed in the recorded job for lack of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedOom {
    /// Number of its event among those of the device, from 0.
    pub event: usize,
    /// Its request in the workload.
    pub request: usize,
    /// Requested bytes.
    pub size: Bytes,
    /// Memory of the card that PyTorch lacked: that of the segment for the request.
    pub segment: Bytes,
    /// Allocated bytes at that time.
    pub live: Bytes,
    /// Reserved bytes at that time; `None` if they were not recorded.
    pub reserved: Option<Bytes>,
    /// Free memory of the card at that time, where recorded.
    pub free: Option<Bytes>,
}

impl RecordedOom {
    /// Returns the memory of the card that this allocator could have had: what it had reserved and
    /// what was free. `None` if either was not recorded.
    pub fn usable(&self) -> Option<Bytes> {
        self.reserved?.checked_add(self.free?)
    }

    /// Returns true if the card had enough free memory for the request: the job ran under a limit.
    pub fn is_limited(&self) -> bool {
        self.free.is_some_and(|free| self.segment <= free)
    }
}

impl Recorded {
    /// Collects what `trace` has of the device of `workload`.
    ///
    /// The reserved bytes at the beginning follow from those at the end. O(events of the device).
    pub fn of(trace: &Trace, workload: &Workload) -> Recorded {
        let mut events = workload.device_events(trace);
        let first_event = events.next().map(|(index, _)| index).unwrap_or_default();
        let mut recorded = Recorded {
            segments: SegmentChanges::of(trace, workload),
            initial: initial_segments(trace, workload),
            settings: settings(&trace.allocator_settings),
            is_driver: is_driver(trace, workload),
            ..Recorded::default()
        };
        let torch = recorded.settings.as_deref().map(TorchConfig::parse).and_then(Result::ok);
        let torch = torch.unwrap_or_default();
        // The event of the failure that is shown, and the change at that time.
        let mut failure: Option<(usize, i128)> = None;
        // Relative to the beginning; signed and wide, as a recording may be inconsistent.
        let (mut change, mut highest, mut has_events) = (0i128, 0i128, false);
        for (index, event) in workload.device_events(trace) {
            recorded.events += 1;
            if let Some(step) = step(event) {
                change += step;
                highest = highest.max(change);
                has_events = true;
                continue;
            }
            match event.kind {
                EventKind::Oom => {
                    if failure.is_none() || recorded.allocations_after_oom > 0 {
                        failure = Some((index, change));
                    }
                    recorded.ooms += 1;
                    recorded.allocations_after_oom = 0;
                }
                EventKind::Alloc if recorded.ooms > 0 => recorded.allocations_after_oom += 1,
                _ => {}
            }
        }
        let segments = workload.device_segments(trace);
        let sizes = segments.map(|(_, segment)| i128::from(segment.total_size.count()));
        let at_end = sizes.reduce(|sum, size| sum + size);
        let known = has_events || at_end.is_some();
        let at_start = at_end.map_or(0, |reserved| (reserved - change).max(0));
        let reserved =
            |change: i128| u64::try_from(at_start + change).ok().filter(|_| known).map(Bytes::new);
        recorded.reserved = match reserved(highest) {
            None => Reserved::Unknown,
            // Without events of segments, the end is all that is known.
            Some(peak) if !has_events || peak < workload.peak_live => Reserved::AtLeast(peak),
            Some(peak) => Reserved::Peak(peak),
        };
        let at_first = at_end.and_then(|_| reserved(0)).filter(|reserved| !reserved.is_zero());
        let overwritten = ("trace_alloc_overflowed".to_owned(), "True".to_owned());
        let overwritten = trace.allocator_settings.contains(&overwritten);
        recorded.past = Past { coverage: workload.coverage(), reserved: at_first, overwritten };
        recorded.oom = failure.map(|(index, change)| {
            let event = &trace.events[index];
            let (request, live) = before(workload, index);
            RecordedOom {
                event: index - first_event,
                request,
                size: event.size,
                segment: torch.memory_for(event.size).unwrap_or(Bytes::new(u64::MAX)),
                live,
                reserved: reserved(change).filter(|&reserved| reserved >= live),
                free: event.device_free(),
            }
        });
        recorded
    }
}

/// Returns true if the first recorded stack begins in the driver.
fn is_driver(trace: &Trace, workload: &Workload) -> bool {
    let stack = workload.device_events(trace).find_map(|(_, event)| event.stack);
    let frame = stack.and_then(|stack| trace.stacks.frames(stack).next());
    frame.is_some_and(|frame| native::is_driver(&frame))
}

/// Returns the recorded settings in PyTorch's syntax: the text of the variable, or if the program
/// set them in another way, those that differ from the default.
fn settings(recorded: &[(String, String)]) -> Option<String> {
    let find = |name: &str| {
        let mut found = recorded.iter().filter(|(key, _)| key == name);
        found.next().map(|(_, value)| value.as_str())
    };
    let variables = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];
    if let Some(text) = variables.into_iter().filter_map(find).find(|text| !text.is_empty()) {
        return Some(text.to_owned());
    }
    let mut parts = Vec::new();
    if find("expandable_segments") == Some("True") {
        parts.push("expandable_segments:True".to_owned());
    }
    let number = |name| find(name).and_then(|text| text.parse::<i64>().ok()).filter(|&it| it > 0);
    if let Some(bytes) = number("max_split_size") {
        parts.push(format!("max_split_size_mb:{}", bytes >> 20));
    }
    let threshold = find("garbage_collection_threshold").and_then(|text| text.parse::<f64>().ok());
    if let Some(threshold) = threshold.filter(|&it| it > 0.0 && it < 1.0) {
        parts.push(format!("garbage_collection_threshold:{threshold}"));
    }
    (!parts.is_empty()).then(|| parts.join(","))
}

impl fmt::Display for RecordedOom {
    /// Says what was requested, and whether fragmentation was the cause.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RecordedOom { event, size, live, reserved, free, .. } = *self;
        let is_limited = self.is_limited();
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
        if is_limited {
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

/// Returns the first request that is not before an event, and the live bytes before it.
fn before(workload: &Workload, event: usize) -> (usize, Bytes) {
    let sizes = workload.block_sizes();
    let mut live = 0u64;
    for (index, request) in workload.requests.iter().enumerate() {
        if workload.event_of(index).is_some_and(|found| found >= event) {
            return (index, Bytes::new(live));
        }
        match *request {
            Request::Alloc { size, .. } => live = live.saturating_add(size.count()),
            Request::Free { block } => {
                live = live.saturating_sub(sizes[block as usize].count());
            }
            Request::FreeCompleted { .. } | Request::Oom { .. } => {}
        }
    }
    (workload.requests.len(), Bytes::new(live))
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
        assert_eq!(recorded(&events, &[]).reserved, Reserved::Peak(Bytes::gib(4)));
        assert_eq!(recorded(&events, &[5, 6]).reserved, Reserved::Peak(Bytes::gib(14)));
        assert_eq!(recorded(&[], &[5, 6]).reserved, Reserved::AtLeast(Bytes::gib(11)));
        assert_eq!(recorded(&[], &[]).reserved, Reserved::Unknown);
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
    fn less_reserved_than_allocated_is_a_lower_bound() {
        use EventKind::{Alloc, SegmentAlloc};
        let found = recorded(&[(SegmentAlloc, 4), (Alloc, 5)], &[]);
        assert_eq!(found.reserved, Reserved::AtLeast(Bytes::gib(4)));
        assert_eq!(found.reserved.peak(), None);
    }

    #[test]
    fn the_coverage_says_what_is_missing() {
        use EventKind::{Alloc, FreeRequested, SegmentAlloc, SegmentFree};
        assert_eq!(recorded(&[(SegmentAlloc, 4), (Alloc, 3)], &[]).past, Past::default());
        let late = recorded(&[(FreeRequested, 3), (SegmentFree, 4), (Alloc, 1)], &[0]).past;
        let older = OlderBlocks { blocks: 1, bytes: Bytes::gib(3) };
        let coverage = Coverage::FromTheMiddle { older };
        let expected = Past { coverage, reserved: Some(Bytes::gib(4)), overwritten: false };
        assert_eq!(late, expected);
        assert!(!late.supports_comparison(Bytes::gib(30), Bytes::gib(30)));
        assert!(late.supports_comparison(Bytes::gib(60), Bytes::gib(80)));
        assert!(late.to_string().contains("1 block (3.00 GiB) are older"), "{late}");
        assert!(late.to_string().contains("_record_memory_history"), "{late}");
        // As PyTorch says itself.
        for (past, whole) in [(late, false), (Past::default(), true)] {
            let past = Past { overwritten: true, ..past };
            let text = past.to_string();
            assert!(text.contains("The ring of the history was full"), "{whole}: {text}");
            assert_eq!(past.name(), "from_the_middle");
        }
    }

    #[test]
    fn settings_made_without_the_variable_are_found() {
        let of = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned()));
            settings(&pairs.collect::<Vec<_>>())
        };
        assert_eq!(of(&[("PYTORCH_CUDA_ALLOC_CONF", ""), ("max_split_size", "-1")]), None);
        let text = Some("max_split_size_mb:128".to_owned());
        assert_eq!(of(&[("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")]), text);
        assert_eq!(
            of(&[("expandable_segments", "True"), ("max_split_size", "134217728")]),
            Some("expandable_segments:True,max_split_size_mb:128".to_owned())
        );
    }

    #[test]
    fn the_text_says_whether_memory_was_fragmented() {
        let text = |size: u64, free: Option<u64>| {
            let oom = RecordedOom {
                event: 7,
                request: 5,
                size: Bytes::gib(size),
                segment: Bytes::gib(size),
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
