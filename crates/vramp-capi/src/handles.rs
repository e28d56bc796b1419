//! Looks up allocators by id.
//!
//! An id combines a slot with a use count, so the id of a closed allocator stays unknown for ever.
//! A slot consists of several stripes with equal contents, each with its own lock. A call holds the
//! read lock of its thread's stripe, so that threads rarely share a cache line.
//!
//! The life of an allocator:
//!
//! 1. [`insert`] fills the stripes of a free slot.
//! 2. [`with`] finds it. A call never waits for a stripe: one that is locked for writing, or that a
//!    closer waits for, belongs to an allocator that is being closed, and the call is refused.
//! 3. [`close`] claims the close, of which there is one for each allocator, and then empties one
//!    stripe after the other. So it waits for the calls in progress. If the allocator cannot be
//!    closed, because a stream captures, the stripes are filled again.
//!
//! A call may run a callback of the user that calls in again. Nested calls cannot wait for a closer
//! that waits for the outer call:
//!
//! - A call inside a callback of the same allocator is served also while the allocator is being
//!   closed, from the closer's claim: the outer call still holds its stripe.
//! - A close inside a callback of the same allocator is refused. Inside a callback of another
//!   allocator it is refused while calls are in progress, because two callbacks that close each
//!   other's allocators would wait for ever.
//!
//! Tests close with real threads, in loops: the model checker's lock has no waiting writers, which
//! are what nested calls meet here.
//!
//! There are at most 256 slots, which are reused; a closed allocator leaves nothing else. A forked
//! child is refused before any lock.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, TryLockError};

use crossbeam_utils::CachePadded;
use vramp_alloc::observe::is_in_callback;

use crate::abi::vramp_allocator_t;
use crate::abi::vramp_status_t::*;
use crate::context::{CloseRefused, Context};
use crate::status::{Failure, Result, check_fork};

/// Maximum number of open allocators.
const SLOTS: usize = 256;
/// Stripes per slot. Threads beyond this number share stripes.
const STRIPES: usize = 32;

struct Entry {
    id: u64,
    context: Arc<Context>,
}

type Stripe = CachePadded<RwLock<Option<Entry>>>;

struct Slot {
    stripes: [Stripe; STRIPES],
    /// The allocator that is being closed.
    closing: Mutex<Option<Entry>>,
}

impl Slot {
    fn new() -> Box<Slot> {
        let stripes = std::array::from_fn(|_| Stripe::default());
        Box::new(Slot { stripes, closing: Mutex::new(None) })
    }

    fn fill(&self, id: u64, context: &Arc<Context>) {
        for stripe in &self.stripes {
            let entry = Entry { id, context: Arc::clone(context) };
            *stripe.write().unwrap_or_else(PoisonError::into_inner) = Some(entry);
        }
    }

