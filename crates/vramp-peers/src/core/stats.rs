//! Counts with the meaning of `torch.cuda.memory_stats`.

use vramp_core::{Stat, StatByPool};

use super::block::Class;

/// A quantity that is counted for each class of blocks.
pub(crate) trait ByClass {
    fn increase(&mut self, class: Class, by: u64);
    fn decrease(&mut self, class: Class, by: u64);
}

impl ByClass for StatByPool {
    fn increase(&mut self, class: Class, by: u64) {
        self.all.increase(by);
        of(self, class).increase(by);
    }

    fn decrease(&mut self, class: Class, by: u64) {
        self.all.decrease(by);
        of(self, class).decrease(by);
    }
}

fn of(stat: &mut StatByPool, class: Class) -> &mut Stat {
    match class {
        Class::Small => &mut stat.small_pool,
        Class::Large => &mut stat.large_pool,
    }
}

/// Counts of a [`TorchPool`](super::TorchPool), as in `torch.cuda.memory_stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TorchStats {
    /// Allocated blocks.
    pub allocation: StatByPool,
    /// Segments allocated from the driver, without expandable ones.
    pub segment: StatByPool,
    /// Allocated blocks, and freed ones that another stream still uses.
    pub active: StatByPool,
    /// Free blocks that share a segment, so they cannot be released; without expandable segments.
    pub inactive_split: StatByPool,
    /// Bytes of `allocation`, rounded up.
    pub allocated_bytes: StatByPool,
    /// Bytes reserved from the driver.
    pub reserved_bytes: StatByPool,
    /// Bytes of `active`.
    pub active_bytes: StatByPool,
    /// Bytes of `inactive_split`.
    pub inactive_split_bytes: StatByPool,
    /// Bytes of `active`, as requested.
    pub requested_bytes: StatByPool,
    /// Allocated blocks that are too large to be split.
    pub oversize_allocations: Stat,
    /// Segments that are too large to be split.
    pub oversize_segments: Stat,
    /// Requests retried after all unused segments were released.
    pub num_alloc_retries: u64,
    /// Requests that failed.
    pub num_ooms: u64,
    /// Waits for all streams that freed blocks wait for, on a full card. Also counted if there were
    /// none.
    pub num_sync_all_streams: u64,
    /// Calls that reserved memory from the driver.
    pub num_device_alloc: u64,
    /// Calls that released memory to the driver.
    pub num_device_free: u64,
}

impl TorchStats {
    pub(crate) fn reset_peaks(&mut self) {
        for stats in [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ] {
            stats.reset_peaks();
        }
        for stat in [&mut self.oversize_allocations, &mut self.oversize_segments] {
            stat.reset_peak();
        }
    }
}
