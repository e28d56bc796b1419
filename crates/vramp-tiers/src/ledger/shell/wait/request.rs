//! The request builder, and the wait of one request.

use std::sync::Arc;

use crate::ledger::core::{
    Candidates, Grants, Owner, Priority, Request, ReservationId, SpaceId, Strategy, StrategyError,
    SubmitError, Submitted, Tag, WaiterId,
};
use vramp_core::Bytes;

use super::queued::{Enqueued, QueuedReservation};
use crate::ledger::shell::error::ReserveError;
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::shared::{Shared, State};
use crate::ledger::shell::spill::{Spilling, is_spilling_all};
use crate::ledger::shell::wait::CancelToken;
use crate::wait::{Deadline, Waits};

/// Reservation request builder. Finish with [`now`](RequestBuilder::now),
/// [`wait`](RequestBuilder::wait), [`enqueue`](RequestBuilder::enqueue) or
/// [`up_to`](RequestBuilder::up_to).
#[must_use = "nothing is requested before `now`, `wait` or `up_to`"]
pub struct RequestBuilder<'a> {
    shared: &'a Arc<Shared>,
    strategy: Strategy,
    candidates: Result<Candidates, StrategyError>,
    bytes: Bytes,
    kept: Bytes,
    held: Bytes,
    place: Option<WaiterId>,
    priority: Priority,
    owner: Option<Owner>,
    tag: Tag,
    deadline: Deadline,
    token: Option<CancelToken>,
    spilling: Spilling,
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
            kept: Bytes::ZERO,
            held: Bytes::ZERO,
            place: None,
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

    /// Says that the caller also keeps `bytes` that are charged already, and that spillers could free for
    /// others. They need no room, unless the request overtakes waiters: then as many bytes have to be free, and
    /// count for the bound of overtaking. None by default.
    pub fn keeping(mut self, bytes: Bytes) -> RequestBuilder<'a> {
        self.kept = bytes;
        self
    }

    /// Says that the caller keeps `bytes` of the space outside reservations until the request is served. If a waiter
    /// needs them and was overtaken up to its bound, the request is served before it: otherwise both would wait
    /// for each other. None by default.
    pub fn holding(mut self, bytes: Bytes) -> RequestBuilder<'a> {
        self.held = bytes;
        self
    }

    /// Gives the request the place that one of the caller [had](super::QueuedReservation::place) in the same
    /// queue, and was served without use: it goes before those that came since. At the end by default.
    pub fn at(mut self, place: Option<WaiterId>) -> RequestBuilder<'a> {
        self.place = place;
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
    pub fn wait(self) -> Result<Reservation, ReserveError> {
        match self.enqueue()? {
            Enqueued::Served(reservation) => Ok(reservation),
            Enqueued::Waiting(queued) => queued.wait(),
        }
    }

    /// Reserves all bytes, or queues the request and returns without waiting: for a task. It has the
    /// place in the queue that [`wait`](RequestBuilder::wait) has.
    ///
    /// # Errors
    /// As [`wait`](RequestBuilder::wait).
    pub fn enqueue(mut self) -> Result<Enqueued, ReserveError> {
        let mut request = self.take_request()?;
        if self.token.as_ref().is_some_and(CancelToken::is_cancelled) {
            return Err(ReserveError::Cancelled(self.shared.refusal(&request)));
        }
        if is_spilling_all(self.shared, &request.candidates) {
            (self.candidates, self.spilling) = (Ok(request.candidates), Spilling::Never);
            return self.now().map(Enqueued::Served).map_err(|error| match error {
                ReserveError::NotNow(refusal) => ReserveError::InSpiller(refusal),
                other => other,
            });
        }
        let mut begun = self.begin(&mut request).map_err(|error| match error {
            // Its deadline has passed.
            SubmitError::NotNow { .. } => ReserveError::TimedOut(self.shared.refusal(&request)),
            error => self.error(error, &request),
        })?;
        if let (Enqueued::Waiting(queued), Some(token)) = (&mut begun, self.token) {
            queued.cancel_by(token);
        }
        Ok(begun)
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
            kept: self.kept,
            held: self.held,
            place: self.place,
            priority: self.priority,
            owner: self.owner.unwrap_or(Owner(0)),
            tag: self.tag,
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
        Reservation::new(self.shared, reservation, space, self.priority)
    }

    fn begin(&self, request: &mut Request) -> Result<Enqueued, SubmitError> {
        self.shared.update(|state| {
            request.owner = self.owner_in(state);
            let submitted = match self.deadline.has_passed() && !state.queue.is_shut_down() {
                true => state.queue.submit_now(&mut state.ledger, request),
                false => state.queue.submit(&mut state.ledger, request),
            };
            Ok(match submitted? {
                Submitted::Granted { reservation, space, others } => {
                    Enqueued::Served(self.granted(state, (reservation, space), others))
                }
                Submitted::Waiting(waiter) => {
                    let slot = state.waiters.add(waiter, self.deadline.instant());
                    // A waiter with a claim is in no deadlock before spilling has failed.
                    let spills = self.spilling != Spilling::Never
                        && state.claim_first_spillable(waiter, &request.candidates);
                    let checked = !spills && self.shared.check_deadlock_now(state);
                    // A waiter that needs what its owner holds may be spilled for now, and no longer later.
                    let deadlock_checked = checked && self.held.is_zero();
                    let limits = (self.deadline, self.spilling);
                    Enqueued::Waiting(Box::new(QueuedReservation::new(
                        self.shared,
                        request,
                        (waiter, slot),
                        limits,
                        deadlock_checked,
                    )))
                }
            })
        })
    }

    /// Calls each spiller once, then takes what is available.
    fn spill_now(mut self, mut request: Request) -> Result<Reservation, ReserveError> {
        self.deadline = Deadline::NEVER;
        let not_now = |request: &Request| ReserveError::NotNow(self.shared.refusal(request));
        match self.begin(&mut request) {
            Ok(Enqueued::Served(reservation)) => Ok(reservation),
            Ok(Enqueued::Waiting(mut queued)) => {
                queued.work();
                queued.leave().ok_or_else(|| not_now(&request))
            }
            Err(SubmitError::ShutDown { .. }) => Err(not_now(&request)),
            Err(error) => Err(self.error(error, &request)),
        }
    }

    fn error(&self, error: SubmitError, request: &Request) -> ReserveError {
        let refusal = || self.shared.refusal(request);
        match error {
            SubmitError::UnknownTag(unknown) => ReserveError::UnknownTag(unknown),
            SubmitError::NeverFits { .. } => ReserveError::NeverFits(refusal()),
            SubmitError::NotNow { .. } => ReserveError::NotNow(refusal()),
            SubmitError::ShutDown { .. } => ReserveError::ShutDown(refusal()),
            SubmitError::NoCandidates | SubmitError::UnknownSpace(_) => {
                unreachable!("candidates are spaces of the manager, at least one: {error}")
            }
        }
    }
}
