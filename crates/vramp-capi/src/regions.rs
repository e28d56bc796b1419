//! Regions of an allocator, and the scopes in which a thread allocates in them.
//!
//! 1. [`begin`] starts a scope on the calling thread: requests of the thread to the allocators that the
//!    scope is about go to the region with its tag, or to the pool itself. Scopes nest, and the innermost
//!    one that is about an allocator counts.
//! 2. The first request creates the region, and the first region of an allocator the host memory and the
//!    copy streams that regions share while no tiers are open. Tiers lend theirs, and their disk
//!    ([`HostLoan`]); without one, regions share the disk of the process (`region_disk`).
//! 3. A block has the number of its pool, so a free and every other call finds the region from any
//!    thread, inside and outside scopes.
//! 4. A region without memory can be removed. A scope holds no region between requests, and a request holds it
//!    until its block is counted, so no block outlives its region. The close of the allocator closes all.
//!
//! While no thread is in a scope, a request costs one relaxed load more. In a scope it costs a look at
//! the thread's scopes, O(their number); a free of a block of a region O(1).
//!
//! Deliberately absent: how a region sleeps (`vramp_tiers::regions`).

use std::cell::RefCell;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use rustc_hash::FxHashMap;
use vramp_alloc::error::{FreeError, Unusable};
use vramp_alloc::stats::{ReservedMemory, Stat, Stats};
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, StreamId};
use vramp_core::AddrRange;
use vramp_defer::Tiers;
use vramp_tiers::host::{HostPool, HostPoolConfig};
use vramp_tiers::movers::{Mover, MoverConfig};
use vramp_tiers::regions::{Backup, Region, RegionError, RegionOptions, Regions};
use vramp_tiers::{DiskStore, ReservationManager, SpaceConfig, SpaceId};

use crate::region_disk;
use crate::session::Session;
use crate::status::{Failure, Kind, Result};

/// Allocators that a scope is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Those that all interfaces share.
    Shared,
    /// The shared one of a device.
    Device(u16),
    /// The one with this number.
    Allocator(u64),
}

impl Target {
    fn includes(self, session: &Session) -> bool {
        match self {
            Target::Shared => session.device_number().is_some(),
            Target::Device(device) => session.device_number() == Some(device),
            Target::Allocator(number) => session.allocator().number() == number,
        }
    }
}

/// A region's name and options.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tagged {
    pub tag: String,
    pub options: RegionOptions,
}

struct Scope {
    number: u64,
    target: Target,
    /// `None` sends requests to the pool itself.
    tagged: Option<Arc<Tagged>>,
    /// Pools of the regions found so far, by the number of their allocator. A removed region is looked up
    /// again.
    found: Vec<(u64, u64)>,
}

