//! A wish for memory, from its words to the reservation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ledger::core::{
    Bound, Candidates, Granted, Owner, Priority, Request, SpaceId, Strategy, StrategyError,
    SubmitError, Submitted, Tag, WaiterId,
};
use vramp_core::Bytes;

use crate::ledger::shell::error::ReserveError;
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::shared::{Outcome, Shared, State};
use crate::ledger::shell::spill::{Spilling, Tries, empties_all};
use crate::ledger::shell::wait::CancelToken;
use crate::ledger::shell::wait::slot::{WaitSlot, Woken};

/// When to give up. An [`Instant`], or a [`Duration`] from now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// Not before the manager is shut down.
    pub const NEVER: Deadline = Deadline(None);

    /// The moment, if there is one.
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
    /// A time too long for the clock is never over.
    fn from(time: Duration) -> Deadline {
        Deadline(Instant::now().checked_add(time))
    }
}

/// A request in the making. Its last word is [`now`](RequestBuilder::now),
/// [`wait`](RequestBuilder::wait) or [`up_to`](RequestBuilder::up_to).
#[must_use = "nothing is asked before `now`, `wait` or `up_to`"]
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

/// What came of a request that may wait.
enum Begun {
    Served(Reservation),
    Waits { waiter: WaiterId, seat: Arc<WaitSlot<Outcome>>, checked: bool },
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

