//! Who spills how much for whom, so that no deficit is spilled twice.
//!
//! 1. A waiter asks what is missing for it: [`Queue::claim_deficit`]. What others already spill is
//!    counted as if it had come, and what they wait for as if it were taken.
//! 2. It spills in steps, and gives each step back to the ledger and to [`Queue::on_change`].
//! 3. After each step it says so: [`Queue::spilled`] tells what is left of the claim, which is
//!    less if memory came from elsewhere. At zero it stops.
//! 4. A claim ends with its waiter, or by [`Queue::end_claim`] where there was nothing left to spill.
//!    Until then the waiter is taken for one that will be served: it is part of no deadlock.

use super::{Bound, Ledger, Queue, SpaceId, UnknownWaiter, WaiterId};
use crate::Bytes;

/// A waiter's promise to spill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub space: SpaceId,
    pub left: Bytes,
}

impl Queue {
    /// What `waiter` shall spill from `space` to be served there. `None` if nothing is missing, if
    /// it spills already, or if this is no candidate of its. O(waiters).
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
        let busy = found.claim.is_some_and(|claim| !claim.left.is_zero());
        if busy || !found.waits_for(space) {
            return Ok(None);
        }
        let left = self.deficit(ledger, space, waiter);
        let claim = Some(Claim { space, left });
        self.waiters.get_mut(&waiter).ok_or(UnknownWaiter { waiter })?.claim = claim;
        Ok((!left.is_zero()).then_some(left))
    }

    /// Says that a waiter has spilled `bytes` of its claim, after the ledger got them back, and
    /// returns what is left of it. With zero bytes it only asks. O(waiters).
    ///
    /// # Errors
    /// It does not wait any more: there is nothing left to spill.
    pub fn spilled(
        &mut self,
        ledger: &Ledger,
        waiter: WaiterId,
        bytes: Bytes,
    ) -> Result<Bytes, UnknownWaiter> {
        let found = self.waiters.get(&waiter).ok_or(UnknownWaiter { waiter })?;
        let Some(Claim { space, left }) = found.claim else { return Ok(Bytes::ZERO) };
        let missing = self.deficit(ledger, space, waiter);
        let left = left.saturating_sub(bytes).min(missing);
        let claim = Some(Claim { space, left });
        self.waiters.get_mut(&waiter).ok_or(UnknownWaiter { waiter })?.claim = claim;
        Ok(left)
    }

    /// Ends a claim, kept or not: what is left of it will not come, and others may claim it.
    ///
    /// # Errors
    /// It does not wait any more.
    pub fn end_claim(&mut self, waiter: WaiterId) -> Result<(), UnknownWaiter> {
        self.waiters.get_mut(&waiter).ok_or(UnknownWaiter { waiter })?.claim = None;
        Ok(())
    }

    /// What a space lacks for this waiter and all others who spill there, beyond what those still
    /// spill.
    fn deficit(&self, ledger: &Ledger, space: SpaceId, waiter: WaiterId) -> Bytes {
        let Ok(levels) = ledger.levels(space) else { return Bytes::ZERO };
        let mut needed = 0u128;
        let mut coming = ledger.available(space, Bound::Limit).unwrap_or_default().count() as u128;
        // Above the limit, what exceeds it has to go first.
        let excess = ledger.total(space).unwrap_or_default().saturating_sub(levels.limit);
        needed += excess.count() as u128;
        for (&id, other) in &self.waiters {
            let claim = other.claim.filter(|claim| claim.space == space && id != waiter);
            if id == waiter || claim.is_some() {
                needed += levels.round_up(other.request.bytes).count() as u128;
            }
            coming += claim.map_or(0, |claim| claim.left.count() as u128);
        }
        let missing = needed.saturating_sub(coming);
        Bytes::new(u64::try_from(missing).unwrap_or(u64::MAX))
    }
}
