//! What malloc/free pairs are measured on: the system's malloc, the driver's own pool, an
//! allocator.
//!
//! Each is a type of its own, so that a timed loop holds nothing but the pair.

use std::mem::MaybeUninit;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use vramp::peers::{Config, Preset};
use vramp::{Allocation, Allocator, Bytes, CloseError, DeviceAddr, Driver, StreamId};
use vramp_driver::Stream;
use vramp_driver::meter::Metered;

/// A source of memory that any thread may use.
pub(crate) trait Subject: Sync {
    /// The stream that a thread works on.
    type Stream: Copy + Send + Sync;
    type Block: Send;

    fn name(&self) -> &'static str;
    fn create_stream(&self) -> Result<Self::Stream>;
    fn malloc(&self, stream: Self::Stream, size: Bytes) -> Result<Self::Block>;
    fn free(&self, stream: Self::Stream, block: Self::Block) -> Result<()>;
    /// Returns a value that depends on the block's address, which the optimiser must not remove.
    fn address(block: &Self::Block) -> u64;
    /// Returns the driver calls so far; `None` where they are not counted.
    fn driver_calls(&self) -> Option<u64>;
}

/// The process's own malloc and free. Rust's default allocator is the system's: on Linux with GNU,
/// glibc.
pub(crate) struct SystemMalloc;

impl Subject for SystemMalloc {
    type Stream = ();
    type Block = Box<[MaybeUninit<u8>]>;

    fn name(&self) -> &'static str {
        "system malloc"
    }

    fn create_stream(&self) -> Result<()> {
        Ok(())
    }

    #[inline(always)]
    fn malloc(&self, (): (), size: Bytes) -> Result<Self::Block> {
        Ok(Box::new_uninit_slice(size.count() as usize))
    }

    #[inline(always)]
    fn free(&self, (): (), block: Self::Block) -> Result<()> {
        drop(block);
        Ok(())
    }

    #[inline(always)]
    fn address(block: &Self::Block) -> u64 {
        block.as_ptr().addr() as u64
    }

    fn driver_calls(&self) -> Option<u64> {
        Some(0)
    }
}

/// The driver's own stream-ordered pool, called directly.
pub(crate) struct DriverPool {
    pub driver: Arc<dyn Driver>,
}

impl DriverPool {
    /// Returns a pool that never releases memory; `None` if the device has no pool.
    pub(crate) fn of(driver: Arc<dyn Driver>) -> Result<Option<DriverPool>> {
        if !driver.info().capabilities.stream_ordered_pool {
            return Ok(None);
        }
        driver.set_pool_threshold(Bytes::new(u64::MAX))?;
        Ok(Some(DriverPool { driver }))
    }
}

impl Subject for DriverPool {
    type Stream = Stream;
    type Block = DeviceAddr;

    fn name(&self) -> &'static str {
        "driver's pool"
    }

    fn create_stream(&self) -> Result<Stream> {
        Ok(self.driver.create_stream()?)
    }

    fn malloc(&self, stream: Stream, size: Bytes) -> Result<DeviceAddr> {
        Ok(self.driver.malloc_async(stream, size)?)
    }

    fn free(&self, stream: Stream, block: DeviceAddr) -> Result<()> {
        Ok(self.driver.free_async(stream, block)?)
    }

    fn address(block: &DeviceAddr) -> u64 {
        block.number()
    }

    /// Not counted: counting would be part of the measured time.
    fn driver_calls(&self) -> Option<u64> {
        None
    }
}

/// An allocator of this project with a driver-call meter, which reads the clock twice a call.
pub(crate) struct MeteredAllocator {
    pub allocator: Allocator,
    pub meter: Arc<Metered<Arc<dyn Driver>>>,
    name: &'static str,
}

impl MeteredAllocator {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        preset: Preset,
        limit: Option<Bytes>,
    ) -> Result<MeteredAllocator> {
        let meter = Arc::new(Metered::new(driver));
        let config = Config::preset(preset).with_limit(limit);
        let allocator = config
            .open(Arc::clone(&meter) as Arc<dyn Driver>)
            .with_context(|| format!("cannot set up {}", preset.name()))?;
        Ok(MeteredAllocator { allocator, meter, name: preset.name() })
    }

    /// Releases all memory and returns the first driver error.
    pub(crate) fn close(self) -> Result<(), CloseError> {
        self.allocator.close()
    }
}

impl Subject for MeteredAllocator {
    type Stream = StreamId;
    type Block = Allocation;

    fn name(&self) -> &'static str {
        self.name
    }

    fn create_stream(&self) -> Result<StreamId> {
        Ok(self.allocator.create_stream()?)
    }

    #[inline(always)]
    fn malloc(&self, stream: StreamId, size: Bytes) -> Result<Allocation> {
        Ok(self.allocator.malloc(size, stream)?)
    }

    #[inline(always)]
    fn free(&self, stream: StreamId, block: Allocation) -> Result<()> {
        self.allocator.free(block, stream).map_err(|error| anyhow!("{error}"))
    }

    #[inline(always)]
    fn address(block: &Allocation) -> u64 {
        block.addr().number()
    }

    fn driver_calls(&self) -> Option<u64> {
        Some(self.meter.snapshot().total().calls)
    }
}
