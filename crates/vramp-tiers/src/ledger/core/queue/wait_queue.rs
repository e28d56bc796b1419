//! The wait queue: which request gets memory next.
//!
//! Waiters stand in one order: urgent ones by age, then the others by priority and age. After
//! memory came back to a space, [`WaitQueue::serve_waiters`] grants the waiters that fit now. A
//! waiter is woken with its reservation made, so no wake-up is lost and none is spurious.
//!
//! A request that fits may overtake waiters that do not, within a bound
//! ([`Overtaking`]). A waiter that was overtaken up to its bound keeps all
//! requests behind it out of the spaces it waits for, so that memory gathers for it. Grants to
//! younger requests of higher priority are bounded too ([`QueueConfig::promote_after`]): after
//! that many a waiter becomes urgent. So no waiter starves: at most
//! `overtaking.count + promote_after` younger requests get memory that a waiter could have had.
//!
//! A request may also keep bytes that are charged already ([`Request::kept`]): a lease does, on memory that
//! would be spilled for others. It overtakes waiters within their bound and only if as many bytes are available;
//! as the first in the order it needs no room for them.
//!
//! A request that was served, could not use what it got, and comes again has its [place](Request::place) of before:
//! it is not behind those that came meanwhile.
//!
//! A reservation that grows counts as a new request ([`WaitQueue::grow`]). Allocations do not
//! queue, within a reservation or beyond it: their owner would keep what it holds while it waits.
//! [`Ledger::reserve`] and [`Ledger::grow`] bypass the queue. [`WaitQueue::submit_now`] is for a
//! request that may not wait.
//!
//! Deliberately absent: deadlines. A request whose caller gives up leaves the queue.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};

use smallvec::SmallVec;

use super::{
    Granted, Grants, Overtaking, Priority, QueueConfig, Request, SubmitError, Submitted,
    UnknownWaiter, WaiterId,
};
use crate::ledger::core::{
    Bound, Candidates, GrowError, Ledger, LedgerReserveError, ReservationId, SpaceId, UnknownSpace,
};
use vramp_core::{Bytes, Inconsistency};

/// Bytes that a waiter has undertaken to have spilled from a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub space: SpaceId,
    pub left: Bytes,
    /// A spiller is being called for it.
    pub in_step: bool,
}

type Sizes = BTreeMap<SpaceId, BTreeSet<(Bytes, WaiterId)>>;

/// The waiters of all spaces, in the order in which they are served.
#[derive(Clone, Debug, Default)]
pub struct WaitQueue {
    config: QueueConfig,
    pub(super) waiters: BTreeMap<WaiterId, Waiter>,
    pub(super) order: BTreeSet<Rank>,
    /// Includes claims of waiters that left the queue during a step of their spilling.
    pub(super) claims: BTreeMap<WaiterId, Claim>,
    /// Waiters of each space by size, so that one look at the smallest says whether any fits.
    pub(super) sizes: Sizes,
    /// Those that keep bytes instead, by what they take.
    pub(super) keeping: Sizes,
    next: u64,
    closed: bool,
}

impl WaitQueue {
    /// An empty queue.
    pub fn new(config: QueueConfig) -> WaitQueue {
        WaitQueue { config, ..WaitQueue::default() }
    }

    /// Number of waiters.
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// True without waiters.
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// True if a request waits for memory of `space`. O(log spaces).
    pub fn has_waiters(&self, space: SpaceId) -> bool {
        let of = |sizes: &Sizes| sizes.get(&space).is_some_and(|waiters| !waiters.is_empty());
        of(&self.sizes) || of(&self.keeping)
    }

    /// True after [`shutdown`](WaitQueue::shutdown).
    pub fn is_shut_down(&self) -> bool {
        self.closed
    }

    /// The waiters and their requests, the first in the order first.
    pub fn waiting(&self) -> impl Iterator<Item = (WaiterId, &Request)> {
        self.order.iter().map(|rank| (rank.id, &self.waiters[&rank.id].request))
    }

