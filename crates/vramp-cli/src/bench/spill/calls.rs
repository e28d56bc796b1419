//! What a spill and a retrieve call the driver for.

use anyhow::Result;
use serde::Serialize;
use vramp_alloc::Bytes;
use vramp_alloc::device::Call;
use vramp_defer::Access;
use vramp_driver::MeterSnapshot;

use super::site::{Plan, Site};
use super::{millis, size, time_is};
use crate::bench::{Bench, Cell, Column};
use crate::count::Count;

/// Calls that wait for more than the buffer: listed also where there were none.
const WAITS: [Call; 2] = [Call::SynchronizeStream, Call::FreeMemory];

/// One kind of call in one phase.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    measure: &'static str,
    /// `spill`, `retrieve`, or `clean spill` of what has a copy; `pressed` where a malloc had the memory
    /// meanwhile, and `pressed again` where it had had it before at the same place.
    phase: &'static str,
    size_bytes: u64,
    call: &'static str,
    calls: u64,
    total_ns: u64,
    max_ns: u64,
    time_is: &'static str,
}

pub(super) fn measure(bench: &Bench, piece: Bytes, len: Bytes) -> Result<Vec<Row>> {
    let site = Site::new(bench, &Plan { piece, limit: None, host: len * 2 })?;
    let buffer = site.manager.buffer(len)?;
    // Once for what is made only the first time.
    for _ in 0..2 {
        site.write(&buffer)?;
        site.spill(&buffer)?;
    }
    site.write(&buffer)?;
    let mut rows = Vec::new();
    let mut phase = |name, work: &dyn Fn() -> Result<()>| {
        // Each call is its phase's own: the meter counts the longest from the start.
        site.reset_calls();
        work()?;
        rows.extend(rows_of(name, len, &site.calls(), time_is(&bench.info)));
        site.finish()
    };
    phase("spill", &|| site.spill(&buffer).map(drop))?;
    let retrieve = || {
        buffer.lease(Access::Shared, site.stream)?.end();
        Ok(())
    };
    phase("retrieve", &retrieve)?;
    phase("clean spill", &|| site.spill(&buffer).map(drop))?;
    // The same where a malloc takes the memory, and its pieces are mapped there and back.
    site.write(&buffer)?;
    phase("pressed spill", &|| site.press(&buffer).map(drop))?;
    phase("pressed retrieve", &retrieve)?;
    site.write(&buffer)?;
    phase("pressed again", &|| site.press(&buffer).map(drop))?;
    drop(buffer);
    site.close()?;
    Ok(rows)
}

fn rows_of(
    phase: &'static str,
    len: Bytes,
    calls: &MeterSnapshot,
    time_is: &'static str,
) -> Vec<Row> {
    let row = |call: Call| {
        let stats = calls.of(call);
        (stats.calls > 0 || WAITS.contains(&call)).then(|| Row {
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

pub(super) const COLUMNS: [Column<Row>; 6] = [
    ("phase", |row| Cell::Words(row.phase.to_owned())),
    ("buffer", |row| size(row.size_bytes)),
    ("call", |row| Cell::Words(row.call.to_owned())),
    ("calls", |row| Cell::Number(Count(row.calls).to_string())),
    ("all ms", |row| millis(row.total_ns as f64, row.time_is)),
    ("longest ms", |row| millis(row.max_ns as f64, row.time_is)),
];
