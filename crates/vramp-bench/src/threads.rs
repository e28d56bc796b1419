//! Malloc/free pairs on several threads at once, each with a stream of its own.
//!
//! Each thread holds 32 blocks of random sizes. It frees one of them at random and allocates
//! another, until the time is over. The sizes and their order are the same for every allocator.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use fastrand::Rng;
use serde::Serialize;
use vramp::Bytes;
use vramp::peers::Preset;

use crate::Bench;
use crate::statistics::median;
use crate::subject::{DriverPool, MeteredAllocator, Subject, SystemMalloc};

/// Live blocks of each thread.
const OUTSTANDING: usize = 32;
const SIZE_MIN: u64 = 512;
const SIZE_MAX: u64 = 4 << 20;
/// Sizes that a thread draws ahead of time and then repeats.
const SIZES_DRAWN: usize = 4096;
const USUAL_COUNTS: [u16; 5] = [1, 2, 4, 8, 16];
/// How often each case is measured.
const ROUNDS: u32 = 3;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Allocators to measure, in order.
    pub presets: Vec<Preset>,
    /// Numbers of threads; 1, 2, 4, 8, 16 up to the machine's cores if empty.
    pub threads: Vec<u16>,
    /// Distribution of block sizes.
    pub sizes: SizeDistribution,
}

/// Distribution of block sizes from 512 B to 4 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SizeDistribution {
    /// Every size is equally likely.
    Uniform,
    /// Every size class is equally likely: as many sizes from 512 B to 1 KiB as from 2 to 4 MiB.
    LogUniform,
}

/// The result for one allocator and number of threads.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The allocator's name.
    pub allocator: &'static str,
    /// Distribution of block sizes.
    pub sizes: SizeDistribution,
    /// Live blocks of each thread.
    pub outstanding: u64,
    /// Number of threads.
    pub threads: u64,
    /// Number of measurements.
    pub rounds: u64,
    /// Pairs in all rounds.
    pub pairs: u64,
    /// Pairs a second of all threads together, the median over rounds.
    pub pairs_per_s: f64,
    /// Ratio to the same allocator on one thread, where that was measured.
    pub of_one_thread: Option<f64>,
    /// Driver calls in all rounds; `None` for the driver's own pool.
    pub driver_calls: Option<u64>,
}

/// One allocator with a number of threads.
struct Case<'a> {
    name: &'static str,
    threads: u16,
    run: Box<dyn Fn(Duration) -> Result<Tally> + 'a>,
    tallies: Vec<Tally>,
}

/// Totals of all threads in one round.
struct Tally {
    pairs: u64,
    seconds: f64,
    driver_calls: Option<u64>,
}

/// Measures the system's malloc, on a card the driver's own pool, and each allocator.
///
/// # Errors
/// An allocator or the driver fails.
pub fn run(bench: &Bench, options: &Options) -> Result<Vec<Row>> {
    let counts: Vec<u16> = match &options.threads[..] {
        [] => {
            let cores = thread::available_parallelism()?.get();
            USUAL_COUNTS.into_iter().filter(|&count| usize::from(count) <= cores).collect()
        }
        given => given.to_vec(),
    };
    // The simulated pool has one lock and no memory: its throughput is not a card's.
    let pool = if bench.info().simulated { None } else { DriverPool::of(bench.driver()?)? };
    let mut allocators = Vec::new();
    for &preset in &options.presets {
        allocators.push(MeteredAllocator::new(bench.driver()?, preset, None)?);
    }
    let mut cases = cases_of(&SystemMalloc, &counts, options.sizes)?;
    if let Some(pool) = &pool {
        cases.extend(cases_of(pool, &counts, options.sizes)?);
    }
    for allocator in &allocators {
        cases.extend(cases_of(allocator, &counts, options.sizes)?);
    }
    let each = bench.duration / (ROUNDS * cases.len() as u32);
    for _ in 0..ROUNDS {
        for case in &mut cases {
            case.tallies.push((case.run)(each)?);
        }
    }
    let rows = rows(cases, options.sizes);
    allocators.into_iter().try_for_each(MeteredAllocator::close)?;
    Ok(rows)
}

