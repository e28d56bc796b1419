//! An idle arena lends its memory, ordinary blocks use it, and a launch takes it back.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use vramp::graph::{ArenaConfig, CapturedGraph, GraphArena};
use vramp::{Allocation, Bytes, StreamId};
use vramp_core::AddrRange;
use vramp_driver::meter::MeterSnapshot;
use vramp_driver::{Call, DeviceInfo};

use super::Rig;
use crate::subject::Subject;
use crate::{Bench, Cost};

/// Live blocks of the graph in its arena.
const GRAPH_BLOCKS: u64 = 16;
/// Ordinary blocks, which together use nine tenths of the arena.
const ORDINARY_BLOCKS: u64 = 90;
/// Fewer rounds give no stable median.
const ROUNDS_MIN: usize = 5;
/// Events of finished work complete long before.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Cost of one phase of lending.
#[derive(Clone, Debug, Serialize)]
pub struct LendingRow {
    /// `lent`.
    pub measure: &'static str,
    /// Whether the ordinary blocks are `freed` or `held` at the launch.
    pub borrower: &'static str,
    /// `lend`, `take` or `bring back`.
    pub phase: &'static str,
    /// Size of the arena.
    pub arena_bytes: u64,
    /// Bytes that ordinary blocks use of it.
    pub borrowed_bytes: u64,
    /// Number of rounds.
    pub rounds: u64,
    /// Physical handles created in one round.
    pub creates: u64,
    /// Map calls in one round.
    pub maps: u64,
    /// Access calls in one round.
    pub set_accesses: u64,
    /// Unmap calls in one round.
    pub unmaps: u64,
    /// Time in driver calls for each GiB borrowed.
    pub driver_ms_per_gib: f64,
    /// Host time for each GiB borrowed.
    pub host_ms_per_gib: f64,
    /// Cost of one round.
    #[serde(flatten)]
    pub cost: Cost,
}

/// Returns the size of the arena: the requested one, or the usual one of the device.
pub(super) fn arena(requested: Option<Bytes>, device: &DeviceInfo) -> Result<Bytes> {
    let (memory, page) = (device.limits.memory, device.limits.page);
    let least = page * ORDINARY_BLOCKS * 2;
    let usual = if device.simulated { Bytes::gib(1) } else { Bytes::gib(8) };
    let arena = requested.unwrap_or(usual);
    if arena < least || arena > memory {
        bail!("an arena of {arena} cannot be measured: give an arena from {least} to {memory}");
    }
    Ok(arena.round_down(page * GRAPH_BLOCKS))
}

/// Returns the size of each ordinary block.
fn ordinary_block(arena: Bytes) -> Bytes {
    Bytes::new(arena.count() / 10 * 9 / ORDINARY_BLOCKS)
}

