//! The pools of a session: the allocator's own, those of its regions, and that of plain allocations.

use std::sync::{Arc, PoisonError};

use vramp_alloc::stats::{ReservedMemory, Stat, Stats};
use vramp_alloc::{Allocator, Bytes};
use vramp_core::{AddrRange, DeviceAddr};
use vramp_tiers::host::{HostPool, HostPoolConfig};
use vramp_tiers::movers::{Mover, MoverConfig};
use vramp_tiers::regions::{Backup, Region, RegionError, Regions, SleepCallbacks};
use vramp_tiers::{ReservationManager, SpaceConfig, SpaceId};

use super::Session;
use crate::options;
use crate::region_disk;
use crate::regions::{
    Choice, Owner, PinnedMemory, RegionTable, Table, Tagged, choose, is_any_scope, no_region,
    note_found,
};
use crate::status::{Failure, Kind, Result};

impl Session {
    /// Returns the pool of plain allocations. The first call creates it.
    pub(crate) fn plain_pool(&self) -> Result<&Allocator> {
        if let Some(plain) = self.plain.get() {
            return Ok(plain);
        }
        let made = vramp_peers::plain_pool(&self.allocator, "plain")?;
        // Where another thread was first, this one goes.
        if self.plain.set(made).is_ok()
            && let Some(plain) = self.plain.get()
        {
            self.record_pool(plain);
        }
        Ok(self.plain.get().expect("it was set"))
    }

    /// Returns the pool of plain allocations, if there is one.
    pub(crate) fn plain_pool_if_any(&self) -> Option<&Allocator> {
        self.plain.get()
    }

    /// Returns the table of regions.
    pub(crate) fn region_table(&self) -> Result<&Arc<RegionTable>> {
        self.regions.as_ref().ok_or_else(|| {
            let text = "a pool for communication libraries has no regions: use the allocator's";
            Failure::new(Kind::Unsupported, text)
        })
    }

    /// Returns the table of regions; `None` for a pool that serves none.
    pub(crate) fn region_table_if_any(&self) -> Option<&Arc<RegionTable>> {
        self.regions.as_ref()
    }

    /// Returns the number of the device in the process, of an allocator that all interfaces share.
    pub(crate) fn device_number(&self) -> Option<u16> {
        self.number.filter(|_| self.stays_open)
    }

    /// Returns the counts of the allocator and its other pools. The peaks are sums of their peaks, so they
    /// may be above the peak of the sum.
    pub fn total_stats(&self) -> Result<vramp_alloc::stats::Stats> {
        let mut total = self.allocator.stats()?;
        for pool in self.other_pools() {
            total = sum(total, pool.stats()?);
        }
        Ok(total)
    }

    /// Calls `call` for the allocator, and then for its other pools.
    pub(crate) fn in_all_pools(&self, mut call: impl FnMut(&Allocator)) {
        call(&self.allocator);
        self.other_pools().for_each(|pool| call(&pool));
    }

    /// Returns the number of exported blocks, and the number and bytes of pinned handles, those of regions as well.
    pub fn exported_and_pinned(&self) -> (usize, (u64, Bytes)) {
        let (mut exported, mut handles, mut bytes) = (0, 0, Bytes::ZERO);
        self.in_all_pools(|pool| {
            let pinned = pool.pinned();
            (exported, handles, bytes) =
                (exported + pool.exported(), handles + pinned.0, bytes + pinned.1);
        });
        (exported, (handles, bytes))
    }

    /// Sets all peaks to the current values, those of regions as well. O(threads) for each of them.
    pub fn reset_peaks(&self) {
        self.in_all_pools(Allocator::reset_peak_stats);
    }

    /// Returns the memory of the allocator and its other pools; that of regions that sleep is not reserved. The
    /// peak is the sum of their peaks.
    pub(crate) fn reserved_memory(&self) -> Result<ReservedMemory> {
        let mut total = self.allocator.reserved_memory()?;
        for pool in self.other_pools() {
            total = sum_of_memory(total, pool.reserved_memory()?);
        }
        Ok(total)
    }

