//! One allocator under test, and the calls that a pattern makes on it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use fastrand::Rng;
use vramp::peers::{Config, Preset};
use vramp::{AllocError, Allocation, Allocator, Bytes, CreateError, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::meter::{MeterSnapshot, Metered};
use vramp_driver::sim::{Kernel, Simulator};
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{Call, DriverResult, Event};

use super::Pattern;
use crate::FreshDevice;
use crate::statistics::nanos;

/// Time of the program between two requests, on the simulator.
const REQUEST_NS: u64 = 500;

/// A live block.
pub(super) struct Block {
    allocation: Allocation,
    pool: usize,
}

impl Block {
    pub fn size(&self) -> u64 {
        self.allocation.requested().count()
    }

    pub fn stream(&self) -> StreamId {
        self.allocation.stream()
    }
}

/// Forwards to a device, with the clock of another one.
struct Clocked<D> {
    device: D,
    now_ns: Box<dyn Fn() -> u64 + Send + Sync>,
}

impl<D: Driver> Wrapper for Clocked<D> {
    type Device = D;

    fn device(&self) -> &D {
        &self.device
    }

    fn now_ns(&self) -> u64 {
        (self.now_ns)()
    }
}

/// Counts the calls made to a device, and times them by the clock of the machine.
type HostMeter = Metered<Wrapped<Clocked<Arc<dyn Driver>>>>;

/// An allocator on a device of its own, with counts of all that a pattern does.
pub(super) struct Rig {
    pub rng: Rng,
    preset: Preset,
    /// The allocator, and the pools created from it.
    pools: Vec<Allocator>,
    device: Arc<dyn Driver>,
    simulator: Option<Arc<Simulator>>,
    /// In the device's own time.
    meter: Arc<Metered<Arc<dyn Driver>>>,
    host_meter: Arc<HostMeter>,
    /// For each stream, when its last work ends, on the simulator.
    busy_until_ns: BTreeMap<StreamId, u64>,
    /// An event of the program, to order one stream after another.
    event: Option<Event>,
    used_before: Bytes,
    totals: Totals,
    warm: Option<(Totals, MeterSnapshot)>,
    measured: Option<(Totals, MeterSnapshot)>,
    /// Entries that closed pools looked at.
    looked_at_before: u64,
}

/// Live bytes of all threads.
#[derive(Debug, Default)]
struct Live {
    now: AtomicU64,
    peak: AtomicU64,
}

/// One thread of a pattern, with a stream of its own.
pub(super) struct Thread<'a> {
    pub rng: Rng,
    stream: StreamId,
    allocator: &'a Allocator,
    live: &'a Live,
    mallocs: u64,
    failed: u64,
}

impl Thread<'_> {
    /// Allocates a block. Returns `None` if there is no memory.
    pub fn malloc(&mut self, size: u64) -> Result<Option<Allocation>> {
        self.mallocs += 1;
        match self.allocator.malloc(Bytes::new(size), self.stream) {
            Ok(allocation) => {
                let now = self.live.now.fetch_add(size, Relaxed) + size;
                self.live.peak.fetch_max(now, Relaxed);
                Ok(Some(allocation))
            }
            Err(error) if is_shortage(&error) => {
                self.failed += 1;
                Ok(None)
            }
            Err(error) => Err(error).context("a malloc failed"),
        }
    }

    pub fn free(&mut self, block: Allocation) -> Result<()> {
        self.live.now.fetch_sub(block.requested().count(), Relaxed);
        let freed = self.allocator.free(block, self.stream);
        freed.map_err(|error| anyhow!("a free failed: {error}"))
    }
}

/// Sums over the requests so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub mallocs: u64,
    pub frees: u64,
    pub failed: u64,
    pub live: u64,
    pub live_peak: u64,
    /// Peak over all pools, where there are several.
    pub reserved_peak: u64,
    /// Time in the allocator's functions, by the clock of the machine.
    pub host_ns: u64,
    /// The part of it in driver calls.
    pub in_driver_ns: u64,
    /// Entries of its tables that the allocator looked at.
    pub looked_at: u64,
    /// Driver calls of reading the allocator's statistics, which are not the pattern's.
    reading: Reading,
}

/// Driver calls and their time.
#[derive(Clone, Copy, Debug, Default)]
struct Reading {
    calls: u64,
    total_ns: u64,
}

impl Reading {
    fn add(&mut self, other: Reading) {
        self.calls += other.calls;
        self.total_ns += other.total_ns;
    }
}

/// The counts of a finished run.
pub(super) struct Counts {
    pub totals: Totals,
    pub warm: Totals,
    pub calls: MeterSnapshot,
    pub warm_calls: MeterSnapshot,
    pub reserved_peak: u64,
}

