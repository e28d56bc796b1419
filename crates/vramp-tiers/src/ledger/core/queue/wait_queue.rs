//! The broker: who gets memory next.
//!
//! Waiters stand in one order: urgent ones by age, then the others by priority and age. Whoever returned memory
//! to a space calls [`WaitQueue::serve_waiters`], and exactly those that now fit are granted, there and
//! then: a wake-up cannot be lost, because a waiter is woken with its reservation in hand, and
//! nobody is woken in vain.
//!
//! A request that fits may pass those ahead of it that do not, but only so often and by so much
//! ([`Overtaking`](super::Overtaking)): a waiter that has been passed to its bound keeps everybody behind it out of
//! the spaces it waits for, so that memory gathers for it. Being passed by younger requests of
//! higher priority is bounded too ([`QueueConfig::promote_after`]): after that a waiter is urgent. So
//! nobody starves: at most `overtaking.count + promote_after` younger requests get memory that a waiter
//! could have had.
//!
//! A reservation that grows passes those who wait as a new request would ([`WaitQueue::grow`]).
//! What is allocated, within a reservation or beyond it, does not queue: whoever allocates is in the
//! midst of its work, and would keep what it holds while it waits. [`Ledger::reserve`] and
//! [`Ledger::grow`] do not queue either; use [`WaitQueue::submit_now`] for a request that shall not wait.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::ops::ControlFlow;

use super::claim::Claim;
use super::order::{Allowances, Rank, Waiter};
use super::{
    Expired, Granted, Grants, Priority, QueueConfig, Request, SubmitError, Submitted,
    UnknownWaiter, WaiterId,
};
use crate::ledger::core::{
    Bound, Candidates, GrowError, Ledger, LedgerReserveError, ReservationId, SpaceId, UnknownSpace,
};
use vramp_core::Bytes;

/// Everybody who waits for memory.
#[derive(Clone, Debug, Default)]
pub struct WaitQueue {
    config: QueueConfig,
    pub(super) waiters: BTreeMap<WaiterId, Waiter>,
    pub(super) order: BTreeSet<Rank>,
    /// Also of some that were served in the midst of spilling.
    pub(super) claims: BTreeMap<WaiterId, Claim>,
    /// What waits for each space, the smallest first: whether anybody there can be served is told
    /// without asking everybody.
    pub(super) sizes: BTreeMap<SpaceId, BTreeSet<(Bytes, WaiterId)>>,
    next: u64,
    closed: bool,
}

impl WaitQueue {
    /// An empty queue.
    pub fn new(config: QueueConfig) -> WaitQueue {
        WaitQueue { config, ..WaitQueue::default() }
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// True if nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// True after [`shutdown`](WaitQueue::shutdown).
    pub fn is_shut_down(&self) -> bool {
        self.closed
    }

    /// Who waits for what, the next first.
    pub fn waiting(&self) -> impl Iterator<Item = (WaiterId, &Request)> {
        self.order.iter().map(|rank| (rank.id, &self.waiters[&rank.id].request))
    }

    /// When [`expire`](WaitQueue::expire) has something to do next, in nanoseconds. O(waiters).
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
        for &space in &request.candidates {
            self.sizes.entry(space).or_default().insert((request.bytes, id));
        }
        let waiter = Waiter { request, urgent: false, left, passed: 0 };
        self.order.insert(waiter.rank(id));
        self.waiters.insert(id, waiter);
        Ok(Submitted::Waiting(id))
    }

    /// As [`submit`](WaitQueue::submit), but never waits.
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

    /// Serves everybody who fits, after memory came back to a space. O(log waiters) if not even the
    /// smallest request there fits; else O(those ahead of the last that is served), and the same
    /// again for each.
    #[must_use = "these waiters have to be woken"]
    pub fn serve_waiters(&mut self, ledger: &mut Ledger, space: SpaceId) -> Grants {
        if self.is_empty() || !self.room_for_any(ledger, space, &Allowances::default()) {
            return Grants::new();
        }
        self.settle(ledger)
    }

