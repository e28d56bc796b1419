//! Sharing: exports to other processes and imports from them, access of other cards, pinned memory.
//!
//! `docs/sharing.md` says who may end first, and what each call costs.

pub(crate) mod tables;

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::IntoRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vramp_alloc::device::{AddrRange, HandleType};
use vramp_alloc::sharing::{AccessChange, DmaBuf, OpenedMemory, PinnedRange, SharedMemory, Ticket};
use vramp_alloc::{Bytes, DeviceAddr, StreamId};

use crate::abi::vramp_handle_type_t::*;
use crate::abi::vramp_status_t;
use crate::abi::{
    vramp_allocator_t, vramp_export_t, vramp_pin_t, vramp_sharing_t, vramp_stream_t, vramp_ticket_t,
};
use crate::exchange::exchange;
use crate::ids::next_id;
use crate::pointers::{WithSize, write_out};
use crate::queries::chars;
use crate::session::Session;
use crate::sharing::tables::{ticket_of, unknown_export, unknown_import, unknown_pin};
use crate::status::{Failure, Kind, Result, check_fork, status_of};
use crate::{device, handles, pointers};

impl Session {
    /// Publishes the block that begins at `addr`.
    pub fn share(&self, addr: u64) -> Result<SharedMemory> {
        let exported =
            self.with_block(addr, |block| self.owner(block.pool_number()).export(block))??;
        Ok(exchange().share(exported)?)
    }

    /// Publishes addresses with memory, whatever lies there.
    pub fn share_range(&self, addr: u64, len: u64) -> Result<SharedMemory> {
        let range = AddrRange::new(DeviceAddr::new(addr), Bytes::new(len));
        let exported = self.in_pool_of(range, |pool| pool.export_range(range))?;
        Ok(exchange().share(exported)?)
    }

    /// Keeps an export and returns its id.
    pub(crate) fn add_export(&self, shared: SharedMemory) -> u64 {
        let id = next_id();
        self.shares.lock().exports.insert(id, Arc::new(shared));
        id
    }

    pub(crate) fn close_export(&self, id: u64) -> Result<()> {
        let shared = self.shares.lock().exports.remove(&id);
        shared.ok_or_else(|| unknown_export(id))?.close();
        Ok(())
    }

    /// Opens the memory of a ticket.
    pub fn open_shared(&self, ticket: &[u8]) -> Result<OpenedMemory> {
        Ok(exchange().open(self.allocator(), ticket)?)
    }

    /// Opens the memory of a ticket and returns its addresses.
    pub(crate) fn add_import(&self, ticket: &[u8]) -> Result<AddrRange> {
        let opened = self.open_shared(ticket)?;
        let range = opened.range();
        let mut tables = self.shares.lock();
        let at_address = tables.imports.entry(range.start.number()).or_default();
        at_address.push(opened);
        at_address.sort_by_key(|opened| std::cmp::Reverse(opened.range().len));
        Ok(range)
    }

    pub(crate) fn record_import(&self, addr: u64, stream: StreamId) -> Result<()> {
        let tables = self.shares.lock();
        let opened = tables.imports.get(&addr).ok_or_else(|| unknown_import(addr))?;
        Ok(opened.iter().try_for_each(|opened| opened.record_use(stream))?)
    }

    /// Waits for the recorded work and closes an import. Of several at an address the shortest one: so no byte
    /// that another one has is unmapped.
    pub(crate) fn close_import(&self, addr: u64) -> Result<()> {
        let mut tables = self.shares.lock();
        let at_address = tables.imports.get_mut(&addr).ok_or_else(|| unknown_import(addr))?;
        let opened = at_address.pop().expect("an address without an import is removed");
        if at_address.is_empty() {
            tables.imports.remove(&addr);
        }
        drop(tables);
        Ok(opened.close()?)
    }

    /// Pins a range.
    pub fn pin(&self, addr: u64, len: u64) -> Result<PinnedRange> {
        let range = AddrRange::new(DeviceAddr::new(addr), Bytes::new(len));
        Ok(self.in_pool_of(range, |pool| pool.pin_range(range))?)
    }

    /// Pins a range and returns the pin's id.
    pub(crate) fn add_pin(&self, addr: u64, len: u64) -> Result<u64> {
        Ok(self.keep_pin(self.pin(addr, len)?))
    }

    /// Stores a pin and returns its id.
    pub(crate) fn keep_pin(&self, pinned: PinnedRange) -> u64 {
        let id = next_id();
        self.shares.lock().pins.insert(id, pinned);
        id
    }

    pub(crate) fn unpin(&self, id: u64) -> Result<()> {
        let pinned = self.shares.lock().pins.remove(&id);
        drop(pinned.ok_or_else(|| unknown_pin(id))?);
        Ok(())
    }

