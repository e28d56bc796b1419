//! The mover, which copies in steps, beside plain copies of the same length.
//!
//! For each size and direction, in turn: one plain copy from or to one pinned buffer on one stream
//! (two streams for both directions at once), and a mover, which copies in steps on two streams a
//! direction from or to blocks of a host pool. Time is measured from the first call until the host
//! sees the completion. The first round is for warming up.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use vramp::tiers::host::{HostAllocation, HostPoolConfig};
use vramp::tiers::movers::{MoverConfig, wait_all};
use vramp::tiers::space::Level;
use vramp::tiers::{HostPool, Mover, ReservationManager, SpaceConfig, SpaceId};
use vramp::{Bytes, Driver};
use vramp_core::AddrRange;
use vramp_driver::meter::Metered;
use vramp_driver::{DeviceInfo, HostBuffer, HostSlice, Stream};

use crate::statistics::median;
use crate::{Bench, TimeSource};

/// Fewer rounds give no stable median.
const ROUNDS_MIN: usize = 5;
/// Bytes to copy in a round: smaller sizes are copied several times.
const BYTES_PER_ROUND: Bytes = Bytes::mib(64);
const COPIES_PER_ROUND_MAX: u64 = 16;
/// Largest size on a card and on a simulator, whose pinned memory is real.
const LARGEST: [Bytes; 2] = [Bytes::gib(4), Bytes::mib(256)];

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sizes to copy; 1 MiB to the largest in steps of four times if empty.
    pub sizes: Vec<Bytes>,
    /// Bytes that the mover queues at a time.
    pub step: Bytes,
    /// Use host blocks of which no two are adjacent, so that each needs a copy of its own.
    pub scattered: bool,
}

/// The result for one size and direction.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Direction of the copies.
    pub direction: Direction,
    /// Bytes copied in each direction.
    pub size_bytes: u64,
    /// Bytes that the mover queues at a time.
    pub step_bytes: u64,
    /// True if no two host blocks are adjacent.
    pub scattered: bool,
    /// Number of timed moves.
    pub moves: u64,
    /// Rate of the plain copies.
    pub plain_bytes_per_s: f64,
    /// Rate of the mover.
    pub mover_bytes_per_s: f64,
    /// Ratio of the mover's rate to the plain one's.
    pub of_plain: f64,
    /// Driver calls of one move.
    pub driver_calls_each: u64,
    /// Source of the times.
    pub time_is: TimeSource,
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Direction {
    /// From the card to the host.
    #[serde(rename = "to host")]
    ToHost,
    /// From the host to the card.
    #[serde(rename = "to device")]
    ToDevice,
    /// Both at once.
    #[serde(rename = "both")]
    Both,
}

impl Direction {
    const ALL: [Direction; 3] = [Direction::ToHost, Direction::ToDevice, Direction::Both];
}

/// One size in one direction, with the times so far.
struct Case {
    direction: Direction,
    size: Bytes,
    plain_ns: Vec<f64>,
    mover_ns: Vec<f64>,
    ratios: Vec<f64>,
    driver_calls: u64,
}

impl Case {
    fn new(size: Bytes, direction: Direction) -> Case {
        Case {
            direction,
            size,
            plain_ns: Vec::new(),
            mover_ns: Vec::new(),
            ratios: Vec::new(),
            driver_calls: 0,
        }
    }
}

/// Measures every size in every direction.
///
/// # Errors
/// A size or the step is out of range, memory lacks, or the driver fails.
pub fn run(bench: &Bench, options: &Options) -> Result<Vec<Row>> {
    let sizes = sizes(options, bench.info())?;
    let largest = sizes.iter().copied().max().unwrap_or_default();
    let mut rig = Rig::new(bench, options, largest)?;
    let each =
        sizes.iter().flat_map(|&size| Direction::ALL.map(|direction| Case::new(size, direction)));
    let mut cases: Vec<Case> = each.collect();
    let begun = Instant::now();
    let mut round = 0;
    while round <= ROUNDS_MIN || begun.elapsed() < bench.duration {
        for case in &mut cases {
            let fitting = BYTES_PER_ROUND.count() / case.size.count();
            for _ in 0..fitting.clamp(1, COPIES_PER_ROUND_MAX) {
                rig.compare(case, round > 0)?;
            }
        }
        round += 1;
    }
    rig.close()?;
    Ok(cases.into_iter().map(|case| row(options, bench.time_source(), case)).collect())
}

