//! How well the preset foretells what the recorded allocator took from the driver.
//!
//! 1. [`Segments::of`] lists what the recording says was taken and given back, each with the request
//!    it came before.
//! 2. The replay notes what the preset does for each request.
//! 3. [`Segments::compare`] counts what both did for the same request with the same size.
//!
//! Only the recording knows when the card was full or the program emptied the cache. So where it
//! says that memory was given back, the replay empties the cache too; what that gives back is
//! foretold, the moment is not.

use std::collections::BTreeMap;

use serde::Serialize;
use vramp_alloc::Bytes;
use vramp_alloc::torch::TorchOp;
use vramp_trace::{EventKind, Request, Trace, Workload};

use crate::count::Count;

/// The least part of the recorded events that has to be foretold, in per cent.
const LEAST_PERCENT: f64 = 99.0;
/// How far the peaks may be apart, in per cent.
const PEAK_PERCENT: f64 = 0.5;

/// Something taken from the driver or given back, as recordings name it.
type Change = (&'static str, Bytes);

/// What was taken and given back, by the number of the request it came before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segments(BTreeMap<usize, Vec<Change>>);

/// How what was foretold compares with what was recorded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fidelity {
    /// Times that the recorded allocator took memory from the driver, or gave some back.
    pub recorded: u64,
    /// Those that the replay did too, for the same request and of the same size.
    pub foretold: u64,
    /// The same in per cent.
    pub percent: f64,
    /// Those that the replay did not do.
    pub missing: u64,
    /// Times that the replay did what the recorded allocator did not.
    pub extra: u64,
    /// Where they first differ.
    pub first_difference: Option<String>,
    /// The most memory that the recorded allocator held, in bytes.
    pub recorded_peak_bytes: u64,
    /// The most memory that the replay held, in bytes.
    pub foretold_peak_bytes: u64,
    /// How far the second is from the first, in per cent of the first.
    pub peak_off_percent: f64,
    /// True if at least 99 % were foretold and the peaks are at most 0.5 % apart.
    pub faithful: bool,
}

impl Segments {
    /// What `trace` says of the device of `workload`. O(events).
    pub fn of(trace: &Trace, workload: &Workload) -> Segments {
        let mut segments = Segments::default();
        let mut request = 0;
        for (index, event) in trace.events.iter().enumerate() {
            if u32::from(event.device) != workload.device || !is_change(event.kind) {
                continue;
            }
            let before = |request| workload.event_of(request).is_none_or(|event| event < index);
            while request < workload.requests.len() && before(request) {
                request += 1;
            }
            segments.note(request, (name(event.kind), event.size));
        }
        segments
    }

    fn note(&mut self, request: usize, change: Change) {
        self.0.entry(request).or_default().push(change);
    }

    /// Notes what the preset did for a request.
    pub(super) fn performed(&mut self, request: usize, op: TorchOp) {
        let (kind, len) = match op {
            TorchOp::Allocate { len, .. } => (EventKind::SegmentAlloc, len),
            TorchOp::Free { len, .. } => (EventKind::SegmentFree, len),
            TorchOp::Map { len, .. } => (EventKind::SegmentMap, len),
            TorchOp::Unmap { len, .. } => (EventKind::SegmentUnmap, len),
            // Addresses hold no memory, and recordings do not tell of them.
            TorchOp::Reserve { .. } | TorchOp::FreeAddresses { .. } => return,
        };
        self.note(request, (name(kind), len));
    }

    /// True if nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if memory was given back before this request.
    pub(super) fn gives_back(&self, request: usize) -> bool {
        let gives = |kind: &str| {
            [EventKind::SegmentFree, EventKind::SegmentUnmap].map(name).contains(&kind)
        };
        self.0.get(&request).is_some_and(|changes| changes.iter().any(|(kind, _)| gives(kind)))
    }

    /// Compares what was recorded with what the replay did.
    pub(super) fn compare(
        &self,
        replayed: &Segments,
        workload: &Workload,
        peaks: Peaks,
    ) -> Fidelity {
        let (mut recorded, mut foretold, mut extra) = (0, 0, 0);
        let mut first_difference = None;
        let requests: std::collections::BTreeSet<usize> =
            self.0.keys().chain(replayed.0.keys()).copied().collect();
        for request in requests {
            // What was there before the recording began is not in it.
            if request < workload.requests.len() && workload.event_of(request).is_none() {
                continue;
            }
            let theirs = self.0.get(&request).map_or(&[][..], Vec::as_slice);
            let mut ours = replayed.0.get(&request).cloned().unwrap_or_default();
            let mut lacking = Vec::new();
            for change in theirs {
                match ours.iter().position(|own| own == change) {
                    Some(found) => drop(ours.swap_remove(found)),
                    None => lacking.push(*change),
                }
            }
            recorded += theirs.len() as u64;
            foretold += (theirs.len() - lacking.len()) as u64;
            extra += ours.len() as u64;
            if first_difference.is_none() && !(lacking.is_empty() && ours.is_empty()) {
                first_difference = Some(difference(workload, request, &lacking, &ours));
            }
        }
        let percent = if recorded == 0 { 100.0 } else { foretold as f64 * 100.0 / recorded as f64 };
        let (theirs, ours) = (peaks.recorded.count() as f64, peaks.replayed.count() as f64);
        let peak_off_percent = (ours - theirs) * 100.0 / theirs.max(1.0);
        // What was invented counts as much against it as what was missed.
        let invented = extra as f64 * 100.0 / recorded.max(1) as f64;
        Fidelity {
            recorded,
            foretold,
            percent,
            missing: recorded - foretold,
            extra,
            first_difference,
            recorded_peak_bytes: peaks.recorded.count(),
            foretold_peak_bytes: peaks.replayed.count(),
            peak_off_percent,
            faithful: percent >= LEAST_PERCENT
                && invented <= 100.0 - LEAST_PERCENT
                && peak_off_percent.abs() <= PEAK_PERCENT,
        }
    }
}

/// The most that was held.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peaks {
    pub recorded: Bytes,
    pub replayed: Bytes,
}

fn is_change(kind: EventKind) -> bool {
    matches!(
        kind,
        EventKind::SegmentAlloc
            | EventKind::SegmentFree
            | EventKind::SegmentMap
            | EventKind::SegmentUnmap
    )
}

fn name(kind: EventKind) -> &'static str {
    kind.known_name().expect("changes of segments have names")
}

fn difference(workload: &Workload, request: usize, lacking: &[Change], extra: &[Change]) -> String {
    let list = |changes: &[Change]| match changes {
        [] => "nothing".to_owned(),
        changes => {
            let each = changes.iter().map(|(kind, len)| format!("{kind} of {len}"));
            each.collect::<Vec<_>>().join(", ")
        }
    };
    let (recorded, replayed) = (list(lacking), list(extra));
    let event = workload.event_of(request).map(|event| Count(event as u64));
    let asked = match workload.requests.get(request) {
        Some(Request::Alloc { size, .. }) => format!(" ({size} asked for)"),
        _ => String::new(),
    };
    match event {
        Some(event) => format!("event {event}{asked}: {recorded} recorded, {replayed} replayed"),
        None => format!("the end: {recorded} recorded, {replayed} replayed"),
    }
}
