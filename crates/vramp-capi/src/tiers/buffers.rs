//! Deferrable buffers: made, destroyed, described, moved, and written and read from the host.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vramp_alloc::device::AddrRange;
use vramp_alloc::{Bytes, DeviceAddr, StreamId};
use vramp_defer::report::{Copies, PieceState};
use vramp_defer::{Access, BufferProgress, DeferrableBuffer, SpillTier};

use crate::abi::vramp_status_t;
use crate::abi::{vramp_allocator_t, vramp_stream_t};
use crate::interface::User;
use crate::pointers::WithSize;
use crate::session::Session;
use crate::status::Result;
use crate::tiers::abi::vramp_buffer_state_t::*;
use crate::tiers::abi::*;
use crate::tiers::out_of_range;
use crate::tiers::slot::OpenTiers;
use crate::tiers::tables::unknown_buffer;
use crate::{handles, pointers};

impl OpenTiers {
    /// Returns a buffer.
    pub fn buffer(&self, buffer: vramp_buffer_t) -> Result<DeferrableBuffer> {
        self.tables().buffer(buffer.id)
    }

    /// Makes a buffer and stores it.
    fn keep_buffer(
        &self,
        make: impl FnOnce() -> Result<DeferrableBuffer>,
    ) -> Result<vramp_buffer_t> {
        let make = || make().map(|buffer| (buffer.id(), buffer));
        let store = |id, buffer| drop(self.tables().buffers.insert(id, buffer));
        Ok(vramp_buffer_t { id: self.dispatch.make(make, store)? })
    }

    fn info_of(
        &self,
        buffer: &DeferrableBuffer,
        name: impl Fn(StreamId) -> vramp_stream_t,
    ) -> vramp_buffer_info_t {
        let BufferProgress { cleaning, leaving, restoring, pushing } = buffer.progress();
        let mut info = vramp_buffer_info_t {
            struct_size: size_of::<vramp_buffer_info_t>() as u64,
            address: buffer.addresses().start.number() as *mut c_void,
            size: buffer.len().count(),
            state: VRAMP_BUFFER_EMPTY,
            leases: u32::try_from(buffer.status().leases).unwrap_or(u32::MAX),
            device_bytes: 0,
            host_bytes: 0,
            disk_bytes: 0,
            peer_bytes: 0,
            moving_bytes: (cleaning + leaving + restoring + pushing).count(),
            last_stream: buffer.last_stream().map(name).unwrap_or_default(),
        };
        let piece = self.piece.count();
        for (state, start) in buffer.states().into_iter().zip((0..).step_by(piece as usize)) {
            let len = piece.min(info.size - start);
            let (is_resident, copies) = match state {
                PieceState::Empty => continue,
                PieceState::Resident { copies }
                | PieceState::Cleaning { copies, .. }
                | PieceState::Leaving { copies, .. } => (true, copies),
                PieceState::Spilled { copies }
                | PieceState::Restoring { copies, .. }
                | PieceState::Pushing { copies } => (false, copies),
            };
            let Copies { host, disk, peer } = copies;
            let part = |counts: bool| if counts { len } else { 0 };
            info.device_bytes += part(is_resident);
            info.host_bytes += part(host);
            info.disk_bytes += part(disk);
            info.peer_bytes += part(peer.is_some());
            info.state = match (info.state, is_resident) {
                (VRAMP_BUFFER_EMPTY | VRAMP_BUFFER_RESIDENT, true) => VRAMP_BUFFER_RESIDENT,
                _ => VRAMP_BUFFER_DEFERRED,
            };
        }
        info
    }
}

impl Session {
    fn with_buffer<R>(
        &self,
        buffer: vramp_buffer_t,
        f: impl FnOnce(&DeferrableBuffer) -> Result<R>,
    ) -> Result<R> {
        f(&self.open_tiers()?.buffer(buffer)?)
    }
}

/// Creates a buffer of `size` bytes without contents. It has an address, and no memory before the first
/// lease. More of them may exist than fit on the card.
///
/// # Safety
/// `buffer` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_buffer_create(
    allocator: vramp_allocator_t,
    size: u64,
    buffer: *mut vramp_buffer_t,
) -> vramp_status_t {
    let create = |session: &Session| {
        let tiers = session.open_tiers()?;
        tiers.keep_buffer(|| Ok(tiers.manager().buffer(Bytes::new(size))?))
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (buffer, "buffer"), create) }
}

