//! Memory between two processes and between two cards: what it costs, and that nothing is left.
//!
//! 1. [`cycles`]: this process exports blocks, a child opens them, checks the bytes, changes them and
//!    closes. Afterwards no descriptor, mapping or byte is left.
//! 2. [`kills`]: one side ends by SIGKILL at any moment; the other goes on, and all memory returns.
//! 3. [`opening`]: the time to open a large block in the other process.
//! 4. [`peers()`]: the time to grant a second card access, and copies between the cards.
//!
//! The child is the same program with the argument `--role` (`importer.rs`), so each of these is given
//! the program's path. It speaks lines: a ticket in
//! hexadecimal digits and the byte that fills the block, or `end`.

mod importer;
mod peers;
mod process;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use vramp::device::Driver;
use vramp::device::meter::Metered;
use vramp::sharing::{Exchange, range_of};
use vramp::{Allocation, Allocator, Bytes, Config, StreamId};
use vramp_core::AddrRange;

pub use importer::{Role, serve};
pub use peers::{PeerReport, peers};
use process::Child;

use crate::statistics::median;

/// Longest time for the other side.
const PATIENCE: Duration = Duration::from_secs(60);

/// Opens a device for memory that two processes share: simulated ones have the host's memory.
///
/// # Errors
/// The device cannot be opened.
pub fn open(device: &str) -> Result<Arc<dyn Driver>> {
    Ok(vramp::device::open_mapped(device)?)
}

/// One side of the exchange.
struct Side {
    driver: Arc<Metered<Arc<dyn Driver>>>,
    allocator: Allocator,
    stream: StreamId,
    exchange: Exchange,
}

impl Side {
    fn open(device: &str) -> Result<Side> {
        let driver = Arc::new(Metered::new(open(device)?));
        let shared: Arc<dyn Driver> = driver.clone();
        let allocator = Allocator::new(shared, Config::default())?;
        let stream = allocator.create_stream()?;
        Ok(Side { driver, allocator, stream, exchange: Exchange::new() })
    }

    fn fill(&self, range: AddrRange, byte: u8) -> Result<()> {
        let stream = self.allocator.stream(self.stream).context("the stream is open")?;
        self.driver.fill(stream, range, byte)?;
        Ok(self.driver.synchronize_stream(stream)?)
    }

    /// Fails unless the first and the last bytes of a range are `byte`.
    fn check(&self, range: AddrRange, byte: u8) -> Result<()> {
        let stream = self.allocator.stream(self.stream).context("the stream is open")?;
        let len = Bytes::new(64).min(range.len);
        let buffer = self.driver.alloc_host(len)?;
        let last = range.start + (range.len - len);
        for at in [range.start, last] {
            let to = vramp::device::HostSlice { buffer, offset: Bytes::ZERO, len };
            self.driver.copy_to_host(stream, at, to)?;
            self.driver.synchronize_stream(stream)?;
            let mut bytes = [0; 64];
            let read = &mut bytes[..len.count() as usize];
            self.driver.read_host(buffer, Bytes::ZERO, read)?;
            if let Some(other) = read.iter().find(|&&other| other != byte) {
                bail!("{at} holds {other}, not {byte}");
            }
        }
        Ok(self.driver.free_host(buffer)?)
    }

    fn block(&self, size: Bytes, byte: u8) -> Result<Allocation> {
        let block = self.allocator.malloc(size, self.stream)?;
        self.fill(range_of(&block), byte)?;
        Ok(block)
    }

    /// Waits until no block is exported any more, and releases all memory.
    fn come_to_rest(&self) -> Result<()> {
        let begun = Instant::now();
        while self.allocator.exported() > 0 {
            ensure!(
                begun.elapsed() < PATIENCE,
                "{} blocks stay exported",
                self.allocator.exported()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        self.allocator.wait_for_freed_memory()?;
        self.allocator.trim(Bytes::ZERO)?;
        self.allocator.audit()?;
        Ok(())
    }

    fn left(&self) -> Result<Left> {
        Ok(Left {
            reserved: self.allocator.stats()?.reserved,
            used_on_card: {
                let memory = self.driver.memory_info()?;
                memory.total - memory.free
            },
            descriptors: descriptors()?,
            exported: self.allocator.exported(),
            pinned: self.allocator.pinned().0,
        })
    }
}

/// Returns the number of open descriptors of this process.
fn descriptors() -> Result<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}

/// What a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Physical memory of the allocator.
    pub reserved: Bytes,
    /// Memory of the card that any process uses.
    pub used_on_card: Bytes,
    /// Open descriptors.
    pub descriptors: usize,
    /// Exported blocks.
    pub exported: usize,
    /// Pinned handles.
    pub pinned: u64,
}

/// Sizes of blocks: small ones in a slab, and ones of several handles.
fn size(random: &mut Rng) -> Bytes {
    match random.u32(0..4) {
        0 => Bytes::new(random.u64(1..1 << 20)),
        1 => Bytes::mib(random.u64(1..8)),
        _ => Bytes::mib(random.u64(8..128)),
    }
}

/// Result of [`cycles`].
#[derive(Clone, Debug)]
pub struct CyclesReport {
    /// Cycles performed.
    pub cycles: u64,
    /// Median time of one, both sides together.
    pub median: Duration,
    /// What this process held after the first cycle, and after the last one.
    pub left: [Left; 2],
}

