//! Leases: the right of a stream to use a set of buffers on the card.

use std::ffi::{c_int, c_void};

use smallvec::SmallVec;
use vramp_alloc::{Bytes, StreamId};
use vramp_defer::{Access, DeferrableBuffer, LeaseSet, SpillError};

use crate::abi::vramp_status_t;
use crate::abi::{vramp_allocator_t, vramp_stream_t};
use crate::ids::next_id;
use crate::session::Session;
use crate::status::{Failure, Kind, Result};
use crate::tiers::abi::*;
use crate::tiers::out_of_range;
use crate::tiers::slot::{OpenTiers, deadline};
use crate::tiers::tables::{Tables, unknown_lease};
use crate::{handles, pointers};

/// Most buffers of one lease.
const BUFFERS_MAX: usize = 1 << 20;

fn access(number: u32) -> Result<Access> {
    match number {
        VRAMP_ACCESS_READ => Ok(Access::Shared),
        VRAMP_ACCESS_WRITE => Ok(Access::Exclusive),
        VRAMP_ACCESS_OVERWRITE => Ok(Access::Overwrite),
        other => {
            let use_ = "VRAMP_ACCESS_READ, VRAMP_ACCESS_WRITE or VRAMP_ACCESS_OVERWRITE";
            Err(out_of_range("access", other, use_))
        }
    }
}

/// A lease, and the addresses of its buffers.
type Leased = (LeaseSet, Vec<*mut c_void>);

impl OpenTiers {
    /// Leases buffers for work on streams.
    pub fn acquire(
        &self,
        wanted: &[(DeferrableBuffer, Access)],
        streams: &[StreamId],
        timeout_ns: u64,
        in_place: bool,
    ) -> Result<LeaseSet> {
        let wanted: SmallVec<[_; 8]> =
            wanted.iter().map(|(buffer, access)| (buffer, *access)).collect();
        let (manager, deadline) = (self.manager(), deadline(timeout_ns));
        Ok(match in_place {
            true => manager.lease_in_place_on(&wanted, streams, deadline)?,
            false => manager.lease_on(&wanted, streams, deadline)?,
        })
    }

    fn lease(
        &self,
        uses: &[vramp_buffer_use_t],
        stream: StreamId,
        timeout_ns: u64,
        in_place: bool,
    ) -> Result<Leased> {
        let wanted: Vec<(DeferrableBuffer, Access)> = {
            let tables = self.tables();
            let one = |use_: &vramp_buffer_use_t| {
                Ok((tables.buffer(use_.buffer.id)?, access(use_.access)?))
            };
            uses.iter().map(one).collect::<Result<_>>()?
        };
        let lease = self.acquire(&wanted, &[stream], timeout_ns, in_place)?;
        let address = |range: vramp_alloc::device::AddrRange| range.start.number() as *mut c_void;
        let addresses = lease.addresses().map(address).collect();
        Ok((lease, addresses))
    }

    /// Stores a lease. While the tiers are being closed it ends instead: other calls may wait for it.
    fn store<R>(
        &self,
        lease: LeaseSet,
        store: impl FnOnce(&mut Tables, LeaseSet) -> R,
    ) -> Result<R> {
        let mut tables = self.tables();
        // Under the lock of the tables, which a close takes after it says so.
        if self.is_ending() {
            drop(tables);
            lease.cancel();
            return Err(Failure::new(Kind::Cancelled, "the tiers are being closed"));
        }
        Ok(store(&mut tables, lease))
    }

    fn keep_lease(&self, lease: LeaseSet) -> Result<u64> {
        self.store(lease, |tables, lease| {
            let id = next_id();
            tables.leases.insert(id, lease);
            id
        })
    }

    fn take_lease(&self, lease: vramp_buffer_lease_t) -> Result<LeaseSet> {
        self.tables().leases.remove(&lease.id).ok_or_else(|| unknown_lease(lease.id))
    }

    fn keep_lock(&self, lease: LeaseSet, stream: StreamId) -> Result<()> {
        self.store(lease, |tables, lease| tables.locks.entry(stream).or_default().push(lease))
    }
}

