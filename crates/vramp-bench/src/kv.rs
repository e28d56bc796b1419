//! Costs of arenas for caches.
//!
//! An arena of many tensors is reserved, its pages are committed cold, ready, parked, in superpages and one by
//! one, parked and released. Each step is repeated on pages that were not used before, as far as it makes
//! them. At last a series of fills is timed alone and beside a thread that commits and releases pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use serde::Serialize;
use vramp::kv::{Arena, Arrangement, Layout, Options as ArenaOptions};
use vramp::peers::Preset;
use vramp::{Bytes, Driver, StreamId};
use vramp_core::AddrRange;

use crate::subject::{MeteredAllocator, Subject};
use crate::{Bench, Cost, TimeSource, statistics};

/// Pages of a superpage.
const SUPERPAGE: u32 = 16;
/// Bytes of one fill in a series.
const FILL: Bytes = Bytes::gib(4);
/// Fills in a series.
const FILLS: usize = 64;
/// Series of each kind; they alternate.
const SERIES: usize = 5;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Tensors of the arena.
    pub tensors: u32,
    /// Length of each.
    pub each: Bytes,
    /// Repetitions of each step.
    pub rounds: u32,
}

/// The result for one step.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The step.
    pub what: &'static str,
    /// How the tensors lie.
    pub arrangement: &'static str,
    /// Tensors of the arena.
    pub tensors: u32,
    /// Pages of each tensor that one step has.
    pub pages: u32,
    /// Number of timed steps.
    pub steps: u64,
    /// Host time of the slowest of a hundred steps, or of the slowest one.
    pub p99_ns: u64,
    /// Median cost of a step.
    #[serde(flatten)]
    pub cost: Cost,
}

/// Fills of the card alone, and beside commits and releases.
#[derive(Clone, Debug, Serialize)]
pub struct BesideRow {
    /// What went on beside.
    pub beside: &'static str,
    /// Median time of a series.
    pub series_ns: f64,
    /// Median of its time over that of the series before it, which ran alone.
    pub over_alone: f64,
    /// Source of the times.
    pub time_is: TimeSource,
    /// Pages of all tensors that were released meanwhile.
    pub released: u64,
}

/// Measures the steps, with separate tensors and with interleaved ones.
///
/// # Errors
/// The allocator fails, or the tensors have too few pages for the rounds.
pub fn run(bench: &Bench, options: &Options) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for arrangement in [Arrangement::Separate, Arrangement::Interleaved] {
        let mut steps = Steps::new(bench, options, arrangement)?;
        rows.push(steps.start()?);
        rows.extend(steps.measure()?);
    }
    Ok(rows)
}

struct Steps<'a> {
    options: &'a Options,
    layout: Layout,
    allocator: MeteredAllocator,
    stream: StreamId,
}

