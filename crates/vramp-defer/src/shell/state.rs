//! The manager's state, the lock around it, and what is done while holding the lock.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use smallvec::SmallVec;

use crate::planner::{
    BufferId, DeferConfig, Deferrables, PeerTable, PieceId, RangeId, RangeSlice, Rates, SpillRoom,
    SpillTier, StaleCopy, UseToken,
};
use vramp_alloc::range::StableRange;
use vramp_alloc::{Allocator, Driver, DriverError, StreamId};
use vramp_core::{AddrRange, Bytes};

use super::events::{Events, LeaseStream, WorkEvent};
use super::lease_set::LeaseEnding;
use super::mapped_copy::{InPlacePool, MappedCopy};
use super::peer_copy::Peers;
use super::report::{History, SpillStats};
use super::spill_config::SpillConfig;
use super::spill_error::SpillError;
use crate::sync::{Condvar, Mutex, MutexGuard, lock};
use vramp_tiers::DiskStore;
use vramp_tiers::MemorySpace;
use vramp_tiers::Mover;
use vramp_tiers::host::HostAllocation;
use vramp_tiers::movers::{DiskCopy, MoverConfig};
use vramp_tiers::peer::{PeerAllocation, PeerStore};
use vramp_tiers::reserve::Charge;

/// Copies of a piece below the card.
#[derive(Default)]
pub(super) struct SpilledCopies {
    /// In blocks of the host pool.
    pub host: Option<HostAllocation>,
    /// On the host, in memory that the device maps.
    pub mapped: Option<MappedCopy>,
    pub disk: Option<Arc<DiskCopy>>,
    /// On another card.
    pub peer: Option<PeerAllocation>,
}

/// Address range of a buffer or of a group.
pub(super) struct RangeBacking {
    pub range: Arc<StableRange>,
    /// Shared by several small buffers.
    pub is_group: bool,
    /// All of it is backed: nothing was lent since it was restored.
    pub fully_backed: bool,
    /// Work after which the memory may be used: earlier owners' work on it may be in flight until
    /// then.
    pub ready_after: Option<UseToken>,
    /// Copies whose transfer could not wait for them. The memory may be lent after them.
    pub unsettled: SmallVec<[UseToken; 4]>,
    /// Contents were being moved since the last lease: the memory may not be pinned.
    pub refuses_pins: bool,
}

impl RangeBacking {
    /// Returns addresses without memory.
    pub fn new(range: Arc<StableRange>, is_group: bool) -> RangeBacking {
        RangeBacking {
            range,
            is_group,
            fully_backed: false,
            ready_after: None,
            unsettled: SmallVec::new(),
            refuses_pins: false,
        }
    }

    /// Returns the work after which the memory may be lent.
    pub fn lend_after(&self) -> impl Iterator<Item = UseToken> {
        self.ready_after.into_iter().chain(self.unsettled.iter().copied())
    }
}

pub(super) struct State {
    pub core: Deferrables,
    pub events: Events,
    pub copies: BTreeMap<PieceId, SpilledCopies>,
    pub homes: BTreeMap<RangeId, RangeBacking>,
    /// Buffers without handles that something still holds.
    pub orphans: Vec<BufferId>,
    /// Leases that end once their streams no longer capture.
    pub deferred_ends: Vec<LeaseEnding>,
    /// Ranges that need less memory, which earlier owners' work may still use.
    pub pending_release: Vec<RangeId>,
    /// Total memory that became free as buffers and leases ended.
    pub reclaimed: Bytes,
    /// Groups that get no more buffers.
    pub ended_groups: Vec<RangeId>,
    /// Charges for the memory on the card, if a space is charged.
    pub charges: Vec<Charge>,
    /// Bytes for which a charge is being requested.
    pub charging: Bytes,
    pub rates: Rates,
    /// Shared by the readable buffers; `None` before the first.
    pub readable: Option<InPlacePool>,
    /// Ranges of which memory was lent: copies may be mapped there.
    pub to_map: Vec<RangeId>,
    /// Ranges where copies are being mapped, with the lock released.
    pub mapping_now: BTreeSet<RangeId>,
    /// Stale copies on other cards, and what may still read them.
    pub retired_peers: Vec<(PeerAllocation, Vec<UseToken>)>,
    /// Some ranges are recorded as pinned.
    pub has_pinned_memory: bool,
    /// Number of transfers in flight to or from the disk.
    pub staged_transfers: usize,
    pub stats: SpillStats,
    pub history: History,
    /// Values to drop after unlocking: dropping them wakes waiters of a budget and runs its
    /// callbacks.
    pub to_drop: Vec<Box<dyn Send>>,
}