/// Reads the uses of a request.
///
/// # Safety
/// `uses` is null or valid for reading `count` structs.
unsafe fn uses_of(
    uses: *const vramp_buffer_use_t,
    count: usize,
) -> Result<Vec<vramp_buffer_use_t>> {
    if count > BUFFERS_MAX {
        let text = format!("a lease of {count} buffers: use at most {BUFFERS_MAX}");
        return Err(Failure::new(Kind::Range, text));
    }
    // SAFETY: this function's contract is the same.
    unsafe { pointers::read_array(uses, count, "uses") }
}

/// Writes addresses, unless the caller wants none.
///
/// # Safety
/// `addresses` is null or valid for writing as many pointers.
unsafe fn write_addresses(addresses: *mut *mut c_void, found: &[*mut c_void]) -> Result<()> {
    let written = if addresses.is_null() { 0 } else { found.len() };
    // SAFETY: this function's contract is the same.
    unsafe { pointers::write_array(addresses, written, found, "addresses") }
}

/// Leases a set of buffers for work on `stream`: restores them at their addresses, all or none. The
/// stream waits for the copies and for earlier work on the buffers; the host does not. While the lease
/// is held none of them moves. Any thread may end it.
///
/// If other leases are in the way it waits in order of arrival, for `timeout_ns` nanoseconds at most,
/// and then returns VRAMP_ERROR_TIMEOUT. A set that can never fit is VRAMP_ERROR_OUT_OF_MEMORY at once.
/// A thread that holds a lease and waits for another one may wait for a thread that waits for it: lease
/// all that is used together in one call.
///
/// `addresses` receives the address of each buffer, which is that of vramp_buffer_info; it may be null.
///
/// # Safety
/// `uses` is null or valid for reading `count` structs; `addresses` is null or valid for writing `count`
/// pointers; `lease` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_buffers_lease(
    allocator: vramp_allocator_t,
    uses: *const vramp_buffer_use_t,
    count: usize,
    stream: vramp_stream_t,
    timeout_ns: u64,
    addresses: *mut *mut c_void,
    lease: *mut vramp_buffer_lease_t,
) -> vramp_status_t {
    let uses = (uses, count);
    // SAFETY: required by this function's contract.
    let find = |session: &Session| unsafe {
        lease_set(session, uses, stream, timeout_ns, false, addresses)
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (lease, "lease"), find) }
}

/// Leases as vramp_buffers_lease does, but a buffer that is only read, and may be read while it is spilled
/// (vramp_buffer_set_readable), stays where it is if all that is below the card lies on the host: its spilled
/// parts are read over the bus, at the same address. Only the rest of the set has to fit on the card.
/// vramp_buffer_lease_is_in_place says which buffers stayed. After some reads in place, three by default, a
/// buffer is restored if that does not have to wait.
///
/// # Safety
/// As of vramp_buffers_lease.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_buffers_lease_in_place(
    allocator: vramp_allocator_t,
    uses: *const vramp_buffer_use_t,
    count: usize,
    stream: vramp_stream_t,
    timeout_ns: u64,
    addresses: *mut *mut c_void,
    lease: *mut vramp_buffer_lease_t,
) -> vramp_status_t {
    let uses = (uses, count);
    // SAFETY: required by this function's contract.
    let find = |session: &Session| unsafe {
        lease_set(session, uses, stream, timeout_ns, true, addresses)
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (lease, "lease"), find) }
}

/// Leases a set, in place if the request says so.
///
/// # Safety
/// As of [`vramp_buffers_lease`].
unsafe fn lease_set(
    session: &Session,
    (uses, count): (*const vramp_buffer_use_t, usize),
    stream: vramp_stream_t,
    timeout_ns: u64,
    in_place: bool,
    addresses: *mut *mut c_void,
) -> Result<vramp_buffer_lease_t> {
    // SAFETY: required by this function's contract.
    let uses = unsafe { uses_of(uses, count) }?;
    let tiers = session.open_tiers()?;
    let (held, found) = tiers.lease(&uses, session.stream(stream)?, timeout_ns, in_place)?;
    let id = tiers.keep_lease(held)?;
    // SAFETY: required by this function's contract.
    unsafe { write_addresses(addresses, &found) }?;
    Ok(vramp_buffer_lease_t { id })
}

