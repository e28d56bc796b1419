//! PyTorch's statistics of an allocator with its regions: the sums of their pools, peaks included.
//!
//! O(n) in the regions of memory of all pools.

use vramp_alloc::stats::{MemoryStats, Stat, StatByPool};

use crate::session::Session;
use crate::status::Result;

impl Session {
    /// Returns the statistics of `torch.cuda.memory_stats`. Memory that sleeps is not reserved; its blocks
    /// are allocated.
    pub fn memory_stats(&self) -> Result<MemoryStats> {
        let mut all = self.allocator().memory_stats()?;
        for pool in self.other_pools() {
            add(&mut all, &pool.memory_stats()?);
        }
        Ok(all)
    }
}

fn add(to: &mut MemoryStats, more: &MemoryStats) {
    for (to, more) in [
        (&mut to.allocation, &more.allocation),
        (&mut to.allocated_bytes, &more.allocated_bytes),
        (&mut to.requested_bytes, &more.requested_bytes),
        (&mut to.active, &more.active),
        (&mut to.active_bytes, &more.active_bytes),
        (&mut to.reserved_bytes, &more.reserved_bytes),
        (&mut to.segment, &more.segment),
        (&mut to.inactive_split, &more.inactive_split),
        (&mut to.inactive_split_bytes, &more.inactive_split_bytes),
    ] {
        add_by_pool(to, more);
    }
    add_stat(&mut to.oversize_allocations, &more.oversize_allocations);
    add_stat(&mut to.oversize_segments, &more.oversize_segments);
    for (to, more) in [
        (&mut to.num_alloc_retries, more.num_alloc_retries),
        (&mut to.num_ooms, more.num_ooms),
        (&mut to.num_sync_all_streams, more.num_sync_all_streams),
        (&mut to.num_device_alloc, more.num_device_alloc),
        (&mut to.num_device_free, more.num_device_free),
    ] {
        *to += more;
    }
}

fn add_by_pool(to: &mut StatByPool, more: &StatByPool) {
    add_stat(&mut to.all, &more.all);
    add_stat(&mut to.small_pool, &more.small_pool);
    add_stat(&mut to.large_pool, &more.large_pool);
}

fn add_stat(to: &mut Stat, more: &Stat) {
    to.current += more.current;
    to.peak += more.peak;
    to.allocated += more.allocated;
    to.freed += more.freed;
}
