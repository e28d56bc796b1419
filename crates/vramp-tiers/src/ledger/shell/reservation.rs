//! Memory that is kept free for its owner, until it is dropped.

use std::fmt;
use std::sync::Arc;

use crate::ledger::core::{
    ChargeError, GrowError, Merge, Owner, Request, ReservationId, SpaceId, SplitError, Strategy,
    Tag,
};
use vramp_core::Bytes;

use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::charge::LimitRule;
use crate::ledger::shell::error::{MergeRejected, MergeRejection, ReserveError};
use crate::ledger::shell::shared::Shared;
use crate::ledger::shell::wait::{Deadline, RequestBuilder};

const HELD: &str = "a reservation exists as long as its holder";

/// Bytes of one space that nobody else gets. Dropping it returns what is not allocated; what is
/// stays charged to the space until it is freed. It may outlive its manager.
#[must_use = "a reservation is released when it is dropped"]
pub struct Reservation {
    shared: Arc<Shared>,
    id: ReservationId,
    space: SpaceId,
}

impl Reservation {
    #[inline]
    pub(crate) fn new(shared: &Arc<Shared>, id: ReservationId, space: SpaceId) -> Reservation {
        Reservation { shared: Arc::clone(shared), id, space }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Its name in errors.
    pub fn id(&self) -> ReservationId {
        self.id
    }

    /// Where.
    pub fn space(&self) -> SpaceId {
        self.space
    }

    /// Its size: what was asked, in whole granules of the space.
    pub fn bytes(&self) -> Bytes {
        self.record().size
    }

    /// What is allocated from it. May exceed its size, if a policy let it.
    pub fn used(&self) -> Bytes {
        self.record().used
    }

    /// The most that was allocated from it at once, since it was made or the last
    /// [`reset_peak`](Reservation::reset_peak).
    pub fn peak(&self) -> Bytes {
        self.record().peak
    }

    /// Makes what is allocated now the peak.
    pub fn reset_peak(&mut self) {
        self.shared.act(|state| state.ledger.reset_peak(self.id)).expect(HELD);
    }

    /// What can still be allocated from it.
    pub fn unused(&self) -> Bytes {
        self.record().unused()
    }

    /// Whose it is.
    pub fn owner(&self) -> Owner {
        self.record().owner
    }

    /// What it is for.
    pub fn tag(&self) -> Tag {
        self.record().tag
    }

    fn record(&self) -> crate::ledger::core::ReservationRecord {
        *self.shared.look().ledger.reservation(self.id).expect(HELD)
    }

    /// Makes it larger at once. Does not pass those who wait further than they allow.
    ///
    /// # Errors
    /// There is no room, or never will be, or others are before it. It stays as it is.
    pub fn grow(&mut self, by: Bytes) -> Result<(), ReserveError> {
        self.fits_at_all(by)?;
        let grown = self.shared.act(|state| {
            let grants = state.queue.grow(&mut state.ledger, self.id, by)?;
            state.give(grants);
            Ok(())
        });
        match grown {
            Ok(()) => Ok(()),
            Err(GrowError::Refused(_) | GrowError::Behind { .. }) => {
                Err(ReserveError::NotNow(self.shared.refusal(&self.part(by))))
            }
            Err(GrowError::Stale(stale)) => panic!("{HELD}: {stale}"),
        }
    }

    /// Makes it larger when it is its turn. Meanwhile it is kept: two that wait for one another
    /// are a deadlock, and one of them is told.
    ///
    /// # Errors
    /// As [`RequestBuilder::wait`]. It stays as it is.
    pub fn grow_wait(
        &mut self,
        by: Bytes,
        deadline: impl Into<Deadline>,
    ) -> Result<(), ReserveError> {
        self.fits_at_all(by)?;
        let record = self.record();
        let part = RequestBuilder::new(&self.shared, Strategy::Specific(self.space), by)
            .owner(record.owner)
            .tag(record.tag)
            .deadline(deadline)
            .wait()?;
        self.merge(part).expect("a part of the same space, by another name");
        Ok(())
    }

    /// An error if it cannot have so much more in an empty space.
    fn fits_at_all(&self, by: Bytes) -> Result<(), ReserveError> {
        let size = self.bytes();
        let limit = self.shared.look().ledger.levels(self.space).expect(HELD).limit;
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
            priority: Default::default(),
            owner: record.owner,
            tag: record.tag,
            deadline: None,
        }
    }

    /// Cuts it to what is allocated from it, and returns what came back to the space.
    pub fn shrink_to_fit(&mut self) -> Bytes {
        self.shared.act(|state| {
            let bytes = state.ledger.shrink_to_fit(self.id).expect(HELD);
            state.returned(self.space, bytes);
            bytes
        })
    }

    /// Makes `bytes` of its unused part a reservation of their own.
    ///
    /// # Errors
    /// The unused part is smaller. It stays as it is.
    pub fn split(&mut self, bytes: Bytes) -> Result<Reservation, SplitError> {
        let id = self.shared.act(|state| state.ledger.split(self.id, bytes))?;
        Ok(Reservation::new(&self.shared, id, self.space))
    }

    /// Takes over the unused part of another one and releases that.
    ///
    /// # Errors
    /// It lies in another space, or is another manager's; it is in the error.
    pub fn merge(&mut self, from: Reservation) -> Result<(), MergeRejected> {
        if !Arc::ptr_eq(&self.shared, &from.shared) {
            return Err(MergeRejected { why: MergeRejection::OtherManager, from });
        }
        let merged = self.shared.act(|state| {
            let before = state.ledger.total(self.space).expect(HELD);
            state.ledger.merge(Merge { into: self.id, from: from.id })?;
            let after = state.ledger.total(self.space).expect(HELD);
            state.returned(self.space, before.saturating_sub(after));
            Ok(())
        });
        // Once merged, what is dropped here is a stale name, and releases nothing.
        merged.map_err(|why| MergeRejected { why: MergeRejection::Core(why), from })
    }

    /// Accounts for memory whose allocator knows nothing of budgets, until the charge is dropped,
    /// before or after the reservation. `rule` decides about what exceeds it.
    ///
    /// # Errors
    /// It exceeds the reservation, and the rule or the space says no.
    pub fn charge(&self, bytes: Bytes, rule: &dyn LimitRule) -> Result<Charge, ChargeError> {
        Charge::reserved(&self.shared, (self.id, self.space), bytes, rule)
    }
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