fn sizes(options: &Options, info: &DeviceInfo) -> Result<Vec<Bytes>> {
    let largest = LARGEST[usize::from(info.simulated)];
    if !options.sizes.is_empty() {
        let fit = |size: &&Bytes| !size.is_zero() && **size <= largest;
        let all = options.sizes.iter().all(|size| fit(&size));
        ensure!(all, "give sizes from 1 B to {largest} on {}", info.id);
        return Ok(options.sizes.clone());
    }
    let powers = (0..).map(|power| Bytes::mib(1 << (2 * power)));
    Ok(powers.take_while(|size| *size <= largest).collect())
}

/// The device, plain pinned memory, and a mover with its blocks, all for both directions.
struct Rig {
    driver: Arc<dyn Driver>,
    meter: Arc<Metered<Arc<dyn Driver>>>,
    memory: [AddrRange; 2],
    pinned: [HostBuffer; 2],
    streams: [Stream; 2],
    mover: Mover,
    blocks: [Option<HostAllocation>; 2],
}

const RETURNED: &str = "each move returns its blocks";

impl Rig {
    fn new(bench: &Bench, options: &Options, largest: Bytes) -> Result<Rig> {
        let meter = Arc::new(Metered::new(bench.driver()?));
        let driver: Arc<dyn Driver> = Arc::clone(&meter) as _;
        let pool = pool(&driver, options.scattered, largest)?;
        let config = MoverConfig { step: options.step, ..MoverConfig::default() };
        let mover = Mover::new(Arc::clone(&driver), &pool, config)?;
        let blocks = |pool: &HostPool| match options.scattered {
            false => Ok(pool.allocate(largest)?),
            true => scattered(pool, largest),
        };
        let blocks = [Some(blocks(&pool)?), Some(blocks(&pool)?)];
        let memory = || {
            let at = driver.alloc_memory(largest);
            let at = at.with_context(|| format!("the card has no room for {largest} twice"))?;
            anyhow::Ok(AddrRange::new(at, largest))
        };
        let memory = [memory()?, memory()?];
        let pinned = [driver.alloc_host(largest)?, driver.alloc_host(largest)?];
        let streams = [driver.create_stream()?, driver.create_stream()?];
        Ok(Rig { driver, meter, memory, pinned, streams, mover, blocks })
    }

    /// Does one plain copy in each direction of the case, and then the same by the mover.
    fn compare(&mut self, case: &mut Case, timed: bool) -> Result<()> {
        let plain_ns = self.plain_ns(case.direction, case.size)? as f64;
        let before = self.meter.snapshot().total().calls;
        let mover_ns = self.mover_ns(case.direction, case.size)? as f64;
        case.driver_calls = self.meter.snapshot().total().calls - before;
        if timed {
            case.plain_ns.push(plain_ns);
            case.mover_ns.push(mover_ns);
            case.ratios.push(plain_ns / mover_ns);
        }
        Ok(())
    }

    fn plain_ns(&self, direction: Direction, size: Bytes) -> Result<u64> {
        let Rig { driver, memory, pinned, streams, .. } = self;
        let slice = |buffer| HostSlice { buffer, offset: Bytes::ZERO, len: size };
        let begun = driver.now_ns();
        if direction != Direction::ToDevice {
            driver.copy_to_host(streams[0], memory[0].start, slice(pinned[0]))?;
        }
        if direction != Direction::ToHost {
            driver.copy_to_device(streams[1], slice(pinned[1]), memory[1].start)?;
        }
        if direction != Direction::ToDevice {
            driver.synchronize_stream(streams[0])?;
        }
        if direction != Direction::ToHost {
            driver.synchronize_stream(streams[1])?;
        }
        Ok(driver.now_ns() - begun)
    }