    /// Serves the request in the first candidate with room where no waiter is overtaken too far, or
    /// queues it. After a shutdown it is served at once or refused. O(waiters); without waiters
    /// O(candidates) and without heap memory.
    ///
    /// # Errors
    /// It can never be served, or may not wait.
    #[inline]
    pub fn submit(
        &mut self,
        ledger: &mut Ledger,
        request: &Request,
    ) -> Result<Submitted, SubmitError> {
        match self.serve_uncontended(ledger, request) {
            Some(granted) => Ok(granted),
            None => self.submit_contended(ledger, request),
        }
    }

    fn submit_contended(
        &mut self,
        ledger: &mut Ledger,
        request: &Request,
    ) -> Result<Submitted, SubmitError> {
        let request = match self.serve_in_order(ledger, request)? {
            Ok(granted) => return Ok(granted),
            Err(request) => request,
        };
        if self.closed {
            return Err(SubmitError::ShutDown { bytes: request.bytes });
        }
        let Rank { id, .. } = self.rank_of(&request);
        self.next += 1;
        let left = self.config.overtaking;
        let sizes = self.sizes_with(&request);
        for &space in &request.candidates {
            sizes.entry(space).or_default().insert((request.takes(), id));
        }
        let waiter = Waiter { request, urgent: false, left, passed: 0 };
        self.order.insert(waiter.rank(id));
        self.waiters.insert(id, waiter);
        Ok(Submitted::Waiting(id))
    }

    /// As [`submit`](WaitQueue::submit), but the request never waits.
    ///
    /// # Errors
    /// It cannot be served now, or never.
    #[inline]
    pub fn submit_now(
        &mut self,
        ledger: &mut Ledger,
        request: &Request,
    ) -> Result<Submitted, SubmitError> {
        match self.serve_uncontended(ledger, request) {
            Some(granted) => Ok(granted),
            None => self.submit_now_contended(ledger, request),
        }
    }

    fn submit_now_contended(
        &mut self,
        ledger: &mut Ledger,
        request: &Request,
    ) -> Result<Submitted, SubmitError> {
        let request = match self.serve_in_order(ledger, request)? {
            Ok(granted) => return Ok(granted),
            Err(request) => request,
        };
        let mut available = Vec::new();
        for space in request.candidates {
            available.push((space, ledger.available(space, Bound::Limit)?));
        }
        Err(SubmitError::NotNow { bytes: request.bytes, available, waiting: self.len() })
    }

    /// Reserves between `min` and `request.bytes` now, as much as possible, in the candidate with
    /// the most room; of equals in the first one. With a `min` of zero it succeeds even without
    /// room, with an empty reservation in the first candidate. Never waits.
    ///
    /// # Errors
    /// Less than `min` is available in every candidate, or waiters go first.
    pub fn submit_up_to(
        &mut self,
        ledger: &mut Ledger,
        request: &Request,
        min: Bytes,
    ) -> Result<Submitted, SubmitError> {
        let room = |&space: &SpaceId| {
            let available = ledger.available(space, Bound::Limit).unwrap_or_default();
            (available.min(request.bytes).max(min), space)
        };
        let mut choices: Vec<(Bytes, SpaceId)> = request.candidates.iter().map(room).collect();
        // The sort is stable: equal spaces keep the order of preference.
        choices.sort_by_key(|&(room, _)| Reverse(room));
        let mut refused = SubmitError::NoCandidates;
        for (bytes, space) in choices {
            let candidates = Candidates::from_slice(&[space]);
            let part = Request { bytes, candidates, ..request.clone() };
            match self.submit_now(ledger, &part) {
                Ok(granted) => return Ok(granted),
                Err(error) => refused = error,
            }
        }
        if let Some(&space) = request.candidates.first().filter(|_| min.is_zero())
            && let Ok(reservation) = ledger.reserve(space, min, request.owner, request.tag)
        {
            return Ok(Submitted::Granted { reservation, space, others: Grants::new() });
        }
        Err(refused)
    }

