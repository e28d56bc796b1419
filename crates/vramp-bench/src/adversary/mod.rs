//! Patterns of requests that allocators handle badly, and what each costs each allocator.
//!
//! 1. [`patterns()`] returns the patterns. Each is a program of requests with a seed, so that every
//!    allocator gets the same requests, on every machine.
//! 2. [`run`] runs a pattern on an allocator with a device of its own and returns a [`Row`].
//! 3. [`best_in`] and [`misses`] compare the rows of one pattern.
//! 4. [`Bounds`] holds the default allocator's counts to a file of upper bounds.
//!
//! On the simulator all figures but the host time are exact: streams have virtual time, the program
//! spends 500 ns a request, and the work that it queues ends a fixed time after it was queued, so
//! that memory is often freed while work still uses it. The work accesses its blocks, so unmapping
//! one too early fails the run.
//!
//! Host time is that of the allocator's functions without the driver calls in them, so a simulator's
//! own cost is not part of it. It is a clock's, and CI does not check it.
//!
//! Deliberately absent: threads, except in the patterns named `threads`; captures of graphs, which
//! [`graphs`](crate::graphs) measures; contents of memory.

mod bounds;
mod compare;
mod draw;
mod patterns;
mod rig;

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use vramp::Bytes;
use vramp::peers::Preset;

use crate::Device;
use rig::{Counts, Rig};

pub use bounds::Bounds;
pub use compare::{Figure, Miss, best_in, misses};
pub use patterns::patterns;

/// A program of requests.
pub struct Pattern {
    /// Name, with its parameters after slashes.
    pub name: String,
    /// What the program does.
    pub about: &'static str,
    /// True if it takes minutes or much host memory.
    pub large: bool,
    /// True if it has threads, so that only the number of failed requests repeats.
    pub threads: bool,
    /// Promises about the default allocator beside those that hold for every pattern.
    pub goals: Vec<Goal>,
    /// Why the default allocator does not keep a promise, where that is known.
    pub reason: Option<&'static str>,
    /// Memory of the card; on a real card, the limit.
    card: Option<Bytes>,
    limit: Option<Bytes>,
    program: Box<Program>,
}

type Program = dyn Fn(&mut Rig) -> Result<()> + Send + Sync;

/// A promise about the default allocator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// No driver call after the warm-up.
    NoDriverCalls,
    /// No failed request.
    NoFailure,
    /// At most so many table entries looked at for each malloc or free after the warm-up.
    LooksAt(f64),
    /// At most this ratio of reserved to live memory.
    Ratio(f64),
    /// No more reserved memory than this allocator.
    ReservedAsLittleAs(Preset),
    /// No more failed requests than this allocator, and so many more.
    FailsAsRarelyAs(Preset, u64),
}

/// What one pattern costs one allocator.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The pattern's name.
    pub pattern: String,
    /// The allocator's name.
    pub allocator: &'static str,
    /// Seed of the pattern's choices.
    pub seed: u64,
    /// Requests for memory.
    pub mallocs: u64,
    /// Requests that failed for want of memory.
    pub failed: u64,
    /// Mallocs after the warm-up.
    pub pairs: u64,
    /// Peak of the requested bytes of all live blocks.
    pub peak_live_bytes: u64,
    /// Peak of the reserved bytes.
    pub peak_reserved_bytes: u64,
    /// `peak_reserved_bytes` over `peak_live_bytes`.
    pub reserved_over_live: f64,
    /// Driver calls.
    pub driver_calls: u64,
    /// Driver calls after the warm-up.
    pub driver_calls_warm: u64,
    /// Time in driver calls, modelled on the simulator.
    pub driver_ns: u64,
    /// Time in driver calls after the warm-up.
    pub driver_ns_warm: u64,
    /// Waits of one stream for another after the warm-up.
    pub waits_warm: u64,
    /// Events recorded after the warm-up.
    pub records_warm: u64,
    /// Events queried after the warm-up.
    pub queries_warm: u64,
    /// Waits of the host for the device.
    pub synchronizations: u64,
    /// Entries of its tables that the allocator looked at for each malloc or free after the warm-up;
    /// zero for allocators that do not count them.
    pub request_looked_at: f64,
    /// Host time in the allocator for each malloc or free after the warm-up, without driver calls.
    pub request_host_ns: f64,
    /// Driver calls by kind.
    pub calls: BTreeMap<&'static str, u64>,
}