    /// Releases idle memory of the card until at most `to` bytes of the pool are reserved, and all idle pinned
    /// memory of the host.
    pub fn trim(&self, to: u64) -> Result<()> {
        self.allocator.trim(Bytes::new(to))?;
        self.other_pools().try_for_each(|pool| pool.trim(Bytes::ZERO))?;
        if let Some(regions) = self.regions_if_any() {
            regions.reclaim();
        }
        for pool in self.host_pools() {
            pool.trim(Bytes::ZERO);
        }
        Ok(())
    }

    /// Sets the limit of reserved bytes. Zero means the memory of the device.
    pub fn set_limit(&self, limit: u64) -> Result<()> {
        Ok(self.allocator.set_limit((limit > 0).then_some(Bytes::new(limit)))?)
    }

    /// Sets the limit of reserved bytes from an option's value, such as `80GiB` or `90%`. `None` is the memory
    /// of the device. Idle memory above the limit is released at once.
    ///
    /// # Errors
    /// The limit is no size or is below a page, or a driver call failed.
    pub fn set_limit_text(&self, limit: Option<&str>) -> Result<()> {
        let Some(limit) = limit else { return self.set_limit(0) };
        let limits = self.device.driver.info().limits;
        self.set_limit(options::limit_of(limit, limits.memory, limits.page)?.count())
    }

    /// Sets the limit as a fraction of the device's memory.
    pub(crate) fn set_fraction(&self, fraction: f64) -> Result<()> {
        Ok(self.allocator.set_memory_fraction(fraction)?)
    }

    /// Returns the region that requests of this thread go to, and creates it if there is none. `None` if
    /// they go to the pool.
    #[inline]
    pub(crate) fn region_of_thread(&self) -> Result<Option<Arc<Region>>> {
        if is_any_scope() { self.find_region_of_thread() } else { Ok(None) }
    }

    #[cold]
    fn find_region_of_thread(&self) -> Result<Option<Arc<Region>>> {
        let (scope, tagged) = match self.choose() {
            Choice::Pool => return Ok(None),
            Choice::Found(region) => return Ok(Some(region)),
            Choice::New(scope, tagged) => (scope, tagged),
        };
        let region = self.region(&tagged)?;
        note_found(scope, self.allocator().number(), region.allocator().number());
        Ok(Some(region))
    }

    fn choose(&self) -> Choice {
        let Some(table) = &self.regions else { return Choice::Pool };
        choose(self.device_number(), self.allocator().number(), table)
    }

    /// Returns the region that requests of this thread go to, `None` if they go to the pool, and an error
    /// if it has to be looked up.
    #[inline]
    pub(crate) fn region_at_hand(&self) -> std::result::Result<Option<Arc<Region>>, ()> {
        if !is_any_scope() {
            return Ok(None);
        }
        match self.choose() {
            Choice::Pool => Ok(None),
            Choice::Found(region) => Ok(Some(region)),
            Choice::New(..) => Err(()),
        }
    }

    /// Calls `call`, and if it found no disk for a backup once more with the disk of the process.
    pub(crate) fn with_disk<T>(
        &self,
        call: impl Fn() -> std::result::Result<T, RegionError>,
    ) -> Result<T> {
        match call() {
            Err(RegionError::NoDisk { .. }) => {
                region_disk::open_default()?;
                self.region_table()?.use_what_counts();
                Ok(call()?)
            }
            called => Ok(called?),
        }
    }

    /// Returns the host memory of the regions that is used while no tiers are open, and creates it if there is
    /// none.
    pub(crate) fn own_host_pool(&self) -> Result<HostPool> {
        let regions = self.region_table()?;
        let mut host = regions.host();
        let own = match host.own.take() {
            Some(own) => own,
            None => own_mover(self, regions.keep)?,
        };
        Ok(host.own.insert(own).pool().clone())
    }

