//! `vramp bench hit`: one block taken and freed, on one thread.

use std::hint::black_box;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use vramp_alloc::Bytes;
use vramp_driver::Stream;

use super::args::Hit;
use super::subject::{DriverPool, Managed, Subject, System};
use super::{Bench, Cell, Column, median, nanos};

/// What stands beside everything else.
const MALLOC: Bytes = Bytes::new(64);
/// How long a batch should take: short against what disturbs a machine, long against the clock.
const BATCH: Duration = Duration::from_millis(2);
/// Pairs before anything is timed.
const WARM_PAIRS: u64 = 1000;
/// Fewer batches say nothing.
const BATCHES_LEAST: usize = 5;

/// One row.
#[derive(Debug, Serialize)]
struct Row {
    allocator: &'static str,
    size_bytes: u64,
    batches: u64,
    pairs: u64,
    pair_ns: f64,
    time_is: &'static str,
    of_system_malloc: f64,
    driver_calls: Option<u64>,
}

/// One subject at one size.
struct Case<'a> {
    name: &'static str,
    size: Bytes,
    /// Makes so many pairs and tells the nanoseconds they took.
    run: Box<dyn FnMut(u64) -> Result<u64> + 'a>,
    driver_calls: Box<dyn Fn() -> Option<u64> + 'a>,
    time_is: &'static str,
    pairs_a_batch: u64,
    pair_ns: Vec<f64>,
    ratios: Vec<f64>,
    counted: Option<u64>,
}

pub(super) fn run(args: &Hit, out: &mut dyn Write) -> Result<()> {
    let bench = Bench::open(&args.common, out)?;
    let pool = DriverPool::of(bench.driver()?)?;
    let mut managed = Vec::new();
    for &preset in &args.common.allocator.0 {
        managed.push(Managed::new(bench.driver()?, preset, None)?);
    }
    // One stream each: memory that goes from stream to stream is no hit.
    let pool =
        pool.as_ref().map(|pool| Ok::<_, anyhow::Error>((pool, pool.new_lane()?))).transpose()?;
    let lanes = managed.iter().map(Managed::new_lane).collect::<Result<Vec<_>>>()?;
    let mut groups = Vec::new();
    for &size in &args.sizes {
        let mut cases = vec![timed(&System, (), MALLOC)?];
        if let Some((pool, lane)) = pool {
            let pairs = if bench.info.simulated { modelled } else { timed };
            cases.push(pairs(pool, lane, size)?);
        }
        for (managed, &lane) in managed.iter().zip(&lanes) {
            cases.push(timed(managed, lane, size)?);
        }
        groups.push(cases);
    }
    measure(&mut groups, bench.duration)?;
    report(&bench, groups, out)?;
    managed.into_iter().try_for_each(Managed::close)?;
    Ok(())
}

/// Pairs by the clock.
fn timed<S: Subject>(subject: &S, lane: S::Lane, size: Bytes) -> Result<Case<'_>> {
    let run = move |count| {
        // What went before may have left the memory in other sizes.
        pairs(subject, lane, size, 1)?;
        let begun = Instant::now();
        pairs(subject, lane, size, count)?;
        Ok(nanos(begun.elapsed()))
    };
    case(subject, size, "measured", Box::new(run))
}

/// Pairs by the model of the simulator.
fn modelled(pool: &DriverPool, lane: Stream, size: Bytes) -> Result<Case<'_>> {
    let run = move |count| {
        let begun = pool.driver.now_ns();
        pairs(pool, lane, size, count)?;
        Ok(pool.driver.now_ns() - begun)
    };
    case(pool, size, "modelled", Box::new(run))
}

fn pairs<S: Subject>(subject: &S, lane: S::Lane, size: Bytes, count: u64) -> Result<()> {
    for _ in 0..count {
        let block = subject.take(lane, black_box(size))?;
        black_box(S::place(&block));
        subject.give(lane, block)?;
    }
    Ok(())
}

fn case<'a, S: Subject>(
    subject: &'a S,
    size: Bytes,
    time_is: &'static str,
    mut run: Box<dyn FnMut(u64) -> Result<u64> + 'a>,
) -> Result<Case<'a>> {
    let begun = Instant::now();
    run(WARM_PAIRS)?;
    // By the clock also where the time is modelled: this is how long the user waits.
    let fitting = nanos(BATCH) * WARM_PAIRS / nanos(begun.elapsed()).max(1);
    Ok(Case {
        name: subject.name(),
        size,
        run,
        driver_calls: Box::new(|| subject.driver_calls()),
        time_is,
        pairs_a_batch: fitting.max(1),
        pair_ns: Vec::new(),
        ratios: Vec::new(),
        counted: Some(0),
    })
}

/// Lets the cases take turns until the time is over. The first of each group is what the others of
/// it are compared with.
fn measure(groups: &mut [Vec<Case<'_>>], duration: Duration) -> Result<()> {
    let begun = Instant::now();
    let mut round = 0;
    while round < BATCHES_LEAST || begun.elapsed() < duration {
        for cases in &mut *groups {
            let mut malloc_ns = f64::NAN;
            for (index, case) in cases.iter_mut().enumerate() {
                let before = (case.driver_calls)();
                let pair_ns = (case.run)(case.pairs_a_batch)? as f64 / case.pairs_a_batch as f64;
                let calls = before.zip((case.driver_calls)()).map(|(before, after)| after - before);
                if index == 0 {
                    malloc_ns = pair_ns;
                }
                case.counted = case.counted.zip(calls).map(|(sum, calls)| sum + calls);
                case.pair_ns.push(pair_ns);
                case.ratios.push(pair_ns / malloc_ns);
            }
        }
        round += 1;
    }
    Ok(())
}

fn report(bench: &Bench, groups: Vec<Vec<Case<'_>>>, out: &mut dyn Write) -> Result<()> {
    let mut malloc: Option<Case<'_>> = None;
    let mut cases = Vec::new();
    for mut group in groups {
        let own = group.remove(0);
        match &mut malloc {
            // It is the same one for every size.
            Some(malloc) => {
                malloc.pair_ns.extend(own.pair_ns);
                malloc.ratios.extend(own.ratios);
            }
            None => malloc = Some(own),
        }
        cases.extend(group);
    }
    let rows: Vec<Row> = malloc.into_iter().chain(cases).map(row).collect();
    bench.write(out, "hit", &rows, &COLUMNS)
}

fn row(case: Case<'_>) -> Row {
    Row {
        allocator: case.name,
        size_bytes: case.size.count(),
        batches: case.pair_ns.len() as u64,
        pairs: case.pair_ns.len() as u64 * case.pairs_a_batch,
        pair_ns: median(case.pair_ns),
        time_is: case.time_is,
        of_system_malloc: median(case.ratios),
        driver_calls: case.counted,
    }
}

const COLUMNS: [Column<Row>; 6] = [
    ("allocator", |row| Cell::Words(row.allocator.to_owned())),
    ("block", |row| Cell::Number(Bytes::new(row.size_bytes).to_string())),
    ("ns a pair", |row| {
        let modelled = if row.time_is == "modelled" { " (modelled)" } else { "" };
        Cell::Number(format!("{:.1}{modelled}", row.pair_ns))
    }),
    ("of malloc", |row| Cell::Number(format!("{:.2}", row.of_system_malloc))),
    ("pairs", |row| Cell::Number(crate::count::Count(row.pairs).to_string())),
    ("driver calls", |row| match row.driver_calls {
        Some(calls) => Cell::Number(crate::count::Count(calls).to_string()),
        None => Cell::Number("2 a pair".to_owned()),
    }),
];
