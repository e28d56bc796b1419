//! The handle of a space.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::ledger::core::{
    Bound, ChargeError, Crossing, Levels, Pressure, Priority, ReservationId, SpaceCensus, SpaceId,
    StaleReservation, Strategy, Tag, TagCensus,
};
use vramp_alloc::{Allocator, StreamId};
use vramp_core::Bytes;

use crate::ledger::shell::charge::{Charge, LimitRule};
use crate::ledger::shell::error::SpaceFull;
use crate::ledger::shell::notify::NotificationChannel;
use crate::ledger::shell::panics::Subscriber;
use crate::ledger::shell::pressure::{PressureWatch, Subscription};
use crate::ledger::shell::reclaim::{Reclaimer, ReclaimerRegistration};
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::shared::Shared;
use crate::ledger::shell::spill::{Spiller, SpillerRegistration};
use crate::ledger::shell::streams::{AcquirePolicy, BorrowedStream, StreamPoolError};
use crate::ledger::shell::wait::RequestBuilder;

const KNOWN: &str = "the manager of a handle has its space";

/// Handle of a space: a GPU, a NUMA node or a directory with its budget. Handles of one space are
/// equal.
#[derive(Clone)]
pub struct MemorySpace {
    pub(crate) shared: Arc<Shared>,
    pub(crate) id: SpaceId,
}

impl MemorySpace {
    /// Returns the id of the space.
    pub fn id(&self) -> SpaceId {
        self.id
    }

    /// Returns the directory of a space on a disk: that of the last [`DiskStore`](crate::DiskStore) that
    /// was opened in it, or of [`set_directory`](MemorySpace::set_directory). `None` before.
    pub fn directory(&self) -> Option<PathBuf> {
        self.shared.directory(self.id)
    }

    /// Sets the directory of the space, for callers that write files of their own there.
    pub fn set_directory(&self, directory: &Path) {
        self.shared.set_directory(self.id, directory);
    }

