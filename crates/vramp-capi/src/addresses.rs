//! Maps addresses to allocations, because C frees by address alone.
//!
//! Sharded to keep lock contention low; a lock and its unlock are one locked instruction
//! (`brief_lock.rs`). A lookup, an insert and a remove are O(1). The maps keep the
//! capacity of the most blocks that were ever live: 64 bytes or so for each.
//! A block is removed before its memory is freed and inserted
//! after it was allocated, so no address is ever in the map twice.
//!
//! What a reservation pays for a block is beside it in the shard, and is taken out with it. Blocks without
//! one cost a look at an empty map.

use crossbeam_utils::CachePadded;
use rustc_hash::FxHashMap;
use vramp_alloc::sharing::range_of;
use vramp_alloc::{Allocation, DeviceAddr};
use vramp_core::AddrRange;
use vramp_tiers::reserve::Charge;

use crate::brief_lock::{BriefGuard, BriefLock};

const SHARDS: usize = 64;
/// Alignment of blocks: 512 bytes, and 256 in a capture.
const ALIGN: u64 = 256;
/// How many places below an address a search looks up one by one.
const NEAR: u64 = (64 << 10) / ALIGN;

#[derive(Default)]
struct Shard {
    blocks: FxHashMap<u64, Allocation>,
    /// What reservations pay for blocks of the shard.
    charges: FxHashMap<u64, Box<Charge>>,
}

impl Shard {
    #[inline]
    fn charge_of(&mut self, addr: u64) -> Option<Box<Charge>> {
        if self.charges.is_empty() { None } else { self.charges.remove(&addr) }
    }
}

/// A block that was taken out of the map.
pub(crate) struct Taken {
    pub allocation: Allocation,
    /// What a reservation pays for it. Dropped once the block is free. Boxed, because most have none.
    pub charge: Option<Box<Charge>>,
}

/// Every live block of an allocator, by its address.
pub(crate) struct Addresses {
    shards: [CachePadded<BriefLock<Shard>>; SHARDS],
}

impl Addresses {
    pub fn new() -> Addresses {
        let shard = |_| CachePadded::new(BriefLock::new(Shard::default()));
        Addresses { shards: std::array::from_fn(shard) }
    }

