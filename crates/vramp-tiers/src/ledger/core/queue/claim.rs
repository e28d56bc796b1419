//! Claims on a deficit, so that no two waiters have the same deficit spilled.
//!
//! 1. [`WaitQueue::claim_deficit`] returns what a waiter lacks in a space. Bytes that other
//!    waiters have claimed count as available, and the bytes these waiters ask for as taken.
//! 2. The waiter has memory spilled in steps. Each step returns memory to the ledger and calls
//!    [`WaitQueue::serve_waiters`].
//! 3. [`WaitQueue::record_spilled`] follows each step and returns the rest of the claim. The rest
//!    also shrinks when memory comes back from elsewhere. At zero the waiter stops.
//! 4. [`WaitQueue::end_step`] follows the last step of a round, and [`WaitQueue::end_claim`] ends the
//!    claim. A waiter that leaves the queue during a step keeps its claim until the step is over: other
//!    waiters count on these bytes. One that leaves between two steps has no claim any more: no
//!    thread spills for it, and its task may never be polled again.
//!
//! A waiter with a claim is taken for one that will be served: it is part of no deadlock.
//!
//! Rounds of spilling for one waiter: which candidate comes next, and when to try again.
//!
//! 1. [`SpillRounds::begin_round`] gives the number of the attempt, or `None` if no more is tried.
//! 2. The caller has memory spilled in one candidate after the other and reports each result to
//!    [`SpillRounds::report`], which says whether the round goes on.
//! 3. [`SpillRounds::end_round`] says whether another round follows after a pause.
//! 4. [`SpillRounds::restart`] begins anew when spillers have more to free.

use super::wait_queue::{Claim, fitting};
use super::{UnknownWaiter, WaitQueue, WaiterId};
use crate::ledger::core::{Bound, Candidates, Ledger, SpaceId};
use vramp_core::Bytes;

impl WaitQueue {
    /// Claims the bytes that `waiter` lacks in `space`, for a step. `None` if nothing is missing, if it has an
    /// unfinished claim, or if it does not wait for this space. O(claims).
    ///
    /// # Errors
    /// The waiter is not in the queue.
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
        let in_step = !left.is_zero();
        self.claims.insert(waiter, Claim { space, left, in_step });
        Ok(in_step.then_some(left))
    }

    /// Ends the waiter's claim and claims what it lacks in `space` now, as
    /// [`claim_deficit`](WaitQueue::claim_deficit) does.
    ///
    /// # Errors
    /// The waiter is not in the queue.
    pub fn renew_claim(
        &mut self,
        ledger: &Ledger,
        space: SpaceId,
        waiter: WaiterId,
    ) -> Result<Option<Bytes>, UnknownWaiter> {
        self.end_claim(waiter);
        self.claim_deficit(ledger, space, waiter)
    }

    /// Claims what a new waiter lacks in the first of `candidates` that has a spiller. Returns
    /// false if none has one, or if only the order keeps a waiter whose owner [holds](super::Request::held) bytes:
    /// then no memory will be spilled for it. No step begins.
    pub fn claim_first_spillable(
        &mut self,
        ledger: &Ledger,
        waiter: WaiterId,
        candidates: &Candidates,
        has_spiller: impl Fn(SpaceId) -> bool,
    ) -> bool {
        let request = self.waiters.get(&waiter).map(|waiter| &waiter.request);
        let only_order = request.is_some_and(|request| {
            !request.held.is_zero() && fitting(ledger, request, |_| true).is_some()
        });
        let space = candidates.iter().find(|&&space| has_spiller(space));
        let Some(&space) = space.filter(|_| !only_order) else {
            return false;
        };
        let claimed = self.claim_deficit(ledger, space, waiter).is_ok();
        self.end_step(waiter);
        claimed
    }

    /// Returns the rest of a claim at this moment; zero without a claim. O(claims).
    ///
    /// # Errors
    /// The waiter is not in the queue: nothing is missing any more.
    pub fn claim_left(&self, ledger: &Ledger, waiter: WaiterId) -> Result<Bytes, UnknownWaiter> {
        if !self.waiters.contains_key(&waiter) {
            return Err(UnknownWaiter { waiter });
        }
        let Some(&Claim { space, left, .. }) = self.claims.get(&waiter) else {
            return Ok(Bytes::ZERO);
        };
        Ok(left.min(self.deficit(ledger, space, waiter)))
    }

    /// Records that a spiller freed `freed` bytes for a claim of which `before` were left when it
    /// was called, after the ledger got the bytes back. Returns the rest of the claim. O(claims).
    ///
    /// Bytes that came back reduce the deficit by themselves unless another request took them. In
    /// that case they still count as spilled: the next attempt claims what is missing then.
    ///
    /// # Errors
    /// The waiter is not in the queue: its claim has ended.
    pub fn record_spilled(
        &mut self,
        ledger: &Ledger,
        waiter: WaiterId,
        before: Bytes,
        freed: Bytes,
    ) -> Result<Bytes, UnknownWaiter> {
        let now = self.claim_left(ledger, waiter).unwrap_or_default();
        let taken_by_others = freed.saturating_sub(before.saturating_sub(now));
        self.reduce_claim(ledger, waiter, taken_by_others)
    }

    /// Takes `bytes` off a claim and returns its rest. O(claims).
    ///
    /// # Errors
    /// The waiter is not in the queue: its claim has ended.
    pub fn reduce_claim(
        &mut self,
        ledger: &Ledger,
        waiter: WaiterId,
        bytes: Bytes,
    ) -> Result<Bytes, UnknownWaiter> {
        if !self.waiters.contains_key(&waiter) {
            self.end_claim(waiter);
            return Err(UnknownWaiter { waiter });
        }
        let Some(&claim) = self.claims.get(&waiter) else {
            return Ok(Bytes::ZERO);
        };
        let missing = self.deficit(ledger, claim.space, waiter);
        let left = claim.left.saturating_sub(bytes).min(missing);
        self.claims.insert(waiter, Claim { left, ..claim });
        Ok(left)
    }

    /// Ends a step of a waiter. What is left of its claim stays while it waits, for the next round.
    pub fn end_step(&mut self, waiter: WaiterId) {
        if let Some(claim) = self.claims.get_mut(&waiter) {
            claim.in_step = false;
        }
        self.drop_idle_claim(waiter);
    }

    /// Ends the claim of a waiter that has left the queue, unless it is in a step.
    pub(super) fn drop_idle_claim(&mut self, waiter: WaiterId) {
        if !self.waiters.contains_key(&waiter)
            && self.claims.get(&waiter).is_some_and(|claim| !claim.in_step)
        {
            self.end_claim(waiter);
        }
    }

    /// Ends a claim, finished or not: other waiters may claim the rest.
    pub fn end_claim(&mut self, waiter: WaiterId) {
        self.claims.remove(&waiter);
    }

    /// Bytes that `space` lacks for this waiter and for all waiters with a claim there, beyond what
    /// is already claimed.
    fn deficit(&self, ledger: &Ledger, space: SpaceId, waiter: WaiterId) -> Bytes {
        let Ok(levels) = ledger.levels(space) else { return Bytes::ZERO };
        let mut needed = 0u128;
        let mut coming = ledger.available(space, Bound::Limit).unwrap_or_default().count() as u128;
        // The total has to fall to the limit first.
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

/// What spilling in one candidate space came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpillResult {
    /// The space has no spiller that this waiter may call.
    NoSpiller,
    /// Nothing is missing any more, or other waiters have claimed all that is.
    Covered,
    /// Bytes are still missing after all spillers were called.
    Short,
    /// The waiter is out of the queue, or its deadline has passed.
    WaitOver,
}

