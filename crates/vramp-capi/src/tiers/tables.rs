//! The reservations, buffers and leases of C programs, looked up by id.
//!
//! An id is unique in the process, so the id of another allocator, or of an object that ended, is
//! unknown. What a call takes out of a table, or a reference to it, is used without the lock.
//!
//! Growth: O(1) for each call, whatever number of objects there is.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use vramp_alloc::StreamId;
use vramp_defer::{DeferrableBuffer, LeaseSet};
use vramp_tiers::reserve::ReservationId;
use vramp_tiers::{Reservation, SpaceId};

use crate::ids::unknown;
use crate::status::{Failure, Kind, Result};

/// Objects by id. Fields are dropped in this order.
#[derive(Default)]
pub(crate) struct Tables {
    pub leases: FxHashMap<u64, LeaseSet>,
    /// Leases that a stream holds.
    pub locks: FxHashMap<StreamId, Vec<LeaseSet>>,
    pub buffers: FxHashMap<u64, DeferrableBuffer>,
    pub reservations: FxHashMap<u64, Arc<Held>>,
}

/// A reservation, until it is released. A call that uses it keeps it until it returns.
pub(crate) struct Held {
    place: Mutex<Place>,
    /// Its id in the ledger of the tiers, for charges that do not lock its place.
    pub payer: ReservationId,
    pub space: SpaceId,
}

/// Where a reservation is.
pub(crate) enum Place {
    Own(Reservation),
    /// Attached to a stream: it pays for leases there. Allocations name the reservation itself.
    Attached(StreamId),
    /// It was released while a call used it.
    Released,
}

impl Held {
    pub fn new(reservation: Reservation) -> Arc<Held> {
        let (payer, space) = (reservation.id(), reservation.space());
        Arc::new(Held { place: Mutex::new(Place::Own(reservation)), payer, space })
    }

    pub fn lock(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `f` with the reservation `id`. It must not wait.
    pub fn with<R>(&self, id: u64, f: impl FnOnce(&mut Reservation) -> R) -> Result<R> {
        match &mut *self.lock() {
            Place::Own(reservation) => Ok(f(reservation)),
            Place::Attached(_) => {
                let text = "the reservation is attached to a stream: detach it first";
                Err(Failure::new(Kind::Busy, text))
            }
            Place::Released => Err(unknown_reservation(id)),
        }
    }
}

pub(crate) fn unknown_reservation(id: u64) -> Failure {
    unknown(Kind::UnknownReservation, "reservation", "vramp_reserve", id)
}

pub(crate) fn unknown_buffer(id: u64) -> Failure {
    unknown(Kind::UnknownBuffer, "buffer", "vramp_buffer_create", id)
}

pub(crate) fn unknown_lease(id: u64) -> Failure {
    unknown(Kind::UnknownLease, "lease", "vramp_buffers_lease", id)
}

impl Tables {
    /// Returns a buffer.
    pub fn buffer(&self, id: u64) -> Result<DeferrableBuffer> {
        self.buffers.get(&id).cloned().ok_or_else(|| unknown_buffer(id))
    }

    /// Returns a reservation.
    pub fn reservation(&self, id: u64) -> Result<Arc<Held>> {
        self.reservations.get(&id).cloned().ok_or_else(|| unknown_reservation(id))
    }
}
