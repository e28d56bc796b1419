//! The manager's state, the lock around it, and what is done while holding the lock.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::thread::ThreadId;
use std::time::Duration;

use smallvec::SmallVec;

use crate::planner::{
    BufferId, DeferConfig, Deferrables, PieceId, RangeId, RangeSlice, Rates, StaleCopy, UseToken,
};
use vramp_alloc::{Allocator, Driver, DriverError, StreamId};
use vramp_core::{AddrRange, Bytes};

use super::account::Account;
use super::buffer_events::Subscribers;
use super::closed_disk::DiskGate;
use super::copies::{InPlacePool, PieceCopy, SpilledCopies};
use super::events::{Events, LeaseStream, Polled, WorkEvent};
use super::hand_over::LeaseEnding;
use super::hand_over::{SeenRoom, Waiting, Watcher};
use super::homes::Homes;
use super::peer_stores::Peers;
use super::report::{History, SpillStats};
use super::spill_config::SpillConfig;
use super::spill_error::SpillError;
use crate::sync::{Condvar, Mutex, MutexGuard, lock};
use vramp_tiers::DiskStore;
use vramp_tiers::MemorySpace;
use vramp_tiers::Mover;
use vramp_tiers::peer::{PeerAllocation, PeerStore};

pub(super) struct State {
    pub core: Deferrables,
    /// Slots of the requests in the planner's queue.
    pub waiting: Waiting,
    pub events: Events,
    pub copies: BTreeMap<PieceId, SpilledCopies>,
    pub homes: Homes,
    /// Work that is known to be complete, and may be recorded still as in flight on some buffers.
    completed: Vec<UseToken>,
    /// Leases that end once their streams no longer capture.
    pub deferred_ends: Vec<LeaseEnding>,
    /// Ranges that need less memory, which earlier owners' work may still use.
    pub pending_release: BTreeSet<RangeId>,
    /// Total memory that became free as buffers and leases ended.
    pub reclaimed: Bytes,
    /// Charges for the memory on the card; empty if no space is charged.
    pub account: Account,
    pub rates: Rates,
    pub disk_gate: Arc<DiskGate>,
    /// Shared by the readable buffers; `None` before the first.
    pub readable: Option<InPlacePool>,
    /// Ranges of which memory was lent: copies may be mapped there.
    pub to_map: BTreeSet<RangeId>,
    /// Ranges where copies are being mapped, with the lock released.
    pub mapping_now: BTreeSet<RangeId>,
    /// Stale copies on other cards, and what may still read them.
    pub retired_peers: Vec<(PeerAllocation, Vec<UseToken>)>,
    /// Some ranges are recorded as pinned.
    pub has_pinned_memory: bool,
    /// The ranges that are recorded as pinned.
    pub pinned_ranges: BTreeSet<RangeId>,
    /// Number of transfers in flight to or from the disk.
    pub staged_transfers: usize,
    /// Number of those that have ended.
    pub ended_transfers: u64,
    /// The threads that spill.
    pub spilling: SmallVec<[ThreadId; 4]>,
    /// Number of spills that have ended.
    pub ended_spills: u64,
    /// Number of times that memory or room may have become free.
    pub changes: u64,
    pub seen_room: SeenRoom,
    pub stats: SpillStats,
    pub subscribers: Subscribers,
    pub history: History,
    /// Values to drop after unlocking: dropping them wakes waiters of a budget and runs its
    /// callbacks.
    pub to_drop: Vec<Box<dyn Send>>,
}

