//! Reservations: memory of a space that is kept free for its owner.

use vramp_alloc::{Bytes, StreamId};
use vramp_tiers::reserve::{RequestBuilder, ReservationRecord};
use vramp_tiers::tracked::{AttachError, Scope};
use vramp_tiers::{Reservation, Strategy};

use crate::abi::vramp_status_t;
use crate::abi::{vramp_allocator_t, vramp_stream_t};
use crate::handles;
use crate::ids::next_id;
use crate::pointers::WithSize;
use crate::session::Session;
use crate::status::{Failure, Kind, Result};
use crate::tiers::abi::*;
use crate::tiers::slot::{OpenTiers, deadline};
use crate::tiers::spaces::to_c;
use crate::tiers::tables::{Held, Place, unknown_reservation};

/// A timeout of zero: the request is served at once or fails.
const NOW: u64 = 0;

impl OpenTiers {
    fn finish(&self, request: RequestBuilder<'_>, timeout_ns: u64) -> Result<Reservation> {
        match timeout_ns {
            NOW => Ok(request.now()?),
            _ => Ok(request.deadline(deadline(timeout_ns)).cancel_token(&self.waits()).wait()?),
        }
    }

    fn keep(&self, reservation: Reservation) -> vramp_reservation_t {
        let id = next_id();
        self.tables().reservations.insert(id, Held::new(reservation));
        vramp_reservation_t { id }
    }

    fn grow(&self, id: u64, by: Bytes, timeout_ns: u64) -> Result<()> {
        let held = self.tables().reservation(id)?;
        let (space, owner, tag, size) =
            held.with(id, |own| (own.space(), own.owner(), own.tag(), own.bytes()))?;
        let limit = self.spaces().space(space).map(|space| space.limit());
        let never_fits = size.checked_add(by).is_none_or(|grown| Some(grown) > limit);
        if timeout_ns == NOW || never_fits {
            return Ok(held.with(id, |reservation| reservation.grow(by))??);
        }
        // Waits without the lock of the reservation.
        let request = self.spaces().request(Strategy::Specific(space), by).owner(owner).tag(tag);
        let part = self.finish(request, timeout_ns)?;
        held.with(id, |reservation| reservation.merge(part))?
            .map_err(|rejected| Failure::new(Kind::UnknownReservation, rejected.to_string()))
    }

    fn info(&self, id: u64) -> Result<vramp_reservation_info_t> {
        let held = self.tables().reservation(id)?;
        match &*held.lock() {
            Place::Own(reservation) => Ok(info_of(reservation)),
            Place::Attached(stream) => {
                let record = self.tracked.attached(Scope::Stream(*stream));
                Ok(record_to_c(&record.ok_or_else(|| unknown_reservation(id))?))
            }
            Place::Released => Err(unknown_reservation(id)),
        }
    }

    fn release(&self, id: u64) -> Result<()> {
        let held = self.tables().reservations.remove(&id);
        let held = held.ok_or_else(|| unknown_reservation(id))?;
        let place = std::mem::replace(&mut *held.lock(), Place::Released);
        match place {
            Place::Own(reservation) => drop(reservation),
            Place::Attached(stream) => drop(self.tracked.detach(Scope::Stream(stream))),
            Place::Released => return Err(unknown_reservation(id)),
        }
        Ok(())
    }

    fn attach(&self, id: u64, stream: StreamId) -> Result<()> {
        let held = self.tables().reservation(id)?;
        let mut place = held.lock();
        let reservation = match std::mem::replace(&mut *place, Place::Released) {
            Place::Own(reservation) => reservation,
            Place::Attached(other) => {
                *place = Place::Attached(other);
                let text = "the reservation is attached to a stream already: detach it first";
                return Err(Failure::new(Kind::Busy, text));
            }
            Place::Released => return Err(unknown_reservation(id)),
        };
        let Err(error) = self.tracked.attach(Scope::Stream(stream), reservation) else {
            *place = Place::Attached(stream);
            return Ok(());
        };
        let text = error.to_string();
        let (kind, reservation) = match error {
            AttachError::Occupied { reservation, .. } => (Kind::Busy, reservation),
            AttachError::OtherSpace { reservation, .. } => (Kind::UnknownSpace, reservation),
        };
        *place = Place::Own(reservation);
        Err(Failure::new(kind, text))
    }

    fn detach(&self, id: u64) -> Result<()> {
        let held = self.tables().reservation(id)?;
        let mut place = held.lock();
        let Place::Attached(stream) = *place else {
            let text =
                "the reservation is not attached to a stream: vramp_reservation_attach does that";
            return Err(Failure::new(Kind::Range, text));
        };
        let detached = self.tracked.detach(Scope::Stream(stream));
        *place = Place::Own(detached.ok_or_else(|| unknown_reservation(id))?);
        Ok(())
    }
}

fn record_to_c(record: &ReservationRecord) -> vramp_reservation_info_t {
    vramp_reservation_info_t {
        struct_size: size_of::<vramp_reservation_info_t>() as u64,
        space: to_c(record.space),
        size: record.size.count(),
        used: record.used.count(),
        unused: record.unused().count(),
        peak: record.peak.count(),
    }
}

