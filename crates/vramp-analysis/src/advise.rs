//! Which settings make a job fit into which limits.
//!
//! [`advise`] replays the job with every [`Candidate`] and limit, on all threads. A setting whose
//! peak without a limit is below a limit fits it and needs no replay of its own, unless the setting
//! depends on the limit. What fits is tried with 5 % less, too.

use std::num::NonZeroUsize;

use indexmap::IndexMap;
use serde::Serialize;
use vramp::Bytes;
use vramp::device::Device;

use crate::candidates::{Candidate, DRIVERS_POOL};
use crate::conclusion::{Conclusion, conclude};
use crate::fit::{in_parallel, is_decided_by_peak, limit_with_headroom, run, smallest_limit};
use crate::job::Job;
use crate::limit::Limit;
use crate::remedy::{HEADROOM_PERCENT, SAVING_PERCENT, is_saving};
use crate::replay::{Outcome, ReplayError};

/// Version of the format of [`Advice`].
pub const SCHEMA_VERSION: u32 = 2;

/// What was tried on a job, in the order of the candidates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The trace's name.
    pub trace: String,
    /// Number of the recorded device.
    pub trace_device: u32,
    /// Most bytes that the job needs at once.
    pub demand_bytes: u64,
    /// How much of the job the recording shows: `whole`, `from_the_middle` or `missing`.
    pub recording: &'static str,
    /// Time from the first to the last event, if recorded.
    pub duration_ms: Option<f64>,
    /// The limits, ascending.
    pub limits: Vec<Limit>,
    /// What was tried, the recorded allocator first.
    pub tried: Vec<Tried>,
    /// What to do for each of [`Advice::limits`].
    pub conclusions: Vec<Conclusion>,
}

/// One candidate on all limits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// The candidate's name.
    pub name: String,
    /// The line to paste; `None` for the recorded settings.
    pub line: Option<String>,
    /// The run without a limit.
    pub unlimited: Run,
    /// The runs with each of [`Advice::limits`].
    pub limited: Vec<Run>,
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Run {
    /// True if no request failed.
    pub fits: bool,
    /// Peak of the reserved bytes, up to the failure.
    pub peak_reserved_bytes: u64,
    /// Host time in driver calls, modelled, up to the failure.
    pub driver_ms: f64,
    /// Number of the event that failed.
    pub oom_at_event: Option<u64>,
    /// True if it fits, and fails with a limit that is 5 % lower: a slightly different run of the job
    /// may fail.
    pub tight: bool,
    /// True if it fits, and fails with a limit that is 2 % lower.
    pub marginal: bool,
}

impl Run {
    fn of(outcome: &Outcome) -> Run {
        Run {
            fits: outcome.oom_at_event.is_none(),
            peak_reserved_bytes: outcome.peak_reserved_bytes,
            driver_ms: outcome.driver_ms,
            oom_at_event: outcome.oom_at_event,
            tight: false,
            marginal: false,
        }
    }
}

impl Tried {
    /// Returns true for the driver's own pool, which is modelled without fragmentation.
    pub fn is_ideal(&self) -> bool {
        self.name == DRIVERS_POOL
    }
}

impl Advice {
    /// Returns the candidates that fit into the limit at `index`, the best first: those that are not tight,
    /// then those that reserve less, then those that cost less time in the driver, then the order of the
    /// candidates. 2 % of the memory and 1 % of the job's time are no difference.
    pub fn fitting(&self, index: usize) -> Vec<&Tried> {
        let fits = |tried: &&Tried| tried.limited.get(index).is_some_and(|run| run.fits);
        let fitting: Vec<&Tried> = self.tried.iter().filter(fits).collect();
        let cost = |tried: &&Tried| {
            let run = &tried.limited[index];
            (run.tight, run.peak_reserved_bytes, run.driver_ms)
        };
        ranked(fitting, cost, self.duration_ms)
    }
}