impl Rig {
    pub fn new(device: FreshDevice, preset: Preset, pattern: &Pattern, seed: u64) -> Result<Rig> {
        let FreshDevice { driver, simulator } = device;
        let begun = Instant::now();
        let by_host = Clocked {
            device: Arc::clone(&driver),
            now_ns: Box::new(move || nanos(begun.elapsed())),
        };
        let host_meter = Arc::new(Metered::new(Wrapped(by_host)));
        let own = Arc::clone(&driver);
        let by_device =
            Clocked { device: Arc::clone(&host_meter), now_ns: Box::new(move || own.now_ns()) };
        let inner: Arc<dyn Driver> = Arc::new(Wrapped(by_device));
        let meter = Arc::new(Metered::new(inner));
        let card = pattern.card.filter(|_| simulator.is_none());
        let config = Config::preset(preset).with_limit(pattern.limit.or(card));
        let allocator = config
            .open(Arc::clone(&meter) as Arc<dyn Driver>)
            .with_context(|| format!("cannot set up {}", preset.name()))?;
        meter.reset();
        host_meter.reset();
        let used_before = used(&*driver)?;
        Ok(Rig {
            rng: Rng::with_seed(seed),
            preset,
            pools: vec![allocator],
            device: driver,
            simulator,
            meter,
            host_meter,
            busy_until_ns: BTreeMap::new(),
            event: None,
            used_before,
            totals: Totals::default(),
            warm: None,
            measured: None,
            looked_at_before: 0,
        })
    }

    /// Returns the requested bytes of all live blocks.
    pub fn live(&self) -> u64 {
        self.totals.live
    }

    /// Ends the warm-up: what follows is counted on its own too.
    pub fn warmed_up(&mut self) -> Result<()> {
        self.read_clocks()?;
        self.warm = Some((self.totals, self.meter.snapshot()));
        Ok(())
    }

    /// Ends what is measured: what follows is not counted. Without it everything is.
    pub fn measured(&mut self) -> Result<()> {
        self.read_clocks()?;
        self.measured = Some((self.totals, self.meter.snapshot()));
        Ok(())
    }

    // --- requests ---

    pub fn create_stream(&mut self) -> Result<StreamId> {
        Ok(self.timed(|rig| rig.pools[0].create_stream())?)
    }

    pub fn create_streams(&mut self, count: usize) -> Result<Vec<StreamId>> {
        (0..count).map(|_| self.create_stream()).collect()
    }

    pub fn destroy_stream(&mut self, stream: StreamId) -> Result<()> {
        self.busy_until_ns.remove(&stream);
        Ok(self.timed(|rig| rig.pools[0].destroy_stream(stream))?)
    }

    /// Allocates from the first pool. Returns `None` if there is no memory.
    pub fn malloc(&mut self, stream: StreamId, size: u64) -> Result<Option<Block>> {
        self.malloc_in(0, stream, size)
    }

    /// Allocates from one of the pools. Returns `None` if there is no memory.
    pub fn malloc_in(&mut self, pool: usize, stream: StreamId, size: u64) -> Result<Option<Block>> {
        self.totals.mallocs += 1;
        let result = self.timed(|rig| rig.pools[pool].malloc(Bytes::new(size), stream));
        self.spend();
        let allocation = match result {
            Ok(allocation) => allocation,
            Err(error) if is_shortage(&error) => {
                self.totals.failed += 1;
                return Ok(None);
            }
            Err(error) => return Err(error).context("a malloc failed"),
        };
        self.totals.live += size;
        self.totals.live_peak = self.totals.live_peak.max(self.totals.live);
        if self.pools.len() > 1 {
            let reserved = used(&*self.device)?.count().saturating_sub(self.used_before.count());
            self.totals.reserved_peak = self.totals.reserved_peak.max(reserved);
        }
        Ok(Some(Block { allocation, pool }))
    }

    /// Allocates from the first pool, and queues work of the stream on the block.
    pub fn used(&mut self, stream: StreamId, size: u64, lag_ns: u64) -> Result<Option<Block>> {
        let block = self.malloc(stream, size)?;
        if let Some(block) = &block {
            self.work(block, stream, lag_ns)?;
        }
        Ok(block)
    }

    /// Frees each block on the stream that it was allocated for.
    pub fn free_all(&mut self, blocks: impl IntoIterator<Item = Block>) -> Result<()> {
        blocks.into_iter().try_for_each(|block| self.free(block))
    }

    /// Frees each block that was allocated, on the stream that it was allocated for.
    pub fn free_served(&mut self, blocks: impl IntoIterator<Item = Option<Block>>) -> Result<()> {
        self.free_all(blocks.into_iter().flatten())
    }

