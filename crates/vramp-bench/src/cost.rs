//! Driver calls and times of a piece of work.

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::TimeSource;
use crate::statistics::nanos;
use crate::subject::MeteredAllocator;

/// Driver calls, the time in them, and the time until the work was done.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cost {
    /// Driver calls.
    pub driver_calls: u64,
    /// Time in driver calls.
    pub driver_ns: u64,
    /// Source of `driver_ns`.
    pub driver_ns_is: TimeSource,
    /// Host time of the whole work. With a simulator, its own run time is part of it.
    pub host_ns: u64,
}

impl Cost {
    /// Returns the median times of several runs of the same work, and the calls of the last run;
    /// `None` for no runs.
    pub(crate) fn median(costs: &[Cost]) -> Option<Cost> {
        let middle = |of: fn(&Cost) -> u64| {
            let mut values: Vec<u64> = costs.iter().map(of).collect();
            values.sort_unstable();
            values.get(values.len() / 2).copied()
        };
        Some(Cost {
            driver_ns: middle(|cost| cost.driver_ns)?,
            host_ns: middle(|cost| cost.host_ns)?,
            ..*costs.last()?
        })
    }
}

impl MeteredAllocator {
    /// Does `work` and returns its cost.
    pub(crate) fn cost_of(&self, work: impl FnOnce() -> Result<()>) -> Result<Cost> {
        let before = self.meter.snapshot().total();
        let begun = Instant::now();
        work()?;
        let host_ns = nanos(begun.elapsed());
        let after = self.meter.snapshot().total();
        Ok(Cost {
            driver_calls: after.calls - before.calls,
            driver_ns: after.total_ns - before.total_ns,
            driver_ns_is: TimeSource::of(self.allocator.driver().info()),
            host_ns,
        })
    }
}
