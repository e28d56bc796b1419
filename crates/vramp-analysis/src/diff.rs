//! What changed between two runs of a job: at the peak and from step to step.
//!
//! Lines of the program are matched by file, line and function; those without a match by file and
//! function alone, because an edit moves lines.

use std::collections::HashMap;

use serde::Serialize;

use crate::blocks::RequestIndex;
use crate::category::Category;
use crate::growth::Growth;
use crate::job::Job;
use crate::moment::Moment;
use crate::replay::peak_demand;

/// Version of the format of [`Diff`].
pub const SCHEMA_VERSION: u32 = 1;

/// What changed from one run to another.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Diff {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The first run.
    pub before: Run,
    /// The second run.
    pub after: Run,
    /// Allocated bytes at the peak by category, the largest change first.
    pub categories: Vec<Change<Category>>,
    /// Allocated bytes at the peak by line of the program, the largest change first.
    pub sites: Vec<Change<String>>,
    /// Bytes that survive from one step by line of the program, the largest change first. Empty if
    /// nothing grows in either run.
    pub growth: Vec<Change<String>>,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    /// The trace's name.
    pub trace: String,
    /// Number of the recorded device.
    pub trace_device: u32,
    /// How much of the job the recording shows: `whole`, `from_the_middle` or `missing`.
    pub recording: &'static str,
    /// Peak of the allocated bytes.
    pub peak_live_bytes: u64,
    /// Most bytes that the job needs at once, with requests that failed.
    pub demand_bytes: u64,
    /// Peak of the recorded allocator's reserved bytes, if known.
    pub peak_reserved_bytes: Option<u64>,
    /// Number of allocations.
    pub allocations: u64,
    /// Steps that count for the growth; 0 if nothing grows.
    pub steps: u64,
}

/// A number in both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change<K> {
    /// What it is of.
    pub of: K,
    /// In the first run.
    pub before_bytes: u64,
    /// In the second run.
    pub after_bytes: u64,
}

impl<K> Change<K> {
    /// Returns the change in bytes.
    pub fn bytes(&self) -> i128 {
        i128::from(self.after_bytes) - i128::from(self.before_bytes)
    }
}

/// Compares two runs. O(events) for each.
pub fn diff(before: &Job<'_>, after: &Job<'_>) -> Diff {
    let peaks = [before, after].map(peak);
    let growths = [before, after].map(|job| Growth::until(job, RequestIndex::MAX));
    let categories = Category::ALL.into_iter().filter_map(|category| {
        let bytes = |moment: &Moment| {
            let shares = moment.categories.iter().filter(|share| share.category == category);
            shares.map(|share| share.bytes).sum()
        };
        let (before_bytes, after_bytes) = (bytes(&peaks[0]), bytes(&peaks[1]));
        (before_bytes + after_bytes > 0).then_some(Change {
            of: category,
            before_bytes,
            after_bytes,
        })
    });
    let sites = |moment: &Moment| {
        moment.sites.iter().map(|share| (share.site.clone(), share.bytes)).collect::<Vec<_>>()
    };
    let growing = |growth: &Option<Growth>| {
        let sites = growth.iter().flat_map(|growth| &growth.sites);
        sites.map(|site| (site.site.clone(), site.bytes_per_step)).collect::<Vec<_>>()
    };
    Diff {
        schema_version: SCHEMA_VERSION,
        before: run(before, &growths[0]),
        after: run(after, &growths[1]),
        categories: sorted(categories.collect()),
        sites: matched(sites(&peaks[0]), sites(&peaks[1])),
        growth: matched(growing(&growths[0]), growing(&growths[1])),
    }
}

fn peak(job: &Job<'_>) -> Moment {
    let end = job.workload.requests.len();
    let after = (job.workload.peak_live_request + 1).min(end);
    Moment::before(job, RequestIndex::try_from(after).unwrap_or(RequestIndex::MAX), 0)
}

