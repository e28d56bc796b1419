//! Subscriptions to level crossings, and watches that poll for them.

use std::sync::{Arc, Weak};

use crate::ledger::core::{Crossing, CrossingCursor};

use crate::ledger::shell::panics::Subscriber;
use crate::ledger::shell::shared::Shared;

/// Subscription to level crossings; ends when it is dropped. A call in progress ends by itself.
#[must_use = "the subscription ends when this is dropped"]
pub struct Subscription {
    pub(crate) shared: Weak<Shared>,
    pub(crate) subscriber: Arc<Subscriber>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.subscriber.end();
        if let Some(shared) = self.shared.upgrade() {
            let is_it = |other: &Arc<Subscriber>| Arc::ptr_eq(other, &self.subscriber);
            shared.read().subscribers.retain(|other| !is_it(other));
        }
    }
}

/// Polls for level crossings, without a callback.
pub struct PressureWatch {
    pub(crate) shared: Arc<Shared>,
    pub(crate) cursor: CrossingCursor,
}

impl PressureWatch {
    /// Returns the next crossing, each once and in order. O(1).
    pub fn next_crossing(&mut self) -> Option<Crossing> {
        self.shared.read().ledger.next_crossing(&mut self.cursor)
    }
}
