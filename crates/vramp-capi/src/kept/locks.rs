//! Locks of kept memory in C: many processes read, or one writes and commits the next epoch.
//!
//! Each call finds the memory, and then waits without the allocator, which may be closed meanwhile. The memory ends
//! with the call then.

use vramp_alloc::sharing::kept::{KeptError, KeptMemory};

use super::{deadline, lock_of};
use crate::abi::{vramp_allocator_t, vramp_status_t};
use crate::handles;
use crate::kept::abi::*;
use crate::pointers::write_out;
use crate::status::{Result, status_of};

/// Runs a call that may wait for other processes on open memory. The allocator may be closed meanwhile.
fn on<R>(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
    call: impl FnOnce(&KeptMemory) -> std::result::Result<R, KeptError>,
) -> Result<R> {
    let memory = handles::with(allocator, |session| session.kept.get(kept.id)?.open())?;
    Ok(call(&memory)?)
}

/// Takes the lock for reading, within `timeout_ns` nanoseconds. Returns the epoch in `*epoch`, which may be null. One
/// message each way, and none if the process has it. A close of the allocator does not wait for the call.
///
/// VRAMP_ERROR_KEPT_BUSY at the timeout, with the processes that have the lock; VRAMP_ERROR_TORN; VRAMP_ERROR_KEEPER if
/// the process has the lock for writing.
///
/// # Safety
/// `epoch` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kept_read(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
    timeout_ns: u64,
    epoch: *mut u64,
) -> vramp_status_t {
    let read = || on(allocator, kept, |memory| memory.read(deadline(timeout_ns)));
    // SAFETY: required by this function's contract.
    unsafe { write_out(epoch, read) }
}

/// Takes the lock for writing, within `timeout_ns` nanoseconds: other processes read the memory no more. Gives a lock
/// for reading back first, and has none after an error. Returns the epoch before in `*epoch`, which may be null.
///
/// A process that ends with this lock, or closes the memory with it, leaves it torn: reading it is an error until a
/// process wrote all of it and committed. VRAMP_ERROR_UNSUPPORTED if it is mapped for reading only; otherwise as
/// vramp_kept_read.
///
/// # Safety
/// `epoch` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kept_write(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
    timeout_ns: u64,
    epoch: *mut u64,
) -> vramp_status_t {
    let write = || {
        let kept = handles::with(allocator, |session| session.kept.get(kept.id))?;
        let memory = kept.open()?;
        let epoch = memory.write(deadline(timeout_ns))?;
        if let Err(closed) = kept.check_open() {
            // No caller has the lock: its end would leave the memory torn.
            memory.release_unchanged()?;
            return Err(closed);
        }
        Ok(epoch)
    };
    // SAFETY: required by this function's contract.
    unsafe { write_out(epoch, write) }
}

/// Gives the lock for reading back, after it waited for recorded work. Other processes may write from now on.
/// VRAMP_ERROR_KEEPER if the process has the lock for writing.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_kept_unlock(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
) -> vramp_status_t {
    status_of(|| on(allocator, kept, |memory| memory.unlock(deadline(u64::MAX))))
}

/// Lets a process that waits to write do so, and takes the lock for reading again after it, within `timeout_ns`
/// nanoseconds. For the moment between two steps: no message and no wait if none waits. Returns the epoch in `*epoch`,
/// which may be null. Errors are those of vramp_kept_read; without the lock the memory must not be read.
///
/// # Safety
/// `epoch` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kept_yield_to_writer(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
    timeout_ns: u64,
    epoch: *mut u64,
) -> vramp_status_t {
    let give_way = || on(allocator, kept, |memory| memory.yield_to_writer(deadline(timeout_ns)));
    // SAFETY: required by this function's contract.
    unsafe { write_out(epoch, give_way) }
}

/// Waits for recorded work, and makes what was written since vramp_kept_write the next epoch, whose number it returns
/// in `*epoch`, which may be null. `then` is the lock that the process has afterwards: VRAMP_KEPT_READ, VRAMP_KEPT_WRITE
/// or VRAMP_KEPT_UNLOCKED. VRAMP_ERROR_KEEPER without the lock for writing.
///
/// # Safety
/// `epoch` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kept_commit_update(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
    then: u32,
    epoch: *mut u64,
) -> vramp_status_t {
    let commit = || {
        let then = lock_of(then)?;
        on(allocator, kept, |memory| memory.commit(then))
    };
    // SAFETY: required by this function's contract.
    unsafe { write_out(epoch, commit) }
}

/// Gives the lock for writing back, if nothing was written: the epoch stays.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_kept_release_unchanged(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
) -> vramp_status_t {
    status_of(|| on(allocator, kept, KeptMemory::release_unchanged))
}

/// Waits until the name has a later epoch than `than`, in this memory or in other memory of the name, for `timeout_ns`
/// nanoseconds at most. Returns its number in `*epoch`, which may be null. VRAMP_ERROR_KEPT_BUSY at the timeout. A close
/// of the allocator does not wait for the call.
///
/// # Safety
/// `epoch` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kept_wait_newer(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
    than: u64,
    timeout_ns: u64,
    epoch: *mut u64,
) -> vramp_status_t {
    let wait = || on(allocator, kept, |memory| memory.wait_newer(than, deadline(timeout_ns)));
    // SAFETY: required by this function's contract.
    unsafe { write_out(epoch, wait) }
}
