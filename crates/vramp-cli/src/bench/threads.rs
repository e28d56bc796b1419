//! `vramp bench threads`: pairs on several threads at once, each with a stream of its own.

use std::hint::black_box;
use std::io::Write;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use fastrand::Rng;
use serde::Serialize;
use vramp_alloc::Bytes;

use super::args::{Sizes, Threads};
use super::subject::{DriverPool, Managed, Subject, System};
use super::{Bench, Cell, Column, median};
use crate::count::Count;

/// Blocks that a thread holds.
const OUTSTANDING: usize = 32;
const LEAST: u64 = 512;
const MOST: u64 = 4 << 20;
/// How many sizes a thread draws ahead, and then goes round.
const DRAWN: usize = 4096;
const COUNTS: [u16; 5] = [1, 2, 4, 8, 16];
/// How often everything is measured.
const ROUNDS: u32 = 3;

/// One row.
#[derive(Debug, Serialize)]
struct Row {
    allocator: &'static str,
    sizes: &'static str,
    outstanding: u64,
    threads: u64,
    rounds: u64,
    pairs: u64,
    pairs_per_s: f64,
    of_one_thread: Option<f64>,
    driver_calls: Option<u64>,
}

/// One subject on so many threads.
struct Case<'a> {
    name: &'static str,
    threads: u16,
    run: Box<dyn Fn(Duration) -> Result<Tally> + 'a>,
    tallies: Vec<Tally>,
}

/// What all threads did together.
struct Tally {
    pairs: u64,
    seconds: f64,
    driver_calls: Option<u64>,
}

pub(super) fn run(args: &Threads, out: &mut dyn Write) -> Result<()> {
    let bench = Bench::open(&args.common, out)?;
    let cores = thread::available_parallelism()?.get();
    let counts: Vec<u16> = match &args.threads[..] {
        [] => COUNTS.into_iter().filter(|&count| usize::from(count) <= cores).collect(),
        given => given.to_vec(),
    };
    // The simulator's pool has one lock and no memory behind it: it says nothing of a card's.
    let pool = if bench.info.simulated { None } else { DriverPool::of(bench.driver()?)? };
    let mut managed = Vec::new();
    for &preset in &args.common.allocator.0 {
        managed.push(Managed::new(bench.driver()?, preset, None)?);
    }
    let most = counts.iter().copied().max().unwrap_or(1);
    let mut cases = cases_of(&System, &counts, most, args.sizes)?;
    if let Some(pool) = &pool {
        cases.extend(cases_of(pool, &counts, most, args.sizes)?);
    }
    for managed in &managed {
        cases.extend(cases_of(managed, &counts, most, args.sizes)?);
    }
    let each = bench.duration / (ROUNDS * cases.len() as u32);
    for _ in 0..ROUNDS {
        for case in &mut cases {
            case.tallies.push((case.run)(each)?);
        }
    }
    bench.write(out, "threads", &rows(cases, args.sizes), &COLUMNS)?;
    if !bench.json && counts.iter().any(|&count| usize::from(count) > cores) {
        writeln!(out, "This machine runs {cores} threads at a time: more of them take turns.")?;
    }
    managed.into_iter().try_for_each(Managed::close)?;
    Ok(())
}

/// One case for each number of threads, all on the same streams.
fn cases_of<'a, S: Subject>(
    subject: &'a S,
    counts: &[u16],
    most: u16,
    sizes: Sizes,
) -> Result<Vec<Case<'a>>> {
    let lanes = (0..most).map(|_| subject.new_lane()).collect::<Result<Vec<_>>>()?;
    let case = |&threads: &u16| {
        let lanes = lanes[..usize::from(threads)].to_vec();
        let run = move |duration| together(subject, &lanes, duration, sizes);
        Case { name: subject.name(), threads, run: Box::new(run), tallies: Vec::new() }
    };
    Ok(counts.iter().map(case).collect())
}

/// Runs a thread on each lane until the time is over.
fn together<S: Subject>(
    subject: &S,
    lanes: &[S::Lane],
    duration: Duration,
    sizes: Sizes,
) -> Result<Tally> {
    let (warm, done) = (Barrier::new(lanes.len() + 1), AtomicBool::new(false));
    let work = |index: usize, lane: S::Lane| {
        let mut rng = Rng::with_seed(index as u64);
        let drawn: Vec<Bytes> = (0..DRAWN).map(|_| draw(&mut rng, sizes)).collect();
        let mut held: Vec<Option<S::Block>> = (0..OUTSTANDING).map(|_| None).collect();
        let mut sizes = drawn.into_iter().cycle();
        let mut step = || replace(subject, lane, &mut held, &mut rng, &mut sizes);
        let filled = (0..DRAWN).try_for_each(|_| step());
        warm.wait();
        let mut pairs = 0;
        let ran = filled.and_then(|()| {
            while !done.load(Ordering::Relaxed) {
                step()?;
                pairs += 1;
            }
            Ok(())
        });
        let freed = held.into_iter().flatten().try_for_each(|block| subject.give(lane, block));
        ran.and(freed).map(|()| pairs)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = lanes
            .iter()
            .enumerate()
            .map(|(index, &lane)| {
                let work = &work;
                scope.spawn(move || work(index, lane))
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

/// Frees one of the blocks held and takes another.
fn replace<S: Subject>(
    subject: &S,
    lane: S::Lane,
    held: &mut [Option<S::Block>],
    rng: &mut Rng,
    sizes: &mut impl Iterator<Item = Bytes>,
) -> Result<()> {
    let slot = &mut held[rng.usize(..OUTSTANDING)];
    if let Some(block) = slot.take() {
        subject.give(lane, block)?;
    }
    let size = sizes.next().expect("the sizes go round");
    let block = subject.take(lane, size)?;
    black_box(S::place(&block));
    *slot = Some(block);
    Ok(())
}

fn draw(rng: &mut Rng, sizes: Sizes) -> Bytes {
    Bytes::new(match sizes {
        Sizes::Uniform => rng.u64(LEAST..=MOST),
        Sizes::LogUniform => {
            let doublings = rng.f64() * (MOST as f64 / LEAST as f64).log2();
            (LEAST as f64 * doublings.exp2()) as u64
        }
    })
}

fn rows(cases: Vec<Case<'_>>, sizes: Sizes) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for Case { name, threads, tallies, .. } in cases {
        let rate = median(tallies.iter().map(|tally| tally.pairs as f64 / tally.seconds).collect());
        let alone = rows.iter().find(|row| row.allocator == name && row.threads == 1);
        let one = if threads == 1 { Some(rate) } else { alone.map(|row| row.pairs_per_s) };
        rows.push(Row {
            allocator: name,
            sizes: sizes.name(),
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

const COLUMNS: [Column<Row>; 6] = [
    ("allocator", |row| Cell::Words(row.allocator.to_owned())),
    ("sizes", |row| Cell::Words(row.sizes.to_owned())),
    ("threads", |row| Cell::Number(row.threads.to_string())),
    ("million pairs a second", |row| Cell::Number(format!("{:.3}", row.pairs_per_s / 1e6))),
    ("of one thread", |row| {
        Cell::Number(row.of_one_thread.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")))
    }),
    ("driver calls", |row| match row.driver_calls {
        Some(calls) => Cell::Number(Count(calls).to_string()),
        None => Cell::Number("2 a pair".to_owned()),
    }),
];