fn info_of(reservation: &Reservation) -> vramp_reservation_info_t {
    vramp_reservation_info_t {
        struct_size: size_of::<vramp_reservation_info_t>() as u64,
        space: to_c(reservation.space()),
        size: reservation.bytes().count(),
        used: reservation.used().count(),
        unused: reservation.unused().count(),
        peak: reservation.peak().count(),
    }
}

impl Session {
    fn reserve(
        &self,
        space: vramp_space_t,
        bytes: u64,
        priority: i32,
        timeout_ns: u64,
    ) -> Result<vramp_reservation_t> {
        let tiers = self.open_tiers()?;
        let request = tiers.spaces().request(tiers.strategy(space)?, Bytes::new(bytes));
        let reservation = tiers.finish(request.priority(priority), timeout_ns)?;
        Ok(tiers.keep(reservation))
    }

    fn reserve_up_to(
        &self,
        space: vramp_space_t,
        least: u64,
        most: u64,
    ) -> Result<(vramp_reservation_t, u64)> {
        let tiers = self.open_tiers()?;
        if least > most {
            let text = format!("at least {least} and at most {most} bytes: exchange them");
            return Err(Failure::new(Kind::Range, text));
        }
        let request = tiers.spaces().request(tiers.strategy(space)?, Bytes::new(most));
        let reservation = request.up_to(Bytes::new(least))?;
        let size = reservation.bytes().count();
        Ok((tiers.keep(reservation), size))
    }
}

/// Reserves `bytes` of a space: no other request gets them until they are released. With an index of
/// VRAMP_ANY_INDEX any space of the tier is taken. A larger `priority` goes first; zero is usual.
///
/// It waits in order of arrival, spills buffers meanwhile, and ends with VRAMP_ERROR_TIMEOUT after
/// `timeout_ns` nanoseconds: at once if they are zero, never if they are VRAMP_FOREVER. A request that can
/// never be served is VRAMP_ERROR_OUT_OF_MEMORY at once. Of requests that wait for each other one ends with VRAMP_ERROR_DEADLOCK.
///
/// # Safety
/// `reservation` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_reserve(
    allocator: vramp_allocator_t,
    space: vramp_space_t,
    bytes: u64,
    priority: i32,
    timeout_ns: u64,
    reservation: *mut vramp_reservation_t,
) -> vramp_status_t {
    let reserve = |session: &Session| session.reserve(space, bytes, priority, timeout_ns);
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (reservation, "reservation"), reserve) }
}

/// Reserves at once as many of `most` bytes as a space has, and at least `least`. `*bytes` receives how
/// many; it may be null. With a `least` of zero the reservation may be empty, and can grow.
///
/// # Safety
/// `reservation` is null or valid for writing; so is `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_reserve_up_to(
    allocator: vramp_allocator_t,
    space: vramp_space_t,
    least: u64,
    most: u64,
    reservation: *mut vramp_reservation_t,
    bytes: *mut u64,
) -> vramp_status_t {
    let reserve = |session: &Session| session.reserve_up_to(space, least, most);
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, ((reservation, "reservation"), bytes), reserve) }
}

/// Returns the state of a reservation. Set `info->struct_size` to `sizeof(vramp_reservation_info_t)`
/// before.
///
/// # Safety
/// `info` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_reservation_info(
    allocator: vramp_allocator_t,
    reservation: vramp_reservation_t,
    info: *mut vramp_reservation_info_t,
) -> vramp_status_t {
    let find = |session: &Session| session.open_tiers()?.info(reservation.id);
    // SAFETY: the struct begins with its size; the rest is this function's contract.
    unsafe { handles::out(allocator, WithSize(info, "info"), find) }
}

/// Adds `bytes` to a reservation, with the timeout of vramp_reserve. Where it fails the reservation is
/// as before.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_reservation_grow(
    allocator: vramp_allocator_t,
    reservation: vramp_reservation_t,
    bytes: u64,
    timeout_ns: u64,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        session.open_tiers()?.grow(reservation.id, Bytes::new(bytes), timeout_ns)
    })
}

/// Shrinks a reservation to what is charged to it. `*released` receives the bytes that came back to the
/// space; it may be null.
///
/// # Safety
/// `released` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_reservation_shrink(
    allocator: vramp_allocator_t,
    reservation: vramp_reservation_t,
    released: *mut u64,
) -> vramp_status_t {
    let shrink = |session: &Session| {
        let held = session.open_tiers()?.tables().reservation(reservation.id)?;
        Ok(held.with(reservation.id, Reservation::shrink_to_fit)?.count())
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, released, shrink) }
}

/// Releases a reservation. What is charged to it stays charged to the space until it is freed.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_reservation_release(
    allocator: vramp_allocator_t,
    reservation: vramp_reservation_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.open_tiers()?.release(reservation.id))
}

/// Attaches a reservation of the card's space to a stream: it pays for the memory of leases for work on
/// that stream, before the space does. A stream has at most one: VRAMP_ERROR_BUSY if it has another.
/// Until it is detached a reservation does not grow or shrink. A release detaches it.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_reservation_attach(
    allocator: vramp_allocator_t,
    reservation: vramp_reservation_t,
    stream: vramp_stream_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        session.open_tiers()?.attach(reservation.id, session.stream(stream)?)
    })
}

/// Detaches a reservation from its stream. What leases used of it stays charged to it until that leaves
/// the card.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_reservation_detach(
    allocator: vramp_allocator_t,
    reservation: vramp_reservation_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.open_tiers()?.detach(reservation.id))
}
