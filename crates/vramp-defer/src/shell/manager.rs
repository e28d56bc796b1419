//! The manager of a card's deferrable buffers. It spills them when memory runs short.
//!
//! Cancelling the waits for leases: before a program ends what they wait for.
//!
//! 1. [`SpillManager::cancel_waits`] ends each wait of a lease, also that for its budget.
//! 2. A request that would have to wait fails at once until [`SpillManager::allow_waits`]. One that can be
//!    granted is.
//!
//! O(n log n) in the number of waiters, which are all woken once.

use std::any::Any;
use std::sync::Arc;

use super::buffer_events::{BufferChange, EventStream};
use super::buffer_handle::DeferrableBuffer;
use super::buffer_owner::Owner;
use super::homes::AdoptFailed;
use super::homes::RangeBacking;
use super::lease_builder::LeaseBuilder;
use super::lease_set::LeaseSet;
use super::peer_stores::PeerPart;
use super::report::{FailedMove, MoveRecord, SpillStats, Spilled, WaitRecord};
use super::service::Service;
use super::spill_config::SpillConfig;
use super::spill_error::SpillError;
use super::state::Shared;
use super::stream_locks::StreamLocks;
use crate::planner::{
    Access, BufferId, BufferStatus, DeferCensus, DeferCounters, GroupSetId, PeerId, Rates,
};
use vramp_alloc::{Allocator, Driver, StreamId};
use vramp_core::{AddrRange, Bytes, Inconsistency};
use vramp_tiers::{Deadline, DiskStore, MemorySpace, Mover};

/// The deferrable buffers of one card. [The crate's page](crate) has an example.
///
/// Allocations of its allocator, and reservations in the space that it charges, spill buffers when
/// memory runs short. That ends with the last of the manager's clones, buffers and groups.
#[derive(Clone)]
pub struct SpillManager {
    pub(super) shared: Arc<Shared>,
    service: Arc<Service>,
    pub(super) locks: Arc<StreamLocks>,
}

/// Parts that a manager is made of.
#[derive(Clone)]
pub struct SpillParts {
    /// Allocator of the buffers' memory: of the preset vramp, on a device with virtual memory.
    pub allocator: Arc<Allocator>,
    /// Mover between the allocator's device and the host pool.
    pub mover: Mover,
    /// Disk store for contents that the host has no room for.
    pub disk: Option<Arc<DiskStore>>,
    /// Space that is charged for buffers on the card, and whose reservations may spill them.
    pub budget: Option<MemorySpace>,
    /// Other cards whose free memory may hold contents, at most one store on each. None by default.
    pub peers: Vec<PeerPart>,
}

impl SpillManager {
    /// Returns a manager without buffers. It creates streams of its own.
    ///
    /// # Errors
    /// The configuration is invalid, or the mover is of another device.
    pub fn new(parts: SpillParts, config: SpillConfig) -> Result<SpillManager, SpillError> {
        SpillManager::keeping(parts, config, None)
    }

