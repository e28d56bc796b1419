//! What to do about a job, in the order in which to try it.
//!
//! | remedy | when |
//! |---|---|
//! | nothing | the job fits as it is |
//! | record | the recording does not show what happened |
//! | limit | the process had a limit below what the card has, or a limit was given |
//! | setting | it fits, and needs at least 2 % less memory than the job as it is |
//! | vramp | the same |
//! | program | a request failed, and its line is known |
//! | card | the memory of the card was the bound |
//!
//! The line of the program comes first where memory grows from step to step: whatever else is done, such
//! a job fails later. Times in the driver decide nothing here: they are less than 1 % of a job.

use serde::Serialize;
use vramp::Bytes;
use vramp::device::sim::CardModel;
use vramp::peers::Preset;

use crate::explain::{Explanation, Failure, Fit};
use crate::frames::NO_STACK;
use crate::limit::Limit;
use crate::verdict::{Capacity, Cause, has_private_holes, needed};

/// One thing to do about a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Remedy {
    /// What is changed.
    pub kind: RemedyKind,
    /// What to do and what it is good for, in a sentence or two.
    pub text: String,
    /// A line to paste into a shell or a program, if there is one.
    pub code: Option<String>,
    /// Memory that the recorded requests fit into with it, by replay. `None` if it was not replayed.
    pub fits_bytes: Option<u64>,
}

/// What a remedy changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RemedyKind {
    /// Nothing: the job fits as it is.
    Nothing,
    /// The recording.
    Record,
    /// The limit of the process.
    Limit,
    /// A setting of PyTorch's allocator.
    Setting,
    /// The allocator: vramp.
    Vramp,
    /// A line of the program.
    Program,
    /// The card.
    Card,
}

impl Remedy {
    pub(crate) fn new(kind: RemedyKind, text: String) -> Remedy {
        Remedy { kind, text, code: None, fits_bytes: None }
    }

    pub(crate) fn code(self, code: impl Into<String>) -> Remedy {
        Remedy { code: Some(code.into()), ..self }
    }

    pub(crate) fn fits(self, bytes: u64) -> Remedy {
        Remedy { fits_bytes: Some(bytes), ..self }
    }
}

/// Part of a limit that should be left for runs of the job that differ slightly, in per cent.
pub const HEADROOM_PERCENT: u64 = 5;

/// A remedy needs so much less memory than the job as it is, or is none, in per cent.
pub const SAVING_PERCENT: u64 = 2;

/// Returns true if `bytes` are at least [`SAVING_PERCENT`] less than `of`.
pub(crate) fn is_saving(bytes: u64, of: u64) -> bool {
    u128::from(bytes) * 100 <= u128::from(of) * u128::from(100 - SAVING_PERCENT)
}

/// Says what part of `of` the rest beside `bytes` is: `21 %`.
pub(crate) fn percent_less(bytes: u64, of: u64) -> String {
    let less = of.saturating_sub(bytes) as f64 * 100.0 / of.max(1) as f64;
    if less < 10.0 { format!("{less:.1} %") } else { format!("{less:.0} %") }
}

pub(crate) fn size(bytes: u64) -> Bytes {
    Bytes::new(bytes)
}

/// Returns that the job fits as it is, with what is left of `limit`.
pub(crate) fn nothing(limit: Limit, needed: u64) -> Remedy {
    let left = limit.bytes.saturating_sub(needed);
    let close = match left < limit.bytes / 100 * HEADROOM_PERCENT {
        true => " A slightly different run may fail.",
        false => "",
    };
    let text = format!(
        "It fits already: change nothing. It needs {} of {limit}, so {} ({}) are left.{close}",
        size(needed),
        size(left),
        percent_less(needed, limit.bytes)
    );
    Remedy::new(RemedyKind::Nothing, text).fits(limit.bytes)
}

