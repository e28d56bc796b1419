//! Who is told when a space crosses a level.
//!
//! 1. Whatever changes the books notes, behind the lock, which crossings each subscriber has not
//!    heard of.
//! 2. Once the lock is free it calls them, unless another thread is just doing so: that one then
//!    calls for the new crossing too. So every subscriber hears each crossing once, in order, and
//!    is never called by two threads at a time.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use crate::ledger::core::{Crossing, CrossingCursor, Ledger, SpaceId};

use crate::ledger::shell::shared::Shared;
use crate::sync::{Mutex, lock};

type Callback = dyn Fn(SpaceId, Crossing) + Send + Sync;

pub(crate) struct Subscriber {
    space: SpaceId,
    callback: Box<Callback>,
    inbox: Mutex<Inbox>,
}

struct Inbox {
    watch: CrossingCursor,
    news: VecDeque<Crossing>,
    /// A thread calls the callback.
    busy: bool,
    gone: bool,
}

impl Subscriber {
    pub fn new(watch: CrossingCursor, callback: Box<Callback>) -> Subscriber {
        let space = watch.space();
        let inbox = Inbox { watch, news: VecDeque::new(), busy: false, gone: false };
        Subscriber { space, callback, inbox: Mutex::new(inbox) }
    }

    /// Notes new crossings. True if there are some.
    pub fn note(&self, ledger: &Ledger) -> bool {
        let mut inbox = lock(&self.inbox);
        let Inbox { watch, news, .. } = &mut *inbox;
        news.extend(std::iter::from_fn(|| ledger.next_crossing(watch)));
        !news.is_empty()
    }

    /// Tells the subscriber what was noted.
    pub fn call(&self, shared: &Shared) {
        let mut inbox = lock(&self.inbox);
        if inbox.busy {
            return;
        }
        while let Some(crossed) = inbox.news.pop_front().filter(|_| !inbox.gone) {
            inbox.busy = true;
            drop(inbox);
            shared.contain(|| (self.callback)(self.space, crossed));
            inbox = lock(&self.inbox);
            inbox.busy = false;
        }
    }
}

/// A subscription; ends when it is dropped. A call that is under way ends by itself.
#[must_use = "the subscription ends when this is dropped"]
pub struct Subscription {
    pub(crate) shared: Weak<Shared>,
    pub(crate) subscriber: Arc<Subscriber>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        lock(&self.subscriber.inbox).gone = true;
        if let Some(shared) = self.shared.upgrade() {
            let is_it = |other: &Arc<Subscriber>| Arc::ptr_eq(other, &self.subscriber);
            shared.look().subscribers.retain(|other| !is_it(other));
        }
    }
}

/// Asks for crossings instead of being told.
pub struct PressureWatch {
    pub(crate) shared: Arc<Shared>,
    pub(crate) watch: CrossingCursor,
}

impl PressureWatch {
    /// The next crossing that was not asked for yet. Each comes once, in order. O(1).
    pub fn next_crossing(&mut self) -> Option<Crossing> {
        self.shared.look().ledger.next_crossing(&mut self.watch)
    }
}