/// Returns one case for each number of threads, all on the same streams.
fn cases_of<'a, S: Subject>(
    subject: &'a S,
    counts: &[u16],
    sizes: SizeDistribution,
) -> Result<Vec<Case<'a>>> {
    let most = counts.iter().copied().max().unwrap_or(1);
    let streams = (0..most).map(|_| subject.create_stream()).collect::<Result<Vec<_>>>()?;
    let case = |&threads: &u16| {
        let streams = streams[..usize::from(threads)].to_vec();
        let run = move |duration| together(subject, &streams, duration, sizes);
        Case { name: subject.name(), threads, run: Box::new(run), tallies: Vec::new() }
    };
    Ok(counts.iter().map(case).collect())
}

/// Runs a thread on each stream until the time is over.
fn together<S: Subject>(
    subject: &S,
    streams: &[S::Stream],
    duration: Duration,
    sizes: SizeDistribution,
) -> Result<Tally> {
    let (warm, done) = (Barrier::new(streams.len() + 1), AtomicBool::new(false));
    let work = |index: usize, stream: S::Stream| {
        let mut rng = Rng::with_seed(index as u64);
        let drawn: Vec<Bytes> = (0..SIZES_DRAWN).map(|_| draw(&mut rng, sizes)).collect();
        let mut live: Vec<Option<S::Block>> = (0..OUTSTANDING).map(|_| None).collect();
        let mut sizes = drawn.into_iter().cycle();
        let mut step = || replace(subject, stream, &mut live, &mut rng, &mut sizes);
        let filled = (0..SIZES_DRAWN).try_for_each(|_| step());
        warm.wait();
        let mut pairs = 0;
        let ran = filled.and_then(|()| {
            while !done.load(Ordering::Relaxed) {
                step()?;
                pairs += 1;
            }
            Ok(())
        });
        let freed = live.into_iter().flatten().try_for_each(|block| subject.free(stream, block));
        ran.and(freed).map(|()| pairs)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = streams
            .iter()
            .enumerate()
            .map(|(index, &stream)| {
                let work = &work;
                scope.spawn(move || work(index, stream))
            })
            .collect();
        warm.wait();
        let calls = subject.driver_calls();
        let begun = Instant::now();
        thread::sleep(duration);
        done.store(true, Ordering::Relaxed);
        let seconds = begun.elapsed().as_secs_f64();
        let driver_calls = calls.zip(subject.driver_calls()).map(|(before, after)| after - before);
        let mut pairs = 0;
        for thread in threads {
            pairs += thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        Ok(Tally { pairs, seconds, driver_calls })
    })
}

/// Frees one of the live blocks and allocates another.
fn replace<S: Subject>(
    subject: &S,
    stream: S::Stream,
    live: &mut [Option<S::Block>],
    rng: &mut Rng,
    sizes: &mut impl Iterator<Item = Bytes>,
) -> Result<()> {
    let slot = &mut live[rng.usize(..OUTSTANDING)];
    if let Some(block) = slot.take() {
        subject.free(stream, block)?;
    }
    let size = sizes.next().expect("the sizes repeat for ever");
    let block = subject.malloc(stream, size)?;
    black_box(S::address(&block));
    *slot = Some(block);
    Ok(())
}

fn draw(rng: &mut Rng, sizes: SizeDistribution) -> Bytes {
    Bytes::new(match sizes {
        SizeDistribution::Uniform => rng.u64(SIZE_MIN..=SIZE_MAX),
        SizeDistribution::LogUniform => {
            let doublings = rng.f64() * (SIZE_MAX as f64 / SIZE_MIN as f64).log2();
            (SIZE_MIN as f64 * doublings.exp2()) as u64
        }
    })
}

fn rows(cases: Vec<Case<'_>>, sizes: SizeDistribution) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for Case { name, threads, tallies, .. } in cases {
        let rate = median(tallies.iter().map(|tally| tally.pairs as f64 / tally.seconds).collect());
        let alone = rows.iter().find(|row| row.allocator == name && row.threads == 1);
        let one = if threads == 1 { Some(rate) } else { alone.map(|row| row.pairs_per_s) };
        rows.push(Row {
            allocator: name,
            sizes,
            outstanding: OUTSTANDING as u64,
            threads: u64::from(threads),
            rounds: u64::from(ROUNDS),
            pairs: tallies.iter().map(|tally| tally.pairs).sum(),
            pairs_per_s: rate,
            of_one_thread: one.map(|one| rate / one),
            driver_calls: tallies.iter().map(|tally| tally.driver_calls).sum(),
        });
    }
    rows
}