/// Returns the smallest card with `bytes` and more than the job has already.
pub(crate) fn card(bytes: u64, has: Option<u64>, needs: &str) -> Remedy {
    let more = has.map_or(0, |has| has.saturating_add(1));
    let Some(model) = CardModel::smallest_with(size(bytes.max(more))) else {
        let text = format!("No card known here has enough: divide the job among cards. {needs}");
        return Remedy::new(RemedyKind::Card, text);
    };
    let text = format!("Use a card such as {} ({} usable). {needs}", model.name, model.usable());
    Remedy::new(RemedyKind::Card, text).fits(model.usable().count())
}

/// Returns what to do about an explained job.
pub(crate) fn remedies(job: &Explanation, capacity: Capacity, cause: Cause) -> Vec<Remedy> {
    if cause == Cause::NoHistory {
        return vec![record()];
    }
    let of = Situation { job, capacity, cause, own: job.fits.first() };
    let mut found = of.fits_already();
    if found.is_empty() {
        found.extend(of.limit());
        found.extend(of.allocators());
        found.extend(of.program());
        found.extend(of.card());
    } else {
        found.extend(of.savings());
    }
    found.sort_by_key(|remedy| match (cause, remedy.kind) {
        (Cause::Growth, RemedyKind::Program) => RemedyKind::Nothing,
        (_, kind) => kind,
    });
    found
}

fn record() -> Remedy {
    let text = "Record the history, before the model is built, and dump a snapshot when the job \
                fails: then the cause is known.";
    Remedy::new(RemedyKind::Record, text.to_owned())
        .code("torch.cuda.memory._record_memory_history(context=\"all\", max_entries=5_000_000)")
}

/// A job and what it could use.
struct Situation<'a> {
    job: &'a Explanation,
    capacity: Capacity,
    cause: Cause,
    /// What the recorded allocator needs, by replay.
    own: Option<&'a Fit>,
}

impl<'a> Situation<'a> {
    /// Returns what the job as it is needs: by replay, or else its demand, which is less.
    fn needs(&self) -> u64 {
        let replayed = self.own.and_then(|own| own.smallest_limit_bytes);
        replayed.unwrap_or_else(|| needed(self.job))
    }

    /// Returns that with room for runs that differ slightly, if it was replayed.
    fn needs_with_headroom(&self) -> u64 {
        let replayed = self.own.and_then(|own| own.roomy_limit_bytes);
        replayed.unwrap_or_else(|| self.needs())
    }

    /// Says how much the job as it is needs.
    fn needs_in_words(&self) -> String {
        match self.own {
            Some(own) => format!(
                "The job needs {} as it is ({}), and {} with headroom.",
                size(self.needs()),
                own.allocator,
                size(self.needs_with_headroom())
            ),
            None => format!("The job needs at least {}.", size(self.needs())),
        }
    }