impl<'a> Steps<'a> {
    fn new(bench: &Bench, options: &'a Options, arrangement: Arrangement) -> Result<Steps<'a>> {
        let allocator = MeteredAllocator::new(bench.driver()?, Preset::Vramp, None)?;
        let stream = allocator.create_stream()?;
        let page = allocator.allocator.driver().info().limits.page;
        let layout =
            Layout { tensors: options.tensors, bytes_each: options.each, page, arrangement };
        let pages = u32::try_from(options.each.count() / page.count()).unwrap_or(u32::MAX);
        let needed = options.rounds.saturating_mul(2 + SUPERPAGE + 2).saturating_add(2 * SUPERPAGE);
        ensure!(
            pages >= needed,
            "{} rounds need {needed} pages of a tensor, which has {pages}: fewer rounds or longer tensors",
            options.rounds
        );
        Ok(Steps { options, layout, allocator, stream })
    }

    fn arena(&self, superpage: u32, ahead: u32) -> Result<Arena> {
        let page = self.layout.page;
        let all = page * u64::from(self.layout.tensors);
        let options = ArenaOptions {
            superpage: page * u64::from(superpage),
            ahead: all * u64::from(ahead),
            ..ArenaOptions::default()
        };
        Ok(self.allocator.allocator.kv_arena(self.layout, options)?)
    }

    fn start(&mut self) -> Result<Row> {
        self.repeated("start", 0, |steps, _| {
            let mut made = None;
            let cost = steps.allocator.cost_of(|| {
                made = Some(steps.arena(SUPERPAGE, 0)?);
                Ok(())
            });
            drop(made);
            cost
        })
    }

    /// Costs of so many rounds; `once` has the number of the round.
    fn repeated(
        &self,
        what: &'static str,
        pages: u32,
        mut once: impl FnMut(&Self, u32) -> Result<Cost>,
    ) -> Result<Row> {
        let costs: Result<Vec<Cost>> = (0..self.options.rounds).map(|n| once(self, n)).collect();
        let costs = costs?;
        let mut host: Vec<u64> = costs.iter().map(|cost| cost.host_ns).collect();
        host.sort_unstable();
        Ok(Row {
            what,
            arrangement: match self.layout.arrangement {
                Arrangement::Separate => "separate",
                Arrangement::Interleaved => "interleaved",
            },
            tensors: self.layout.tensors,
            pages,
            steps: costs.len() as u64,
            p99_ns: host[(host.len() * 99 / 100).min(host.len() - 1)],
            cost: Cost::median(&costs).expect("there is a round"),
        })
    }

    fn measure(&mut self) -> Result<Vec<Row>> {
        let (rounds, stream) = (self.options.rounds, self.stream);
        let cache = self.arena(SUPERPAGE, 0)?;
        let mut rows = Vec::new();
        // Every other page: no two are neighbours.
        rows.push(self.repeated("commit cold", 1, |steps, n| {
            let page = n * 2;
            steps.allocator.cost_of(|| Ok(cache.commit(page..page + 1, stream)?))
        })?);
        rows.push(self.repeated("park", 1, |steps, n| {
            steps.allocator.cost_of(|| Ok(cache.park(n * 2..n * 2 + 1, stream)?))
        })?);
        rows.push(self.repeated("commit parked", 1, |steps, n| {
            steps.allocator.cost_of(|| Ok(cache.commit(n * 2..n * 2 + 1, stream)?))
        })?);
        let first = (rounds * 2).next_multiple_of(SUPERPAGE);
        rows.push(self.repeated("commit cold, superpage", SUPERPAGE, |steps, n| {
            let page = first + n * SUPERPAGE;
            steps.allocator.cost_of(|| Ok(cache.commit(page..page + SUPERPAGE, stream)?))
        })?);
        self.synchronize()?;
        rows.push(self.repeated("release", 1, |steps, n| {
            cache.park(n * 2..n * 2 + 1, stream)?;
            steps.allocator.cost_of(|| {
                let released = cache.release(Bytes::ZERO)?;
                ensure!(!released.is_zero(), "nothing was released");
                Ok(())
            })
        })?);
        drop(cache);
        self.allocator.allocator.trim(Bytes::ZERO)?;
        let cache = self.arena(1, 4)?;
        cache.commit(0..2, stream)?;
        rows.push(self.repeated("commit ready", 1, |steps, n| {
            wait_until_ready(&cache)?;
            let page = 2 + n;
            steps.allocator.cost_of(|| Ok(cache.commit(page..page + 1, stream)?))
        })?);
        drop(cache);
        self.allocator.allocator.trim(Bytes::ZERO)?;
        Ok(rows)
    }

    fn synchronize(&self) -> Result<()> {
        let queue = self.allocator.allocator.stream(self.stream);
        let queue = queue.ok_or_else(|| anyhow!("the stream was destroyed"))?;
        Ok(self.allocator.meter.synchronize_stream(queue)?)
    }
}

/// Waits until pages are ready that were made ahead. A commit of one of them that misses makes more.
fn wait_until_ready(cache: &Arena) -> Result<()> {
    let begun = Instant::now();
    loop {
        let stats = cache.stats();
        if stats.parked > 0 && stats.moving == 0 {
            return Ok(());
        }
        if stats.parked == 0 && stats.moving == 0 && begun.elapsed() > Duration::from_secs(5) {
            return Err(anyhow!("no page was made ready within 5 s"));
        }
        thread::yield_now();
    }
}

/// Times fills of the card alone, and beside a thread that commits and releases pages of all tensors.
///
/// # Errors
/// The allocator fails.
pub fn beside(bench: &Bench, options: &Options) -> Result<Vec<BesideRow>> {
    let steps = Steps::new(bench, options, Arrangement::Separate)?;
    let cache = steps.arena(1, 0)?;
    let allocator = &steps.allocator.allocator;
    let driver: Arc<dyn Driver> = Arc::clone(allocator.driver());
    let block = allocator.malloc(FILL, steps.stream)?;
    let range = AddrRange::new(block.addr(), FILL);
    let queue =
        allocator.stream(steps.stream).ok_or_else(|| anyhow!("the stream was destroyed"))?;
    let work = allocator.create_stream()?;
    let series = || -> Result<f64> {
        let begun = driver.now_ns();
        for _ in 0..FILLS {
            driver.fill(queue, range, 1)?;
        }
        driver.synchronize_stream(queue)?;
        Ok((driver.now_ns() - begun) as f64)
    };
    series()?;
    let (mut alone, mut beside, mut over) = (Vec::new(), Vec::new(), Vec::new());
    let mut released = 0;
    for _ in 0..SERIES {
        let before = series()?;
        let (stop, cache) = (AtomicBool::new(false), &cache);
        let (time, pages) = thread::scope(|scope| -> Result<(f64, u64)> {
            let churn = scope.spawn(|| -> Result<u64> {
                let mut pages = 0;
                while !stop.load(Relaxed) {
                    cache.commit([0..1, 2..3], work)?;
                    cache.park([0..1, 2..3], work)?;
                    pages += cache.release(Bytes::ZERO)?.count() / cache.stats().page_bytes.count();
                }
                Ok(pages)
            });
            let time = series();
            stop.store(true, Relaxed);
            let pages = churn.join().map_err(|_| anyhow!("the thread that commits panicked"))??;
            Ok((time?, pages))
        })?;
        released += pages;
        alone.push(before);
        beside.push(time);
        over.push(time / before);
    }
    allocator.free(block, steps.stream).map_err(|error| anyhow!("{error}"))?;
    let time_is = bench.time_source();
    let alone_ns = statistics::median(alone);
    Ok(vec![
        BesideRow { beside: "nothing", series_ns: alone_ns, over_alone: 1.0, time_is, released: 0 },
        BesideRow {
            beside: "commits and releases",
            series_ns: statistics::median(beside),
            over_alone: statistics::median(over),
            time_is,
            released,
        },
    ])
}