pub(super) fn measure(bench: &Bench, size: Bytes) -> Result<Vec<LendingRow>> {
    let mut rows = Vec::new();
    for borrower in [Borrower::Freed, Borrower::Held] {
        let lender = Lender::new(bench, size)?;
        let mut rounds = Vec::new();
        let mut round = || {
            rounds.push(lender.round(borrower)?);
            Ok(())
        };
        // The first round finds chunks of other sizes.
        lender.round(borrower)?;
        (0..ROUNDS_MIN).try_for_each(|_| round())?;
        bench.repeat(8, round)?;
        lender.close()?;
        for (phase, name) in ["lend", "take", "bring back"].into_iter().enumerate() {
            let of_phase = |round: &[Phase; 3]| round[phase].cost;
            let costs: Vec<Cost> = rounds.iter().map(of_phase).collect();
            let cost = Cost::median(&costs).context("there are several rounds")?;
            let calls = rounds.last().context("there are several rounds")?[phase].calls;
            let borrowed = (ordinary_block(size) * ORDINARY_BLOCKS).count();
            let per_gib =
                |ns: u64| ns as f64 / 1e6 * Bytes::gib(1).count() as f64 / borrowed as f64;
            rows.push(LendingRow {
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

/// Whether the ordinary blocks are freed before the arena's memory is taken back.
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

/// Cost of one phase of a round.
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

/// An allocator whose reserved memory all belongs to one arena.
struct Lender {
    rig: Rig,
    arena: GraphArena,
    graph: CapturedGraph,
    /// Stream of the ordinary blocks.
    other: StreamId,
    size: Bytes,
    limit: Bytes,
}

impl Lender {
    fn new(bench: &Bench, size: Bytes) -> Result<Lender> {
        let rig = Rig::new(bench.driver()?)?;
        let other = rig.allocator.create_stream()?;
        let arena = rig.allocator().graph_arena(ArenaConfig::default())?;
        let (graph, captured) = rig.allocator().capture(rig.stream, &arena, || {
            let mut live = Vec::new();
            for _ in 0..GRAPH_BLOCKS {
                let block =
                    rig.allocator().malloc(Bytes::new(size.count() / GRAPH_BLOCKS), rig.stream)?;
                write(&rig, rig.stream, &block)?;
                live.push(block);
            }
            live.into_iter().try_for_each(|block| rig.allocator.free(rig.stream, block))
        })?;
        captured.with_context(|| format!("an arena of {size}"))?;
        drop(graph.launch(rig.stream)?);
        rig.synchronize()?;
        rig.allocator().trim(arena.report().backed)?;
        // From here on, all reserved memory is the arena's.
        let limit = rig.allocator().stats()?.reserved;
        rig.allocator().set_limit(Some(limit))?;
        Ok(Lender { rig, arena, graph, other, size, limit })
    }

    fn round(&self, borrower: Borrower) -> Result<[Phase; 3]> {
        let Lender { rig, arena, graph, other, .. } = self;
        drop(graph.launch(rig.stream)?);
        rig.synchronize()?;

        // Reserved memory is within this bound, so none is released.
        let lend = self.phase(|| {
            eventually("the idle arena lends nothing", || {
                rig.allocator().trim(Bytes::new(u64::MAX))?;
                Ok(!arena.report().lent.is_zero())
            })
        })?;
        let mut live = Vec::new();
        let size = ordinary_block(self.size);
        let take = self.phase(|| {
            for _ in 0..ORDINARY_BLOCKS {
                live.push(rig.allocator.malloc(*other, size)?);
            }
            Ok(())
        })?;
        live.iter().try_for_each(|block| write(rig, *other, block))?;
        let queue =
            rig.allocator().stream(*other).context("the stream was created at the start")?;
        rig.driver().synchronize_stream(queue)?;
        match borrower {
            Borrower::Freed => self.free(&mut live)?,
            Borrower::Held => rig.allocator().set_limit(None)?,
        }
        let mut lease = None;
        let back = self.phase(|| {
            lease = Some(graph.launch(rig.stream)?);
            Ok(())
        })?;
        drop(lease);
        rig.synchronize()?;
        self.free(&mut live)?;
        // New chunks replaced those that were lent; the surplus is released.
        eventually("memory above the limit stays reserved", || {
            rig.allocator().set_limit(Some(self.limit))?;
            Ok(rig.allocator().stats()?.reserved <= self.limit)
        })?;
        Ok([lend, take, back])
    }

    fn free(&self, live: &mut Vec<Allocation>) -> Result<()> {
        live.drain(..).try_for_each(|block| self.rig.allocator.free(self.other, block))
    }

    fn phase(&self, work: impl FnOnce() -> Result<()>) -> Result<Phase> {
        let before = self.rig.allocator.meter.snapshot();
        let cost = self.rig.allocator.cost_of(work)?;
        Ok(Phase { cost, calls: Calls::between(&before, &self.rig.allocator.meter.snapshot()) })
    }

    fn close(self) -> Result<()> {
        drop((self.graph, self.arena));
        self.rig.close()
    }
}

/// Repeats `attempt` until it succeeds: an event that was just recorded completes a little later.
fn eventually(failure: &'static str, mut attempt: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !attempt()? {
        ensure!(begun.elapsed() < TIMEOUT, "{failure} after {} s", TIMEOUT.as_secs());
    }
    Ok(())
}

/// Queues a fill of the whole block.
fn write(rig: &Rig, stream: StreamId, block: &Allocation) -> Result<()> {
    let queue = rig.allocator().stream(stream).context("the stream was created at the start")?;
    Ok(rig.driver().fill(queue, AddrRange::new(block.addr(), block.requested()), 1)?)
}
