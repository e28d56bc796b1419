//! A subscriber to level crossings.
//!
//! 1. A change of the ledger records new crossings for each subscriber, while holding the lock.
//! 2. After unlocking, the thread calls the subscribers. If another thread is calling one of them,
//!    that thread also delivers the new crossing. So each subscriber gets each crossing once, in
//!    order, and from one thread at a time.

use std::collections::VecDeque;

use crate::ledger::core::{Crossing, CrossingCursor, Ledger, SpaceId};

use crate::ledger::shell::panics::Panics;
use crate::sync::{Mutex, lock};

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
