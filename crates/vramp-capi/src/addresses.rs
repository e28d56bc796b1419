//! Maps addresses to allocations, because C frees by address alone.
//!
//! Sharded to keep lock contention low. A block is removed before its memory is freed and inserted
//! after it was allocated, so no address is ever in the map twice.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crossbeam_utils::CachePadded;
use rustc_hash::FxHashMap;
use vramp_alloc::{Allocation, DeviceAddr};

const SHARDS: usize = 64;

type Shard = FxHashMap<u64, Allocation>;

/// Every live block of an allocator, by its address.
pub(crate) struct Addresses {
    shards: [CachePadded<Mutex<Shard>>; SHARDS],
}

impl Addresses {
    pub fn new() -> Addresses {
        Addresses { shards: std::array::from_fn(|_| CachePadded::new(Mutex::default())) }
    }

    #[inline]
    fn shard(&self, addr: u64) -> MutexGuard<'_, Shard> {
        // Blocks are aligned to 512 bytes. The top bits of the product depend on all others.
        let mixed = (addr >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let shard = &self.shards[(mixed >> (64 - SHARDS.ilog2())) as usize];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub fn insert(&self, allocation: Allocation) {
        let addr = allocation.addr().number();
        self.shard(addr).insert(addr, allocation);
    }

    #[inline]
    pub fn remove(&self, addr: u64) -> Option<Allocation> {
        self.shard(addr).remove(&addr)
    }

    /// Calls `f` with the block that begins at `addr`. The block cannot be freed meanwhile.
    pub fn with<R>(&self, addr: u64, f: impl FnOnce(&Allocation) -> R) -> Option<R> {
        self.shard(addr).get(&addr).map(f)
    }

    /// Returns the start and length of the block that contains `addr`. O(n): for error messages and
    /// rare queries.
    pub fn containing(&self, addr: u64) -> Option<(DeviceAddr, u64)> {
        self.shards.iter().find_map(|shard| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let found = shard.values().find(|block| {
                let distance = addr.checked_sub(block.addr().number());
                distance.is_some_and(|distance| distance < block.len().count())
            });
            found.map(|block| (block.addr(), block.len().count()))
        })
    }
}