fn run(job: &Job<'_>, growth: &Option<Growth>) -> Run {
    Run {
        trace: job.workload.name.clone(),
        trace_device: job.workload.device,
        recording: job.recorded.past.name(),
        peak_live_bytes: job.workload.peak_live.count(),
        demand_bytes: peak_demand(&job.workload).count(),
        peak_reserved_bytes: job.recorded.reserved.peak().map(vramp::Bytes::count),
        allocations: job.blocks.len() as u64,
        steps: growth.as_ref().map_or(0, |growth| growth.steps),
    }
}

/// Matches the lines of two runs.
fn matched(before: Vec<(String, u64)>, after: Vec<(String, u64)>) -> Vec<Change<String>> {
    let mut changes: Vec<Change<String>> = Vec::new();
    let mut exact: HashMap<String, u64> = before.into_iter().collect();
    let mut unmatched = Vec::new();
    for (site, after_bytes) in after {
        match exact.remove(&site) {
            Some(before_bytes) => changes.push(Change { of: site, before_bytes, after_bytes }),
            None => unmatched.push((site, after_bytes)),
        }
    }
    // In the order of their names, so that the result does not depend on hashes.
    let mut left: Vec<(String, u64)> = exact.into_iter().collect();
    left.sort();
    for (site, after_bytes) in unmatched {
        let same = |(other, _): &(String, u64)| without_line(other) == without_line(&site);
        let before_bytes = match left.iter().position(same) {
            Some(found) => left.remove(found).1,
            None => 0,
        };
        changes.push(Change { of: site, before_bytes, after_bytes });
    }
    let gone =
        left.into_iter().map(|(of, before_bytes)| Change { of, before_bytes, after_bytes: 0 });
    changes.extend(gone);
    sorted(changes)
}

/// Returns a site without its line number: `job.py:12 f` becomes `job.py` and `f`.
fn without_line(site: &str) -> (&str, &str) {
    let (place, function) = site.split_once(' ').unwrap_or((site, ""));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match place.rsplit_once(':') {
        Some((file, line)) if is_number(line) => (file, function),
        _ => (place, function),
    }
}

fn sorted<K: Ord>(mut changes: Vec<Change<K>>) -> Vec<Change<K>> {
    changes.sort_by(|a, b| {
        b.bytes().unsigned_abs().cmp(&a.bytes().unsigned_abs()).then_with(|| a.of.cmp(&b.of))
    });
    changes
}

#[cfg(test)]
mod tests {
    use vramp_trace::{Frame, Trace};

    use super::*;
    use crate::testing::{alloc_by, trace};

    fn run_with(sizes: &[(u32, u64)]) -> Trace {
        let mut made = trace(&[]);
        for (at, &(line, size)) in (1..).zip(sizes) {
            let name = if line < 100 { "f" } else { "g" };
            let stack = made.stacks.add([Frame { name, filename: "job.py", line }]);
            made.events.push(alloc_by(stack, at, size));
        }
        made
    }

    #[test]
    fn lines_that_moved_are_matched_by_their_function() {
        let (before, after) = (run_with(&[(10, 100), (200, 7)]), run_with(&[(12, 160), (200, 7)]));
        let found = diff(&Job::of(&before, 0), &Job::of(&after, 0));
        let change = &found.sites[0];
        assert_eq!((change.of.as_str(), change.bytes()), ("job.py:12 f", 60));
        assert_eq!(found.sites[1].bytes(), 0);
        assert_eq!(found.sites.len(), 2);
        assert_eq!(found.categories[0].bytes(), 60);
        assert_eq!((found.before.peak_live_bytes, found.after.peak_live_bytes), (107, 167));
    }

    #[test]
    fn what_only_one_run_has_is_listed_too() {
        let (before, after) = (run_with(&[(10, 100)]), run_with(&[(200, 5)]));
        let found = diff(&Job::of(&before, 0), &Job::of(&after, 0));
        let changes: Vec<i128> = found.sites.iter().map(Change::bytes).collect();
        assert_eq!(changes, [-100, 5]);
    }
}