    /// Returns the region with a tag, and creates it if there is none.
    pub(crate) fn region(&self, tagged: &Tagged) -> Result<Arc<Region>> {
        let needs_disk = tagged.options.backup == Backup::Disk;
        let regions = self.region_table()?;
        if self.regions_if_any().is_none() {
            region_disk::register(regions);
        }
        if needs_disk && regions.host().disk().is_none() {
            region_disk::open_default()?;
        }
        // The pool and its host memory are created while frees go on, by one thread at a time.
        let mut host = regions.host();
        if host.own.is_none() {
            host.own = Some(own_mover(self, regions.keep)?);
        }
        let (table, callbacks) = (&regions.table, &regions.callbacks);
        let regions = self.regions_if_any().unwrap_or_else(|| {
            let mover = host.mover().expect("there is the allocator's own");
            Regions::with_callbacks(mover.clone(), callbacks.clone())
        });
        if needs_disk {
            regions.set_disk(host.disk());
        }
        let region = regions.region(self.allocator(), &tagged.tag, tagged.options)?;
        let number = region.allocator().number();
        let mut table = table.write().unwrap_or_else(PoisonError::into_inner);
        table.regions = Some(regions);
        table.by_pool.insert(number, Arc::clone(&region));
        drop((table, host));
        self.record_pool(region.allocator());
        Ok(region)
    }

    /// Removes a region that has no memory once its idle memory went back to the card. Scopes with its tag
    /// create it anew when they need it. Waits for the work of the allocator's streams. O(log regions).
    pub fn remove_region(&self, tag: &str) -> Result<()> {
        let Some(table) = self.region_table_if_any() else { return Err(no_region(tag)) };
        let regions = self.regions_if_any().ok_or_else(|| no_region(tag))?;
        if self.allocator().any_captures()? {
            let text = "a stream captures a graph, which may use a region: end the capture first";
            return Err(Failure::new(Kind::Capture, text));
        }
        {
            let region = regions.get(tag)?;
            let pool = region.allocator();
            if pool.live().is_zero() && !pool.is_asleep() {
                pool.wait_for_freed_memory()?;
                pool.trim(Bytes::ZERO)?;
            }
        }
        // As while one is created. What was freed until here is looked up; a free later finds no block.
        let host = table.host();
        let mut table = table.table.write().unwrap_or_else(PoisonError::into_inner);
        let removed = regions.remove_unused(tag, 1)?;
        let by_pool = table.by_pool.remove(&removed.allocator().number());
        drop((table, host));
        // Closes its pool, which waits: outside of the locks.
        drop((by_pool, removed));
        for pool in self.host_pools() {
            pool.trim(pool.floor());
        }
        Ok(())
    }

    /// Returns the host memory of the regions and of the open tiers.
    pub(crate) fn host_pools(&self) -> Vec<HostPool> {
        self.region_table_if_any().map_or_else(Vec::new, |table| table.host_pools())
    }

    /// Returns how much of it is pinned and used. Queries events.
    pub fn host_memory(&self) -> PinnedMemory {
        PinnedMemory::of(&self.host_pools())
    }

    /// Returns the regions; `None` if none was created.
    pub fn regions_if_any(&self) -> Option<Regions> {
        let table = self.region_table_if_any()?;
        table.table.read().unwrap_or_else(PoisonError::into_inner).regions.clone()
    }

    /// Returns all regions, in no order.
    pub(crate) fn all_regions(&self) -> Vec<Arc<Region>> {
        let Some(table) = self.region_table_if_any() else { return Vec::new() };
        let table = table.table.read().unwrap_or_else(PoisonError::into_inner);
        table.by_pool.values().cloned().collect()
    }

