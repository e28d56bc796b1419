//! Looks up allocators by id.
//!
//! An id combines a slot with a use count, so the id of a closed allocator stays unknown for ever.
//!
//! The life of an allocator:
//!
//! 1. [`insert`] puts it into a free slot (`slot.rs`) and opens the slot's gate (`gate.rs`).
//! 2. [`with`] finds it. A call never waits for a closer: behind a gate that is shut is an allocator
//!    that is being closed, and the call is refused.
//! 3. [`close`] claims the close, of which there is one for each allocator, and then shuts the gate
//!    and waits for the calls in progress. If the allocator cannot be closed, because a stream
//!    captures, the gate is opened again.
//!
//! A call may run a callback of the user that calls in again. Nested calls cannot wait for a closer
//! that waits for the outer call:
//!
//! - A call inside a callback of the same allocator is served also while the allocator is being
//!   closed, from the closer's claim: the closer still waits for the outer call.
//! - A close inside a callback of the same allocator is refused. Inside a callback of another
//!   allocator it is refused while calls are in progress, because two callbacks that close each
//!   other's allocators would wait for ever.
//!
//! There are at most 256 slots, which are reused; a closed allocator leaves nothing else. Each thread
//! that calls has a record (`threads.rs`), which a close looks at. A forked child is refused before
//! any lock.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use vramp_alloc::observe::is_in_callback;

use crate::abi::{vramp_allocator_t, vramp_status_t};
use crate::pointers::{Out, write_out};
use crate::session::{CloseRefused, Session};
use crate::slot::{Behind, NotTaken, Slot};
use crate::status::{Failure, Kind, Result, check_fork, status_of};
use crate::threads;
use crate::tiers::dispatch::check_not_dispatcher;

/// Maximum number of open allocators.
const SLOTS: usize = 256;

static TABLE: [OnceLock<Box<Slot<Session>>>; SLOTS] = [const { OnceLock::new() }; SLOTS];
static FREE: Mutex<Free> = Mutex::new(Free { slots: Vec::new(), fresh: 0, uses: 0 });

struct Free {
    /// Slots of closed allocators.
    slots: Vec<usize>,
    /// First slot that was never used.
    fresh: usize,
    /// Number of allocators opened so far.
    uses: u64,
}

#[cold]
fn unknown(handle: vramp_allocator_t) -> Failure {
    let text = match handle.id {
        0 => "the allocator is zero: use one from vramp_open".to_owned(),
        id => format!("allocator {id:#x} is closed or was never opened: use one from vramp_open"),
    };
    Failure::new(Kind::UnknownAllocator, text)
}

#[inline]
fn slot_of(handle: vramp_allocator_t) -> Option<&'static Slot<Session>> {
    TABLE[(handle.id % SLOTS as u64) as usize].get().map(|slot| &**slot)
}

/// Stores an allocator and returns its handle.
pub(crate) fn insert(session: Arc<Session>) -> Result<vramp_allocator_t> {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    let index = match free.slots.pop() {
        Some(index) => index,
        None if free.fresh < SLOTS => {
            free.fresh += 1;
            free.fresh - 1
        }
        None => {
            let text = format!("{SLOTS} allocators are open, which is the maximum: close some");
            return Err(Failure::new(Kind::TooMany, text));
        }
    };
    free.uses += 1;
    let id = free.uses * SLOTS as u64 + index as u64;
    TABLE[index].get_or_init(|| Box::new(Slot::new())).open(id, session);
    Ok(vramp_allocator_t { id })
}

/// Runs `call` on an open allocator, which stays open until `call` returns.
#[inline]
pub(crate) fn with<R>(
    handle: vramp_allocator_t,
    call: impl FnOnce(&Session) -> Result<R>,
) -> Result<R> {
    with_shared(handle, |session| call(session))
}

/// Runs `call` on an open allocator and returns its status: the body of a function of the interface.
#[inline]
pub(crate) fn on(
    handle: vramp_allocator_t,
    call: impl FnOnce(&Session) -> Result<()>,
) -> vramp_status_t {
    status_of(|| with(handle, call))
}

/// Runs `call` on an open allocator, writes what it returns and returns the status. On failure nothing is written.
///
/// # Safety
/// As of [`Out::check`].
#[inline]
pub(crate) unsafe fn out<O: Out>(
    handle: vramp_allocator_t,
    out: O,
    call: impl FnOnce(&Session) -> Result<O::Value>,
) -> vramp_status_t {
    // SAFETY: this function's contract is the same.
    unsafe { write_out(out, || with(handle, call)) }
}