    #[inline]
    fn shard(&self, addr: u64) -> BriefGuard<'_, Shard> {
        self.shard_of(addr).lock()
    }

    #[inline]
    fn shard_of(&self, addr: u64) -> &BriefLock<Shard> {
        // Blocks are aligned to 512 bytes. The top bits of the product depend on all others.
        let mixed = (addr >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.shards[(mixed >> (64 - SHARDS.ilog2())) as usize]
    }

    /// Inserts a block that was taken out.
    #[inline]
    pub fn insert(&self, Taken { allocation, charge }: Taken) {
        let addr = allocation.addr().number();
        let mut shard = self.shard(addr);
        if let Some(charge) = charge {
            shard.charges.insert(addr, charge);
        }
        shard.blocks.insert(addr, allocation);
    }

    /// Inserts a new block. Returns it if the host has no memory for its record.
    #[inline]
    pub fn try_insert(&self, allocation: Allocation) -> std::result::Result<(), Allocation> {
        let addr = allocation.addr().number();
        let blocks = &mut self.shard(addr).blocks;
        if blocks.try_reserve(1).is_err() {
            return Err(allocation);
        }
        blocks.insert(addr, allocation);
        Ok(())
    }

    /// Inserts a new block that a reservation pays for. Returns both if the host has no memory for their
    /// record.
    pub fn try_insert_paid(
        &self,
        allocation: Allocation,
        charge: Box<Charge>,
    ) -> std::result::Result<(), (Allocation, Box<Charge>)> {
        let addr = allocation.addr().number();
        let mut shard = self.shard(addr);
        if shard.blocks.try_reserve(1).is_err() || shard.charges.try_reserve(1).is_err() {
            return Err((allocation, charge));
        }
        shard.charges.insert(addr, charge);
        shard.blocks.insert(addr, allocation);
        Ok(())
    }

    /// Inserts a new block as `try_insert` does. Returns it also while another thread has locked its
    /// shard for long.
    #[inline]
    pub fn insert_at_once(&self, allocation: Allocation) -> std::result::Result<(), Allocation> {
        let addr = allocation.addr().number();
        let Some(mut shard) = self.shard_of(addr).lock_at_once() else { return Err(allocation) };
        if shard.blocks.try_reserve(1).is_err() {
            return Err(allocation);
        }
        shard.blocks.insert(addr, allocation);
        Ok(())
    }

    /// Passes the block at `addr` to `take`, and removes it if `take` keeps it. Returns false if it does
    /// not, if there is none, if a reservation pays for it, or while another thread has locked its shard for
    /// long.
    #[inline]
    pub fn take_at_once(
        &self,
        addr: u64,
        take: impl FnOnce(Allocation) -> std::result::Result<(), Allocation>,
    ) -> bool {
        let Some(mut shard) = self.shard_of(addr).lock_at_once() else { return false };
        if !shard.charges.is_empty() && shard.charges.contains_key(&addr) {
            return false;
        }
        let Some(allocation) = shard.blocks.remove(&addr) else { return false };
        match take(allocation) {
            Ok(()) => true,
            Err(allocation) => {
                shard.blocks.insert(addr, allocation);
                false
            }
        }
    }

    #[inline]
    pub fn remove(&self, addr: u64) -> Option<Taken> {
        let mut shard = self.shard(addr);
        let allocation = shard.blocks.remove(&addr)?;
        Some(Taken { allocation, charge: shard.charge_of(addr) })
    }

    /// Returns the number of blocks. O(64).
    pub fn count(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().blocks.len()).sum()
    }

    /// Returns the addresses of all blocks, in no order. O(n).
    pub fn ranges(&self) -> Vec<AddrRange> {
        let mut ranges = Vec::new();
        for shard in &self.shards {
            ranges.extend(shard.lock().blocks.values().map(range_of));
        }
        ranges
    }

    /// Calls `f` with the block that begins at `addr`. The block cannot be freed meanwhile.
    pub fn with<R>(&self, addr: u64, f: impl FnOnce(&Allocation) -> R) -> Option<R> {
        self.shard(addr).blocks.get(&addr).map(f)
    }

    /// Returns the start and length of the block that contains `addr`. Looks up the places up to
    /// 64 KiB below `addr`, and then searches whole shards as long as they have at most `budget`
    /// places together. So it finds every block if `budget` is [`usize::MAX`].
    pub fn containing(&self, addr: u64, budget: usize) -> Option<(DeviceAddr, u64)> {
        self.search(addr, budget).0
    }

    /// Returns also how many places it looked at.
    fn search(&self, addr: u64, budget: usize) -> (Option<(DeviceAddr, u64)>, usize) {
        let containing = |block: &Allocation| {
            let (start, len) = (block.addr(), block.len().count());
            let distance = addr.checked_sub(start.number());
            distance.is_some_and(|distance| distance < len).then_some((start, len))
        };
        for step in 0..NEAR {
            let Some(start) = (addr & !(ALIGN - 1)).checked_sub(step * ALIGN) else { break };
            if let Some(found) = self.with(start, containing).flatten() {
                return (Some(found), step as usize + 1);
            }
        }
        let mut looked_at = NEAR as usize;
        for shard in &self.shards {
            let blocks = &shard.lock().blocks;
            // Walking a map takes time by its capacity, which stays when blocks are freed.
            if looked_at.saturating_add(blocks.capacity()) > budget {
                break;
            }
            looked_at += blocks.capacity();
            if let Some(found) = blocks.values().find_map(containing) {
                return (Some(found), looked_at);
            }
        }
        (None, looked_at)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vramp_alloc::{Allocator, Bytes, Config};

    use super::*;

    #[test]
    fn explaining_a_wrong_address_takes_as_long_with_100_000_blocks_as_with_10() {
        let driver = vramp_alloc::open("sim:h200").unwrap();
        let allocator = Allocator::new(Arc::clone(&driver), Config::default()).unwrap();
        let stream = allocator.create_stream().unwrap();
        let addresses = Addresses::new();
        let keep = |size| {
            let block = allocator.malloc(size, stream).unwrap();
            let addr = block.addr();
            addresses.insert(Taken { allocation: block, charge: None });
            addr.number()
        };
        let large = keep(Bytes::mib(512));
        assert!((0..10).all(|_| keep(Bytes::kib(4)) != large));
        let (nowhere, budget) = (u64::MAX, 1 << 14);
        assert!(addresses.search(nowhere, budget).1 <= budget);
        let far = large + (300 << 20);
        assert_eq!(addresses.containing(far, budget).map(|(start, _)| start.number()), Some(large));
        let blocks: Vec<u64> = (0..100_000).map(|_| keep(Bytes::new(512))).collect();
        assert!(addresses.search(nowhere, budget).1 <= budget);
        let (found, looked_at) = addresses.search(blocks[77_777] + 100, budget);
        assert_eq!((found.map(|(start, _)| start.number()), looked_at), (Some(blocks[77_777]), 1));
        let (found, _) = addresses.search(far, usize::MAX);
        assert_eq!(found.map(|(start, _)| start.number()), Some(large));
        // Freed blocks leave their places in the maps.
        for addr in blocks {
            allocator.free(addresses.remove(addr).unwrap().allocation, stream).unwrap();
        }
        assert!(addresses.search(nowhere, budget).1 <= budget);
    }
}