    /// Makes a reservation larger at once, if there is room and those who wait let it pass, as they
    /// would the youngest request of priority zero. Returns waiters that became urgent by this and are
    /// served too.
    ///
    /// # Errors
    /// No room, or others are before it; the reservation stays as it is.
    pub fn grow(
        &mut self,
        ledger: &mut Ledger,
        id: ReservationId,
        by: Bytes,
    ) -> Result<Grants, GrowError> {
        let record = *ledger.active(id)?;
        let by = ledger.levels_of(&record).round_up(by);
        let size = record.size.checked_add(by).unwrap_or(Bytes::new(u64::MAX));
        let more = size.max(record.used) - record.charged();
        // What it uses beyond its size already is taken from nobody.
        if self.is_empty() || more.is_zero() {
            ledger.grow(id, by)?;
            return Ok(Grants::new());
        }
        let rank = self.newest(Priority::default());
        let mut allowances = Allowances::default();
        for ahead in self.order.range(..rank) {
            allowances.narrow(&self.waiters[&ahead.id]);
        }
        if !allowances.admit(record.space, more)
            && ledger.can_reserve(record.space, more).unwrap_or(false)
        {
            return Err(GrowError::Behind { id, by, waiting: self.len() });
        }
        ledger.grow(id, by)?;
        self.next += 1;
        let promoted = self.note_passing(rank, record.space, more);
        Ok(if promoted { self.settle(ledger) } else { Grants::new() })
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
        self.sizes.clear();
        self.claims.clear();
        std::mem::take(&mut self.order).into_iter().map(|rank| rank.id).collect()
    }

    /// Serves a waiter that fits, whomever it passes: the way out of a deadlock by order alone
    /// ([`Resolution::GrantOutOfOrder`](super::Resolution)). Empty if it does not fit.
    ///
    /// # Errors
    /// It does not wait.
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
        let rank = self.newest(request.priority);
        let Some(space) = self.admitted(ledger, &request, rank) else {
            return Ok(ControlFlow::Continue(request));
        };
        let reservation = reserve(ledger, space, &request);
        self.next += 1;
        let promoted = self.note_passing(rank, space, bytes);
        let others = if promoted { self.settle(ledger) } else { Grants::new() };
        Ok(ControlFlow::Break(Submitted::Granted { reservation, space, others }))
    }

    /// The place of a request that comes now.
    fn newest(&self, priority: Priority) -> Rank {
        Rank { urgent: Reverse(false), priority: Reverse(priority), id: WaiterId(self.next) }
    }

    /// The first candidate where there is room and those ahead of `rank` let it pass.
    fn admitted(&self, ledger: &Ledger, request: &Request, rank: Rank) -> Option<SpaceId> {
        let mut allowances = Allowances::default();
        let open = |allowances: &Allowances| {
            fitting(ledger, request, |space| allowances.admit(space, request.bytes))
        };
        let mut space = open(&allowances)?;
        for ahead in self.order.range(..rank) {
            if allowances.narrow(&self.waiters[&ahead.id]) {
                space = open(&allowances)?;
            }
        }
        Some(space)
    }

    /// True if the smallest request that waits for `space` has room there and is let pass.
    fn room_for_any(&self, ledger: &Ledger, space: SpaceId, allowances: &Allowances) -> bool {
        // What is available is whole granules, so that rounding up changes nothing here.
        let available = ledger.available(space, Bound::Limit).unwrap_or_default();
        let smallest = self.sizes.get(&space).and_then(|sizes| sizes.first());
        smallest.is_some_and(|&(bytes, _)| bytes <= available && allowances.admit(space, bytes))
    }

    /// Serves everybody who can be, in order, until nobody can.
    fn settle(&mut self, ledger: &mut Ledger) -> Grants {
        let mut grants = Grants::new();
        'again: loop {
            let mut allowances = Allowances::default();
            let mut cursor = self.order.first().copied();
            let mut narrower = true;
            while let Some(rank) = cursor {
                let any = |&space: &SpaceId| self.room_for_any(ledger, space, &allowances);
                if std::mem::take(&mut narrower) && !self.sizes.keys().any(any) {
                    return grants;
                }
                let waiter = &self.waiters[&rank.id];
                let bytes = waiter.request.bytes;
                let space =
                    fitting(ledger, &waiter.request, |space| allowances.admit(space, bytes));
                match space {
                    Some(space) => {
                        if self.grant(ledger, rank, space, &mut grants) {
                            continue 'again;
                        }
                        // Those ahead leave less now, also in the other spaces they wait for.
                        for ahead in self.order.range(..rank) {
                            allowances.narrow(&self.waiters[&ahead.id]);
                        }
                        narrower = true;
                    }
                    None => narrower = allowances.narrow(waiter),
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
        for ahead in self.order.range(..rank) {
            let waiter = self.waiters.get_mut(&ahead.id).expect("those in the order wait");
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
        for space in &waiter.request.candidates {
            if let Some(sizes) = self.sizes.get_mut(space) {
                sizes.remove(&(waiter.request.bytes, id));
            }
        }
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
    let reserved: Result<_, LedgerReserveError> = ledger.reserve(space, bytes, owner, tag);
    reserved.unwrap_or_else(|error| panic!("{bytes} fit in {space} a moment ago: {error}"))
}
