//! One waiter's attempts to have missing bytes spilled. The core decides: what is claimed, which
//! candidate comes next, and whether another round follows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ledger::core::{Candidates, SpaceId, SpillResult, SpillRounds, WaiterId};

use super::{SpillRequest, call, is_spilling};
use crate::ledger::shell::shared::Shared;

/// One waiter's attempts to have missing bytes spilled.
pub(crate) struct SpillAttempts {
    shared: Arc<Shared>,
    waiter: WaiterId,
    candidates: Candidates,
    deadline: Option<Instant>,
    rounds: SpillRounds,
    /// The waiter may have a claim in the queue.
    may_claim: bool,
}

impl Drop for SpillAttempts {
    fn drop(&mut self) {
        self.end();
    }
}

impl SpillAttempts {
    pub fn new(
        shared: &Arc<Shared>,
        waiter: WaiterId,
        candidates: &Candidates,
        deadline: Option<Instant>,
    ) -> SpillAttempts {
        let rounds = SpillRounds::new(shared.spill_retries.max_retries);
        // The request may have a claim from the start of its wait.
        let (shared, candidates) = (Arc::clone(shared), candidates.clone());
        SpillAttempts { shared, waiter, candidates, deadline, rounds, may_claim: true }
    }

    /// Begins anew: there may be more to spill than before.
    pub fn restart(&mut self) {
        self.rounds.restart();
    }

    /// True if nothing more is tried.
    pub fn are_over(&self) -> bool {
        self.rounds.is_over()
    }

    /// Calls the spillers of each candidate once. Returns the pause before the next round; `None`
    /// if the attempts are over.
    pub fn try_candidates(&mut self) -> Option<Duration> {
        let attempt = self.rounds.begin_round()?;
        for place in 0..self.candidates.len() {
            let space = self.candidates[place];
            let result = self.spill_from(space, attempt);
            if !self.rounds.report(result) {
                break;
            }
        }
        if self.rounds.is_over() {
            return None;
        }
        let retry = self.rounds.end_round();
        if retry.is_none() {
            self.end();
        }
        retry.map(|number| self.shared.spill_retries.pause(number))
    }

    /// Ends the attempts and the claim: from now on the request only waits.
    pub fn end(&mut self) {
        self.rounds.stop();
        if std::mem::take(&mut self.may_claim) {
            self.shared.update(|state| state.queue.end_claim(self.waiter));
        }
    }

    fn spill_from(&mut self, space: SpaceId, attempt: u32) -> SpillResult {
        let waiter = self.waiter;
        if is_spilling(&self.shared, space) {
            return SpillResult::NoSpiller;
        }
        self.may_claim = true;
        let shared = &self.shared;
        let (spillers, claimed) = shared.update(|state| {
            let spillers = state.spillers_of(space);
            let claimed = match spillers.is_empty() {
                true => Ok(None),
                false => state.queue.renew_claim(&state.ledger, space, waiter),
            };
            (spillers, claimed)
        });
        let mut left = match claimed {
            Err(_) => return SpillResult::WaitOver,
            Ok(None) if spillers.is_empty() => return SpillResult::NoSpiller,
            Ok(None) => return SpillResult::Covered,
            Ok(Some(left)) => left,
        };
        let claimed = || {
            let state = shared.read();
            // Nothing is missing for a waiter that has left the queue.
            state.queue.claim_left(&state.ledger, waiter).unwrap_or_default()
        };
        for (place, registered) in spillers.iter().enumerate() {
            let request = SpillRequest { space, bytes: left, attempt, left: Some(&claimed) };
            let freed = call(shared, registered, &request);
            let passed = self.deadline.is_some_and(|deadline| deadline <= Instant::now());
            let is_last = place + 1 == spillers.len();
            let (rest, result) = shared.update(|state| {
                let rest = state.queue.record_spilled(&state.ledger, waiter, left, freed).ok();
                let result = SpillResult::after_call(rest, passed);
                if is_last || result.is_some() {
                    state.queue.end_step(waiter);
                }
                (rest, result)
            });
            if let Some(result) = result {
                return result;
            }
            left = rest.unwrap_or_default();
        }
        SpillResult::Short
    }
}
