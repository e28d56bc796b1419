//! A reservation: memory kept free for its owner.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::ledger::core::{
    ChargeError, GrowError, Merge, MergeError, Owner, Priority, Request, ReservationId, SpaceId,
    SplitError, Tag,
};
use vramp_core::Bytes;

use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::charge::LimitRule;
use crate::ledger::shell::error::ReserveError;
use crate::ledger::shell::shared::Shared;

const HELD: &str = "a reservation exists as long as its handle";

/// Bytes of one space reserved for the holder. Dropping it returns the unused bytes; allocated
/// bytes stay charged to the space until they are freed. It may outlive its manager.
#[must_use = "a reservation is released when it is dropped"]
pub struct Reservation {
    shared: Arc<Shared>,
    id: ReservationId,
    space: SpaceId,
    /// Of the request that made it.
    priority: Priority,
}

impl Reservation {
    #[inline]
    pub(crate) fn new(
        shared: &Arc<Shared>,
        id: ReservationId,
        space: SpaceId,
        priority: Priority,
    ) -> Reservation {
        Reservation { shared: Arc::clone(shared), id, space, priority }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Returns the id, as it appears in errors.
    pub fn id(&self) -> ReservationId {
        self.id
    }

    /// Returns the space.
    pub fn space(&self) -> SpaceId {
        self.space
    }

    /// Returns the size: the requested bytes, in whole granules of the space.
    pub fn bytes(&self) -> Bytes {
        self.record().size
    }

    /// Returns the bytes allocated from it. They may exceed the size if a policy allows it.
    pub fn used(&self) -> Bytes {
        self.record().used
    }

    /// Returns the high-water mark of [`used`](Reservation::used) since the reservation was made or
    /// since the last [`reset_peak`](Reservation::reset_peak).
    pub fn peak(&self) -> Bytes {
        self.record().peak
    }

    /// Resets the peak to the present use.
    pub fn reset_peak(&mut self) {
        self.shared.update(|state| state.ledger.reset_peak(self.id)).expect(HELD);
    }

    /// Returns the bytes that can still be allocated from it.
    pub fn unused(&self) -> Bytes {
        self.record().unused()
    }

    /// Returns the owner.
    pub fn owner(&self) -> Owner {
        self.record().owner
    }

    /// Returns the priority, with which it also grows: that of its request.
    pub fn priority(&self) -> Priority {
        self.priority
    }

    /// Returns true if its manager was shut down or dropped. What it holds stays valid; no request or
    /// growth may wait any more ([`ReserveError::ShutDown`]).
    pub fn is_shut_down(&self) -> bool {
        self.shared.read().queue.is_shut_down()
    }

    /// Returns the directory of a space on a disk; `None` in other tiers, and if it is not known
    /// ([`MemorySpace::directory`](crate::MemorySpace::directory)).
    pub fn directory(&self) -> Option<PathBuf> {
        self.shared.directory(self.space)
    }

    /// Returns the tag.
    pub fn tag(&self) -> Tag {
        self.record().tag
    }

    fn record(&self) -> crate::ledger::core::ReservationRecord {
        *self.shared.read().ledger.reservation(self.id).expect(HELD)
    }

    /// Grows the reservation at once, with its own priority. Overtakes waiters only within their
    /// bound. [`request_growth`](Reservation::request_growth) has options.
    ///
    /// # Errors
    /// There is no room, or never will be, or waiters go first. After a shutdown of the manager a lack
    /// of room is [`ReserveError::ShutDown`]. The reservation does not change.
    pub fn grow(&mut self, by: Bytes) -> Result<(), ReserveError> {
        self.grow_now(by, self.priority)
    }

    pub(crate) fn grow_now(&mut self, by: Bytes, priority: Priority) -> Result<(), ReserveError> {
        self.fits_at_all(by)?;
        let grown = self.shared.update(|state| {
            let grants = state.queue.grow(&mut state.ledger, self.id, by, priority)?;
            state.complete_granted(grants);
            Ok(())
        });
        match grown {
            Ok(()) => Ok(()),
            Err(GrowError::Refused(_) | GrowError::Behind { .. }) => {
                let refusal = self.shared.refusal(&self.part(by));
                Err(match self.is_shut_down() {
                    true => ReserveError::ShutDown(refusal),
                    false => ReserveError::NotNow(refusal),
                })
            }
            Err(GrowError::Stale(stale)) => panic!("{HELD}: {stale}"),
        }
    }

    /// Fails if the grown reservation would exceed the limit of the space.
    pub(crate) fn fits_at_all(&self, by: Bytes) -> Result<(), ReserveError> {
        let size = self.bytes();
        let limit = self.shared.read().ledger.levels(self.space).expect(HELD).limit;
        match size.checked_add(by).is_some_and(|size| size <= limit) {
            true => Ok(()),
            false => Err(ReserveError::NeverFits(self.shared.refusal(&self.part(by)))),
        }
    }

    fn part(&self, bytes: Bytes) -> Request {
        let record = self.record();
        Request {
            candidates: [self.space].into_iter().collect(),
            bytes,
            kept: Bytes::ZERO,
            held: Bytes::ZERO,
            place: None,
            priority: self.priority,
            owner: record.owner,
            tag: record.tag,
        }
    }

    /// Shrinks the reservation to its use. Returns the bytes that came back to the space.
    pub fn shrink_to_fit(&mut self) -> Bytes {
        self.shared.update(|state| {
            let bytes = state.ledger.shrink_to_fit(self.id).expect(HELD);
            state.returned(self.space, bytes);
            bytes
        })
    }

    /// Splits `bytes` of the unused part off into a second reservation.
    ///
    /// # Errors
    /// The unused part is smaller. The reservation does not change.
    pub fn split(&mut self, bytes: Bytes) -> Result<Reservation, SplitError> {
        let id = self.shared.update(|state| state.ledger.split(self.id, bytes))?;
        Ok(Reservation::new(&self.shared, id, self.space, self.priority))
    }

    /// Adds the unused part of `from` and releases `from`.
    ///
    /// # Errors
    /// `from` is in another space or of another manager. The error contains it.
    pub fn merge(&mut self, from: Reservation) -> Result<(), MergeRejected> {
        if !Arc::ptr_eq(&self.shared, &from.shared) {
            return Err(MergeRejected { reason: MergeRejection::OtherManager, from });
        }
        let merged = self.shared.update(|state| {
            let before = state.ledger.total(self.space).expect(HELD);
            state.ledger.merge(Merge { into: self.id, from: from.id })?;
            let after = state.ledger.total(self.space).expect(HELD);
            state.returned(self.space, before.saturating_sub(after));
            Ok(())
        });
        // After a merge the id of `from` is stale, and dropping it releases nothing.
        merged.map_err(|error| MergeRejected { reason: MergeRejection::Ledger(error), from })
    }

    /// Charges memory whose allocator has no budget of its own, until the charge is dropped, before
    /// or after the reservation. `rule` decides about an overrun.
    ///
    /// # Errors
    /// The allocation exceeds the reservation, and the rule fails it or the space has no room.
    pub fn charge(&self, bytes: Bytes, rule: &dyn LimitRule) -> Result<Charge, ChargeError> {
        Charge::reserved(&self.shared, (self.id, self.space), bytes, rule)
    }

    /// As [`charge`](Reservation::charge), for as much of `max` as is unused; `None` if nothing is.
    pub fn charge_up_to(&self, max: Bytes) -> Option<Charge> {
        Charge::reserved_up_to(&self.shared, (self.id, self.space), max)
    }

    /// Ends the reservation and turns its unused bytes into a charge to the space. The total of the
    /// space does not change. What is allocated from the reservation stays charged as well.
    pub fn into_charge(self) -> Charge {
        // After this the id is stale, and dropping the handle releases nothing.
        Charge::from_reservation(&self.shared, self.id, self.space)
    }
}

/// Why two reservations were not merged. Nothing changed.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct MergeRejected {
    /// Reason.
    pub reason: MergeRejection,
    /// The reservation that was to be merged; still the caller's.
    pub from: Reservation,
}

/// Reason against a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeRejection {
    /// The reservations are of different managers.
    #[error("reservations of different managers cannot be merged: release one and grow the other")]
    OtherManager,
    /// The reservations are in different spaces.
    #[error(transparent)]
    Ledger(#[from] MergeError),
}

impl Drop for Reservation {
    #[inline]
    fn drop(&mut self) {
        self.shared.release(self.id, self.space);
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.id, self.space)
    }
}
