//! A member's slot and what its threads share.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::clock::now_ms;
use super::core::claim::{Claim, Next, Refusal, Terms};
use super::core::order::{Wanted, first_waiting};
use super::core::word::{MAX_PAGES, PAGE};
use super::error::BudgetError;
use super::facts::Usage;
use super::gate::Gate;
use super::handlers::Handlers;
use super::ledger::{Bell, Field, Ledger, Seat};
use super::status;

/// Shared with the thread that serves requests.
#[derive(Debug)]
pub struct Inner {
    pub ledger: Ledger,
    pub seat: Seat,
    pub namespace: u64,
    pub capacity: u64,
    /// Forks before it joined.
    pub depth: u32,
    pub card: String,
    pub group: String,
    /// Held while the own word changes, for some microseconds.
    pub own: Mutex<()>,
    pub gate: Gate,
    pub handlers: Handlers,
    pub is_over: AtomicBool,
    pub wake_ups: AtomicU64,
}

impl Inner {
    pub fn check_fork(&self) -> Result<(), BudgetError> {
        let is_own = vramp_host::fork::depth() == self.depth;
        is_own.then_some(()).ok_or(BudgetError::Forked)
    }

    fn lock_own(&self) -> MutexGuard<'_, ()> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn limit(&self) -> u64 {
        self.ledger.get(self.seat.slot, Field::Limit).min(MAX_PAGES)
    }

    pub fn guaranteed(&self) -> u64 {
        self.ledger.guarantee(self.seat.slot).pages
    }

    pub fn claimed(&self) -> u64 {
        self.ledger.word(self.seat.slot).claimed
    }

    pub fn wanted(&self, pages: u64) -> Wanted {
        Wanted { slot: self.seat.slot, pages, capacity: self.capacity }
    }

    /// Tries once to claim pages. It does not wait.
    pub fn attempt(&self, pages: u64) -> Result<(), Refusal> {
        let _own = self.lock_own();
        let Inner { ledger, seat: Seat { slot, .. }, capacity, .. } = self;
        let (slot, capacity, limit) = (*slot, *capacity, self.limit());
        let guaranteed = self.guaranteed();
        let mut claim = Claim::new(Terms { slot, pages, guaranteed, limit, capacity });
        let mut next = Next::Own;
        loop {
            next = match next {
                Next::Own => claim.own(ledger.word(slot)),
                Next::Exchange { from, to } => {
                    claim.exchanged(ledger.exchange_word(slot, from, to))
                }
                Next::Count => claim.counted(ledger.count()),
                Next::Load(other) => {
                    let word = ledger.word(other);
                    claim.loaded(word, ledger.guarantee(other).pages)
                }
                Next::Granted => break,
                Next::Refused(refusal) => return Err(refusal),
            }
        }
        ledger.set(slot, Field::Grown, now_ms());
        Ok(())
    }

    /// Gives pages back, at most those that are claimed. Returns how many. Wakes the first that wait.
    pub fn give_back(&self, pages: u64) -> u64 {
        let own = self.lock_own();
        let slot = self.seat.slot;
        let given = loop {
            // Nothing is pending while the lock is held.
            let word = self.ledger.word(slot);
            let given = pages.min(word.claimed);
            let to = word.next(word.claimed - given, 0);
            if given == 0 || self.ledger.exchange_word(slot, word, to) {
                break given;
            }
        };
        drop(own);
        if given > 0 {
            self.ring_waiting();
        }
        given
    }

    /// Writes what the memory is used for.
    pub fn publish(&self, usage: &Usage) {
        let Usage { live, cached, parked, asleep } = *usage;
        let fields = [
            (Field::Live, live),
            (Field::Cached, cached),
            (Field::Parked, parked),
            (Field::Asleep, asleep),
        ];
        for (field, bytes) in fields {
            self.ledger.set(self.seat.slot, field, bytes);
        }
    }

    /// Wakes the first members that wait: one of them may be stopped.
    pub fn ring_waiting(&self) {
        let mut slots = 0..self.ledger.count();
        if !slots.any(|slot| self.ledger.get(slot, Field::Ticket) != 0) {
            return;
        }
        for slot in first_waiting(&self.ledger.views(), now_ms(), 2) {
            self.ledger.ring(slot, Bell::Wait);
        }
    }

    /// Two processes that join at once with different capacities see each other: each writes its own
    /// before it reads.
    pub fn check_capacity(&self) -> Result<(), BudgetError> {
        let own = self.seat.slot;
        for view in self.ledger.views() {
            let theirs = self.ledger.get(view.slot, Field::Capacity);
            let is_other = view.slot != own && view.guarantee.generation != 0;
            if is_other && theirs != self.capacity && !self.ledger.reap(view.slot) {
                let member = Box::new(status::member(&self.ledger, &view, self.namespace));
                let (own, theirs) = (self.capacity * PAGE, theirs * PAGE);
                return Err(BudgetError::Capacity { own, theirs, member });
            }
        }
        Ok(())
    }
}

/// Whether it is dropped by a join that failed, by the end of the budget, or by its thread.
impl Drop for Inner {
    fn drop(&mut self) {
        if self.check_fork().is_ok() {
            self.ledger.leave(&self.seat);
            self.ring_waiting();
        }
    }
}
