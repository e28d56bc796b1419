//! Statistics with the names and meanings of `torch.cuda.memory_stats`.

use vramp_driver::{Call, DriverError};

pub use vramp_core::{Bytes, Census, Counters, Stat, StatByPool};

pub use crate::allocator::{Stats, TagId};
pub use crate::error::{SiblingPool, StreamUsage, TagUsage};
pub use crate::memory_stats::MemoryStats;
pub use crate::scopes::{ScopeId, ScopePeaks};

use crate::Allocator;
use crate::error::Unusable;
use crate::seen_peaks::{SeenPeaks, Split};

/// Physical memory and freed blocks of an allocator. Of each pair, the first is of requests up to 1 MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReservedMemory {
    /// Physical memory reserved.
    pub reserved: Stat,
    /// The part of it that serves only requests up to 1 MiB, in bytes.
    pub small: u64,
    /// Number of freed blocks that work of other streams may still use.
    pub waiting: [u64; 2],
    /// Bytes of these.
    pub waiting_bytes: [u64; 2],
    /// Handles created.
    pub created: u64,
    /// Handles released.
    pub released: u64,
    /// Requests that were retried.
    pub retries: u64,
    /// Number of streams, slabs and freed blocks that were looked at, with the preset `vramp`.
    pub looked_at: u64,
}

/// # Statistics by PyTorch's names
impl Allocator {
    /// Returns what statistics need besides the live blocks. With the preset `vramp` no driver call, and
    /// O(n) in the freed blocks that wait and in the streams; otherwise as
    /// [`Allocator::memory_stats`].
    pub fn reserved_memory(&self) -> Result<ReservedMemory, DriverError> {
        Unusable::check_fork_before(Call::PoolUsage)?;
        let inner = self.shared().lock_anyway();
        let Some(pool) = inner.manager.virtual_pool().filter(|pool| pool.heaps_serve.is_some())
        else {
            drop(inner);
            return self.memory_stats().map(ReservedMemory::of);
        };
        let found = pool.waiting_memory();
        let waiting = [found.small, found.large];
        let counters = pool.counters();
        // What left the card in a sleep counts as freed until it is back.
        let total = pool.pool.counters().reserved + counters.released;
        Ok(ReservedMemory {
            reserved: Stat {
                current: counters.reserved.count(),
                peak: counters.reserved_peak.count(),
                allocated: total.count(),
                freed: (total - counters.reserved).count(),
            },
            small: found.slabs.count(),
            waiting: waiting.map(|count| count.parts),
            waiting_bytes: waiting.map(|count| count.bytes.count()),
            created: counters.chunks_created,
            released: counters.chunks_released,
            retries: inner.retries,
            looked_at: found.looked_at,
        })
    }

