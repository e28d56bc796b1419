//! The verdict on a job, in sentences with numbers.
//!
//! The capacity is what the job could reserve: a limit that was given, or what the recorded
//! allocator had reserved and the card had free when a request failed. Where the card had enough
//! free memory for that request, the job ran under a limit, which lay between what was reserved and
//! that with the request.
//!
//! | cause | when |
//! |---|---|
//! | growth | a request failed, or the demand exceeds the capacity, and what grows from step to step is at least a quarter of the demand |
//! | demand | the demand exceeds the capacity, or takes more than 99 % of it when a request failed |
//! | fragmentation | the demand is within the capacity, and the recorded allocator does not fit |
//! | limit | the card had enough free memory |
//! | no history | the recording has no events |
//! | none | no request failed, and no limit was given |

use serde::Serialize;
use vramp::Bytes;

use crate::explain::{Explanation, Failure};
use crate::frames::NO_STACK;
use crate::layout::Layout;
use crate::limit::Limit;
use crate::number::{Count, plural};
use crate::remedy::{Remedy, remedies, requested_in_words};

/// The verdict on a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Verdict {
    /// The main cause.
    pub cause: Cause,
    /// The cause in a sentence or two.
    pub headline: String,
    /// What contributed, a sentence or two each.
    pub findings: Vec<Finding>,
    /// What to do about it, in the order in which to try it. A job that failed has at least one.
    pub remedies: Vec<Remedy>,
}

/// The main cause of a failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// No request failed, and no limit was given.
    #[default]
    None,
    /// The recording does not show what happened.
    NoHistory,
    /// The job needs more than there is.
    Demand,
    /// What the job keeps grows from step to step.
    Growth,
    /// Enough memory was there, but not in one piece.
    Fragmentation,
    /// The card had enough free memory, but the allocator was not allowed to use it.
    Limit,
}

impl Cause {
    /// Returns its name for a person.
    pub fn name(self) -> &'static str {
        match self {
            Cause::None => "none",
            Cause::NoHistory => "no history",
            Cause::Demand => "demand",
            Cause::Growth => "growth",
            Cause::Fragmentation => "fragmentation",
            Cause::Limit => "limit",
        }
    }
}

/// Something that contributed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// What it is: `request`, `retries`, `growth`, `fragmentation`, `cache`, `pools`, `streams`, `waiting` or `rounding`.
    pub kind: &'static str,
    /// Bytes concerned.
    pub bytes: u64,
    /// The finding in words.
    pub text: String,
}

/// What the job could reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capacity {
    /// Not known.
    Unknown,
    /// A limit that was given.
    Given(Limit),
    /// What the recorded allocator had reserved and the card had free.
    Had(u64),
    /// A limit within these bounds.
    Between(u64, u64),
}

/// A demand that leaves less than this part of the capacity takes nearly all of it.
const NEARLY: u64 = 100;

fn size(bytes: u64) -> Bytes {
    Bytes::new(bytes)
}

/// Returns the verdict on a job. `limit` is the memory that it may reserve, if given.
pub fn verdict(job: &Explanation, limit: Option<Limit>) -> Verdict {
    if job.recording.coverage == "missing" {
        return Verdict {
            cause: Cause::NoHistory,
            headline: format!(
                "The recording has no history, so it does not show why memory ran out. At its end \
                 {} were allocated.",
                size(job.peak.live_bytes)
            ),
            remedies: remedies(job, Capacity::Unknown, Cause::NoHistory),
            ..Verdict::default()
        };
    }
    let capacity = capacity(job, limit);
    let mut verdict = match capacity {
        Capacity::Unknown => no_failure(job),
        Capacity::Given(limit) => against(job, limit),
        Capacity::Had(capacity) => against(job, Limit::from(size(capacity))),
        Capacity::Between(least, most) => under_limit(job, least, most),
    };
    verdict.findings.extend(findings(job));
    verdict.remedies = remedies(job, capacity, verdict.cause);
    verdict
}

fn capacity(job: &Explanation, limit: Option<Limit>) -> Capacity {
    if let Some(limit) = limit {
        return Capacity::Given(limit);
    }
    let Some(failure) = &job.failure else { return Capacity::Unknown };
    match (failure.reserved_bytes, failure.card_free_bytes) {
        (Some(reserved), _) if failure.limited => {
            Capacity::Between(reserved, reserved.saturating_add(failure.segment_bytes))
        }
        (Some(reserved), Some(free)) => Capacity::Had(reserved.saturating_add(free)),
        _ => Capacity::Unknown,
    }
}