/// Returns the items, the best first, by what each costs: tight or not, reserved bytes, driver time in ms.
/// Items that are alike keep their order. O(n log n).
pub(crate) fn ranked<T>(
    items: Vec<T>,
    cost: impl Fn(&T) -> (bool, u64, f64),
    job_ms: Option<f64>,
) -> Vec<T> {
    let mut kept: Vec<(usize, T)> = items.into_iter().enumerate().collect();
    let by_memory = |item: &(usize, T)| {
        let (tight, bytes, _) = cost(&item.1);
        (tight, bytes, item.0)
    };
    kept.sort_by_key(by_memory);
    let mut found = Vec::with_capacity(kept.len());
    let mut rest = kept.into_iter().peekable();
    while let Some(first) = rest.next() {
        let (tight, least, _) = cost(&first.1);
        let mut alike = vec![first];
        let is_alike = |it: &(usize, T)| {
            let (other, bytes, _) = cost(&it.1);
            other == tight && !is_saving(least, bytes)
        };
        while let Some(next) = rest.next_if(is_alike) {
            alike.push(next);
        }
        let least_ms = alike.iter().map(|it| cost(&it.1).2).fold(f64::INFINITY, f64::min);
        // How often 1 % of the job more than the least.
        let slower = |it: &(usize, T)| match job_ms {
            Some(job_ms) if job_ms > 0.0 => ((cost(&it.1).2 - least_ms) * 100.0 / job_ms) as u64,
            _ => 0,
        };
        alike.sort_by_key(|it| (slower(it), it.0));
        found.extend(alike.into_iter().map(|(_, item)| item));
    }
    found
}

/// A candidate that fits on every device of a recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Common<'a> {
    /// The candidate's name.
    pub name: &'a str,
    /// The line to paste; `None` for the recorded settings.
    pub line: Option<&'a str>,
    /// Sum of the peaks of reserved bytes. The devices may reach them at different times.
    pub sum_of_peaks_bytes: u64,
    /// Host time in driver calls on all devices.
    pub driver_ms: f64,
    /// True if it is tight on a device.
    pub tight: bool,
}

/// Returns the candidates that fit into the limit at `index` on every device of `all`, the best first, as
/// [`Advice::fitting`] does. Settings are those of a process, so they are the same on all of its devices.
/// O(devices * candidates).
pub fn fitting_everywhere(all: &[Advice], index: usize) -> Vec<Common<'_>> {
    let mut common: IndexMap<&str, (usize, Common<'_>)> = IndexMap::new();
    let tried = all
        .iter()
        .enumerate()
        .flat_map(|(device, advice)| advice.tried.iter().map(move |tried| (device, tried)));
    for (device, tried) in tried {
        let Some(run) = tried.limited.get(index).filter(|run| run.fits) else { continue };
        let (name, line) = (tried.name.as_str(), tried.line.as_deref());
        let none = Common { name, line, sum_of_peaks_bytes: 0, driver_ms: 0.0, tight: false };
        let (devices, sum) = common.entry(name).or_insert((0, none));
        // It does not fit on a device before, or was tried twice on this one.
        if *devices != device {
            continue;
        }
        *devices += 1;
        sum.sum_of_peaks_bytes = sum.sum_of_peaks_bytes.saturating_add(run.peak_reserved_bytes);
        sum.driver_ms += run.driver_ms;
        sum.tight |= run.tight;
    }
    let everywhere = common.into_values().filter(|(devices, _)| *devices == all.len());
    let found: Vec<Common<'_>> = everywhere.map(|(_, common)| common).collect();
    let longest = all.iter().filter_map(|advice| advice.duration_ms).fold(0.0, f64::max);
    let cost = |common: &Common<'_>| (common.tight, common.sum_of_peaks_bytes, common.driver_ms);
    ranked(found, cost, Some(longest))
}

/// Replays the job with each candidate: without a limit, and with each of `limits`.
///
/// # Errors
/// Those of [`crate::replay::replay()`].
pub fn advise(
    job: &Job<'_>,
    device: &Device,
    candidates: &[Candidate],
    limits: &[Limit],
    threads: NonZeroUsize,
) -> Result<Advice, ReplayError> {
    let mut limits: Vec<Limit> = limits.to_vec();
    limits.sort_unstable();
    limits.dedup_by_key(|limit| limit.bytes);
    let tried = in_parallel(threads, candidates, |it| try_candidate(job, device, it, &limits));
    let mut advice = Advice {
        schema_version: SCHEMA_VERSION,
        trace: job.workload.name.clone(),
        trace_device: job.workload.device,
        demand_bytes: job.workload.peak_demand.count(),
        recording: job.recorded.past.name(),
        duration_ms: duration_ms(job),
        limits,
        tried: tried.into_iter().collect::<Result<_, _>>()?,
        conclusions: Vec::new(),
    };
    let needs = needs(job, device, candidates, &advice)?;
    advice.conclusions =
        (0..advice.limits.len()).map(|index| conclude(job, &advice, index, needs)).collect();
    Ok(advice)
}

