//! Driver calls of a spill and of a restore.

use anyhow::Result;
use serde::Serialize;
use vramp::Bytes;
use vramp::defer::Access;
use vramp::device::Call;
use vramp_driver::meter::MeterSnapshot;

use super::rig::{Rig, RigConfig};
use crate::{Bench, TimeSource};

/// Calls that wait for other work than the buffer's. They have a row even with a count of zero.
const BLOCKING_CALLS: [Call; 2] = [Call::SynchronizeStream, Call::FreeMemory];

/// One kind of driver call in one phase.
#[derive(Clone, Debug, Serialize)]
pub struct CallRow {
    /// `calls`.
    pub measure: &'static str,
    /// `spill`, `retrieve`, or `clean spill` of a buffer whose host copy is current. `pressed` if a
    /// malloc evicts the buffer, and `pressed again` if a malloc did so before at the same address.
    pub phase: &'static str,
    /// Length of the buffer.
    pub size_bytes: u64,
    /// The driver call.
    pub call: &'static str,
    /// Number of calls.
    pub calls: u64,
    /// Time of all calls.
    pub total_ns: u64,
    /// Time of the longest call.
    pub max_ns: u64,
    /// Source of the times.
    pub time_is: TimeSource,
}

pub(super) fn measure(bench: &Bench, piece: Bytes, len: Bytes) -> Result<Vec<CallRow>> {
    let rig = Rig::new(bench, &RigConfig { piece, limit: None, pinned: len * 2 })?;
    let buffer = rig.manager.buffer(len)?;
    // The first rounds create what later ones reuse.
    for _ in 0..2 {
        rig.write(&buffer)?;
        rig.spill(&buffer)?;
    }
    rig.write(&buffer)?;
    let mut rows = Vec::new();
    let mut phase = |name, work: &dyn Fn() -> Result<()>| {
        // The meter's longest call is that since its reset.
        rig.reset_calls();
        work()?;
        rows.extend(rows_of(name, len, &rig.calls(), bench.time_source()));
        rig.synchronize()
    };
    phase("spill", &|| rig.spill(&buffer).map(drop))?;
    let restore = || {
        buffer.lease(Access::Shared, rig.stream)?.end();
        Ok(())
    };
    phase("retrieve", &restore)?;
    phase("clean spill", &|| rig.spill(&buffer).map(drop))?;
    // The same if a malloc evicts the buffer, so that its pieces are mapped there and back.
    rig.write(&buffer)?;
    phase("pressed spill", &|| rig.evict_by_malloc(&buffer).map(drop))?;
    phase("pressed retrieve", &restore)?;
    rig.write(&buffer)?;
    phase("pressed again", &|| rig.evict_by_malloc(&buffer).map(drop))?;
    drop(buffer);
    rig.close()?;
    Ok(rows)
}

fn rows_of(
    phase: &'static str,
    len: Bytes,
    calls: &MeterSnapshot,
    time_is: TimeSource,
) -> Vec<CallRow> {
    let row = |call: Call| {
        let stats = calls.of(call);
        (stats.calls > 0 || BLOCKING_CALLS.contains(&call)).then(|| CallRow {
            measure: "calls",
            phase,
            size_bytes: len.count(),
            call: call.name(),
            calls: stats.calls,
            total_ns: stats.total_ns,
            max_ns: stats.max_ns,
            time_is,
        })
    };
    Call::ALL.into_iter().filter_map(row).collect()
}