impl Drop for Scope {
    /// Also where a thread ends in it.
    fn drop(&mut self) {
        ACTIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

thread_local! {
    static SCOPES: RefCell<Vec<Scope>> = const { RefCell::new(Vec::new()) };
}

/// Number of scopes of all threads.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// Starts a scope on the calling thread. Returns its number.
pub(crate) fn begin(target: Target, tagged: Option<Tagged>) -> Result<u64> {
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    ACTIVE.fetch_add(1, Ordering::Relaxed);
    let scope = Scope { number, target, tagged: tagged.map(Arc::new), found: Vec::new() };
    let begun = SCOPES.try_with(|scopes| scopes.borrow_mut().push(scope));
    begun.map_err(|_| {
        let text = "the thread is ending, and is in no region any more: allocate on another thread";
        Failure::new(Kind::Region, text)
    })?;
    Ok(number)
}

/// Ends a scope of the calling thread: the one with a number, or the innermost one.
pub(crate) fn end(number: Option<u64>) -> Result<()> {
    let ended = SCOPES.try_with(|scopes| {
        let mut scopes = scopes.borrow_mut();
        let index = match number {
            Some(number) => scopes.iter().rposition(|scope| scope.number == number),
            None => scopes.len().checked_sub(1),
        };
        index.map(|index| drop(scopes.remove(index))).is_some()
    });
    if ended != Ok(true) {
        let text =
            "this thread is not in that region: end a region on the thread that began it, once";
        return Err(Failure::new(Kind::Region, text));
    }
    Ok(())
}

/// What the scopes of a thread say about an allocator.
enum Choice {
    Pool,
    Found(Arc<Region>),
    /// The region of this scope, which was not looked up yet.
    New(u64, Arc<Tagged>),
}

fn choose(session: &Session) -> Choice {
    let chosen = SCOPES.try_with(|scopes| {
        let scopes = scopes.borrow();
        let scope = scopes.iter().rev().find(|scope| scope.target.includes(session))?;
        let tagged = scope.tagged.as_ref()?;
        let own = session.allocator().number();
        let found = scope.found.iter().find(|(number, _)| *number == own);
        // A removal holds it for writing, and takes the region out of it before the region ends.
        let table = session.region_table_if_any()?;
        let table = table.table.read().unwrap_or_else(PoisonError::into_inner);
        Some(match found.and_then(|(_, pool)| table.by_pool.get(pool)) {
            Some(region) => Choice::Found(Arc::clone(region)),
            None => Choice::New(scope.number, Arc::clone(tagged)),
        })
    });
    // A thread that ends has no scopes any more.
    chosen.ok().flatten().unwrap_or(Choice::Pool)
}

/// The regions of an allocator.
#[derive(Default)]
pub(crate) struct RegionTable {
    /// Pinned memory that the regions' own host memory keeps however long it is free.
    keep: Bytes,
    table: RwLock<Table>,
    /// Locked while a region is created, and while host memory is lent or taken back. Taken before
    /// `table`.
    host: Mutex<HostMemory>,
}

/// The host memory and the disk that regions are copied to.
#[derive(Default)]
struct HostMemory {
    /// Of the tiers that are open, in the order of their opening: the last one is used.
    lent: Vec<Lent>,
    /// What is used while no tiers are open. `None` until the first region is created.
    own: Option<Mover>,
}

/// What tiers lend.
struct Lent {
    number: u64,
    mover: Mover,
    disk: Option<Arc<DiskStore>>,
}

/// A loan of host memory and of a disk to the regions of an allocator. They use it until this is dropped, and copies
/// made by then keep what they use until the copies are freed.
#[must_use = "the loan ends when this is dropped"]
pub struct HostLoan {
    table: Weak<RegionTable>,
    number: u64,
}

/// Pinned memory of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinnedMemory {
    /// Pinned bytes.
    pub pinned: Bytes,
    /// Bytes of them in blocks that are in use.
    pub used: Bytes,
}

impl PinnedMemory {
    /// Returns the memory of some pools. Queries events of returned blocks.
    pub fn of<'a>(pools: impl IntoIterator<Item = &'a HostPool>) -> PinnedMemory {
        let mut sum = PinnedMemory::default();
        for pool in pools {
            let (stats, block) = (pool.stats(), pool.block());
            sum.pinned += block * stats.blocks;
            sum.used += block * (stats.blocks - stats.free_blocks - stats.quarantined_blocks);
        }
        sum
    }
}

impl RegionTable {
    /// Returns a table whose own host memory keeps so many bytes pinned.
    pub fn keeping(keep: Bytes) -> RegionTable {
        RegionTable { keep, ..RegionTable::default() }
    }

    /// Returns the host memory of the regions and of the open tiers, each once.
    fn host_pools(&self) -> Vec<HostPool> {
        let host = self.host();
        let movers = host.own.iter().chain(host.lent.iter().map(|lent| &lent.mover));
        let mut pools: Vec<HostPool> = Vec::new();
        for pool in movers.map(Mover::pool) {
            if !pools.iter().any(|other| other.is_same(pool)) {
                pools.push(pool.clone());
            }
        }
        pools
    }

    fn host(&self) -> MutexGuard<'_, HostMemory> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets regions use the host memory and the disk of tiers, also those created before. O(tiers of the allocator).
    pub fn lend(self: &Arc<RegionTable>, tiers: &Tiers) -> HostLoan {
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let mut host = self.host();
        let (mover, disk) = (tiers.mover().clone(), tiers.disk().cloned());
        host.lent.push(Lent { number, mover, disk });
        self.use_host(&host);
        HostLoan { table: Arc::downgrade(self), number }
    }

    /// Lets the regions use the host memory and the disk that count now.
    fn use_host(&self, host: &HostMemory) {
        let regions = self.table.read().unwrap_or_else(PoisonError::into_inner).regions.clone();
        if let (Some(regions), Some(mover)) = (regions, host.mover()) {
            regions.set_mover(mover.clone());
            regions.set_disk(host.disk());
        }
    }

    /// As [`use_host`](RegionTable::use_host), after the disk of the process changed.
    pub fn use_what_counts(&self) {
        self.use_host(&self.host());
    }
}

