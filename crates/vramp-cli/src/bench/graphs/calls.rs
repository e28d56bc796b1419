//! What single requests cost: in a capture and outside, a launch with and without a lease.

use anyhow::{Context, Result};
use serde::Serialize;
use vramp_alloc::graph::ArenaConfig;
use vramp_alloc::{Allocation, Bytes};
use vramp_core::AddrRange;

use super::Site;
use crate::bench::cost::Cost;
use crate::bench::subject::Subject;
use crate::bench::{Bench, Cell, Column};

/// Requests that are timed together.
const PAIRS: u64 = 500;
/// Launches that are queued before they are waited for.
const LAUNCHES: u64 = 64;
/// So many batches at least.
const BATCHES_LEAST: usize = 9;
const SIZE: Bytes = Bytes::mib(4);

/// One row.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    measure: &'static str,
    what: &'static str,
    batches: u64,
    /// Host time of one, the median over batches. On the simulator, its own time.
    each_host_ns: f64,
    /// Of that in driver calls.
    each_driver_ns: f64,
    driver_ns_is: &'static str,
    driver_calls_each: f64,
}

/// Batches of one kind of request.
struct Case<'a> {
    what: &'static str,
    count: u64,
    run: Box<dyn FnMut() -> Result<Cost> + 'a>,
    costs: Vec<Cost>,
}

pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let site = Site::new(bench.driver()?)?;
    // Plans are for programs that are captured again.
    let config = ArenaConfig { replan: false, ..ArenaConfig::default() };
    let arena = site.allocator().graph_arena(config)?;
    let first = || {
        let block = site.managed.take(site.stream, SIZE)?;
        let range = AddrRange::new(block.addr(), Bytes::kib(64));
        site.driver().fill(site.queue, range, 1)?;
        Ok::<Allocation, anyhow::Error>(block)
    };
    let pairs = || {
        site.managed.cost_of(|| {
            for _ in 0..PAIRS {
                let block = site.managed.take(site.stream, SIZE)?;
                site.managed.give(site.stream, block)?;
            }
            Ok(())
        })
    };
    let (graph, block) = site.allocator().capture(site.stream, &arena, first)?;
    let block = block?;
    let launches = |one: &dyn Fn() -> Result<()>| {
        let cost = site.managed.cost_of(|| (0..LAUNCHES).try_for_each(|_| one()))?;
        site.finish()?;
        Ok::<Cost, anyhow::Error>(cost)
    };
    let mut cases = [
        Case::new("malloc and free", PAIRS, &pairs),
        Case::new("malloc and free in a capture", PAIRS, || {
            // Not alone at the beginning: something was captured before.
            let (graph, cost) = site.allocator().capture(site.stream, &arena, || {
                let block = first()?;
                let cost = pairs()?;
                site.managed.give(site.stream, block)?;
                Ok::<Cost, anyhow::Error>(cost)
            })?;
            drop(graph);
            cost
        }),
        Case::new("launch", LAUNCHES, || {
            launches(&|| Ok(site.driver().launch_graph(graph.exec(), site.queue)?))
        }),
        Case::new("launch with a lease", LAUNCHES, || {
            launches(&|| {
                drop(graph.launch(site.stream)?);
                Ok(())
            })
        }),
    ];
    let mut round = || cases.iter_mut().try_for_each(Case::batch);
    // The first one finds memory that nobody asked for before.
    round()?;
    (0..BATCHES_LEAST).try_for_each(|_| round())?;
    bench.repeat(4, round)?;
    let rows: Vec<Row> = cases.iter().map(Case::row).collect::<Result<_>>()?;
    drop(cases);
    site.managed.give(site.stream, block)?;
    drop((graph, arena));
    site.close()?;
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

    fn row(&self) -> Result<Row> {
        let warm = self.costs.get(1..).context("there are several batches")?;
        let cost = Cost::median(warm).context("there are several batches")?;
        let each = |total: u64| total as f64 / self.count as f64;
        Ok(Row {
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

pub(super) const COLUMNS: [Column<Row>; 4] = [
    ("one", |row| Cell::Words(row.what.to_owned())),
    ("host ns", |row| Cell::Number(format!("{:.0}", row.each_host_ns))),
    ("in driver calls", |row| {
        let modelled = if row.driver_ns_is == "modelled" { " (modelled)" } else { "" };
        Cell::Number(format!("{:.0}{modelled}", row.each_driver_ns))
    }),
    ("driver calls", |row| Cell::Number(format!("{:.2}", row.driver_calls_each))),
];
