//! A malloc/free pair on one thread, served without a driver call.
//!
//! With blocks outstanding, a pair frees one of them at random and allocates another: so it is served
//! from a cache only where the allocator caches so many. Otherwise it is one block, over and over.
//!
//! Batches of a few milliseconds alternate: the system's malloc and free of 64 bytes, the driver's
//! own pool, and each allocator, for each size. A row holds the median over batches and the median
//! ratio to the preceding batch of the system's malloc.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Result;
use fastrand::Rng;
use serde::Serialize;
use vramp::Bytes;
use vramp::peers::Preset;
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
    /// Numbers of live blocks beside the pairs.
    pub outstanding: Vec<usize>,
}

/// The result for one allocator and block size.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The allocator's name.
    pub allocator: &'static str,
    /// Size of the block.
    pub size_bytes: u64,
    /// Live blocks beside the pairs.
    pub outstanding: u64,
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

/// What the pairs of a case are.
#[derive(Clone, Copy)]
struct Kind {
    size: Bytes,
    outstanding: usize,
}

/// What a number of pairs took.
struct Batch {
    total_ns: u64,
    driver_calls: Option<u64>,
}

/// One allocator at one block size.
struct Case<'a> {
    name: &'static str,
    kind: Kind,
    /// Does a number of pairs.
    run: Box<dyn FnMut(u64) -> Result<Batch> + 'a>,
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
    let kinds = options
        .outstanding
        .iter()
        .flat_map(|&outstanding| options.sizes.iter().map(move |&size| Kind { size, outstanding }));
    for kind in kinds {
        let yardstick = Kind { size: SYSTEM_BLOCK, outstanding: 0 };
        let mut cases = vec![timed(&SystemMalloc, (), yardstick)?];
        if let Some((pool, stream)) = pool {
            let pairs = if bench.info().simulated { modelled } else { timed };
            cases.push(pairs(pool, stream, kind)?);
        }
        for (allocator, &stream) in allocators.iter().zip(&streams) {
            cases.push(timed(allocator, stream, kind)?);
        }
        groups.push(cases);
    }
    measure(&mut groups, bench.duration)?;
    let rows = rows(groups);
    allocators.into_iter().try_for_each(MeteredAllocator::close)?;
    Ok(rows)
}

/// Returns a case whose pairs are timed by the clock.
fn timed<S: Subject>(subject: &S, stream: S::Stream, kind: Kind) -> Result<Case<'_>> {
    let run = move |count| {
        let begun = Instant::now();
        pairs(subject, stream, kind, count, || nanos(begun.elapsed()))
    };
    case(subject, kind, TimeSource::Measured, Box::new(run))
}

/// Returns a case whose pairs are timed by the simulator's cost model.
fn modelled(pool: &DriverPool, stream: Stream, kind: Kind) -> Result<Case<'_>> {
    let run = move |count| pairs(pool, stream, kind, count, || pool.driver.now_ns());
    case(pool, kind, TimeSource::Modelled, Box::new(run))
}

/// Does `count` pairs and returns what they took by `clock`, without the blocks outstanding.
fn pairs<S: Subject>(
    subject: &S,
    stream: S::Stream,
    Kind { size, outstanding }: Kind,
    count: u64,
    clock: impl Fn() -> u64,
) -> Result<Batch> {
    let malloc = || {
        let block = subject.malloc(stream, black_box(size))?;
        black_box(S::address(&block));
        Ok::<_, anyhow::Error>(block)
    };
    // The preceding case may have left the memory in other sizes.
    subject.free(stream, malloc()?)?;
    let mut held = (0..outstanding).map(|_| malloc().map(Some)).collect::<Result<Vec<_>>>()?;
    let mut rng = Rng::with_seed(size.count());
    let (calls, begun) = (subject.driver_calls(), clock());
    for _ in 0..count {
        if held.is_empty() {
            subject.free(stream, malloc()?)?;
        } else {
            let slot = &mut held[rng.usize(..outstanding)];
            slot.take().map_or(Ok(()), |block| subject.free(stream, block))?;
            *slot = Some(malloc()?);
        }
    }
    let total_ns = clock() - begun;
    let driver_calls = calls.zip(subject.driver_calls()).map(|(before, after)| after - before);
    held.into_iter().flatten().try_for_each(|block| subject.free(stream, block))?;
    Ok(Batch { total_ns, driver_calls })
}

fn case<'a, S: Subject>(
    subject: &'a S,
    kind: Kind,
    time_is: TimeSource,
    mut run: Box<dyn FnMut(u64) -> Result<Batch> + 'a>,
) -> Result<Case<'a>> {
    let begun = Instant::now();
    run(WARM_PAIRS)?;
    // By the clock also where the time is modelled: the user waits for real time.
    let fitting = nanos(BATCH) * WARM_PAIRS / nanos(begun.elapsed()).max(1);
    Ok(Case {
        name: subject.name(),
        kind,
        run,
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
                let Batch { total_ns, driver_calls } = (case.run)(case.pairs_per_batch)?;
                let pair_ns = total_ns as f64 / case.pairs_per_batch as f64;
                if index == 0 {
                    malloc_ns = pair_ns;
                }
                case.counted = case.counted.zip(driver_calls).map(|(sum, calls)| sum + calls);
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
        size_bytes: case.kind.size.count(),
        outstanding: case.kind.outstanding as u64,
        batches: case.pair_ns.len() as u64,
        pairs: case.pair_ns.len() as u64 * case.pairs_per_batch,
        pair_ns: median(case.pair_ns),
        time_is: case.time_is,
        of_system_malloc: median(case.ratios),
        driver_calls: case.counted,
    }
}
