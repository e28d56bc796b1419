//! Counts with the meaning of `torch.cuda.memory_stats`.

use super::block::Class;

/// One quantity over time: a number of blocks, or bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Current value.
    pub current: u64,
    /// High-water mark.
    pub peak: u64,
    /// Sum of all increases.
    pub allocated: u64,
    /// Sum of all decreases.
    pub freed: u64,
}

impl Stat {
    pub(crate) fn increase(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        self.peak = self.peak.max(self.current);
    }

    pub(crate) fn decrease(&mut self, by: u64) {
        self.current -= by;
        self.freed += by;
    }
}

/// One quantity for both pools together and for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatByPool {
    /// Both pools.
    pub all: Stat,
    /// Pool of requests up to 1 MiB.
    pub small_pool: Stat,
    /// Pool of larger requests.
    pub large_pool: Stat,
}

impl StatByPool {
    fn reset_peaks(&mut self) {
        for stat in [&mut self.all, &mut self.small_pool, &mut self.large_pool] {
            stat.peak = stat.current;
        }
    }

    pub(crate) fn increase(&mut self, class: Class, by: u64) {
        self.all.increase(by);
        self.of(class).increase(by);
    }

    pub(crate) fn decrease(&mut self, class: Class, by: u64) {
        self.all.decrease(by);
        self.of(class).decrease(by);
    }

    fn of(&mut self, class: Class) -> &mut Stat {
        match class {
            Class::Small => &mut self.small_pool,
            Class::Large => &mut self.large_pool,
        }
    }
}

/// Counts of a [`TorchPool`](crate::TorchPool), as in `torch.cuda.memory_stats`.
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
            stat.peak = stat.current;
        }
    }
}
