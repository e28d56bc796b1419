//! The request builder, and the wait of one request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ledger::core::{
    Candidates, Granted, Grants, Owner, Priority, Request, ReservationId, SpaceId, Strategy,
    StrategyError, SubmitError, Submitted, Tag, WaiterId,
};
use vramp_core::Bytes;

use super::slot::{WaitEnd, WaitSlot};
use crate::ledger::shell::error::ReserveError;
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::shared::{Outcome, Shared, State};
use crate::ledger::shell::spill::{SpillAttempts, Spilling, is_spilling_all};
use crate::ledger::shell::wait::CancelToken;

/// End of a wait: an [`Instant`], or a [`Duration`] from now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// No deadline: the wait ends at the latest with the shutdown of the manager.
    pub const NEVER: Deadline = Deadline(None);

    /// Returns the instant of the deadline, if there is one.
    pub fn instant(self) -> Option<Instant> {
        self.0
    }
}

impl From<Instant> for Deadline {
    fn from(at: Instant) -> Deadline {
        Deadline(Some(at))
    }
}

impl From<Duration> for Deadline {
    /// A duration beyond the range of the clock means no deadline.
    fn from(time: Duration) -> Deadline {
        Deadline(Instant::now().checked_add(time))
    }
}

/// Reservation request builder. Finish with [`now`](RequestBuilder::now),
/// [`wait`](RequestBuilder::wait) or [`up_to`](RequestBuilder::up_to).
#[must_use = "nothing is requested before `now`, `wait` or `up_to`"]
pub struct RequestBuilder<'a> {
    shared: &'a Arc<Shared>,
    strategy: Strategy,
    candidates: Result<Candidates, StrategyError>,
    bytes: Bytes,
    priority: Priority,
    owner: Option<Owner>,
    tag: Tag,
    deadline: Deadline,
    token: Option<CancelToken>,
    spilling: Spilling,
}

/// Result of submitting a request that may wait.
enum Begun {
    Served(Reservation),
    Queued { waiter: WaiterId, slot: Arc<WaitSlot<Outcome>>, deadlock_checked: bool },
}