/// Says how the demand is made up.
fn demand_of(job: &Explanation) -> String {
    // What was before the recording may have needed more.
    let needs = match job.recording.coverage {
        "whole" => "needs",
        _ => "needs at least",
    };
    match &job.failure {
        Some(failure) if failure_demand(failure) >= needed(job) => {
            format!(
                "{needs} {} at once ({} allocated and {} requested)",
                size(needed(job)),
                size(failure.live_bytes),
                size(failure.size_bytes)
            )
        }
        _ => format!("{needs} {} at once", size(needed(job))),
    }
}

fn failure_demand(failure: &Failure) -> u64 {
    failure.live_bytes.saturating_add(failure.size_bytes)
}

/// Returns what the job needed at once: its peak, or more with the request that is shown. Requests that
/// failed before it were caught.
pub(crate) fn needed(job: &Explanation) -> u64 {
    let failure = job.failure.as_ref().map_or(job.demand_bytes, failure_demand);
    failure.max(job.peak_live_bytes)
}

/// Returns what the job keeps from step after step, if it is at least a quarter of the demand.
fn growth_in_words(job: &Explanation) -> Option<String> {
    let growth = job.growth.as_ref()?;
    let grown = growth.last_bytes.saturating_sub(growth.first_bytes);
    (grown >= needed(job) / 4).then(|| {
        format!(
            "The job keeps {} more with every step, mostly from {}.",
            size(growth.bytes_per_step()),
            growth.sites[0].site
        )
    })
}

fn because(cause: Cause, headline: String) -> Verdict {
    Verdict { cause, headline, ..Verdict::default() }
}

fn against(job: &Explanation, limit: Limit) -> Verdict {
    let capacity = limit.bytes;
    let demand = demand_of(job);
    let growth = growth_in_words(job);
    if needed(job) > capacity {
        let all = limit;
        return match growth {
            Some(growth) => because(
                Cause::Growth,
                format!("{growth} In the end it {demand}; no allocator fits it in {all}."),
            ),
            None => {
                because(Cause::Demand, format!("The job {demand}; no allocator fits it in {all}."))
            }
        };
    }
    // A limit that was given may be another than the recorded one. Under it, the recorded allocator
    // would have failed as well if it could not reserve the request beside what it had.
    let failed = job.failure.as_ref().filter(|failure| {
        failure.reserved_bytes.is_some_and(|reserved| {
            reserved <= capacity && reserved.saturating_add(failure.segment_bytes) > capacity
        })
    });
    if let Some(failure) = failed {
        let fragmented = fragmented(failure.layout.as_ref(), failure);
        if let Some(growth) = growth {
            return because(
                Cause::Growth,
                format!(
                    "{growth} In the end it {demand} and {} were usable, but the request failed: \
                     {fragmented}.",
                    limit
                ),
            );
        }
        let left = capacity - needed(job);
        if left < capacity / NEARLY {
            return because(
                Cause::Demand,
                format!(
                    "The job {demand}, nearly all of the {} that were usable: {} are left for \
                     rounding and holes.",
                    limit,
                    size(left)
                ),
            );
        }
        return because(
            Cause::Fragmentation,
            format!(
                "The job {demand} and {limit} were usable, but the request failed: {fragmented}."
            ),
        );
    }
    within(job, &demand, limit)
}

/// Returns the verdict on a job whose demand is within a capacity that it did not have.
fn within(job: &Explanation, demand: &str, all: Limit) -> Verdict {
    let capacity = all.bytes;
    let recorded = job.recording.peak_reserved_bytes;
    if recorded.is_some_and(|reserved| reserved <= capacity) {
        return because(Cause::None, format!("The job {demand} and fits in {all}."));
    }
    // The first is the recorded allocator. It releases what it caches before it fails.
    let replayed = job.fits.first();
    let reserved = recorded.map_or(String::new(), |reserved| {
        format!(" Without a limit the recorded allocator reserved {}.", size(reserved))
    });
    match replayed.map(|fit| fit.smallest_limit_bytes) {
        Some(Some(limit)) if limit <= capacity => because(
            Cause::None,
            format!(
                "The job {demand} and fits in {all}: a replay with {} needs {}.{}",
                job.fits[0].allocator,
                size(limit),
                reserved
            ),
        ),
        Some(limit) => {
            let needs = limit.map_or("more than 1 TiB".to_owned(), |it| size(it).to_string());
            because(
                Cause::Fragmentation,
                format!(
                    "The job {demand}, which is less than {all}, but a replay with {} needs \
                     {needs}.{}",
                    job.fits[0].allocator, reserved
                ),
            )
        }
        None => match recorded {
            Some(reserved) => because(
                Cause::Fragmentation,
                format!(
                    "The job {demand}, which is less than {all}, but the recorded allocator reserved \
                     {}: at least {} of it were fragments and cache.",
                    size(reserved),
                    size(reserved.saturating_sub(job.peak_live_bytes))
                ),
            ),
            None => because(Cause::None, format!("The job {demand}, which is less than {all}.")),
        },
    }
}

