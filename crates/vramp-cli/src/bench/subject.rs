//! What pairs are measured on: the system's malloc, the driver's own pool, an allocator.
//!
//! Each is a type of its own, so that a timed loop holds nothing but the pair.

use std::mem::MaybeUninit;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use vramp_alloc::{
    Allocation, Allocator, Bytes, Config, DeviceAddr, Driver, DriverError, Preset, StreamId,
};
use vramp_driver::{Metered, Stream};

/// Takes and frees memory, on any thread.
pub(super) trait Subject: Sync {
    /// What a thread works on: a stream.
    type Lane: Copy + Send + Sync;
    type Block: Send;

    fn name(&self) -> &'static str;
    fn new_lane(&self) -> Result<Self::Lane>;
    fn take(&self, lane: Self::Lane, size: Bytes) -> Result<Self::Block>;
    fn give(&self, lane: Self::Lane, block: Self::Block) -> Result<()>;
    /// Something that depends on where the block is, for the optimiser to keep.
    fn place(block: &Self::Block) -> u64;
    /// Calls that reached the driver so far, where they are counted.
    fn driver_calls(&self) -> Option<u64>;
}

/// Malloc and free as this program has them. Rust's default allocator is the system's: on Linux
/// with GNU, glibc.
pub(super) struct System;

impl System {
    pub(super) const NAME: &str = "system malloc";
}

impl Subject for System {
    type Lane = ();
    type Block = Box<[MaybeUninit<u8>]>;

    fn name(&self) -> &'static str {
        System::NAME
    }

    fn new_lane(&self) -> Result<()> {
        Ok(())
    }

    #[inline(always)]
    fn take(&self, (): (), size: Bytes) -> Result<Self::Block> {
        Ok(Box::new_uninit_slice(size.count() as usize))
    }

    #[inline(always)]
    fn give(&self, (): (), block: Self::Block) -> Result<()> {
        drop(block);
        Ok(())
    }

    #[inline(always)]
    fn place(block: &Self::Block) -> u64 {
        block.as_ptr().addr() as u64
    }

    fn driver_calls(&self) -> Option<u64> {
        Some(0)
    }
}

/// The driver's own pool, called without anything between.
pub(super) struct DriverPool {
    pub driver: Arc<dyn Driver>,
}

impl DriverPool {
    pub(super) const NAME: &str = "driver's pool";

    /// A pool that keeps what it has. `None` where the device has none.
    pub(super) fn of(driver: Arc<dyn Driver>) -> Result<Option<DriverPool>> {
        if !driver.info().capabilities.stream_ordered_pool {
            return Ok(None);
        }
        driver.set_pool_threshold(Bytes::new(u64::MAX))?;
        Ok(Some(DriverPool { driver }))
    }
}

impl Subject for DriverPool {
    type Lane = Stream;
    type Block = DeviceAddr;

    fn name(&self) -> &'static str {
        DriverPool::NAME
    }

    fn new_lane(&self) -> Result<Stream> {
        Ok(self.driver.create_stream()?)
    }

    fn take(&self, lane: Stream, size: Bytes) -> Result<DeviceAddr> {
        Ok(self.driver.malloc_async(lane, size)?)
    }

    fn give(&self, lane: Stream, block: DeviceAddr) -> Result<()> {
        Ok(self.driver.free_async(lane, block)?)
    }

    fn place(block: &DeviceAddr) -> u64 {
        block.number()
    }

    /// Not counted: counting would be part of the time.
    fn driver_calls(&self) -> Option<u64> {
        None
    }
}

/// An allocator of this project. Its driver calls are counted, which costs each one two looks at
/// the clock.
pub(super) struct Managed {
    pub allocator: Allocator,
    pub meter: Arc<Metered<Arc<dyn Driver>>>,
    name: &'static str,
}

impl Managed {
    pub(super) fn new(
        driver: Arc<dyn Driver>,
        preset: Preset,
        limit: Option<Bytes>,
    ) -> Result<Managed> {
        let meter = Arc::new(Metered::new(driver));
        let config = Config { limit, ..Config::preset(preset) };
        let allocator = Allocator::new(Arc::clone(&meter) as Arc<dyn Driver>, config)
            .with_context(|| format!("cannot set up {}", preset.name()))?;
        Ok(Managed { allocator, meter, name: preset.name() })
    }

    /// Gives everything back, and tells what failed.
    pub(super) fn close(self) -> Result<(), DriverError> {
        self.allocator.close()
    }
}

impl Subject for Managed {
    type Lane = StreamId;
    type Block = Allocation;

    fn name(&self) -> &'static str {
        self.name
    }

    fn new_lane(&self) -> Result<StreamId> {
        Ok(self.allocator.create_stream()?)
    }

    #[inline(always)]
    fn take(&self, lane: StreamId, size: Bytes) -> Result<Allocation> {
        Ok(self.allocator.malloc(size, lane)?)
    }

    #[inline(always)]
    fn give(&self, lane: StreamId, block: Allocation) -> Result<()> {
        self.allocator.free(block, lane).map_err(|error| anyhow!("{error}"))
    }

    #[inline(always)]
    fn place(block: &Allocation) -> u64 {
        block.addr().number()
    }

    fn driver_calls(&self) -> Option<u64> {
        Some(self.meter.snapshot().total().calls)
    }
}
