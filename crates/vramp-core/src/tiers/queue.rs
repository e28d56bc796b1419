//! The broker: who gets memory next.
//!
//! Waiters stand in one order: urgent ones by age, then the others by priority and age. Whoever returned memory
//! to a space calls [`Queue::on_change`], and exactly those that now fit are granted, there and
//! then: a wake-up cannot be lost, because a waiter is woken with its reservation in hand, and
//! nobody is woken in vain.
//!
//! A request that fits may pass those ahead of it that do not, but only so often and by so much
//! ([`Overtaking`]): a waiter that has been passed to its bound keeps everybody behind it out of
//! the spaces it waits for, so that memory gathers for it. Being passed by younger requests of
//! higher priority is bounded too ([`QueueConfig::patience`]): after that a waiter is urgent. So
//! nobody starves: at most `overtaking.count + patience` younger requests get memory that a waiter
//! could have had.
//!
//! What a holder does with its reservation (grow, charge) does not queue. Neither does
//! [`Ledger::reserve`]; use [`Queue::submit_now`] for a request that shall not wait.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound::{Excluded, Unbounded};
use std::ops::ControlFlow;

use smallvec::SmallVec;

use super::claim::Claim;
use super::{
    Bound, Candidates, Ledger, Owner, ReservationId, ReserveError, SpaceId, Tag, UnknownSpace,
    UnknownTag,
};
use crate::Bytes;

/// How important a request is: the larger, the more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(pub i32);

/// A wish for memory in one of several spaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Where, the best first. From a [`Strategy`](super::Strategy).
    pub candidates: Candidates,
    /// How much, all in one space.
    pub bytes: Bytes,
    /// How important.
    pub priority: Priority,
    /// Who asks, and does not go on meanwhile.
    pub owner: Owner,
    /// For what.
    pub tag: Tag,
    /// When to give up, in nanoseconds of the caller's clock. `None` for never.
    pub deadline: Option<u64>,
}

/// How far a waiter may be passed by those behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overtaking {
    /// By so many of them.
    pub count: u32,
    /// By so many bytes, all of them together.
    pub bytes: Bytes,
}

impl Default for Overtaking {
    /// 64 requests of 1 GiB together.
    fn default() -> Overtaking {
        Overtaking { count: 64, bytes: Bytes::gib(1) }
    }
}

/// How fair a queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// How far a waiter may be passed by those behind it.
    pub overtaking: Overtaking,
    /// After how many grants to younger requests of higher priority a waiter goes before all
    /// priorities. `None` for never: strict priorities, under which a waiter can starve.
    pub patience: Option<u32>,
}

impl Default for QueueConfig {
    fn default() -> QueueConfig {
        QueueConfig { overtaking: Overtaking::default(), patience: Some(256) }
    }
}

/// Names one waiter until it is served or leaves; never used again. Younger ones are larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(u64);

impl WaiterId {
    /// The plain number: how many requests came before it.
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for WaiterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waiter {}", self.0)
    }
}

/// A waiter that was served: it waits no more and has its reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Who.
    pub waiter: WaiterId,
    /// What it waited for.
    pub reservation: ReservationId,
    /// Where.
    pub space: SpaceId,
}

/// Waiters to wake, in the order in which they were served.
pub type Grants = SmallVec<[Granted; 4]>;

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a waiter that nobody remembers cannot be woken"]
pub enum Submitted {
    /// It was served at once.
    Granted {
        /// What it asked for.
        reservation: ReservationId,
        /// Where.
        space: SpaceId,
        /// Waiters that became urgent by this grant and are served too. Nearly always empty.
        others: Grants,
    },
    /// It waits: for a grant, its deadline, or the end.
    Waiting(WaiterId),
}

/// What [`Queue::expire`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "these waiters have to be woken"]
pub struct Expired {
    /// Waiters whose deadline has passed, in its order. They wait no more and have nothing.
    pub timed_out: Vec<WaiterId>,
    /// Waiters that were kept back by those.
    pub granted: Grants,
}

