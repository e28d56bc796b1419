//! Totals since a pool was created.

use std::cell::Cell;

use crate::Bytes;

/// Totals of a pool since it was created. All but `live`, `reserved` and what is
/// quarantined only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Allocated bytes as requested, without rounding.
    pub live: Bytes,
    /// Peak of `live`.
    pub live_peak: Bytes,
    /// Physical memory of the pool.
    pub reserved: Bytes,
    /// Peak of `reserved`.
    pub reserved_peak: Bytes,
    /// Blocks placed without a plan: in the stream's own free memory, or in another stream's whose
    /// work was over.
    pub hits: u64,
    /// Blocks that needed at least one plan.
    pub misses: u64,
    /// Blocks placed.
    pub placed: u64,
    /// Blocks freed.
    pub freed: u64,
    /// Chunks created.
    pub chunks_created: u64,
    /// Chunks mapped at a new address.
    pub chunks_moved: u64,
    /// Chunks moved to an address where they were still mapped.
    pub chunks_reactivated: u64,
    /// Chunks released to the device.
    pub chunks_released: u64,
    /// Bytes of the chunks released to the device.
    pub released: Bytes,
    /// Bytes of the chunks moved or reactivated.
    pub moved: Bytes,
    /// Plans that failed and were undone.
    pub plans_undone: u64,
    /// Physical memory, part of `reserved`, that a failed driver call left unusable until a trim releases
    /// it.
    pub quarantined: Bytes,
    /// Addresses that a failed driver call left unusable until a trim unmaps them.
    pub quarantined_addresses: Bytes,
    /// Panics of the user's callbacks that an allocator caught. Zero in a pool, which calls none.
    pub callback_panics: u64,
    /// Regions, chunks, streams, slabs, pieces and waiting entries that requests looked at, beside
    /// those found by one search of an index. It says how the cost of requests grows with the pool.
    pub looked_at: u64,
}

impl Counters {
    /// Counts a block.
    pub(crate) fn count_placed(&mut self, requested: Bytes, planned: bool) {
        self.live += requested;
        self.live_peak = self.live_peak.max(self.live);
        self.placed += 1;
        if planned {
            self.misses += 1;
        } else {
            self.hits += 1;
        }
    }
}

/// Counts what requests look at: planners, which change nothing, count too.
#[derive(Clone, Debug, Default)]
pub(crate) struct LookedAt(Cell<u64>);

impl LookedAt {
    #[inline]
    pub(crate) fn add(&self, count: usize) {
        self.0.set(self.0.get() + count as u64);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.get()
    }
}