/// Writes 1 to `*in_place` if the buffer at `index` in the request is read in place under the lease, and 0 if
/// it is on the card.
///
/// # Safety
/// `in_place` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_buffer_lease_is_in_place(
    allocator: vramp_allocator_t,
    lease: vramp_buffer_lease_t,
    index: usize,
    in_place: *mut c_int,
) -> vramp_status_t {
    let find = |session: &Session| {
        let tiers = session.open_tiers()?;
        let tables = tiers.tables();
        let held = tables.leases.get(&lease.id).ok_or_else(|| unknown_lease(lease.id))?;
        match index < held.addresses().len() {
            true => Ok(c_int::from(held.is_in_place(index))),
            false => Err(SpillError::NotNamed { index }.into()),
        }
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (in_place, "in_place"), find) }
}

/// Says that work under a lease writes only `size` bytes at `offset` of the buffer at `index` in the
/// request. Copies of its other parts stay valid, so they can leave the card without a copy. After the
/// first call, for any buffer of the lease, only what such calls name counts as written.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_buffer_lease_wrote(
    allocator: vramp_allocator_t,
    lease: vramp_buffer_lease_t,
    index: usize,
    offset: u64,
    size: u64,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        let tiers = session.open_tiers()?;
        let mut tables = tiers.tables();
        let held = tables.leases.get_mut(&lease.id).ok_or_else(|| unknown_lease(lease.id))?;
        Ok(held.wrote_only(index, Bytes::new(offset), Bytes::new(size))?)
    })
}

/// Ends a lease at the work queued on its stream so far: the buffers may move once that is complete. Does
/// not wait for it.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_buffer_lease_end(
    allocator: vramp_allocator_t,
    lease: vramp_buffer_lease_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        session.open_tiers()?.take_lease(lease)?.end();
        Ok(())
    })
}

/// Ends a lease under which nothing was queued and nothing was written.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_buffer_lease_cancel(
    allocator: vramp_allocator_t,
    lease: vramp_buffer_lease_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        session.open_tiers()?.take_lease(lease)?.cancel();
        Ok(())
    })
}

/// Locks a set of buffers on a stream: a lease as of vramp_buffers_lease without a handle, which
/// vramp_unlock or vramp_sync_and_unlock of the stream ends.
///
/// # Safety
/// As of vramp_buffers_lease.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_lock(
    allocator: vramp_allocator_t,
    uses: *const vramp_buffer_use_t,
    count: usize,
    stream: vramp_stream_t,
    timeout_ns: u64,
    addresses: *mut *mut c_void,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        // SAFETY: required by this function's contract.
        let uses = unsafe { uses_of(uses, count) }?;
        let (tiers, stream) = (session.open_tiers()?, session.stream(stream)?);
        let (held, found) = tiers.lease(&uses, stream, timeout_ns, false)?;
        tiers.keep_lock(held, stream)?;
        // SAFETY: required by this function's contract.
        unsafe { write_addresses(addresses, &found) }
    })
}

/// Ends the locks of a stream at the work queued on it so far, and does not wait for it.
/// VRAMP_ERROR_UNKNOWN_LEASE if it has none.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_unlock(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        let (tiers, stream) = (session.open_tiers()?, session.stream(stream)?);
        let locks = tiers.tables().locks.remove(&stream);
        drop(locks.ok_or_else(no_locks)?);
        Ok(())
    })
}

/// Waits for the work queued on a stream, which may be forgotten, and ends its locks. Buffers that no
/// other lease holds may move when it returns. A stream without locks is waited for too. Where the wait
/// fails the locks stay.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_sync_and_unlock(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        let (tiers, stream) = (session.open_tiers()?, session.stream(stream)?);
        tiers.manager().sync_and_unlock(stream)?;
        let locks = tiers.tables().locks.remove(&stream);
        drop(locks);
        // What was queued is over: the manager sees that here, and not at its next request.
        tiers.manager().sync_and_unlock(stream)?;
        Ok(())
    })
}

#[cold]
fn no_locks() -> Failure {
    let text = "the stream holds no locks: vramp_lock takes some, and each unlock ends all of them";
    Failure::new(Kind::UnknownLease, text)
}