/// The held lock. Before unlocking it serves the waiters that a change marked. After unlocking it wakes
/// them, drops what is in `to_drop`, and maps what can be mapped.
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
            let maps = state.begin_maps();
            if state.core.has_to_check() {
                state.hand_over(self.shared.driver.now_ns());
            }
            let gone = std::mem::take(&mut state.to_drop);
            let ended = state.waiting.slots.take_ended();
            let has_to_watch = state.has_to_watch();
            drop(state);
            ended.iter().for_each(|slot| slot.wake());
            if has_to_watch || self.shared.has_starving_waiters() {
                self.shared.ring_watcher();
            }
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
    pub disk_gate: Arc<DiskGate>,
    pub budget: Option<MemorySpace>,
    /// Limit of the budget's space.
    budget_limit: Option<Bytes>,
    /// Leases may keep memory that a waiter of the budget's space lacks.
    pub starves: AtomicBool,
    pub peers: Peers,
    pub config: SpillConfig,
    /// The manager's own stream: memory is mapped, and data prefetched, in its order.
    pub stream: LeaseStream,
    /// Stream that waits for the ends of copies to the host.
    pub leaving: LeaseStream,
    state: Mutex<State>,
    /// Notified when copies were mapped, when a transfer has returned its staging blocks, and when a spill
    /// has ended.
    changed: Condvar,
    /// Looks for what notifies no waiter.
    pub watcher: Watcher,
    /// Itself, for the watching thread.
    pub this: OnceLock<Weak<Shared>>,
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
        let account = Account::new(budget.as_ref().map(|space| space.levels().granule));
        let disk_gate = Arc::new(DiskGate::new(config.disk_backoff_max));
        let state = State {
            core,
            waiting: Waiting::default(),
            events: Events::new(allocator, &mover),
            copies: BTreeMap::new(),
            homes: Homes::default(),
            completed: Vec::new(),
            deferred_ends: Vec::new(),
            pending_release: BTreeSet::new(),
            reclaimed: Bytes::ZERO,
            account,
            rates: config.rates,
            disk_gate: Arc::clone(&disk_gate),
            readable: None,
            to_map: BTreeSet::new(),
            mapping_now: BTreeSet::new(),
            retired_peers: Vec::new(),
            has_pinned_memory: false,
            pinned_ranges: BTreeSet::new(),
            staged_transfers: 0,
            ended_transfers: 0,
            spilling: SmallVec::new(),
            ended_spills: 0,
            changes: 0,
            seen_room: SeenRoom::default(),
            stats: SpillStats::default(),
            subscribers: Subscribers::default(),
            history: History::keeping(config.history),
            to_drop: Vec::new(),
        };
        Ok(Shared {
            allocator: Arc::clone(allocator),
            driver,
            mover,
            disk,
            disk_gate,
            budget_limit: budget.as_ref().map(MemorySpace::limit),
            budget,
            starves: AtomicBool::new(false),
            peers,
            config,
            stream,
            leaving,
            state: Mutex::new(state),
            changed: Condvar::new(),
            watcher: Watcher::default(),
            this: OnceLock::new(),
        })
    }

    pub fn lock(&self) -> Locked<'_> {
        Locked { guard: Some(lock(&self.state)), shared: self }
    }

    /// Wakes the threads in [`wait_until`](Shared::wait_until).
    pub fn notify(&self) {
        self.changed.notify_all();
    }

    /// Waits until `done` returns true, which is checked after each [`notify`](Shared::notify).
    pub fn wait_until(&self, done: impl Fn(&State) -> bool) -> Locked<'_> {
        loop {
            let mut state = self.lock();
            if done(&state) {
                return state;
            }
            if state.has_duties() {
                // Performed when it is unlocked.
                continue;
            }
            let guard = self.changed.wait(state.guard.take().expect(LOCKED));
            let guard = Some(guard.unwrap_or_else(PoisonError::into_inner));
            drop(Locked { guard, shared: self });
        }
    }

    /// Returns the most memory that leased buffers may occupy now.
    pub fn capacity(&self) -> Bytes {
        let all = || {
            let card = self.driver.info().limits.memory;
            let limit = self.allocator.limit().unwrap_or(card).min(card);
            limit.saturating_sub(self.allocator.live())
        };
        let capacity = self.config.capacity.unwrap_or_else(all);
        self.budget_limit.map_or(capacity, |limit| capacity.min(limit))
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

/// Uses of buffers that a lease records as complete at most.
const SOME_USES: usize = 256;

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
    /// Returns true if unlocking does more than to unlock.
    fn has_duties(&self) -> bool {
        !self.to_drop.is_empty()
            || self.waiting.slots.has_ended()
            || self.core.has_to_check()
            || self.has_pending_maps()
    }

    /// Returns true if a waiter may be served, or has to end, without a call of the manager.
    fn has_to_watch(&self) -> bool {
        !self.waiting.slots.is_empty()
            && (self.core.lacks_memory()
                || self.waiting.slots.has_deadlines()
                || !self.waiting.endless.is_empty()
                || !self.deferred_ends.is_empty())
    }

    /// Returns the event of a token, if there is one and its work may run.
    pub fn event_of(&mut self, token: Option<UseToken>) -> Result<Option<WorkEvent>, DriverError> {
        token.map_or(Ok(None), |token| self.events.of(token))
    }

    /// Processes completed work and what waited for it. One query for each stream with work.
    ///
    /// # Errors
    /// A query failed: that work counts as in flight.
    pub fn poll(&mut self) -> Result<(), DriverError> {
        self.poll_by(Events::poll, usize::MAX)
    }

    /// Does the same for the work of at most 64 streams, others at each call, and for 256 uses of buffers:
    /// for what may go on without knowing what completed. So a lease does not pay for all that completed
    /// since the last one.
    ///
    /// # Errors
    /// A query failed: that work counts as in flight.
    pub fn poll_some(&mut self) -> Result<(), DriverError> {
        self.poll_by(Events::poll_some, SOME_USES)
    }

    fn poll_by(
        &mut self,
        poll: fn(&mut Events) -> Polled,
        mut uses: usize,
    ) -> Result<(), DriverError> {
        for ending in std::mem::take(&mut self.deferred_ends) {
            self.end_lease(ending);
        }
        let (over, asked) = poll(&mut self.events);
        self.completed.extend(over);
        while let Some(&token) = self.completed.last() {
            self.core.complete_some_uses(token, &mut uses);
            if uses == 0 {
                break;
            }
            self.completed.pop();
        }
        for range in std::mem::take(&mut self.pending_release) {
            let lent = self.lend(range);
            self.reclaimed += lent;
        }
        self.recycle_copies();
        self.recycle_peer_copies();
        if self.core.has_ending() {
            self.reap();
        }
        asked
    }

    /// Ends buffers without handles once nothing holds them. Looks at those for which that may have
    /// changed.
    pub fn reap(&mut self) {
        let before = self.core.occupied();
        for buffer in self.core.take_ending() {
            let extent = self.core.slice(buffer);
            let status = self.core.status(buffer);
            match (self.core.remove(buffer), extent) {
                (Ok(stale), Ok(extent)) => {
                    if let Ok(status) = status {
                        self.emit_freed(buffer, status);
                    }
                    self.drop_copies(&stale);
                    self.leave(extent.range);
                }
                (Err(_), Ok(_)) => {
                    // No handle can read it: it is not copied out.
                    if let Ok(stale) = self.core.discard(buffer) {
                        self.drop_copies(&stale);
                    }
                }
                (_, Err(_)) => {}
            }
        }
        self.reclaimed += before.saturating_sub(self.core.occupied());
        self.settle_charges();
    }

    /// Ends a buffer's use of a range. The addresses go with the last buffer.
    fn leave(&mut self, range: RangeId) {
        if self.core.needed_memory(range).is_err() {
            self.to_drop.extend(self.homes.remove(&range).map(needless));
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
            self.pending_release.insert(range);
            return Bytes::ZERO;
        }
        home.ready_after = None;
        home.unsettled.clear();
        let released = self.release_adopted(range);
        if self.readable.is_some() {
            self.to_map.insert(range);
        }
        released + self.homes[&range].range.lend(&keep)
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
        let ended = self.account.settle(self.core.occupied());
        if !ended.is_empty() {
            self.to_drop.push(Box::new(ended));
        }
    }

    /// Drops stale copies. Blocks that queued copies still read are reused after those.
    pub fn drop_copies(&mut self, stale: &[StaleCopy]) {
        for gone in stale {
            let Some(below) = self.copies.get_mut(&gone.piece) else { continue };
            for copy in below.take(gone.from) {
                self.retire_copy(gone.piece.buffer, copy, &gone.after);
            }
            self.forget_empty(gone.piece);
        }
    }

    /// Frees a stale copy once the work is complete that may still use it.
    pub fn retire_copy(&mut self, buffer: BufferId, copy: PieceCopy, after: &[UseToken]) {
        match copy {
            PieceCopy::Mapped(mapped) => self.retire(buffer, mapped, after),
            PieceCopy::Peer(copy) => {
                self.retired_peers.push((copy, after.to_vec()));
                self.recycle_peer_copies();
            }
            // Blocks know the copies that use them. Dropping their charge runs callbacks of the host's
            // budget: after unlocking.
            copy => self.to_drop.push(Box::new(copy)),
        }
    }

    /// Frees stale copies on other cards that no work uses.
    fn recycle_peer_copies(&mut self) {
        for (copy, after) in std::mem::take(&mut self.retired_peers) {
            match after.iter().all(|&token| self.events.is_over(token)) {
                // Freeing it may release a chunk and credit a charge: after unlocking.
                true => self.to_drop.push(Box::new(copy)),
                false => self.retired_peers.push((copy, after)),
            }
        }
    }

    /// Returns the number of entries of each table.
    pub fn footprint(&self) -> Vec<(&'static str, usize)> {
        let [streams, uses] = self.events.counts();
        vec![
            ("slots of waiters", self.waiting.slots.len()),
            ("endless waits for the budget", self.waiting.endless.len()),
            ("copies of pieces", self.copies.len()),
            ("address ranges", self.homes.len()),
            ("streams with work", streams),
            ("uses with work", uses),
            ("streams with completed work", self.completed.len()),
            ("leases on capturing streams", self.deferred_ends.len()),
            ("ranges to lend", self.pending_release.len()),
            ("charges", self.account.entries()),
            ("ranges to map", self.to_map.len() + self.mapping_now.len()),
            ("stale copies on cards", self.retired_peers.len()),
            ("stale mapped copies", self.readable.as_ref().map_or(0, InPlacePool::retired_count)),
        ]
    }

    /// Removes the entry of a piece that has no copies.
    pub fn forget_empty(&mut self, piece: PieceId) {
        if self.copies.get(&piece).is_some_and(SpilledCopies::is_empty) {
            self.copies.remove(&piece);
        }
    }

    /// Returns the addresses of a slice now.
    pub fn addresses(&self, at: RangeSlice) -> AddrRange {
        let home = self.homes.get(&at.range).expect(HOME);
        let start = match self.adopted_memory(at.range) {
            Some(adopted) => adopted.start,
            None => home.range.range().start,
        };
        AddrRange::new(start + at.offset, at.len)
    }

    /// Returns the adopted memory that the contents of a range are in; `None` once they are in its own.
    pub fn adopted_memory(&self, range: RangeId) -> Option<AddrRange> {
        let adopted = self.homes.get(&range)?.adopted.as_ref()?;
        self.core.is_adopted(range).then_some(adopted.range)
    }
}
