//! Slowdown of work on the card beside a buffer that is spilled and restored continually, and
//! beside plain copies of the same length.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use vramp::defer::{Access, DeferrableBuffer};
use vramp::{Bytes, Driver};
use vramp_core::{AddrRange, DeviceAddr};
use vramp_driver::{DeviceCopy, Event, Stream};

use super::ROUNDS_MIN;
use super::rig::{PlainCopies, Rig, RigConfig};
use crate::statistics::median;
use crate::{Bench, TimeSource};

/// Length of each copy or fill.
const BLOCK: Bytes = Bytes::gib(1);
/// Approximate time of a series.
const SERIES_NS: u64 = 200_000_000;
/// More operations would not fit into a stream's queue.
const SERIES_MAX: u64 = 512;
/// Interval at which the host queries the end of a series on the simulator.
const QUERY_INTERVAL: Duration = Duration::from_micros(20);

/// The slowdown of one kind of work.
#[derive(Clone, Debug, Serialize)]
pub struct OverlapRow {
    /// `overlap`.
    pub measure: &'static str,
    /// Work of the card: `copy` or `fill`.
    pub work: &'static str,
    /// Length of each copy or fill.
    pub block_bytes: u64,
    /// Copies or fills in a series.
    pub pieces_of_work: u64,
    /// Number of rounds.
    pub rounds: u64,
    /// Time of a series alone.
    pub alone_ns: f64,
    /// Time of a series beside the buffer.
    pub beside_ns: f64,
    /// Median over rounds of the ratio of these times.
    pub slowdown: f64,
    /// The same beside plain copies in both directions, as long as the buffer. `None` on a
    /// simulator: the copies would advance its clock past the end of the work.
    pub plain_slowdown: Option<f64>,
    /// Bytes evicted or restored while the series ran, in all rounds.
    pub moved_bytes: u64,
    /// Their rate.
    pub moved_bytes_per_s: f64,
    /// Source of the times.
    pub time_is: TimeSource,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Copy,
    Fill,
}

/// Whether other copies run beside a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    Copies,
}

/// Two blocks on the card and a stream to work on them.
struct Load<'a> {
    driver: &'a dyn Driver,
    queue: Stream,
    done: Event,
    blocks: [DeviceAddr; 2],
}

pub(super) fn measure(
    bench: &Bench,
    piece: Bytes,
    len: Bytes,
    duration: Duration,
) -> Result<Vec<OverlapRow>> {
    let rig = Rig::new(bench, &RigConfig { piece, limit: None, pinned: len * 2 })?;
    let driver = &*rig.driver;
    let block =
        || driver.alloc_memory(BLOCK).context("the card has no room for two blocks to work on");
    let blocks = [block()?, block()?];
    let load =
        Load { driver, queue: driver.create_stream()?, done: driver.create_event()?, blocks };
    let buffer = rig.manager.buffer(len)?;
    rig.write(&buffer)?;
    let plain = PlainCopies::new(&rig, len)?;
    let mut rows = Vec::new();
    for work in [Work::Copy, Work::Fill] {
        let few = load.series(work, 8, Beside::Nothing)?.max(8);
        let count = (SERIES_NS / (few / 8)).clamp(1, SERIES_MAX);
        let (mut alone, mut beside, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let mut plain_ratios = Vec::new();
        let mut moved = 0;
        let begun = Instant::now();
        while ratios.len() < ROUNDS_MIN || begun.elapsed() < duration / 2 {
            let alone_ns = load.series(work, count, Beside::Nothing)? as f64;
            if !bench.info().simulated {
                let copies = || plain.to_host(len).and_then(|_| plain.to_device(len)).map(drop);
                let took_ns = load.beside(&copies, || load.series(work, count, Beside::Copies))?;
                plain_ratios.push(took_ns as f64 / alone_ns);
            }
            let (beside_ns, moved_now) =
                load.beside(&|| spill_and_restore(&rig, &buffer), || {
                    let before = moved_bytes(&rig);
                    let took_ns = load.series(work, count, Beside::Copies)?;
                    Ok((took_ns, moved_bytes(&rig) - before))
                })?;
            let beside_ns = beside_ns as f64;
            moved += moved_now;
            alone.push(alone_ns);
            beside.push(beside_ns);
            ratios.push(beside_ns / alone_ns);
        }
        let beside_all: f64 = beside.iter().sum();
        rows.push(OverlapRow {
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
            time_is: bench.time_source(),
        });
    }
    driver.destroy_event(load.done)?;
    driver.destroy_stream(load.queue)?;
    blocks.into_iter().try_for_each(|block| driver.free_memory(block))?;
    plain.close()?;
    drop(buffer);
    rig.close()?;
    Ok(rows)
}

/// Returns the bytes evicted and restored so far.
fn moved_bytes(rig: &Rig) -> u64 {
    let stats = rig.stats();
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
    /// Returns the time of `count` operations, from the first call until the host sees the event.
    fn series(&self, work: Work, count: u64, beside: Beside) -> Result<u64> {
        let Load { driver, queue, done, blocks: [from, to] } = *self;
        let begun = driver.now_ns();
        for _ in 0..count {
            match work {
                Work::Copy => driver.copy(queue, DeviceCopy { from, to, len: BLOCK })?,
                Work::Fill => driver.fill(queue, AddrRange::new(to, BLOCK), 1)?,
            }
        }
        driver.record(done, queue)?;
        if beside == Beside::Copies && driver.info().simulated {
            // A wait would advance its clock to the end at once, past the copies beside.
            while !driver.query(done)? {
                thread::sleep(QUERY_INTERVAL);
            }
        } else {
            driver.synchronize_event(done)?;
        }
        Ok(driver.now_ns() - begun)
    }

    /// Runs `work` while another thread repeats `copies`.
    fn beside<T>(
        &self,
        copies: &(impl Fn() -> Result<()> + Sync),
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (begun, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            let repeating = scope.spawn(|| {
                let mut result = Ok(());
                while result.is_ok() && !stop.load(Relaxed) {
                    begun.store(true, Relaxed);
                    result = copies();
                }
                begun.store(true, Relaxed);
                result
            });
            while !begun.load(Relaxed) {
                thread::yield_now();
            }
            let worked = work();
            stop.store(true, Relaxed);
            repeating.join().map_err(|_| anyhow!("the copying thread panicked"))??;
            worked
        })
    }
}

/// Spills with a copy, and restores. An exclusive lease makes the buffer dirty without any work.
fn spill_and_restore(rig: &Rig, buffer: &DeferrableBuffer) -> Result<()> {
    rig.spill(buffer)?;
    let lease = buffer.lease(Access::Exclusive, rig.stream)?;
    rig.synchronize()?;
    drop(lease);
    Ok(())
}
