//! How a member waits for pages.
//!
//! 1. A claim that fits, with no other member before it, is granted at once.
//! 2. Otherwise the member publishes what it wants and since when, and looks again after each ring of
//!    its bell. It publishes before it looks, and a member that gives back does so before it looks for
//!    tickets: one of the two sees the other.
//! 3. The first in the order requests pages from the others, one after the other.
//! 4. A claim that only pending pages keep out is tried again after a millisecond. Pages that are pending
//!    in the same word for [`CANCEL_MS`] are taken away: their process was stopped.
//! 5. A bell that does not ring is no reason to wait for ever: a waiting member looks every
//!    [`BEAT_MS`] milliseconds, which is its sign of life, and asks the kernel whether those that are in
//!    its way have ended. No member polls while none waits.

use std::time::{Duration, Instant};

use super::clock::{now_ms, now_ns};
use super::core::claim::Refusal;
use super::core::order::{
    ANSWER_MS, BEAT_MS, Rank, Target, View, first_waiting, is_behind, next_target,
};
use super::core::word::{Ask, MAX_PAGES, PAGE, Word};
use super::error::{ClaimError, Shortfall};
use super::gate::left_of;
use super::inner::Inner;
use super::ledger::{Bell, Field};
use super::status;

/// Pages that are pending in the same word for so long are taken away.
const CANCEL_MS: u64 = 4;
/// The first pause between two rounds of requests, which doubles up to the last.
const PAUSES_MS: (u64, u64) = (20, 500);

/// A published wait. Dropping it ends it and wakes the next.
struct Ticket<'a> {
    inner: &'a Inner,
    rank: Rank,
}

