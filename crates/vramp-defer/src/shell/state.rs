//! The one lock, what it protects, and what is done behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::planner::{
    BufferId, DeferConfig, Deferrables, PieceId, RangeId, RangeSlice, Rates, SpillRoom, SpillTier,
    StaleCopy, UseToken,
};
use vramp_alloc::range::StableRange;
use vramp_alloc::{Allocator, Driver, DriverError, StreamId};
use vramp_core::{AddrRange, Bytes};
use vramp_driver::Stream;

use super::events::Events;
use super::lease_set::LeaseEnding;
use super::mapped_copy::{InPlacePool, MappedCopy};
use super::report::{History, SpillStats};
use super::spill_config::SpillConfig;
use super::spill_error::SpillError;
use crate::sync::{Condvar, Mutex, MutexGuard, lock};
use vramp_tiers::DiskStore;
use vramp_tiers::MemorySpace;
use vramp_tiers::Mover;
use vramp_tiers::host::HostAllocation;
use vramp_tiers::movers::{DiskCopy, MoverConfig};
use vramp_tiers::reserve::Charge;

/// The copies of a piece below the card.
#[derive(Default)]
pub(super) struct SpilledCopies {
    /// In blocks.
    pub host: Option<HostAllocation>,
    /// On the host as well, mapped for the device.
    pub mapped: Option<MappedCopy>,
    pub disk: Option<Arc<DiskCopy>>,
}

/// Addresses of a buffer, or of a group.
pub(super) struct RangeBacking {
    pub range: Arc<StableRange>,
    /// Of several small buffers.
    pub is_group: bool,
    /// Nothing was lent since all of it was brought.
    pub fully_backed: bool,
    /// What its memory was brought behind: others' work on that memory may not be over before.
    pub ready_after: Option<UseToken>,
}

pub(super) struct State {
    pub core: Deferrables,
    pub events: Events,
    pub copies: BTreeMap<PieceId, SpilledCopies>,
    pub homes: BTreeMap<RangeId, RangeBacking>,
    /// Buffers that nobody has any more, and that something still holds.
    pub orphans: Vec<BufferId>,
    /// Leases that end once their streams capture no more.
    pub deferred_ends: Vec<LeaseEnding>,
    /// Ranges of which less is needed, and whose memory others' work may still use.
    pub pending_release: Vec<RangeId>,
    /// Memory that others can have since buffers and leases ended.
    pub reclaimed: Bytes,
    /// Groups that get no more buffers.
    pub ended_groups: Vec<RangeId>,
    /// What pays for the memory on the card, where a space is charged.
    pub charges: Vec<Charge>,
    /// What is being charged.
    pub charging: Bytes,
    pub rates: Rates,
    /// What buffers share that are readable while spilled; none before the first.
    pub readable: Option<InPlacePool>,
    /// Ranges of which memory was lent, and copies may be mapped there instead.
    pub to_map: Vec<RangeId>,
    /// Ranges where copies are being mapped, with the lock free.
    pub mapping_now: BTreeSet<RangeId>,
    /// How many transfers are on their way to or from the disk.
    pub staged_transfers: usize,
    pub stats: SpillStats,
    pub history: History,
    /// What is not needed any more. To drop it tells those who wait for budgets, and calls theirs.
    pub to_drop: Vec<Box<dyn Send>>,
}

/// The lock. What became needless behind it is dropped once it is free, and what is to be mapped is
/// mapped then.
pub(super) struct Locked<'a> {
    guard: Option<MutexGuard<'a, State>>,
    shared: &'a Shared,
}

const LOCKED: &str = "the lock is held until this is dropped";

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.guard.as_ref().expect(LOCKED)
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.guard.as_mut().expect(LOCKED)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if let Some(mut state) = self.guard.take() {
            let gone = std::mem::take(&mut state.to_drop);
            let maps = state.begin_maps();
            drop(state);
            self.shared.map_copies(maps);
            drop(gone);
        }
    }
}

pub(super) struct Shared {
    pub allocator: Arc<Allocator>,
    pub driver: Arc<dyn Driver>,
    pub mover: Mover,
    pub disk: Option<Arc<DiskStore>>,
    pub budget: Option<MemorySpace>,
    pub config: SpillConfig,
    /// Behind it memory is brought, and ahead of need data.
    pub stream: (StreamId, Stream),
    /// It passes the ends of copies to the host.
    pub leaving: Stream,
    state: Mutex<State>,
    /// A lease ended, a move settled, or work is known to be over.
    changed: Condvar,
}