impl SpillResult {
    /// Result of one call of a spiller that left `left` bytes of the claim. `None` to call the
    /// next spiller.
    pub fn after_call(left: Option<Bytes>, deadline_passed: bool) -> Option<SpillResult> {
        match left {
            None => Some(SpillResult::WaitOver),
            Some(Bytes::ZERO) => Some(SpillResult::Covered),
            Some(_) if deadline_passed => Some(SpillResult::WaitOver),
            Some(_) => None,
        }
    }
}

/// Rounds of spilling for one waiter.
#[derive(Clone, Debug)]
pub struct SpillRounds {
    max_retries: u32,
    attempt: u32,
    called: bool,
    over: bool,
}

impl SpillRounds {
    /// Rounds of which the first may be followed by `max_retries` more.
    pub fn new(max_retries: u32) -> SpillRounds {
        SpillRounds { max_retries, attempt: 0, called: false, over: false }
    }

    /// True if no round follows, unless [`restart`](SpillRounds::restart) is called.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Begins a round and returns its number, from 1. `None` if the rounds are over.
    pub fn begin_round(&mut self) -> Option<u32> {
        if self.over {
            return None;
        }
        self.attempt += 1;
        self.called = false;
        Some(self.attempt)
    }

    /// Takes the result in one candidate. Returns true if the round goes on with the next one.
    pub fn report(&mut self, result: SpillResult) -> bool {
        match result {
            SpillResult::NoSpiller => true,
            SpillResult::Short => {
                self.called = true;
                true
            }
            SpillResult::Covered => {
                self.called = true;
                false
            }
            SpillResult::WaitOver => {
                self.over = true;
                false
            }
        }
    }

    /// Ends a round. Returns the number of the retry that follows after a pause; `None` if the
    /// rounds are over, because no candidate has a spiller or this was the last round.
    pub fn end_round(&mut self) -> Option<u32> {
        if !self.over && self.called && self.attempt <= self.max_retries {
            return Some(self.attempt);
        }
        self.over = true;
        None
    }

    /// Begins anew, with all retries.
    pub fn restart(&mut self) {
        self.attempt = 0;
        self.over = false;
    }

    /// Ends the rounds.
    pub fn stop(&mut self) {
        self.over = true;
    }
}