    /// Returns statistics by PyTorch's names. One driver call where the driver's pool is in use;
    /// O(n) in the regions of the pool and in the small blocks.
    ///
    /// With several threads peaks may be off by what they allocate between two misses. The peaks of
    /// `active`, `inactive_split` and `segment`, and of reserved bytes of one pool, are taken when this
    /// method is called; those of PyTorch's allocator are exact.
    pub fn memory_stats(&self) -> Result<MemoryStats, DriverError> {
        Unusable::check_fork_before(Call::PoolUsage)?;
        let mut inner = self.shared().lock_anyway();
        let counts = inner.counts();
        let usage = inner.manager.driver_usage()?;
        let counters = inner.manager.counters_with(usage);
        let free = inner.manager.free_memory();
        let [allocation, allocated_bytes, requested_bytes] =
            [0, 1, 2].map(|kind| counts.stats(kind));
        let driver_free =
            usage.map_or(0, |usage| usage.reserved.saturating_sub(usage.used).count());
        let serves_small = if inner.manager.virtual_pool().is_some() { driver_free } else { 0 };
        let blocks_of = |by_pool: StatByPool, waiting: [u64; 2]| Split {
            small: by_pool.small_pool.current + waiting[0],
            large: by_pool.large_pool.current + waiting[1],
        };
        let active = blocks_of(allocation, free.waiting.map(|count| count.parts));
        let active_bytes =
            blocks_of(allocated_bytes, free.waiting.map(|count| count.bytes.count()));
        let [inactive, inactive_bytes] =
            [free.split.map(|count| count.parts), free.split.map(|count| count.bytes.count())]
                .map(|[small, large]| Split { small, large });
        let reserved = counters.reserved.count();
        let small =
            active_bytes.small + inactive_bytes.small + free.whole_slabs.count() + serves_small;
        let small = small.min(reserved);
        let segments = counters.chunks_created - counters.chunks_released;
        let (retries, ooms) = (inner.retries, inner.ooms);
        let peaks = &mut inner.seen_peaks;
        let Counters { chunks_created, chunks_released, reserved_peak, .. } = counters;
        let segment = Stat {
            current: segments,
            peak: peaks.segments.note(segments),
            allocated: chunks_created,
            freed: chunks_released,
        };
        let mut reserved_bytes = peaks.reserved.note_all(Split { small, large: reserved - small });
        reserved_bytes.all = Stat {
            current: reserved,
            peak: reserved_peak.count(),
            allocated: (counters.reserved + counters.released).count(),
            freed: counters.released.count(),
        };
        let stats = MemoryStats {
            allocation,
            allocated_bytes,
            requested_bytes,
            active: came_as(allocation, peaks.active.note_all(active)),
            active_bytes: came_as(allocated_bytes, peaks.active_bytes.note_all(active_bytes)),
            reserved_bytes,
            segment: StatByPool { all: segment, large_pool: segment, small_pool: Stat::default() },
            inactive_split: peaks.inactive.note_all(inactive),
            inactive_split_bytes: peaks.inactive_bytes.note_all(inactive_bytes),
            oversize_allocations: Stat::default(),
            oversize_segments: Stat::default(),
            num_alloc_retries: retries,
            num_ooms: ooms,
            num_sync_all_streams: 0,
            num_device_alloc: chunks_created,
            num_device_free: chunks_released,
            max_split_size: None,
        };
        Ok(inner.manager.backend().map_or(stats, |backend| backend.complete_stats(stats)))
    }

    /// Resets all peaks to the current values, as `torch.cuda.reset_peak_memory_stats` does.
    pub fn reset_peak_stats(&self) {
        let mut guard = self.shared().lock_anyway();
        let inner = &mut *guard;
        self.shared().refresh(inner);
        inner.base.reset_peaks(inner.tallies.iter().map(|tally| &**tally));
        inner.seen_peaks = SeenPeaks::default();
        inner.manager.reset_peaks();
        inner.tags.iter_mut().for_each(|tag| tag.peak = tag.live);
    }
}

/// Completes a quantity of active blocks by that of live ones: as much came, and the peak is not lower.
fn came_as(live: StatByPool, active: StatByPool) -> StatByPool {
    let whole = |live: Stat, active: Stat| Stat {
        peak: active.peak.max(live.peak),
        allocated: live.allocated,
        // Memory of an arena that ended may wait, too, which is more than its blocks had.
        freed: live.allocated.saturating_sub(active.current),
        ..active
    };
    StatByPool {
        all: whole(live.all, active.all),
        small_pool: whole(live.small_pool, active.small_pool),
        large_pool: whole(live.large_pool, active.large_pool),
    }
}

impl ReservedMemory {
    fn of(stats: MemoryStats) -> ReservedMemory {
        let by_pool = |of: StatByPool| [of.small_pool.current, of.large_pool.current];
        let beyond = |all: StatByPool, live: StatByPool| {
            let ([a, b], [c, d]) = (by_pool(all), by_pool(live));
            [a.saturating_sub(c), b.saturating_sub(d)]
        };
        ReservedMemory {
            reserved: stats.reserved_bytes.all,
            small: stats.reserved_bytes.small_pool.current,
            waiting: beyond(stats.active, stats.allocation),
            waiting_bytes: beyond(stats.active_bytes, stats.allocated_bytes),
            created: stats.num_device_alloc,
            released: stats.num_device_free,
            retries: stats.num_alloc_retries,
            looked_at: 0,
        }
    }
}