const HOME: &str = "a range of the core has addresses";

impl Shared {
    pub fn new(
        allocator: &Arc<Allocator>,
        mover: Mover,
        disk: Option<Arc<DiskStore>>,
        budget: Option<MemorySpace>,
        config: SpillConfig,
    ) -> Result<Shared, SpillError> {
        let driver = Arc::clone(mover.driver());
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let core = Deferrables::new(DeferConfig {
            piece: config.piece,
            page: driver.info().limits.page,
            capacity: config.capacity.unwrap_or(driver.info().limits.memory),
            cooldown_ns: nanoseconds(config.cooldown),
            recency_ns: nanoseconds(config.recency),
            clean_after_ns: nanoseconds(config.clean_after),
            promote_after: config.promote_after,
        })?;
        let id = allocator.create_stream()?;
        let raw = allocator.stream(id).expect("it was made just now");
        let leaving = allocator.create_stream()?;
        let leaving = allocator.stream(leaving).expect("it was made just now");
        let state = State {
            core,
            events: Events::new(allocator),
            copies: BTreeMap::new(),
            homes: BTreeMap::new(),
            orphans: Vec::new(),
            deferred_ends: Vec::new(),
            pending_release: Vec::new(),
            reclaimed: Bytes::ZERO,
            ended_groups: Vec::new(),
            charges: Vec::new(),
            charging: Bytes::ZERO,
            rates: config.rates,
            readable: None,
            to_map: Vec::new(),
            mapping_now: BTreeSet::new(),
            staged_transfers: 0,
            stats: SpillStats::default(),
            history: History::keeping(config.history),
            to_drop: Vec::new(),
        };
        Ok(Shared {
            allocator: Arc::clone(allocator),
            driver,
            mover,
            disk,
            budget,
            config,
            stream: (id, raw),
            leaving,
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    pub fn lock(&self) -> Locked<'_> {
        Locked { guard: Some(lock(&self.state)), shared: self }
    }

    /// Tells those who wait that something changed.
    pub fn notify(&self) {
        self.changed.notify_all();
    }

    /// Waits for a change, but not long: work that ends tells nobody.
    pub fn wait_briefly<'a>(&'a self, mut state: Locked<'a>) -> Locked<'a> {
        if !state.to_drop.is_empty() || state.has_pending_maps() {
            drop(state);
            return self.lock();
        }
        let moment = Duration::from_micros(200);
        let waited = self.changed.wait_timeout(state.guard.take().expect(LOCKED), moment);
        let guard = waited.unwrap_or_else(PoisonError::into_inner).0;
        Locked { guard: Some(guard), shared: self }
    }

    /// What leased buffers may have on the card now.
    pub fn capacity(&self) -> Bytes {
        let all = || {
            let card = self.driver.info().limits.memory;
            let limit = self.allocator.limit().unwrap_or(card).min(card);
            limit.saturating_sub(self.allocator.live())
        };
        self.config.capacity.unwrap_or_else(all)
    }

    /// What is free below the card, promised or not. Where there is a disk, the last blocks of the
    /// host are kept for the way there and back.
    pub fn room(&self) -> SpillRoom {
        let free = |space: &MemorySpace| space.capacity().saturating_sub(space.total());
        let host = free(self.mover.pool().space());
        let Some(store) = &self.disk else { return SpillRoom { host, disk: Bytes::ZERO } };
        let MoverConfig { step, staging_pieces, .. } = *self.mover.config();
        let staging = step * u64::from(staging_pieces);
        SpillRoom { host: host.saturating_sub(staging), disk: free(store.space()) }
    }

    /// Waits on the host until work is over.
    pub fn wait_for(&self, uses: &[UseToken]) -> Result<(), DriverError> {
        for &token in uses {
            let event = self.lock().events.of(token);
            if let Some(event) = event {
                self.driver.synchronize_event(event)?;
            }
        }
        Ok(())
    }
}

/// Boxed, to be dropped once the lock is free.
fn needless<T: Send + 'static>(what: T) -> Box<dyn Send> {
    Box::new(what)
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The addresses go with the state, and their memory to others: not before the work on it.
        let mut state = self.lock();
        let _ = state.poll();
        state.to_map.clear();
        let mut over = state.deferred_ends.is_empty();
        for event in state.events.last() {
            over &= self.driver.synchronize_event(event).is_ok();
        }
        if !over {
            // Nobody can tell when it is.
            std::mem::forget(std::mem::take(&mut state.homes));
            std::mem::forget(std::mem::take(&mut state.copies));
            std::mem::forget(state.readable.take());
        }
    }
}

