//! An allocator with a manager of buffers and pinned blocks for what leaves; and plain copies.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use vramp_alloc::{Allocator, Bytes, Config, Driver, Preset, StreamId};
use vramp_core::DeviceAddr;
use vramp_defer::{Access, DeferrableBuffer, SpillConfig, SpillManager, SpillParts, SpillStats};
use vramp_driver::{HostBuffer, HostSlice, MeterSnapshot, Metered, Stream};
use vramp_tiers::{
    HostPool, HostPoolConfig, Level, Mover, MoverConfig, ReservationManager, SpaceConfig, SpaceId,
};

use crate::bench::Bench;

/// What a site is made for.
pub(super) struct Plan {
    /// How much leaves or comes at once.
    pub piece: Bytes,
    /// What the allocator may have of the card.
    pub limit: Option<Bytes>,
    /// What may lie on the host at once; pinned ahead, so that no measured spill pins.
    pub host: Bytes,
}

/// A card's buffers, and one stream to use them on.
pub(super) struct Site {
    pub driver: Arc<dyn Driver>,
    meter: Arc<Metered<Arc<dyn Driver>>>,
    allocator: Arc<Allocator>,
    pub manager: SpillManager,
    pub stream: StreamId,
    /// The same as the driver knows it.
    pub queue: Stream,
}

impl Site {
    pub(super) fn new(bench: &Bench, plan: &Plan) -> Result<Site> {
        let meter = Arc::new(Metered::new(bench.driver()?));
        let driver: Arc<dyn Driver> = Arc::clone(&meter) as _;
        let config = Config { limit: plan.limit, ..Config::preset(Preset::Vramp) };
        let allocator = Arc::new(Allocator::new(Arc::clone(&driver), config)?);
        let pool = pool(&driver, plan.host)?;
        let mover = Mover::new(Arc::clone(&driver), &pool, MoverConfig::default())?;
        let config = SpillConfig { piece: plan.piece, ..SpillConfig::default() };
        let allocator_too = Arc::clone(&allocator);
        let parts = SpillParts { allocator: allocator_too, mover, disk: None, budget: None };
        let manager = SpillManager::new(parts, config)?;
        let (stream, queue) = new_stream(&allocator)?;
        Ok(Site { driver, meter, allocator, manager, stream, queue })
    }

    pub(super) fn new_stream(&self) -> Result<(StreamId, Stream)> {
        new_stream(&self.allocator)
    }

    /// Writes all of a buffer and waits until it is written.
    pub(super) fn write(&self, buffer: &DeferrableBuffer) -> Result<()> {
        let lease = buffer.lease(Access::Exclusive, self.stream)?;
        self.driver.fill(self.queue, lease.address(0), 0x5A)?;
        drop(lease);
        self.finish()
    }

    /// Makes all of a buffer leave. How long that took.
    pub(super) fn spill(&self, buffer: &DeferrableBuffer) -> Result<u64> {
        let begun = self.driver.now_ns();
        let spilled = self.manager.spill(buffer.len());
        let took_ns = self.driver.now_ns() - begun;
        let freed = spilled.freed;
        ensure!(freed >= buffer.len(), "{freed} of {} left: {:?}", buffer.len(), spilled.short);
        Ok(took_ns)
    }

    /// Lets a malloc take the buffer's memory, the only one there is, and frees that again. How long
    /// the malloc took.
    pub(super) fn press(&self, buffer: &DeferrableBuffer) -> Result<u64> {
        let page = self.driver.info().limits.page;
        let len = buffer.len().checked_round_up(page).context("a card has no such memory")?;
        self.allocator.set_limit(Some(len))?;
        let begun = self.driver.now_ns();
        let block = self.allocator.malloc(len, self.stream)?;
        let took_ns = self.driver.now_ns() - begun;
        self.allocator.free(block, self.stream)?;
        self.allocator.set_limit(None)?;
        Ok(took_ns)
    }

    /// Gives all idle memory back to the card, and all mappings of it with it.
    pub(super) fn forget(&self) -> Result<()> {
        Ok(self.allocator.empty_cache()?)
    }