    /// Frees a block on the stream that it was allocated for.
    pub fn free(&mut self, block: Block) -> Result<()> {
        let stream = block.stream();
        self.free_on(block, stream)
    }

    /// Frees a block on a stream.
    pub fn free_on(&mut self, block: Block, stream: StreamId) -> Result<()> {
        self.totals.frees += 1;
        self.totals.live -= block.size();
        let Block { allocation, pool } = block;
        let freed = self.timed(|rig| rig.pools[pool].free(allocation, stream));
        self.spend();
        freed.map_err(|error| anyhow!("a free failed: {error}"))
    }

    /// Records the use of a block on another stream.
    pub fn record_use(&mut self, block: &Block, stream: StreamId) -> Result<()> {
        Ok(self.timed(|rig| rig.pools[block.pool].record_use(&block.allocation, stream))?)
    }

    /// Returns all idle memory of a pool to the card.
    pub fn empty_cache(&mut self, pool: usize) -> Result<()> {
        Ok(self.timed(|rig| rig.pools[pool].empty_cache())?)
    }

    /// Creates another pool, with the limit in common, and returns its number. `None` if there is
    /// no memory or no address left for it.
    pub fn create_pool(&mut self, name: &str) -> Result<Option<usize>> {
        match self.timed(|rig| rig.pools[0].create_pool(name)) {
            Ok(pool) => {
                self.pools.push(pool);
                Ok(Some(self.pools.len() - 1))
            }
            Err(CreateError::Driver(error)) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error).context("a pool was not created"),
        }
    }

    /// Closes the pool that was created last.
    pub fn close_last_pool(&mut self) -> Result<()> {
        let pool = self.pools.pop().context("there is no pool")?;
        let (stats, reading) = read(&self.meter, || pool.stats())?;
        self.looked_at_before += stats.looked_at;
        self.totals.reading.add(reading);
        self.timed(|_| pool.close()).map_err(|error| anyhow!("a pool was not closed: {error}"))
    }

    /// Runs `program` on threads, each with its index, its random numbers and its counts. The peak
    /// of live memory is that of the sum.
    pub fn on_threads(
        &mut self,
        threads: u64,
        program: impl Fn(&mut Thread<'_>) -> Result<()> + Sync,
    ) -> Result<()> {
        let live = Live::default();
        let streams = self.create_streams(threads as usize)?;
        let allocator = &self.pools[0];
        let seed = self.rng.u64(..);
        let run = |stream: StreamId, index: u64| {
            let rng = Rng::with_seed(seed ^ index);
            let mut thread = Thread { rng, stream, allocator, live: &live, mallocs: 0, failed: 0 };
            program(&mut thread).map(|()| (thread.mallocs, thread.failed))
        };
        let together = Barrier::new(streams.len());
        let run = |stream: StreamId, index: u64| {
            together.wait();
            run(stream, index)
        };
        let begun = Instant::now();
        let counts = thread::scope(|scope| {
            let started: Vec<_> = streams
                .iter()
                .zip(0..)
                .map(|(&stream, index)| scope.spawn(move || run(stream, index)))
                .collect();
            let joined = started.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|_| Err(anyhow!("a thread of the pattern panicked")))
            });
            joined.collect::<Result<Vec<_>>>()
        })?;
        self.totals.host_ns += nanos(begun.elapsed());
        for (mallocs, failed) in counts {
            self.totals.mallocs += mallocs;
            self.totals.frees += mallocs - failed;
            self.totals.failed += failed;
        }
        self.totals.live_peak = self.totals.live_peak.max(live.peak.load(Relaxed));
        Ok(())
    }

    /// Counts requests that are not made because one before them failed.
    pub fn give_up(&mut self, requests: u64) {
        self.totals.mallocs += requests;
        self.totals.failed += requests;
    }

    // --- what the program does beside its requests: not counted ---

    /// Queues work on a block that ends `lag_ns` from now, or later if the stream has work that
    /// does. On a card the work is a fill of the block, and takes as long as it takes.
    pub fn work(&mut self, block: &Block, stream: StreamId, lag_ns: u64) -> Result<()> {
        let raw = self.pools[0].stream(stream).context("the stream has ended")?;
        let range = AddrRange::new(block.allocation.addr(), block.allocation.requested());
        let Some(simulator) = &self.simulator else {
            return Ok(self.device.fill(raw, range, 1)?);
        };
        let now_ns = self.device.now_ns();
        let busy_until_ns = self.busy_until_ns.entry(stream).or_default();
        let begins_ns = now_ns.max(*busy_until_ns);
        let ends_ns = begins_ns.max(now_ns + lag_ns);
        *busy_until_ns = ends_ns;
        let kernel = Kernel::new("work").writing(range).lasting(ends_ns - begins_ns);
        Ok(simulator.launch(raw, kernel)?)
    }

    /// Makes later work of `stream` wait for the queued work of `after`.
    pub fn order(&mut self, stream: StreamId, after: StreamId) -> Result<()> {
        let open = |id| self.pools[0].stream(id).context("the stream has ended");
        let (raw, raw_after) = (open(stream)?, open(after)?);
        let event = match self.event {
            Some(event) => event,
            None => *self.event.insert(self.device.create_event()?),
        };
        self.device.record(event, raw_after)?;
        self.device.wait(raw, event)?;
        let ends_ns = self.busy_until_ns.get(&after).copied().unwrap_or_default();
        let busy_until_ns = self.busy_until_ns.entry(stream).or_default();
        *busy_until_ns = ends_ns.max(*busy_until_ns);
        Ok(())
    }

    /// Lets time pass, on the simulator.
    pub fn pass(&self, ns: u64) {
        if let Some(simulator) = &self.simulator {
            simulator.advance(ns);
        }
    }

    // --- end ---

    /// Closes the allocator and returns the counts.
    pub fn finish(mut self) -> Result<Counts> {
        if self.measured.is_none() {
            self.measured()?;
        }
        let reserved_peak = match &self.pools[..] {
            [only] if self.totals.reserved_peak == 0 => only.stats()?.reserved_peak.count(),
            _ => self.totals.reserved_peak,
        };
        let preset = self.preset;
        for pool in self.pools.into_iter().rev() {
            pool.close().map_err(|error| anyhow!("{} was not closed: {error}", preset.name()))?;
        }
        if let Some(event) = self.event {
            self.device.destroy_event(event)?;
        }
        if let Some(loss) = self.simulator.as_ref().and_then(|simulator| simulator.device_loss()) {
            return Err(anyhow!("the simulated device was lost: {}", loss.explanation));
        }
        let nothing = || (Totals::default(), Metered::new(&*self.device).snapshot());
        let (warm, warm_calls) = self.warm.unwrap_or_else(nothing);
        let (totals, calls) = self.measured.unwrap_or_else(nothing);
        Ok(Counts { totals, warm, calls, warm_calls, reserved_peak })
    }

    fn timed<T>(&mut self, call: impl FnOnce(&mut Rig) -> T) -> T {
        let begun = Instant::now();
        let result = call(self);
        self.totals.host_ns += nanos(begun.elapsed());
        result
    }

    /// Reads the counts that others keep.
    fn read_clocks(&mut self) -> Result<()> {
        self.totals.in_driver_ns = self.host_meter.snapshot().total().total_ns;
        let mut looked_at = self.looked_at_before;
        for index in 0..self.pools.len() {
            let (stats, reading) = read(&self.meter, || self.pools[index].stats())?;
            looked_at += stats.looked_at;
            self.totals.reading.add(reading);
        }
        self.totals.looked_at = looked_at;
        Ok(())
    }

    fn spend(&self) {
        self.pass(REQUEST_NS);
    }
}

