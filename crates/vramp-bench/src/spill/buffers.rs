//! What a lease that spills one small buffer costs the host, by the number of other buffers.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde::Serialize;
use vramp::Bytes;
use vramp::defer::Access;

use super::rig::{Rig, RigConfig};
use crate::Bench;

/// Length of each.
const LEN: Bytes = Bytes::mib(2);
/// Most of them that are on the card, and at most half of it. The others have no contents.
const RESIDENT: u64 = 32_768;
/// Number of leases that spill.
const LEASES: u64 = 64;

/// The time of leases that spill one buffer of 2 MiB.
#[derive(Clone, Debug, Serialize)]
pub struct BuffersRow {
    /// `buffers`.
    pub measure: &'static str,
    /// Number of buffers.
    pub buffers: u64,
    /// Number of those on the card.
    pub resident: u64,
    /// Median time of a lease on the host's clock, copies and driver calls included.
    pub lease_ns: u64,
    /// Table entries that the planner looked at for a lease, in the mean.
    pub looked_at: f64,
}

pub(super) fn measure(bench: &Bench, counts: &[u32]) -> Result<Vec<BuffersRow>> {
    counts.iter().map(|&count| of_count(bench, count.into())).collect()
}

fn of_count(bench: &Bench, count: u64) -> Result<BuffersRow> {
    let half = bench.info().limits.memory.whole(LEN) / 2;
    let resident = count.min(RESIDENT).min(half);
    let limit = Some(LEN * resident);
    let config = RigConfig { piece: Bytes::mib(4), limit, pinned: LEN * (LEASES * 2 + 64) };
    let rig = Rig::new(bench, &config)?;
    let buffers = (0..count).map(|_| rig.manager.buffer(LEN)).collect::<Result<Vec<_>, _>>()?;
    for buffer in &buffers[..resident as usize] {
        drop(buffer.lease(Access::Exclusive, rig.stream)?);
    }
    rig.synchronize()?;
    let more = (0..LEASES).map(|_| rig.manager.buffer(LEN)).collect::<Result<Vec<_>, _>>()?;
    let before = rig.manager.counters();
    let mut times = Vec::new();
    for buffer in &more {
        let begun = Instant::now();
        drop(buffer.lease(Access::Exclusive, rig.stream)?);
        times.push(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
        rig.synchronize()?;
    }
    let after = rig.manager.counters();
    ensure!(after.victims - before.victims == LEASES, "each lease spills one buffer");
    times.sort_unstable();
    let looked_at = (after.looked_at - before.looked_at) as f64 / LEASES as f64;
    let lease_ns = times[times.len() / 2];
    Ok(BuffersRow { measure: "buffers", buffers: count, resident, lease_ns, looked_at })
}