impl<'a> Ticket<'a> {
    fn publish(inner: &'a Inner, pages: u64) -> Ticket<'a> {
        let slot = inner.seat.slot;
        let ticket = now_ns();
        inner.ledger.set(slot, Field::Wants, pages);
        inner.ledger.set(slot, Field::Beat, now_ms());
        inner.ledger.set(slot, Field::Ticket, ticket);
        Ticket { inner, rank: rank(inner, ticket) }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.inner.ledger.set(self.inner.seat.slot, Field::Ticket, 0);
        self.inner.ring_waiting();
    }
}

fn rank(inner: &Inner, ticket: u64) -> Rank {
    let slot = inner.seat.slot;
    let priority = std::cmp::Reverse(inner.ledger.get(slot, Field::Priority));
    Rank { priority, ticket, slot }
}

/// Requests to the others, in rounds.
#[derive(Debug, Default)]
struct Round {
    asked: Vec<Target>,
    /// The request that is not answered yet: the slot, the answers before, and since when.
    current: Option<(usize, u64, u64)>,
    pause_ms: u64,
    next_ms: Option<u64>,
}

impl Round {
    /// Makes the next request if the last one was answered, or was not for too long. Returns how long to
    /// wait for the answer.
    fn proceed(&mut self, inner: &Inner, views: &[View], pages: u64, now: u64) -> u64 {
        let ledger = &inner.ledger;
        if let Some((slot, answers, since)) = self.current {
            let waited = now.saturating_sub(since);
            if ledger.get(slot, Field::Answers) == answers && waited < ANSWER_MS {
                return ANSWER_MS - waited;
            }
            self.current = None;
        }
        if let Some(next_ms) = self.next_ms {
            if now < next_ms {
                return next_ms - now;
            }
            self.next_ms = None;
            self.asked.clear();
        }
        let Some(target) = next_target(views, inner.wanted(pages), &self.asked, now) else {
            self.pause_ms = (2 * self.pause_ms).clamp(PAUSES_MS.0, PAUSES_MS.1);
            self.next_ms = Some(now + self.pause_ms);
            return self.pause_ms;
        };
        self.asked.push(target);
        self.current = Some((target.slot, ledger.get(target.slot, Field::Answers), now));
        let ask = Ask { pages: target.pages, may_lose: target.may_lose, since_ms: now };
        loop {
            let before = ledger.get(target.slot, Field::Ask);
            let both = ask.and(Ask::unpack(before)).pack();
            if ledger.exchange(target.slot, Field::Ask, before, both) {
                break;
            }
        }
        ledger.ring(target.slot, Bell::Serve);
        ANSWER_MS
    }
}

/// Pending pages of others that kept a claim out, since when.
#[derive(Debug, Default)]
struct Contested(Vec<(usize, Word, u64)>);

impl Contested {
    fn note(&mut self, inner: &Inner, seen: &[(usize, Word)], now: u64) {
        self.0.retain(|(slot, word, _)| seen.contains(&(*slot, *word)));
        for (slot, word) in seen {
            match self.0.iter().find(|(known, ..)| known == slot) {
                Some((.., since)) if now.saturating_sub(*since) >= CANCEL_MS => {
                    inner.ledger.exchange_word(*slot, *word, word.next(word.claimed, 0));
                }
                Some(_) => {}
                None => self.0.push((*slot, *word, now)),
            }
        }
    }
}

impl Inner {
    /// Claims pages, and waits for them while `go_on` returns true, which each look calls.
    pub fn acquire(
        &self,
        pages: u64,
        timeout: Duration,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<(), ClaimError> {
        self.check_fork()?;
        if pages == 0 {
            return Ok(());
        }
        self.check_limit(pages)?;
        let is_guaranteed = self.claimed().saturating_add(pages) <= self.guaranteed();
        let now = Rank { ticket: u64::MAX, ..rank(self, 0) };
        let waits = !is_guaranteed && is_behind(&self.ledger.views(), now, now_ms());
        if !waits {
            match self.attempt(pages) {
                Ok(()) => return Ok(()),
                Err(Refusal::Limit { .. }) => return self.check_limit(pages),
                // Others may have been kept out by what was pending.
                Err(Refusal::Short { .. }) => self.ring_waiting(),
            }
        }
        self.wait(pages, timeout, go_on)
    }

    fn check_limit(&self, pages: u64) -> Result<(), ClaimError> {
        let (claimed, limit) = (self.claimed(), self.limit());
        if claimed.saturating_add(pages) <= limit.min(MAX_PAGES) {
            return Ok(());
        }
        let [claimed, requested, limit] =
            [claimed, pages, limit].map(|pages| pages.saturating_mul(PAGE));
        Err(ClaimError::Limit { claimed, requested, limit })
    }

    fn wait(
        &self,
        pages: u64,
        timeout: Duration,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<(), ClaimError> {
        let deadline = Instant::now().checked_add(timeout);
        let Some(_entered) = self.gate.enter(deadline) else {
            return Err(ClaimError::TimedOut(self.shortfall(pages, timeout)));
        };
        let slot = self.seat.slot;
        let ticket = Ticket::publish(self, pages);
        let (mut round, mut contested) = (Round::default(), Contested::default());
        loop {
            let seen = self.ledger.rings(slot, Bell::Wait);
            self.ledger.check()?;
            let now = now_ms();
            self.ledger.set(slot, Field::Beat, now);
            let views = self.ledger.views();
            let wanted = self.wanted(pages);
            let mut pause = BEAT_MS;
            if is_behind(&views, ticket.rank, now) {
                for first in first_waiting(&views, now, 1) {
                    if self.ledger.reap(first) {
                        pause = 0;
                    }
                }
            } else if self.ledger.reap_all(Some(slot)) {
                pause = 0;
            } else if wanted.most(&views) < pages {
                return Err(ClaimError::Impossible(self.shortfall(pages, Duration::ZERO)));
            } else if wanted.short_by(&views) > 0 {
                if !timeout.is_zero() {
                    pause = pause.min(round.proceed(self, &views, pages, now));
                }
            } else {
                match self.attempt(pages) {
                    Ok(()) => return Ok(()),
                    Err(Refusal::Limit { .. }) => self.check_limit(pages)?,
                    Err(Refusal::Short { contested: seen, .. }) => {
                        contested.note(self, &seen, now);
                        pause = 1;
                    }
                }
            }
            let left = left_of(deadline);
            if (pause > 0 && left.is_zero()) || !go_on() {
                return Err(ClaimError::TimedOut(self.shortfall(pages, timeout)));
            }
            let pause = Duration::from_millis(pause).min(left);
            if !pause.is_zero() {
                self.ledger.wait(slot, Bell::Wait, seen, Some(pause));
            }
            self.wake_ups.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }

    fn shortfall(&self, pages: u64, timeout: Duration) -> Box<Shortfall> {
        let views = self.ledger.views();
        let wanted = self.wanted(pages);
        Box::new(Shortfall {
            requested: pages.saturating_mul(PAGE),
            available: wanted.available(&views) * PAGE,
            most: wanted.most(&views) * PAGE,
            capacity: self.capacity * PAGE,
            timeout,
            members: status::others(&self.ledger, &views, self.seat.slot, self.namespace),
        })
    }
}