    fn closing(&self) -> MutexGuard<'_, Option<Entry>> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static TABLE: [OnceLock<Box<Slot>>; SLOTS] = [const { OnceLock::new() }; SLOTS];
static FREE: Mutex<Free> = Mutex::new(Free { slots: Vec::new(), fresh: 0, uses: 0 });

struct Free {
    /// Slots of closed allocators.
    slots: Vec<usize>,
    /// First slot that was never used.
    fresh: usize,
    /// Number of allocators opened so far.
    uses: u64,
}

thread_local! {
    /// Stripe of the thread.
    static STRIPE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Returns the stripe of the calling thread.
#[inline]
fn stripe() -> usize {
    STRIPE.get().unwrap_or_else(|| {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        let own = THREADS.fetch_add(1, Ordering::Relaxed) % STRIPES;
        STRIPE.set(Some(own));
        own
    })
}

#[cold]
fn unknown(handle: vramp_allocator_t) -> Failure {
    let text = match handle.id {
        0 => "the allocator is zero: use one from vramp_open".to_owned(),
        id => format!("allocator {id:#x} is closed or was never opened: use one from vramp_open"),
    };
    Failure::new(VRAMP_ERROR_UNKNOWN_ALLOCATOR, text)
}

#[inline]
fn slot_of(handle: vramp_allocator_t) -> Option<&'static Slot> {
    TABLE[(handle.id % SLOTS as u64) as usize].get().map(|slot| &**slot)
}

/// Stores an allocator and returns its handle.
pub(crate) fn insert(context: Arc<Context>) -> Result<vramp_allocator_t> {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    let index = match free.slots.pop() {
        Some(index) => index,
        None if free.fresh < SLOTS => {
            free.fresh += 1;
            free.fresh - 1
        }
        None => {
            let text = format!("{SLOTS} allocators are open, which is the maximum: close some");
            return Err(Failure::new(VRAMP_ERROR_TOO_MANY, text));
        }
    };
    free.uses += 1;
    let id = free.uses * SLOTS as u64 + index as u64;
    TABLE[index].get_or_init(Slot::new).fill(id, &context);
    Ok(vramp_allocator_t { id })
}

/// Runs `call` on an open allocator, which stays open until `call` returns.
#[inline]
pub(crate) fn with<R>(
    handle: vramp_allocator_t,
    call: impl FnOnce(&Context) -> Result<R>,
) -> Result<R> {
    with_shared(handle, |context| call(context))
}

#[inline]
fn with_shared<R>(
    handle: vramp_allocator_t,
    call: impl FnOnce(&Arc<Context>) -> Result<R>,
) -> Result<R> {
    check_fork()?;
    let Some(slot) = slot_of(handle) else { return Err(unknown(handle)) };
    loop {
        let entry = match slot.stripes[stripe()].try_read() {
            Ok(entry) => entry,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => match served_while_closing(slot, handle)? {
                Some(context) => return call(&context),
                None => continue,
            },
        };
        return match &*entry {
            Some(entry) if entry.id == handle.id => call(&entry.context),
            _ => Err(unknown(handle)),
        };
    }
}

/// Returns an allocator that is being closed, for a call from one of its callbacks; an error for
/// any other call. `None` if the slot is not being closed: it is filled, or emptied at once, and
/// the caller looks again.
#[cold]
fn served_while_closing(slot: &Slot, handle: vramp_allocator_t) -> Result<Option<Arc<Context>>> {
    match &*slot.closing() {
        None => Ok(None),
        // The call that runs the callback holds its stripe until the nested one has returned. So
        // the closer, which waits for that stripe, finds no copy left.
        Some(entry) if entry.id == handle.id && entry.context.allocator().is_in_callback() => {
            Ok(Some(Arc::clone(&entry.context)))
        }
        Some(_) => Err(unknown(handle)),
    }
}

/// Closes an allocator. Waits for the calls in progress; inside a callback it is refused instead if
/// there are some. Of several threads that try, one succeeds. An allocator that cannot be closed
/// now stays open under its handle.
pub(crate) fn close(handle: vramp_allocator_t) -> Result<()> {
    let slot = slot_of(handle).ok_or_else(|| unknown(handle))?;
    let context = match is_in_callback() {
        true => take_at_once(slot, handle)?,
        false => take_after_calls(slot, handle)?,
    };
    let closed = Arc::into_inner(context).expect("all stripes were emptied").close();
    if let Err(CloseRefused { context: Some(context), failure }) = closed {
        slot.fill(handle.id, &Arc::new(*context));
        return Err(failure);
    }
    let index = (handle.id % SLOTS as u64) as usize;
    FREE.lock().unwrap_or_else(PoisonError::into_inner).slots.push(index);
    closed.map_err(|refused| refused.failure)
}

fn take_after_calls(slot: &Slot, handle: vramp_allocator_t) -> Result<Arc<Context>> {
    // Within a call, so that the allocator is open while its close is claimed.
    with_shared(handle, |context| {
        context.check_closable()?;
        let mut closing = slot.closing();
        if closing.is_some() {
            return Err(unknown(handle));
        }
        *closing = Some(Entry { id: handle.id, context: Arc::clone(context) });
        Ok(())
    })?;
    for stripe in &slot.stripes {
        *stripe.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
    let claimed = slot.closing().take();
    Ok(claimed.expect("only the thread that claimed the close ends it").context)
}

fn take_at_once(slot: &Slot, handle: vramp_allocator_t) -> Result<Arc<Context>> {
    with(handle, |context| {
        context.check_closable()?;
        match context.allocator().is_in_callback() {
            true => Err(busy(
                "a callback of the allocator runs on this thread: return from it, and then close \
                 the allocator",
            )),
            false => Ok(()),
        }
    })?;
    // Held until the end: calls that meet a locked stripe wait for it, and then look again.
    let closing = slot.closing();
    if closing.is_some() {
        return Err(unknown(handle));
    }
    let mut guards = Vec::with_capacity(STRIPES);
    for stripe in &slot.stripes {
        guards.push(match stripe.try_write() {
            Ok(entry) => entry,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(busy(
                    "calls are in progress on the allocator, and a callback does not wait for \
                     them: close it after the callback, or retry",
                ));
            }
        });
    }
    let mut found = None;
    for entry in &mut guards {
        found = entry.take_if(|entry| entry.id == handle.id);
    }
    found.map(|entry| entry.context).ok_or_else(|| unknown(handle))
}

fn busy(text: &str) -> Failure {
    Failure::new(VRAMP_ERROR_BUSY, text)
}