impl HostMemory {
    fn mover(&self) -> Option<&Mover> {
        self.lent.last().map(|lent| &lent.mover).or(self.own.as_ref())
    }

    fn disk(&self) -> Option<Arc<DiskStore>> {
        let lent = self.lent.iter().rev().find_map(|lent| lent.disk.clone());
        lent.or_else(region_disk::opened)
    }
}

impl Drop for HostLoan {
    fn drop(&mut self) {
        let Some(table) = self.table.upgrade() else { return };
        let mut host = table.host();
        host.lent.retain(|lent| lent.number != self.number);
        table.use_host(&host);
    }
}

#[derive(Default)]
struct Table {
    /// `None` until the first region is created.
    regions: Option<Regions>,
    /// By the number of their pool.
    by_pool: FxHashMap<u64, Arc<Region>>,
}

/// The pool that a block belongs to.
pub(crate) enum Owner<'a> {
    Own(&'a Allocator),
    Region(Arc<Region>),
}

impl Deref for Owner<'_> {
    type Target = Allocator;

    #[inline]
    fn deref(&self) -> &Allocator {
        match self {
            Owner::Own(allocator) => allocator,
            Owner::Region(region) => region.allocator(),
        }
    }
}

impl Owner<'_> {
    /// Frees a block. Of a region that sleeps this may return host memory of its copy, too.
    #[inline]
    pub fn free_block(
        &self,
        allocation: Allocation,
        stream: StreamId,
    ) -> std::result::Result<(), FreeError> {
        let len = allocation.len();
        self.free(allocation, stream)?;
        if let Owner::Region(region) = self {
            region.note_free(len);
        }
        Ok(())
    }

    /// Frees a block if that takes no lock which is held during driver calls. Otherwise returns it.
    #[inline]
    pub fn free_block_at_hand(
        &self,
        allocation: Allocation,
        stream: StreamId,
    ) -> std::result::Result<(), Allocation> {
        match self {
            Owner::Region(region) if region.keeps_copy_asleep() => Err(allocation),
            _ => self.free_at_hand(allocation, stream),
        }
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

impl Session {
    /// Returns the region that requests of this thread go to, and creates it if there is none. `None` if
    /// they go to the pool.
    #[inline]
    pub(crate) fn region_of_thread(&self) -> Result<Option<Arc<Region>>> {
        if ACTIVE.load(Ordering::Relaxed) == 0 {
            return Ok(None);
        }
        self.find_region_of_thread()
    }

    #[cold]
    fn find_region_of_thread(&self) -> Result<Option<Arc<Region>>> {
        if self.region_table_if_any().is_none() {
            return Ok(None);
        }
        let (scope, tagged) = match choose(self) {
            Choice::Pool => return Ok(None),
            Choice::Found(region) => return Ok(Some(region)),
            Choice::New(scope, tagged) => (scope, tagged),
        };
        let region = self.region(&tagged)?;
        let found = (self.allocator().number(), region.allocator().number());
        SCOPES.with(|scopes| {
            let mut scopes = scopes.borrow_mut();
            if let Some(scope) = scopes.iter_mut().find(|other| other.number == scope) {
                scope.found.retain(|(number, _)| *number != found.0);
                scope.found.push(found);
            }
        });
        Ok(Some(region))
    }

    /// Returns the region that requests of this thread go to, `None` if they go to the pool, and an error
    /// if it has to be looked up.
    #[inline]
    pub(crate) fn region_at_hand(&self) -> std::result::Result<Option<Arc<Region>>, ()> {
        if ACTIVE.load(Ordering::Relaxed) == 0 || self.region_table_if_any().is_none() {
            return Ok(None);
        }
        match choose(self) {
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
        let table = &regions.table;
        let regions = self.regions_if_any().unwrap_or_else(|| {
            Regions::new(host.mover().expect("there is the allocator's own").clone())
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
            pool.shrink(pool.floor());
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

/// Returns the failure of a call about a region that there is not.
pub(crate) fn no_region(tag: &str) -> Failure {
    Failure::of_region(tag, format!("there is no region {tag:?}: allocate in it first"))
}

/// Returns the failure of a request in a region.
#[cold]
pub(crate) fn not_allocated(tag: &str, error: AllocError) -> Failure {
    match error {
        AllocError::Unusable(Unusable::Asleep { .. }) => {
            let text =
                format!("the region {tag:?} sleeps: resume it before memory is allocated in it");
            Failure::of_region(tag, text)
        }
        error => error.into(),
    }
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
