//! An idle arena lends, others take its memory, and a launch brings it back.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use vramp_alloc::graph::{ArenaConfig, CapturedGraph, GraphArena};
use vramp_alloc::{Allocation, Bytes, StreamId};
use vramp_core::AddrRange;
use vramp_driver::{Call, DeviceInfo, MeterSnapshot};

use super::Site;
use crate::bench::cost::Cost;
use crate::bench::subject::Subject;
use crate::bench::{Bench, Cell, Column};
use crate::count::Count;

/// What one graph holds at once in its arena.
const BLOCKS: u64 = 16;
/// In so many parts nine tenths are taken.
const PARTS: u64 = 90;
/// So often each round at least.
const ROUNDS_LEAST: usize = 5;
/// Events of work that is over are reached long before.
const PATIENCE: Duration = Duration::from_secs(5);

/// One row.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    measure: &'static str,
    /// Whether the ordinary blocks are `freed` or `held` when the launch comes.
    borrower: &'static str,
    /// `lend`, `take` or `bring back`.
    phase: &'static str,
    arena_bytes: u64,
    borrowed_bytes: u64,
    rounds: u64,
    creates: u64,
    maps: u64,
    set_accesses: u64,
    unmaps: u64,
    driver_ms_per_gib: f64,
    host_ms_per_gib: f64,
    #[serde(flatten)]
    cost: Cost,
}

/// How large the arena is: what was asked for, or what suits the device.
pub(super) fn arena(asked: Option<Bytes>, device: &DeviceInfo) -> Result<Bytes> {
    let (memory, page) = (device.limits.memory, device.limits.page);
    let least = page * PARTS * 2;
    let usual = if device.simulated { Bytes::gib(1) } else { Bytes::gib(8) };
    let arena = asked.unwrap_or(usual);
    if arena < least || arena > memory {
        bail!("an arena of {arena} cannot be measured: give an --arena from {least} to {memory}");
    }
    Ok(arena.round_down(page * BLOCKS))
}

/// What each ordinary block takes.
fn part(arena: Bytes) -> Bytes {
    Bytes::new(arena.count() / 10 * 9 / PARTS)
}

pub(super) fn measure(bench: &Bench, size: Bytes) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for borrower in [Borrower::Freed, Borrower::Held] {
        let lender = Lender::new(bench, size)?;
        let mut rounds = Vec::new();
        let mut round = || {
            rounds.push(lender.round(borrower)?);
            Ok(())
        };
        // The first one meets chunks of other sizes.
        lender.round(borrower)?;
        (0..ROUNDS_LEAST).try_for_each(|_| round())?;
        bench.repeat(8, round)?;
        lender.close()?;
        for (phase, name) in ["lend", "take", "bring back"].into_iter().enumerate() {
            let of_phase = |round: &[Phase; 3]| round[phase].cost;
            let costs: Vec<Cost> = rounds.iter().map(of_phase).collect();
            let cost = Cost::median(&costs).context("there are several rounds")?;
            let calls = rounds.last().context("there are several rounds")?[phase].calls;
            let borrowed = (part(size) * PARTS).count();
            let per_gib =
                |ns: u64| ns as f64 / 1e6 * Bytes::gib(1).count() as f64 / borrowed as f64;
            rows.push(Row {
                measure: "lent",
                borrower: borrower.name(),
                phase: name,
                arena_bytes: size.count(),
                borrowed_bytes: borrowed,
                rounds: rounds.len() as u64,
                creates: calls.creates,
                maps: calls.maps,
                set_accesses: calls.set_accesses,
                unmaps: calls.unmaps,
                driver_ms_per_gib: per_gib(cost.driver_ns),
                host_ms_per_gib: per_gib(cost.host_ns),
                cost,
            });
        }
    }
    Ok(rows)
}

/// Whether the blocks that took the memory are gone when the arena is wanted back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Borrower {
    Freed,
    Held,
}

impl Borrower {
    fn name(self) -> &'static str {
        match self {
            Borrower::Freed => "freed",
            Borrower::Held => "held",
        }
    }
}

/// What one part of a round cost.
#[derive(Clone, Copy, Debug)]
struct Phase {
    cost: Cost,
    calls: Calls,
}

/// Calls that change what is mapped where.
#[derive(Clone, Copy, Debug)]
struct Calls {
    creates: u64,
    maps: u64,
    set_accesses: u64,
    unmaps: u64,
}

impl Calls {
    fn between(before: &MeterSnapshot, after: &MeterSnapshot) -> Calls {
        let of = |call| after.of(call).calls - before.of(call).calls;
        Calls {
            creates: of(Call::Create),
            maps: of(Call::Map),
            set_accesses: of(Call::SetAccess),
            unmaps: of(Call::Unmap),
        }
    }
}

/// An allocator whose memory is all one arena's.
struct Lender {
    site: Site,
    arena: GraphArena,
    graph: CapturedGraph,
    /// Where ordinary blocks are used.
    other: StreamId,
    size: Bytes,
    limit: Bytes,
}

