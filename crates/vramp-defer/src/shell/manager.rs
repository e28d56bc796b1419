//! Who keeps a card's deferrable buffers, and answers when memory runs short.

use std::sync::{Arc, Weak};

use crate::planner::{Access, DeferCensus, DeferCounters, RangeId, Rates, allocation_deficit};
use vramp_alloc::observe::Registration;
use vramp_alloc::{Allocator, Driver, StreamId};
use vramp_core::{AddrRange, Bytes, Inconsistency, Shortage};
use vramp_tiers::Priority;

use super::acquire::InPlaceMode;
use super::buffer_handle::{DeferrableBuffer, Owner};
use super::cleaner::Cleaner;
use super::lease_set::LeaseSet;
use super::report::{FailedMove, MoveRecord, SpillStats, Spilled, WaitRecord};
use super::spill_config::SpillConfig;
use super::spill_error::SpillError;
use super::state::{RangeBacking, Shared};
use crate::sync::Mutex;
use vramp_tiers::Deadline;
use vramp_tiers::DiskStore;
use vramp_tiers::MemorySpace;
use vramp_tiers::Mover;
use vramp_tiers::spill::SpillerRegistration;

/// The deferrable buffers of one card.
///
/// ```
/// use std::sync::Arc;
/// use vramp_alloc::{Allocator, Bytes, Config, Preset};
/// use vramp_defer::{Access, SpillConfig, SpillManager, SpillParts};
/// use vramp_tiers::host::HostPoolConfig;
/// use vramp_tiers::movers::MoverConfig;
/// use vramp_tiers::{HostPool, Mover, ReservationManager, SpaceConfig, SpaceId};
///
/// let device = vramp_alloc::open("sim:h200")?.driver;
/// let limit = Some(Bytes::mib(256));
/// let config = Config { limit, ..Config::preset(Preset::Vramp) };
/// let allocator = Arc::new(Allocator::new(Arc::clone(&device), config)?);
/// let stream = allocator.create_stream()?;
/// let queue = allocator.stream(stream).expect("it was made just now");
///
/// // What leaves the card goes to a GiB of pinned memory.
/// let spaces = ReservationManager::new([(SpaceId::host(0), SpaceConfig::host(Bytes::gib(1)))])?;
/// let host = spaces.space(SpaceId::host(0)).expect("it was configured");
/// let pool = HostPool::new(&host, HostPoolConfig::default(), [Arc::clone(&device)])?;
/// let mover = Mover::new(Arc::clone(&device), &pool, MoverConfig::default())?;
/// let parts = SpillParts { allocator, mover, disk: None, budget: None };
/// let manager = SpillManager::new(parts, SpillConfig::default())?;
///
/// // Four buffers of 128 MiB, on a card of which 256 MiB may be used.
/// let buffers = (0..4).map(|_| manager.buffer(Bytes::mib(128))).collect::<Result<Vec<_>, _>>()?;
/// for buffer in &buffers {
///     let lease = buffer.lease(Access::Exclusive, stream)?;
///     device.fill(queue, lease.address(0), 7)?; // or a kernel
/// }
/// assert!(!buffers[0].is_resident() && buffers[3].is_resident());
///
/// // A kernel that uses two of them finds both, where they always are.
/// let both = [(&buffers[0], Access::Shared), (&buffers[1], Access::Exclusive)];
/// let lease = manager.lease(&both, stream)?;
/// assert_eq!(lease.address(0), buffers[0].addresses());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// As long as it lives, the allocator's requests, and reservations in the space that it charges,
/// make buffers leave when memory runs short. It must live as long as its buffers are used.
pub struct SpillManager {
    shared: Arc<Shared>,
    registration: Registration,
    _spiller: Option<SpillerRegistration>,
    _cleaner: Option<Cleaner>,
}

/// What a manager is made of.
#[derive(Clone)]
pub struct SpillParts {
    /// Whose memory the buffers have. Of the preset vramp, on a device with virtual memory.
    pub allocator: Arc<Allocator>,
    /// Moves between the card and the host's pool. Of the allocator's device.
    pub mover: Mover,
    /// Where contents go when the host is full.
    pub disk: Option<Arc<DiskStore>>,
    /// What is charged for buffers on the card, and spills for reservations.
    pub budget: Option<MemorySpace>,
}