    /// Begins a request for `bytes` in this space alone.
    pub fn request(&self, bytes: Bytes) -> RequestBuilder<'_> {
        RequestBuilder::new(&self.shared, Strategy::Specific(self.id), bytes)
    }

    /// Charges memory without a reservation, up to the capacity, until the charge is dropped.
    ///
    /// # Errors
    /// The space has no room.
    pub fn charge(&self, bytes: Bytes) -> Result<Charge, SpaceFull> {
        Charge::unreserved(&self.shared, self.id, bytes)
    }

    /// Charges memory to a reservation of the space that another owner has, such as one that is attached to
    /// a stream, until the charge is dropped. `rule` decides about an overrun. O(1).
    ///
    /// # Errors
    /// As of [`Reservation::charge`]; [`ChargeError::Stale`] if the reservation was released or is of
    /// another space. Nothing changes.
    pub fn charge_reserved(
        &self,
        reservation: ReservationId,
        bytes: Bytes,
        rule: &dyn LimitRule,
    ) -> Result<Charge, ChargeError> {
        let space = self.shared.read().ledger.reservation(reservation).map(|record| record.space);
        if space != Some(self.id) {
            return Err(StaleReservation::Unknown { id: reservation }.into());
        }
        Charge::reserved(&self.shared, (reservation, self.id), bytes, rule)
    }

    /// Returns the statistics of the space.
    pub fn census(&self) -> SpaceCensus {
        self.shared.read().ledger.census(self.id).expect(KNOWN)
    }

    /// Returns the statistics of one tag in the space; zeros for another manager's tag.
    pub fn tag_census(&self, tag: Tag) -> TagCensus {
        self.shared.read().ledger.tag_census(self.id, tag).expect(KNOWN)
    }

    /// Returns the levels in bytes.
    pub fn levels(&self) -> Levels {
        self.shared.read().ledger.levels(self.id).expect(KNOWN)
    }

    /// Returns the capacity.
    pub fn capacity(&self) -> Bytes {
        self.levels().capacity
    }

    /// Returns the upper bound of reservations.
    pub fn limit(&self) -> Bytes {
        self.levels().limit
    }

    /// Returns the bytes below the limit that are free now.
    pub fn available(&self) -> Bytes {
        self.available_to(Bound::Limit)
    }

    /// Returns the bytes that are free now below a bound: the limit of reservations, or the capacity, up
    /// to which memory outside reservations is charged.
    pub fn available_to(&self, bound: Bound) -> Bytes {
        self.shared.read().ledger.available(self.id, bound).expect(KNOWN)
    }

    /// Returns all charges: reservations, overruns, and memory outside reservations.
    pub fn total(&self) -> Bytes {
        self.shared.read().ledger.total(self.id).expect(KNOWN)
    }

    /// Returns the sum of the sizes of all reservations.
    pub fn total_reserved(&self) -> Bytes {
        self.census().reserved
    }

    /// Returns true for a reservation of this space, made by the same manager.
    pub fn contains(&self, reservation: &Reservation) -> bool {
        reservation.space() == self.id && Arc::ptr_eq(reservation.shared(), &self.shared)
    }

    /// True if the charge is to this space of the same manager.
    pub(crate) fn has_charge(&self, charge: &Charge) -> bool {
        charge.space() == self.id && Arc::ptr_eq(charge.shared(), &self.shared)
    }

    /// Returns the number of reservations.
    pub fn active_reservations(&self) -> usize {
        self.census().reservations
    }

    /// Returns the high-water mark of the total since the last
    /// [`reset_peaks`](MemorySpace::reset_peaks).
    pub fn peak(&self) -> Bytes {
        self.census().peak
    }

    /// Resets the peaks of the space and of its tags to the present totals.
    pub fn reset_peaks(&self) {
        self.shared.update(|state| state.ledger.reset_peaks(self.id)).expect(KNOWN);
    }

    /// Returns the total against the levels.
    pub fn pressure(&self) -> Pressure {
        self.shared.read().ledger.pressure(self.id).expect(KNOWN)
    }

    /// True at the trigger and above: data should be spilled.
    pub fn should_downgrade(&self) -> bool {
        self.pressure().should_downgrade()
    }

    /// True at the stop and below: spilling should stop.
    pub fn should_stop_downgrading(&self) -> bool {
        self.pressure().should_stop()
    }

    /// Returns the bytes to spill to reach the stop.
    pub fn amount_to_downgrade(&self) -> Bytes {
        self.pressure().amount_to_downgrade()
    }

    /// Calls `callback` once for each crossing of the trigger or the stop from now on, in order, in
    /// the thread of the crossing and with no lock held. It may reserve and release. A panic is
    /// caught and counted ([`panics`](crate::ReservationManager::panics)).
    pub fn subscribe(
        &self,
        callback: impl Fn(SpaceId, Crossing) + Send + Sync + 'static,
    ) -> Subscription {
        let subscriber = self.shared.update(|state| {
            let cursor = state.ledger.watch(self.id).expect(KNOWN);
            let subscriber = Arc::new(Subscriber::new(cursor, Box::new(callback)));
            state.subscribers.push(Arc::clone(&subscriber));
            subscriber
        });
        Subscription { shared: Arc::downgrade(&self.shared), subscriber }
    }

    /// Returns a watch to poll for the same crossings.
    pub fn watch(&self) -> PressureWatch {
        let cursor = self.shared.read().ledger.watch(self.id).expect(KNOWN);
        PressureWatch { shared: Arc::clone(&self.shared), cursor }
    }

    /// Registers a spiller, which can move data out of the space. Requests that have to wait here
    /// call it, and so does [`spill`](MemorySpace::spill): the highest priority first, then the
    /// oldest. Present waiters try it at once.
    pub fn register_spiller(
        &self,
        priority: Priority,
        spiller: impl Spiller + 'static,
    ) -> SpillerRegistration {
        self.shared.register_spiller(self.id, priority, Box::new(spiller))
    }

    /// Registers a reclaimer, which credits reservations of the space with memory that they paid for
    /// and that is not in use. Called before a rule decides about an overrun.
    pub fn register_reclaimer(&self, reclaimer: impl Reclaimer + 'static) -> ReclaimerRegistration {
        self.shared.register_reclaimer(self.id, Box::new(reclaimer))
    }

    /// Says that `bytes` more can be spilled than before: the first waiters that together lack as
    /// many try again. O(1) without waiters, otherwise O(waiters before and among these).
    pub fn notify_spillable(&self, bytes: Bytes) {
        let slots = {
            let state = self.shared.read();
            if state.queue.is_empty() {
                return;
            }
            state.slots_lacking(self.id, bytes)
        };
        slots.iter().for_each(|slot| slot.notify());
    }

    /// Returns true if a request waits for memory of the space.
    pub fn has_waiters(&self) -> bool {
        self.shared.read().queue.has_waiters(self.id)
    }

    /// Acquires a stream of the space's default pool, which creates one if none is idle. The pool
    /// belongs to the first [`TrackedAllocator`](crate::TrackedAllocator) of the space that exists
    /// ([`TrackedAllocator::streams`](crate::TrackedAllocator::streams)).
    ///
    /// # Errors
    /// The space has no tracked allocator, or the driver created no stream.
    pub fn acquire_stream(&self) -> Result<BorrowedStream, StreamPoolError> {
        let pool = self.shared.attachments.streams(self.id);
        let pool = pool.ok_or(StreamPoolError::NoAllocator { space: self.id })?;
        pool.acquire(AcquirePolicy::Grow)
    }

    /// Charges as much of `max` as is unused to the reservation that is attached to the calling
    /// thread, or to one of the streams, at a [`TrackedAllocator`](crate::TrackedAllocator) of
    /// `allocator`. `None` if none of them has unused bytes.
    pub fn charge_attached(
        &self,
        allocator: &Arc<Allocator>,
        streams: &[StreamId],
        max: Bytes,
    ) -> Option<Charge> {
        Charge::attached(&self.shared, self.id, allocator, streams, max)
    }

    /// Calls the spillers to free `bytes`, in this thread. Returns the freed bytes: up to one step
    /// more, or fewer if the spillers have no more; zero if called by a spiller of this space.
    /// Waiting requests call spillers themselves. This call frees memory ahead of them.
    pub fn spill(&self, bytes: Bytes) -> Bytes {
        self.shared.spill(self.id, bytes)
    }

    /// Returns a channel that is notified whenever memory comes back to the space. It is shut down
    /// with the manager.
    pub fn channel(&self) -> NotificationChannel {
        self.shared.update(|state| {
            let known = state.channels.iter().find(|(space, ..)| *space == self.id);
            if let Some((_, channel, _)) = known {
                return channel.clone();
            }
            let channel = NotificationChannel::new();
            match state.queue.is_shut_down() {
                true => channel.shutdown(),
                false => {
                    let notifier = channel.notifier();
                    state.channels.push((self.id, channel.clone(), notifier));
                }
            }
            channel
        })
    }
}

impl PartialEq for MemorySpace {
    fn eq(&self, other: &MemorySpace) -> bool {
        self.id == other.id && Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Eq for MemorySpace {}

impl std::fmt::Debug for MemorySpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let census = self.census();
        write!(f, "{}: {} of {}", self.id, census.total, census.levels.capacity)
    }
}