    fn mover_ns(&mut self, direction: Direction, size: Bytes) -> Result<u64> {
        let [down, up] = self.memory.map(|memory| AddrRange::new(memory.start, size));
        let [down_blocks, up_blocks] = &mut self.blocks;
        let mut start_down =
            || self.mover.to_host(down, down_blocks.take().expect(RETURNED)).start();
        let mut start_up = || self.mover.to_device(up, up_blocks.take().expect(RETURNED)).start();
        let begun = self.driver.now_ns();
        let (down, up) = match direction {
            Direction::ToHost => (Some(start_down()?), None),
            Direction::ToDevice => (None, Some(start_up()?)),
            Direction::Both => (Some(start_down()?), Some(start_up()?)),
        };
        let took_ns;
        match (down, up) {
            (Some(mut down), Some(mut up)) => {
                wait_all(&mut [&mut down, &mut up])?;
                took_ns = self.driver.now_ns() - begun;
                (*down_blocks, *up_blocks) = (Some(down.into_host()), Some(up.into_host()));
            }
            (Some(mut down), None) => {
                down.wait()?;
                took_ns = self.driver.now_ns() - begun;
                *down_blocks = Some(down.into_host());
            }
            (None, up) => {
                let mut up = up.context("there is a direction")?;
                up.wait()?;
                took_ns = self.driver.now_ns() - begun;
                *up_blocks = Some(up.into_host());
            }
        }
        Ok(took_ns)
    }

    /// Releases everything and returns the first error.
    fn close(self) -> Result<()> {
        let Rig { driver, memory, pinned, streams, mover, blocks, .. } = self;
        drop((mover, blocks));
        for index in 0..2 {
            driver.free_memory(memory[index].start)?;
            driver.free_host(pinned[index])?;
            driver.destroy_stream(streams[index])?;
        }
        Ok(())
    }
}

/// Returns a pool for the blocks of both directions, pinned ahead of time; twice as large if the
/// blocks are to be scattered.
fn pool(driver: &Arc<dyn Driver>, scattered: bool, largest: Bytes) -> Result<HostPool> {
    let config = HostPoolConfig { spare_blocks: 0, ..HostPoolConfig::default() };
    let blocks = 2 * largest.count().div_ceil(config.block.count());
    let blocks = if scattered { 2 * blocks } else { blocks };
    let pools = blocks.div_ceil(config.blocks_per_pool.into());
    let capacity = config.block * pools * u64::from(config.blocks_per_pool);
    let host = SpaceId::host(0);
    let space = SpaceConfig { limit: Level::Fraction(1.0), ..SpaceConfig::host(capacity) };
    let manager = ReservationManager::new([(host, space)])?;
    let space = manager.space(host).context("it was configured")?;
    let config = HostPoolConfig { initial_pools: pools as u32, ..config };
    let pinned = HostPool::new(&space, config, [Arc::clone(driver)]);
    pinned.with_context(|| format!("cannot pin {capacity} of host memory"))
}

/// Returns blocks of which no two are adjacent.
fn scattered(pool: &HostPool, len: Bytes) -> Result<HostAllocation> {
    let free = pool.stats().free_blocks;
    let singles = (0..free).map(|_| pool.allocate(pool.block()));
    let mut singles = singles.collect::<Result<Vec<_>, _>>()?;
    // Every other block stays allocated until the request is served.
    let mut index = 0_u64;
    singles.retain(|_| {
        index += 1;
        index.is_multiple_of(2)
    });
    Ok(pool.allocate(len)?)
}

fn row(options: &Options, time_is: TimeSource, case: Case) -> Row {
    let directions = if case.direction == Direction::Both { 2 } else { 1 };
    let bytes = (case.size * directions).count() as f64;
    let moves = case.mover_ns.len() as u64;
    Row {
        direction: case.direction,
        size_bytes: case.size.count(),
        step_bytes: options.step.count(),
        scattered: options.scattered,
        moves,
        plain_bytes_per_s: bytes * 1e9 / median(case.plain_ns),
        mover_bytes_per_s: bytes * 1e9 / median(case.mover_ns),
        of_plain: median(case.ratios),
        driver_calls_each: case.driver_calls,
        time_is,
    }
}