/// As [`out()`], and on failure writes `otherwise`.
///
/// # Safety
/// As of [`out()`].
#[inline]
pub(crate) unsafe fn out_or<O: Out>(
    handle: vramp_allocator_t,
    out: O,
    otherwise: O::Value,
    call: impl FnOnce(&Session) -> Result<O::Value>,
) -> vramp_status_t {
    status_of(|| {
        // SAFETY: this function's contract is the same.
        unsafe { out.check() }?;
        let (value, done) = match with(handle, call) {
            Ok(value) => (value, Ok(())),
            Err(failure) => (otherwise, Err(failure)),
        };
        // SAFETY: it was checked.
        unsafe { out.write(value) };
        done
    })
}

#[inline]
fn with_shared<R>(
    handle: vramp_allocator_t,
    mut call: impl FnOnce(&Arc<Session>) -> Result<R>,
) -> Result<R> {
    check_fork()?;
    let Some(slot) = slot_of(handle) else { return Err(unknown(handle)) };
    loop {
        let done = match threads::idle_record() {
            Some(record) => slot.gate.call(handle.id, record, call),
            None => {
                threads::check_not_in_store()?;
                slot.gate.counted_call(handle.id, call)
            }
        };
        match done {
            Ok(result) => return result,
            Err(refused) => call = refused,
        }
        if let Some(session) = served_while_closing(slot, handle)? {
            return call(&session);
        }
    }
}

/// Returns an allocator that is being closed, for a call from one of its callbacks; an error for
/// any other call. `None` if a close was given up meanwhile, and the caller looks again.
#[cold]
fn served_while_closing(
    slot: &Slot<Session>,
    handle: vramp_allocator_t,
) -> Result<Option<Arc<Session>>> {
    match slot.while_closing(handle.id, |session| session.allocator().is_in_callback()) {
        Behind::Open => Ok(None),
        Behind::Closing(session) => Ok(Some(session)),
        Behind::Gone => Err(unknown(handle)),
    }
}

/// Closes an allocator. Waits for the calls in progress; inside a callback it is refused instead if
/// there are some. Of several threads that try, one succeeds. An allocator that cannot be closed
/// now stays open under its handle.
pub(crate) fn close(handle: vramp_allocator_t) -> Result<()> {
    let slot = slot_of(handle).ok_or_else(|| unknown(handle))?;
    check_not_dispatcher()?;
    let session = match is_in_callback() {
        true => take_at_once(slot, handle)?,
        false => take_after_calls(slot, handle)?,
    };
    let closed = Arc::into_inner(session).expect("no call is in progress").close();
    if let Err(CloseRefused { session: Some(session), failure }) = closed {
        slot.open(handle.id, Arc::new(*session));
        return Err(failure);
    }
    let index = (handle.id % SLOTS as u64) as usize;
    FREE.lock().unwrap_or_else(PoisonError::into_inner).slots.push(index);
    closed.map_err(|refused| refused.failure)
}

fn take_after_calls(slot: &Slot<Session>, handle: vramp_allocator_t) -> Result<Arc<Session>> {
    // Within a call, so that the allocator is open while its close is claimed.
    with_shared(handle, |session| {
        session.check_closable()?;
        session.check_tiers_closable()?;
        if !slot.claim(handle.id, session) {
            return Err(unknown(handle));
        }
        session.end_waits();
        Ok(())
    })?;
    Ok(slot.take_claimed(handle.id, threads::records))
}

fn take_at_once(slot: &Slot<Session>, handle: vramp_allocator_t) -> Result<Arc<Session>> {
    with(handle, |session| {
        session.check_closable()?;
        session.check_tiers_closable()?;
        match session.allocator().is_in_callback() {
            true => Err(busy(
                "a callback of the allocator runs on this thread: return from it, and then close \
                 the allocator",
            )),
            false => Ok(()),
        }
    })?;
    slot.take_at_once(handle.id, threads::records).map_err(|refused| match refused {
        NotTaken::Gone => unknown(handle),
        NotTaken::InUse => busy(
            "calls are in progress on the allocator, and a callback does not wait for them: close \
             it after the callback, or retry",
        ),
    })
}

fn busy(text: &str) -> Failure {
    Failure::new(Kind::Busy, text)
}