    /// Returns the pools beside this one: those of the regions, and that of plain allocations.
    pub(crate) fn other_pools(&self) -> impl Iterator<Item = Owner<'_>> {
        let plain = self.plain_pool_if_any().map(Owner::Own);
        plain.into_iter().chain(self.all_regions().into_iter().map(Owner::Region))
    }

    /// Returns the pool with a number: this one, that of plain allocations, or that of a region. This one if
    /// there is none.
    #[inline]
    pub(crate) fn owner(&self, pool_number: u64) -> Owner<'_> {
        if pool_number == self.allocator().number() {
            return Owner::Own(self.allocator());
        }
        self.region_owner(pool_number)
    }

    #[cold]
    fn region_owner(&self, pool_number: u64) -> Owner<'_> {
        if let Some(plain) = self.plain_pool_if_any().filter(|plain| plain.number() == pool_number)
        {
            return Owner::Own(plain);
        }
        let found = self.region_table_if_any().and_then(|table| {
            let table = table.table.read().unwrap_or_else(PoisonError::into_inner);
            table.by_pool.get(&pool_number).cloned()
        });
        found.map_or(Owner::Own(self.allocator()), Owner::Region)
    }

    /// Calls `call` for this pool and then for those of the regions, until one succeeds: for memory by its
    /// addresses, of which each pool has its own. Returns the first error if none does.
    pub(crate) fn in_any_pool<R, E>(
        &self,
        call: impl Fn(&Allocator) -> std::result::Result<R, E>,
    ) -> std::result::Result<R, E> {
        call(self.allocator()).or_else(|error| {
            let regions = self.all_regions();
            regions.iter().find_map(|region| call(region.allocator()).ok()).ok_or(error)
        })
    }

    /// Returns the regions in which graphs pin nothing.
    pub(crate) fn regions_without_pins(&self) -> Vec<Arc<Region>> {
        let mut regions = self.all_regions();
        regions.retain(|region| !region.options().graph_pins);
        regions
    }

    /// Calls `call` for this pool, and if that fails for the region that has the addresses. Returns the region's
    /// error, or the first one if no region has them. O(regions) after a failure.
    pub(crate) fn in_pool_of<R, E>(
        &self,
        range: AddrRange,
        call: impl Fn(&Allocator) -> std::result::Result<R, E>,
    ) -> std::result::Result<R, E> {
        call(self.allocator()).or_else(|error| {
            let regions = self.all_regions();
            match regions.iter().find(|region| region.allocator().has_addresses(range)) {
                Some(region) => call(region.allocator()),
                None => Err(error),
            }
        })
    }

    /// Calls `call` with the regions that have these tags. Does nothing without tags.
    ///
    /// # Errors
    /// There are no regions, or those of `call`.
    pub fn with_regions(
        &self,
        tags: &[String],
        call: impl Fn(&Regions, &[&str]) -> std::result::Result<(), RegionError>,
    ) -> Result<()> {
        let names: Vec<&str> = tags.iter().map(String::as_str).collect();
        match (self.regions_if_any(), names.first()) {
            (Some(regions), _) => self.with_disk(|| call(&regions, &names)),
            (None, Some(tag)) => Err(no_region(tag)),
            (None, None) => Ok(()),
        }
    }

    /// Calls `call` with the regions, for the backup of a block.
    ///
    /// # Errors
    /// There are no regions, or those of `call`.
    pub fn with_backups(
        &self,
        call: impl FnOnce(&Regions) -> std::result::Result<(), RegionError>,
    ) -> Result<()> {
        let Some(regions) = self.regions_if_any() else {
            let text = "the allocator has no regions: only memory of a region has a backup";
            return Err(Failure::new(Kind::Region, text));
        };
        Ok(call(&regions)?)
    }

    /// Lets regions sleep, in this order and as far as needed, when a request of the allocator finds no
    /// memory. Returns the number of the registration, for [`Session::unobserve`].
    ///
    /// # Errors
    /// A region is unknown.
    pub fn pause_regions_on_pressure(&self, tags: &[String]) -> Result<u64> {
        let names: Vec<&str> = tags.iter().map(String::as_str).collect();
        match (self.regions_if_any(), names.first()) {
            (Some(regions), _) => Ok(regions.on_pressure(self.allocator(), &names)?.number()),
            (None, Some(tag)) => Err(no_region(tag)),
            (None, None) => {
                let text = "the allocator has no regions: allocate in one first";
                Err(Failure::new(Kind::Region, text))
            }
        }
    }

    /// Returns the tag of the region in whose addresses a range lies. `None` if it is in none. O(regions).
    pub fn region_at(&self, address: u64, size: u64) -> Option<String> {
        let range = AddrRange::new(DeviceAddr::new(address), Bytes::new(size));
        range.checked_end()?;
        let regions = self.all_regions();
        let owner = regions.iter().find(|region| region.allocator().has_addresses(range));
        owner.map(|region| region.tag().to_owned())
    }

    /// Registers callbacks around the sleep of regions, also of those that are created later. Returns the number of the
    /// registration, for [`Session::unobserve`].
    ///
    /// # Errors
    /// The pool serves no regions.
    pub fn around_sleep(&self, callbacks: SleepCallbacks) -> Result<u64> {
        Ok(self.region_table()?.callbacks.add(callbacks).number())
    }

    /// Closes all regions: no call is in progress on the allocator.
    pub(crate) fn close_regions(&self) -> Result<()> {
        let Some(table) = self.region_table_if_any() else { return Ok(()) };
        let mut table = table.table.write().unwrap_or_else(PoisonError::into_inner);
        if table.regions.is_some() && self.allocator().any_captures()? {
            let text = "a stream captures a graph, which may use a region: end the capture first";
            return Err(Failure::new(Kind::Capture, text));
        }
        *table = Table::default();
        Ok(())
    }
}