/// Allows vramp_buffers_lease_in_place to read the buffer while it is spilled: its copies lie in host memory
/// that is mapped at its address. For the buffer's life. What is spilled already is read in place only after it
/// was restored and left again. Each part that leaves costs three driver calls more, and it goes to the host
/// only, and to the disk after all other copies.
///
/// VRAMP_ERROR_UNSUPPORTED if the device maps no host memory, or the buffer was adopted and has not left yet.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_buffer_set_readable(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        session.with_buffer(buffer, |buffer| Ok(buffer.readable_while_spilled()?))
    })
}

/// Destroys a buffer. Never waits: leases on it, and work that was queued under them, keep its memory
/// until they end.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_buffer_destroy(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        let tiers = session.open_tiers()?;
        let taken = tiers.tables().buffers.remove(&buffer.id);
        let taken = taken.ok_or_else(|| unknown_buffer(buffer.id))?;
        let id = taken.id();
        drop(taken);
        tiers.dispatch.forget(id, tiers.manager());
        Ok(())
    })
}

/// Returns the state of a buffer. Set `info->struct_size` to `sizeof(vramp_buffer_info_t)` before.
/// O(pieces).
///
/// # Safety
/// `info` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_buffer_info(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
    info: *mut vramp_buffer_info_t,
) -> vramp_status_t {
    let find = |session: &Session| {
        let tiers = session.open_tiers()?;
        Ok(tiers.info_of(&tiers.buffer(buffer)?, session.namer()))
    };
    // SAFETY: the struct begins with its size; the rest is this function's contract.
    unsafe { handles::out(allocator, WithSize(info, "info"), find) }
}

/// Sets the priority of a buffer, zero at first. Buffers of lower priority leave the card first.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_buffer_set_priority(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
    priority: i32,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        session.with_buffer(buffer, |buffer| {
            buffer.set_priority(priority);
            Ok(())
        })
    })
}

/// Says when a buffer is needed next: VRAMP_HINT_WILL_NEED or VRAMP_HINT_WONT_NEED. A lease ends the
/// hint.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_buffer_hint(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
    hint: u32,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        session.with_buffer(buffer, |buffer| {
            match hint {
                VRAMP_HINT_WILL_NEED => buffer.will_need(),
                VRAMP_HINT_WONT_NEED => buffer.wont_need(),
                other => {
                    let use_ = "VRAMP_HINT_WILL_NEED or VRAMP_HINT_WONT_NEED";
                    return Err(out_of_range("hint", other, use_));
                }
            }
            Ok(())
        })
    })
}

/// Restores a buffer ahead of need, without a lease. Does not wait for other leases: then it returns
/// VRAMP_ERROR_TIMEOUT.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_buffer_prefetch(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.with_buffer(buffer, |buffer| Ok(buffer.prefetch()?)))
}

/// Discards the contents of a buffer: they are neither copied out nor restored. VRAMP_ERROR_BUSY while
/// it is leased or moves.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_buffer_discard(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.with_buffer(buffer, |buffer| Ok(buffer.discard()?)))
}

/// Writes `size` bytes at `offset` of a buffer from the host's memory, and waits until they are there.
/// The buffer is restored for that.
///
/// # Safety
/// `from` is null or valid for reading `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_buffer_write(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
    offset: u64,
    from: *const c_void,
    size: usize,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        // SAFETY: required by this function's contract.
        let bytes = unsafe { pointers::bytes(from, size, "from") }?;
        session.with_buffer(buffer, |buffer| Ok(buffer.write(Bytes::new(offset), bytes)?))
    })
}

/// Reads `size` bytes at `offset` of a buffer to the host's memory, after work in flight that writes
/// the buffer. It is restored for that.
///
/// # Safety
/// `to` is null or valid for writing `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_buffer_read(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
    offset: u64,
    to: *mut c_void,
    size: usize,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        // SAFETY: required by this function's contract.
        let bytes = unsafe { pointers::bytes_mut(to, size, "to") }?;
        session.with_buffer(buffer, |buffer| Ok(buffer.read(Bytes::new(offset), bytes)?))
    })
}

/// Restores a buffer and waits until its contents are on the card, or other leases are in the way for
/// `timeout_ns` nanoseconds. Without a lease it may leave again at once.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_buffer_retrieve(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
    timeout_ns: u64,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        let tiers = session.open_tiers()?;
        let buffer = tiers.buffer(buffer)?;
        let lease = tiers.acquire(&[(buffer, Access::Shared)], &[], timeout_ns, false)?;
        lease.cancel();
        Ok(())
    })
}