impl Lender {
    fn new(bench: &Bench, size: Bytes) -> Result<Lender> {
        let site = Site::new(bench.driver()?)?;
        let other = site.managed.new_lane()?;
        let arena = site.allocator().graph_arena(ArenaConfig::default())?;
        let (graph, captured) = site.allocator().capture(site.stream, &arena, || {
            let mut held = Vec::new();
            for _ in 0..BLOCKS {
                let block =
                    site.allocator().malloc(Bytes::new(size.count() / BLOCKS), site.stream)?;
                write(&site, site.stream, &block)?;
                held.push(block);
            }
            held.into_iter().try_for_each(|block| site.managed.give(site.stream, block))
        })?;
        captured.with_context(|| format!("an arena of {size}"))?;
        drop(graph.launch(site.stream)?);
        site.finish()?;
        site.allocator().trim(arena.report().backed)?;
        // From here on, memory is the arena's or nobody's.
        let limit = site.allocator().stats()?.reserved;
        site.allocator().set_limit(Some(limit))?;
        Ok(Lender { site, arena, graph, other, size, limit })
    }

    fn round(&self, borrower: Borrower) -> Result<[Phase; 3]> {
        let Lender { site, arena, graph, other, .. } = self;
        drop(graph.launch(site.stream)?);
        site.finish()?;

        // Nothing is held above this, so nothing is given to the card.
        let lend = self.phase(|| {
            soon("the idle arena lends nothing", || {
                site.allocator().trim(Bytes::new(u64::MAX))?;
                Ok(!arena.report().lent.is_zero())
            })
        })?;
        let mut held = Vec::new();
        let part = part(self.size);
        let take = self.phase(|| {
            for _ in 0..PARTS {
                held.push(site.managed.take(*other, part)?);
            }
            Ok(())
        })?;
        held.iter().try_for_each(|block| write(site, *other, block))?;
        let queue = site.allocator().stream(*other).context("the stream was made at the start")?;
        site.driver().synchronize_stream(queue)?;
        match borrower {
            Borrower::Freed => self.give(&mut held)?,
            Borrower::Held => site.allocator().set_limit(None)?,
        }
        let mut lease = None;
        let back = self.phase(|| {
            lease = Some(graph.launch(site.stream)?);
            Ok(())
        })?;
        drop(lease);
        site.finish()?;
        self.give(&mut held)?;
        // New chunks took the place of those that were lent; those go back to the card.
        soon("memory above the limit stays", || {
            site.allocator().set_limit(Some(self.limit))?;
            Ok(site.allocator().stats()?.reserved <= self.limit)
        })?;
        Ok([lend, take, back])
    }

    fn give(&self, held: &mut Vec<Allocation>) -> Result<()> {
        held.drain(..).try_for_each(|block| self.site.managed.give(self.other, block))
    }

    fn phase(&self, work: impl FnOnce() -> Result<()>) -> Result<Phase> {
        let before = self.site.managed.meter.snapshot();
        let cost = self.site.managed.cost_of(work)?;
        Ok(Phase { cost, calls: Calls::between(&before, &self.site.managed.meter.snapshot()) })
    }

    fn close(self) -> Result<()> {
        drop((self.graph, self.arena));
        self.site.close()
    }
}

/// Tries until it succeeds: an event that was recorded a moment ago is not reached at once.
fn soon(failure: &'static str, mut attempt: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !attempt()? {
        ensure!(begun.elapsed() < PATIENCE, "{failure} after {} s", PATIENCE.as_secs());
    }
    Ok(())
}

/// Queues a write to the whole block.
fn write(site: &Site, stream: StreamId, block: &Allocation) -> Result<()> {
    let queue = site.allocator().stream(stream).context("the stream was made at the start")?;
    Ok(site.driver().fill(queue, AddrRange::new(block.addr(), block.requested()), 1)?)
}

pub(super) const COLUMNS: [Column<Row>; 10] = [
    ("memory", |row| Cell::Words(row.phase.to_owned())),
    ("borrower", |row| Cell::Words(row.borrower.to_owned())),
    ("arena", |row| Cell::Number(Bytes::new(row.arena_bytes).to_string())),
    ("borrowed", |row| Cell::Number(Bytes::new(row.borrowed_bytes).to_string())),
    ("creates", |row| Cell::Number(Count(row.creates).to_string())),
    ("maps", |row| Cell::Number(Count(row.maps).to_string())),
    ("unmaps", |row| Cell::Number(Count(row.unmaps).to_string())),
    ("driver ms", |row| Cell::Number(row.cost.driver_millis())),
    ("per GiB", |row| Cell::Number(format!("{:.3}", row.driver_ms_per_gib))),
    ("host ms per GiB", |row| Cell::Number(format!("{:.3}", row.host_ms_per_gib))),
];