/// Says where free memory was when a request failed.
fn fragmented(layout: Option<&Layout>, failure: &Failure) -> String {
    match layout {
        // All of its memory was in use, and the request needed a whole segment.
        Some(layout)
            if layout.free_bytes < failure.size_bytes && failure.card_free_bytes.is_some() =>
        {
            format!(
                "PyTorch needed a segment of {}, with {} free on the card and {} free in {} of its \
                 own",
                size(failure.segment_bytes),
                size(failure.card_free_bytes.unwrap_or_default()),
                size(layout.free_bytes),
                plural(usize::try_from(layout.holes).unwrap_or(usize::MAX), "hole"),
            )
        }
        Some(layout) => format!(
            "{} lay free in {}, the largest of {}",
            size(layout.free_bytes),
            plural(usize::try_from(layout.holes).unwrap_or(usize::MAX), "hole"),
            size(layout.largest_hole_bytes)
        ),
        None => format!(
            "{} were reserved and not allocated",
            size(failure.reserved_bytes.unwrap_or_default().saturating_sub(failure.live_bytes))
        ),
    }
}

fn under_limit(job: &Explanation, least: u64, most: u64) -> Verdict {
    let demand = demand_of(job);
    if let Some(growth) = growth_in_words(job) {
        return because(
            Cause::Growth,
            format!(
                "{growth} In the end it {demand} and failed under a limit between {} and {}.",
                size(least),
                size(most)
            ),
        );
    }
    let free = job.failure.as_ref().and_then(|failure| failure.card_free_bytes);
    let free = size(free.unwrap_or_default());
    let limit = format!("a limit between {} and {}", size(least), size(most));
    if needed(job) <= least
        && let Some(failure) = &job.failure
    {
        return Verdict {
            cause: Cause::Fragmentation,
            headline: format!(
                "The job {demand} and had {} reserved under {limit}, but the request failed: {}.",
                size(least),
                fragmented(failure.layout.as_ref(), failure)
            ),
            ..Verdict::default()
        };
    }
    Verdict {
        cause: Cause::Limit,
        headline: format!(
            "The job {demand} and failed under {limit}, while {free} of the card were free."
        ),
        ..Verdict::default()
    }
}

fn no_failure(job: &Explanation) -> Verdict {
    if let Some(failure) = &job.failure {
        return Verdict {
            cause: Cause::None,
            headline: format!(
                "The job {}. What the allocator had reserved when the request failed at event {} was \
                 not recorded; give the memory that it could use with --limit.",
                demand_of(job),
                Count(failure.event)
            ),
            ..Verdict::default()
        };
    }
    let peak = size(job.peak_live_bytes);
    let headline = match job.recording.peak_reserved_bytes {
        Some(reserved) if job.peak_live_bytes > 0 => format!(
            "No request failed. The job allocates {peak} at its peak, and the recorded allocator \
             reserved {} ({:.3} times as much).",
            size(reserved),
            reserved as f64 / job.peak_live_bytes as f64
        ),
        _ => format!("No request failed. The job allocates {peak} at its peak."),
    };
    Verdict { cause: Cause::None, headline, ..Verdict::default() }
}

