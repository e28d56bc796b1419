//! An allocator with a spill manager and pinned blocks, and plain copies to compare with.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use vramp::defer::{
    Access, DeferrableBuffer, PeerPart, SpillConfig, SpillManager, SpillParts, SpillStats,
};
use vramp::tiers::host::HostPoolConfig;
use vramp::tiers::movers::MoverConfig;
use vramp::tiers::space::Level;
use vramp::tiers::{HostPool, Mover, ReservationManager, SpaceConfig, SpaceId};
use vramp::{Allocator, Bytes, Config, Driver, StreamId};
use vramp_core::DeviceAddr;
use vramp_driver::meter::{MeterSnapshot, Metered};
use vramp_driver::{HostBuffer, HostSlice, Stream};

use crate::Bench;

/// Configuration of a rig.
pub(super) struct RigConfig {
    /// Bytes evicted or restored at once.
    pub piece: Bytes,
    /// Memory limit of the allocator.
    pub limit: Option<Bytes>,
    /// Host memory for evicted buffers, pinned ahead of time: no measured spill pins.
    pub pinned: Bytes,
}

/// A spill manager and one stream to use its buffers on.
pub(super) struct Rig {
    pub driver: Arc<dyn Driver>,
    meter: Arc<Metered<Arc<dyn Driver>>>,
    allocator: Arc<Allocator>,
    pub manager: SpillManager,
    pub stream: StreamId,
    /// The driver's handle of `stream`.
    pub queue: Stream,
}

impl Rig {
    pub(super) fn new(bench: &Bench, config: &RigConfig) -> Result<Rig> {
        Rig::on(bench.driver()?, config, |_| Ok(Vec::new()))
    }

    /// Builds a rig whose buffers may also be evicted to what `peers` returns.
    pub(super) fn on(
        driver: Arc<dyn Driver>,
        config: &RigConfig,
        peers: impl FnOnce(&Arc<dyn Driver>) -> Result<Vec<PeerPart>>,
    ) -> Result<Rig> {
        let meter = Arc::new(Metered::new(driver));
        let driver: Arc<dyn Driver> = Arc::clone(&meter) as _;
        let allocator_config = Config { limit: config.limit, ..Config::default() };
        let allocator = Arc::new(Allocator::new(Arc::clone(&driver), allocator_config)?);
        let pool = pool(&driver, config.pinned)?;
        let mover = Mover::new(Arc::clone(&driver), &pool, MoverConfig::default())?;
        let spill_config = SpillConfig { piece: config.piece, ..SpillConfig::default() };
        let allocator_too = Arc::clone(&allocator);
        let (disk, budget, peers) = (None, None, peers(&driver)?);
        let parts = SpillParts { allocator: allocator_too, mover, disk, budget, peers };
        let manager = SpillManager::new(parts, spill_config)?;
        let (stream, queue) = new_stream(&allocator)?;
        Ok(Rig { driver, meter, allocator, manager, stream, queue })
    }

    pub(super) fn new_stream(&self) -> Result<(StreamId, Stream)> {
        new_stream(&self.allocator)
    }

    /// Writes all of a buffer and waits until it is written.
    pub(super) fn write(&self, buffer: &DeferrableBuffer) -> Result<()> {
        let lease = buffer.lease(Access::Exclusive, self.stream)?;
        self.driver.fill(self.queue, lease.address(0), 0x5A)?;
        drop(lease);
        self.synchronize()
    }

    /// Spills all of a buffer and returns the time.
    pub(super) fn spill(&self, buffer: &DeferrableBuffer) -> Result<u64> {
        let begun = self.driver.now_ns();
        let spilled = self.manager.spill(buffer.len());
        let took_ns = self.driver.now_ns() - begun;
        let freed = spilled.freed;
        ensure!(freed >= buffer.len(), "evicted {freed} of {}: {:?}", buffer.len(), spilled.short);
        Ok(took_ns)
    }

    /// Evicts a buffer by a malloc of its length under a limit of that length. Frees the block
    /// again and returns the time of the malloc.
    pub(super) fn evict_by_malloc(&self, buffer: &DeferrableBuffer) -> Result<u64> {
        let page = self.driver.info().limits.page;
        let len =
            buffer.len().checked_round_up(page).context("the length is larger than any card")?;
        self.allocator.set_limit(Some(len))?;
        let begun = self.driver.now_ns();
        let block = self.allocator.malloc(len, self.stream)?;
        let took_ns = self.driver.now_ns() - begun;
        self.allocator.free(block, self.stream)?;
        self.allocator.set_limit(None)?;
        Ok(took_ns)
    }

