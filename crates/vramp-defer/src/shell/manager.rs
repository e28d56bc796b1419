//! The manager of a card's deferrable buffers. It spills them when memory runs short.

use std::sync::{Arc, Weak};

use crate::planner::{
    Access, DeferCensus, DeferCounters, PeerId, RangeId, Rates, allocation_deficit,
};
use vramp_alloc::observe::Registration;
use vramp_alloc::{Allocator, Driver, StreamId, StreamWork};
use vramp_core::{AddrRange, Bytes, Inconsistency, Shortage};
use vramp_tiers::Priority;

use super::acquire::InPlaceMode;
use super::buffer_handle::{DeferrableBuffer, Owner};
use super::cleaner::Cleaner;
use super::guests::Guest;
use super::lease_set::LeaseSet;
use super::peer_copy::PeerPart;
use super::report::{FailedMove, MoveRecord, SpillStats, Spilled, WaitRecord};
use super::spill_config::SpillConfig;
use super::spill_error::SpillError;
use super::state::{RangeBacking, Shared};
use crate::sync::Mutex;
use vramp_tiers::Deadline;
use vramp_tiers::DiskStore;
use vramp_tiers::MemorySpace;
use vramp_tiers::Mover;
use vramp_tiers::spill::{SpillRequest, SpillerRegistration};

/// The deferrable buffers of one card. [The crate's page](crate) has an example.
///
/// While the manager lives, allocations of its allocator, and reservations in the space that it
/// charges, spill buffers when memory runs short. It must live as long as its buffers are used.
pub struct SpillManager {
    shared: Arc<Shared>,
    registration: Registration,
    guests: Vec<Guest>,
    _spiller: Option<SpillerRegistration>,
    _cleaner: Option<Cleaner>,
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
        let guests = peers.iter().map(|peer| Guest::new(&shared, peer)).collect();
        let weak = Arc::downgrade(&shared);
        let registration = allocator.on_shortage(move |shortage| answer(&weak, shortage));
        let spiller = budget.map(|space| {
            let weak = Arc::downgrade(&shared);
            space.register_spiller(Priority::default(), move |request: &SpillRequest<'_>| {
                let Some(shared) = Weak::upgrade(&weak) else { return Bytes::ZERO };
                shared.spill(request.bytes(), &|| request.left()).freed
            })
        });
        let cleaner = cleaner.map(|how| Cleaner::start(&shared, how));
        Ok(SpillManager { shared, registration, guests, _spiller: spiller, _cleaner: cleaner })
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
                drop(guard);
                Ok(DeferrableBuffer::new(Owner::new(&self.shared, added.buffer, addresses)))
            }
            Err(error) => {
                let removed = state.core.remove(added.buffer);
                debug_assert!(removed.is_ok(), "a new buffer is not held");
                Err(error.into())
            }
        }
    }

    /// Returns a group for small buffers that are used together and have the same lifetime. They
    /// share memory, and leave together.
    pub fn group(&self) -> BufferGroup {
        BufferGroup { shared: Arc::clone(&self.shared), ranges: Mutex::default() }
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
        self.shared.lease(buffers, streams, deadline.into(), InPlaceMode::Never)
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
        self.shared.lease_in_place(buffers, streams, deadline.into())
    }

    /// Leases, launches, waits for `stream`, and ends the lease: for synchronous work.
    ///
    /// # Errors
    /// As [`lease`](SpillManager::lease); or the work failed.
    pub fn lock_and_launch<R>(
        &self,
        buffers: &[(&DeferrableBuffer, Access)],
        stream: StreamId,
        launch: impl FnOnce(&LeaseSet) -> R,
    ) -> Result<R, SpillError> {
        let result = self.lock_and_launch_async(buffers, stream, launch)?;
        self.sync_and_unlock(stream)?;
        Ok(result)
    }

    /// Leases, launches, and ends the lease at what was queued on the stream.
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

    /// Waits for `stream`, which may have been destroyed. Leases for work on it have ended then;
    /// they end without this call too.
    ///
    /// # Errors
    /// The work failed, or the stream is unknown.
    pub fn sync_and_unlock(&self, stream: StreamId) -> Result<(), SpillError> {
        let work = self.shared.allocator.stream_work(stream);
        match work.ok_or_else(|| SpillError::UnknownStream(stream.to_string()))? {
            StreamWork::Open(raw) => self.shared.driver.synchronize_stream(raw)?,
            StreamWork::Ended(end) => end.synchronize()?,
            StreamWork::Over => {}
        }
        self.shared.lock().poll()?;
        Ok(())
    }

    /// Evicts buffers until `bytes` more of the card are free, or none may leave.
    pub fn spill(&self, bytes: Bytes) -> Spilled {
        self.shared.spill(bytes, &|| bytes)
    }

    /// Copies out contents that were not used for long, up to `budget`. They stay on the card, and
    /// leave later without a copy. Returns the number of bytes chosen.
    pub fn clean(&self, budget: Bytes) -> Bytes {
        self.shared.clean(budget)
    }

    /// Reclaims host memory: drops copies that are not needed, and moves others to the disk.
    /// Returns the bytes freed.
    pub fn relieve_host(&self, bytes: Bytes) -> Bytes {
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

    /// Ends the epoch: pointers exposed until now are no longer used, and work on them is complete.
    pub fn end_epoch(&self) {
        let mut state = self.shared.lock();
        state.core.end_epoch();
        state.reap();
        drop(state);
        self.shared.notify();
    }

    /// Sums all buffers.
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
        self.shared.lock().stats
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
        drop(state);
        self.shared.peers.stores().try_for_each(|(_, store)| store.audit())?;
        Ok(())
    }
}