/// Evicts one buffer: all of it leaves the card, for the fastest tier with room. Waits for the copies and
/// for work on it. `*freed` receives the bytes of the card that became free; it may be null.
///
/// VRAMP_ERROR_BUSY while a lease holds it or it moves, VRAMP_ERROR_OUT_OF_MEMORY if no tier has room. The
/// contents are whole, on the card or below.
///
/// # Safety
/// `freed` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_buffer_spill(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
    freed: *mut u64,
) -> vramp_status_t {
    let spill = |session: &Session| session.with_buffer(buffer, |it| Ok(it.spill()?.count()));
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, freed, spill) }
}

/// Evicts one buffer as vramp_buffer_spill does, down to the tier VRAMP_TIER_HOST or VRAMP_TIER_DISK: copies
/// on faster tiers are moved there or dropped.
///
/// # Safety
/// As of vramp_buffer_spill.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_buffer_spill_to(
    allocator: vramp_allocator_t,
    buffer: vramp_buffer_t,
    tier: u32,
    freed: *mut u64,
) -> vramp_status_t {
    let spill = |session: &Session| {
        let tier = match tier {
            VRAMP_TIER_HOST => SpillTier::Host,
            VRAMP_TIER_DISK => SpillTier::Disk,
            other => {
                let use_ = "VRAMP_TIER_HOST or VRAMP_TIER_DISK";
                return Err(out_of_range("tier below the card", other, use_));
            }
        };
        session.with_buffer(buffer, |buffer| Ok(buffer.spill_to(tier)?.count()))
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, freed, spill) }
}

/// Evicts buffers until `bytes` more of the card are free, or none may leave. `*freed` receives the
/// bytes freed; it may be null.
///
/// # Safety
/// `freed` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_evict(
    allocator: vramp_allocator_t,
    bytes: u64,
    freed: *mut u64,
) -> vramp_status_t {
    let evict = |session: &Session| {
        let spilled = session.open_tiers()?.manager().spill(Bytes::new(bytes));
        Ok(spilled.freed.count())
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, freed, evict) }
}

/// Memory of a caller, until its contents have left the card.
struct Adopted {
    release: unsafe extern "C" fn(user: *mut c_void),
    user: User,
    /// False if it was not adopted: the memory is the caller's still.
    is_taken: Arc<AtomicBool>,
}

impl Drop for Adopted {
    fn drop(&mut self) {
        if !self.is_taken.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: allowed by the contract of `vramp_buffer_adopt`, once.
        unsafe { (self.release)(self.user.get()) };
    }
}

/// Makes a buffer of memory on the device that the caller allocated, by any allocator: its contents may
/// leave the card from now on. Work queued on `stream` writes it. Nothing is copied.
///
/// Leases return the adopted address until all of the buffer has left the card. Then `release` is called
/// with `user`, once, and the buffer comes back at an address of its own: ask each lease. It is called
/// by the thread that evicted the buffer or destroyed it, perhaps in the middle of a vramp_malloc, with
/// no lock held. It may free the memory, also with vramp_free. Where the call fails it is not called.
/// Memory of a region is VRAMP_ERROR_UNSUPPORTED: a pause would take it from the card under a lease.
///
/// # Safety
/// On a GPU, `size` bytes at `address` are memory of the device, and nothing else uses them until
/// `release` is called. `release` may be called from any thread with `user`, and does not unwind. `buffer`
/// is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_buffer_adopt(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    size: u64,
    stream: vramp_stream_t,
    release: vramp_release_t,
    user: *mut c_void,
    buffer: *mut vramp_buffer_t,
) -> vramp_status_t {
    let user = User(user);
    let adopt = |session: &Session| {
        pointers::check(address, "address")?;
        let release = pointers::function(release, "release")?;
        let memory = AddrRange::new(DeviceAddr::new(address as u64), Bytes::new(size));
        let (tiers, stream) = (session.open_tiers()?, session.stream(stream)?);
        tiers.keep_buffer(|| {
            let is_taken = Arc::new(AtomicBool::new(true));
            let owner = Adopted { release, user, is_taken: Arc::clone(&is_taken) };
            let adopted = tiers.manager().adopt(memory, Box::new(owner), stream);
            adopted.map_err(|failed| {
                is_taken.store(false, Ordering::Relaxed);
                failed.error.into()
            })
        })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (buffer, "buffer"), adopt) }
}
