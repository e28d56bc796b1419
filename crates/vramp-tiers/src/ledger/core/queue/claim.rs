//! Who spills how much for whom, so that no deficit is spilled twice.
//!
//! 1. A waiter asks what is missing for it: [`WaitQueue::claim_deficit`]. What others already spill is
//!    counted as if it had come, and what they wait for as if it were taken.
//! 2. It spills in steps, and gives each step back to the ledger and to [`WaitQueue::serve_waiters`].
//! 3. After each step it says so: [`WaitQueue::spilled`] tells what is left of the claim, which is
//!    less if memory came from elsewhere. At zero it stops.
//! 4. It ends its claim: [`WaitQueue::end_claim`]. Not before: one that is served in the midst of a step
//!    still brings what it is spilling, for those who count on it.
//!
//! Until then a waiter is taken for one that will be served: it is part of no deadlock.

use super::{UnknownWaiter, WaitQueue, WaiterId};
use crate::ledger::core::{Bound, Ledger, SpaceId};
use vramp_core::Bytes;

/// A waiter's promise to spill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub space: SpaceId,
    pub left: Bytes,
}

impl WaitQueue {
    /// What `waiter` shall spill from `space` to be served there. `None` if nothing is missing, if
    /// it spills already, or if this is no candidate of its. O(claims).
    ///
    /// # Errors
    /// It does not wait.
    pub fn claim_deficit(
        &mut self,
        ledger: &Ledger,
        space: SpaceId,
        waiter: WaiterId,
    ) -> Result<Option<Bytes>, UnknownWaiter> {
        let found = self.waiters.get(&waiter).ok_or(UnknownWaiter { waiter })?;
        let busy = self.claims.get(&waiter).is_some_and(|claim| !claim.left.is_zero());
        if busy || !found.waits_for(space) {
            return Ok(None);
        }
        let left = self.deficit(ledger, space, waiter);
        self.claims.insert(waiter, Claim { space, left });
        Ok((!left.is_zero()).then_some(left))
    }

    /// What is left of a claim at this moment. Zero without one. O(claims).
    ///
    /// # Errors
    /// It does not wait any more: nothing is missing for it.
    pub fn left_of_claim(&self, ledger: &Ledger, waiter: WaiterId) -> Result<Bytes, UnknownWaiter> {
        if !self.waiters.contains_key(&waiter) {
            return Err(UnknownWaiter { waiter });
        }
        let Some(&Claim { space, left }) = self.claims.get(&waiter) else {
            return Ok(Bytes::ZERO);
        };
        Ok(left.min(self.deficit(ledger, space, waiter)))
    }

    /// Says that a waiter has spilled `bytes` of its claim, after the ledger got them back, and
    /// returns what is left of it. O(claims).
    ///
    /// # Errors
    /// It does not wait any more: there is nothing left to spill, and its claim has ended.
    pub fn spilled(
        &mut self,
        ledger: &Ledger,
        waiter: WaiterId,
        bytes: Bytes,
    ) -> Result<Bytes, UnknownWaiter> {
        if !self.waiters.contains_key(&waiter) {
            self.end_claim(waiter);
            return Err(UnknownWaiter { waiter });
        }
        let Some(&Claim { space, left }) = self.claims.get(&waiter) else {
            return Ok(Bytes::ZERO);
        };
        let left = left.saturating_sub(bytes).min(self.deficit(ledger, space, waiter));
        self.claims.insert(waiter, Claim { space, left });
        Ok(left)
    }

    /// Ends a claim, kept or not: what is left of it will not come, and others may claim it.
    pub fn end_claim(&mut self, waiter: WaiterId) {
        self.claims.remove(&waiter);
    }

    /// What a space lacks for this waiter and all others who wait and spill there, beyond what those
    /// still spill, and those who were served in the midst of it.
    fn deficit(&self, ledger: &Ledger, space: SpaceId, waiter: WaiterId) -> Bytes {
        let Ok(levels) = ledger.levels(space) else { return Bytes::ZERO };
        let mut needed = 0u128;
        let mut coming = ledger.available(space, Bound::Limit).unwrap_or_default().count() as u128;
        // Above the limit, what exceeds it has to go first.
        let excess = ledger.total(space).unwrap_or_default().saturating_sub(levels.limit);
        needed += excess.count() as u128;
        let need = |id| self.waiters.get(&id).map(|other| other.request.bytes);
        let mut need_also = |bytes| needed += levels.round_up(bytes).count() as u128;
        need(waiter).into_iter().for_each(&mut need_also);
        for (&id, claim) in &self.claims {
            if claim.space == space && id != waiter {
                need(id).into_iter().for_each(&mut need_also);
                coming += claim.left.count() as u128;
            }
        }
        let missing = needed.saturating_sub(coming);
        Bytes::new(u64::try_from(missing).unwrap_or(u64::MAX))
    }
}
