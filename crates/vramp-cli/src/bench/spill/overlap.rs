//! What work on the card loses to a buffer that leaves and comes back beside it, and what it loses to
//! plain copies of as much.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use vramp_alloc::{Bytes, Driver};
use vramp_core::{AddrRange, DeviceAddr};
use vramp_defer::{Access, DeferrableBuffer};
use vramp_driver::{DeviceCopy, Event, Stream};

use super::site::{Plain, Plan, Site};
use super::{ROUNDS_LEAST, gigabytes, millis, ratio, size, time_is};
use crate::bench::{Bench, Cell, Column, median};
use crate::count::Count;

/// How long a block of the work is, and how long a series takes about.
const BLOCK: Bytes = Bytes::gib(1);
const SERIES_NS: u64 = 200_000_000;
/// More would not fit into a stream's queue.
const SERIES_MOST: u64 = 512;
/// How often the host looks whether a series on the simulator is over.
const LOOK: Duration = Duration::from_micros(20);

/// One row.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    measure: &'static str,
    /// What the card does: `copy` or `fill`.
    work: &'static str,
    block_bytes: u64,
    pieces_of_work: u64,
    rounds: u64,
    alone_ns: f64,
    beside_ns: f64,
    /// The median of each round's ratio.
    slowdown: f64,
    /// The same beside plain copies there and back, as long as the buffer. None on a simulator, whose
    /// clock the copies would drive past the end of the work.
    plain_slowdown: Option<f64>,
    /// What left or came back while the series ran, in all rounds.
    moved_bytes: u64,
    moved_bytes_per_s: f64,
    time_is: &'static str,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Copy,
    Fill,
}

/// What goes on while a series runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    Something,
}

/// A series of work between two blocks.
struct Load<'a> {
    driver: &'a dyn Driver,
    queue: Stream,
    over: Event,
    blocks: [DeviceAddr; 2],
}

pub(super) fn measure(bench: &Bench, piece: Bytes, len: Bytes, shares: usize) -> Result<Vec<Row>> {
    let site = Site::new(bench, &Plan { piece, limit: None, host: len * 2 })?;
    let driver = &*site.driver;
    let block = || driver.alloc_memory(BLOCK).context("the card has no two blocks to work on");
    let blocks = [block()?, block()?];
    let load =
        Load { driver, queue: driver.create_stream()?, over: driver.create_event()?, blocks };
    let buffer = site.manager.buffer(len)?;
    site.write(&buffer)?;
    let plain = Plain::new(&site, len)?;
    let mut rows = Vec::new();
    for work in [Work::Copy, Work::Fill] {
        let few = load.series(work, 8, Beside::Nothing)?.max(8);
        let count = (SERIES_NS / (few / 8)).clamp(1, SERIES_MOST);
        let (mut alone, mut beside, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let mut plain_ratios = Vec::new();
        let mut moved = 0;
        let begun = Instant::now();
        while ratios.len() < ROUNDS_LEAST || begun.elapsed() < bench.duration / shares as u32 / 2 {
            let alone_ns = load.series(work, count, Beside::Nothing)? as f64;
            if !bench.info.simulated {
                let copies = || plain.to_host(len).and_then(|_| plain.to_device(len)).map(drop);
                let took_ns =
                    load.beside(&copies, || load.series(work, count, Beside::Something))?;
                plain_ratios.push(took_ns as f64 / alone_ns);
            }
            let (beside_ns, moved_now) = load.beside(&|| away_and_back(&site, &buffer), || {
                let before = bytes(&site);
                let took_ns = load.series(work, count, Beside::Something)?;
                Ok((took_ns, bytes(&site) - before))
            })?;
            let beside_ns = beside_ns as f64;
            moved += moved_now;
            alone.push(alone_ns);
            beside.push(beside_ns);
            ratios.push(beside_ns / alone_ns);
        }
        let beside_all: f64 = beside.iter().sum();
        rows.push(Row {
            measure: "overlap",
            work: work.name(),
            block_bytes: BLOCK.count(),
            pieces_of_work: count,
            rounds: ratios.len() as u64,
            alone_ns: median(alone),
            beside_ns: median(beside),
            slowdown: median(ratios),
            plain_slowdown: (!plain_ratios.is_empty()).then(|| median(plain_ratios)),
            moved_bytes: moved,
            moved_bytes_per_s: moved as f64 * 1e9 / beside_all,
            time_is: time_is(&bench.info),
        });
    }
    driver.destroy_event(load.over)?;
    driver.destroy_stream(load.queue)?;
    blocks.into_iter().try_for_each(|block| driver.free_memory(block))?;
    plain.close()?;
    drop(buffer);
    site.close()?;
    Ok(rows)
}

/// What left and came back so far.
fn bytes(site: &Site) -> u64 {
    let stats = site.stats();
    stats.to_host_bytes + stats.from_host_bytes
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Work::Copy => "copy",
            Work::Fill => "fill",
        }
    }
}

impl Load<'_> {
    /// How long so much work takes, from the first call until the host sees the last event.
    fn series(&self, work: Work, count: u64, beside: Beside) -> Result<u64> {
        let Load { driver, queue, over, blocks: [from, to] } = *self;
        let begun = driver.now_ns();
        for _ in 0..count {
            match work {
                Work::Copy => driver.copy(queue, DeviceCopy { from, to, len: BLOCK })?,
                Work::Fill => driver.fill(queue, AddrRange::new(to, BLOCK), 1)?,
            }
        }
        driver.record(over, queue)?;
        if beside == Beside::Something && driver.info().simulated {
            // Waiting would take its clock to the end at once, past all that goes on beside.
            while !driver.query(over)? {
                thread::sleep(LOOK);
            }
        } else {
            driver.synchronize_event(over)?;
        }
        Ok(driver.now_ns() - begun)
    }

    /// What `work` gives while another thread does something over and over again.
    fn beside<T>(
        &self,
        something: &(impl Fn() -> Result<()> + Sync),
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            let doing = scope.spawn(|| {
                let mut result = Ok(());
                while result.is_ok() && !over.load(Relaxed) {
                    begun.store(true, Relaxed);
                    result = something();
                }
                begun.store(true, Relaxed);
                result
            });
            while !begun.load(Relaxed) {
                thread::yield_now();
            }
            let worked = work();
            over.store(true, Relaxed);
            doing.join().map_err(|_| anyhow!("the thread beside panicked"))??;
            worked
        })
    }
}

/// Out with a copy, and in again. A lease to write counts as written, so no work is needed.
fn away_and_back(site: &Site, buffer: &DeferrableBuffer) -> Result<()> {
    site.spill(buffer)?;
    let lease = buffer.lease(Access::Exclusive, site.stream)?;
    site.finish()?;
    drop(lease);
    Ok(())
}

pub(super) const COLUMNS: [Column<Row>; 8] = [
    ("work beside", |row| Cell::Words(row.work.to_owned())),
    ("of", |row| size(row.block_bytes)),
    ("alone ms", |row| millis(row.alone_ns, row.time_is)),
    ("beside ms", |row| millis(row.beside_ns, row.time_is)),
    ("slowdown", |row| ratio(row.slowdown)),
    ("by plain copies", |row| row.plain_slowdown.map_or(Cell::Words("-".to_owned()), ratio)),
    ("moved GB/s", |row| gigabytes(row.moved_bytes_per_s, row.time_is)),
    ("rounds", |row| Cell::Number(Count(row.rounds).to_string())),
];
