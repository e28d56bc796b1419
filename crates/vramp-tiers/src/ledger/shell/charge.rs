//! Charges for allocated memory, to a reservation or to a space.

use std::sync::Arc;

use crate::ledger::core::{
    ChargeError, Charged, Ledger, LimitPolicy, Overrun, OverrunAction, ReservationId, SpaceId,
    SpaceRefusal, Tag, UnreservedError,
};
use vramp_alloc::{Allocator, StreamId};
use vramp_core::Bytes;

use crate::ledger::shell::error::SpaceFull;
use crate::ledger::shell::shared::{Shared, State};
use crate::ledger::shell::tracked::PayersKey;

/// Decides about an allocation that exceeds its reservation. Called with no lock held. A panic is
/// caught, counted, and taken for [`OverrunAction::Fail`].
///
/// [`LimitPolicy`] has the predefined rules: fail, ignore, increase. Any closure is a rule.
pub trait LimitRule: Send + Sync {
    /// Returns the action for an overrun.
    fn decide(&self, overrun: &Overrun) -> OverrunAction;
}

impl LimitRule for LimitPolicy {
    fn decide(&self, overrun: &Overrun) -> OverrunAction {
        LimitPolicy::decide(*self, overrun)
    }
}

impl<F: Fn(&Overrun) -> OverrunAction + Send + Sync> LimitRule for F {
    fn decide(&self, overrun: &Overrun) -> OverrunAction {
        self(overrun)
    }
}

/// What an allocation is charged to, and what its free is credited to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payer {
    /// A reservation, released or not.
    Reservation(ReservationId),
    /// The space, outside any reservation.
    Space,
}

/// Why a payer was not charged. Nothing changed.
pub(crate) enum ChargeRefused {
    /// The space has no room.
    Space(Box<SpaceRefusal>),
    /// The allocation exceeds the reservation.
    Reservation(ReservationId),
}

impl Shared {
    /// Charges a reservation. `rule` decides about an overrun that reclaiming does not avoid, with
    /// no lock held.
    #[inline]
    pub fn charge(
        &self,
        id: ReservationId,
        bytes: Bytes,
        rule: &dyn LimitRule,
    ) -> Result<(), ChargeError> {
        match self.update(|state| state.ledger.charge(id, bytes))? {
            Charged::Within => Ok(()),
            Charged::Overrun(overrun) => self.charge_overrun(id, bytes, &overrun, rule),
        }
    }

    #[cold]
    fn charge_overrun(
        &self,
        id: ReservationId,
        bytes: Bytes,
        overrun: &Overrun,
        rule: &dyn LimitRule,
    ) -> Result<(), ChargeError> {
        if !self.reclaim(overrun.space, id, overrun.by).is_zero() {
            match self.update(|state| state.ledger.charge(id, bytes))? {
                Charged::Within => return Ok(()),
                // Other allocations took part of it.
                Charged::Overrun(again) => return self.decide(id, bytes, &again, rule),
            }
        }
        self.decide(id, bytes, overrun, rule)
    }

    fn decide(
        &self,
        id: ReservationId,
        bytes: Bytes,
        overrun: &Overrun,
        rule: &dyn LimitRule,
    ) -> Result<(), ChargeError> {
        let action = self.panics.catch(|| rule.decide(overrun)).unwrap_or(OverrunAction::Fail);
        self.update(|state| {
            let before = charged(&state.ledger, id);
            state.ledger.charge_overrun(id, bytes, action)?;
            // A reservation whose use exceeded its size may be charged less after it has grown.
            let after = charged(&state.ledger, id);
            state.returned(overrun.space, before.saturating_sub(after));
            Ok(())
        })
    }

    #[inline]
    pub fn charge_unreserved(&self, space: SpaceId, bytes: Bytes) -> Result<(), Box<SpaceRefusal>> {
        match self.update(|state| state.ledger.charge_unreserved(space, bytes, Tag::NONE)) {
            Ok(()) => Ok(()),
            Err(UnreservedError::Refused(refused)) => Err(refused),
            Err(other) => panic!("the space and the tag are the manager's own: {other}"),
        }
    }

    /// Charges the reservation attached to this thread or to the stream, otherwise the space.
    #[inline]
    pub fn charge_payer(
        &self,
        key: PayersKey,
        space: SpaceId,
        stream: StreamId,
        bytes: Bytes,
    ) -> Result<Payer, ChargeRefused> {
        self.update(|state| {
            if let Some(id) = state.payers.find(key, stream) {
                return match state.ledger.charge(id, bytes) {
                    Ok(Charged::Within) => Ok(Payer::Reservation(id)),
                    Ok(Charged::Overrun(_)) | Err(_) => Err(ChargeRefused::Reservation(id)),
                };
            }
            match state.ledger.charge_unreserved(space, bytes, Tag::NONE) {
                Ok(()) => Ok(Payer::Space),
                Err(UnreservedError::Refused(refused)) => Err(ChargeRefused::Space(refused)),
                Err(other) => panic!("the space and the tag are the manager's own: {other}"),
            }
        })
    }

    /// Credits a free to the payer of the allocation.
    #[inline]
    pub fn uncharge(&self, space: SpaceId, payer: Payer, bytes: Bytes) {
        if bytes.is_zero() {
            // An empty charge does not keep the id of a reservation valid.
            return;
        }
        self.update(|state| {
            let State { ledger, .. } = state;
            let returned = match payer {
                Payer::Reservation(id) => ledger.uncharge(id, bytes).map_err(|e| e.to_string()),
                Payer::Space => {
                    ledger.uncharge_unreserved(space, bytes, Tag::NONE).map_err(|e| e.to_string())
                }
            };
            match returned {
                Ok(bytes) => state.returned(space, bytes),
                // The charge is consumed by its free, so it cannot be credited twice.
                Err(why) => debug_assert!(false, "a charge is credited once: {why}"),
            }
        });
    }
}