impl State {
    /// Learns which work is over, and does what waited for it. A query for each stream with work.
    ///
    /// # Errors
    /// Some could not be asked: their work counts as under way.
    pub fn poll(&mut self) -> Result<(), DriverError> {
        for ending in std::mem::take(&mut self.deferred_ends) {
            self.end_lease(ending);
        }
        let (over, asked) = self.events.poll();
        for token in over {
            self.core.complete_use(token);
        }
        for range in std::mem::take(&mut self.pending_release) {
            let lent = self.lend(range);
            self.reclaimed += lent;
        }
        self.recycle_copies();
        if !self.orphans.is_empty() || !self.ended_groups.is_empty() {
            self.reap();
        }
        asked
    }

    /// Ends buffers that nobody has, as soon as nothing holds them.
    pub fn reap(&mut self) {
        let before = self.core.occupied();
        for buffer in std::mem::take(&mut self.orphans) {
            let extent = self.core.slice(buffer);
            match (self.core.remove(buffer), extent) {
                (Ok(stale), Ok(extent)) => {
                    self.drop_copies(&stale);
                    self.leave(extent.range);
                }
                (Err(_), Ok(_)) => {
                    // Nobody reads it any more: it is not copied out.
                    if let Ok(stale) = self.core.discard(buffer) {
                        self.drop_copies(&stale);
                    }
                    self.orphans.push(buffer);
                }
                (_, Err(_)) => {}
            }
        }
        for range in std::mem::take(&mut self.ended_groups) {
            if self.core.remove_group(range) {
                self.homes.remove(&range);
            } else if self.core.needed_memory(range).is_ok() {
                self.ended_groups.push(range);
            }
        }
        self.reclaimed += before.saturating_sub(self.core.occupied());
        self.settle_charges();
    }

    /// A buffer of this range is gone: its addresses go with the last.
    fn leave(&mut self, range: RangeId) {
        if self.core.needed_memory(range).is_err() {
            self.homes.remove(&range);
        } else {
            self.lend(range);
        }
    }

    /// Lets the pool have what the core does not need. Returns how much that was; nothing while
    /// others' work may still use the memory: then it is lent once that is over.
    pub fn lend(&mut self, range: RangeId) -> Bytes {
        let Ok(keep) = self.core.needed_memory(range) else { return Bytes::ZERO };
        let home = self.homes.get_mut(&range).expect(HOME);
        home.fully_backed = false;
        if home.ready_after.is_some_and(|token| !self.events.is_over(token)) {
            if !self.pending_release.contains(&range) {
                self.pending_release.push(range);
            }
            return Bytes::ZERO;
        }
        home.ready_after = None;
        if self.readable.is_some() && !self.to_map.contains(&range) {
            self.to_map.push(range);
        }
        home.range.lend(&keep)
    }

    /// Credits what is charged for more than what is on the card.
    pub fn settle_charges(&mut self) {
        let paid: Bytes = self.charges.iter().map(Charge::bytes).sum();
        let mut over = paid.saturating_sub(self.core.occupied());
        while !over.is_zero() {
            let Some(charge) = self.charges.last_mut() else { return };
            let now = over.min(charge.bytes());
            self.to_drop.push(Box::new(charge.split(now)));
            over -= now;
            if charge.bytes().is_zero() {
                self.charges.pop();
            }
        }
    }

    /// Drops copies that count no more. Blocks that queued copies still read serve again after them.
    pub fn drop_copies(&mut self, stale: &[StaleCopy]) {
        for gone in stale {
            let Some(below) = self.copies.get_mut(&gone.piece) else { continue };
            match gone.from {
                SpillTier::Host => {
                    self.to_drop.extend(below.host.take().map(needless));
                    if let Some(mapped) = below.mapped.take() {
                        self.retire(gone.piece.buffer, mapped, &gone.after);
                    }
                }
                SpillTier::Disk => self.to_drop.extend(below.disk.take().map(needless)),
            }
        }
    }

    /// The addresses of a part of a range.
    pub fn addresses(&self, at: RangeSlice) -> AddrRange {
        let start = self.homes.get(&at.range).expect(HOME).range.range().start;
        AddrRange::new(start + at.offset, at.len)
    }
}