/// Returns host memory without a budget, pinned as it is needed, with a mover.
fn own_mover(session: &Session, keep: Bytes) -> Result<Mover> {
    let failed = |error: String| Failure::new(Kind::Option, error);
    let host = SpaceId::host(0);
    let spaces = ReservationManager::new([(host, SpaceConfig::host(Bytes::tib(1 << 10)))])
        .map_err(|error| failed(error.to_string()))?;
    let space = spaces.space(host).expect("it was configured");
    let config = HostPoolConfig {
        initial_pools: 0,
        spare_blocks: 0,
        keep: Some(keep),
        ..HostPoolConfig::default()
    };
    let driver = session.allocator().driver();
    let pool = HostPool::new(&space, config, [Arc::clone(driver)])
        .map_err(|error| failed(error.to_string()))?;
    Ok(Mover::new(Arc::clone(driver), &pool, MoverConfig::default())?)
}

/// Returns the sum of two pools' counts.
pub(crate) fn sum(a: Stats, b: Stats) -> Stats {
    Stats {
        live: a.live + b.live,
        live_peak: a.live_peak + b.live_peak,
        reserved: a.reserved + b.reserved,
        reserved_peak: a.reserved_peak + b.reserved_peak,
        hits: a.hits + b.hits,
        misses: a.misses + b.misses,
        placed: a.placed + b.placed,
        freed: a.freed + b.freed,
        chunks_created: a.chunks_created + b.chunks_created,
        chunks_moved: a.chunks_moved + b.chunks_moved,
        chunks_reactivated: a.chunks_reactivated + b.chunks_reactivated,
        chunks_released: a.chunks_released + b.chunks_released,
        released: a.released + b.released,
        moved: a.moved + b.moved,
        plans_undone: a.plans_undone + b.plans_undone,
        quarantined: a.quarantined + b.quarantined,
        quarantined_addresses: a.quarantined_addresses + b.quarantined_addresses,
        callback_panics: a.callback_panics + b.callback_panics,
        looked_at: a.looked_at + b.looked_at,
    }
}

/// Returns the sum of the memory of two pools.
pub(crate) fn sum_of_memory(a: ReservedMemory, b: ReservedMemory) -> ReservedMemory {
    let pair = |a: [u64; 2], b: [u64; 2]| [a[0] + b[0], a[1] + b[1]];
    ReservedMemory {
        reserved: Stat {
            current: a.reserved.current + b.reserved.current,
            peak: a.reserved.peak + b.reserved.peak,
            allocated: a.reserved.allocated + b.reserved.allocated,
            freed: a.reserved.freed + b.reserved.freed,
        },
        small: a.small + b.small,
        waiting: pair(a.waiting, b.waiting),
        waiting_bytes: pair(a.waiting_bytes, b.waiting_bytes),
        created: a.created + b.created,
        released: a.released + b.released,
        retries: a.retries + b.retries,
        looked_at: a.looked_at + b.looked_at,
    }
}