    /// Serves all waiters that fit, after memory came back to `space`. O(log waiters) if not even
    /// the smallest request there fits. Otherwise O(waiters ahead of the last one served), and as
    /// much again for each waiter that becomes urgent.
    #[must_use = "these waiters have to be woken"]
    pub fn serve_waiters(&mut self, ledger: &mut Ledger, space: SpaceId) -> Grants {
        if self.is_empty() || !self.room_for_any(ledger, space, &Allowances::default()) {
            return Grants::new();
        }
        self.settle(ledger)
    }

    /// Makes a reservation larger now, if there is room and the waiters may be overtaken by a new
    /// request of this priority. Returns waiters that became urgent by this and were served too.
    ///
    /// # Errors
    /// There is no room, or waiters go first. The reservation does not change.
    pub fn grow(
        &mut self,
        ledger: &mut Ledger,
        id: ReservationId,
        by: Bytes,
        priority: Priority,
    ) -> Result<Grants, GrowError> {
        let record = *ledger.active(id)?;
        let by = ledger.levels_of(&record).round_up(by);
        let size = record.size.checked_add(by).unwrap_or(Bytes::new(u64::MAX));
        let more = size.max(record.used) - record.charged();
        // Bytes that it uses beyond its size are charged already.
        if self.is_empty() || more.is_zero() {
            ledger.grow(id, by)?;
            return Ok(Grants::new());
        }
        let rank = self.newest(priority);
        let mut allowances = Allowances::default();
        for ahead in self.order.range(..rank) {
            allowances.restrict(&self.waiters[&ahead.id]);
        }
        if !allowances.permit(record.space, more)
            && ledger.can_reserve(record.space, more).unwrap_or(false)
        {
            return Err(GrowError::Behind { id, by, waiting: self.len() });
        }
        ledger.grow(id, by)?;
        self.next += 1;
        let promoted = self.note_passing(rank, record.space, more);
        Ok(if promoted { self.settle(ledger) } else { Grants::new() })
    }

    /// Ends one wait, and serves the waiters that were behind it and fit.
    ///
    /// # Errors
    /// The waiter is not in the queue. If it was served, its reservation has to be released.
    pub fn cancel(
        &mut self,
        ledger: &mut Ledger,
        waiter: WaiterId,
    ) -> Result<Grants, UnknownWaiter> {
        self.remove(waiter).ok_or(UnknownWaiter { waiter })?;
        Ok(self.settle(ledger))
    }

    /// Ends several waits, and then serves the waiters that were behind these and fit.
    #[must_use = "these waiters have to be woken"]
    pub fn leave(&mut self, ledger: &mut Ledger, waiters: &[WaiterId]) -> Grants {
        match waiters.iter().filter(|&&waiter| self.remove(waiter).is_some()).count() {
            0 => Grants::new(),
            _ => self.settle(ledger),
        }
    }

    /// Ends every wait and accepts no waiter from now on. Returns all waiters in their order: each
    /// has to be woken, and has no reservation.
    #[must_use = "these waiters have to be woken"]
    pub fn shutdown(&mut self) -> Vec<WaiterId> {
        self.closed = true;
        self.waiters.clear();
        self.sizes.clear();
        self.keeping.clear();
        self.claims.clear();
        std::mem::take(&mut self.order).into_iter().map(|rank| rank.id).collect()
    }

