//! Allocations that a reservation pays for.
//!
//! 1. The requested bytes are charged to the reservation, which it refuses if it has too little left.
//! 2. The block is allocated as any other, and the charge corrected to its exact length.
//! 3. The charge lies beside the block in the table of addresses. Every free takes both out, and credits the
//!    charge once the block is free: to the reservation, or to the space if that was released.
//!
//! A charge outlives the tiers: a block that is freed after them is credited to nothing.
//!
//! Growth: O(1) for each call. Blocks that no reservation pays for take a look at an empty map in a free.

use std::ffi::c_void;

use vramp_alloc::{Bytes, StreamId};
use vramp_tiers::MemorySpace;
use vramp_tiers::reserve::{Charge, ChargeError, LimitPolicy, ReservationId};

use crate::abi::vramp_status_t;
use crate::abi::{vramp_allocator_t, vramp_stream_t};
use crate::handles;
use crate::session::Session;
use crate::status::{Failure, Kind, Result};
use crate::tiers::abi::vramp_reservation_t;
use crate::tiers::tables::unknown_reservation;

/// Alignment of block lengths in the default preset.
const BLOCK_ALIGN: Bytes = Bytes::new(512);

/// A reservation of the card's space that pays for a block.
struct Payer {
    space: MemorySpace,
    reservation: ReservationId,
    /// Handle of the reservation.
    id: u64,
}

impl Payer {
    fn find(session: &Session, id: u64) -> Result<Payer> {
        let tiers = session.open_tiers()?;
        let held = tiers.tables().reservation(id)?;
        let space = tiers.tiers().gpu_space();
        if held.space != space.id() {
            let text = format!(
                "the reservation is in {}, and the memory in {}: reserve that",
                held.space,
                space.id()
            );
            return Err(Failure::new(Kind::UnknownSpace, text));
        }
        Ok(Payer { space: space.clone(), reservation: held.payer, id })
    }

    /// Returns bytes in whole granules of the space, so that the parts of a charge add up.
    fn granules(&self, bytes: Bytes) -> Bytes {
        bytes.checked_round_up(self.space.levels().granule).unwrap_or(bytes)
    }

    fn charge(&self, bytes: Bytes) -> Result<Charge> {
        let charged = self.space.charge_reserved(self.reservation, bytes, &LimitPolicy::Fail);
        charged.map_err(|error| not_paid(self.id, error))
    }

    /// Charges what a block of `size` bytes will most likely have.
    fn charge_expected(&self, size: u64) -> Result<Charge> {
        let size = Bytes::new(size.max(1));
        self.charge(self.granules(size.checked_round_up(BLOCK_ALIGN).unwrap_or(size)))
    }

    /// Corrects a charge to the length of the block.
    fn correct(&self, mut charge: Charge, len: Bytes) -> Result<Charge> {
        let (len, charged) = (self.granules(len), charge.bytes());
        if len < charged {
            drop(charge.split(charged - len));
        }
        if len > charged {
            let merged = charge.merge(self.charge(len - charged)?);
            merged.expect("both are charged to one reservation");
        }
        Ok(charge)
    }
}

/// Returns the failure of an allocation that a reservation does not pay for.
#[cold]
fn not_paid(id: u64, error: ChargeError) -> Failure {
    match error {
        ChargeError::Stale(_) => unknown_reservation(id),
        ChargeError::OverReservation { overrun } => {
            let text = format!(
                "{} exceed the reservation by {}: {} of its {} are used. vramp_reservation_grow adds to \
                 it, and frees of what it pays for give bytes back",
                overrun.bytes, overrun.by, overrun.used, overrun.size
            );
            Failure::new(Kind::OverReservation, text)
        }
        error => error.into(),
    }
}

impl Session {
    /// Allocates a block, in the region of the thread or in the pool, that a reservation pays for.
    fn malloc_paid(&self, id: u64, size: u64, stream: StreamId) -> Result<u64> {
        let payer = Payer::find(self, id)?;
        let region = self.region_of_thread()?;
        let charge = payer.charge_expected(size)?;
        let placed = self.place_with(region, size, stream, |allocation| {
            match payer.correct(charge, allocation.len()) {
                Ok(charge) => self.keep_paid(allocation, charge),
                Err(failure) => Err((allocation, failure)),
            }
        });
        placed.map(|block| block.addr)
    }
}

/// Allocates a block as vramp_malloc does, which a reservation of the card's space pays for: its exact
/// length, in whole granules of the space. A free of the block, by any call and on any thread, gives the
/// bytes back to the reservation, or to the space if the reservation was released. The reservation may be
/// attached to a stream, which need not be this one.
///
/// VRAMP_ERROR_OVER_RESERVATION if the reservation has too little left, after idle buffers that it paid for
/// have left the card: nothing is allocated. VRAMP_ERROR_UNKNOWN_SPACE if it is of another space. On failure
/// `*address` is set to null.
///
/// # Safety
/// `address` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_reservation_malloc(
    allocator: vramp_allocator_t,
    reservation: vramp_reservation_t,
    size: usize,
    stream: vramp_stream_t,
    address: *mut *mut c_void,
) -> vramp_status_t {
    let place = |session: &Session| {
        let stream = session.stream(stream)?;
        Ok(session.malloc_paid(reservation.id, size as u64, stream)? as *mut c_void)
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out_or(allocator, (address, "address"), std::ptr::null_mut(), place) }
}
