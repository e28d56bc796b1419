//! Panics in callbacks of the program, which are caught and counted.
//!
//! A subscriber to level crossings.
//!
//! 1. A change of the ledger records new crossings for each subscriber, while holding the lock.
//! 2. After unlocking, the thread calls the subscribers. If another thread is calling one of them,
//!    that thread also delivers the new crossing. So each subscriber gets each crossing once, in
//!    order, and from one thread at a time.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ledger::core::{Crossing, CrossingCursor, Ledger, SpaceId};
use crate::sync::{Mutex, lock};

/// Calls callbacks of the program and counts those that panicked.
#[derive(Default)]
pub(crate) struct Panics {
    count: AtomicU64,
}

impl Panics {
    /// Calls a callback of the program; `None` if it panicked, which is counted.
    pub fn catch<R>(&self, call: impl FnOnce() -> R) -> Option<R> {
        let panic = match catch_unwind(AssertUnwindSafe(call)) {
            Ok(result) => return Some(result),
            Err(panic) => panic,
        };
        self.count.fetch_add(1, Ordering::Relaxed);
        // What was thrown may panic when it is dropped.
        if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            std::mem::forget(second);
        }
        None
    }

    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

type Callback = dyn Fn(SpaceId, Crossing) + Send + Sync;

pub(crate) struct Subscriber {
    space: SpaceId,
    callback: Box<Callback>,
    inbox: Mutex<Inbox>,
}

struct Inbox {
    cursor: CrossingCursor,
    undelivered: VecDeque<Crossing>,
    /// True while a thread calls the callback.
    busy: bool,
    gone: bool,
}

impl Subscriber {
    pub fn new(cursor: CrossingCursor, callback: Box<Callback>) -> Subscriber {
        let space = cursor.space();
        let inbox = Inbox { cursor, undelivered: VecDeque::new(), busy: false, gone: false };
        Subscriber { space, callback, inbox: Mutex::new(inbox) }
    }

    /// Records new crossings. True if any is undelivered.
    pub fn record(&self, ledger: &Ledger) -> bool {
        let mut inbox = lock(&self.inbox);
        let Inbox { cursor, undelivered, .. } = &mut *inbox;
        undelivered.extend(std::iter::from_fn(|| ledger.next_crossing(cursor)));
        !undelivered.is_empty()
    }

    /// Delivers the recorded crossings.
    pub fn call(&self, panics: &Panics) {
        let mut inbox = lock(&self.inbox);
        if inbox.busy {
            return;
        }
        while let Some(crossed) = inbox.undelivered.pop_front().filter(|_| !inbox.gone) {
            inbox.busy = true;
            drop(inbox);
            panics.catch(|| (self.callback)(self.space, crossed));
            inbox = lock(&self.inbox);
            inbox.busy = false;
        }
    }
    /// Ends the delivery. A call in progress ends by itself.
    pub fn end(&self) {
        lock(&self.inbox).gone = true;
    }
}
