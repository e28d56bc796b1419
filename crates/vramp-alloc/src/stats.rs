//! Statistics with the names and meanings of `torch.cuda.memory_stats`.

use std::collections::BTreeMap;

use vramp_driver::{Call, DriverError};
use vramp_model::TorchStats;

pub use vramp_core::{Bytes, Census, Counters};
pub use vramp_model::{Stat, StatByPool};

pub use crate::allocator::{Stats, TagId};
pub use crate::error::{SiblingPool, StreamUsage, TagUsage};

use crate::Allocator;
use crate::error::Unusable;

/// Statistics as in `torch.cuda.memory_stats`. Bytes where the name says so.
///
/// `small_pool` counts requests up to 1 MiB and `large_pool` the others. The virtual pool serves
/// both from the same memory, so statistics of the card's memory have only `all`. With the presets
/// `torch` and `torch-expandable` those are the ones of PyTorch's allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Live blocks.
    pub allocation: StatByPool,
    /// Bytes of live blocks, rounding included.
    pub allocated_bytes: StatByPool,
    /// Bytes of live blocks as requested.
    pub requested_bytes: StatByPool,
    /// Bytes of live blocks, and of freed ones that work of other streams may still use.
    pub active_bytes: Stat,
    /// Physical memory reserved.
    pub reserved_bytes: Stat,
    /// Physical handles, which PyTorch calls segments.
    pub segment: Stat,
    /// Physical memory in no live block: free or in a thread's cache. `allocated` and `freed` are
    /// counted for PyTorch's allocator only.
    pub inactive_split_bytes: Stat,
    /// Requests retried after a handler or another thread freed memory, or after PyTorch's
    /// allocator returned its cache to the card.
    pub num_alloc_retries: u64,
    /// Requests that failed for want of memory.
    pub num_ooms: u64,
    /// Handles created.
    pub num_device_alloc: u64,
    /// Handles released.
    pub num_device_free: u64,
}

impl Allocator {
    /// Returns statistics by PyTorch's names. One driver call where the driver's pool is in use;
    /// O(n) in the regions of the pool.
    ///
    /// With several threads peaks may be off by what they allocate between two misses. The peaks of
    /// `active`, `inactive_split` and `segment` are taken when this method is called; those of
    /// PyTorch's allocator are exact.
    pub fn memory_stats(&self) -> Result<MemoryStats, DriverError> {
        Unusable::check_fork_before(Call::PoolUsage)?;
        let mut inner = self.shared().lock_anyway();
        let counts = inner.counts();
        let counters = inner.manager.counters()?;
        let waiting = inner.manager.census().waiting;
        let [allocation, allocated_bytes, requested_bytes] =
            [0, 1, 2].map(|kind| counts.stats(kind));
        let active = allocated_bytes.all.current + waiting.count();
        let inactive = counters.reserved.count().saturating_sub(active);
        let segments = counters.chunks_created - counters.chunks_released;
        let torch = inner.manager.caching().map(|caching| *caching.pool.stats());
        let (retries, ooms) = (inner.retries, inner.ooms);
        let peaks = &mut inner.seen_peaks;
        peaks.active = peaks.active.max(active).max(allocated_bytes.all.peak);
        peaks.inactive = peaks.inactive.max(inactive);
        peaks.segments = peaks.segments.max(segments);
        let (active_peak, inactive_peak, segments_peak) =
            (peaks.active, peaks.inactive, peaks.segments);
        let Counters { chunks_created, chunks_released, reserved, reserved_peak, .. } = counters;
        let stats = MemoryStats {
            allocation,
            allocated_bytes,
            requested_bytes,
            active_bytes: Stat {
                current: active,
                peak: active_peak,
                allocated: allocated_bytes.all.allocated,
                freed: allocated_bytes.all.allocated - active,
            },
            reserved_bytes: Stat {
                current: reserved.count(),
                peak: reserved_peak.count(),
                allocated: (reserved + counters.released).count(),
                freed: counters.released.count(),
            },
            segment: Stat {
                current: segments,
                peak: segments_peak,
                allocated: chunks_created,
                freed: chunks_released,
            },
            inactive_split_bytes: Stat {
                current: inactive,
                peak: inactive_peak,
                allocated: 0,
                freed: 0,
            },
            num_alloc_retries: retries,
            num_ooms: ooms,
            num_device_alloc: chunks_created,
            num_device_free: chunks_released,
        };
        Ok(torch.map_or(stats, |torch| stats.with_memory_of(&torch)))
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

/// Peaks of quantities that are computed only when statistics are read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SeenPeaks {
    active: u64,
    inactive: u64,
    segments: u64,
}

impl MemoryStats {
    /// Replaces the statistics of the card's memory with those of PyTorch's allocator.
    fn with_memory_of(self, torch: &TorchStats) -> MemoryStats {
        MemoryStats {
            active_bytes: torch.active_bytes.all,
            reserved_bytes: torch.reserved_bytes.all,
            segment: torch.segment.all,
            inactive_split_bytes: torch.inactive_split_bytes.all,
            num_alloc_retries: self.num_alloc_retries + torch.num_alloc_retries,
            num_device_alloc: torch.num_device_alloc,
            num_device_free: torch.num_device_free,
            ..self
        }
    }

    /// Returns every number under PyTorch's name, such as `allocated_bytes.all.peak`.
    pub fn by_name(&self) -> BTreeMap<String, u64> {
        let mut named = BTreeMap::new();
        let mut add = |name: &str, pool: &str, stat: Stat| {
            let parts = [
                ("current", stat.current),
                ("peak", stat.peak),
                ("allocated", stat.allocated),
                ("freed", stat.freed),
            ];
            for (part, value) in parts {
                named.insert(format!("{name}.{pool}.{part}"), value);
            }
        };
        for (name, stats) in [
            ("allocation", self.allocation),
            ("allocated_bytes", self.allocated_bytes),
            ("requested_bytes", self.requested_bytes),
        ] {
            add(name, "all", stats.all);
            add(name, "small_pool", stats.small_pool);
            add(name, "large_pool", stats.large_pool);
        }
        for (name, stat) in [
            ("active_bytes", self.active_bytes),
            ("reserved_bytes", self.reserved_bytes),
            ("segment", self.segment),
            ("inactive_split_bytes", self.inactive_split_bytes),
        ] {
            add(name, "all", stat);
        }
        for (name, value) in [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
        ] {
            named.insert(name.to_owned(), value);
        }
        named
    }

    /// Returns the bytes that PyTorch counts as fragmented: reserved and in no block.
    pub fn unused(&self) -> Bytes {
        Bytes::new(self.inactive_split_bytes.current)
    }
}
