//! A record for each thread that calls (`gate.rs`).
//!
//! 1. The first call of a thread takes a record that an ended thread left, or makes one.
//! 2. When the thread ends, its record is free. Calls after that, from destructors of the thread's
//!    storage, have none.
//!
//! A function of the caller that moves of contents wait for runs [`InStore`]: calls with an allocator are
//! refused there. The thread has no record meanwhile, so that other calls need not look.
//!
//! There are as many records as threads with calls ever existed at the same time. They are never
//! returned to the system.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::gate::Record;
use crate::status::{Failure, Kind, Result};

type ThreadRecord = &'static Record;

struct Records {
    all: Vec<ThreadRecord>,
    free: Vec<ThreadRecord>,
}

static RECORDS: Mutex<Records> = Mutex::new(Records { all: Vec::new(), free: Vec::new() });

fn lock() -> MutexGuard<'static, Records> {
    RECORDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The record of a thread, until the thread ends.
struct Owned(ThreadRecord);

impl Owned {
    fn take() -> Owned {
        let mut records = lock();
        if let Some(record) = records.free.pop() {
            return Owned(record);
        }
        let record = &*Box::leak(Box::new(Record::new()));
        records.all.push(record);
        // So that a thread that ends needs no memory.
        let missing = records.all.len() - records.free.len();
        records.free.reserve(missing);
        Owned(record)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        OWN.set(None);
        lock().free.push(self.0);
    }
}

thread_local! {
    /// Without a destructor, so that looking needs no check. `None` before the first call and while
    /// the thread ends.
    static OWN: Cell<Option<ThreadRecord>> = const { Cell::new(None) };
    static OWNED: Owned = Owned::take();
    /// True while the thread runs a function of a store. It has no destructor.
    static IN_STORE: Cell<bool> = const { Cell::new(false) };
}

/// Refuses calls with an allocator on this thread until it is dropped.
pub(crate) struct InStore {
    record: Option<ThreadRecord>,
    was_in_store: bool,
}

impl InStore {
    pub fn enter() -> InStore {
        InStore { record: OWN.replace(None), was_in_store: IN_STORE.replace(true) }
    }
}

impl Drop for InStore {
    fn drop(&mut self) {
        IN_STORE.set(self.was_in_store);
        OWN.set(self.record);
    }
}

/// Returns an error on a thread that runs a function of a store. Asked where there is no
/// [`idle_record`].
#[cold]
pub(crate) fn check_not_in_store() -> Result<()> {
    if !IN_STORE.get() {
        return Ok(());
    }
    let text = "a function of a store runs on this thread, and calls may wait for it: return from it, and \
                call then or on another thread";
    Err(Failure::new(Kind::Busy, text))
}

/// Returns the record of the calling thread. `None` inside a call, in a function of a store, and while
/// the thread ends.
#[inline]
pub(crate) fn idle_record() -> Option<ThreadRecord> {
    let record = match OWN.get() {
        Some(record) => record,
        None => take()?,
    };
    (!record.is_busy()).then_some(record)
}

#[cold]
fn take() -> Option<ThreadRecord> {
    if IN_STORE.get() {
        return None;
    }
    let record = OWNED.try_with(|owned| owned.0).ok()?;
    OWN.set(Some(record));
    Some(record)
}

/// Returns the records of all threads.
pub(crate) fn records() -> Vec<ThreadRecord> {
    lock().all.clone()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn threads_that_end_leave_their_records_to_later_ones() {
        for _ in 0..1000 {
            thread::spawn(|| assert!(idle_record().is_some())).join().unwrap();
        }
        // Other tests run beside this one.
        assert!(records().len() < 100, "{}", records().len());
    }
}
