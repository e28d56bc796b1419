//! `vramp bench copy`: what a mover's steps and blocks leave of the link's rate.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use vramp_alloc::{Bytes, Driver, Preset};
use vramp_core::AddrRange;
use vramp_driver::{DeviceInfo, HostBuffer, HostSlice, Metered, Stream};
use vramp_tiers::{
    HostAllocation, HostPool, HostPoolConfig, Level, Mover, MoverConfig, ReservationManager,
    SpaceConfig, SpaceId,
};

use super::args::Copy;
use super::{Bench, Cell, Column, median};
use crate::count::Count;

/// Fewer rounds say nothing.
const ROUNDS_LEAST: usize = 5;
/// Small sizes are moved more than once a round.
const MOVED_A_ROUND: Bytes = Bytes::mib(64);
const MOVES_MOST: u64 = 16;
/// What a card and its host have room for, and what a simulator's host has.
const LARGEST: [Bytes; 2] = [Bytes::gib(4), Bytes::mib(256)];

/// One row.
#[derive(Debug, Serialize)]
struct Row {
    direction: &'static str,
    size_bytes: u64,
    step_bytes: u64,
    scattered: bool,
    moves: u64,
    plain_bytes_per_s: f64,
    mover_bytes_per_s: f64,
    of_plain: f64,
    driver_calls_each: u64,
    time_is: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    ToHost,
    ToDevice,
    Both,
}

impl Direction {
    const ALL: [Direction; 3] = [Direction::ToHost, Direction::ToDevice, Direction::Both];

    fn name(self) -> &'static str {
        match self {
            Direction::ToHost => "to host",
            Direction::ToDevice => "to device",
            Direction::Both => "both",
        }
    }
}

/// One size in one direction: what each move took.
struct Case {
    direction: Direction,
    size: Bytes,
    plain_ns: Vec<f64>,
    mover_ns: Vec<f64>,
    ratios: Vec<f64>,
    driver_calls: u64,
}

pub(super) fn run(args: &Copy, out: &mut dyn Write) -> Result<()> {
    if args.common.allocator.0 != [Preset::Vramp] {
        bail!("no allocator takes part in copies: leave --allocator away");
    }
    let bench = Bench::open(&args.common, out)?;
    let sizes = sizes(args, &bench.info)?;
    let largest = sizes.iter().copied().max().unwrap_or_default();
    let mut site = Site::new(&bench, args, largest)?;
    let case = |size, direction| Case {
        direction,
        size,
        plain_ns: Vec::new(),
        mover_ns: Vec::new(),
        ratios: Vec::new(),
        driver_calls: 0,
    };
    let each = sizes.iter().flat_map(|&size| Direction::ALL.map(|direction| case(size, direction)));
    let mut cases: Vec<Case> = each.collect();
    let begun = Instant::now();
    // The first round is for warming up.
    let mut round = 0;
    while round <= ROUNDS_LEAST || begun.elapsed() < bench.duration {
        for case in &mut cases {
            let fitting = MOVED_A_ROUND.count() / case.size.count();
            for _ in 0..fitting.clamp(1, MOVES_MOST) {
                site.compare(case, round > 0)?;
            }
        }
        round += 1;
    }
    site.close()?;
    let rows: Vec<Row> = cases.into_iter().map(|case| row(args, &bench.info, case)).collect();
    bench.write(out, "copy", &rows, &COLUMNS)
}

fn sizes(args: &Copy, info: &DeviceInfo) -> Result<Vec<Bytes>> {
    let largest = LARGEST[usize::from(info.simulated)];
    if !args.sizes.is_empty() {
        let fit = |size: &&Bytes| !size.is_zero() && **size <= largest;
        let all = args.sizes.iter().all(|size| fit(&size));
        ensure!(all, "give --sizes from 1 B to {largest} on {}", info.id);
        return Ok(args.sizes.clone());
    }
    let powers = (0..).map(|power| Bytes::mib(1 << (2 * power)));
    Ok(powers.take_while(|size| *size <= largest).collect())
}

/// The device, plain pinned memory, and a mover with its blocks: each for both directions.
struct Site {
    driver: Arc<dyn Driver>,
    meter: Arc<Metered<Arc<dyn Driver>>>,
    memory: [AddrRange; 2],
    pinned: [HostBuffer; 2],
    streams: [Stream; 2],
    mover: Mover,
    blocks: [Option<HostAllocation>; 2],
}

const HERE: &str = "blocks come back from each move";