    /// Pins a range and exports it as a dma-buf.
    pub(crate) fn dma_buf(&self, addr: u64, len: u64) -> Result<DmaBuf> {
        let range = AddrRange::new(DeviceAddr::new(addr), Bytes::new(len));
        Ok(self.in_pool_of(range, |pool| pool.export_dma_buf(range))?)
    }
}

/// Maps the host's memory to the simulated cards that are opened in this process from now on. Then a
/// program may read and write what it allocates there, and share it with other processes that called
/// this function. Programs with a GPU need it for nothing.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_map_simulated_cards() -> vramp_status_t {
    status_of(|| {
        check_fork()?;
        device::map_simulated();
        Ok(())
    })
}

/// Exports the block that begins at `address` to other processes of the same user. The descriptor of
/// each physical handle is made once, 185 us, and kept for later exports, 256 in a process at most. A block may
/// be exported several times. A free of the block takes effect once its exports are closed and no importer has
/// it open any more, killed ones included.
///
/// Importers may read and write all physical handles that the block lies in, also the blocks beside it.
/// VRAMP_ERROR_UNSUPPORTED if the memory was created for one process (sharing=none, and some presets).
///
/// # Safety
/// `exported` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_export(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    exported: *mut vramp_export_t,
) -> vramp_status_t {
    let find = |session: &Session| {
        Ok(vramp_export_t { id: session.add_export(session.share(address as u64)?) })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (exported, "exported"), find) }
}

/// Exports `length` bytes from `address` on, as vramp_export does, whatever lies there: pages of an arena for
/// caches that have memory. Until the export is closed and no importer has it open any more, its physical handles
/// stay at their addresses, also while the pages are parked. Blocks that lie there are not kept: the caller does
/// not free them.
///
/// VRAMP_ERROR_UNSUPPORTED if part of it has no memory of the pool, or memory that was created for one process.
///
/// # Safety
/// `exported` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_export_range(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    length: usize,
    exported: *mut vramp_export_t,
) -> vramp_status_t {
    let find = |session: &Session| {
        let shared = session.share_range(address as u64, length as u64)?;
        Ok(vramp_export_t { id: session.add_export(shared) })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (exported, "exported"), find) }
}

/// Returns a ticket for another process, which can be opened any number of times while the export is
/// open. With `keep_until_opened` it also counts as a holder of the memory until it was opened once, or
/// vramp_export_revoke ends that. The bytes are those that work wrote: before the ticket is sent,
/// synchronize the stream that wrote them.
///
/// # Safety
/// `ticket` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_export_ticket(
    allocator: vramp_allocator_t,
    exported: vramp_export_t,
    keep_until_opened: c_int,
    ticket: *mut vramp_ticket_t,
) -> vramp_status_t {
    let make = |session: &Session| {
        let shared = session.shares.export(exported.id)?;
        ticket_to_c(&ticket_of(&shared, keep_until_opened != 0)?)
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (ticket, "ticket"), make) }
}

/// Ends what vramp_export_ticket began with `keep_until_opened`, for a ticket that did not arrive.
/// `*revoked` is 1, or 0 if it was opened or revoked before. `revoked` may be null.
///
/// # Safety
/// `ticket` is null or valid for reading, `revoked` null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_export_revoke(
    allocator: vramp_allocator_t,
    exported: vramp_export_t,
    ticket: *const vramp_ticket_t,
    revoked: *mut c_int,
) -> vramp_status_t {
    let revoke = |session: &Session| {
        // SAFETY: required by this function's contract.
        let ticket = unsafe { pointers::read(ticket, "ticket") }?;
        let ticket = Ticket::from_bytes(ticket_bytes(&ticket)?);
        let ticket = ticket.map_err(|error| Failure::new(Kind::Ticket, error.to_string()))?;
        Ok(c_int::from(session.shares.export(exported.id)?.revoke(&ticket)))
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, revoked, revoke) }
}

/// Returns in `*held` 1 while an importer has the export open or a ticket that keeps it was not opened,
/// else 0, and in `*opens` the number of opens that importers have not closed. Either may be null.
///
/// # Safety
/// `held` and `opens` are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_export_is_held(
    allocator: vramp_allocator_t,
    exported: vramp_export_t,
    held: *mut c_int,
    opens: *mut u64,
) -> vramp_status_t {
    let find = |session: &Session| {
        let shared = session.shares.export(exported.id)?;
        Ok((c_int::from(shared.is_held()), shared.opens() as u64))
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (held, opens), find) }
}

