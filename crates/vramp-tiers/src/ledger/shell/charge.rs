//! Memory that is allocated, and who pays for it.

use std::sync::Arc;

use crate::ledger::core::{
    ChargeError, Charged, Ledger, LimitPolicy, Overrun, OverrunAction, ReservationId, SpaceId,
    SpaceRefusal, Tag, UnreservedError,
};
use vramp_core::Bytes;

use crate::ledger::shell::error::SpaceFull;
use crate::ledger::shell::shared::{Shared, State};
use crate::ledger::shell::space::MemorySpace;

/// Decides about an allocation that exceeds its reservation. Called with no lock held; a panic is
/// contained, counted, and taken for [`OverrunAction::Fail`].
///
/// The stock rules are [`LimitPolicy`]'s: fail, ignore, increase. Any closure is one too.
pub trait LimitRule: Send + Sync {
    /// What to do about it.
    fn answer(&self, over: &Overrun) -> OverrunAction;
}

impl LimitRule for LimitPolicy {
    fn answer(&self, over: &Overrun) -> OverrunAction {
        LimitPolicy::answer(*self, over)
    }
}

impl<F: Fn(&Overrun) -> OverrunAction + Send + Sync> LimitRule for F {
    fn answer(&self, over: &Overrun) -> OverrunAction {
        self(over)
    }
}

/// Who pays for an allocation, and gets its bytes back when it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payer {
    /// A reservation, released or not.
    Reservation(ReservationId),
    /// The space, for memory outside any reservation.
    Space,
}

impl Shared {
    /// Charges a reservation; what exceeds it is decided by `rule`, with no lock held.
    #[inline]
    pub fn charge(
        &self,
        id: ReservationId,
        bytes: Bytes,
        rule: &dyn LimitRule,
    ) -> Result<(), ChargeError> {
        match self.act(|state| state.ledger.charge(id, bytes))? {
            Charged::Within => Ok(()),
            Charged::Overrun(over) => self.charge_overrun(id, bytes, &over, rule),
        }
    }

    #[cold]
    fn charge_overrun(
        &self,
        id: ReservationId,
        bytes: Bytes,
        over: &Overrun,
        rule: &dyn LimitRule,
    ) -> Result<(), ChargeError> {
        let answer = self.contain(|| rule.answer(over)).unwrap_or(OverrunAction::Fail);
        self.act(|state| {
            let before = charged(&state.ledger, id);
            state.ledger.charge_overrun(id, bytes, answer)?;
            // A reservation that others had overdrawn may hold less than before once it grows.
            let after = charged(&state.ledger, id);
            state.returned(over.space, before.saturating_sub(after));
            Ok(())
        })
    }

    #[inline]
    pub fn charge_unreserved(&self, space: SpaceId, bytes: Bytes) -> Result<(), Box<SpaceRefusal>> {
        match self.act(|state| state.ledger.charge_unreserved(space, bytes, Tag::NONE)) {
            Ok(()) => Ok(()),
            Err(UnreservedError::Refused(refused)) => Err(refused),
            Err(other) => panic!("the space and the tag are the manager's own: {other}"),
        }
    }

    /// Credits a free to whoever paid.
    #[inline]
    pub fn uncharge(&self, space: SpaceId, payer: Payer, bytes: Bytes) {
        if bytes.is_zero() {
            // Nothing keeps the name of a reservation alive for it.
            return;
        }
        self.act(|state| {
            let State { ledger, .. } = state;
            let returned = match payer {
                Payer::Reservation(id) => ledger.uncharge(id, bytes).map_err(|e| e.to_string()),
                Payer::Space => {
                    ledger.uncharge_unreserved(space, bytes, Tag::NONE).map_err(|e| e.to_string())
                }
            };
            match returned {
                Ok(bytes) => state.returned(space, bytes),
                // Whoever frees has the charge by value, and gives it up: it cannot come twice.
                Err(why) => debug_assert!(false, "what was charged comes back once: {why}"),
            }
        });
    }
}

fn charged(ledger: &Ledger, id: ReservationId) -> Bytes {
    ledger.reservation(id).map(crate::ledger::core::ReservationRecord::charged).unwrap_or_default()
}

/// Memory that is accounted for until this is dropped, wherever that happens. For memory whose
/// allocator knows nothing of budgets: blocks of the host, files.
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
        shared.charge_unreserved(space, bytes).map_err(|refused| SpaceFull { refused })?;
        Ok(Charge { shared: Arc::clone(shared), space, payer: Payer::Space, bytes })
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

    /// How much, as it was asked for.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Where.
    pub fn space(&self) -> SpaceId {
        self.space
    }

    /// True if `space` is charged, by the manager that the space is of.
    pub(crate) fn is_in(&self, space: &MemorySpace) -> bool {
        self.space == space.id() && Arc::ptr_eq(&self.shared, &space.shared)
    }

    /// Splits `bytes` off into a charge of its own. Both parts must be whole granules of the space.
    ///
    /// # Panics
    /// If `bytes` is more than is charged.
    pub fn split(&mut self, bytes: Bytes) -> Charge {
        assert!(bytes <= self.bytes, "cannot split {bytes} off a charge of {}", self.bytes);
        self.bytes -= bytes;
        Charge { shared: Arc::clone(&self.shared), space: self.space, payer: self.payer, bytes }
    }

    /// Who pays.
    pub fn payer(&self) -> Payer {
        self.payer
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shared.uncharge(self.space, self.payer, self.bytes);
    }
}

impl std::fmt::Debug for Charge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in {} paid by {:?}", self.bytes, self.space, self.payer)
    }
}
