//! Allocators by number, for callers who hold no Rust values.
//!
//! A number is a slot and how often the slot was used, so that one of a closed allocator misses
//! for ever. A call holds its slot's lock for reading, which threads do not share a cache line for;
//! closing takes it for writing, and so waits for the calls under way.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crossbeam_utils::sync::ShardedLock;

use crate::abi::vramp_allocator_t;
use crate::abi::vramp_status_t::*;
use crate::context::Context;
use crate::status::{Failure, Result};

/// So many allocators can be open at the same time.
const SLOTS: usize = 256;

struct Entry {
    id: u64,
    context: Arc<Context>,
}

type Slot = ShardedLock<Option<Entry>>;

static TABLE: [OnceLock<Slot>; SLOTS] = [const { OnceLock::new() }; SLOTS];
static FREE: Mutex<Free> = Mutex::new(Free { slots: Vec::new(), fresh: 0, uses: 0 });

struct Free {
    /// Slots that were used and are empty.
    slots: Vec<usize>,
    /// Slots from here on were never used.
    fresh: usize,
    /// Allocators opened so far.
    uses: u64,
}

fn unknown(handle: vramp_allocator_t) -> Failure {
    let text = match handle.id {
        0 => "no allocator was given: use one that vramp_open returned".to_owned(),
        id => format!("allocator {id:#x} is closed or was never opened: use one from vramp_open"),
    };
    Failure::new(VRAMP_ERROR_UNKNOWN_ALLOCATOR, text)
}

fn slot_of(handle: vramp_allocator_t) -> Option<(&'static Slot, usize)> {
    let index = (handle.id % SLOTS as u64) as usize;
    Some((TABLE[index].get()?, index))
}

/// Keeps an allocator until it is closed.
pub(crate) fn insert(context: Arc<Context>) -> Result<vramp_allocator_t> {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    let index = match free.slots.pop() {
        Some(index) => index,
        None if free.fresh < SLOTS => {
            free.fresh += 1;
            free.fresh - 1
        }
        None => {
            let text = format!("{SLOTS} allocators are open, which is the most: close some");
            return Err(Failure::new(VRAMP_ERROR_TOO_MANY, text));
        }
    };
    free.uses += 1;
    let id = free.uses * SLOTS as u64 + index as u64;
    let slot = TABLE[index].get_or_init(|| ShardedLock::new(None));
    *slot.write().unwrap_or_else(PoisonError::into_inner) = Some(Entry { id, context });
    Ok(vramp_allocator_t { id })
}

/// Makes a call on an open allocator, which stays open until the call is over.
#[inline]
pub(crate) fn with<R>(
    handle: vramp_allocator_t,
    call: impl FnOnce(&Context) -> Result<R>,
) -> Result<R> {
    let (slot, _) = slot_of(handle).ok_or_else(|| unknown(handle))?;
    let entry = slot.read().unwrap_or_else(PoisonError::into_inner);
    match &*entry {
        Some(entry) if entry.id == handle.id => call(&entry.context),
        _ => Err(unknown(handle)),
    }
}

/// Takes an allocator out, once no call uses it any more.
pub(crate) fn remove(handle: vramp_allocator_t) -> Result<Context> {
    let (slot, index) = slot_of(handle).ok_or_else(|| unknown(handle))?;
    let mut entry = slot.write().unwrap_or_else(PoisonError::into_inner);
    let found = entry.take_if(|entry| entry.id == handle.id).ok_or_else(|| unknown(handle))?;
    match Arc::try_unwrap(found.context) {
        Ok(context) => {
            drop(entry);
            FREE.lock().unwrap_or_else(PoisonError::into_inner).slots.push(index);
            Ok(context)
        }
        Err(context) => {
            *entry = Some(Entry { id: found.id, context });
            let text = "the allocator serves PyTorch, which uses it until the process ends: \
                        leave it open";
            Err(Failure::new(VRAMP_ERROR_IN_USE, text))
        }
    }
}