/// Why a request was neither served nor queued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// It names no space.
    #[error("the request names no space: give it at least one candidate")]
    NoCandidates,
    /// It names a space that does not exist.
    #[error(transparent)]
    UnknownSpace(#[from] UnknownSpace),
    /// It names a tag that does not exist.
    #[error(transparent)]
    UnknownTag(#[from] UnknownTag),
    /// Waiting could not help.
    #[error(
        "{bytes} fit in none of the candidates, even empty: {}: ask for less",
        limits(limits_of)
    )]
    NeverFits {
        /// What was asked.
        bytes: Bytes,
        /// The candidates and their limits.
        limits_of: Vec<(SpaceId, Bytes)>,
    },
    /// There is no room now, or others are before it, and it shall not wait.
    #[error(
        "{bytes} cannot be had at once ({}; {waiting} requests wait): wait, or ask for less",
        limits(available)
    )]
    NotNow {
        /// What was asked.
        bytes: Bytes,
        /// The candidates and what is available below their limits.
        available: Vec<(SpaceId, Bytes)>,
        /// How many wait.
        waiting: usize,
    },
    /// It does not fit now and its deadline is over.
    #[error("there was no room for {bytes} by the deadline {deadline}, it is {now}")]
    TooLate {
        /// What was asked.
        bytes: Bytes,
        /// When it ended, in nanoseconds.
        deadline: u64,
        /// When it was asked, in nanoseconds.
        now: u64,
    },
    /// It does not fit now and nobody waits any more.
    #[error("there is no room for {bytes}, and the queue is shut down: nobody may wait any more")]
    ShutDown {
        /// What was asked.
        bytes: Bytes,
    },
}

fn limits(of: &[(SpaceId, Bytes)]) -> String {
    let each: Vec<String> = of.iter().map(|(space, bytes)| format!("{space} {bytes}")).collect();
    each.join(", ")
}

/// A waiter that does not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{waiter} does not wait: it was served, timed out, cancelled, or is of another queue")]
pub struct UnknownWaiter {
    /// What was given.
    pub waiter: WaiterId,
}

/// A place in the order: urgent ones by age, then the others by priority and age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    urgent: Reverse<bool>,
    priority: Reverse<Priority>,
    pub id: WaiterId,
}

#[derive(Clone, Debug)]
pub(super) struct Waiter {
    /// With those candidates that are large enough.
    pub request: Request,
    urgent: bool,
    /// What those behind it may still take before it.
    pub left: Overtaking,
    /// How often it was passed by younger ones of higher priority.
    passed: u32,
    pub claim: Option<Claim>,
}

impl Waiter {
    pub(super) fn rank(&self, id: WaiterId) -> Rank {
        // Among the urgent only age counts: by priority they could pass one another for ever.
        let priority = if self.urgent { Priority::default() } else { self.request.priority };
        Rank { urgent: Reverse(self.urgent), priority: Reverse(priority), id }
    }

    pub(super) fn waits_for(&self, space: SpaceId) -> bool {
        self.request.candidates.contains(&space)
    }
}

/// What those ahead leave to the others, by space.
#[derive(Default)]
pub(super) struct Gates(SmallVec<[(SpaceId, Overtaking); 8]>);

impl Gates {
    pub(super) fn admit(&self, space: SpaceId, bytes: Bytes) -> bool {
        let gate = self.0.iter().find(|(gated, _)| *gated == space);
        gate.is_none_or(|(_, left)| left.count > 0 && left.bytes >= bytes)
    }

    pub(super) fn narrow(&mut self, waiter: &Waiter) {
        for &space in &waiter.request.candidates {
            match self.0.iter_mut().find(|(gated, _)| *gated == space) {
                Some((_, left)) => {
                    left.count = left.count.min(waiter.left.count);
                    left.bytes = left.bytes.min(waiter.left.bytes);
                }
                None => self.0.push((space, waiter.left)),
            }
        }
    }
}

/// Everybody who waits for memory.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    config: QueueConfig,
    pub(super) waiters: BTreeMap<WaiterId, Waiter>,
    pub(super) order: BTreeSet<Rank>,
    next: u64,
    closed: bool,
}