/// The held lock. After unlocking it drops what is in `to_drop`, and maps what can be mapped.
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
    pub peers: Peers,
    pub config: SpillConfig,
    /// The manager's own stream: memory is mapped, and data prefetched, in its order.
    pub stream: LeaseStream,
    /// Stream that waits for the ends of copies to the host.
    pub leaving: LeaseStream,
    state: Mutex<State>,
    /// Notified when a lease ends, a move settles, or work is observed complete.
    changed: Condvar,
}

const HOME: &str = "each range has addresses";

impl Shared {
    pub fn new(
        allocator: &Arc<Allocator>,
        mover: Mover,
        disk: Option<Arc<DiskStore>>,
        budget: Option<MemorySpace>,
        stores: Vec<PeerStore>,
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
        let stream = LeaseStream::create(allocator)?;
        let leaving = LeaseStream::create(allocator).inspect_err(|_| {
            // The first error is returned.
            let _ = allocator.destroy_stream(stream.id);
        })?;
        let peers = Peers::new(allocator, &driver, stores).inspect_err(|_| {
            for own in [stream.id, leaving.id] {
                // The first error is returned.
                let _ = allocator.destroy_stream(own);
            }
        })?;
        let state = State {
            core,
            events: Events::new(allocator, &mover),
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
            retired_peers: Vec::new(),
            has_pinned_memory: false,
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
            peers,
            config,
            stream,
            leaving,
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    pub fn lock(&self) -> Locked<'_> {
        Locked { guard: Some(lock(&self.state)), shared: self }
    }

    /// Wakes all waiters.
    pub fn notify(&self) {
        self.changed.notify_all();
    }

    /// Waits for a change, but not long: work that completes notifies no thread.
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

    /// Returns the most memory that leased buffers may occupy now.
    pub fn capacity(&self) -> Bytes {
        let all = || {
            let card = self.driver.info().limits.memory;
            let limit = self.allocator.limit().unwrap_or(card).min(card);
            limit.saturating_sub(self.allocator.live())
        };
        self.config.capacity.unwrap_or_else(all)
    }

    /// Returns the free space below the card and on other cards, promises included. A driver call for
    /// each of them.
    pub fn room(&self) -> SpillRoom {
        SpillRoom { peers: self.peers.room(), ..self.room_below() }
    }

    /// Returns the free space of host and disk, promises included. With a disk, the last blocks of
    /// the host are kept as staging.
    pub fn room_below(&self) -> SpillRoom {
        let peers = PeerTable::default();
        let free = |space: &MemorySpace| space.capacity().saturating_sub(space.total());
        let host = free(self.mover.pool().space());
        let Some(store) = &self.disk else {
            return SpillRoom { peers, host, disk: Bytes::ZERO };
        };
        let MoverConfig { step, staging_pieces, .. } = *self.mover.config();
        let staging = step * u64::from(staging_pieces);
        SpillRoom { peers, host: host.saturating_sub(staging), disk: free(store.space()) }
    }

    /// Keeps the memory of a buffer if copies of a transfer may be in flight. Called before its lease
    /// or its move ends.
    pub fn keep_unsettled<T, E: Into<SpillError>>(
        &self,
        buffer: BufferId,
        moved: Result<T, E>,
    ) -> Result<T, SpillError> {
        let moved = moved.map_err(E::into);
        if matches!(&moved, Err(SpillError::Move(error)) if error.is_unsettled()) {
            self.lock().note_unsettled(buffer);
        }
        moved
    }

    /// Waits on the host until work is complete.
    pub fn wait_for(&self, uses: &[UseToken]) -> Result<(), DriverError> {
        for &token in uses {
            let event = self.lock().events.of(token)?;
            if let Some(event) = event {
                self.driver.synchronize_event(event.event())?;
            }
        }
        Ok(())
    }
}

/// Boxes a value to be dropped after unlocking.
fn needless<T: Send + 'static>(what: T) -> Box<dyn Send> {
    Box::new(what)
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The addresses go with the state, and their memory to other owners: not before the work on
        // it is complete.
        let mut state = self.lock();
        let _ = state.poll();
        state.to_map.clear();
        let mut over = state.deferred_ends.is_empty();
        for event in state.events.last() {
            over &= event.and_then(|event| self.driver.synchronize_event(event.event())).is_ok();
        }
        let (copies, homes) = (std::mem::take(&mut state.copies), std::mem::take(&mut state.homes));
        let readable = state.readable.take();
        let retired = std::mem::take(&mut state.retired_peers);
        drop(state);
        if !over {
            // No query can tell when that is: the addresses and copies are leaked.
            return std::mem::forget((copies, homes, readable, retired));
        }
        let own = [self.stream.id, self.leaving.id];
        let own = own.into_iter().chain(readable.as_ref().map(|readable| readable.stream.id));
        let own = own.chain(self.peers.streams().map(|stream| stream.id));
        let own: SmallVec<[StreamId; 8]> = own.collect();
        drop((copies, homes, readable, retired));
        for stream in own {
            // A drop reports no error. The allocator destroys what stays.
            let _ = self.allocator.destroy_stream(stream);
        }
    }
}

