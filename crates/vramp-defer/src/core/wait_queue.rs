//! The line: requests that were refused and wait, in the order of their arrival.
//!
//! 1. A refused request lines up ([`Deferrables::enqueue`]). In line it holds nothing.
//! 2. It asks again with its ticket, whenever something changed. A lease is given only if nobody
//!    older in line waits for the same, so no stream of others can keep it waiting for ever.
//! 3. Served or not, whoever waited leaves ([`Deferrables::dequeue`]).
//!
//! Two requests want the same if they name a buffer that one of them writes, or that one of them uses
//! on the card and the other reads below it; or if the older one lacks room and the younger one would
//! keep some from it. There is one exception: whoever holds
//! what the older one waits for, directly or through others that wait, passes it. It would wait for
//! itself otherwise. So who takes one lease after another and always holds one of them passes others
//! as before.
//!
//! Deliberately absent: deadlines. Nobody is served by waiting alone; whoever gives up leaves.

use std::collections::BTreeSet;

use smallvec::SmallVec;

use super::in_place::SplitRequest;
use super::{
    Access, BufferId, BufferLeaseId, Deferrables, HolderKey, LeaseRefused, LeaseRequest, Ticket,
    UnknownBuffer,
};
use vramp_core::Bytes;

/// Whoever waits.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    /// Each once, by the stronger access.
    pub buffers: SmallVec<[(BufferId, Access); 4]>,
    /// What it reads where it is, if that can be when it is served.
    pub in_place_allowed: SmallVec<[BufferId; 2]>,
    pub holder: HolderKey,
}

impl Deferrables {
    /// Puts a request into the line, behind all that wait already. It stays there until it leaves. A
    /// request that is in line keeps its place: from now on it waits for this, and for the buffers
    /// that `in_place_allowed` where they are.
    ///
    /// # Errors
    /// A buffer is not there.
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

    /// Takes a request out of the line, served or not. False if it was not there.
    pub fn dequeue(&mut self, ticket: Ticket) -> bool {
        self.wait_queue.remove(&ticket).is_some()
    }

    /// Whom a request must not overtake, the oldest first. O(1) while nobody waits, O(line * pieces)
    /// for whoever holds nothing, and O(line^3 * pieces) at most.
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

    /// True if the younger one would take, or keep, what the older one waits for.
    fn conflict(&self, older: &SplitRequest, younger: &SplitRequest) -> bool {
        let same = |&(buffer, access): &(BufferId, Access)| {
            let mut others = older.come.iter();
            others.any(|&(other, held)| other == buffer && access.max(held) == Access::Exclusive)
        };
        // Nobody uses on the card what is read where it is.
        let apart = |one: &SplitRequest, other: &SplitRequest| {
            one.stay.iter().any(|id| other.come.iter().any(|(come, _)| come == id))
        };
        if younger.come.iter().any(same) || apart(older, younger) || apart(younger, older) {
            return true;
        }
        if !self.lacks_room(older) {
            return false;
        }
        // What the older one needs as well, and what is kept anyway, is not taken from it.
        let needed = self.ranges_of(&older.come);
        let mut ranges = self.ranges_of(&younger.come).into_iter();
        ranges.any(|range| !needed.contains(&range) && !self.is_pinned_or_exposed(range))
    }

    /// True if it waits for room that it can have once leases end. Whoever waits for more, for a pin
    /// to be taken off, does not keep others waiting.
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

    /// True if a range would stay on the card without any lease.
    fn is_pinned_or_exposed(&self, range: super::RangeId) -> bool {
        self.tenants(range).any(|id| self.buffers[id].is_pinned_or_exposed())
    }

    /// True if a waiter cannot be served before `holder` ends a lease.
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

    /// Leases that have to end before a waiter can be served. What stays waits for none.
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