/// Returns true for want of memory, and for want of addresses, which is the driver's error.
fn is_shortage(error: &AllocError) -> bool {
    error.is_out_of_memory()
        || matches!(error, AllocError::Driver(error) if error.is_out_of_memory())
}

/// Reads statistics, and returns the driver calls that this took.
fn read<T>(
    meter: &Metered<Arc<dyn Driver>>,
    stats: impl FnOnce() -> DriverResult<T>,
) -> Result<(T, Reading)> {
    let before = meter.snapshot().total();
    let stats = stats()?;
    let after = meter.snapshot().total();
    let reading =
        Reading { calls: after.calls - before.calls, total_ns: after.total_ns - before.total_ns };
    Ok((stats, reading))
}

fn used(device: &dyn Driver) -> Result<Bytes> {
    let info = device.memory_info()?;
    Ok(info.total - info.free)
}

impl Counts {
    /// Returns the calls of one kind after the warm-up.
    pub fn after_warm_up(&self, call: Call) -> u64 {
        self.calls.of(call).calls - self.warm_calls.of(call).calls
    }

    /// Returns the number and time of all calls, those of reading the statistics left out.
    pub fn total(&self) -> (u64, u64) {
        own(&self.calls, &self.totals)
    }

    /// Returns the number and time of all calls after the warm-up.
    pub fn total_after_warm_up(&self) -> (u64, u64) {
        let ((calls, ns), (warm_calls, warm_ns)) =
            (self.total(), own(&self.warm_calls, &self.warm));
        (calls - warm_calls, ns - warm_ns)
    }
}

fn own(calls: &MeterSnapshot, totals: &Totals) -> (u64, u64) {
    let total = calls.total();
    (total.calls - totals.reading.calls, total.total_ns - totals.reading.total_ns)
}