/// Waits until the export is not held, for `timeout_ms` milliseconds at most. `*released` is 1, or 0 at
/// the end of that time; it may be null. A close of the export or the allocator does not wait for the call:
/// it ends the tickets, and the call returns once nothing is open.
///
/// # Safety
/// `released` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_export_wait(
    allocator: vramp_allocator_t,
    exported: vramp_export_t,
    timeout_ms: u32,
    released: *mut c_int,
) -> vramp_status_t {
    let wait = || {
        // The allocator may be closed meanwhile.
        let shared = handles::with(allocator, |session| session.shares.export(exported.id))?;
        let deadline = Instant::now() + Duration::from_millis(u64::from(timeout_ms));
        Ok(c_int::from(shared.wait_released(deadline)))
    };
    // SAFETY: required by this function's contract.
    unsafe { write_out(released, wait) }
}

/// Closes an export: later opens fail, and tickets keep nothing any more. What importers have open stays
/// open, and keeps the block. Never waits.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_export_close(
    allocator: vramp_allocator_t,
    exported: vramp_export_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.close_export(exported.id))
}

/// Opens the memory of a ticket: `*address` is where it lies in this process, `*size` its bytes. Waits for
/// the exporting process, 30 s for each of its answers at most. One import and one map for each physical
/// handle, 34 us together, and none for those that are mapped from an earlier open. The memory stays readable after
/// the exporting process has ended. Memory that is opened twice has one address, and is closed twice.
///
/// On failure `*address` is set to null. VRAMP_ERROR_EXPORT_ENDED if the export or its process ended,
/// VRAMP_ERROR_TICKET if the bytes are no ticket.
///
/// # Safety
/// `ticket` is null or valid for reading; `address` is null or valid for writing; so is `size`, which may
/// be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_import(
    allocator: vramp_allocator_t,
    ticket: *const vramp_ticket_t,
    address: *mut *mut c_void,
    size: *mut usize,
) -> vramp_status_t {
    let import = |session: &Session| {
        // SAFETY: required by this function's contract.
        let ticket = unsafe { pointers::read(ticket, "ticket") }?;
        let range = session.add_import(ticket_bytes(&ticket)?)?;
        Ok((range.start.number() as *mut c_void, range.len.count() as usize))
    };
    let out = ((address, "address"), size);
    // SAFETY: required by this function's contract.
    unsafe { handles::out_or(allocator, out, (std::ptr::null_mut(), 0), import) }
}

/// Records that work queued on `stream`, so far and from now on, uses an import: its close waits for it.
/// No driver call.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_import_record_use(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    stream: vramp_stream_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.record_import(address as u64, session.stream(stream)?))
}

/// Closes an import: waits on the host for recorded work, and closes it at the exporter, which may use it for other
/// blocks then. Other work on it must be complete. It may stay mapped for ten seconds, for the next open.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_import_close(
    allocator: vramp_allocator_t,
    address: *mut c_void,
) -> vramp_status_t {
    handles::on(allocator, |session| session.close_import(address as u64))
}

/// Grants card number `device` access to all memory of the allocator and of the pools made from it, now and
/// later. `*calls` receives the number of driver calls and `*bytes` how much was mapped; either may be
/// null, and both are zero if the card had access before. About 45 us for each physical handle; later
/// set-access and unmap calls take twice as long.
///
/// VRAMP_ERROR_RANGE if the card is no peer, VRAMP_ERROR_UNSUPPORTED if the option `peers` excludes it.
///
/// # Safety
/// `calls` and `bytes` are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_grant_access(
    allocator: vramp_allocator_t,
    device: u32,
    calls: *mut u64,
    bytes: *mut u64,
) -> vramp_status_t {
    let grant = |session: &Session| Ok(cost(session.allocator().grant_access(device)?));
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (calls, bytes), grant) }
}

/// Takes back the access of card number `device`, with the results of vramp_grant_access. All work of that
/// card on the memory must be complete, and seen to be.
///
/// # Safety
/// As of vramp_grant_access.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_revoke_access(
    allocator: vramp_allocator_t,
    device: u32,
    calls: *mut u64,
    bytes: *mut u64,
) -> vramp_status_t {
    let revoke = |session: &Session| Ok(cost(session.allocator().revoke_access(device)?));
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (calls, bytes), revoke) }
}

fn cost(change: AccessChange) -> (u64, u64) {
    (change.calls, change.bytes.count())
}

/// Pins the memory of `size` bytes from `address` on, for what registers it: network cards, communication
/// libraries. Until vramp_unpin it stays at its addresses and is not released, also if the block is freed
/// and allocated again. Pins are counted and may overlap. No driver call.
///
/// # Safety
/// `pin` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_pin(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    size: usize,
    pin: *mut vramp_pin_t,
) -> vramp_status_t {
    let find =
        |session: &Session| Ok(vramp_pin_t { id: session.add_pin(address as u64, size as u64)? });
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (pin, "pin"), find) }
}