    /// Serves a waiter that fits, however many waiters it overtakes. Ends a deadlock that the order
    /// alone causes ([`Resolution::GrantOutOfOrder`](super::Resolution)). Empty if it does not fit.
    ///
    /// # Errors
    /// The waiter is not in the queue.
    pub fn grant_out_of_order(
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

    /// Serves a request that fits while no request waits: the common case. `None` for all else.
    #[inline]
    fn serve_uncontended(&mut self, ledger: &mut Ledger, request: &Request) -> Option<Submitted> {
        if !self.is_empty() {
            return None;
        }
        let mut first = None;
        for &space in &request.candidates {
            // An unknown space is an error of the whole request, wherever it stands.
            let fits = ledger.can_reserve(space, request.bytes).ok()?;
            first = first.or(fits.then_some(space));
        }
        let space = first?;
        let Request { bytes, owner, tag, .. } = *request;
        let reservation = ledger.reserve(space, bytes, owner, tag).ok()?;
        self.next += 1;
        Some(Submitted::Granted { reservation, space, others: Grants::new() })
    }

    /// Serves a request if the waiters ahead of it let it pass. Otherwise returns it, with the candidates that are
    /// large enough.
    fn serve_in_order(
        &mut self,
        ledger: &mut Ledger,
        request: &Request,
    ) -> Result<Result<Submitted, Request>, SubmitError> {
        let candidates = large_enough(ledger, request)?;
        let request = Request { candidates, ..request.clone() };
        let rank = self.rank_of(&request);
        let Some(space) = self.admitted(ledger, &request, rank) else { return Ok(Err(request)) };
        let reservation = reserve(ledger, space, &request);
        self.next += 1;
        let promoted = self.note_passing(rank, space, request.takes());
        let others = if promoted { self.settle(ledger) } else { Grants::new() };
        Ok(Ok(Submitted::Granted { reservation, space, others }))
    }

    /// The rank of a request that enters now.
    fn rank_of(&self, request: &Request) -> Rank {
        let place = request.place.filter(|id| id.0 < self.next && !self.waiters.contains_key(id));
        Rank { id: place.unwrap_or(WaiterId(self.next)), ..self.newest(request.priority) }
    }

    /// The rank of a request that arrives now.
    fn newest(&self, priority: Priority) -> Rank {
        Rank { urgent: Reverse(false), priority: Reverse(priority), id: WaiterId(self.next) }
    }

    /// The first candidate with room where the waiters ahead of `rank` may be overtaken.
    fn admitted(&self, ledger: &Ledger, request: &Request, rank: Rank) -> Option<SpaceId> {
        let mut allowances = Allowances::default();
        let open = |allowances: &Allowances| {
            fitting(ledger, request, |space| allowances.admit(ledger, space, request))
        };
        let mut space = open(&allowances)?;
        for ahead in self.order.range(..rank) {
            if allowances.restrict(&self.waiters[&ahead.id]) {
                space = open(&allowances)?;
            }
        }
        Some(space)
    }

    /// True if the smallest request that waits for `space` fits there and may overtake, or the one that takes
    /// least of those that keep bytes may.
    fn room_for_any(&self, ledger: &Ledger, space: SpaceId, allowances: &Allowances) -> bool {
        // What is available is whole granules, so that rounding up changes nothing here.
        let available = ledger.available(space, Bound::Limit).unwrap_or_default();
        let smallest = |sizes: &Sizes| sizes.get(&space)?.first().map(|&(takes, _)| takes);
        let fits = |&takes: &Bytes| takes <= available && allowances.permit(space, takes);
        smallest(&self.sizes).is_some_and(|bytes| fits(&bytes))
            || smallest(&self.keeping)
                .is_some_and(|takes| !allowances.restrict_any(space) || fits(&takes))
    }

    /// The index that has a request, by what it takes.
    fn sizes_with(&mut self, request: &Request) -> &mut Sizes {
        if request.kept.is_zero() { &mut self.sizes } else { &mut self.keeping }
    }

    /// Serves waiters in order until none can be served.
    fn settle(&mut self, ledger: &mut Ledger) -> Grants {
        let mut grants = Grants::new();
        'again: loop {
            let mut allowances = Allowances::default();
            let mut cursor = self.order.first().copied();
            let mut restricted = true;
            while let Some(rank) = cursor {
                let any = |&space: &SpaceId| self.room_for_any(ledger, space, &allowances);
                if std::mem::take(&mut restricted)
                    && !self.sizes.keys().chain(self.keeping.keys()).any(any)
                {
                    return grants;
                }
                let waiter = &self.waiters[&rank.id];
                let request = &waiter.request;
                let admit = |space| allowances.admit(ledger, space, request);
                let space = fitting(ledger, request, admit);
                match space {
                    Some(space) => {
                        if self.grant(ledger, rank, space, &mut grants) {
                            continue 'again;
                        }
                        // Waiters ahead permit less now, also in other spaces they wait for.
                        for ahead in self.order.range(..rank) {
                            allowances.restrict(&self.waiters[&ahead.id]);
                        }
                        restricted = true;
                    }
                    None => restricted = allowances.restrict(waiter),
                }
                cursor = self.order.range((Excluded(rank), Unbounded)).next().copied();
            }
            return grants;
        }
    }