impl SpillManager {
    /// A manager without buffers. A stream is made for it.
    ///
    /// # Errors
    /// The configuration makes no sense, or the mover is another device's.
    pub fn new(parts: SpillParts, config: SpillConfig) -> Result<SpillManager, SpillError> {
        let SpillParts { allocator, mover, disk, budget } = parts;
        if !Arc::ptr_eq(allocator.driver(), mover.driver()) {
            return Err(SpillError::Settings("the mover is another device's than the allocator"));
        }
        if config.piece < Bytes::mib(4) && config.piece < mover.driver().info().limits.page * 2 {
            return Err(SpillError::Settings("a piece has to be 4 MiB at least"));
        }
        if let Some(cleaner) = &config.cleaner
            && !(0.0..=1.0).contains(&cleaner.above)
        {
            return Err(SpillError::Settings("the cleaner's level is no part of the capacity"));
        }
        let cleaner = config.cleaner;
        let shared = Shared::new(&allocator, mover, disk, budget.clone(), config)?;
        let shared = Arc::new(shared);
        let weak = Arc::downgrade(&shared);
        let registration = allocator.on_shortage(move |shortage| answer(&weak, shortage));
        let spiller = budget.map(|space| {
            let weak = Arc::downgrade(&shared);
            space.register_spiller(
                Priority::default(),
                move |shortage: &vramp_tiers::spill::SpillRequest<'_>| {
                    let Some(shared) = Weak::upgrade(&weak) else { return Bytes::ZERO };
                    shared.spill(shortage.bytes(), &|| shortage.left()).freed
                },
            )
        });
        let cleaner = cleaner.map(|how| Cleaner::start(&shared, how));
        Ok(SpillManager { shared, registration, _spiller: spiller, _cleaner: cleaner })
    }

    /// A buffer of `len`, empty: addresses, and no memory before the first lease.
    ///
    /// # Errors
    /// No length, or no addresses.
    pub fn buffer(&self, len: Bytes) -> Result<DeferrableBuffer, SpillError> {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        let added = state.core.add_buffer(len)?;
        match self.shared.allocator.stable_range(len, self.shared.config.piece) {
            Ok(range) => {
                let addresses = AddrRange::new(range.range().start, len);
                let range = Arc::new(range);
                let home =
                    RangeBacking { range, is_group: false, fully_backed: false, ready_after: None };
                state.homes.insert(added.at.range, home);
                drop(guard);
                Ok(DeferrableBuffer::new(Owner::new(&self.shared, added.buffer, addresses)))
            }
            Err(error) => {
                let removed = state.core.remove(added.buffer);
                debug_assert!(removed.is_ok(), "nobody holds a buffer that nobody knows");
                Err(error.into())
            }
        }
    }

    /// A group of small buffers that are used together and live as long as each other. They share
    /// memory, and leave together.
    pub fn group(&self) -> BufferGroup {
        BufferGroup { shared: Arc::clone(&self.shared), ranges: Mutex::default() }
    }

    /// The right to use all of the buffers, for work on `stream`: brings them to the card, at their
    /// addresses, and lets the stream come behind the copies and behind others' work on them. All or
    /// nothing; it waits for others as long as the manager's patience, in the order of arrival, and
    /// holds nothing meanwhile.
    ///
    /// Beside what moves: a driver call for each stream, one for each piece of work to wait for, and
    /// at the end another call and an event for each stream.
    ///
    /// # Errors
    /// They do not fit on the card at once, others hold them too long, or memory or data did not
    /// come. The buffers are then where they were, or where they went, whole.
    pub fn lease(
        &self,
        buffers: &[(&DeferrableBuffer, Access)],
        stream: StreamId,
    ) -> Result<LeaseSet, SpillError> {
        self.lease_on(buffers, &[stream], self.shared.config.patience)
    }

    /// The same for several streams, waiting until a deadline.
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

    /// The same as [`lease`](SpillManager::lease), but what is only read, and was made
    /// [readable while spilled](DeferrableBuffer::readable_while_spilled), stays where it is: its
    /// spilled pieces are read over the bus. The rest of the set comes to the card, and only the
    /// rest has to fit there. All or nothing.
    ///
    /// It is decided for each buffer alone. One of the set comes as usual if it is written, if all
    /// of it is on the card already, if a piece is on the disk or on its way, or if somebody holds
    /// it to use it on the card; and once it was read in place
    /// [often](super::SpillConfig::promote_after), if it can come without waiting.
    /// [`LeaseSet::is_in_place`] tells which stayed.
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
    /// As [`lease`](SpillManager::lease), about what has to come.
    pub fn lease_in_place(
        &self,
        buffers: &[(&DeferrableBuffer, Access)],
        stream: StreamId,
    ) -> Result<LeaseSet, SpillError> {
        self.lease_in_place_on(buffers, &[stream], self.shared.config.patience)
    }

    /// The same for several streams, waiting until a deadline.
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

    /// Leases, launches, and lets the lease end when the stream has passed what was queued.
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

    /// Waits for `stream`. Leases that were taken for work on it have then ended; nobody has to call
    /// this for them to end.
    ///
    /// # Errors
    /// The work failed, or the stream is unknown.
    pub fn sync_and_unlock(&self, stream: StreamId) -> Result<(), SpillError> {
        let raw = self.shared.allocator.stream(stream);
        let raw = raw.ok_or_else(|| SpillError::UnknownStream(stream.to_string()))?;
        self.shared.driver.synchronize_stream(raw)?;
        self.shared.lock().poll()?;
        Ok(())
    }

    /// Makes buffers leave the card until `bytes` of it are free that were not, or none may leave.
    pub fn spill(&self, bytes: Bytes) -> Spilled {
        self.shared.spill(bytes, &|| bytes)
    }

    /// Copies what was not used for long out, as much as `budget`; it stays on the card. What leaves
    /// later then leaves without a copy. Returns how much was chosen.
    pub fn clean(&self, budget: Bytes) -> Bytes {
        self.shared.clean(budget)
    }

    /// Makes room on the host: copies that are not needed go, others move to the disk.
    pub fn relieve_host(&self, bytes: Bytes) -> Bytes {
        self.shared.relieve_host(bytes)
    }

    /// Ends the epoch: pointers that were exposed until then are not used any more, and work on them
    /// is over.
    pub fn end_epoch(&self) {
        let mut state = self.shared.lock();
        state.core.end_epoch();
        state.reap();
        drop(state);
        self.shared.notify();
    }

    /// All buffers, summed.
    pub fn census(&self) -> DeferCensus {
        let mut state = self.shared.lock();
        // What cannot be asked counts as in use.
        let _ = state.poll();
        state.core.census()
    }

    /// What was decided since the start.
    pub fn counters(&self) -> DeferCounters {
        self.shared.lock().core.counters()
    }

    /// What was done since the start.
    pub fn stats(&self) -> SpillStats {
        self.shared.lock().stats
    }

    /// How fast data moves, as measured by its own copies.
    pub fn rates(&self) -> Rates {
        self.shared.lock().rates
    }

    /// The last moves, the oldest first, with the reason of each choice.
    pub fn history(&self) -> Vec<MoveRecord> {
        self.shared.lock().history.all()
    }

    /// The last moves that failed with an error, the oldest first: of a disk that dies, for example.
    pub fn failures(&self) -> Vec<FailedMove> {
        self.shared.lock().history.failed().cloned().collect()
    }

    /// The last requests for leases that had to wait, the oldest first, with what they waited for.
    pub fn waits(&self) -> Vec<WaitRecord> {
        self.shared.lock().history.waits()
    }

    /// Checks what must always hold.
    ///
    /// # Errors
    /// What does not.
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
        let bad = |what: String| Err(Inconsistency { what });
        if (census.moves, census.host_copies.is_zero()) == (0, true) && hosts > 0 {
            return bad(format!("{hosts} host copies that count for nothing"));
        }
        if (census.moves, census.disk_copies.is_zero()) == (0, true) && disks > 0 {
            return bad(format!("{disks} disk copies that count for nothing"));
        }
        Ok(())
    }
}

/// What the allocator's request lacks leaves the card.
fn answer(shared: &Weak<Shared>, shortage: &Shortage) -> bool {
    let Some(shared) = shared.upgrade() else { return false };
    let page = shared.driver.info().limits.page;
    let deficit = allocation_deficit(shortage, page);
    // While the next piece is copied, what left is moved to where the block will lie.
    let left = || {
        // Ahead of need only: if it fails, the request itself finds out.
        let _ = shared.allocator.assemble(shortage);
        deficit
    };
    !shared.spill(deficit, &left).freed.is_zero()
}

impl Drop for SpillManager {
    fn drop(&mut self) {
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
    /// A buffer of `len`, no longer than a piece.
    ///
    /// # Errors
    /// No length, longer than a piece, or no addresses.
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
                        let home = RangeBacking {
                            range: addresses,
                            is_group: true,
                            fully_backed: false,
                            ready_after: None,
                        };
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