    /// Releases all idle memory and its mappings.
    pub(super) fn empty_cache(&self) -> Result<()> {
        Ok(self.allocator.empty_cache()?)
    }

    /// Restores a buffer, waits until its contents are there, and returns the time.
    pub(super) fn restore(&self, buffer: &DeferrableBuffer) -> Result<u64> {
        let begun = self.driver.now_ns();
        let lease = buffer.lease(Access::Shared, self.stream)?;
        self.synchronize()?;
        let took_ns = self.driver.now_ns() - begun;
        drop(lease);
        Ok(took_ns)
    }

    /// Waits for all work queued on the stream.
    pub(super) fn synchronize(&self) -> Result<()> {
        Ok(self.driver.synchronize_stream(self.queue)?)
    }

    pub(super) fn stats(&self) -> SpillStats {
        self.manager.stats()
    }

    pub(super) fn calls(&self) -> MeterSnapshot {
        self.meter.snapshot()
    }

    /// Sets all counts to zero.
    pub(super) fn reset_calls(&self) {
        self.meter.reset();
    }

    /// Audits the manager, releases everything and returns the first error. No buffer may be left.
    pub(super) fn close(self) -> Result<()> {
        let Rig { allocator, manager, .. } = self;
        manager.audit()?;
        drop(manager);
        let allocator =
            Arc::into_inner(allocator).context("neither the manager nor a buffer is left")?;
        Ok(allocator.close()?)
    }
}

fn new_stream(allocator: &Allocator) -> Result<(StreamId, Stream)> {
    let stream = allocator.create_stream()?;
    let queue = allocator.stream(stream).context("the stream was just created")?;
    Ok((stream, queue))
}

/// Returns a pool of blocks for `len`, pinned ahead of time.
fn pool(driver: &Arc<dyn Driver>, len: Bytes) -> Result<HostPool> {
    let config = HostPoolConfig { spare_blocks: 0, ..HostPoolConfig::default() };
    let blocks = u32::try_from(len.count().div_ceil(config.block.count()))?.max(1);
    let config = HostPoolConfig { blocks_per_pool: config.blocks_per_pool.min(blocks), ..config };
    let each = config.block * u64::from(config.blocks_per_pool);
    let pools = len.count().div_ceil(each.count()).max(1);
    let capacity = each * pools;
    let host = SpaceId::host(0);
    let space = SpaceConfig { limit: Level::Fraction(1.0), ..SpaceConfig::host(capacity) };
    let manager = ReservationManager::new([(host, space)])?;
    let space = manager.space(host).context("it was configured")?;
    let config = HostPoolConfig { initial_pools: u32::try_from(pools)?, ..config };
    let pinned = HostPool::new(&space, config, [Arc::clone(driver)]);
    pinned.with_context(|| format!("cannot pin {capacity} of host memory"))
}

/// Plain copies between one pinned buffer and memory of the card, on one stream.
pub(super) struct PlainCopies {
    driver: Arc<dyn Driver>,
    memory: DeviceAddr,
    pinned: HostBuffer,
    queue: Stream,
}

impl PlainCopies {
    pub(super) fn new(rig: &Rig, largest: Bytes) -> Result<PlainCopies> {
        let driver = Arc::clone(&rig.driver);
        let memory = driver.alloc_memory(largest);
        let memory =
            memory.with_context(|| format!("the card has no {largest} for plain copies"))?;
        let pinned = driver.alloc_host(largest)?;
        let queue = driver.create_stream()?;
        Ok(PlainCopies { driver, memory, pinned, queue })
    }

    fn slice(&self, len: Bytes) -> HostSlice {
        HostSlice { buffer: self.pinned, offset: Bytes::ZERO, len }
    }

    /// Copies to the host and returns the time until the host sees the completion.
    pub(super) fn to_host(&self, len: Bytes) -> Result<u64> {
        let begun = self.driver.now_ns();
        self.driver.copy_to_host(self.queue, self.memory, self.slice(len))?;
        self.driver.synchronize_stream(self.queue)?;
        Ok(self.driver.now_ns() - begun)
    }

    /// Copies to the card and returns the time until the host sees the completion.
    pub(super) fn to_device(&self, len: Bytes) -> Result<u64> {
        let begun = self.driver.now_ns();
        self.driver.copy_to_device(self.queue, self.slice(len), self.memory)?;
        self.driver.synchronize_stream(self.queue)?;
        Ok(self.driver.now_ns() - begun)
    }

    pub(super) fn close(self) -> Result<()> {
        let PlainCopies { driver, memory, pinned, queue } = self;
        driver.free_memory(memory)?;
        driver.free_host(pinned)?;
        Ok(driver.destroy_stream(queue)?)
    }
}
