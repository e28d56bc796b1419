//! Checks of the wait queue.

use super::WaitQueue;
use vramp_core::Inconsistency;

impl WaitQueue {
    /// Checks that order and index hold exactly those who wait. O(waiters).
    ///
    /// # Errors
    /// One that does not hold: a bug in the queue, never a user's mistake.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let places = self.waiters.values().map(|waiter| waiter.request.candidates.len()).sum();
        let sizes: usize = self.sizes.values().map(std::collections::BTreeSet::len).sum();
        let missing = self.waiters.iter().find(|&(&id, waiter)| {
            let indexed = |space| {
                let sizes = self.sizes.get(space);
                sizes.is_some_and(|sizes| sizes.contains(&(waiter.request.bytes, id)))
            };
            !self.order.contains(&waiter.rank(id)) || !waiter.request.candidates.iter().all(indexed)
        });
        match missing {
            Some((id, _)) => Err(Inconsistency { what: format!("{id} is not in order and index") }),
            None if (self.order.len(), sizes) == (self.waiters.len(), places) => Ok(()),
            None => Err(Inconsistency { what: "order or index hold one who does not wait".into() }),
        }
    }
}
