//! Rounds of spilling for one waiter: which candidate comes next, and when to try again.
//!
//! 1. [`SpillRounds::begin_round`] gives the number of the attempt, or `None` if no more is tried.
//! 2. The caller has memory spilled in one candidate after the other and reports each result to
//!    [`SpillRounds::report`], which says whether the round goes on.
//! 3. [`SpillRounds::end_round`] says whether another round follows after a pause.
//! 4. [`SpillRounds::restart`] begins anew when spillers have more to free.

use vramp_core::Bytes;

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
