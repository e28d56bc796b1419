//! `--fidelity`: does the model match PyTorch's recorded segments?
//!
//! 1. [`SegmentChanges::of`] lists the recorded allocations and frees of segments, each with the
//!    request it came before.
//! 2. The replay records those of the model.
//! 3. [`SegmentChanges::compare`] counts the changes that agree in request and size.
//!
//! A workload does not contain when the card was full or the program emptied the cache. So where a
//! recorded segment was freed, the replay empties the cache too: which segments are freed is the
//! model's decision, the moment is the recording's.

use std::collections::BTreeMap;

use serde::Serialize;
use vramp::Bytes;
use vramp::peers::torch::TorchOp;
use vramp_trace::{EventKind, Request, Trace, Workload};

use crate::number::Count;

/// Least percentage of the recorded changes that has to match.
const MATCH_PERCENT_MIN: f64 = 99.0;
/// Largest difference of the peaks, in percent.
const PEAK_PERCENT_MAX: f64 = 0.5;

/// A segment allocated, freed, mapped or unmapped, by the name in recordings.
type Change = (&'static str, Bytes);

/// Changes of segments, by the number of the request they came before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentChanges(BTreeMap<usize, Vec<Change>>);

/// How the model's segments compare with the recorded ones.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fidelity {
    /// Recorded changes.
    pub recorded: u64,
    /// Recorded changes that the model made too, for the same request and of the same size.
    #[serde(rename = "foretold")]
    pub matched: u64,
    /// `matched` in percent of `recorded`; `None` if there are no recorded changes.
    pub percent: Option<f64>,
    /// Recorded changes that the model did not make.
    pub missing: u64,
    /// Changes of the model that were not recorded.
    pub extra: u64,
    /// The first difference.
    pub first_difference: Option<String>,
    /// Peak of the recorded allocator's reserved bytes.
    pub recorded_peak_bytes: u64,
    /// Peak of the model's reserved bytes.
    #[serde(rename = "foretold_peak_bytes")]
    pub replayed_peak_bytes: u64,
    /// Difference of the peaks, in percent of the recorded one.
    pub peak_off_percent: f64,
    /// True if at least 99 % match, at most 1 % are extra and the peaks differ by at most 0.5 %.
    pub faithful: bool,
}

impl SegmentChanges {
    /// Collects the recorded changes of the device of `workload`. O(events of the device).
    pub fn of(trace: &Trace, workload: &Workload) -> SegmentChanges {
        let mut changes = SegmentChanges::default();
        let mut request = 0;
        for (index, event) in workload.device_events(trace) {
            if !is_change(event.kind) {
                continue;
            }
            let before = |request| workload.event_of(request).is_none_or(|event| event < index);
            while request < workload.requests.len() && before(request) {
                request += 1;
            }
            changes.push(request, (name(event.kind), event.size));
        }
        changes
    }

    fn push(&mut self, request: usize, change: Change) {
        self.0.entry(request).or_default().push(change);
    }

    /// Records a change that the model made for a request.
    pub(super) fn record_op(&mut self, request: usize, op: TorchOp) {
        let (kind, len) = match op {
            TorchOp::Allocate { len, .. } => (EventKind::SegmentAlloc, len),
            TorchOp::Free { len, .. } => (EventKind::SegmentFree, len),
            TorchOp::Map { len, .. } => (EventKind::SegmentMap, len),
            TorchOp::Unmap { len, .. } => (EventKind::SegmentUnmap, len),
            // Reserved addresses are not in recordings.
            TorchOp::Reserve { .. } | TorchOp::FreeAddresses { .. } => return,
        };
        self.push(request, (name(kind), len));
    }

    /// Returns true if there is no change.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if a segment was freed or unmapped before this request.
    pub(super) fn frees_before(&self, request: usize) -> bool {
        let frees = |kind: &str| {
            [EventKind::SegmentFree, EventKind::SegmentUnmap].map(name).contains(&kind)
        };
        self.0.get(&request).is_some_and(|changes| changes.iter().any(|(kind, _)| frees(kind)))
    }