fn findings(job: &Explanation) -> Vec<Finding> {
    let mut found = Vec::new();
    let (layout, when) = match &job.failure {
        Some(failure) => (failure.layout.as_ref(), "when the request failed"),
        None => (job.peak_layout.as_ref(), "at the peak"),
    };
    found.extend(job.failure.as_ref().and_then(request));
    found.extend(retries(job));
    if let Some(growth) = &job.growth {
        let site = &growth.sites[0];
        let bytes = growth.sites.iter().fold(0, |sum: u64, site| sum.saturating_add(site.bytes));
        found.push(Finding {
            kind: "growth",
            bytes,
            text: format!(
                "Memory grew by {} over {} steps ({}), {} a step: {} of it ({}) from {}.",
                size(bytes),
                Count(growth.steps),
                growth.boundaries,
                size(growth.bytes_per_step()),
                size(site.bytes_per_step),
                site.category,
                site.site
            ),
        });
    }
    let Some(layout) = layout else { return found };
    let part = |bytes: u64| bytes as f64 * 100.0 / layout.reserved_bytes.max(1) as f64;
    if part(layout.free_bytes) >= 1.0 {
        let pinned: Vec<String> = layout.pinned_by.iter().take(2).map(pinned).collect();
        let pinned = match pinned.is_empty() || !job.recording.has_stacks {
            true => String::new(),
            false => format!(" Beside them lie {}.", pinned.join(" and ")),
        };
        found.push(Finding {
            kind: "fragmentation",
            bytes: layout.free_bytes,
            text: format!(
                "{} ({:.0} %) of the {} reserved lay free {when}, in {} of at most {}.{pinned}",
                size(layout.free_bytes),
                part(layout.free_bytes),
                size(layout.reserved_bytes),
                plural(usize::try_from(layout.holes).unwrap_or(usize::MAX), "hole"),
                size(layout.largest_hole_bytes)
            ),
        });
    }
    if part(layout.empty_segment_bytes) >= 1.0 {
        found.push(Finding {
            kind: "cache",
            bytes: layout.empty_segment_bytes,
            text: format!(
                "{} of the free memory lay in segments without a block: torch.cuda.empty_cache() \
                 releases them, and PyTorch does before a request fails.",
                size(layout.empty_segment_bytes)
            ),
        });
    }
    if has_private_holes(job) {
        found.push(Finding {
            kind: "pools",
            bytes: layout.private_free_bytes,
            text: format!(
                "{} of the free memory belonged to private pools (CUDA graphs, torch.cuda.MemPool) \
                 {when}: PyTorch does not use it for other requests. The replays share it, so what \
                 fits by replay may not fit.",
                size(layout.private_free_bytes)
            ),
        });
    }
    found.extend(streams(job, layout, when));
    if part(layout.waiting_bytes) >= 1.0 {
        found.push(Finding {
            kind: "waiting",
            bytes: layout.waiting_bytes,
            text: format!(
                "{} were freed, but other streams still used them (record_stream).",
                size(layout.waiting_bytes)
            ),
        });
    }
    if part(layout.rounding_bytes) >= 1.0 {
        found.push(Finding {
            kind: "rounding",
            bytes: layout.rounding_bytes,
            text: format!(
                "{} were lost to rounding: blocks are larger than what was requested.",
                size(layout.rounding_bytes)
            ),
        });
    }
    found
}

/// Says which line requested what failed.
fn request(failure: &Failure) -> Option<Finding> {
    let Failure { site, operation, size_bytes, event, .. } = failure;
    (site != NO_STACK).then(|| Finding {
        kind: "request",
        bytes: *size_bytes,
        text: format!(
            "The request that failed: {} at event {}.",
            requested_in_words(site, operation, *size_bytes),
            Count(*event)
        ),
    })
}

/// Says that the job went on after a request failed, or that several did.
fn retries(job: &Explanation) -> Option<Finding> {
    let failure = job.failure.as_ref()?;
    let (failures, after) = (job.recording.failures, job.recording.allocations_after_failure);
    let first = Count(failure.event);
    let several = (failures > 1)
        .then(|| format!("{} requests failed. That at event {first} is shown.", Count(failures)));
    let went_on = (after > 0).then(|| {
        let allocations = plural(usize::try_from(after).unwrap_or(usize::MAX), "allocation");
        let last = if failures > 1 { "last" } else { "request" };
        format!("After the {last} failed, {allocations} followed: the program caught the error.")
    });
    let text: Vec<String> = [several, went_on].into_iter().flatten().collect();
    (!text.is_empty()).then(|| Finding {
        kind: "retries",
        bytes: failure.size_bytes,
        text: text.join(" "),
    })
}

fn pinned(pinner: &crate::layout::Pinner) -> String {
    format!(
        "{} ({}) of {}",
        plural(usize::try_from(pinner.blocks).unwrap_or(usize::MAX), "block"),
        size(pinner.block_bytes),
        pinner.site
    )
}

/// Says how much is free in segments of other streams than the one that requested most.
fn streams(job: &Explanation, layout: &Layout, when: &str) -> Option<Finding> {
    if layout.streams.len() < 2 {
        return None;
    }
    // Without a failure, the stream that holds most.
    let (main, which) = match &job.failure {
        Some(failure) => (failure.stream, "that of the request"),
        None => (job.peak.streams.first()?.stream, "the main one"),
    };
    let others = layout.streams.iter().filter(|it| it.stream != main);
    let free: u64 = others.map(|it| it.free_bytes).sum();
    (free >= layout.reserved_bytes / 100).then(|| Finding {
        kind: "streams",
        bytes: free,
        text: format!(
            "{} of the free memory belonged to other streams than {which} {when}: PyTorch does \
             not share a segment between streams.",
            size(free)
        ),
    })
}

/// Returns true if private pools had at least 1 % of the reserved memory free.
pub(crate) fn has_private_holes(job: &Explanation) -> bool {
    let layout = match &job.failure {
        Some(failure) => failure.layout.as_ref(),
        None => job.peak_layout.as_ref(),
    };
    layout.is_some_and(|it| {
        it.private_free_bytes > 0 && it.private_free_bytes >= it.reserved_bytes / 100
    })
}
