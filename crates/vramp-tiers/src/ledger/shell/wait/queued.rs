//! A request in the queue: a thread waits for it, or a task polls it.
//!
//! 1. Missing bytes are spilled: the request's work.
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
use crate::ledger::shell::error::ReserveError;
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::shared::{Outcome, ReservationSlot, Shared};
use crate::ledger::shell::spill::{SpillAttempts, Spilling};
use crate::wait::{Deadline, Step, Waits, block_on};

/// Result of [`RequestBuilder::enqueue`](super::RequestBuilder::enqueue).
#[derive(Debug)]
pub enum Enqueued {
    /// There was room, and no waiter went first.
    Served(Reservation),
    /// The request waits.
    Waiting(Box<QueuedReservation>),
}

/// A request in the queue of its spaces, which needs no thread: its owner takes the [steps](Waits) of the
/// wait. Dropping it leaves the queue.
pub struct QueuedReservation {
    shared: Arc<Shared>,
    request: Request,
    waiter: WaiterId,
    slot: Arc<ReservationSlot>,
    attempts: SpillAttempts,
    deadline: Deadline,
    spilling: Spilling,
    token: Option<CancelToken>,
    deadlock_checked: bool,
    has_to_spill: bool,
    /// The end of a pause, or the deadline.
    until: Option<Instant>,
    is_over: bool,
}

impl QueuedReservation {
    /// Called while the lock is held.
    pub(super) fn new(
        shared: &Arc<Shared>,
        request: &Request,
        (waiter, slot): (WaiterId, Arc<ReservationSlot>),
        (deadline, spilling): (Deadline, Spilling),
        deadlock_checked: bool,
    ) -> QueuedReservation {
        let attempts = SpillAttempts::new(shared, waiter, &request.candidates, deadline.instant());
        QueuedReservation {
            shared: Arc::clone(shared),
            request: request.clone(),
            waiter,
            slot,
            attempts,
            deadline,
            spilling,
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
    pub fn wait(self) -> Result<Reservation, ReserveError> {
        block_on(self)
    }

    /// Returns the place in the queue, for [`RequestBuilder::at`](super::RequestBuilder::at).
    pub fn place(&self) -> WaiterId {
        self.waiter
    }

    /// Returns the outcome, if there is one by now. Notes what is to be tried again.
    fn look(&mut self) -> Option<Outcome> {
        if self.slot.take_notified() {
            if self.spilling != Spilling::Never {
                self.attempts.restart();
                self.deadlock_checked = false;
            }
        } else if !Deadline::from(self.until?).has_passed() {
            return None;
        } else if self.deadline.has_passed() {
            self.shared.expire();
            // Another thread may have ended the wait a moment ago. In both cases it has an outcome.
            return Some(self.slot.take().expect("its wait has ended"));
        } else if self.attempts.are_over() {
            self.shared.check_deadlock_late();
        }
        self.has_to_spill = true;
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
        let outcome = self.shared.leave(self.waiter, &self.slot);
        self.end(outcome.unwrap_or(Outcome::Cancelled)).ok()
    }
}

impl Waits for QueuedReservation {
    type Output = Result<Reservation, ReserveError>;

    fn step(&mut self, waker: &Waker) -> Step<Result<Reservation, ReserveError>> {
        if self.has_to_spill {
            return Step::Work;
        }
        match self.slot.poll(waker).or_else(|| self.look()) {
            Some(outcome) => Step::Ready(self.end(outcome)),
            None if self.has_to_spill => Step::Work,
            None => Step::Pending(self.until),
        }
    }

    /// Calls the spillers for missing bytes, if there is something to try. May block as long as they do.
    fn work(&mut self) {
        if !std::mem::take(&mut self.has_to_spill) {
            return;
        }
        if self.spilling == Spilling::Never {
            self.attempts.end();
        }
        let retry_pause = self.attempts.try_candidates();
        if !self.request.held.is_zero() {
            self.shared.check_deadlock_late();
        }
        let check_delay = self
            .shared
            .deadlock_check_delay()
            .filter(|_| self.attempts.are_over() && !self.deadlock_checked);
        let pause = retry_pause.or(check_delay);
        let later = pause.and_then(|pause| Instant::now().checked_add(pause));
        self.until = [self.deadline.instant(), later].into_iter().flatten().min();
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
