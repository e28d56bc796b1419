//! Statistics with the names and meanings of `torch.cuda.memory_stats`.

use std::collections::BTreeMap;

use vramp_driver::{Call, DriverError};
use vramp_model::TorchStats;

pub use vramp_core::{Bytes, Census, Counters};
pub use vramp_model::{Stat, StatByPool};

pub use crate::allocator::{Stats, TagId};
pub use crate::error::{SiblingPool, StreamUsage, TagUsage};
pub use crate::scopes::{ScopeId, ScopePeaks};

use crate::Allocator;
use crate::config::Preset;
use crate::error::Unusable;
use crate::seen_peaks::{SeenPeaks, Split};

/// Statistics as in `torch.cuda.memory_stats`. Bytes where the name says so.
///
/// With the presets `torch` and `torch-expandable` those of the card's memory are the ones of PyTorch's
/// allocator. With the others:
///
/// - `small_pool` counts requests up to 1 MiB, and free memory that serves only such requests: that of
///   heaps, and in VPMM the driver's. `large_pool` is the rest. Handles serve both and are all
///   `large_pool`.
/// - `inactive_split` is free memory that a trim cannot release, because its handle also holds a block:
///   free stretches of such handles, free parts of slabs with a block, blocks in threads' caches. What
///   is free in graph arenas has bytes and no number. None in the driver's pool, which does not tell.
/// - Nothing is oversize, and no request waits for all streams.
/// - `allocated` and `freed` are zero for `inactive_split` and for reserved bytes of one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Live blocks.
    pub allocation: StatByPool,
    /// Bytes of live blocks, rounding included.
    pub allocated_bytes: StatByPool,
    /// Bytes of live blocks as requested.
    pub requested_bytes: StatByPool,
    /// Live blocks, and freed ones that work of other streams may still use.
    pub active: StatByPool,
    /// Bytes of `active`, rounding included.
    pub active_bytes: StatByPool,
    /// Physical memory reserved.
    pub reserved_bytes: StatByPool,
    /// Physical handles, which PyTorch calls segments.
    pub segment: StatByPool,
    /// Parts of free memory that cannot be released.
    pub inactive_split: StatByPool,
    /// Bytes of `inactive_split`.
    pub inactive_split_bytes: StatByPool,
    /// Live blocks that are too large to be split.
    pub oversize_allocations: Stat,
    /// Segments that are too large to be split.
    pub oversize_segments: Stat,
    /// Requests retried after a handler or another thread freed memory, or after PyTorch's
    /// allocator returned its cache to the card.
    pub num_alloc_retries: u64,
    /// Requests that failed for want of memory.
    pub num_ooms: u64,
    /// Waits for all streams that freed blocks wait for, as PyTorch's allocator counts them.
    pub num_sync_all_streams: u64,
    /// Handles created.
    pub num_device_alloc: u64,
    /// Handles released.
    pub num_device_free: u64,
    /// Size from which on blocks are not split; `None` without such a bound.
    pub max_split_size: Option<Bytes>,
}

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

impl Allocator {
    /// Returns what statistics need besides the live blocks. With the preset `vramp` no driver call, and
    /// O(n) in the freed blocks that wait and in the streams; otherwise as
    /// [`Allocator::memory_stats`].
    pub fn reserved_memory(&self) -> Result<ReservedMemory, DriverError> {
        Unusable::check_fork_before(Call::PoolUsage)?;
        if self.preset() != Preset::Vramp {
            return self.memory_stats().map(ReservedMemory::of);
        }
        let inner = self.shared().lock_anyway();
        let Some(pool) = inner.manager.virtual_pool() else {
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
        let torch = inner
            .manager
            .caching()
            .map(|caching| (*caching.pool.stats(), caching.pool.config().max_split_size));
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
        Ok(torch.map_or(stats, |(torch, max_split_size)| MemoryStats {
            max_split_size,
            ..stats.with_memory_of(&torch)
        }))
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

impl MemoryStats {
    /// Replaces the statistics of the card's memory with those of PyTorch's allocator.
    fn with_memory_of(self, torch: &TorchStats) -> MemoryStats {
        MemoryStats {
            active: torch.active,
            active_bytes: torch.active_bytes,
            reserved_bytes: torch.reserved_bytes,
            segment: torch.segment,
            inactive_split: torch.inactive_split,
            inactive_split_bytes: torch.inactive_split_bytes,
            oversize_allocations: torch.oversize_allocations,
            oversize_segments: torch.oversize_segments,
            num_alloc_retries: self.num_alloc_retries + torch.num_alloc_retries,
            num_sync_all_streams: torch.num_sync_all_streams,
            num_device_alloc: torch.num_device_alloc,
            num_device_free: torch.num_device_free,
            ..self
        }
    }

    /// Returns every number under PyTorch's name, such as `allocated_bytes.all.peak`. PyTorch prints a
    /// `max_split_size` without bound, here `u64::MAX`, as -1.
    pub fn by_name(&self) -> BTreeMap<String, u64> {
        let mut named = BTreeMap::new();
        let mut add = |name: &str, stat: Stat| {
            let parts = [
                ("current", stat.current),
                ("peak", stat.peak),
                ("allocated", stat.allocated),
                ("freed", stat.freed),
            ];
            for (part, value) in parts {
                named.insert(format!("{name}.{part}"), value);
            }
        };
        for (name, stats) in [
            ("allocation", self.allocation),
            ("allocated_bytes", self.allocated_bytes),
            ("requested_bytes", self.requested_bytes),
            ("active", self.active),
            ("active_bytes", self.active_bytes),
            ("reserved_bytes", self.reserved_bytes),
            ("segment", self.segment),
            ("inactive_split", self.inactive_split),
            ("inactive_split_bytes", self.inactive_split_bytes),
        ] {
            add(&format!("{name}.all"), stats.all);
            add(&format!("{name}.small_pool"), stats.small_pool);
            add(&format!("{name}.large_pool"), stats.large_pool);
        }
        add("oversize_allocations", self.oversize_allocations);
        add("oversize_segments", self.oversize_segments);
        for (name, value) in [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("max_split_size", self.max_split_size.map_or(u64::MAX, Bytes::count)),
        ] {
            named.insert(name.to_owned(), value);
        }
        named
    }

    /// Returns the bytes that are reserved and in no block.
    pub fn unused(&self) -> Bytes {
        let (reserved, active) = (self.reserved_bytes.all.current, self.active_bytes.all.current);
        Bytes::new(reserved.saturating_sub(active))
    }
}