/// Spills what an allocation lacks.
fn answer(shared: &Weak<Shared>, shortage: &Shortage) -> bool {
    let Some(shared) = shared.upgrade() else { return false };
    let page = shared.driver.info().limits.page;
    let deficit = allocation_deficit(shortage, page);
    // While the next piece is copied, freed memory is remapped to where the block will lie.
    let left = || {
        // Only ahead of need: if it fails, the allocation itself reports it.
        let _ = shared.allocator.assemble(shortage);
        deficit
    };
    !shared.spill(deficit, &left).freed.is_zero()
}

impl Drop for SpillManager {
    fn drop(&mut self) {
        self.guests.clear();
        self.shared.allocator.unregister(self.registration);
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
    ranges: Mutex<Vec<RangeId>>,
}

impl BufferGroup {
    /// Returns a buffer of `len`, at most a piece.
    ///
    /// # Errors
    /// The length is zero or more than a piece, or no addresses could be reserved.
    pub fn buffer(&self, len: Bytes) -> Result<DeferrableBuffer, SpillError> {
        let mut ranges = crate::sync::lock(&self.ranges);
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        ranges.retain(|range| state.homes.contains_key(range));
        let placed = ranges.iter().find_map(|&range| state.core.add_tenant(range, len).ok());
        let added = match placed {
            Some(added) => added,
            None => {
                let piece = self.shared.config.piece;
                let range = state.core.add_group(piece)?;
                let made = self.shared.allocator.stable_range(piece, piece);
                let made = made.map_err(SpillError::from).and_then(|addresses| {
                    let added = state.core.add_tenant(range, len)?;
                    Ok((addresses, added))
                });
                match made {
                    Ok((addresses, added)) => {
                        let addresses = Arc::new(addresses);
                        let home = RangeBacking::new(addresses, true);
                        state.homes.insert(range, home);
                        ranges.push(range);
                        added
                    }
                    Err(error) => {
                        state.core.remove_group(range);
                        return Err(error);
                    }
                }
            }
        };
        let addresses = state.addresses(added.at);
        drop(guard);
        Ok(DeferrableBuffer::new(Owner::new(&self.shared, added.buffer, addresses)))
    }
}

impl Drop for BufferGroup {
    fn drop(&mut self) {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        state.ended_groups.extend(crate::sync::lock(&self.ranges).drain(..));
        state.reap();
    }
}
