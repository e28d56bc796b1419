//! A request in the queue: a thread waits for it, or a task polls it. Both take the same steps.
//!
//! 1. Missing bytes are spilled ([`QueuedReservation::spill`]).
//! 2. The waiter sleeps until its wait is completed, until a spiller notifies it, or until a pause or the
//!    deadline is over.
//! 3. A notification or a pause leads back to step 1. A completion ends the wait.
//!
//! A request that is dropped leaves the queue, and what it was granted meanwhile is released.

use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use crate::ledger::core::{Granted, Request, WaiterId};

use super::CancelToken;
use super::slot::{WaitEnd, WaitSlot};
use crate::ledger::shell::error::ReserveError;
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::shared::{Outcome, Shared};
use crate::ledger::shell::spill::{SpillAttempts, Spilling};

/// Result of [`RequestBuilder::enqueue`](super::RequestBuilder::enqueue).
#[derive(Debug)]
pub enum Enqueued {
    /// There was room, and no waiter went first.
    Served(Reservation),
    /// The request waits.
    Waiting(Box<QueuedReservation>),
}

/// What the owner of a [`QueuedReservation`] has to do next.
#[derive(Debug)]
#[must_use = "a request that waits needs its next step"]
pub enum ReservationPoll {
    /// The wait is over.
    Ready(Result<Reservation, ReserveError>),
    /// Call [`QueuedReservation::spill`], then poll again.
    Spill,
    /// Poll again when the waker is called, and at the instant if there is one.
    Pending(Option<Instant>),
}

/// A request in the queue of its spaces, which needs no thread. Dropping it leaves the queue.
pub struct QueuedReservation {
    shared: Arc<Shared>,
    request: Request,
    waiter: WaiterId,
    slot: Arc<WaitSlot<Outcome>>,
    attempts: SpillAttempts,
    limits: WaitLimits,
    token: Option<CancelToken>,
    deadlock_checked: bool,
    has_to_spill: bool,
    /// The end of a pause, or the deadline.
    until: Option<Instant>,
    is_over: bool,
}

/// When a wait ends, and when spillers are called for it.
#[derive(Clone, Copy)]
pub(super) struct WaitLimits {
    pub deadline: Option<Instant>,
    pub spilling: Spilling,
}

/// A waiter that was queued.
pub(super) struct QueueEntry {
    pub waiter: WaiterId,
    pub slot: Arc<WaitSlot<Outcome>>,
    pub deadlock_checked: bool,
}

impl QueuedReservation {
    /// Called while the lock is held.
    pub(super) fn new(
        shared: &Arc<Shared>,
        request: &Request,
        entry: QueueEntry,
        limits: WaitLimits,
    ) -> QueuedReservation {
        let QueueEntry { waiter, slot, deadlock_checked } = entry;
        let attempts = SpillAttempts::new(shared, waiter, &request.candidates, limits.deadline);
        QueuedReservation {
            shared: Arc::clone(shared),
            request: request.clone(),
            waiter,
            slot,
            attempts,
            limits,
            token: None,
            deadlock_checked,
            has_to_spill: true,
            until: None,
            is_over: false,
        }
    }

    /// Has the wait cancelled by a token.
    pub(super) fn cancel_by(&mut self, token: CancelToken) {
        if !token.watch(&self.shared, self.waiter) {
            self.shared.cancel(self.waiter);
        }
        self.token = Some(token);
    }

    /// Waits, as [`RequestBuilder::wait`](super::RequestBuilder::wait) does.
    ///
    /// # Errors
    /// As [`RequestBuilder::wait`](super::RequestBuilder::wait).
    pub fn wait(mut self) -> Result<Reservation, ReserveError> {
        loop {
            self.spill();
            let end = self.slot.wait_or_notified(self.until);
            if let Some(outcome) = self.after(end) {
                return self.end(outcome);
            }
        }
    }

    /// Returns the result of the wait, or what has to be done for it. Never blocks. To be called no more
    /// once it has returned [`Ready`](ReservationPoll::Ready).
    pub fn poll(&mut self, waker: &Waker) -> ReservationPoll {
        if self.has_to_spill {
            return ReservationPoll::Spill;
        }
        let is_due = self.until.is_some_and(|until| until <= Instant::now());
        let end = match self.slot.poll(waker) {
            Some(end) => end,
            None if is_due => WaitEnd::TimedOut,
            None => return ReservationPoll::Pending(self.until),
        };
        match self.after(end) {
            Some(outcome) => ReservationPoll::Ready(self.end(outcome)),
            None => ReservationPoll::Spill,
        }
    }

    /// Calls the spillers for missing bytes, if there is something to try. May block as long as they do.
    pub fn spill(&mut self) {
        if !std::mem::take(&mut self.has_to_spill) {
            return;
        }
        if self.limits.spilling == Spilling::Never {
            self.attempts.end();
        }
        let retry_pause = self.attempts.try_candidates();
        let check_delay = self
            .shared
            .deadlock_check_delay()
            .filter(|_| self.attempts.are_over() && !self.deadlock_checked);
        let pause = retry_pause.or(check_delay);
        let later = pause.and_then(|pause| Instant::now().checked_add(pause));
        self.until = [self.limits.deadline, later].into_iter().flatten().min();
    }

    /// Returns the outcome, or notes that there may be something to spill.
    fn after(&mut self, end: WaitEnd<Outcome>) -> Option<Outcome> {
        self.has_to_spill = true;
        match end {
            WaitEnd::Completed(outcome) => return Some(outcome),
            WaitEnd::Notified if self.limits.spilling == Spilling::Never => {}
            WaitEnd::Notified => {
                self.attempts.restart();
                self.deadlock_checked = false;
            }
            WaitEnd::TimedOut if self.limits.deadline.is_some_and(|at| at <= Instant::now()) => {
                // Another thread may have ended the wait a moment ago. In both cases the slot gets its
                // completion.
                self.shared.expire();
                return Some(self.slot.wait(None).expect("it is completed"));
            }
            WaitEnd::TimedOut if self.attempts.are_over() => self.shared.check_deadlock_late(),
            WaitEnd::TimedOut => {}
        }
        None
    }

    fn end(&mut self, outcome: Outcome) -> Result<Reservation, ReserveError> {
        self.is_over = true;
        if let Some(token) = &self.token {
            token.forget(&self.shared, self.waiter);
        }
        let refusal = || self.shared.refusal(&self.request);
        Err(match outcome {
            Outcome::Granted(Granted { reservation, space, .. }) => {
                let priority = self.request.priority;
                return Ok(Reservation::new(&self.shared, reservation, space, priority));
            }
            Outcome::TimedOut => ReserveError::TimedOut(refusal()),
            Outcome::Cancelled => ReserveError::Cancelled(refusal()),
            Outcome::ShutDown => ReserveError::ShutDown(refusal()),
            Outcome::Deadlock(stuck) => ReserveError::Deadlock { stuck, refusal: refusal() },
        })
    }

    /// Leaves the queue. Returns the reservation if the request was served before that.
    pub(super) fn leave(mut self) -> Option<Reservation> {
        self.stop()
    }

    fn stop(&mut self) -> Option<Reservation> {
        if self.is_over {
            return None;
        }
        self.shared.cancel(self.waiter);
        let outcome = self.slot.wait(None).expect("it is completed");
        self.end(outcome).ok()
    }
}

impl Drop for QueuedReservation {
    fn drop(&mut self) {
        drop(self.stop());
    }
}

impl std::fmt::Debug for QueuedReservation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "request of {}, waiting", self.request.bytes)
    }
}