    /// Returns a manager without buffers. What it keeps is dropped after the last of its clones and
    /// buffers.
    pub(super) fn keeping(
        parts: SpillParts,
        config: SpillConfig,
        kept: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<SpillManager, SpillError> {
        let SpillParts { allocator, mover, disk, budget, peers } = parts;
        if !Arc::ptr_eq(allocator.driver(), mover.driver()) {
            return Err(SpillError::Settings(
                "the mover and the allocator are of different devices",
            ));
        }
        if config.piece < Bytes::mib(4) && config.piece < mover.driver().info().limits.page * 2 {
            return Err(SpillError::Settings("a piece must be at least 4 MiB"));
        }
        if let Some(cleaner) = &config.cleaner
            && !(0.0..=1.0).contains(&cleaner.above)
        {
            return Err(SpillError::Settings("the cleaner's level must lie between 0 and 1"));
        }
        let cleaner = config.cleaner;
        let stores = peers.iter().map(|peer| peer.store.clone()).collect();
        let shared = Shared::new(&allocator, mover, disk, budget.clone(), stores, config)?;
        let shared = Arc::new(shared);
        shared.watch();
        let service = Arc::new(Service::start(&shared, budget.as_ref(), &peers, cleaner, kept));
        Ok(SpillManager { shared, service, locks: Arc::default() })
    }

    /// Returns an empty buffer of `len`. It has addresses, and no memory before the first lease.
    ///
    /// # Errors
    /// The length is zero, or the addresses could not be reserved.
    pub fn buffer(&self, len: Bytes) -> Result<DeferrableBuffer, SpillError> {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        let added = state.core.add_buffer(len)?;
        match self.shared.allocator.stable_range(len, self.shared.config.piece) {
            Ok(range) => {
                let addresses = AddrRange::new(range.range().start, len);
                let range = Arc::new(range);
                let home = RangeBacking::new(range, false);
                state.homes.insert(added.at.range, home);
                state.emit(added.buffer, BufferChange::Created);
                drop(guard);
                Ok(DeferrableBuffer::new(Owner::new(&self.service, added.buffer, addresses)))
            }
            Err(error) => {
                let removed = state.core.remove(added.buffer);
                debug_assert!(removed.is_ok(), "a new buffer is not held");
                Err(error.into())
            }
        }
    }

    /// Makes a buffer of memory that is on the device already: of any allocator, at least one byte. The
    /// work queued on `stream` writes it. `owner` keeps it allocated; nothing is copied.
    ///
    /// Leases use the adopted addresses until all of the buffer has left the card. Then `owner` is
    /// dropped, without a lock, by the thread that evicted the buffer: perhaps in the middle of an
    /// allocation. From then on the buffer is restored at its own addresses, and
    /// [`LeaseSet::address`] says where it is. Its pieces leave together.
    ///
    /// Until then the memory is its allocator's: no space is charged for it, and it does not count
    /// against the capacity of leases.
    ///
    /// ```
    /// # use vramp_defer::{Access, Tiers};
    /// # use vramp_tiers::Bytes;
    /// # let tiers = Tiers::from_toml(
    /// #     "device = 'sim:h200'\n[[gpu]]\nindex = 0\ncapacity = '64MiB'\n\
    /// #      [[host]]\nindex = 0\ncapacity = '256MiB'",
    /// # )?;
    /// # let allocator = std::sync::Arc::clone(tiers.allocator());
    /// # let stream = tiers.stream();
    /// struct Owned(std::sync::Arc<vramp_alloc::Allocator>, Option<vramp_alloc::Allocation>);
    /// impl Drop for Owned {
    ///     fn drop(&mut self) {
    ///         let block = self.1.take().expect("it is freed once");
    ///         let stream = block.stream();
    ///         let _ = self.0.free(block, stream);
    ///     }
    /// }
    /// let block = allocator.malloc(Bytes::mib(32), stream)?;
    /// let memory = vramp_alloc::device::AddrRange::new(block.addr(), block.len());
    /// let owner = Box::new(Owned(allocator, Some(block)));
    /// let buffer = tiers.manager().adopt(memory, owner, stream)?;
    /// assert_eq!(buffer.lease(Access::Shared, stream)?.address(0), memory);
    /// tiers.manager().spill(Bytes::mib(32));
    /// assert!(!buffer.is_adopted());
    /// assert_eq!(buffer.lease(Access::Shared, stream)?.address(0), buffer.addresses());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The length is zero, no addresses could be reserved, the stream is unknown or captures a graph, or
    /// the memory is no allocation of the device, is a buffer's already, or is that of another pool of the
    /// allocator's group, such as a region. The owner is returned with the error.
    pub fn adopt(
        &self,
        memory: AddrRange,
        owner: Box<dyn Send>,
        stream: StreamId,
    ) -> Result<DeferrableBuffer, Box<AdoptFailed>> {
        self.shared.adopt(&self.service, memory, owner, stream)
    }

    /// Returns a group for small buffers that are used together and have the same lifetime. They
    /// share memory, and leave together.
    pub fn group(&self) -> BufferGroup {
        let set = self.shared.lock().core.add_group_set();
        let (shared, service) = (Arc::clone(&self.shared), Arc::clone(&self.service));
        BufferGroup { shared, service, set }
    }

    /// Leases all of the buffers, for work on `stream`. Restores them at their addresses; the
    /// stream waits for the copies and for earlier work on the buffers. All or nothing. If other
    /// leases are in the way, waits in order of arrival, for at most [`SpillConfig::patience`], and
    /// holds nothing meanwhile.
    ///
    /// Beside what moves: one driver call for each stream, one for each stream to wait for, and at
    /// the end a call and an event for each stream.
    ///
    /// # Errors
    /// The set does not fit on the card, other leases did not end in time, or memory or contents
    /// could not be restored. Contents stay whole, on the card or below.
    pub fn lease(
        &self,
        buffers: &[(&DeferrableBuffer, Access)],
        stream: StreamId,
    ) -> Result<LeaseSet, SpillError> {
        self.lease_on(buffers, &[stream], self.shared.config.patience)
    }

    /// Leases for work on several streams, waiting until a deadline.
    ///
    /// # Errors
    /// As [`lease`](SpillManager::lease).
    pub fn lease_on(
        &self,
        buffers: &[(&DeferrableBuffer, Access)],
        streams: &[StreamId],
        deadline: impl Into<Deadline>,
    ) -> Result<LeaseSet, SpillError> {
        self.shared.lease(buffers, streams, deadline.into(), false)
    }

    /// Returns a request for a lease on all of the buffers, to be completed and then waited for by a
    /// thread or a task. The lease belongs to no thread.
    ///
    /// ```no_run
    /// # use vramp_defer::{Access, DeferrableBuffer, LeaseOwner, SpillError, SpillManager};
    /// # async fn task(manager: &SpillManager, a: &DeferrableBuffer, b: &DeferrableBuffer,
    /// #     stream: vramp_alloc::StreamId) -> Result<(), SpillError> {
    /// let outer = manager.request(&[(a, Access::Shared)]).stream(stream).await?;
    /// // The task may be on another thread by now. It keeps the first lease while it waits.
    /// let both = [(a, Access::Shared), (b, Access::Exclusive)];
    /// let inner = manager.request(&both).stream(stream).holding(&outer).await?;
    /// # drop((outer, inner));
    /// # Ok(())
    /// # }
    /// ```
    pub fn request<'a>(
        &'a self,
        buffers: &'a [(&'a DeferrableBuffer, Access)],
    ) -> LeaseBuilder<'a> {
        LeaseBuilder::new(&self.shared, buffers)
    }

    /// Leases as [`lease`](SpillManager::lease) does, but a buffer that is only read, and was made
    /// [readable while spilled](DeferrableBuffer::readable_while_spilled), stays where it is: its
    /// spilled pieces are read over the bus. Only the rest of the set has to fit on the card. All
    /// or nothing.
    ///
    /// Each buffer is decided on its own. It comes to the card if it is written, if a piece is on
    /// the disk or in flight, or if another lease uses it on the card. It also comes after enough
    /// [reads in place](SpillConfig::promote_after), if it can without waiting.
    /// [`LeaseSet::is_in_place`] returns which stayed.
    ///
    /// ```no_run
    /// # use vramp_defer::{Access, DeferrableBuffer, SpillError, SpillManager};
    /// # fn join(manager: &SpillManager, column: &DeferrableBuffer, table: &DeferrableBuffer,
    /// #     stream: vramp_alloc::StreamId) -> Result<(), SpillError> {
    /// let set = [(column, Access::Shared), (table, Access::Exclusive)];
    /// let lease = manager.lease_in_place(&set, stream)?;
    /// // Scan the column at lease.address(0), once, and build the table at lease.address(1).
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`lease`](SpillManager::lease), about what has to come to the card.
    pub fn lease_in_place(
        &self,
        buffers: &[(&DeferrableBuffer, Access)],
        stream: StreamId,
    ) -> Result<LeaseSet, SpillError> {
        self.lease_in_place_on(buffers, &[stream], self.shared.config.patience)
    }

    /// Leases in place for work on several streams, waiting until a deadline.
    ///
    /// # Errors
    /// As [`lease_in_place`](SpillManager::lease_in_place).
    pub fn lease_in_place_on(
        &self,
        buffers: &[(&DeferrableBuffer, Access)],
        streams: &[StreamId],
        deadline: impl Into<Deadline>,
    ) -> Result<LeaseSet, SpillError> {
        self.shared.lease(buffers, streams, deadline.into(), true)
    }

    /// Leases, launches, and ends the lease at what was queued on the stream: the buffers stay where
    /// they are until that is complete, and no call has to unlock them.
    ///
    /// # Errors
    /// As [`lease`](SpillManager::lease).
    pub fn lock_and_launch_async<R>(
        &self,
        buffers: &[(&DeferrableBuffer, Access)],
        stream: StreamId,
        launch: impl FnOnce(&LeaseSet) -> R,
    ) -> Result<R, SpillError> {
        let lease = self.lease(buffers, stream)?;
        Ok(launch(&lease))
    }

    /// Evicts buffers until `bytes` more of the card are free, or none may leave.
    pub fn spill(&self, bytes: Bytes) -> Spilled {
        self.shared.disk_gate.open();
        self.shared.spill(bytes, &|| bytes)
    }

    /// Copies out contents that were not used for long, up to `budget`. They stay on the card, and
    /// leave later without a copy. Returns the number of bytes chosen.
    pub fn clean(&self, budget: Bytes) -> Bytes {
        self.shared.disk_gate.open();
        self.shared.clean(budget)
    }

    /// Reclaims host memory: drops copies that are not needed, and moves others to the disk.
    /// Returns the bytes freed.
    pub fn relieve_host(&self, bytes: Bytes) -> Bytes {
        self.shared.disk_gate.open();
        self.shared.relieve_host(bytes)
    }

    /// Removes copies of `bytes` from the card with the ordinal `peer`: those that are not needed are
    /// dropped, others move to the host or the disk, the least recently used first. Returns the bytes
    /// removed; zero for a card without a store.
    pub fn relieve_peer(&self, peer: u32, bytes: Bytes) -> Bytes {
        PeerId::new(peer).map_or(Bytes::ZERO, |peer| self.shared.relieve_peer(peer, bytes))
    }

    /// Sets the limit of the store on the card with the ordinal `peer`. Copies beyond it move to the
    /// host or the disk. Returns the bytes that are taken beyond it still, for lack of room there.
    pub fn set_peer_limit(&self, peer: u32, limit: Bytes) -> Bytes {
        let id = PeerId::new(peer);
        let store = id.and_then(|id| Some((id, self.shared.peers.store(id)?)));
        let Some((id, store)) = store else { return Bytes::ZERO };
        store.set_limit(limit);
        loop {
            let excess = store.excess();
            if excess.is_zero() || self.shared.relieve_peer(id, excess).is_zero() {
                return excess;
            }
        }
    }

    /// Subscribes to the changes of all buffers' states, with a queue of at most `capacity` events: a
    /// full one drops its oldest event. Nothing is called back: any thread takes events out.
    ///
    /// ```
    /// use std::time::Duration;
    /// use vramp_defer::events::BufferChange;
    /// # use vramp_defer::{Access, Tiers};
    /// # use vramp_tiers::Bytes;
    /// # let tiers = Tiers::from_toml(
    /// #     "device = 'sim:h200'\n[[gpu]]\nindex = 0\ncapacity = '64MiB'\n\
    /// #      [[host]]\nindex = 0\ncapacity = '256MiB'",
    /// # )?;
    /// let events = tiers.manager().events(1024);
    /// let buffer = tiers.buffer(Bytes::mib(1))?;
    /// let lease = buffer.lease(Access::Exclusive, tiers.stream())?;
    /// let second = std::thread::spawn(move || {
    ///     let created = events.recv(Duration::from_secs(1))?;
    ///     assert_eq!(created.change, BufferChange::Created);
    ///     events.recv(Duration::from_secs(1))
    /// });
    /// let locked = second.join().expect("it does not panic")?;
    /// assert_eq!((locked.buffer, locked.change), (buffer.id(), BufferChange::Locked));
    /// assert_eq!(locked.status.leases, 1);
    /// # drop(lease);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn events(&self, capacity: usize) -> EventStream {
        self.shared.lock().subscribers.add(capacity)
    }

    /// Returns the present state of all buffers, for a subscriber that lost events. O(buffers).
    pub fn statuses(&self) -> Vec<(BufferId, BufferStatus)> {
        let state = self.shared.lock();
        let status = |id| Some((id, state.core.status(id).ok()?));
        state.core.ids().filter_map(status).collect()
    }

    /// Sums all buffers. O(pieces) under the manager's lock: not for a call in a loop beside many buffers.
    pub fn census(&self) -> DeferCensus {
        let mut state = self.shared.lock();
        // Work that cannot be queried counts as in flight.
        let _ = state.poll();
        state.core.census()
    }

    /// Returns the planner's counters since the start.
    pub fn counters(&self) -> DeferCounters {
        self.shared.lock().core.counters()
    }

    /// Returns the statistics of transfers and waits since the start.
    pub fn stats(&self) -> SpillStats {
        let state = self.shared.lock();
        SpillStats { woken: state.waiting.slots.completed(), ..state.stats }
    }

    /// Returns the transfer rates measured on the manager's own copies.
    pub fn rates(&self) -> Rates {
        self.shared.lock().rates
    }

    /// Returns the last moves, the oldest first, with the cost by which each was chosen.
    pub fn history(&self) -> Vec<MoveRecord> {
        self.shared.lock().history.all()
    }

    /// Returns the last moves that failed with an error, the oldest first.
    pub fn failures(&self) -> Vec<FailedMove> {
        self.shared.lock().history.failed().cloned().collect()
    }

    /// Returns the last lease requests that waited, the oldest first, with what they waited for.
    pub fn waits(&self) -> Vec<WaitRecord> {
        self.shared.lock().history.waits()
    }

    /// Returns the number of entries of each table of the manager and its planner, after work that is
    /// complete was processed. O(entries): for tests that nothing stays.
    #[doc(hidden)]
    pub fn footprint(&self) -> Vec<(&'static str, usize)> {
        let mut state = self.shared.lock();
        // Work that cannot be queried counts as in flight.
        let _ = state.poll();
        let mut tables = state.core.footprint();
        tables.extend(state.footprint());
        tables
    }

    /// Checks the invariants. O(pieces log pieces).
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let state = self.shared.lock();
        state.core.audit()?;
        let census = state.core.census();
        let hosts = state
            .copies
            .values()
            .filter(|below| below.host.is_some() || below.mapped.is_some())
            .count();
        let disks = state.copies.values().filter(|below| below.disk.is_some()).count();
        let on_cards = state.copies.values().filter(|below| below.peer.is_some()).count();
        let counted: usize =
            self.shared.peers.stores().map(|(peer, _)| state.core.copies_on(peer)).sum();
        let bad = |what: String| Err(Inconsistency { what });
        if (census.moves, census.host_copies.is_zero()) == (0, true) && hosts > 0 {
            return bad(format!("{hosts} host copies that the planner does not count"));
        }
        if (census.moves, census.disk_copies.is_zero()) == (0, true) && disks > 0 {
            return bad(format!("{disks} disk copies that the planner does not count"));
        }
        if on_cards != counted {
            return bad(format!("{on_cards} copies on cards, the planner counts {counted}"));
        }
        state.account.audit(state.core.occupied())?;
        drop(state);
        self.shared.peers.stores().try_for_each(|(_, store)| store.audit())?;
        Ok(())
    }
}