impl Queue {
    /// An empty queue.
    pub fn new(config: QueueConfig) -> Queue {
        Queue { config, ..Queue::default() }
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// True if nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// True after [`shutdown`](Queue::shutdown).
    pub fn is_shut_down(&self) -> bool {
        self.closed
    }

    /// Who waits for what, the next first.
    pub fn waiting(&self) -> impl Iterator<Item = (WaiterId, &Request)> {
        self.order.iter().map(|rank| (rank.id, &self.waiters[&rank.id].request))
    }

    /// When [`expire`](Queue::expire) has something to do next, in nanoseconds. O(waiters).
    pub fn next_deadline(&self) -> Option<u64> {
        self.waiters.values().filter_map(|waiter| waiter.request.deadline).min()
    }

    /// Serves the request in the first candidate where it fits and passes nobody too far, or
    /// remembers who waits. After a shutdown it is served if that is possible at once, and refused
    /// otherwise. O(waiters); without heap memory if nobody waits.
    ///
    /// # Errors
    /// It can never be served, or it cannot wait.
    pub fn submit(
        &mut self,
        ledger: &mut Ledger,
        request: Request,
        now: u64,
    ) -> Result<Submitted, SubmitError> {
        let bytes = request.bytes;
        let request = match self.try_serve(ledger, request)? {
            ControlFlow::Break(submitted) => return Ok(submitted),
            ControlFlow::Continue(request) => request,
        };
        if self.closed {
            return Err(SubmitError::ShutDown { bytes });
        }
        if let Some(deadline) = request.deadline.filter(|&deadline| deadline <= now) {
            return Err(SubmitError::TooLate { bytes, deadline, now });
        }
        let id = WaiterId(self.next);
        self.next += 1;
        let left = self.config.overtaking;
        let waiter = Waiter { request, urgent: false, left, passed: 0, claim: None };
        self.order.insert(waiter.rank(id));
        self.waiters.insert(id, waiter);
        Ok(Submitted::Waiting(id))
    }

    /// As [`submit`](Queue::submit), but never waits.
    ///
    /// # Errors
    /// It cannot be served now, or never.
    pub fn submit_now(
        &mut self,
        ledger: &mut Ledger,
        request: Request,
    ) -> Result<Submitted, SubmitError> {
        match self.try_serve(ledger, request)? {
            ControlFlow::Break(submitted) => Ok(submitted),
            ControlFlow::Continue(Request { bytes, candidates, .. }) => {
                let mut available = Vec::new();
                for space in candidates {
                    available.push((space, ledger.available(space, Bound::Limit)?));
                }
                Err(SubmitError::NotNow { bytes, available, waiting: self.len() })
            }
        }
    }

    /// Serves everybody who fits, after memory came back to a space. O(1) if nobody waits or it
    /// is still full, else O(waiters), and again O(waiters) for each that is served.
    #[must_use = "these waiters have to be woken"]
    pub fn on_change(&mut self, ledger: &mut Ledger, space: SpaceId) -> Grants {
        if self.is_empty() || ledger.available(space, Bound::Limit).is_ok_and(Bytes::is_zero) {
            return Grants::new();
        }
        self.settle(ledger)
    }

    /// Ends the wait of those whose deadline is `now` or before.
    pub fn expire(&mut self, ledger: &mut Ledger, now: u64) -> Expired {
        let mut late: Vec<(u64, WaiterId)> = self
            .waiters
            .iter()
            .filter_map(|(&id, waiter)| Some((waiter.request.deadline?, id)))
            .filter(|&(deadline, _)| deadline <= now)
            .collect();
        late.sort_unstable();
        if late.is_empty() {
            return Expired::default();
        }
        let timed_out: Vec<WaiterId> = late.into_iter().map(|(_, id)| id).collect();
        timed_out.iter().for_each(|&id| drop(self.remove(id)));
        Expired { timed_out, granted: self.settle(ledger) }
    }

    /// Ends one wait, and serves those that were kept back by it.
    ///
    /// # Errors
    /// It does not wait: if it was served, its reservation has to be released.
    pub fn cancel(
        &mut self,
        ledger: &mut Ledger,
        waiter: WaiterId,
    ) -> Result<Grants, UnknownWaiter> {
        self.remove(waiter).ok_or(UnknownWaiter { waiter })?;
        Ok(self.settle(ledger))
    }

    /// Ends every wait and lets nobody wait from now on. Returns all who waited, in their order:
    /// each has to be woken, and has nothing.
    #[must_use = "these waiters have to be woken"]
    pub fn shutdown(&mut self) -> Vec<WaiterId> {
        self.closed = true;
        self.waiters.clear();
        std::mem::take(&mut self.order).into_iter().map(|rank| rank.id).collect()
    }

    /// Serves a waiter that fits, whomever it passes: the way out of a deadlock by order alone
    /// ([`WayOut::LetPass`](super::WayOut)). Empty if it does not fit.
    ///
    /// # Errors
    /// It does not wait.
    pub fn let_pass(
        &mut self,
        ledger: &mut Ledger,
        waiter: WaiterId,
    ) -> Result<Grants, UnknownWaiter> {
        let found = self.waiters.get(&waiter).ok_or(UnknownWaiter { waiter })?;
        let fitting = fitting(ledger, &found.request, |_| true);
        let mut grants = Grants::new();
        if let Some(space) = fitting {
            self.grant(ledger, found.rank(waiter), space, &mut grants);
            grants.extend(self.settle(ledger));
        }
        Ok(grants)
    }

    /// The request with its possible candidates, or what became of it.
    fn try_serve(
        &mut self,
        ledger: &mut Ledger,
        mut request: Request,
    ) -> Result<ControlFlow<Submitted, Request>, SubmitError> {
        ledger.tag_name(request.tag)?;
        if request.candidates.is_empty() {
            return Err(SubmitError::NoCandidates);
        }
        let bytes = request.bytes;
        let mut large_enough = Candidates::new();
        for &space in &request.candidates {
            // Limits are whole granules, so that rounding up changes nothing here.
            if bytes <= ledger.levels(space)?.limit {
                large_enough.push(space);
            }
        }
        if large_enough.is_empty() {
            let limit = |&space: &SpaceId| Ok((space, ledger.levels(space)?.limit));
            let limits_of =
                request.candidates.iter().map(limit).collect::<Result<_, UnknownSpace>>();
            return Err(SubmitError::NeverFits { bytes, limits_of: limits_of? });
        }
        request.candidates = large_enough;
        let rank = Rank {
            urgent: Reverse(false),
            priority: Reverse(request.priority),
            id: WaiterId(self.next),
        };
        let mut gates = Gates::default();
        for ahead in self.order.range(..rank) {
            gates.narrow(&self.waiters[&ahead.id]);
        }
        let Some(space) = fitting(ledger, &request, |space| gates.admit(space, bytes)) else {
            return Ok(ControlFlow::Continue(request));
        };
        let reservation = reserve(ledger, space, &request);
        self.next += 1;
        let promoted = self.note_passing(rank, space, bytes);
        let others = if promoted { self.settle(ledger) } else { Grants::new() };
        Ok(ControlFlow::Break(Submitted::Granted { reservation, space, others }))
    }

    /// Serves everybody who can be, in order, until nobody can.
    fn settle(&mut self, ledger: &mut Ledger) -> Grants {
        let mut grants = Grants::new();
        'again: loop {
            let mut gates = Gates::default();
            let mut cursor = self.order.first().copied();
            while let Some(rank) = cursor {
                let waiter = &self.waiters[&rank.id];
                let bytes = waiter.request.bytes;
                let space = fitting(ledger, &waiter.request, |space| gates.admit(space, bytes));
                match space {
                    Some(space) => {
                        if self.grant(ledger, rank, space, &mut grants) {
                            continue 'again;
                        }
                        // Those ahead leave less now, also in the other spaces they wait for.
                        for ahead in self.order.range(..rank) {
                            gates.narrow(&self.waiters[&ahead.id]);
                        }
                    }
                    None => gates.narrow(waiter),
                }
                cursor = self.order.range((Excluded(rank), Unbounded)).next().copied();
            }
            return grants;
        }
    }

