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
        (before_bytes > 0 || after_bytes > 0).then_some(Change {
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
        demand_bytes: job.workload.peak_demand.count(),
        peak_reserved_bytes: job.recorded.reserved.peak().map(vramp::Bytes::count),
        allocations: job.blocks.len() as u64,
        steps: growth.as_ref().map_or(0, |growth| growth.steps),
    }
}

/// Matches the lines of two runs. Lines of one function that moved are matched in their order, which
/// an edit rarely changes. O(n log n).
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
    let mut left: Vec<(String, u64)> = exact.into_iter().collect();
    for lines in [&mut left, &mut unmatched] {
        lines.sort_by(|(a, _), (b, _)| place(a).cmp(&place(b)));
    }
    let mut left = left.into_iter().peekable();
    let gone = |(of, before_bytes)| Change { of, before_bytes, after_bytes: 0 };
    for (of, after_bytes) in unmatched {
        let function = |site: &str| {
            let (file, function, _) = place(site);
            (file.to_owned(), function.to_owned())
        };
        let this = function(&of);
        while let Some(earlier) = left.next_if(|(other, _)| function(other) < this) {
            changes.push(gone(earlier));
        }
        let moved = left.next_if(|(other, _)| function(other) == this);
        let before_bytes = moved.map_or(0, |(_, bytes)| bytes);
        changes.push(Change { of, before_bytes, after_bytes });
    }
    changes.extend(left.map(gone));
    sorted(changes)
}

/// Returns file, function and line of a site: `job.py:12 f` becomes `job.py`, `f` and 12. Files and
/// functions may have spaces and colons.
fn place(site: &str) -> (&str, &str, u64) {
    let parts = site.match_indices(':').find_map(|(colon, _)| {
        let (line, function) = site[colon + 1..].split_once(' ')?;
        Some((&site[..colon], function, line.parse().ok()?))
    });
    parts.unwrap_or((site, "", 0))
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
    fn lines_of_one_function_that_moved_keep_their_order() {
        // Line 9 is before line 10, but not in the order of their digits.
        let before = run_with(&[(9, 100), (10, 5), (50, 30)]);
        let after = run_with(&[(11, 101), (12, 5), (60, 30)]);
        let found = diff(&Job::of(&before, 0), &Job::of(&after, 0));
        let changes: Vec<(&str, i128)> =
            found.sites.iter().map(|it| (it.of.as_str(), it.bytes())).collect();
        assert_eq!(changes, [("job.py:11 f", 1), ("job.py:12 f", 0), ("job.py:60 f", 0)]);
    }

    #[test]
    fn the_line_is_found_in_names_with_spaces_and_colons() {
        assert_eq!(place("my job.py:12 f"), ("my job.py", "f", 12));
        assert_eq!(place("c:d/a.cpp:7 at::f(int, long)"), ("c:d/a.cpp", "at::f(int, long)", 7));
        assert_eq!(place("(no stack recorded)"), ("(no stack recorded)", "", 0));
    }

    #[test]
    fn more_than_the_address_space_is_compared_without_overflow() {
        let made = run_with(&[(1, 1 << 56); 300]);
        let found = diff(&Job::of(&made, 0), &Job::of(&made, 0));
        assert_eq!(found.categories[0].bytes(), 0);
    }

    #[test]
    fn what_only_one_run_has_is_listed_too() {
        let (before, after) = (run_with(&[(10, 100)]), run_with(&[(200, 5)]));
        let found = diff(&Job::of(&before, 0), &Job::of(&after, 0));
        let changes: Vec<i128> = found.sites.iter().map(Change::bytes).collect();
        assert_eq!(changes, [-100, 5]);
    }
}
