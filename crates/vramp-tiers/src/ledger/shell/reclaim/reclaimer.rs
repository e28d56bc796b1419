//! What a program registers to have memory credited to reservations.

use crate::ledger::core::{ReservationId, SpaceId};
use vramp_core::Bytes;

/// Credits a reservation with memory that was charged to it and is not in use.
///
/// Called by the thread that allocates, by several threads at once, and with no lock held. A panic is
/// caught, counted, and taken for zero bytes. Any closure of the same form is a reclaimer.
pub trait Reclaimer: Send + Sync {
    /// Credits `reservation` with at least `bytes`, or what it can. Returns the bytes credited.
    fn reclaim(&self, reservation: ReservationId, bytes: Bytes) -> Bytes;
}

impl<F: Fn(ReservationId, Bytes) -> Bytes + Send + Sync> Reclaimer for F {
    fn reclaim(&self, reservation: ReservationId, bytes: Bytes) -> Bytes {
        self(reservation, bytes)
    }
}

/// A registered reclaimer.
pub(crate) struct RegisteredReclaimer {
    pub(super) space: SpaceId,
    pub(super) reclaimer: Box<dyn Reclaimer>,
}
