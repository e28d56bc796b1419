//! Costs of single requests: in a capture and outside, a launch with and without a lease.

use anyhow::{Context, Result};
use serde::Serialize;
use vramp::graph::ArenaConfig;
use vramp::{Allocation, Bytes};
use vramp_core::AddrRange;

use super::Rig;
use crate::subject::Subject;
use crate::{Bench, Cost, TimeSource};

/// Pairs in a batch.
const PAIRS: u64 = 500;
/// Launches in a batch, queued before the host waits.
const LAUNCHES: u64 = 64;
/// Fewer batches give no stable median.
const BATCHES_MIN: usize = 9;
const SIZE: Bytes = Bytes::mib(4);

/// The result for one kind of request.
#[derive(Clone, Debug, Serialize)]
pub struct RequestRow {
    /// `calls`.
    pub measure: &'static str,
    /// The kind of request.
    pub what: &'static str,
    /// Number of timed batches.
    pub batches: u64,
    /// Host time of one request, the median over batches. With a simulator, its own run time is
    /// part of it.
    pub each_host_ns: f64,
    /// Time in driver calls of one request.
    pub each_driver_ns: f64,
    /// Source of `each_driver_ns`.
    pub driver_ns_is: TimeSource,
    /// Driver calls of one request.
    pub driver_calls_each: f64,
}

/// One kind of request, with the costs of its batches.
struct Case<'a> {
    what: &'static str,
    count: u64,
    run: Box<dyn FnMut() -> Result<Cost> + 'a>,
    costs: Vec<Cost>,
}

pub(super) fn measure(bench: &Bench) -> Result<Vec<RequestRow>> {
    let rig = Rig::new(bench.driver()?)?;
    // No program is captured twice, so no plan is needed.
    let config = ArenaConfig { replan: false, ..ArenaConfig::default() };
    let arena = rig.allocator().graph_arena(config)?;
    let first = || {
        let block = rig.allocator.malloc(rig.stream, SIZE)?;
        let range = AddrRange::new(block.addr(), Bytes::kib(64));
        rig.driver().fill(rig.queue, range, 1)?;
        Ok::<Allocation, anyhow::Error>(block)
    };
    let pairs = || {
        rig.allocator.cost_of(|| {
            for _ in 0..PAIRS {
                let block = rig.allocator.malloc(rig.stream, SIZE)?;
                rig.allocator.free(rig.stream, block)?;
            }
            Ok(())
        })
    };
    let (graph, block) = rig.allocator().capture(rig.stream, &arena, first)?;
    let block = block?;
    let launches = |one: &dyn Fn() -> Result<()>| {
        let cost = rig.allocator.cost_of(|| (0..LAUNCHES).try_for_each(|_| one()))?;
        rig.synchronize()?;
        Ok::<Cost, anyhow::Error>(cost)
    };
    let mut cases = [
        Case::new("malloc and free", PAIRS, &pairs),
        Case::new("malloc and free in a capture", PAIRS, || {
            // The measured pairs follow earlier captured work.
            let (graph, cost) = rig.allocator().capture(rig.stream, &arena, || {
                let block = first()?;
                let cost = pairs()?;
                rig.allocator.free(rig.stream, block)?;
                Ok::<Cost, anyhow::Error>(cost)
            })?;
            drop(graph);
            cost
        }),
        Case::new("launch", LAUNCHES, || {
            launches(&|| Ok(rig.driver().launch_graph(graph.exec(), rig.queue)?))
        }),
        Case::new("launch with a lease", LAUNCHES, || {
            launches(&|| {
                drop(graph.launch(rig.stream)?);
                Ok(())
            })
        }),
    ];
    let mut round = || cases.iter_mut().try_for_each(Case::batch);
    // The first round creates memory.
    round()?;
    (0..BATCHES_MIN).try_for_each(|_| round())?;
    bench.repeat(4, round)?;
    let rows: Vec<RequestRow> = cases.iter().map(Case::row).collect::<Result<_>>()?;
    drop(cases);
    rig.allocator.free(rig.stream, block)?;
    drop((graph, arena));
    rig.close()?;
    Ok(rows)
}

impl<'a> Case<'a> {
    fn new(what: &'static str, count: u64, run: impl FnMut() -> Result<Cost> + 'a) -> Case<'a> {
        Case { what, count, run: Box::new(run), costs: Vec::new() }
    }

    fn batch(&mut self) -> Result<()> {
        self.costs.push((self.run)()?);
        Ok(())
    }

    fn row(&self) -> Result<RequestRow> {
        let warm = self.costs.get(1..).context("there are several batches")?;
        let cost = Cost::median(warm).context("there are several batches")?;
        let each = |total: u64| total as f64 / self.count as f64;
        Ok(RequestRow {
            measure: "calls",
            what: self.what,
            batches: warm.len() as u64,
            each_host_ns: each(cost.host_ns),
            each_driver_ns: each(cost.driver_ns),
            driver_ns_is: cost.driver_ns_is,
            driver_calls_each: each(cost.driver_calls),
        })
    }
}