    fn failure(&self) -> Option<&'a Failure> {
        self.job.failure.as_ref()
    }

    /// Returns that nothing has to change, if so.
    fn fits_already(&self) -> Vec<Remedy> {
        if self.cause != Cause::None {
            return Vec::new();
        }
        match self.capacity {
            Capacity::Unknown if self.failure().is_some() => Vec::new(),
            Capacity::Unknown => vec![Remedy::new(
                RemedyKind::Nothing,
                "No request failed: change nothing.".to_owned(),
            )],
            Capacity::Given(limit) => {
                let recorded = self.job.recording.peak_reserved_bytes;
                let peak = self.own.map(|own| own.peak_reserved_bytes).or(recorded);
                // With less than that it fits as well, because it releases what it caches.
                let smallest = self.own.and_then(|own| own.smallest_limit_bytes);
                let needs = peak.filter(|&it| it <= limit.bytes).or(smallest);
                needs.map(|needs| nothing(limit, needs)).into_iter().collect()
            }
            Capacity::Had(_) | Capacity::Between(..) => Vec::new(),
        }
    }

    /// Returns the limit to raise: that of the process where the card has more, or one that was given.
    fn limit(&self) -> Option<Remedy> {
        let to = self.needs_with_headroom();
        match self.capacity {
            Capacity::Given(limit) if limit.card.is_none() && limit.bytes < to => {
                let text = format!(
                    "Raise the limit from {limit} to {}. {}",
                    size(to),
                    self.needs_in_words()
                );
                Some(self.replayed(Remedy::new(RemedyKind::Limit, text), to))
            }
            Capacity::Between(_, failed) => {
                let card = self.failure()?.usable()?;
                let to = if to <= card { to } else { self.needs() };
                // A limit of `failed` bytes would have had room for the request that failed.
                let to = to.max(failed);
                if to > card {
                    return None;
                }
                let text = format!(
                    "Raise the limit of the process to {}: the card has {}. {}",
                    size(to),
                    size(card),
                    self.needs_in_words()
                );
                // The driver calls more than that the card's memory, so the limit is at least `to`.
                let thousandths = (u128::from(to) * 1000).div_ceil(u128::from(card.max(1)));
                let fraction = thousandths as f64 / 1000.0;
                let code = format!("torch.cuda.set_per_process_memory_fraction({fraction})");
                Some(self.replayed(Remedy::new(RemedyKind::Limit, text).code(code), to))
            }
            _ => None,
        }
    }

    fn replayed(&self, remedy: Remedy, bytes: u64) -> Remedy {
        match self.own.and_then(|own| own.smallest_limit_bytes) {
            Some(_) => remedy.fits(bytes),
            None => remedy,
        }
    }

    /// Returns the memory that the job can use; `None` if it is not known.
    fn has(&self) -> Option<u64> {
        match self.capacity {
            Capacity::Given(limit) => Some(limit.bytes),
            Capacity::Had(bytes) => Some(bytes),
            // The limit is at least what was reserved; what needs more may fit or not.
            Capacity::Between(least, _) => Some(least),
            Capacity::Unknown => None,
        }
    }

    /// Returns what is too little for the job as it is, and what that is in words: what it failed with, or
    /// what it needs by replay.
    fn too_little(&self) -> (u64, &'static str) {
        let failed_with = match self.capacity {
            Capacity::Had(bytes) | Capacity::Between(bytes, _) => bytes,
            Capacity::Given(_) | Capacity::Unknown => 0,
        };
        match self.needs() {
            needs if needs < failed_with => (failed_with, "that it failed with"),
            needs => (needs, "that it needs as it is"),
        }
    }

    /// Returns the other allocators that need less than the recorded one and fit.
    fn allocators(&self) -> Vec<Remedy> {
        let (needs, what_it_is) = self.too_little();
        let most = self.has().unwrap_or(u64::MAX);
        let fits = self.job.fits.iter().filter_map(|fit| {
            let smallest = fit.smallest_limit_bytes.filter(|&limit| limit <= most)?;
            is_saving(smallest, needs).then_some((fit, smallest, fit.line.as_ref()?))
        });
        // A job that grows fails a few steps later.
        let what = match self.cause {
            Cause::Growth => "fits what was recorded",
            _ => "fits",
        };
        let pools = if has_private_holes(self.job) { ", without the private pools" } else { "" };
        fits.map(|(fit, smallest, line)| {
            let is_tight = smallest > most - most / 100 * HEADROOM_PERCENT;
            let tight = if is_tight { " Tight: a slightly different run may fail." } else { "" };
            let text = format!(
                "{} {what} from {} on{pools}: {} less than the {} {what_it_is}.{tight}",
                name(fit),
                size(smallest),
                percent_less(smallest, needs),
                size(needs)
            );
            Remedy::new(kind(&fit.allocator), text).code(line).fits(smallest)
        })
        .collect()
    }

    /// Returns the allocators that reserve less, for a job that fits already.
    fn savings(&self) -> Vec<Remedy> {
        let recorded = self.job.recording.peak_reserved_bytes;
        let (Some(own), Some(recorded), true) =
            (self.own, recorded, self.job.recording.is_comparable)
        else {
            return Vec::new();
        };
        // The replay releases what it caches before it fails, the recorded allocator did not have to.
        let needs = own.peak_reserved_bytes.min(recorded);
        let fits = self.job.fits.iter().filter_map(|fit| Some((fit, fit.line.as_ref()?)));
        // The model of the driver's pool reserves less than a real one does.
        fits.filter(|(fit, _)| {
            fit.smallest_limit_bytes.is_some()
                && is_saving(fit.peak_reserved_bytes, needs)
                && !fit.is_ideal()
        })
        .map(|(fit, line)| {
            let reserved = fit.peak_reserved_bytes;
            let text = format!(
                "{} reserves {} instead of {} ({} less), if memory is wanted for more.",
                name(fit),
                size(reserved),
                size(recorded),
                percent_less(reserved, recorded)
            );
            let remedy = Remedy::new(kind(&fit.allocator), text).code(line);
            // Without a limit it reserves no more than that.
            remedy.fits(fit.roomy_limit_bytes.unwrap_or(reserved).max(reserved))
        })
        .collect()
    }

    /// Returns the line of the program that asked for what failed, and how much less it may be.
    fn program(&self) -> Option<Remedy> {
        if !self.job.recording.has_stacks {
            return None;
        }
        if let (Cause::Growth, Some(growth)) = (self.cause, &self.job.growth) {
            let site = &growth.sites[0];
            let text = format!(
                "Free what {} keeps: {} more with every step. Whatever else is done, the job fails \
                 later.",
                site.site,
                size(site.bytes_per_step)
            );
            return Some(Remedy::new(RemedyKind::Program, text));
        }
        let moment = self.failure().map_or(&self.job.peak, |failure| &failure.moment);
        let largest = moment.sites.first();
        let holds = largest.map_or_else(String::new, |site| {
            format!(
                " {} holds most: {} of {}.",
                site.site,
                size(site.bytes),
                size(moment.live_bytes)
            )
        });
        let more = self.has().and_then(|has| self.needs().checked_sub(has));
        let less = match more.filter(|&more| more > 0) {
            Some(less) => format!("{} less at that moment is enough", size(less)),
            None => "allocate less at that moment".to_owned(),
        };
        let text = match self.failure() {
            Some(failure) => {
                let Failure { site, operation, size_bytes, .. } = failure;
                let request = requested_in_words(site, operation, *size_bytes);
                format!("Change {request}: {less}.{holds}")
            }
            None => format!("Change the program: {less}.{holds}"),
        };
        let remedy = Remedy::new(RemedyKind::Program, text);
        Some(if more.is_some() { self.replayed(remedy, self.needs()) } else { remedy })
    }

    /// Returns the card to use instead, where the memory of the card is the bound.
    fn card(&self) -> Option<Remedy> {
        let has = match self.capacity {
            Capacity::Between(..) => {
                let usable = self.failure()?.usable()?;
                // Another card is of use only if the job needs more than all of this one.
                if usable >= self.needs() {
                    return None;
                }
                Some(usable)
            }
            _ => self.has(),
        };
        let to = self.needs_with_headroom();
        let found = card(to, has, &self.needs_in_words());
        Some(match self.own {
            Some(_) => found,
            None => Remedy { fits_bytes: None, ..found },
        })
    }
}

/// Says which line requested what failed: `workloads.py:32 f, which requested 1.94 GiB (in cross_entropy)`.
pub(crate) fn requested_in_words(site: &str, operation: &str, bytes: u64) -> String {
    let size = size(bytes);
    match (site, operation) {
        (NO_STACK, _) => format!("what requested {size}, of which no call stack is recorded"),
        (site, operation) if operation == site || operation == NO_STACK => {
            format!("{site}, which requested {size}")
        }
        (site, operation) => format!("{site}, which requested {size} (in {operation})"),
    }
}

pub(crate) fn kind(allocator: &str) -> RemedyKind {
    match allocator == Preset::Vramp.name() {
        true => RemedyKind::Vramp,
        false => RemedyKind::Setting,
    }
}

/// Returns the allocator's name, with what its replay leaves out.
fn name(fit: &Fit) -> String {
    match fit.is_ideal() {
        true => format!("{} (modelled without fragmentation)", fit.allocator),
        false => fit.allocator.clone(),
    }
}
