//! Options of a pool, its statistics and its errors.

use std::time::Duration;

use vramp_alloc::DriverError;
use vramp_core::Bytes;
use vramp_host::{HostMemoryError, NumaNode, OutOfBounds, PageKind};

use crate::ledger::shell::error::SpaceFull;

/// Options of a [`HostPool`](super::HostPool).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPoolConfig {
    /// Length of a block: whole pages of 4 KiB, and whole granules of the space.
    pub block: Bytes,
    /// Blocks pinned at a time.
    pub blocks_per_pool: u32,
    /// Number of such groups of blocks pinned by [`HostPool::new`](super::HostPool::new).
    pub initial_pools: u32,
    /// Least number of free blocks. With fewer, a background thread pins more. Zero for never.
    pub spare_blocks: u32,
    /// NUMA node of the memory. `None` leaves the choice to the kernel.
    pub node: Option<NumaNode>,
    /// Kind of pages.
    pub pages: PageKind,
    /// Memory that is wholly free for this long is unpinned, at most as long again later. `None` keeps it until
    /// [`HostPool::trim`](super::HostPool::trim).
    pub idle: Option<Duration>,
    /// Least bytes that stay pinned however long they are free. `None` is what the initial pools have.
    pub keep: Option<Bytes>,
}

impl HostPoolConfig {
    /// Returns the bytes that stay pinned however long they are free.
    pub fn floor(&self) -> Bytes {
        let blocks = u64::from(self.initial_pools) * u64::from(self.blocks_per_pool);
        self.keep.unwrap_or(Bytes::new(self.block.count().saturating_mul(blocks)))
    }
}

impl Default for HostPoolConfig {
    /// 128 blocks of 1 MiB at a time, once at first, and at least 32 blocks free. What is idle for ten seconds is
    /// unpinned, down to the first 128.
    fn default() -> HostPoolConfig {
        HostPoolConfig {
            block: Bytes::mib(1),
            blocks_per_pool: 128,
            initial_pools: 1,
            spare_blocks: 32,
            node: None,
            pages: PageKind::Transparent,
            idle: Some(Duration::from_secs(10)),
            keep: None,
        }
    }
}

/// Why blocks could not be allocated. Nothing is charged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostPoolError {
    /// The space or reservation cannot be charged.
    #[error(transparent)]
    Full(#[from] SpaceFull),
    /// The kernel has no memory.
    #[error(transparent)]
    NoMemory(#[from] HostMemoryError),
    /// A device could not pin the memory.
    #[error("host memory could not be pinned: {0}")]
    Pin(#[from] DriverError),
    /// The configuration is invalid.
    #[error("invalid host pool configuration: {0}")]
    Config(&'static str),
    /// The charge is to another space, or not for whole blocks.
    #[error(
        "a charge of {0} cannot pay for {1} of this pool: charge its own space, in whole blocks"
    )]
    WrongCharge(String, Bytes),
    /// The pool is not pinned for the device.
    #[error("the pool is not pinned for {0}: pass all devices to HostPool::new")]
    NotPinnedFor(String),
    /// The range lies outside the allocation.
    #[error(transparent)]
    Outside(#[from] OutOfBounds),
    /// The charge was accepted, but the blocks cannot be pinned: the space has other users.
    #[error(
        "{asked} host blocks are neither free nor can be pinned, of {total}: the space is charged \
         for other memory too; use one space for each pool"
    )]
    Exhausted {
        /// Number of blocks requested.
        asked: u64,
        /// Number of blocks that the capacity of the space allows.
        total: u64,
    },
}

/// Blocks and activity of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPoolStats {
    /// Pinned blocks, free or not.
    pub blocks: u64,
    /// Free blocks.
    pub free_blocks: u64,
    /// Blocks that were dropped while work on a stream uses them.
    pub pending_blocks: u64,
    /// Blocks that are never reused: the device could not tell when the work that uses them ends.
    pub leaked_blocks: u64,
    /// Blocks that a device could not unpin: pinned, and never used. Each [`HostPool::trim`](super::HostPool::trim) tries again.
    pub quarantined_blocks: u64,
    /// Times that memory was pinned while an allocation waited.
    pub pools_on_demand: u64,
    /// Times that memory was pinned ahead of need, including by [`HostPool::new`](super::HostPool::new).
    pub pools_ahead: u64,
    /// Times that memory was unpinned.
    pub pools_unpinned: u64,
    /// Times that a device could not unpin memory.
    pub unpins_failed: u64,
    /// Times that an allocation waited for work on a stream.
    pub waits_for_work: u64,
}
