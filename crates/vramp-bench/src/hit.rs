//! A malloc/free pair on one thread, served from a cache.
//!
//! Batches of a few milliseconds alternate: the system's malloc and free of 64 bytes, the driver's
//! own pool, and each allocator, for each size. A row holds the median over batches and the median
//! ratio to the preceding batch of the system's malloc.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use vramp::{Bytes, Preset};
use vramp_driver::Stream;

use crate::statistics::{median, nanos};
use crate::subject::{DriverPool, MeteredAllocator, Subject, SystemMalloc};
use crate::{Bench, TimeSource};

/// Size of the system's blocks, the yardstick.
const SYSTEM_BLOCK: Bytes = Bytes::new(64);
/// Length of a batch: short against disturbances of the machine, long against the clock's
/// resolution.
const BATCH: Duration = Duration::from_millis(2);
/// Pairs before the first timed batch.
const WARM_PAIRS: u64 = 1000;
/// Fewer batches give no stable median.
const BATCHES_MIN: usize = 5;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Allocators to measure, in order.
    pub presets: Vec<Preset>,
    /// Block sizes.
    pub sizes: Vec<Bytes>,
}

/// The result for one allocator and block size.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The allocator's name.
    pub allocator: &'static str,
    /// Size of the block.
    pub size_bytes: u64,
    /// Number of timed batches.
    pub batches: u64,
    /// Number of timed pairs.
    pub pairs: u64,
    /// Time of one pair.
    pub pair_ns: f64,
    /// Source of `pair_ns`.
    pub time_is: TimeSource,
    /// Ratio to the system's malloc and free.
    pub of_system_malloc: f64,
    /// Driver calls in all timed batches; `None` for the driver's own pool.
    pub driver_calls: Option<u64>,
}

/// One allocator at one block size.
struct Case<'a> {
    name: &'static str,
    size: Bytes,
    /// Does a number of pairs and returns the nanoseconds they took.
    run: Box<dyn FnMut(u64) -> Result<u64> + 'a>,
    driver_calls: Box<dyn Fn() -> Option<u64> + 'a>,
    time_is: TimeSource,
    pairs_per_batch: u64,
    pair_ns: Vec<f64>,
    ratios: Vec<f64>,
    counted: Option<u64>,
}

/// Measures every allocator at every size: first the system's malloc, then each size in turn.
///
/// # Errors
/// An allocator or the driver fails.
pub fn run(bench: &Bench, options: &Options) -> Result<Vec<Row>> {
    let pool = DriverPool::of(bench.driver()?)?;
    let mut allocators = Vec::new();
    for &preset in &options.presets {
        allocators.push(MeteredAllocator::new(bench.driver()?, preset, None)?);
    }
    // One stream each: a block that changes its stream is no cache hit.
    let pool = pool
        .as_ref()
        .map(|pool| Ok::<_, anyhow::Error>((pool, pool.create_stream()?)))
        .transpose()?;
    let streams =
        allocators.iter().map(MeteredAllocator::create_stream).collect::<Result<Vec<_>>>()?;
    let mut groups = Vec::new();
    for &size in &options.sizes {
        let mut cases = vec![timed(&SystemMalloc, (), SYSTEM_BLOCK)?];
        if let Some((pool, stream)) = pool {
            let pairs = if bench.info().simulated { modelled } else { timed };
            cases.push(pairs(pool, stream, size)?);
        }
        for (allocator, &stream) in allocators.iter().zip(&streams) {
            cases.push(timed(allocator, stream, size)?);
        }
        groups.push(cases);
    }
    measure(&mut groups, bench.duration)?;
    let rows = rows(groups);
    allocators.into_iter().try_for_each(MeteredAllocator::close)?;
    Ok(rows)
}

/// Returns a case whose pairs are timed by the clock.
fn timed<S: Subject>(subject: &S, stream: S::Stream, size: Bytes) -> Result<Case<'_>> {
    let run = move |count| {
        // The preceding case may have left the memory in other sizes.
        pairs(subject, stream, size, 1)?;
        let begun = Instant::now();
        pairs(subject, stream, size, count)?;
        Ok(nanos(begun.elapsed()))
    };
    case(subject, size, TimeSource::Measured, Box::new(run))
}

/// Returns a case whose pairs are timed by the simulator's cost model.
fn modelled(pool: &DriverPool, stream: Stream, size: Bytes) -> Result<Case<'_>> {
    let run = move |count| {
        let begun = pool.driver.now_ns();
        pairs(pool, stream, size, count)?;
        Ok(pool.driver.now_ns() - begun)
    };
    case(pool, size, TimeSource::Modelled, Box::new(run))
}

fn pairs<S: Subject>(subject: &S, stream: S::Stream, size: Bytes, count: u64) -> Result<()> {
    for _ in 0..count {
        let block = subject.malloc(stream, black_box(size))?;
        black_box(S::address(&block));
        subject.free(stream, block)?;
    }
    Ok(())
}

fn case<'a, S: Subject>(
    subject: &'a S,
    size: Bytes,
    time_is: TimeSource,
    mut run: Box<dyn FnMut(u64) -> Result<u64> + 'a>,
) -> Result<Case<'a>> {
    let begun = Instant::now();
    run(WARM_PAIRS)?;
    // By the clock also where the time is modelled: the user waits for real time.
    let fitting = nanos(BATCH) * WARM_PAIRS / nanos(begun.elapsed()).max(1);
    Ok(Case {
        name: subject.name(),
        size,
        run,
        driver_calls: Box::new(|| subject.driver_calls()),
        time_is,
        pairs_per_batch: fitting.max(1),
        pair_ns: Vec::new(),
        ratios: Vec::new(),
        counted: Some(0),
    })
}

/// Runs a batch of each case in turn until the time is over. The first case of each group is the
/// yardstick of that group.
fn measure(groups: &mut [Vec<Case<'_>>], duration: Duration) -> Result<()> {
    let begun = Instant::now();
    let mut round = 0;
    while round < BATCHES_MIN || begun.elapsed() < duration {
        for cases in &mut *groups {
            let mut malloc_ns = f64::NAN;
            for (index, case) in cases.iter_mut().enumerate() {
                let before = (case.driver_calls)();
                let pair_ns =
                    (case.run)(case.pairs_per_batch)? as f64 / case.pairs_per_batch as f64;
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

fn rows(groups: Vec<Vec<Case<'_>>>) -> Vec<Row> {
    let mut malloc: Option<Case<'_>> = None;
    let mut cases = Vec::new();
    for mut group in groups {
        let yardstick = group.remove(0);
        match &mut malloc {
            // It is the same case in every group.
            Some(malloc) => {
                malloc.pair_ns.extend(yardstick.pair_ns);
                malloc.ratios.extend(yardstick.ratios);
            }
            None => malloc = Some(yardstick),
        }
        cases.extend(group);
    }
    malloc.into_iter().chain(cases).map(row).collect()
}

fn row(case: Case<'_>) -> Row {
    Row {
        allocator: case.name,
        size_bytes: case.size.count(),
        batches: case.pair_ns.len() as u64,
        pairs: case.pair_ns.len() as u64 * case.pairs_per_batch,
        pair_ns: median(case.pair_ns),
        time_is: case.time_is,
        of_system_malloc: median(case.ratios),
        driver_calls: case.counted,
    }
}
