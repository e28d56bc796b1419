//! Which limits a job fits into, by replays on the simulator.
//!
//! A run without a limit gives the peak that an allocator reserves if nothing forces it to release
//! memory. Below that it may fit too, because allocators release cached memory before they fail, so
//! each smaller limit is a replay of its own. [`smallest_limit`] halves the interval between the
//! job's demand and the peak. It assumes that a job which fits into a limit fits into a larger one,
//! which PyTorch's allocator does not promise.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use vramp::Bytes;
use vramp::device::Device;
use vramp::peers::{Config, Preset};

use crate::job::Job;
use crate::remedy::HEADROOM_PERCENT;
use crate::replay::{Options, Outcome, ReplayError, replay};

/// Requests of a job that is searched less exactly.
const LONG: usize = 300_000;

/// A limit is a multiple of this.
const STEP: u64 = 2 << 20;

/// Replays the job with a configuration and a limit.
///
/// # Errors
/// Those of [`replay()`].
pub fn run(
    job: &Job<'_>,
    device: &Device,
    config: &Config,
    limit: Option<Bytes>,
) -> Result<Outcome, ReplayError> {
    let config = config.clone().with_limit(limit);
    let releases = job.recorded.segments.releases() > 0;
    let options = Options { releases_of: releases.then_some(&job.recorded), ..Options::default() };
    let outcome = replay(&job.workload, device, config, options, |_| {})?;
    Ok(outcome.with_recorded(&job.recorded))
}

/// Returns the smallest limit found that the job fits into with `config`, given the peak of a run
/// without a limit. The result is at most 2 MiB, or 0.5 % of the peak, above the smallest; 2 % for a
/// job of more than 300,000 requests.
///
/// About eight replays, each of which stops where it fails; one if the peak is as close to the demand.
/// The result was replayed and fits.
///
/// # Errors
/// Those of [`replay()`].
pub fn smallest_limit(
    job: &Job<'_>,
    device: &Device,
    config: &Config,
    peak: Bytes,
) -> Result<Bytes, ReplayError> {
    let demand = job.workload.peak_demand.count();
    // No limit below the demand fits; the peak nearly always does.
    let (mut fails, mut fits) = ((demand / STEP).saturating_sub(1), peak.count().div_ceil(STEP));
    let part = if job.workload.requests.len() > LONG { 50 } else { 200 };
    let tolerance = (fits / part).max(1);
    let fits_into = |steps: u64| -> Result<bool, ReplayError> {
        let outcome = run(job, device, config, Some(Bytes::new(steps * STEP)))?;
        Ok(outcome.oom_at_event.is_none())
    };
    let mut is_replayed = false;
    loop {
        while fits.saturating_sub(fails) > tolerance {
            let middle = fails + (fits - fails) / 2;
            match fits_into(middle)? {
                true => (fits, is_replayed) = (middle, true),
                false => fails = middle,
            }
        }
        if is_replayed || fits_into(fits)? {
            return Ok(Bytes::new(fits * STEP));
        }
        // A limit can be checked against more than is then reserved.
        (fails, fits) = (fits, fits + fits / 10 + tolerance);
    }
}

/// Returns a limit from `smallest` on that leaves 5 % for runs that differ slightly, given the peak of a run
/// without a limit. At most two replays; the result fits.
///
/// # Errors
/// Those of [`replay()`].
pub fn limit_with_headroom(
    job: &Job<'_>,
    device: &Device,
    config: &Config,
    peak: Bytes,
    smallest: Bytes,
) -> Result<Bytes, ReplayError> {
    let roomy = smallest.count().saturating_add(smallest.count() / 100 * HEADROOM_PERCENT);
    let roomy = Bytes::new(roomy.div_ceil(STEP) * STEP);
    let fits = (peak <= roomy && is_decided_by_peak(config))
        || run(job, device, config, Some(roomy))?.oom_at_event.is_none();
    // PyTorch's allocator does not promise that what fits into a limit fits into a larger one.
    Ok(if fits { roomy } else { smallest })
}

/// Returns true if a configuration fits into every limit from its peak without a limit on, because
/// it decides the same below it.
pub fn is_decided_by_peak(config: &Config) -> bool {
    // PyTorch checks the limit for a whole segment, also where an expandable one has a part of it, and
    // these settings compare what is reserved with the limit.
    let torch = &config.torch;
    config.preset != Preset::TorchExpandable
        && !torch.expandable_segments
        && torch.garbage_collection_threshold.is_none()
        && torch.per_process_memory_fraction.is_none()
}

/// Calls `work` for each item on up to `threads` threads, and returns the results in the order of
/// the items.
pub fn in_parallel<T: Sync, R: Send>(
    threads: NonZeroUsize,
    items: &[T],
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<R>>> = Mutex::new((0..items.len()).map(|_| None).collect());
    let run = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { break };
            let result = work(item);
            results.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.get().min(items.len().max(1)) {
            scope.spawn(run);
        }
        run();
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order_of_the_items() {
        let items: Vec<u32> = (0..100).collect();
        for threads in [1, 3, 200] {
            let threads = NonZeroUsize::new(threads).unwrap();
            let doubled = in_parallel(threads, &items, |item| 2 * item);
            assert_eq!(doubled, (0..100).map(|item| 2 * item).collect::<Vec<_>>());
        }
        assert!(in_parallel(NonZeroUsize::MIN, &[0u8; 0], |it| *it).is_empty());
    }
}
