//! Checks every remedy of a recording by replays: it fits, and is better than no change.

use std::num::NonZeroUsize;

use vramp::Bytes;
use vramp::device::{Device, DeviceOptions};
use vramp::peers::Preset;
use vramp_analysis::advise::advise;
use vramp_analysis::candidates::Candidate;
use vramp_analysis::explain::{Options, explain};
use vramp_analysis::fit::run;
use vramp_analysis::job::Job;
use vramp_analysis::limit::Limit;
use vramp_analysis::remedy::{Remedy, RemedyKind, SAVING_PERCENT};
use vramp_analysis::replay::ReplayError;
use vramp_analysis::verdict::Cause;
use vramp_trace::Trace;

/// How many remedies were checked, and what is wrong with them.
#[derive(Debug, Default)]
pub struct Checked {
    /// Remedies of all jobs.
    pub remedies: usize,
    /// Of these, those that were replayed.
    pub replayed: usize,
    /// The cause on each device, and the first remedy.
    pub first: Vec<(Cause, Option<RemedyKind>)>,
    /// What is wrong, a line each.
    pub faults: Vec<String>,
}

/// Checks what `explain` and `advise` propose for each recorded device of `trace`.
pub fn check(trace: &Trace, threads: NonZeroUsize) -> Result<Checked, ReplayError> {
    let options = DeviceOptions {
        name: "sim".to_owned(),
        usable: Some(Bytes::tib(1)),
        ..DeviceOptions::default()
    };
    let device = Device::with(options)?;
    let mut checked = Checked::default();
    for job in Job::all(trace) {
        let mut of = Check { job: &job, device: &device, checked: &mut checked };
        let found = explain(&job, &device, &Options { threads, ..Options::default() })?;
        if found.failure.is_some() && found.verdict.remedies.is_empty() {
            of.fault("a job that failed has no remedy");
        }
        let cause = found.verdict.cause;
        let growth = cause == Cause::Growth;
        of.checked.first.push((cause, found.verdict.remedies.first().map(|it| it.kind)));
        // With no change it failed, as the recording shows.
        let failed = found.failure.is_some();
        of.all("explain", &found.verdict.remedies, (growth, failed))?;
        if job.recorded.past.is_missing() {
            continue;
        }
        // Less than the demand, and a little more than it.
        let demand = found.demand_bytes;
        let limits = [demand / 10 * 9, demand / 100 * 108];
        let limits = limits.map(|bytes| Limit::from(Bytes::new(bytes)));
        let advice = advise(&job, &device, &Candidate::all(&job.recorded), &limits, threads)?;
        for conclusion in &advice.conclusions {
            if conclusion.remedies.is_empty() {
                of.fault(&format!("advise has no remedy for {}", conclusion.limit));
            }
            let place = format!("advise for {}", conclusion.limit);
            of.all(&place, &conclusion.remedies, (false, false))?;
        }
    }
    Ok(checked)
}

struct Check<'a> {
    job: &'a Job<'a>,
    device: &'a Device,
    checked: &'a mut Checked,
}

impl Check<'_> {
    fn fault(&mut self, text: &str) {
        let job = &self.job.workload;
        self.checked.faults.push(format!("{}, device {}: {text}", job.name, job.device));
    }

    fn all(
        &mut self,
        place: &str,
        remedies: &[Remedy],
        (growth, failed): (bool, bool),
    ) -> Result<(), ReplayError> {
        if !growth && !remedies.is_sorted_by_key(|remedy| remedy.kind) {
            self.fault(&format!("{place}: not in the order of what to try"));
        }
        for remedy in remedies {
            self.checked.remedies += 1;
            if let Some(limit) = remedy.fits_bytes {
                self.checked.replayed += 1;
                self.one(place, remedy, Bytes::new(limit), failed)?;
            }
        }
        Ok(())
    }

    /// Replays the job with a remedy, and with no change.
    fn one(
        &mut self,
        place: &str,
        remedy: &Remedy,
        limit: Bytes,
        failed: bool,
    ) -> Result<(), ReplayError> {
        let own = Candidate::recorded(&self.job.recorded);
        let with = match remedy.kind {
            RemedyKind::Setting | RemedyKind::Vramp => self.candidate(remedy),
            _ => Some(own.clone()),
        };
        let Some(with) = with else {
            self.fault(&format!("{place}: nothing has the line of '{}'", remedy.text));
            return Ok(());
        };
        let outcome = run(self.job, self.device, &with.config, Some(limit))?;
        if outcome.oom_at_event.is_some() {
            self.fault(&format!("{place}: does not fit into {limit}: '{}'", remedy.text));
        }
        if failed || with.name == own.name {
            return Ok(());
        }
        let unchanged = run(self.job, self.device, &own.config, Some(limit))?;
        let least = unchanged.peak_reserved_bytes / 100 * (100 - SAVING_PERCENT);
        if unchanged.oom_at_event.is_none() && outcome.peak_reserved_bytes > least + (2 << 20) {
            self.fault(&format!("{place}: no better than no change: '{}'", remedy.text));
        }
        Ok(())
    }

    fn candidate(&self, remedy: &Remedy) -> Option<Candidate> {
        let presets = Preset::ALL.into_iter().map(Candidate::preset);
        let mut all = Candidate::all(&self.job.recorded).into_iter().chain(presets);
        all.find(|candidate| candidate.line.is_some() && candidate.line == remedy.code)
    }
}
