//! Memory that grows from step to step: a leak, or a cache without a bound.
//!
//! 1. The boundaries of steps are the recorded steps of a profiler or of an optimizer, or else the
//!    lowest points of the live bytes: see [`crate::steps`].
//! 2. The first two steps are left out, because programs allocate much once.
//! 3. A line of the program *grows* if blocks that it allocated survive to the last boundary from at
//!    least half of the steps between. So does one that replaces its blocks by larger ones: it holds
//!    more at each of nine boundaries than at the one before.
//!
//! Growth below 1 % of the job's peak, or below 16 MiB, is not reported.

use std::collections::HashMap;

use serde::Serialize;

use crate::blocks::RequestIndex;
use crate::category::Category;
use crate::frames::SiteId;
use crate::job::Job;
use crate::steps::{LOWS_MIN, lows};

/// Steps that are left out.
const WARM_UP: usize = 2;
/// Least growth that is reported.
const LEAST_BYTES: u64 = 16 << 20;

/// Boundaries at which lines are compared that replace their blocks. So many numbers in a random
/// order rarely rise.
const SAMPLES_MAX: usize = 9;
const SAMPLES_MIN: usize = 6;

/// How the live bytes grow from step to step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Growth {
    /// Steps between the first and the last boundary that count.
    pub steps: u64,
    /// Where the boundaries come from: `profiler steps`, `optimizer steps` or `lowest points`.
    pub boundaries: &'static str,
    /// Live bytes at the first boundary that counts.
    pub first_bytes: u64,
    /// Live bytes at the last boundary.
    pub last_bytes: u64,
    /// The lines of the program that grow, the fastest first.
    pub sites: Vec<GrowingSite>,
}

/// A line of the program whose blocks survive from step after step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GrowingSite {
    /// The line.
    pub site: String,
    /// The category of most of the bytes.
    pub category: Category,
    /// Bytes that survive.
    pub bytes: u64,
    /// Blocks that survive, or that replaced others.
    pub blocks: u64,
    /// Bytes that survive from one step, on average.
    pub bytes_per_step: u64,
}

impl Growth {
    /// Finds what grows until just before the request `end`. `None` if nothing grows or the job has
    /// too few steps. O(requests + blocks log steps).
    pub fn until(job: &Job<'_>, end: RequestIndex) -> Option<Growth> {
        let (boundaries, source) = boundaries(job, end);
        let counted = boundaries.get(WARM_UP..)?;
        let (&first, &last) = (counted.first()?, counted.last()?);
        if counted.len() < LOWS_MIN {
            return None;
        }
        let steps = counted.len() - 1;
        let mut sites = growing(job, counted, last, steps);
        sites.extend(replaced(job, counted, &sites));
        sites.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.site.cmp(&b.site)));
        if sites.is_empty() {
            return None;
        }
        let live = |moment| {
            let sizes = job.blocks.live_before(moment).map(|(_, it)| it.size.count());
            sizes.fold(0, u64::saturating_add)
        };
        Some(Growth {
            steps: steps as u64,
            boundaries: source,
            first_bytes: live(first),
            last_bytes: live(last),
            sites,
        })
    }

    /// Returns the bytes that all lines grow in one step.
    pub fn bytes_per_step(&self) -> u64 {
        self.sites.iter().map(|site| site.bytes_per_step).sum()
    }
}

/// Returns the requests at which steps end, and where they come from.
fn boundaries(job: &Job<'_>, end: RequestIndex) -> (Vec<RequestIndex>, &'static str) {
    let annotated = &job.annotated;
    let marked = [
        (&annotated.iterations, "profiler steps"),
        (&annotated.optimizer_steps, "optimizer steps"),
    ];
    for (spans, source) in marked {
        let begun = spans.iter().map(|span| span.begin).filter(|&begin| begin <= end);
        let steps: Vec<RequestIndex> = begun.collect();
        if steps.len() >= WARM_UP + LOWS_MIN {
            return (steps, source);
        }
    }
    let lows = lows(&job.workload, &job.blocks).into_iter().map(|low| low.request + 1);
    (lows.filter(|&request| request <= end).collect(), "lowest points")
}

fn growing(
    job: &Job<'_>,
    boundaries: &[RequestIndex],
    last: RequestIndex,
    steps: usize,
) -> Vec<GrowingSite> {
    #[derive(Default)]
    struct Survivors {
        bytes: u64,
        blocks: u64,
        /// Steps that blocks survive from, and the last of them.
        steps: usize,
        last: Option<usize>,
        categories: [u64; Category::ALL.len()],
    }
    let mut sites: HashMap<SiteId, Survivors> = HashMap::new();
    for (number, block) in job.blocks.live_before(last) {
        let after = boundaries.partition_point(|&boundary| boundary <= block.alloc);
        // What the step before the first boundary allocated does not count.
        let Some(step) = after.checked_sub(1) else { continue };
        let site = sites.entry(job.labels.site_of(block.stack)).or_default();
        let bytes = block.size.count();
        site.bytes += bytes;
        site.blocks += 1;
        // Blocks come in the order of their allocation, so the steps never fall.
        let step = step.min(steps - 1);
        if site.last.replace(step) != Some(step) {
            site.steps += 1;
        }
        site.categories[job.categories[number as usize] as usize] += bytes;
    }
    let least = LEAST_BYTES.max(job.workload.peak_live.count() / 100);
    sites
        .into_iter()
        .filter(|(_, it)| it.bytes >= least && 2 * it.steps >= steps)
        .map(|(site, it)| {
            let most = Category::ALL.into_iter().max_by_key(|&category| {
                (it.categories[category as usize], std::cmp::Reverse(category))
            });
            GrowingSite {
                site: job.labels.site(site).to_owned(),
                category: most.unwrap_or(Category::Unknown),
                bytes: it.bytes,
                blocks: it.blocks,
                bytes_per_step: it.bytes / steps as u64,
            }
        })
        .collect()
}