    /// Serves one waiter. True if another one became urgent by it.
    fn grant(
        &mut self,
        ledger: &mut Ledger,
        rank: Rank,
        space: SpaceId,
        grants: &mut Grants,
    ) -> bool {
        let waiter = self.remove(rank.id).expect("the order holds only those who wait");
        let reservation = reserve(ledger, space, &waiter.request);
        grants.push(Granted { waiter: rank.id, reservation, space });
        self.note_passing(rank, space, waiter.request.bytes)
    }

    /// Counts a grant against those it passed: ahead of it, or older and behind it for its
    /// priority. True if one of those became urgent.
    fn note_passing(&mut self, rank: Rank, space: SpaceId, bytes: Bytes) -> bool {
        let mut urgent = Vec::new();
        for &other in &self.order {
            let waiter = self.waiters.get_mut(&other.id).expect("those in the order wait");
            if !waiter.waits_for(space) {
                continue;
            }
            if other < rank {
                waiter.left.count = waiter.left.count.saturating_sub(1);
                waiter.left.bytes = waiter.left.bytes.saturating_sub(bytes);
            } else if other.id < rank.id {
                waiter.passed += 1;
                if self.config.patience.is_some_and(|patience| waiter.passed >= patience) {
                    urgent.push(other);
                }
            }
        }
        let mut promoted = false;
        for rank in urgent {
            let waiter = self.waiters.get_mut(&rank.id).expect("those in the order wait");
            promoted |= !waiter.urgent;
            waiter.urgent = true;
            let new = waiter.rank(rank.id);
            self.order.remove(&rank);
            self.order.insert(new);
        }
        promoted
    }

    fn remove(&mut self, id: WaiterId) -> Option<Waiter> {
        let waiter = self.waiters.remove(&id)?;
        self.order.remove(&waiter.rank(id));
        Some(waiter)
    }
}

/// The first candidate that has room and is allowed.
pub(super) fn fitting(
    ledger: &Ledger,
    request: &Request,
    allowed: impl Fn(SpaceId) -> bool,
) -> Option<SpaceId> {
    let fits = |space| ledger.can_reserve(space, request.bytes).unwrap_or(false);
    request.candidates.iter().copied().find(|&space| fits(space) && allowed(space))
}

fn reserve(ledger: &mut Ledger, space: SpaceId, request: &Request) -> ReservationId {
    let Request { bytes, owner, tag, .. } = *request;
    let reserved: Result<_, ReserveError> = ledger.reserve(space, bytes, owner, tag);
    reserved.unwrap_or_else(|error| panic!("{bytes} fit in {space} a moment ago: {error}"))
}