impl std::fmt::Debug for SpillManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let census = self.shared.lock().core.census();
        write!(f, "{} buffers, {} of {} on the card", census.buffers, census.occupied, census.total)
    }
}

/// Small buffers that share memory.
pub struct BufferGroup {
    shared: Arc<Shared>,
    service: Arc<Service>,
    set: GroupSetId,
}

impl BufferGroup {
    /// Returns a buffer of `len`, at most a piece. O(log n) in the buffers of the group, and a
    /// reservation of addresses where none of its ranges has room.
    ///
    /// # Errors
    /// The length is zero or more than a piece, or no addresses could be reserved.
    pub fn buffer(&self, len: Bytes) -> Result<DeferrableBuffer, SpillError> {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        let added = match state.core.add_member(self.set, len)? {
            Some(added) => added,
            None => {
                let piece = self.shared.config.piece;
                let addresses = self.shared.allocator.stable_range(piece, piece)?;
                let range = state.core.add_group(piece, Some(self.set))?;
                state.homes.insert(range, RangeBacking::new(Arc::new(addresses), true));
                state.core.add_tenant(range, len)?
            }
        };
        let addresses = state.addresses(added.at);
        state.emit(added.buffer, BufferChange::Created);
        drop(guard);
        Ok(DeferrableBuffer::new(Owner::new(&self.service, added.buffer, addresses)))
    }
}

impl Drop for BufferGroup {
    fn drop(&mut self) {
        let mut guard = self.shared.lock();
        for range in guard.core.end_group_set(self.set) {
            let gone = guard.homes.remove(&range);
            guard.to_drop.extend(gone.map(|home| Box::new(home) as Box<dyn Send>));
        }
    }
}

impl SpillManager {
    /// Ends all waits for leases with [`SpillError::Cancelled`], and those
    /// that begin until [`allow_waits`](SpillManager::allow_waits). A lease that is being restored is not
    /// ended. Nothing is lost: the contents stay where they are.
    pub fn cancel_waits(&self) {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        state.waiting.cancel(&mut state.core);
    }

    /// Lets requests wait again.
    pub fn allow_waits(&self) {
        self.shared.lock().waiting.is_cancelled = false;
    }
}
