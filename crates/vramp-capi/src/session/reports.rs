//! What a session tells: history, snapshots, statistics, and the audit.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use vramp_alloc::history::{HistorySize, Trace};
use vramp_alloc::observe::{Event, Registration};
use vramp_alloc::stats::{MemoryStats, Stat, StatByPool};
use vramp_alloc::{AllocError, Allocator, Bytes};
use vramp_driver::Driver;

use super::{Session, check_events};
use crate::abi::vramp_stats_t;
use crate::status::Result;
use crate::writing::write_trace;

impl Session {
    /// Starts to record the last `events` events. Zero stops the recording.
    pub fn record_history(&self, events: u32) -> Result<()> {
        check_events(events)?;
        let mut recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = recording.take() {
            self.allocator.stop_history(&old);
        }
        if events > 0 {
            self.recorded_events.store(events, Ordering::Relaxed);
            let size = HistorySize { events, ..HistorySize::default() };
            *recording = Some(self.allocator.record_history(size, None));
        }
        drop(recording);
        self.other_pools().for_each(|pool| self.record_pool(&pool));
        Ok(())
    }

    /// Records the events of another pool too, if a history is recorded.
    pub(crate) fn record_pool(&self, pool: &Allocator) {
        let recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(recording) = &*recording {
            pool.join_history(recording);
        }
    }

    /// Writes all blocks and segments, and the history if one is recorded, to a file: a PyTorch
    /// snapshot, or a timeline if the path ends with `.json`.
    pub fn write_snapshot(&self, path: &str) -> Result<()> {
        write_trace(&self.snapshot()?, path)
    }

    /// Returns all blocks and segments, and the history if one is recorded, on the device with the number
    /// of the allocator.
    pub(crate) fn snapshot(&self) -> Result<Trace> {
        // A copy of the history, and a list of all blocks that doubles while it grows.
        let recorded = self.recorded_events.load(Ordering::Relaxed) as usize;
        let needed = (self.blocks.count() + recorded) * 256 + (1 << 20);
        vramp_host::check_host_for(needed).map_err(AllocError::HostMemory)?;
        let mut trace = {
            let recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
            self.allocator.snapshot(recording.as_ref())
        };
        for pool in self.other_pools() {
            pool.add_to_snapshot(&mut trace);
        }
        if let Some(number) = self.number {
            trace.move_to_device(number);
        }
        let host = self.host_memory();
        for (name, bytes) in [("pinned", host.pinned), ("used", host.used)] {
            let name = format!("vramp.host.{}.{name}", self.number.unwrap_or(0));
            trace.allocator_settings.push((name, bytes.count().to_string()));
        }
        Ok(trace)
    }

    /// Registers `observer` for every event. Returns the number of the registration.
    pub(crate) fn observe(&self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) -> u64 {
        self.allocator.observe(observer).number()
    }

    /// Removes an observer, a handler or callbacks around a sleep, and waits for calls in progress on other threads.
    /// Returns false if the number is unknown.
    pub fn unobserve(&self, number: u64) -> bool {
        let registration = Registration::from_number(number);
        let regions = self.region_table_if_any();
        self.allocator.unregister(registration)
            || regions.is_some_and(|regions| regions.callbacks.remove(registration))
    }

    pub(crate) fn stats(&self) -> Result<vramp_stats_t> {
        let stats = self.total_stats()?;
        let card = self.device.driver.memory_info()?;
        let host = self.host_memory();
        Ok(vramp_stats_t {
            struct_size: size_of::<vramp_stats_t>() as u64,
            live: stats.live.count(),
            live_peak: stats.live_peak.count(),
            reserved: stats.reserved.count(),
            reserved_peak: stats.reserved_peak.count(),
            placed: stats.placed,
            freed: stats.freed,
            hits: stats.hits,
            misses: stats.misses,
            chunks_created: stats.chunks_created,
            chunks_moved: stats.chunks_moved,
            chunks_reactivated: stats.chunks_reactivated,
            chunks_released: stats.chunks_released,
            moved: stats.moved.count(),
            plans_undone: stats.plans_undone,
            card_free: card.free.count(),
            card_total: card.total.count(),
            callback_panics: stats.callback_panics,
            released: stats.released.count(),
            limit: self.allocator.limit().map_or(0, Bytes::count),
            looked_at: stats.looked_at,
            quarantined: stats.quarantined.count(),
            quarantined_addresses: stats.quarantined_addresses.count(),
            host_pinned: host.pinned.count(),
            host_used: host.used.count(),
        })
    }

    /// Checks the invariants of the allocator, and of its tiers.
    pub fn audit(&self) -> Result<()> {
        if let Some(tiers) = self.tiers_if_open() {
            tiers.manager().audit()?;
            tiers.spaces().audit()?;
        }
        for pool in self.other_pools() {
            pool.audit()?;
        }
        Ok(self.allocator.audit()?)
    }

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
