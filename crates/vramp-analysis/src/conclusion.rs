//! What to do about a job under a limit, from everything that was tried on it.

use serde::Serialize;
use vramp::peers::Preset;

use crate::advise::{Advice, Needs, Run, Tried};
use crate::job::Job;
use crate::limit::Limit;
use crate::remedy::{
    Remedy, RemedyKind, card, is_saving, kind, nothing, percent_less, requested_in_words, size,
};

/// What to do to fit into one limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Conclusion {
    /// The limit.
    pub limit: Limit,
    /// What to do, in the order in which to try it. At least one.
    pub remedies: Vec<Remedy>,
}

/// Most settings for each limit.
const SETTINGS: usize = 3;

/// Returns what to do about the limit at `index`. `needs` is what the recorded allocator needs, where that was
/// searched.
pub(crate) fn conclude(
    job: &Job<'_>,
    advice: &Advice,
    index: usize,
    needs: Option<Needs>,
) -> Conclusion {
    let limit = advice.limits[index];
    let own = advice.tried.first().and_then(|tried| tried.limited.get(index));
    let of = AtLimit { job, advice, index, limit, own, needs };
    let mut remedies = Vec::new();
    match own.filter(|run| run.fits) {
        Some(run) => {
            let peak = advice.tried[0].unlimited.peak_reserved_bytes;
            // With less than that it fits as well, because it releases what it caches.
            let needed = match needs.filter(|_| peak > limit.bytes) {
                Some(needs) => needs.smallest.count(),
                None => peak.min(run.peak_reserved_bytes),
            };
            remedies.push(nothing(limit, needed));
            remedies.extend(of.candidates());
        }
        None => {
            remedies.extend(of.limit());
            remedies.extend(of.candidates());
            remedies.extend(of.program());
            remedies.extend(of.card());
        }
    }
    remedies.sort_by_key(|remedy| remedy.kind);
    Conclusion { limit, remedies }
}

struct AtLimit<'a> {
    job: &'a Job<'a>,
    advice: &'a Advice,
    index: usize,
    limit: Limit,
    /// The recorded allocator under the limit.
    own: Option<&'a Run>,
    needs: Option<Needs>,
}

impl AtLimit<'_> {
    fn needs_in_words(&self) -> String {
        let demand = size(self.advice.demand_bytes);
        let below = match self.limit.bytes < self.advice.demand_bytes {
            true => format!(" No allocator fits it below {demand}."),
            false => String::new(),
        };
        match self.needs {
            Some(Needs { smallest, roomy }) => format!(
                "The job needs {smallest} as it is ({}), and {roomy} with headroom.{below}",
                self.advice.tried[0].name
            ),
            None => format!("The job needs at least {demand}."),
        }
    }

    /// Returns the limit to give instead.
    fn limit(&self) -> Option<Remedy> {
        let needs = self.needs.filter(|_| self.limit.card.is_none())?;
        let text = format!(
            "Raise the limit from {} to {}. {}",
            self.limit,
            needs.roomy,
            self.needs_in_words()
        );
        Some(Remedy::new(RemedyKind::Limit, text).fits(needs.roomy.count()))
    }

    /// Returns the candidates that are better than no change, those that are alike as one.
    fn candidates(&self) -> Vec<Remedy> {
        let run = |tried: &Tried| tried.limited[self.index];
        let is_better = |tried: &&Tried| {
            let run = run(tried);
            // The model of the driver's pool reserves less than a real one does.
            match self.own {
                Some(own) if own.fits && !own.tight => {
                    is_saving(run.peak_reserved_bytes, own.peak_reserved_bytes) && !tried.is_ideal()
                }
                Some(own) if own.fits => !run.tight,
                _ => !run.marginal,
            }
        };
        let mut better = self.advice.fitting(self.index);
        better.retain(is_better);
        if self.own.is_none_or(|own| !own.fits) {
            // Where nothing is there that fits with a margin, what fits barely is better than nothing; and the model of
            // the driver's pool counts only where nothing else fits.
            if better.is_empty() {
                better = self.advice.fitting(self.index);
            }
            if better.iter().any(|tried| !tried.is_ideal()) {
                better.retain(|tried| !tried.is_ideal());
            }
        }
        let mut groups: Vec<Vec<&Tried>> = Vec::new();
        for tried in better.into_iter().filter(|tried| tried.line.is_some()) {
            let is_alike = |group: &&mut Vec<&Tried>| {
                let (one, other) = (run(group[0]), run(tried));
                let key = |run: Run| (run.peak_reserved_bytes, run.tight);
                key(one) == key(other) && kind(&group[0].name) == kind(&tried.name)
            };
            match groups.iter_mut().find(is_alike) {
                Some(group) => group.push(tried),
                None => groups.push(vec![tried]),
            }
        }
        let is_vramp = |group: &&Vec<&Tried>| group[0].name == Preset::Vramp.name();
        let settings = groups.iter().filter(|group| !is_vramp(group)).take(SETTINGS);
        settings.chain(groups.iter().filter(is_vramp)).map(|group| self.candidate(group)).collect()
    }

    fn candidate(&self, group: &[&Tried]) -> Remedy {
        let first = group[0];
        let run = first.limited[self.index];
        let less = match self.own {
            Some(own) if own.fits => {
                let less = percent_less(run.peak_reserved_bytes, own.peak_reserved_bytes);
                format!(", {less} less, if memory is wanted for more")
            }
            _ => String::new(),
        };
        let tight = if run.tight { "; tight: it fails with 5 % less memory" } else { "" };
        let modelled = match first.is_ideal() {
            true => " (modelled without fragmentation)",
            false => "",
        };
        let alike = match group.len() {
            1 => String::new(),
            _ => {
                let names: Vec<&str> = group[1..].iter().map(|it| it.name.as_str()).collect();
                format!(" The same: {}.", names.join(", "))
            }
        };
        let text = format!(
            "{}{modelled} fits and reserves {}{less}{tight}.{alike}",
            first.name,
            size(run.peak_reserved_bytes)
        );
        let remedy = Remedy::new(kind(&first.name), text).fits(self.limit.bytes);
        Remedy { code: first.line.clone(), ..remedy }
    }

    /// Returns the line of the program that requests what fails under the limit.
    fn program(&self) -> Option<Remedy> {
        let event = usize::try_from(self.own?.oom_at_event?).ok()?;
        let request = self.job.request_of_event(event);
        let index = self.job.workload.event_of(request as usize)?;
        let event = self.job.trace.events.get(index)?;
        let stack = event.stack?;
        let labels = &self.job.labels;
        let (site, operation) =
            (labels.site(labels.site_of(Some(stack))), labels.operation_of(Some(stack)));
        let request = requested_in_words(site, operation, event.size.count());
        let less = self.needs.map(|needs| needs.smallest.saturating_sub(self.limit.bytes()));
        let less = match less.filter(|less| !less.is_zero()) {
            Some(less) => format!("{less} less at that moment is enough"),
            None => "allocate less at that moment".to_owned(),
        };
        let text = format!("Change {request}, the first request that fails: {less}.");
        let remedy = Remedy::new(RemedyKind::Program, text);
        Some(match self.needs {
            Some(needs) => remedy.fits(needs.smallest.count()),
            None => remedy,
        })
    }

    fn card(&self) -> Option<Remedy> {
        let to = self.needs.map_or(self.advice.demand_bytes, |needs| needs.roomy.count());
        let found = card(to, Some(self.limit.bytes), &self.needs_in_words());
        Some(match self.needs {
            Some(_) => found,
            None => Remedy { fits_bytes: None, ..found },
        })
    }
}