/// Exports, opens and closes blocks of random sizes.
///
/// # Errors
/// A call failed, a byte is wrong, or something is left.
pub fn cycles(program: &Path, device: &str, cycles: u64) -> Result<CyclesReport> {
    let side = Side::open(device)?;
    let mut child = Child::start(program, device, Role::Importer)?;
    let mut random = Rng::with_seed(1);
    let mut cycle = || -> Result<f64> {
        let (size, byte) = (size(&mut random), random.u8(1..255));
        let block = side.block(size, byte)?;
        let begun = Instant::now();
        let shared = side.exchange.share(side.allocator.export(&block)?)?;
        child.offer(&shared.grant()?.to_bytes(), byte)?;
        child.closed()?;
        let took = begun.elapsed().as_secs_f64();
        side.check(range_of(&block), byte + 1)?;
        side.allocator.free(block, side.stream)?;
        Ok(took)
    };
    cycle()?;
    side.come_to_rest()?;
    let before = side.left()?;
    let times = (1..cycles).map(|_| cycle()).collect::<Result<Vec<f64>>>()?;
    side.come_to_rest()?;
    // The other process closes its side of connections a moment later.
    let begun = Instant::now();
    let mut after = side.left()?;
    while after.descriptors > before.descriptors && begun.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
        after = side.left()?;
    }
    ensure!(after.descriptors <= before.descriptors, "descriptors leak: {before:?}, {after:?}");
    ensure!((after.exported, after.pinned) == (0, 0), "something is still exported: {after:?}");
    ensure!(after.reserved.is_zero(), "memory is left: {after:?}");
    child.end()?;
    let median = Duration::from_secs_f64(median(times));
    Ok(CyclesReport { cycles, median, left: [before, after] })
}

/// Result of [`kills`].
#[derive(Clone, Debug, Default)]
pub struct KillsReport {
    /// Importers killed.
    pub importers: u64,
    /// Exporters killed.
    pub exporters: u64,
    /// Memory of the card in use before and after.
    pub used_on_card: [Bytes; 2],
}

/// Kills one side at a random moment, `rounds` times each.
///
/// # Errors
/// The other side did not go on, or memory is left.
pub fn kills(program: &Path, device: &str, rounds: u64) -> Result<KillsReport> {
    let side = Side::open(device)?;
    side.come_to_rest()?;
    let mut random = Rng::with_seed(2);
    let mut report = KillsReport::default();
    report.used_on_card[0] = side.left()?.used_on_card;
    for _ in 0..rounds {
        let mut child = Child::start(program, device, Role::Importer)?;
        for _ in 0..random.u32(0..4) {
            let block = side.block(size(&mut random), 1)?;
            let shared = side.exchange.share(side.allocator.export(&block)?)?;
            child.offer(&shared.grant()?.to_bytes(), 1)?;
            child.closed()?;
            side.allocator.free(block, side.stream)?;
        }
        let block = side.block(size(&mut random), 1)?;
        let shared = side.exchange.share(side.allocator.export(&block)?)?;
        let ticket = shared.ticket();
        child.offer(&ticket.to_bytes(), 1)?;
        std::thread::sleep(Duration::from_micros(random.u64(0..3000)));
        child.kill()?;
        side.allocator.free(block, side.stream)?;
        drop(shared);
        side.come_to_rest()?;
        ensure!(side.left()?.reserved.is_zero(), "memory is left after a killed importer");
        report.importers += 1;
    }
    for _ in 0..rounds {
        let mut child = Child::start(program, device, Role::Exporter)?;
        let mut open = Vec::new();
        for _ in 0..random.u32(1..4) {
            let (ticket, byte) = child.ticket()?;
            open.push((side.exchange.open(&side.allocator, &ticket)?, byte));
        }
        let (late, _) = child.ticket()?;
        std::thread::sleep(Duration::from_micros(random.u64(0..3000)));
        child.kill()?;
        for (memory, byte) in open {
            side.check(memory.range(), byte)?;
            side.fill(memory.range(), byte.wrapping_add(1))?;
            memory.close()?;
        }
        ensure!(
            side.exchange.open(&side.allocator, &late).is_err(),
            "memory of a dead process was opened"
        );
        report.exporters += 1;
    }
    side.come_to_rest()?;
    report.used_on_card[1] = side.left()?.used_on_card;
    Ok(report)
}

/// Opens a block of `size` in another process `times` times. Returns the median time of an open there.
///
/// # Errors
/// A call failed.
pub fn opening(program: &Path, device: &str, size: Bytes, times: usize) -> Result<Duration> {
    let side = Side::open(device)?;
    let mut child = Child::start(program, device, Role::Importer)?;
    let block = side.block(size, 1)?;
    let shared = side.exchange.share(side.allocator.export(&block)?)?;
    let mut opens = Vec::new();
    for n in 0..times {
        child.offer(&shared.grant()?.to_bytes(), n as u8 + 1)?;
        opens.push(child.closed()?.as_secs_f64());
    }
    child.end()?;
    Ok(Duration::from_secs_f64(median(opens)))
}