impl Pattern {
    fn new(
        name: impl Into<String>,
        about: &'static str,
        program: impl Fn(&mut Rig) -> Result<()> + Send + Sync + 'static,
    ) -> Pattern {
        let program = Box::new(program);
        let name = name.into();
        Pattern {
            name,
            about,
            large: false,
            threads: false,
            goals: Vec::new(),
            reason: None,
            card: None,
            limit: None,
            program,
        }
    }

    fn threads(mut self) -> Pattern {
        self.threads = true;
        self
    }

    fn large(mut self) -> Pattern {
        self.large = true;
        self
    }

    fn card(mut self, memory: Bytes) -> Pattern {
        self.card = Some(memory);
        self
    }

    fn limit(mut self, limit: Bytes) -> Pattern {
        self.limit = Some(limit);
        self
    }

    fn goal(mut self, goal: Goal) -> Pattern {
        self.goals.push(goal);
        self
    }

    /// Returns true if `wanted` is its name or the first parts of it.
    pub fn is_named(&self, wanted: &str) -> bool {
        let rest = self.name.strip_prefix(wanted);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || wanted.ends_with('/'))
    }
}

/// Returns the patterns with these names, or with names that begin with them; for no names the quick
/// ones, with `large` all.
///
/// # Errors
/// A name matches no pattern.
pub fn select(names: &[String], large: bool) -> Result<Vec<Pattern>> {
    let all = patterns();
    for name in names {
        if !all.iter().any(|pattern| pattern.is_named(name)) {
            bail!("there is no pattern '{name}': --list prints all");
        }
    }
    let wanted = |pattern: &Pattern| match names {
        [] => large || !pattern.large,
        names => {
            let exact = names.contains(&pattern.name);
            exact || (large || !pattern.large) && names.iter().any(|name| pattern.is_named(name))
        }
    };
    Ok(all.into_iter().filter(wanted).collect())
}

/// Runs a pattern on an allocator.
///
/// # Errors
/// A call fails for another reason than lack of memory.
pub fn run(device: &Device, pattern: &Pattern, preset: Preset, seed: u64) -> Result<Row> {
    let fresh = match pattern.card {
        Some(memory) => device.with_memory(memory)?,
        None => device.fresh(false)?,
    };
    let counts = Rig::new(fresh, preset, pattern, seed).and_then(|mut rig| {
        (pattern.program)(&mut rig)?;
        rig.finish()
    });
    let counts = counts.with_context(|| format!("{} on {}", pattern.name, preset.name()))?;
    Ok(row(pattern, preset, seed, &counts))
}

fn row(pattern: &Pattern, preset: Preset, seed: u64, counts: &Counts) -> Row {
    use vramp_driver::Call;
    let Counts { totals, warm, calls, reserved_peak, .. } = counts;
    let requests = (totals.mallocs + totals.frees) - (warm.mallocs + warm.frees);
    let host_ns =
        (totals.host_ns - warm.host_ns).saturating_sub(totals.in_driver_ns - warm.in_driver_ns);
    let ((driver_calls, driver_ns), (driver_calls_warm, driver_ns_warm)) =
        (counts.total(), counts.total_after_warm_up());
    let looked_at = (totals.looked_at - warm.looked_at) as f64 / requests.max(1) as f64;
    Row {
        pattern: pattern.name.clone(),
        allocator: preset.name(),
        seed,
        mallocs: totals.mallocs,
        failed: totals.failed,
        pairs: totals.mallocs - warm.mallocs,
        peak_live_bytes: totals.live_peak,
        peak_reserved_bytes: *reserved_peak,
        reserved_over_live: *reserved_peak as f64 / totals.live_peak.max(1) as f64,
        driver_calls,
        driver_calls_warm,
        driver_ns,
        driver_ns_warm,
        waits_warm: counts.after_warm_up(Call::Wait),
        records_warm: counts.after_warm_up(Call::Record),
        queries_warm: counts.after_warm_up(Call::Query),
        synchronizations: [Call::SynchronizeStream, Call::SynchronizeEvent]
            .map(|call| calls.of(call).calls)
            .iter()
            .sum(),
        request_looked_at: (looked_at * 1e3).round() / 1e3,
        request_host_ns: host_ns as f64 / requests.max(1) as f64,
        calls: calls.iter().map(|(call, stats)| (call.name(), stats.calls)).collect(),
    }
}