impl<'a> RequestBuilder<'a> {
    #[inline]
    pub(crate) fn new(
        shared: &'a Arc<Shared>,
        strategy: Strategy,
        bytes: Bytes,
    ) -> RequestBuilder<'a> {
        let candidates = match strategy {
            Strategy::Specific(space) if shared.spaces.contains(&space) => {
                Ok(Candidates::from_slice(&[space]))
            }
            _ => match strategy.start() {
                Some(start) => {
                    strategy.candidates(&shared.spaces, shared.links().distance_from(start))
                }
                None => strategy.candidates(&shared.spaces, |_| ()),
            },
        };
        RequestBuilder {
            shared,
            strategy,
            candidates,
            bytes,
            priority: Priority::default(),
            owner: None,
            tag: Tag::NONE,
            deadline: Deadline::NEVER,
            token: None,
            spilling: Spilling::default(),
        }
    }

    /// Sets the distance by which spaces that the strategy ranks equal are ordered; of equal
    /// distances the smallest index comes first. By default the distance is the rate of the link
    /// from the strategy's own space ([`set_links`](crate::ReservationManager::set_links)).
    pub fn near<D: Ord>(mut self, distance: impl Fn(SpaceId) -> D) -> RequestBuilder<'a> {
        self.candidates = self.strategy.candidates(&self.shared.spaces, distance);
        self
    }

    /// Orders spaces that the strategy ranks equal by the rates of the links from `from`.
    pub fn nearest_to(mut self, from: SpaceId) -> RequestBuilder<'a> {
        let links = self.shared.links();
        self.candidates = self.strategy.candidates(&self.shared.spaces, links.distance_from(from));
        drop(links);
        self
    }

    /// Sets when spillers are called for the request; before it waits by default.
    pub fn spilling(mut self, spilling: Spilling) -> RequestBuilder<'a> {
        self.spilling = spilling;
        self
    }

    /// Sets the priority; a larger number goes first. Zero by default.
    pub fn priority(mut self, priority: i32) -> RequestBuilder<'a> {
        self.priority = Priority(priority);
        self
    }

    /// Sets the owner, for deadlock detection: while an owner waits it is taken to keep all its
    /// reservations. Without one the reservation gets an owner of its own, which can wait only in
    /// [`Reservation::grow_wait`].
    pub fn owner(mut self, owner: Owner) -> RequestBuilder<'a> {
        self.owner = Some(owner);
        self
    }

    /// Sets the tag, from [`add_tag`](crate::ReservationManager::add_tag).
    pub fn tag(mut self, tag: Tag) -> RequestBuilder<'a> {
        self.tag = tag;
        self
    }

    /// Sets the end of a [`wait`](RequestBuilder::wait). No deadline by default.
    pub fn deadline(mut self, deadline: impl Into<Deadline>) -> RequestBuilder<'a> {
        self.deadline = deadline.into();
        self
    }

    /// Sets a token that cancels a [`wait`](RequestBuilder::wait).
    pub fn cancel_token(mut self, token: &CancelToken) -> RequestBuilder<'a> {
        self.token = Some(token.clone());
        self
    }

    /// Reserves all bytes at once or fails. Overtakes waiters only within their bound. With
    /// [`Spilling::AlsoNow`] each spiller is called once, while the request is queued.
    ///
    /// # Errors
    /// There is no room now, or never will be.
    #[inline]
    pub fn now(mut self) -> Result<Reservation, ReserveError> {
        let mut request = self.take_request()?;
        if self.spilling == Spilling::AlsoNow && !is_spilling_all(self.shared, &request.candidates)
        {
            return self.spill_now(request);
        }
        self.shared
            .update(|state| {
                request.owner = self.owner_in(state);
                let submitted = state.queue.submit_now(&mut state.ledger, &request)?;
                Ok(self.served_now(state, submitted))
            })
            .map_err(|error| self.error(error, &request))
    }

    /// Waits until all bytes are reserved. Missing bytes are spilled meanwhile, in this thread: a
    /// deadline or a cancellation takes effect after the call of a spiller that is in progress.
    ///
    /// # Errors
    /// The request can never be served, the deadline passed, it was cancelled, the manager was shut
    /// down, a spiller would wait for memory that it has to free, or the wait is a deadlock.
    /// Nothing is reserved then.
    pub fn wait(mut self) -> Result<Reservation, ReserveError> {
        let mut request = self.take_request()?;
        if self.token.as_ref().is_some_and(CancelToken::is_cancelled) {
            return Err(ReserveError::Cancelled(self.shared.refusal(&request)));
        }
        if is_spilling_all(self.shared, &request.candidates) {
            (self.candidates, self.spilling) = (Ok(request.candidates), Spilling::Never);
            return self.now().map_err(|error| match error {
                ReserveError::NotNow(refusal) => ReserveError::InSpiller(refusal),
                other => other,
            });
        }
        let begun = self.begin(&mut request).map_err(|error| self.error(error, &request))?;
        let (waiter, slot, checked) = match begun {
            Begun::Served(reservation) => return Ok(reservation),
            Begun::Queued { waiter, slot, deadlock_checked } => (waiter, slot, deadlock_checked),
        };
        if let Some(token) = &self.token
            && !token.watch(self.shared, waiter)
        {
            self.shared.cancel(waiter);
        }
        let outcome = self.outcome(waiter, &request.candidates, &slot, checked);
        if let Some(token) = &self.token {
            token.forget(self.shared, waiter);
        }
        let refusal = || self.shared.refusal(&request);
        Err(match outcome {
            Outcome::Granted(Granted { reservation, space, .. }) => {
                return Ok(Reservation::new(self.shared, reservation, space));
            }
            Outcome::TimedOut => ReserveError::TimedOut(refusal()),
            Outcome::Cancelled => ReserveError::Cancelled(refusal()),
            Outcome::ShutDown => ReserveError::ShutDown(refusal()),
            Outcome::Deadlock(stuck) => ReserveError::Deadlock { stuck, refusal: refusal() },
        })
    }

    /// Reserves at least `min` bytes at once, and as many of the requested bytes as the candidate
    /// with the most room has. [`Reservation::bytes`] returns how many. With a `min` of zero it
    /// always succeeds, possibly with an empty reservation, which can grow.
    ///
    /// # Errors
    /// Less than `min` is available, or waiters go first.
    pub fn up_to(mut self, min: Bytes) -> Result<Reservation, ReserveError> {
        let mut request = self.take_request()?;
        self.shared
            .update(|state| {
                request.owner = self.owner_in(state);
                let submitted = state.queue.submit_up_to(&mut state.ledger, &request, min)?;
                Ok(self.served_now(state, submitted))
            })
            .map_err(|error| self.error(error, &Request { bytes: min, ..request }))
    }

    #[inline]
    fn take_request(&mut self) -> Result<Request, ReserveError> {
        let candidates = std::mem::replace(&mut self.candidates, Ok(Candidates::new()))?;
        Ok(Request {
            candidates,
            bytes: self.bytes,
            priority: self.priority,
            owner: self.owner.unwrap_or(Owner(0)),
            tag: self.tag,
            deadline: self.deadline.0.map(|at| self.shared.clock_ns(at)),
        })
    }

    #[inline]
    fn owner_in(&self, state: &mut State) -> Owner {
        self.owner.unwrap_or_else(|| state.anonymous_owner())
    }

    #[inline]
    fn served_now(&self, state: &mut State, submitted: Submitted) -> Reservation {
        match submitted {
            Submitted::Granted { reservation, space, others } => {
                self.granted(state, (reservation, space), others)
            }
            Submitted::Waiting(waiter) => unreachable!("{waiter} was submitted not to wait"),
        }
    }

    #[inline]
    fn granted(
        &self,
        state: &mut State,
        (reservation, space): (ReservationId, SpaceId),
        others: Grants,
    ) -> Reservation {
        state.complete_granted(others);
        Reservation::new(self.shared, reservation, space)
    }

    fn begin(&self, request: &mut Request) -> Result<Begun, SubmitError> {
        self.shared.update(|state| {
            request.owner = self.owner_in(state);
            // The queue reads the clock for a deadline alone.
            let now = request.deadline.map_or(0, |_| self.shared.now_ns());
            Ok(match state.queue.submit(&mut state.ledger, request, now)? {
                Submitted::Granted { reservation, space, others } => {
                    Begun::Served(self.granted(state, (reservation, space), others))
                }
                Submitted::Waiting(waiter) => {
                    let slot = state.add_slot(waiter);
                    // A waiter with a claim is in no deadlock before spilling has failed.
                    let spills = self.spilling != Spilling::Never
                        && state.claim_first_spillable(waiter, &request.candidates);
                    let deadlock_checked = !spills && self.shared.check_deadlock_now(state);
                    Begun::Queued { waiter, slot, deadlock_checked }
                }
            })
        })
    }

    /// Has missing bytes spilled, and waits for the completion of the slot.
    fn outcome(
        &self,
        waiter: WaiterId,
        candidates: &Candidates,
        slot: &WaitSlot<Outcome>,
        mut deadlock_checked: bool,
    ) -> Outcome {
        let deadline = self.deadline.0;
        let mut attempts = SpillAttempts::new(self.shared, waiter, candidates, deadline);
        if self.spilling == Spilling::Never {
            attempts.end();
        }
        loop {
            let retry_pause = attempts.try_candidates();
            let check_delay = self
                .shared
                .deadlock_check_delay()
                .filter(|_| attempts.are_over() && !deadlock_checked);
            let pause = retry_pause.or(check_delay);
            let later = pause.and_then(|pause| Instant::now().checked_add(pause));
            let until = [deadline, later].into_iter().flatten().min();
            match slot.wait_or_notified(until) {
                WaitEnd::Completed(outcome) => return outcome,
                WaitEnd::Notified if self.spilling == Spilling::Never => {}
                WaitEnd::Notified => {
                    attempts.restart();
                    deadlock_checked = false;
                }
                WaitEnd::TimedOut if deadline.is_some_and(|at| at <= Instant::now()) => {
                    // Another thread may have ended the wait a moment ago. In both cases the slot
                    // gets its completion.
                    self.shared.expire();
                    return slot.wait(None).expect("a wait without a deadline is completed");
                }
                WaitEnd::TimedOut if attempts.are_over() => self.shared.check_deadlock_late(),
                WaitEnd::TimedOut => {}
            }
        }
    }

    /// Calls each spiller once, then takes what is available.
    fn spill_now(&self, mut request: Request) -> Result<Reservation, ReserveError> {
        request.deadline = None;
        let not_now = |request: &Request| ReserveError::NotNow(self.shared.refusal(request));
        let (waiter, slot) = match self.begin(&mut request) {
            Ok(Begun::Served(reservation)) => return Ok(reservation),
            Ok(Begun::Queued { waiter, slot, .. }) => (waiter, slot),
            Err(SubmitError::ShutDown { .. }) => return Err(not_now(&request)),
            Err(error) => return Err(self.error(error, &request)),
        };
        SpillAttempts::new(self.shared, waiter, &request.candidates, None).try_candidates();
        self.shared.cancel(waiter);
        match slot.wait(None) {
            Some(Outcome::Granted(Granted { reservation, space, .. })) => {
                Ok(Reservation::new(self.shared, reservation, space))
            }
            _ => Err(not_now(&request)),
        }
    }

    fn error(&self, error: SubmitError, request: &Request) -> ReserveError {
        let refusal = || self.shared.refusal(request);
        match error {
            SubmitError::UnknownTag(unknown) => ReserveError::UnknownTag(unknown),
            SubmitError::NeverFits { .. } => ReserveError::NeverFits(refusal()),
            SubmitError::NotNow { .. } => ReserveError::NotNow(refusal()),
            SubmitError::TooLate { .. } => ReserveError::TimedOut(refusal()),
            SubmitError::ShutDown { .. } => ReserveError::ShutDown(refusal()),
            SubmitError::NoCandidates | SubmitError::UnknownSpace(_) => {
                unreachable!("candidates are spaces of the manager, at least one: {error}")
            }
        }
    }
}