impl Site {
    fn new(bench: &Bench, args: &Copy, largest: Bytes) -> Result<Site> {
        let meter = Arc::new(Metered::new(bench.driver()?));
        let driver: Arc<dyn Driver> = Arc::clone(&meter) as _;
        let pool = pool(&driver, args.scattered, largest)?;
        let config = MoverConfig { step: args.step, ..MoverConfig::default() };
        let mover = Mover::new(Arc::clone(&driver), &pool, config)?;
        let take = |pool: &HostPool| match args.scattered {
            false => Ok(pool.allocate(largest)?),
            true => scattered(pool, largest),
        };
        let blocks = [Some(take(&pool)?), Some(take(&pool)?)];
        let memory = || {
            let at = driver.alloc_memory(largest);
            let at = at.with_context(|| format!("the card has no {largest} twice"))?;
            anyhow::Ok(AddrRange::new(at, largest))
        };
        let memory = [memory()?, memory()?];
        let pinned = [driver.alloc_host(largest)?, driver.alloc_host(largest)?];
        let streams = [driver.create_stream()?, driver.create_stream()?];
        Ok(Site { driver, meter, memory, pinned, streams, mover, blocks })
    }

    /// One plain copy each way that is asked for, and the same by the mover.
    fn compare(&mut self, case: &mut Case, counts: bool) -> Result<()> {
        let plain_ns = self.plain(case.direction, case.size)? as f64;
        let before = self.meter.snapshot().total().calls;
        let mover_ns = self.moved(case.direction, case.size)? as f64;
        case.driver_calls = self.meter.snapshot().total().calls - before;
        if counts {
            case.plain_ns.push(plain_ns);
            case.mover_ns.push(mover_ns);
            case.ratios.push(plain_ns / mover_ns);
        }
        Ok(())
    }

    fn plain(&self, direction: Direction, size: Bytes) -> Result<u64> {
        let Site { driver, memory, pinned, streams, .. } = self;
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

    fn moved(&mut self, direction: Direction, size: Bytes) -> Result<u64> {
        let [down, up] = self.memory.map(|memory| AddrRange::new(memory.start, size));
        let [down_blocks, up_blocks] = &mut self.blocks;
        let mut start_down = || self.mover.to_host(down, down_blocks.take().expect(HERE)).start();
        let mut start_up = || self.mover.to_device(up, up_blocks.take().expect(HERE)).start();
        let begun = self.driver.now_ns();
        let (down, up) = match direction {
            Direction::ToHost => (Some(start_down()?), None),
            Direction::ToDevice => (None, Some(start_up()?)),
            Direction::Both => (Some(start_down()?), Some(start_up()?)),
        };
        let took_ns;
        match (down, up) {
            (Some(mut down), Some(mut up)) => {
                while !(down.poll()? & up.poll()?) {}
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

    /// Gives everything back, and tells what failed.
    fn close(self) -> Result<()> {
        let Site { driver, memory, pinned, streams, mover, blocks, .. } = self;
        drop((mover, blocks));
        for index in 0..2 {
            driver.free_memory(memory[index].start)?;
            driver.free_host(pinned[index])?;
            driver.destroy_stream(streams[index])?;
        }
        Ok(())
    }
}

/// A pool for blocks of both directions, all pinned ahead; twice as many to scatter them.
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
    pinned.with_context(|| format!("{capacity} of the host's memory cannot be pinned"))
}

/// Blocks of which no two are neighbours.
fn scattered(pool: &HostPool, len: Bytes) -> Result<HostAllocation> {
    let free = pool.stats().free_blocks;
    let singles = (0..free).map(|_| pool.allocate(pool.block()));
    let mut singles = singles.collect::<Result<Vec<_>, _>>()?;
    // What lies between is held until the others are taken.
    let mut index = 0_u64;
    singles.retain(|_| {
        index += 1;
        index.is_multiple_of(2)
    });
    Ok(pool.allocate(len)?)
}

fn row(args: &Copy, info: &DeviceInfo, case: Case) -> Row {
    let ways = if case.direction == Direction::Both { 2 } else { 1 };
    let bytes = (case.size * ways).count() as f64;
    let moves = case.mover_ns.len() as u64;
    Row {
        direction: case.direction.name(),
        size_bytes: case.size.count(),
        step_bytes: args.step.count(),
        scattered: args.scattered,
        moves,
        plain_bytes_per_s: bytes * 1e9 / median(case.plain_ns),
        mover_bytes_per_s: bytes * 1e9 / median(case.mover_ns),
        of_plain: median(case.ratios),
        driver_calls_each: case.driver_calls,
        time_is: if info.simulated { "modelled" } else { "measured" },
    }
}

fn gigabytes(bytes_per_s: f64, row: &Row) -> Cell {
    let modelled = if row.time_is == "modelled" { " (modelled)" } else { "" };
    Cell::Number(format!("{:.2}{modelled}", bytes_per_s / 1e9))
}

const COLUMNS: [Column<Row>; 7] = [
    ("direction", |row| Cell::Words(row.direction.to_owned())),
    ("size", |row| Cell::Number(Bytes::new(row.size_bytes).to_string())),
    ("plain GB/s", |row| gigabytes(row.plain_bytes_per_s, row)),
    ("mover GB/s", |row| gigabytes(row.mover_bytes_per_s, row)),
    ("of plain", |row| Cell::Number(format!("{:.3}", row.of_plain))),
    ("moves", |row| Cell::Number(Count(row.moves).to_string())),
    ("driver calls", |row| Cell::Number(Count(row.driver_calls_each).to_string())),
];