    /// Of spaces that the strategy holds equal, tries the one with the smallest distance first, and
    /// of those the one with the smallest index. If not given, the one to which the link from the
    /// strategy's own space is the fastest ([`set_links`](crate::ReservationManager::set_links)).
    pub fn near<D: Ord>(mut self, distance: impl Fn(SpaceId) -> D) -> RequestBuilder<'a> {
        self.candidates = self.strategy.candidates(&self.shared.spaces, distance);
        self
    }

    /// The same by the rates of the links from a space.
    pub fn nearest_to(mut self, from: SpaceId) -> RequestBuilder<'a> {
        let links = self.shared.links();
        self.candidates = self.strategy.candidates(&self.shared.spaces, links.distance_from(from));
        drop(links);
        self
    }

    /// Whether others' data shall move for it. Before it waits, if not given.
    pub fn spilling(mut self, spilling: Spilling) -> RequestBuilder<'a> {
        self.spilling = spilling;
        self
    }

    /// How important it is: the larger, the more. Zero if not given.
    pub fn priority(mut self, priority: i32) -> RequestBuilder<'a> {
        self.priority = Priority(priority);
        self
    }

    /// Who asks, and does not go on meanwhile: from it deadlocks are found, for while an owner
    /// waits it is taken to keep all its reservations. If not given the reservation has an owner of
    /// its own, which can wait only in [`Reservation::grow_wait`].
    pub fn owner(mut self, owner: Owner) -> RequestBuilder<'a> {
        self.owner = Some(owner);
        self
    }

    /// For what, from [`add_tag`](crate::ReservationManager::add_tag).
    pub fn tag(mut self, tag: Tag) -> RequestBuilder<'a> {
        self.tag = tag;
        self
    }

    /// When a [`wait`](RequestBuilder::wait) gives up. Never if not given.
    pub fn deadline(mut self, deadline: impl Into<Deadline>) -> RequestBuilder<'a> {
        self.deadline = deadline.into();
        self
    }

    /// Ends a [`wait`](RequestBuilder::wait) when it is cancelled.
    pub fn cancel_token(mut self, token: &CancelToken) -> RequestBuilder<'a> {
        self.token = Some(token.clone());
        self
    }

    /// All of it at once, or nothing. Does not pass those who wait further than they allow. With
    /// [`Spilling::AlsoNow`] it asks each spiller once, and stands in the queue meanwhile.
    ///
    /// # Errors
    /// There is no room, or never will be.
    #[inline]
    pub fn now(mut self) -> Result<Reservation, ReserveError> {
        let mut request = self.take_request()?;
        if self.spilling == Spilling::AlsoNow && !empties_all(self.shared, &request.candidates) {
            return self.spill_now(request);
        }
        self.shared
            .act(|state| {
                request.owner = self.owned(state);
                if let Some((reservation, space)) = state.serve(&request) {
                    return Ok(Reservation::new(self.shared, reservation, space));
                }
                match state.queue.submit_now(&mut state.ledger, request.clone())? {
                    Submitted::Granted { reservation, space, others } => {
                        state.give(others);
                        Ok(Reservation::new(self.shared, reservation, space))
                    }
                    Submitted::Waiting(waiter) => unreachable!("{waiter} shall not wait"),
                }
            })
            .map_err(|refused| self.error(refused, &request))
    }

    /// All of it, as soon as it is this request's turn; never less. What is missing is spilled
    /// meanwhile, in this thread: a deadline or a cancellation ends that after the spiller's call that
    /// is under way.
    ///
    /// # Errors
    /// It can never be had, the deadline passed, it was cancelled, the manager was shut down, a spiller
    /// waits for what it shall free, or waiting would be for ever. Nothing is reserved then.
    pub fn wait(mut self) -> Result<Reservation, ReserveError> {
        let mut request = self.take_request()?;
        if self.token.as_ref().is_some_and(CancelToken::is_cancelled) {
            return Err(ReserveError::Cancelled(self.shared.refusal(&request)));
        }
        if empties_all(self.shared, &request.candidates) {
            (self.candidates, self.spilling) = (Ok(request.candidates), Spilling::Never);
            return self.now().map_err(|error| match error {
                ReserveError::NotNow(refusal) => ReserveError::InSpiller(refusal),
                other => other,
            });
        }
        let begun = self.begin(&mut request).map_err(|refused| self.error(refused, &request))?;
        let (waiter, seat, checked) = match begun {
            Begun::Served(reservation) => return Ok(reservation),
            Begun::Waits { waiter, seat, checked } => (waiter, seat, checked),
        };
        if let Some(token) = &self.token
            && !token.watch(self.shared, waiter)
        {
            self.shared.cancel(waiter);
        }
        let outcome = self.outcome(waiter, &request.candidates, &seat, checked);
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

    /// As much as there is at once, in the space that has the most of it: all, if possible, and not
    /// less than `least`. [`Reservation::bytes`] says how much. From zero on it always succeeds,
    /// possibly with an empty reservation that may grow.
    ///
    /// # Errors
    /// There is less than `least`, or those who wait are before it.
    pub fn up_to(mut self, least: Bytes) -> Result<Reservation, ReserveError> {
        let mut request = self.take_request()?;
        self.shared
            .act(|state| {
                request.owner = self.owned(state);
                let room = |&space: &SpaceId| {
                    let room = state.ledger.available(space, Bound::Limit).unwrap_or_default();
                    (room.min(request.bytes).max(least), space)
                };
                let mut choices: Vec<(Bytes, SpaceId)> =
                    request.candidates.iter().map(room).collect();
                // The sort is stable: among equals the strategy's order holds.
                choices.sort_by_key(|&(room, _)| std::cmp::Reverse(room));
                let mut refused = None;
                for (bytes, space) in choices {
                    let candidates = Candidates::from_slice(&[space]);
                    let part = Request { bytes, candidates, ..request.clone() };
                    match state.queue.submit_now(&mut state.ledger, part) {
                        Ok(Submitted::Granted { reservation, space, others }) => {
                            state.give(others);
                            return Ok(Reservation::new(self.shared, reservation, space));
                        }
                        Ok(Submitted::Waiting(waiter)) => unreachable!("{waiter} shall not wait"),
                        Err(error) => refused = Some(error),
                    }
                }
                let Request { owner, tag, .. } = request;
                let space = request.candidates[0];
                if least.is_zero()
                    && let Ok(empty) = state.ledger.reserve(space, least, owner, tag)
                {
                    return Ok(Reservation::new(self.shared, empty, space));
                }
                Err(refused.unwrap_or(SubmitError::NoCandidates))
            })
            .map_err(|refused| self.error(refused, &Request { bytes: least, ..request }))
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
            deadline: self.deadline.0.map(|at| self.shared.number(at)),
        })
    }

    #[inline]
    fn owned(&self, state: &mut State) -> Owner {
        self.owner.unwrap_or_else(|| state.nameless())
    }

    fn begin(&self, request: &mut Request) -> Result<Begun, SubmitError> {
        self.shared.act(|state| {
            request.owner = self.owned(state);
            if let Some((reservation, space)) = state.serve(request) {
                return Ok(Begun::Served(Reservation::new(self.shared, reservation, space)));
            }
            Ok(match state.queue.submit(&mut state.ledger, request.clone(), self.shared.now())? {
                Submitted::Granted { reservation, space, others } => {
                    state.give(others);
                    Begun::Served(Reservation::new(self.shared, reservation, space))
                }
                Submitted::Waiting(waiter) => {
                    let seat = state.sit(waiter);
                    // Who can have memory spilled is in no deadlock before that has failed.
                    let spills = self.spilling != Spilling::Never
                        && state.claim_at_start(waiter, &request.candidates);
                    let checked = !spills && self.shared.check_at_start(state);
                    Begun::Waits { waiter, seat, checked }
                }
            })
        })
    }

    /// Spills what the request lacks, waits until it is out of the queue, and for what it was given
    /// then.
    fn outcome(
        &self,
        waiter: WaiterId,
        candidates: &Candidates,
        seat: &WaitSlot<Outcome>,
        mut checked: bool,
    ) -> Outcome {
        let deadline = self.deadline.0;
        let mut tries = Tries::new(self.shared, waiter, candidates, deadline);
        if self.spilling == Spilling::Never {
            tries.end();
        }
        loop {
            let pause = tries.go_round();
            let put_off = self.shared.put_off().filter(|_| tries.are_over() && !checked);
            let later = pause.or(put_off).and_then(|pause| Instant::now().checked_add(pause));
            let until = [deadline, later].into_iter().flatten().min();
            match seat.wait_or_call(until) {
                Woken::Given(outcome) => return outcome,
                Woken::Called if self.spilling == Spilling::Never => {}
                Woken::Called => {
                    tries.renew();
                    checked = false;
                }
                Woken::Late if deadline.is_some_and(|deadline| deadline <= Instant::now()) => {
                    // Whoever ended the wait, now or a moment ago, gives something.
                    self.shared.expire();
                    return seat.wait(None).expect("a wait without an end ends with a gift");
                }
                Woken::Late if tries.are_over() => self.shared.check_late(),
                Woken::Late => {}
            }
        }
    }

    /// Asks each spiller once, and takes what there is then.
    fn spill_now(&self, mut request: Request) -> Result<Reservation, ReserveError> {
        request.deadline = None;
        let not_now = |request: &Request| ReserveError::NotNow(self.shared.refusal(request));
        let (waiter, seat) = match self.begin(&mut request) {
            Ok(Begun::Served(reservation)) => return Ok(reservation),
            Ok(Begun::Waits { waiter, seat, .. }) => (waiter, seat),
            Err(SubmitError::ShutDown { .. }) => return Err(not_now(&request)),
            Err(refused) => return Err(self.error(refused, &request)),
        };
        Tries::new(self.shared, waiter, &request.candidates, None).go_round();
        self.shared.cancel(waiter);
        match seat.wait(None) {
            Some(Outcome::Granted(Granted { reservation, space, .. })) => {
                Ok(Reservation::new(self.shared, reservation, space))
            }
            _ => Err(not_now(&request)),
        }
    }

    fn error(&self, refused: SubmitError, request: &Request) -> ReserveError {
        let refusal = || self.shared.refusal(request);
        match refused {
            SubmitError::UnknownTag(unknown) => ReserveError::UnknownTag(unknown),
            SubmitError::NeverFits { .. } => ReserveError::NeverFits(refusal()),
            SubmitError::NotNow { .. } => ReserveError::NotNow(refusal()),
            SubmitError::TooLate { .. } => ReserveError::TimedOut(refusal()),
            SubmitError::ShutDown { .. } => ReserveError::ShutDown(refusal()),
            SubmitError::NoCandidates | SubmitError::UnknownSpace(_) => {
                unreachable!("candidates are spaces of the manager, at least one: {refused}")
            }
        }
    }
}