    /// Serves one waiter. True if another waiter became urgent by it.
    fn grant(
        &mut self,
        ledger: &mut Ledger,
        rank: Rank,
        space: SpaceId,
        grants: &mut Grants,
    ) -> bool {
        let waiter = self.remove(rank.id).expect("the order holds only waiters");
        let reservation = reserve(ledger, space, &waiter.request);
        grants.push(Granted { waiter: rank.id, reservation, space });
        self.note_passing(rank, space, waiter.request.takes())
    }

    /// Counts a grant for the waiters it overtook, and for older waiters of lower priority. True if
    /// one of the latter became urgent.
    fn note_passing(&mut self, rank: Rank, space: SpaceId, bytes: Bytes) -> bool {
        for ahead in self.order.range(..rank) {
            let waiter = self.waiters.get_mut(&ahead.id).expect("the order holds only waiters");
            if waiter.waits_for(space) {
                waiter.left.count = waiter.left.count.saturating_sub(1);
                waiter.left.bytes = waiter.left.bytes.saturating_sub(bytes);
            }
        }
        let mut urgent = Vec::new();
        for (&id, waiter) in self.waiters.range_mut(..rank.id) {
            let other = waiter.rank(id);
            if other > rank && waiter.waits_for(space) {
                waiter.passed += 1;
                if self
                    .config
                    .promote_after
                    .is_some_and(|promote_after| waiter.passed >= promote_after)
                {
                    urgent.push(other);
                }
            }
        }
        let mut promoted = false;
        for rank in urgent {
            let waiter = self.waiters.get_mut(&rank.id).expect("the order holds only waiters");
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
        let sizes = self.sizes_with(&waiter.request);
        for space in &waiter.request.candidates {
            if let Some(sizes) = sizes.get_mut(space) {
                sizes.remove(&(waiter.request.takes(), id));
            }
        }
        self.drop_idle_claim(id);
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

/// The candidates whose limit is not below the requested size.
fn large_enough(ledger: &Ledger, request: &Request) -> Result<Candidates, SubmitError> {
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
    if !large_enough.is_empty() {
        return Ok(large_enough);
    }
    let limit = |&space: &SpaceId| Ok((space, ledger.levels(space)?.limit));
    let limits_of = request.candidates.iter().map(limit).collect::<Result<_, UnknownSpace>>();
    Err(SubmitError::NeverFits { bytes, limits_of: limits_of? })
}

fn reserve(ledger: &mut Ledger, space: SpaceId, request: &Request) -> ReservationId {
    let Request { bytes, owner, tag, .. } = *request;
    let reserved: Result<_, LedgerReserveError> = ledger.reserve(space, bytes, owner, tag);
    reserved.unwrap_or_else(|error| panic!("{bytes} fit in {space} a moment ago: {error}"))
}

/// A waiter's position: urgent waiters by age, then the others by priority and age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub urgent: Reverse<bool>,
    pub priority: Reverse<Priority>,
    pub id: WaiterId,
}

#[derive(Clone, Debug)]
pub(super) struct Waiter {
    /// The request, with only those candidates that are large enough.
    pub request: Request,
    pub urgent: bool,
    /// Overtaking that this waiter still permits.
    pub left: Overtaking,
    /// Grants to younger requests of higher priority so far.
    pub passed: u32,
}

impl Waiter {
    pub(super) fn rank(&self, id: WaiterId) -> Rank {
        // Urgent waiters are ordered by age alone: by priority they could overtake one another
        // without end.
        let priority = if self.urgent { Priority::default() } else { self.request.priority };
        Rank { urgent: Reverse(self.urgent), priority: Reverse(priority), id }
    }

    pub(super) fn waits_for(&self, space: SpaceId) -> bool {
        self.request.candidates.contains(&space)
    }
}

/// Overtaking that the waiters seen so far permit, for each space.
#[derive(Default)]
pub(super) struct Allowances(SmallVec<[(SpaceId, Overtaking); 8]>);

impl Allowances {
    /// True if a request may overtake all waiters seen so far in `space`. One that keeps bytes needs as much room,
    /// if it overtakes any.
    pub(super) fn admit(&self, ledger: &Ledger, space: SpaceId, request: &Request) -> bool {
        let has_room = || {
            request.kept.is_zero() || ledger.can_reserve(space, request.takes()).unwrap_or(false)
        };
        !self.restrict_any(space) || self.permit(space, request.takes()) && has_room()
    }

    /// True if requests that take `bytes` may overtake all waiters seen so far in `space`.
    pub(super) fn permit(&self, space: SpaceId, bytes: Bytes) -> bool {
        let allowance = self.0.iter().find(|(restricted, _)| *restricted == space);
        allowance.is_none_or(|(_, left)| left.count > 0 && left.bytes >= bytes)
    }

    /// True if a waiter was seen in `space`.
    fn restrict_any(&self, space: SpaceId) -> bool {
        self.0.iter().any(|(restricted, _)| *restricted == space)
    }

    /// Adds one more waiter. True if less is permitted than before.
    pub(super) fn restrict(&mut self, waiter: &Waiter) -> bool {
        let mut restricted = false;
        for &space in &waiter.request.candidates {
            match self.0.iter_mut().find(|(known, _)| *known == space) {
                Some((_, left)) => {
                    let before = *left;
                    left.count = left.count.min(waiter.left.count);
                    left.bytes = left.bytes.min(waiter.left.bytes);
                    restricted |= before != *left;
                }
                None => {
                    self.0.push((space, waiter.left));
                    restricted = true;
                }
            }
        }
        restricted
    }
}

impl WaitQueue {
    /// Checks that the order and the size index hold exactly the waiters, and that claims are of waiters
    /// or in a step. O(waiters).
    ///
    /// # Errors
    /// The first invariant that does not hold: a bug in the queue, never a caller's mistake.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let candidates = self.waiters.values().map(|waiter| waiter.request.candidates.len()).sum();
        let of = |sizes: &Sizes| sizes.values().map(BTreeSet::len).sum::<usize>();
        let sizes = of(&self.sizes) + of(&self.keeping);
        let missing = self.waiters.iter().find(|&(&id, waiter)| {
            let indexed = |space| {
                let keeps = !waiter.request.kept.is_zero();
                let sizes = if keeps { &self.keeping } else { &self.sizes }.get(space);
                sizes.is_some_and(|sizes| sizes.contains(&(waiter.request.takes(), id)))
            };
            !self.order.contains(&waiter.rank(id)) || !waiter.request.candidates.iter().all(indexed)
        });
        let is_left = |id, claim: &Claim| !claim.in_step && !self.waiters.contains_key(id);
        if let Some((id, _)) = self.claims.iter().find(|(id, claim)| is_left(id, claim)) {
            return Err(Inconsistency { what: format!("{id} left the queue but not its claim") });
        }
        match missing {
            Some((id, _)) => Err(Inconsistency { what: format!("{id} is not in order and index") }),
            None if (self.order.len(), sizes) == (self.waiters.len(), candidates) => Ok(()),
            None => {
                Err(Inconsistency { what: "order or index hold an id without a waiter".into() })
            }
        }
    }
}
