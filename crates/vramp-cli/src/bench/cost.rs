//! What a piece of work cost in driver calls and time.

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;
use vramp_alloc::Bytes;

use super::nanos;
use super::subject::Managed;

/// Driver calls, the time they took, and the time until all was done.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Cost {
    pub driver_calls: u64,
    pub driver_ns: u64,
    /// `measured` on a card, `modelled` on the simulator.
    pub driver_ns_is: &'static str,
    /// By the clock of the host; on the simulator this is the simulator's own time.
    pub host_ns: u64,
}

impl Cost {
    /// The medians of several runs of the same work; the calls are the last run's.
    pub(super) fn median(costs: &[Cost]) -> Option<Cost> {
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

    pub(super) fn driver_millis(&self) -> String {
        let modelled = if self.driver_ns_is == "modelled" { " (modelled)" } else { "" };
        format!("{:.3}{modelled}", self.driver_ns as f64 / 1e6)
    }

    pub(super) fn driver_millis_per_gib(&self, bytes: u64) -> String {
        let gib = bytes as f64 / Bytes::gib(1).count() as f64;
        format!("{:.3}", self.driver_ns as f64 / 1e6 / gib)
    }

    pub(super) fn host_millis(&self) -> String {
        format!("{:.3}", self.host_ns as f64 / 1e6)
    }
}

impl Managed {
    /// What `work` costs.
    pub(super) fn cost_of(&self, work: impl FnOnce() -> Result<()>) -> Result<Cost> {
        let before = self.meter.snapshot().total();
        let begun = Instant::now();
        work()?;
        let host_ns = nanos(begun.elapsed());
        let after = self.meter.snapshot().total();
        let simulated = self.allocator.driver().info().simulated;
        Ok(Cost {
            driver_calls: after.calls - before.calls,
            driver_ns: after.total_ns - before.total_ns,
            driver_ns_is: if simulated { "modelled" } else { "measured" },
            host_ns,
        })
    }
}