impl State {
    /// Returns the event of a token, if there is one and its work may run.
    pub fn event_of(&mut self, token: Option<UseToken>) -> Result<Option<WorkEvent>, DriverError> {
        token.map_or(Ok(None), |token| self.events.of(token))
    }

    /// Processes completed work and what waited for it. One query for each stream with work.
    ///
    /// # Errors
    /// A query failed: that work counts as in flight.
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
        self.recycle_peer_copies();
        if !self.orphans.is_empty() || !self.ended_groups.is_empty() {
            self.reap();
        }
        asked
    }

    /// Ends buffers without handles once nothing holds them.
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
                    // No handle can read it: it is not copied out.
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

    /// Ends a buffer's use of a range. The addresses go with the last buffer.
    fn leave(&mut self, range: RangeId) {
        if self.core.needed_memory(range).is_err() {
            self.homes.remove(&range);
        } else {
            self.lend(range);
        }
    }

    /// Lends the pool what the planner does not need, and returns its length. If earlier owners'
    /// work may still use the memory, it is lent later, and the result is zero.
    pub fn lend(&mut self, range: RangeId) -> Bytes {
        let Ok(keep) = self.core.needed_memory(range) else { return Bytes::ZERO };
        let home = self.homes.get_mut(&range).expect(HOME);
        home.fully_backed = false;
        if home.lend_after().any(|token| !self.events.is_over(token)) {
            if !self.pending_release.contains(&range) {
                self.pending_release.push(range);
            }
            return Bytes::ZERO;
        }
        home.ready_after = None;
        home.unsettled.clear();
        if self.readable.is_some() && !self.to_map.contains(&range) {
            self.to_map.push(range);
        }
        home.range.lend(&keep)
    }

    /// Keeps the memory of a buffer until copies are over whose transfer could not wait for them.
    /// Eight driver calls.
    fn note_unsettled(&mut self, buffer: BufferId) {
        let copies = self.events.note_copies();
        let Ok(range) = self.core.note_copies(buffer, &copies) else { return };
        let home = self.homes.get_mut(&range).expect(HOME);
        // Later tokens of the same streams cover earlier ones.
        home.unsettled = SmallVec::from(copies);
    }

    /// Returns charges beyond the memory on the card.
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

    /// Drops stale copies. Blocks that queued copies still read are reused after those.
    pub fn drop_copies(&mut self, stale: &[StaleCopy]) {
        for gone in stale {
            let Some(below) = self.copies.get_mut(&gone.piece) else { continue };
            match gone.from {
                SpillTier::Peer(_) => {
                    if let Some(copy) = below.peer.take() {
                        self.retire_peer_copy(copy, gone.after.clone());
                    }
                }
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

    /// Returns the addresses of a slice.
    pub fn addresses(&self, at: RangeSlice) -> AddrRange {
        let start = self.homes.get(&at.range).expect(HOME).range.range().start;
        AddrRange::new(start + at.offset, at.len)
    }
}