/// Ends a pin, after the registration has ended. No driver call.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_unpin(allocator: vramp_allocator_t, pin: vramp_pin_t) -> vramp_status_t {
    handles::on(allocator, |session| session.unpin(pin.id))
}

/// Pins `size` bytes from `address` on as vramp_pin does, and returns a descriptor of the pages of 4 KiB that
/// they lie in, for drivers of other devices (ibv_reg_dmabuf_mr). `*offset` is where the bytes begin in it.
/// The caller closes the descriptor, which keeps the memory itself, and ends the pin after the
/// registration. One driver call. VRAMP_ERROR_UNSUPPORTED if the device has no dma-buf.
///
/// # Safety
/// `descriptor`, `offset` and `pin` are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_export_dma_buf(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    size: usize,
    descriptor: *mut c_int,
    offset: *mut usize,
    pin: *mut vramp_pin_t,
) -> vramp_status_t {
    let export = |session: &Session| {
        let buffer = session.dma_buf(address as u64, size as u64)?;
        let start = buffer.offset().count() as usize;
        let (pinned, opened) = buffer.into_parts();
        let pin = vramp_pin_t { id: session.keep_pin(pinned) };
        Ok(((opened.into_raw_fd(), start), pin))
    };
    let out = (((descriptor, "descriptor"), (offset, "offset")), (pin, "pin"));
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, out, export) }
}

/// Makes an allocator for memory that communication libraries register (NCCL, UCX): its segments are one
/// physical handle each, which stays until the segment is free as a whole and trimmed. It has the device,
/// the limit and the streams of `allocator`: a stream's handle is valid in both. Close both, in any order.
///
/// `name` is for reports; null means "comm".
///
/// # Safety
/// `name` is null or zero-terminated; `pool` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_comm_pool(
    allocator: vramp_allocator_t,
    name: *const c_char,
    pool: *mut vramp_allocator_t,
) -> vramp_status_t {
    let make = || {
        // SAFETY: required by this function's contract.
        let name = unsafe { pointers::text(name, "name") }?;
        let name = if name.is_empty() { "comm" } else { name };
        let made = handles::with(allocator, |session| session.comm_pool(name))?;
        handles::insert(Arc::new(made))
    };
    // SAFETY: required by this function's contract.
    unsafe { write_out((pool, "pool"), make) }
}

/// Returns how the memory can be shared, and how much is. Set `state->struct_size` to
/// `sizeof(vramp_sharing_t)` before. No driver call.
///
/// # Safety
/// `state` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_sharing(
    allocator: vramp_allocator_t,
    state: *mut vramp_sharing_t,
) -> vramp_status_t {
    // SAFETY: the struct begins with its size; the rest is this function's contract.
    unsafe { handles::out(allocator, WithSize(state, "state"), |session| Ok(sharing_of(session))) }
}

fn sharing_of(session: &Session) -> vramp_sharing_t {
    let allocator = session.allocator();
    let state = allocator.sharing();
    let (exported, (pinned, pinned_bytes)) = session.exported_and_pinned();
    let peers = state.peers.iter().filter_map(|&peer| 1_u64.checked_shl(peer));
    vramp_sharing_t {
        struct_size: size_of::<vramp_sharing_t>() as u64,
        handle_type: match state.handle_type {
            HandleType::None => VRAMP_HANDLE_NONE,
            HandleType::PosixFd => VRAMP_HANDLE_POSIX_FD,
            HandleType::Fabric => VRAMP_HANDLE_FABRIC,
        },
        rdma: i32::from(state.rdma),
        peers: peers.fold(0, |mask, bit| mask | bit),
        exported: exported as u64,
        pinned,
        pinned_bytes: pinned_bytes.count(),
        imports: session.shares.imports() as u64,
        fallback: chars(state.fallback.as_deref().unwrap_or_default()),
    }
}

fn ticket_to_c(ticket: &Ticket) -> Result<vramp_ticket_t> {
    let made = ticket.to_bytes();
    let mut bytes = [0; 252];
    let Some(part) = bytes.get_mut(..made.len()) else {
        let text = format!("a ticket of {} bytes is too long", made.len());
        return Err(Failure::new(Kind::Internal, text));
    };
    part.copy_from_slice(&made);
    Ok(vramp_ticket_t { length: made.len() as u32, bytes })
}

fn ticket_bytes(ticket: &vramp_ticket_t) -> Result<&[u8]> {
    ticket.bytes.get(..ticket.length as usize).ok_or_else(|| {
        let text = format!(
            "the ticket has a length of {}, and at most {} are possible: it was damaged on its way",
            ticket.length,
            ticket.bytes.len()
        );
        Failure::new(Kind::Ticket, text)
    })
}
