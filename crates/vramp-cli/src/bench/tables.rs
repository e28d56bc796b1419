//! The tables of `vramp bench`, one for each kind of row.

use std::io::Write;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use vramp::Bytes;
use vramp_bench::graphs::{LendingRow, ReplayRow, RequestRow, SharingRow};
use vramp_bench::spill::{
    BuffersRow, CallRow, OverlapRow, OvershootRow, PeerRow, RateRow, WaitingRow, WorkloadRow,
};
use vramp_bench::threads::SizeDistribution;
use vramp_bench::{Cost, TimeSource, copy, disk, grow, hit, kv, remap, reserve, threads};

use vramp_analysis::number::Count;

/// A column: its heading, and its cell of a row.
pub(super) type Column<R> = (&'static str, fn(&R) -> Cell);

/// One cell of a table.
pub(super) enum Cell {
    /// Aligned left.
    Text(String),
    /// Aligned right.
    Number(String),
}

/// Writes a table and an empty line.
pub(super) fn write<R>(out: &mut dyn Write, rows: &[R], columns: &[Column<R>]) -> Result<()> {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(columns.iter().map(|(heading, _)| *heading));
    for row in rows {
        table.add_row(columns.iter().map(|(_, cell)| match cell(row) {
            Cell::Text(text) => comfy_table::Cell::new(text),
            Cell::Number(text) => comfy_table::Cell::new(text).set_alignment(CellAlignment::Right),
        }));
    }
    Ok(writeln!(out, "{}\n", table.trim_fmt())?)
}

pub(super) const HIT: [Column<hit::Row>; 7] = [
    ("allocator", |row| text(row.allocator)),
    ("block", |row| size(row.size_bytes)),
    ("outstanding", |row| count(row.outstanding)),
    ("ns/pair", |row| modelled(format!("{:.1}", row.pair_ns), row.time_is)),
    ("vs system malloc", |row| decimals(row.of_system_malloc, 2)),
    ("pairs", |row| count(row.pairs)),
    ("driver calls", |row| calls_of_pairs(row.driver_calls)),
];

pub(super) const THREADS: [Column<threads::Row>; 6] = [
    ("allocator", |row| text(row.allocator)),
    ("sizes", |row| {
        text(match row.sizes {
            SizeDistribution::Uniform => "uniform",
            SizeDistribution::LogUniform => "log-uniform",
        })
    }),
    ("threads", |row| count(row.threads)),
    ("million pairs/s", |row| decimals(row.pairs_per_s / 1e6, 3)),
    ("vs one thread", |row| row.of_one_thread.map_or_else(nothing, |ratio| decimals(ratio, 2))),
    ("driver calls", |row| calls_of_pairs(row.driver_calls)),
];

pub(super) const GROW: [Column<grow::Row>; 8] = [
    ("allocator", |row| text(row.allocator)),
    ("allocated", |row| size(row.total_bytes)),
    ("block", |row| size(row.block_bytes)),
    ("reserved", |row| size(row.reserved_bytes)),
    ("driver calls", |row| count(row.cost.driver_calls)),
    ("driver ms", |row| driver_ms(&row.cost)),
    ("driver ms/GiB", |row| driver_ms_per_gib(&row.cost, row.total_bytes)),
    ("host ms", |row| host_ms(&row.cost)),
];

pub(super) const REMAP: [Column<remap::Row>; 9] = [
    ("allocator", |row| text(row.allocator)),
    ("request", |row| size(row.made_bytes)),
    ("freed blocks", |row| size(row.block_bytes)),
    ("chunks moved", |row| count(row.chunks_moved)),
    ("growth", |row| size(row.grown_bytes)),
    ("driver calls", |row| count(row.cost.driver_calls)),
    ("driver ms", |row| driver_ms(&row.cost)),
    ("driver ms/GiB", |row| driver_ms_per_gib(&row.cost, row.made_bytes)),
    ("host ms", |row| host_ms(&row.cost)),
];

pub(super) const KV: [Column<kv::Row>; 7] = [
    ("step", |row| text(row.what)),
    ("tensors", |row| Cell::Text(format!("{} {}", row.tensors, row.arrangement))),
    ("pages", |row| count(row.pages.into())),
    ("driver calls", |row| count(row.cost.driver_calls)),
    ("driver us", |row| {
        modelled(format!("{:.1}", row.cost.driver_ns as f64 / 1e3), row.cost.driver_ns_is)
    }),
    ("host us", |row| decimals(row.cost.host_ns as f64 / 1e3, 1)),
    ("p99 us", |row| decimals(row.p99_ns as f64 / 1e3, 1)),
];

pub(super) const KV_BESIDE: [Column<kv::BesideRow>; 4] = [
    ("64 fills beside", |row| text(row.beside)),
    ("ms", |row| millis(row.series_ns, row.time_is)),
    ("over alone", |row| decimals(row.over_alone, 4)),
    ("pages released", |row| count(row.released)),
];

pub(super) const SHARING: [Column<SharingRow>; 6] = [
    ("graphs", |row| count(row.graphs)),
    ("separate arenas", |row| size(row.sum_bytes)),
    ("largest graph", |row| size(row.largest_bytes)),
    ("shared arena", |row| size(row.backed_bytes)),
    ("shared/largest", |row| decimals(row.backed_over_largest, 3)),
    ("us/capture", |row| decimals(row.capture_us, 1)),
];

pub(super) const REPLAYS: [Column<ReplayRow>; 4] = [
    ("replays", |row| count(row.replays)),
    ("compared", |row| size(row.compared_bytes)),
    ("differing bytes", |row| count(row.differing_bytes)),
    ("unordered accesses", |row| row.hazards.map_or_else(nothing, count)),
];

pub(super) const LENDING: [Column<LendingRow>; 10] = [
    ("phase", |row| text(row.phase)),
    ("blocks", |row| text(row.borrower)),
    ("arena", |row| size(row.arena_bytes)),
    ("borrowed", |row| size(row.borrowed_bytes)),
    ("creates", |row| count(row.creates)),
    ("maps", |row| count(row.maps)),
    ("unmaps", |row| count(row.unmaps)),
    ("driver ms", |row| driver_ms(&row.cost)),
    ("driver ms/GiB", |row| decimals(row.driver_ms_per_gib, 3)),
    ("host ms/GiB", |row| decimals(row.host_ms_per_gib, 3)),
];

pub(super) const REQUESTS: [Column<RequestRow>; 4] = [
    ("request", |row| text(row.what)),
    ("host ns", |row| decimals(row.each_host_ns, 0)),
    ("driver ns", |row| modelled(format!("{:.0}", row.each_driver_ns), row.driver_ns_is)),
    ("driver calls", |row| decimals(row.driver_calls_each, 2)),
];

pub(super) const DISK: [Column<disk::Row>; 10] = [
    ("method", |row| {
        let with = if row.compressed { ", compressing" } else { "" };
        Cell::Text(format!("{}{with}", row.what))
    }),
    ("engine", |row| text(row.engine)),
    ("direction", |row| text(row.direction)),
    ("page cache", |row| text(if row.direct { "bypassed" } else { "used" })),
    ("rounds", |row| count(row.rounds)),
    ("MB/s", |row| decimals(row.bytes_per_s / 1e6, 0)),
    ("data", |row| text(row.data)),
    ("on disk/data", |row| decimals(row.on_disk, 3)),
    ("vs uncompressed", |row| decimals(row.of_store, 3)),
    ("vs direct", |row| decimals(row.of_direct, 3)),
];

pub(super) const COPY: [Column<copy::Row>; 7] = [
    ("direction", |row| {
        text(match row.direction {
            copy::Direction::ToHost => "to host",
            copy::Direction::ToDevice => "to device",
            copy::Direction::Both => "both",
        })
    }),
    ("size", |row| size(row.size_bytes)),
    ("plain GB/s", |row| gigabytes(row.plain_bytes_per_s, row.time_is)),
    ("mover GB/s", |row| gigabytes(row.mover_bytes_per_s, row.time_is)),
    ("mover/plain", |row| decimals(row.of_plain, 3)),
    ("moves", |row| count(row.moves)),
    ("driver calls", |row| count(row.driver_calls_each)),
];

pub(super) const SPILL_RATES: [Column<RateRow>; 11] = [
    ("evicted", |row| {
        text(match row.spill {
            "pressed" => "by malloc",
            "again" => "by malloc, mapped",
            _ => "on request",
        })
    }),
    ("buffer", |row| size(row.size_bytes)),
    ("plain to host GB/s", |row| gigabytes(row.plain_to_host_bytes_per_s, row.time_is)),
    ("spill GB/s", |row| gigabytes(row.spill_bytes_per_s, row.time_is)),
    ("spill/plain", |row| decimals(row.spill_of_plain, 3)),
    ("plain to device GB/s", |row| gigabytes(row.plain_to_device_bytes_per_s, row.time_is)),
    ("restore GB/s", |row| gigabytes(row.retrieve_bytes_per_s, row.time_is)),
    ("restore/plain", |row| decimals(row.retrieve_of_plain, 3)),
    ("clean spill ms", |row| millis(row.clean_spill_ns, row.time_is)),
    ("clean copied", |row| size(row.clean_copied_bytes)),
    ("rounds", |row| count(row.rounds)),
];

pub(super) const SPILL_PEER: [Column<PeerRow>; 10] = [
    ("to card", |row| count(u64::from(row.peer))),
    ("buffer", |row| size(row.size_bytes)),
    ("memory", |row| text(if row.ahead { "taken ahead" } else { "taken by the spill" })),
    ("plain out GB/s", |row| gigabytes(row.plain_to_peer_bytes_per_s, row.time_is)),
    ("spill GB/s", |row| gigabytes(row.spill_bytes_per_s, row.time_is)),
    ("spill/plain", |row| decimals(row.spill_of_plain, 3)),
    ("plain back GB/s", |row| gigabytes(row.plain_from_peer_bytes_per_s, row.time_is)),
    ("restore GB/s", |row| gigabytes(row.restore_bytes_per_s, row.time_is)),
    ("restore/plain", |row| decimals(row.restore_of_plain, 3)),
    ("rounds", |row| count(row.rounds)),
];

pub(super) const SPILL_OVERLAP: [Column<OverlapRow>; 8] = [
    ("work", |row| text(row.work)),
    ("block", |row| size(row.block_bytes)),
    ("alone ms", |row| millis(row.alone_ns, row.time_is)),
    ("beside spills ms", |row| millis(row.beside_ns, row.time_is)),
    ("slowdown", |row| decimals(row.slowdown, 3)),
    ("by plain copies", |row| row.plain_slowdown.map_or_else(nothing, |ratio| decimals(ratio, 3))),
    ("spilled GB/s", |row| gigabytes(row.moved_bytes_per_s, row.time_is)),
    ("rounds", |row| count(row.rounds)),
];

pub(super) const SPILL_WORKLOAD: [Column<WorkloadRow>; 9] = [
    ("writes", |row| Cell::Number(format!("{} %", row.writes_percent))),
    ("limit", |row| size(row.card_bytes)),
    ("buffers", |row| count(row.buffers)),
    ("accesses", |row| count(row.accesses)),
    ("evicted", |row| size(row.to_host_bytes)),
    ("restored", |row| size(row.from_host_bytes)),
    ("total ms", |row| millis(row.took_ns as f64, row.time_is)),
    ("vs one direction", |row| decimals(row.of_one_way, 3)),
    ("vs both in turn", |row| decimals(row.of_both_ways, 3)),
];

pub(super) const SPILL_CALLS: [Column<CallRow>; 6] = [
    ("phase", |row| {
        text(match row.phase {
            "retrieve" => "restore",
            "pressed spill" => "spill by malloc",
            "pressed retrieve" => "restore after malloc",
            "pressed again" => "spill by malloc, mapped",
            phase => phase,
        })
    }),
    ("buffer", |row| size(row.size_bytes)),
    ("driver call", |row| text(row.call)),
    ("calls", |row| count(row.calls)),
    ("total ms", |row| millis(row.total_ns as f64, row.time_is)),
    ("longest ms", |row| millis(row.max_ns as f64, row.time_is)),
];

pub(super) const SPILL_BUFFERS: [Column<BuffersRow>; 4] = [
    ("buffers", |row| count(row.buffers)),
    ("on the card", |row| count(row.resident)),
    ("lease us", |row| decimals(row.lease_ns as f64 / 1e3, 1)),
    ("entries looked at", |row| decimals(row.looked_at, 1)),
];

pub(super) const SPILL_WAITING: [Column<WaitingRow>; 6] = [
    ("lease of", |row| text(if row.on_stream { "a stream" } else { "no stream" })),
    ("waiters", |row| count(row.waiters)),
    ("each with a lease", |row| text(if row.waiters_hold { "yes" } else { "no" })),
    ("lease ns", |row| decimals(row.lease_ns, 0)),
    ("ratio", |row| decimals(row.ratio, 2)),
    ("waiters looked at", |row| decimals(row.queue_steps, 2)),
];

pub(super) const SPILL_OVERSHOOT: [Column<OvershootRow>; 5] = [
    ("piece", |row| size(row.piece_bytes)),
    ("all buffers", |row| size(row.total_bytes)),
    ("largest overshoot in pieces", |row| decimals(row.largest_overshoot_pieces, 3)),
    ("mean", |row| decimals(row.mean_overshoot_pieces, 3)),
    ("evictions", |row| count(row.deficits)),
];

pub(super) const RESERVE: [Column<reserve::Row>; 6] = [
    ("operation", |row| {
        text(match row.what {
            "hand over to one who sleeps" => "hand over to a blocked waiter",
            "serve the first, in the core alone" => "serve the first waiter, queue alone",
            what => what,
        })
    }),
    ("allocator", |row| row.allocator.map_or_else(nothing, text)),
    ("waiters", |row| count(row.waiters)),
    ("ns", |row| decimals(row.call_ns, 1)),
    ("vs no budget", |row| match row.extra_ns {
        Some(extra_ns) => Cell::Number(format!("{extra_ns:+.1}")),
        None => nothing(),
    }),
    ("calls", |row| count(row.calls)),
];

pub(super) fn text(text: &str) -> Cell {
    Cell::Text(text.to_owned())
}

fn nothing() -> Cell {
    Cell::Number("-".to_owned())
}

pub(super) fn count(number: u64) -> Cell {
    Cell::Number(Count(number).to_string())
}

pub(super) fn size(bytes: u64) -> Cell {
    Cell::Number(Bytes::new(bytes).to_string())
}

pub(super) fn decimals(number: f64, digits: usize) -> Cell {
    Cell::Number(format!("{number:.digits$}"))
}

fn modelled(number: String, source: TimeSource) -> Cell {
    Cell::Number(match source {
        TimeSource::Measured => number,
        TimeSource::Modelled => format!("{number} (modelled)"),
    })
}

fn gigabytes(bytes_per_s: f64, source: TimeSource) -> Cell {
    modelled(format!("{:.2}", bytes_per_s / 1e9), source)
}

pub(super) fn millis(ns: f64, source: TimeSource) -> Cell {
    modelled(format!("{:.3}", ns / 1e6), source)
}

fn driver_ms(cost: &Cost) -> Cell {
    millis(cost.driver_ns as f64, cost.driver_ns_is)
}

fn driver_ms_per_gib(cost: &Cost, bytes: u64) -> Cell {
    let gib = bytes as f64 / Bytes::gib(1).count() as f64;
    decimals(cost.driver_ns as f64 / 1e6 / gib, 3)
}

fn host_ms(cost: &Cost) -> Cell {
    decimals(cost.host_ns as f64 / 1e6, 3)
}

/// The driver's own pool counts nothing: it has two calls a pair.
fn calls_of_pairs(driver_calls: Option<u64>) -> Cell {
    driver_calls.map_or_else(|| Cell::Number("2/pair".to_owned()), count)
}
