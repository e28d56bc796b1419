//! Which settings make a job fit into which limits.
//!
//! [`advise`] replays the job with every [`Candidate`] and limit, on all threads. A setting whose
//! peak without a limit is below a limit fits it and needs no replay of its own, unless the setting
//! depends on the limit. What fits is tried with 5 % less, too.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use serde::Serialize;
use vramp::Bytes;
use vramp::device::Device;

use crate::candidates::Candidate;
use crate::fit::{in_parallel, is_decided_by_peak, run};
use crate::job::Job;
use crate::replay::{Outcome, ReplayError};

/// Version of the format of [`Advice`].
pub const SCHEMA_VERSION: u32 = 1;

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
    /// The limits, ascending.
    pub limits_bytes: Vec<u64>,
    /// What was tried.
    pub tried: Vec<Tried>,
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
    /// The runs with each of [`Advice::limits_bytes`].
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
}

/// Part of a limit that should be left for runs of the job that differ slightly, in per cent.
const HEADROOM_PERCENT: u64 = 5;

impl Run {
    fn of(outcome: &Outcome) -> Run {
        Run {
            fits: outcome.oom_at_event.is_none(),
            peak_reserved_bytes: outcome.peak_reserved_bytes,
            driver_ms: outcome.driver_ms,
            oom_at_event: outcome.oom_at_event,
            tight: false,
        }
    }
}

impl Advice {
    /// Returns the candidates that fit into the limit at `index`: those that are not tight first, each
    /// kind with the least driver time first.
    pub fn fitting(&self, index: usize) -> Vec<&Tried> {
        let fits = |tried: &&Tried| tried.limited.get(index).is_some_and(|run| run.fits);
        let mut fitting: Vec<&Tried> = self.tried.iter().filter(fits).collect();
        fitting.sort_by(|a, b| {
            let [a, b] = [a, b].map(|tried| &tried.limited[index]);
            a.tight.cmp(&b.tight).then(a.driver_ms.total_cmp(&b.driver_ms))
        });
        fitting
    }
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

/// Returns the candidates that fit into the limit at `index` on every device of `all`, the best first: those
/// that are not tight, then those with the least driver time. Settings are those of a process, so they are
/// the same on all of its devices. O(devices * candidates).
pub fn fitting_everywhere(all: &[Advice], index: usize) -> Vec<Common<'_>> {
    let mut common: HashMap<&str, (usize, Common<'_>)> = HashMap::new();
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
    let mut found: Vec<Common<'_>> = everywhere.map(|(_, common)| common).collect();
    found.sort_by(|a, b| {
        let cost = a.tight.cmp(&b.tight).then(a.driver_ms.total_cmp(&b.driver_ms));
        cost.then_with(|| a.name.cmp(b.name))
    });
    found
}

/// Replays the job with each candidate: without a limit, and with each of `limits`.
///
/// # Errors
/// Those of [`crate::replay::replay()`].
pub fn advise(
    job: &Job<'_>,
    device: &Device,
    candidates: &[Candidate],
    limits: &[Bytes],
    threads: NonZeroUsize,
) -> Result<Advice, ReplayError> {
    let mut limits: Vec<Bytes> = limits.to_vec();
    limits.sort_unstable();
    limits.dedup();
    let tried = in_parallel(threads, candidates, |it| try_candidate(job, device, it, &limits));
    Ok(Advice {
        schema_version: SCHEMA_VERSION,
        trace: job.workload.name.clone(),
        trace_device: job.workload.device,
        demand_bytes: job.workload.peak_demand.count(),
        recording: job.recorded.past.name(),
        limits_bytes: limits.iter().map(|limit| limit.count()).collect(),
        tried: tried.into_iter().collect::<Result<_, _>>()?,
    })
}

fn try_candidate(
    job: &Job<'_>,
    device: &Device,
    candidate: &Candidate,
    limits: &[Bytes],
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
            let found = try_limit(limit.count())?;
            let lower = limit.count() - limit.count() / 100 * HEADROOM_PERCENT;
            let tight = found.fits && !try_limit(lower)?.fits;
            Ok(Run { tight, ..found })
        })
        .collect::<Result<_, ReplayError>>()?;
    let (name, line) = (candidate.name.clone(), candidate.line.clone());
    Ok(Tried { name, line, unlimited, limited })
}