fn charged(ledger: &Ledger, id: ReservationId) -> Bytes {
    ledger.reservation(id).map(crate::ledger::core::ReservationRecord::charged).unwrap_or_default()
}

/// A charge that is credited when it is dropped, in any thread. For memory whose allocator has no
/// budget of its own, such as host blocks and files.
#[must_use = "the bytes are credited when this is dropped"]
pub struct Charge {
    shared: Arc<Shared>,
    space: SpaceId,
    payer: Payer,
    bytes: Bytes,
}

impl Charge {
    pub(crate) fn unreserved(
        shared: &Arc<Shared>,
        space: SpaceId,
        bytes: Bytes,
    ) -> Result<Charge, SpaceFull> {
        shared.charge_unreserved(space, bytes).map_err(|refusal| SpaceFull { refusal })?;
        Ok(Charge { shared: Arc::clone(shared), space, payer: Payer::Space, bytes })
    }

    /// Turns the unused bytes of a reservation into a charge to the space.
    pub(crate) fn from_reservation(
        shared: &Arc<Shared>,
        id: ReservationId,
        space: SpaceId,
    ) -> Charge {
        let bytes = shared.update(|state| state.ledger.into_unreserved(id));
        let bytes = bytes.expect("a reservation exists as long as its handle");
        Charge { shared: Arc::clone(shared), space, payer: Payer::Space, bytes }
    }

    /// Charges as much of `max` as fits in a reservation; `None` if nothing does.
    pub(crate) fn reserved_up_to(
        shared: &Arc<Shared>,
        reservation: (ReservationId, SpaceId),
        max: Bytes,
    ) -> Option<Charge> {
        let (id, space) = reservation;
        // Within the reservation no total changes, so nothing is delivered.
        let bytes = shared.read().ledger.charge_up_to(id, max).ok()?;
        let payer = Payer::Reservation(id);
        (!bytes.is_zero()).then(|| Charge { shared: Arc::clone(shared), space, payer, bytes })
    }

    /// Charges as much of `max` as is unused to the reservation attached to this thread, or to the
    /// first of the streams that has one with unused bytes. O(tracked allocators * streams); no lock of the
    /// ledger where none is tracked.
    pub(crate) fn attached(
        shared: &Arc<Shared>,
        space: SpaceId,
        allocator: &Arc<Allocator>,
        streams: &[StreamId],
        max: Bytes,
    ) -> Option<Charge> {
        let keys = shared.attachments.payers(space, allocator);
        if keys.is_empty() {
            return None;
        }
        // Within the reservation no total changes, so nothing is delivered.
        let mut state = shared.read();
        let State { ledger, payers, .. } = &mut *state;
        let payers = &*payers;
        let mut attached = keys.iter().flat_map(|&key| payers.attached(key, streams));
        let (id, bytes) = attached.find_map(|id| {
            let bytes = ledger.charge_up_to(id, max).ok()?;
            (!bytes.is_zero()).then_some((id, bytes))
        })?;
        let payer = Payer::Reservation(id);
        Some(Charge { shared: Arc::clone(shared), space, payer, bytes })
    }

    pub(crate) fn reserved(
        shared: &Arc<Shared>,
        reservation: (ReservationId, SpaceId),
        bytes: Bytes,
        rule: &dyn LimitRule,
    ) -> Result<Charge, ChargeError> {
        let (id, space) = reservation;
        shared.charge(id, bytes, rule)?;
        Ok(Charge { shared: Arc::clone(shared), space, payer: Payer::Reservation(id), bytes })
    }

    /// Returns the charged bytes, as they were requested.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Returns the charged space.
    pub fn space(&self) -> SpaceId {
        self.space
    }

    /// Splits `bytes` off into a second charge. Both parts must be whole granules of the space.
    ///
    /// # Panics
    /// `bytes` exceeds the charge.
    pub fn split(&mut self, bytes: Bytes) -> Charge {
        assert!(bytes <= self.bytes, "cannot split {bytes} off a charge of {}", self.bytes);
        self.bytes -= bytes;
        Charge { shared: Arc::clone(&self.shared), space: self.space, payer: self.payer, bytes }
    }

    /// Adds the bytes of `other`, if both are charged to the same payer.
    ///
    /// # Errors
    /// They have different payers. Returns `other`; nothing changes.
    pub fn merge(&mut self, mut other: Charge) -> Result<(), Charge> {
        let same_manager = Arc::ptr_eq(&self.shared, &other.shared);
        if !same_manager || (self.space, self.payer) != (other.space, other.payer) {
            return Err(other);
        }
        self.bytes += std::mem::take(&mut other.bytes);
        Ok(())
    }

    /// Returns what the memory is charged to.
    pub fn payer(&self) -> Payer {
        self.payer
    }

    /// Returns true if the bytes stay reserved when this is dropped: the reservation that pays has
    /// not been released. Otherwise they come back to the space.
    pub fn stays_reserved(&self) -> bool {
        match self.payer {
            Payer::Space => false,
            Payer::Reservation(id) => {
                let state = self.shared.read();
                state.ledger.reservation(id).is_some_and(|record| !record.released)
            }
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shared.uncharge(self.space, self.payer, self.bytes);
    }
}

impl std::fmt::Debug for Charge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in {} charged to {:?}", self.bytes, self.space, self.payer)
    }
}