    /// Brings a buffer back and waits until its contents are there. How long that took.
    pub(super) fn retrieve(&self, buffer: &DeferrableBuffer) -> Result<u64> {
        let begun = self.driver.now_ns();
        let lease = buffer.lease(Access::Shared, self.stream)?;
        self.finish()?;
        let took_ns = self.driver.now_ns() - begun;
        drop(lease);
        Ok(took_ns)
    }

    /// Waits until all that is queued on the stream is done.
    pub(super) fn finish(&self) -> Result<()> {
        Ok(self.driver.synchronize_stream(self.queue)?)
    }

    pub(super) fn stats(&self) -> SpillStats {
        self.manager.stats()
    }

    pub(super) fn calls(&self) -> MeterSnapshot {
        self.meter.snapshot()
    }

    /// Counts from here on.
    pub(super) fn reset_calls(&self) {
        self.meter.reset();
    }

    /// Checks the books, gives everything back, and tells what failed. Buffers are gone by then.
    pub(super) fn close(self) -> Result<()> {
        let Site { allocator, manager, .. } = self;
        manager.audit()?;
        drop(manager);
        let allocator =
            Arc::into_inner(allocator).context("the manager and its buffers are gone")?;
        Ok(allocator.close()?)
    }
}

fn new_stream(allocator: &Allocator) -> Result<(StreamId, Stream)> {
    let stream = allocator.create_stream()?;
    let queue = allocator.stream(stream).context("the stream was made a moment ago")?;
    Ok((stream, queue))
}

/// A pool of pinned blocks for `len`, all pinned ahead.
fn pool(driver: &Arc<dyn Driver>, len: Bytes) -> Result<HostPool> {
    let config = HostPoolConfig { spare_blocks: 0, ..HostPoolConfig::default() };
    let each = config.block * u64::from(config.blocks_per_pool);
    let pools = len.count().div_ceil(each.count());
    let capacity = each * pools;
    let host = SpaceId::host(0);
    let space = SpaceConfig { limit: Level::Fraction(1.0), ..SpaceConfig::host(capacity) };
    let manager = ReservationManager::new([(host, space)])?;
    let space = manager.space(host).context("it was configured")?;
    let config = HostPoolConfig { initial_pools: u32::try_from(pools)?, ..config };
    let pinned = HostPool::new(&space, config, [Arc::clone(driver)]);
    pinned.with_context(|| format!("{capacity} of the host's memory cannot be pinned"))
}

/// One pinned buffer and as much of the card, to copy between on one stream.
pub(super) struct Plain {
    driver: Arc<dyn Driver>,
    memory: DeviceAddr,
    pinned: HostBuffer,
    queue: Stream,
}

impl Plain {
    pub(super) fn new(site: &Site, largest: Bytes) -> Result<Plain> {
        let driver = Arc::clone(&site.driver);
        let memory = driver.alloc_memory(largest);
        let memory = memory.with_context(|| format!("the card has no {largest} beside"))?;
        let pinned = driver.alloc_host(largest)?;
        let queue = driver.create_stream()?;
        Ok(Plain { driver, memory, pinned, queue })
    }

    fn slice(&self, len: Bytes) -> HostSlice {
        HostSlice { buffer: self.pinned, offset: Bytes::ZERO, len }
    }

    /// How long a copy to the host takes, until the host knows that it is there.
    pub(super) fn to_host(&self, len: Bytes) -> Result<u64> {
        let begun = self.driver.now_ns();
        self.driver.copy_to_host(self.queue, self.memory, self.slice(len))?;
        self.driver.synchronize_stream(self.queue)?;
        Ok(self.driver.now_ns() - begun)
    }

    /// How long a copy to the card takes, until the host knows that it is there.
    pub(super) fn to_device(&self, len: Bytes) -> Result<u64> {
        let begun = self.driver.now_ns();
        self.driver.copy_to_device(self.queue, self.slice(len), self.memory)?;
        self.driver.synchronize_stream(self.queue)?;
        Ok(self.driver.now_ns() - begun)
    }

    pub(super) fn close(self) -> Result<()> {
        let Plain { driver, memory, pinned, queue } = self;
        driver.free_memory(memory)?;
        driver.free_host(pinned)?;
        Ok(driver.destroy_stream(queue)?)
    }
}