/// What the recorded allocator needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// The smallest limit that it fits into.
    pub smallest: Bytes,
    /// One that leaves room for runs that differ slightly.
    pub roomy: Bytes,
}

/// Returns what the recorded allocator needs, if one of the limits is below its peak.
fn needs(
    job: &Job<'_>,
    device: &Device,
    candidates: &[Candidate],
    advice: &Advice,
) -> Result<Option<Needs>, ReplayError> {
    let (Some(own), Some(tried)) = (candidates.first(), advice.tried.first()) else {
        return Ok(None);
    };
    let peak = Bytes::new(tried.unlimited.peak_reserved_bytes);
    if !tried.unlimited.fits || advice.limits.iter().all(|limit| limit.bytes() >= peak) {
        return Ok(None);
    }
    let smallest = smallest_limit(job, device, &own.config, peak)?;
    let roomy = limit_with_headroom(job, device, &own.config, peak, smallest)?;
    Ok(Some(Needs { smallest, roomy }))
}

/// Returns the time from the first to the last event of the device.
fn duration_ms(job: &Job<'_>) -> Option<f64> {
    let times = || job.workload.device_events(job.trace).map(|(_, event)| event.time_us);
    let us = times().max()?.saturating_sub(times().min()?);
    (us > 0).then_some(us as f64 / 1000.0)
}

fn try_candidate(
    job: &Job<'_>,
    device: &Device,
    candidate: &Candidate,
    limits: &[Limit],
) -> Result<Tried, ReplayError> {
    let config = &candidate.config;
    let unlimited = Run::of(&run(job, device, config, None)?);
    let decided = is_decided_by_peak(config);
    let try_limit = |limit: u64| {
        let below = unlimited.fits && unlimited.peak_reserved_bytes <= limit;
        if below && decided {
            return Ok(unlimited);
        }
        run(job, device, config, Some(Bytes::new(limit))).map(|outcome| Run::of(&outcome))
    };
    let limited = limits
        .iter()
        .map(|limit| {
            let limit = limit.bytes;
            let found = try_limit(limit)?;
            let fails_with_less =
                |percent: u64| try_limit(limit - limit / 100 * percent).map(|run| !run.fits);
            let tight = found.fits && fails_with_less(HEADROOM_PERCENT)?;
            let marginal = tight && fails_with_less(SAVING_PERCENT)?;
            Ok(Run { tight, marginal, ..found })
        })
        .collect::<Result<_, ReplayError>>()?;
    let (name, line) = (candidate.name.clone(), candidate.line.clone());
    Ok(Tried { name, line, unlimited, limited })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_differences_decide_nothing() {
        let order = |items: &[(bool, u64, f64)], job_ms| {
            let numbered: Vec<(usize, (bool, u64, f64))> =
                items.iter().copied().enumerate().collect();
            let found = ranked(numbered, |&(_, cost)| cost, job_ms);
            found.into_iter().map(|(nth, _)| nth).collect::<Vec<_>>()
        };
        // 0.1 ms of a second are no difference, nor is 1 % of the memory: the first is no change.
        let alike = [(false, 1714, 6.7), (false, 1714, 6.6), (false, 1699, 24.0)];
        assert_eq!(order(&alike, Some(1000.0)), [0, 1, 2]);
        // Of a job of 100 ms, 18 ms are.
        assert_eq!(order(&alike, Some(100.0)), [0, 1, 2]);
        let slow = [(false, 1714, 24.0), (false, 1714, 6.6)];
        assert_eq!(order(&slow, Some(100.0)), [1, 0]);
        // How long the job took is not known.
        assert_eq!(order(&slow, None), [0, 1]);
        // 2 % of the memory and headroom are differences.
        assert_eq!(order(&[(false, 1000, 1.0), (false, 980, 9.0)], Some(1e6)), [1, 0]);
        assert_eq!(order(&[(true, 900, 1.0), (false, 1000, 1.0)], Some(1e6)), [1, 0]);
    }
}