    /// Returns true if the program released cached memory before this request, as
    /// `torch.cuda.empty_cache` does: segments were freed, and neither a segment nor a failure
    /// follows, as it does where the allocator itself released memory because it lacked some.
    pub(super) fn is_released_before(&self, request: usize, workload: &Workload) -> bool {
        let fails = matches!(workload.requests.get(request), Some(Request::Oom { .. }));
        let last = self.0.get(&request).and_then(|changes| changes.last());
        let freed = [EventKind::SegmentFree, EventKind::SegmentUnmap].map(name);
        !fails && last.is_some_and(|(kind, _)| freed.contains(kind))
    }

    /// Returns the number of requests before which segments were freed.
    pub fn releases(&self) -> usize {
        self.0.keys().filter(|&&request| self.frees_before(request)).count()
    }

    /// Compares the recorded changes with those of the replay.
    pub(super) fn compare(
        &self,
        replayed: &SegmentChanges,
        workload: &Workload,
        peaks: Peaks,
    ) -> Fidelity {
        let (mut recorded, mut matched, mut extra) = (0, 0, 0);
        let mut first_difference = None;
        let requests: std::collections::BTreeSet<usize> =
            self.0.keys().chain(replayed.0.keys()).copied().collect();
        for request in requests {
            // Requests from before the recording have no recorded changes.
            if request < workload.requests.len() && workload.event_of(request).is_none() {
                continue;
            }
            let recorded_changes = self.0.get(&request).map_or(&[][..], Vec::as_slice);
            let mut unmatched = replayed.0.get(&request).cloned().unwrap_or_default();
            let mut missing = Vec::new();
            for change in recorded_changes {
                match unmatched.iter().position(|own| own == change) {
                    Some(found) => drop(unmatched.swap_remove(found)),
                    None => missing.push(*change),
                }
            }
            recorded += recorded_changes.len() as u64;
            matched += (recorded_changes.len() - missing.len()) as u64;
            extra += unmatched.len() as u64;
            if first_difference.is_none() && !(missing.is_empty() && unmatched.is_empty()) {
                first_difference = Some(difference(workload, request, &missing, &unmatched));
            }
        }
        let percent = (recorded > 0).then(|| matched as f64 * 100.0 / recorded as f64);
        let (theirs, ours) = (peaks.recorded.count() as f64, peaks.replayed.count() as f64);
        let peak_off_percent = (ours - theirs) * 100.0 / theirs.max(1.0);
        let extra_percent = extra as f64 * 100.0 / recorded.max(1) as f64;
        Fidelity {
            recorded,
            matched,
            percent,
            missing: recorded - matched,
            extra,
            first_difference,
            recorded_peak_bytes: peaks.recorded.count(),
            replayed_peak_bytes: peaks.replayed.count(),
            peak_off_percent,
            faithful: percent.is_none_or(|percent| percent >= MATCH_PERCENT_MIN)
                && extra_percent <= 100.0 - MATCH_PERCENT_MIN
                && peak_off_percent.abs() <= PEAK_PERCENT_MAX,
        }
    }
}

/// Peaks of the reserved bytes.
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
    kind.known_name().expect("every change of a segment has a name")
}

fn difference(workload: &Workload, request: usize, missing: &[Change], extra: &[Change]) -> String {
    let list = |changes: &[Change]| match changes {
        [] => "nothing".to_owned(),
        changes => {
            let each = changes.iter().map(|(kind, len)| format!("{kind} of {len}"));
            each.collect::<Vec<_>>().join(", ")
        }
    };
    let (recorded, replayed) = (list(missing), list(extra));
    let event = workload.device_event_of(request).map(|event| Count(event as u64));
    let request = match workload.requests.get(request) {
        Some(Request::Alloc { size, .. }) => format!(" ({size} requested)"),
        _ => String::new(),
    };
    match event {
        Some(event) => format!("event {event}{request}: {recorded} recorded, {replayed} replayed"),
        None => format!("the end: {recorded} recorded, {replayed} replayed"),
    }
}
