//! Checks of the wait queue.

use std::collections::BTreeSet;

use super::WaitQueue;
use super::wait_queue::Claim;
use vramp_core::Inconsistency;

impl WaitQueue {
    /// Checks that the order and the size index hold exactly the waiters, and that claims are of waiters
    /// or in a step. O(waiters).
    ///
    /// # Errors
    /// The first invariant that does not hold: a bug in the queue, never a caller's mistake.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let candidates = self.waiters.values().map(|waiter| waiter.request.candidates.len()).sum();
        let sizes: usize = self.sizes.values().map(BTreeSet::len).sum();
        let missing = self.waiters.iter().find(|&(&id, waiter)| {
            let indexed = |space| {
                let sizes = self.sizes.get(space);
                sizes.is_some_and(|sizes| sizes.contains(&(waiter.request.bytes, id)))
            };
            !self.order.contains(&waiter.rank(id)) || !waiter.request.candidates.iter().all(indexed)
        });
        let is_left = |id, claim: &Claim| !claim.in_step && !self.waiters.contains_key(id);
        if let Some((id, _)) = self.claims.iter().find(|(id, claim)| is_left(id, claim)) {
            return Err(Inconsistency { what: format!("{id} left the queue but not its claim") });
        }
        match missing {
            Some((id, _)) => Err(Inconsistency { what: format!("{id} is not in order and index") }),
            None if (self.order.len(), sizes) == (self.waiters.len(), candidates) => Ok(()),
            None => {
                Err(Inconsistency { what: "order or index hold an id without a waiter".into() })
            }
        }
    }
}