/// Returns the lines whose blocks are replaced by larger ones, as a cache that is concatenated: none
/// survives, but the line has more bytes at each of up to nine boundaries than at the one before.
/// Lines in `known` are left out. O(blocks).
fn replaced(job: &Job<'_>, boundaries: &[RequestIndex], known: &[GrowingSite]) -> Vec<GrowingSite> {
    if boundaries.len() < SAMPLES_MIN {
        return Vec::new();
    }
    let steps = boundaries.len() - 1;
    let samples = steps.min(SAMPLES_MAX - 1);
    let mut sums: HashMap<SiteId, Held> = HashMap::new();
    for sample in 0..=samples {
        for (number, block) in job.blocks.live_before(boundaries[sample * steps / samples]) {
            let held = sums.entry(job.labels.site_of(block.stack)).or_default();
            let bytes = block.size.count();
            held.bytes[sample] = held.bytes[sample].saturating_add(bytes);
            if sample == samples {
                held.blocks += 1;
                held.categories[job.categories[number as usize] as usize] += 1;
            }
        }
    }
    let least = LEAST_BYTES.max(job.workload.peak_live.count() / 100);
    let grows = |held: &Held| held.bytes[..=samples].is_sorted_by(|a, b| a < b);
    let sites = sums.into_iter().filter(|(_, held)| grows(held)).map(|(site, held)| {
        let bytes = held.bytes[samples] - held.bytes[0];
        let most = Category::ALL.into_iter().max_by_key(|&category| {
            (held.categories[category as usize], std::cmp::Reverse(category))
        });
        GrowingSite {
            site: job.labels.site(site).to_owned(),
            category: most.unwrap_or(Category::Unknown),
            bytes,
            blocks: held.blocks,
            bytes_per_step: bytes / steps as u64,
        }
    });
    let is_known = |found: &GrowingSite| known.iter().any(|it| it.site == found.site);
    sites.filter(|found| found.bytes >= least && !is_known(found)).collect()
}

/// What a line of the program holds at the sampled boundaries.
#[derive(Default)]
struct Held {
    bytes: [u64; SAMPLES_MAX],
    blocks: u64,
    categories: [u64; Category::ALL.len()],
}

#[cfg(test)]
mod tests {
    use vramp_trace::{Frame, Trace};

    use super::*;
    use crate::testing::{alloc_by, completed, free, trace};

    const MIB: u64 = 1 << 20;

    /// A job of `steps` steps that each allocate and free 100 MiB and keep `kept` bytes.
    fn job_of(steps: u64, kept: u64) -> Trace {
        let mut made = trace(&[]);
        let frame = |line| Frame { name: "f", filename: "train.py", line };
        let (work, leak) = (made.stacks.add([frame(10)]), made.stacks.add([frame(20)]));
        for step in 0..steps {
            made.events.push(alloc_by(work, 1, 60 * MIB));
            made.events.push(alloc_by(work, 2, 40 * MIB));
            if kept > 0 {
                made.events.push(alloc_by(leak, 100 + step, kept));
            }
            made.events.extend([free(1), completed(1), free(2), completed(2)]);
        }
        made
    }

    #[test]
    fn what_every_step_keeps_grows() {
        let made = job_of(20, 3 * MIB);
        let job = Job::of(&made, 0);
        let found = Growth::until(&job, u32::MAX).unwrap();
        assert_eq!(found.sites.len(), 1);
        assert_eq!(found.sites[0].site, "train.py:20 f");
        assert_eq!(found.sites[0].bytes_per_step, 3 * MIB);
        assert_eq!(found.last_bytes - found.first_bytes, found.sites[0].bytes);
        assert_eq!(found.boundaries, "lowest points");
    }

    #[test]
    fn a_cache_that_is_replaced_by_a_larger_one_grows() {
        let mut made = job_of(0, 0);
        let frame = |line| Frame { name: "f", filename: "train.py", line };
        let (work, cache) = (made.stacks.add([frame(10)]), made.stacks.add([frame(30)]));
        for step in 0..20 {
            made.events.push(alloc_by(work, 1, 100 * MIB));
            made.events.push(alloc_by(cache, 1000 + step, (step + 1) * 2 * MIB));
            if step > 0 {
                made.events.extend([free(999 + step), completed(999 + step)]);
            }
            made.events.extend([free(1), completed(1)]);
        }
        let found = Growth::until(&Job::of(&made, 0), u32::MAX).unwrap();
        assert_eq!(found.sites.len(), 1, "{found:?}");
        assert_eq!(found.sites[0].site, "train.py:30 f");
        assert_eq!(found.sites[0].bytes_per_step, 2 * MIB);
        assert_eq!(found.last_bytes - found.first_bytes, found.sites[0].bytes);
    }

    #[test]
    fn a_job_that_frees_all_it_allocates_does_not_grow() {
        let made = job_of(20, 0);
        assert_eq!(Growth::until(&Job::of(&made, 0), u32::MAX), None);
    }

    #[test]
    fn one_step_is_no_growth() {
        let made = job_of(1, 200 * MIB);
        assert_eq!(Growth::until(&Job::of(&made, 0), u32::MAX), None);
    }
}
