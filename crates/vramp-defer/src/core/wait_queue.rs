//! The wait queue: refused requests in order of arrival.
//!
//! 1. A refused request enters the queue ([`Deferrables::enqueue`]). It holds nothing there.
//! 2. It retries with its ticket after each change. A lease is granted only if no older waiter
//!    conflicts with it, so a sequence of later requests cannot starve a waiter.
//! 3. Granted or not, it leaves the queue ([`Deferrables::dequeue`]).
//!
//! Two requests conflict if
//! - both name a buffer that one of them writes, or that one uses on the card and the other reads
//!   in place; or
//! - the older one lacks room, and the younger one would keep some from it.
//!
//! There is one exception. The holder of a lease that an older waiter needs, directly or through
//! other waiters, may overtake it: else it would wait for itself. So a thread that takes one lease
//! after another, and always holds one of them, overtakes others.
//!
//! Deliberately absent: deadlines. The caller that gives up leaves the queue.

use std::collections::BTreeSet;

use smallvec::SmallVec;

use super::in_place::SplitRequest;
use super::{
    Access, BufferId, BufferLeaseId, Deferrables, HolderKey, LeaseRefused, LeaseRequest, Ticket,
    UnknownBuffer,
};
use vramp_core::Bytes;

/// A request in the queue.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    /// Each once, with the stronger access.
    pub buffers: SmallVec<[(BufferId, Access); 4]>,
    /// Buffers that it reads in place if possible when it is granted.
    pub in_place_allowed: SmallVec<[BufferId; 2]>,
    pub holder: HolderKey,
}

impl Deferrables {
    /// Adds a request to the end of the queue. A request that is in the queue keeps its place, and
    /// now waits for these buffers and what `in_place_allowed` names.
    ///
    /// # Errors
    /// A buffer does not exist.
    pub fn enqueue(
        &mut self,
        request: &LeaseRequest<'_>,
        in_place_allowed: &[BufferId],
    ) -> Result<Ticket, UnknownBuffer> {
        let buffers = self.by_strongest_access(request.buffers)?;
        let known = request.ticket.filter(|ticket| self.wait_queue.contains_key(ticket));
        let ticket = known.unwrap_or_else(|| Ticket(self.next()));
        let waiter =
            Waiter { buffers, in_place_allowed: in_place_allowed.into(), holder: request.holder };
        self.wait_queue.insert(ticket, waiter);
        Ok(ticket)
    }

    /// Removes a request from the queue, granted or not. Returns false if it was not there.
    pub fn dequeue(&mut self, ticket: Ticket) -> bool {
        self.wait_queue.remove(&ticket).is_some()
    }

    /// Refuses a request with the older waiters that it must not overtake, the oldest first. O(1)
    /// if the queue is empty, O(queue * pieces) for a holder without leases, at most O(queue^3 *
    /// pieces).
    pub(super) fn check_queue(
        &self,
        wanted: &SplitRequest,
        request: &LeaseRequest<'_>,
    ) -> Result<(), LeaseRefused> {
        let older = self.older(request.ticket);
        let in_front = |&(&ticket, waiter): &(&Ticket, &Waiter)| {
            self.conflict(&self.wanted_by(waiter), wanted)
                && !self.is_waited_for_by(request.holder, ticket)
        };
        let waiting: Vec<Ticket> = older.filter(in_front).map(|(&ticket, _)| ticket).collect();
        match waiting.is_empty() {
            true => Ok(()),
            false => Err(LeaseRefused::OlderWaiters { waiting }),
        }
    }

    fn older(&self, ticket: Option<Ticket>) -> impl Iterator<Item = (&Ticket, &Waiter)> {
        let end = ticket.unwrap_or(Ticket(u64::MAX));
        self.wait_queue.range(..end)
    }

    fn wanted_by(&self, waiter: &Waiter) -> SplitRequest {
        self.split_by_place(&waiter.buffers, &waiter.in_place_allowed)
    }

    /// Returns true if the younger request would take, or keep, what the older one waits for.
    fn conflict(&self, older: &SplitRequest, younger: &SplitRequest) -> bool {
        let same = |&(buffer, access): &(BufferId, Access)| {
            let mut others = older.come.iter();
            others.any(|&(other, held)| other == buffer && access.max(held) == Access::Exclusive)
        };
        // No work uses a buffer on the card while it is read in place.
        let apart = |one: &SplitRequest, other: &SplitRequest| {
            one.stay.iter().any(|id| other.come.iter().any(|(come, _)| come == id))
        };
        if younger.come.iter().any(same) || apart(older, younger) || apart(younger, older) {
            return true;
        }
        if !self.lacks_room(older) {
            return false;
        }
        // What the older one needs too, and what no lease keeps on the card, is not taken from it.
        let needed = self.ranges_of(&older.come);
        let mut ranges = self.ranges_of(&younger.come).into_iter();
        ranges.any(|range| !needed.contains(&range) && !self.is_pinned_or_exposed(range))
    }

    /// Returns true if a request waits for room that it can have once leases end. One that waits
    /// for more, for a pin to be removed, holds up no other.
    fn lacks_room(&self, wanted: &SplitRequest) -> bool {
        let all_there = wanted.come.iter().all(|&(id, _)| self.buffers.contains_key(id));
        if !all_there || self.has_room(&wanted.come).is_ok() {
            return false;
        }
        let own = self.ranges_of(&wanted.come);
        let others = self.ranges.keys().filter(|range| !own.contains(range));
        let kept: Bytes = others
            .filter(|&range| self.is_pinned_or_exposed(range))
            .map(|range| self.ranges[range].len)
            .sum();
        let needed: Bytes = own.iter().map(|&range| self.ranges[range].len).sum();
        kept + needed <= self.config.capacity
    }

    /// Returns true if a range would stay on the card without any lease.
    fn is_pinned_or_exposed(&self, range: super::RangeId) -> bool {
        self.tenants(range).any(|id| self.buffers[id].is_pinned_or_exposed())
    }

    /// Returns true if a waiter cannot be granted before `holder` ends a lease.
    fn is_waited_for_by(&self, holder: HolderKey, ticket: Ticket) -> bool {
        if !self.leases.values().any(|lease| lease.holder == holder) {
            return false;
        }
        let mut holders = BTreeSet::new();
        let mut known = BTreeSet::from([ticket]);
        let mut open = vec![ticket];
        while let Some(ticket) = open.pop() {
            let wanted = self.wanted_by(&self.wait_queue[&ticket]);
            let leases = self.leases_before(&wanted);
            holders.extend(leases.iter().map(|lease| self.leases[lease].holder));
            let in_front = self.older(Some(ticket));
            let in_front =
                in_front.filter(|(_, older)| self.conflict(&self.wanted_by(older), &wanted));
            let waits_too =
                self.wait_queue.iter().filter(|(_, other)| holders.contains(&other.holder));
            open.extend(in_front.chain(waits_too).map(|(&t, _)| t).filter(|&t| known.insert(t)));
        }
        holders.contains(&holder)
    }

    /// Returns the leases that must end before a waiter can be granted. What is read in place waits
    /// for none.
    fn leases_before(&self, wanted: &SplitRequest) -> BTreeSet<BufferLeaseId> {
        let there = |&&(id, _): &&(BufferId, Access)| self.buffers.contains_key(id);
        let there: SmallVec<[_; 4]> = wanted.come.iter().filter(there).copied().collect();
        let mut leases = self.excluding_leases(&there);
        if self.lacks_room(wanted) {
            leases.extend(self.leases_with_room());
        }
        leases
    }
}
