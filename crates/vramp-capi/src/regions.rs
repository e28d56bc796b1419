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
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, StreamId};
use vramp_defer::Tiers;
use vramp_tiers::DiskStore;
use vramp_tiers::host::HostPool;
use vramp_tiers::movers::Mover;
use vramp_tiers::regions::{Callbacks, Region, RegionOptions, Regions};

use crate::region_disk;
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
    fn includes(self, device: Option<u16>, allocator: u64) -> bool {
        match self {
            Target::Shared => device.is_some(),
            Target::Device(number) => device == Some(number),
            Target::Allocator(number) => allocator == number,
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
pub(crate) enum Choice {
    Pool,
    Found(Arc<Region>),
    /// The region of this scope, which was not looked up yet.
    New(u64, Arc<Tagged>),
}

/// Returns true while any thread is in a scope.
#[inline]
pub(crate) fn is_any_scope() -> bool {
    ACTIVE.load(Ordering::Relaxed) > 0
}

/// Returns what the scopes of the calling thread say about the allocator with a number, of a shared device if
/// that is not `None`, and with this table of regions.
pub(crate) fn choose(device: Option<u16>, allocator: u64, regions: &RegionTable) -> Choice {
    let chosen = SCOPES.try_with(|scopes| {
        let scopes = scopes.borrow();
        let includes = |scope: &&Scope| scope.target.includes(device, allocator);
        let scope = scopes.iter().rev().find(includes)?;
        let tagged = scope.tagged.as_ref()?;
        let found = scope.found.iter().find(|(number, _)| *number == allocator);
        // A removal holds it for writing, and takes the region out of it before the region ends.
        let table = regions.table.read().unwrap_or_else(PoisonError::into_inner);
        Some(match found.and_then(|(_, pool)| table.by_pool.get(pool)) {
            Some(region) => Choice::Found(Arc::clone(region)),
            None => Choice::New(scope.number, Arc::clone(tagged)),
        })
    });
    // A thread that ends has no scopes any more.
    chosen.ok().flatten().unwrap_or(Choice::Pool)
}

/// Notes in a scope of the calling thread the pool of its region in an allocator.
pub(crate) fn note_found(scope: u64, allocator: u64, pool: u64) {
    SCOPES.with(|scopes| {
        let mut scopes = scopes.borrow_mut();
        if let Some(scope) = scopes.iter_mut().find(|other| other.number == scope) {
            scope.found.retain(|(number, _)| *number != allocator);
            scope.found.push((allocator, pool));
        }
    });
}

/// The regions of an allocator.
#[derive(Default)]
pub(crate) struct RegionTable {
    /// Pinned memory that the regions' own host memory keeps however long it is free.
    pub keep: Bytes,
    /// Also before there is a region.
    pub callbacks: Callbacks,
    pub table: RwLock<Table>,
    /// Locked while a region is created, and while host memory is lent or taken back. Taken before
    /// `table`.
    host: Mutex<HostMemory>,
}

/// The host memory and the disk that regions are copied to.
#[derive(Default)]
pub(crate) struct HostMemory {
    /// Of the tiers that are open, in the order of their opening: the last one is used.
    lent: Vec<Lent>,
    /// What is used while no tiers are open. `None` until the first region is created.
    pub own: Option<Mover>,
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
    pub fn host_pools(&self) -> Vec<HostPool> {
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

    pub fn host(&self) -> MutexGuard<'_, HostMemory> {
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
    pub fn mover(&self) -> Option<&Mover> {
        self.lent.last().map(|lent| &lent.mover).or(self.own.as_ref())
    }

    pub fn disk(&self) -> Option<Arc<DiskStore>> {
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
pub(crate) struct Table {
    /// `None` until the first region is created.
    pub regions: Option<Regions>,
    /// By the number of their pool.
    pub by_pool: FxHashMap<u64, Arc<Region>>,
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
