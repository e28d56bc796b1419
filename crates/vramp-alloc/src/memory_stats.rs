//! Statistics under PyTorch's names, as one value.

use std::collections::BTreeMap;

use vramp_core::{Bytes, Stat, StatByPool};

/// Statistics as in `torch.cuda.memory_stats`. Bytes where the name says so.
///
/// A backend that counts its own memory, as PyTorch's allocator does, gives those of the card's memory.
/// Without one:
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

impl MemoryStats {
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
