//! Looks up allocators by id.
//!
//! An id combines a slot with a use count, so the id of a closed allocator stays unknown for ever.
//! A slot consists of several stripes with equal contents, each with its own lock. A call holds the
//! read lock of its thread's stripe, so that threads rarely share a cache line. Closing empties one
//! stripe after the other, and so waits for the calls in progress.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use crossbeam_utils::CachePadded;

use crate::abi::vramp_allocator_t;
use crate::abi::vramp_status_t::*;
use crate::context::Context;
use crate::status::{Failure, Result};

/// Maximum number of open allocators.
const SLOTS: usize = 256;
/// Stripes per slot. Threads beyond this number share stripes.
const STRIPES: usize = 32;

struct Entry {
    id: u64,
    context: Arc<Context>,
}

type Stripe = CachePadded<RwLock<Option<Entry>>>;
type Slot = [Stripe; STRIPES];

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
    let slot = TABLE[index].get_or_init(|| Box::new(std::array::from_fn(|_| Stripe::default())));
    for stripe in slot.iter() {
        let entry = Entry { id, context: Arc::clone(&context) };
        *stripe.write().unwrap_or_else(PoisonError::into_inner) = Some(entry);
    }
    Ok(vramp_allocator_t { id })
}

/// Runs `call` on an open allocator, which stays open until `call` returns.
#[inline]
pub(crate) fn with<R>(
    handle: vramp_allocator_t,
    call: impl FnOnce(&Context) -> Result<R>,
) -> Result<R> {
    let Some(slot) = slot_of(handle) else { return Err(unknown(handle)) };
    let entry = slot[stripe()].read().unwrap_or_else(PoisonError::into_inner);
    match &*entry {
        Some(entry) if entry.id == handle.id => call(&entry.context),
        _ => Err(unknown(handle)),
    }
}

/// Removes an allocator after all calls in progress. Of several threads that try, the one that
/// empties the first stripe succeeds.
pub(crate) fn remove(handle: vramp_allocator_t) -> Result<Context> {
    with(handle, Context::check_closable)?;
    let mut first = None;
    for stripe in slot_of(handle).into_iter().flatten() {
        let mut entry = stripe.write().unwrap_or_else(PoisonError::into_inner);
        let found = entry.take_if(|entry| entry.id == handle.id).ok_or_else(|| unknown(handle))?;
        first.get_or_insert(found.context);
    }
    let context = first.ok_or_else(|| unknown(handle))?;
    let index = (handle.id % SLOTS as u64) as usize;
    FREE.lock().unwrap_or_else(PoisonError::into_inner).slots.push(index);
    Ok(Arc::into_inner(context).expect("all stripes were emptied"))
}
