//! Requests that enter the queue, and what keeps each of them from its lease.

use std::collections::BTreeSet;

use smallvec::SmallVec;

use super::super::lease::{SplitRequest, sorted};
use super::super::overtake::Overtaking;
use super::super::range::Range;
use super::{Blocked, Class, Place, RoomSet, WaitQueue, Waiter, conflicting};
use crate::planner::{
    Access, BufferId, Deferrables, GrantedLease, LeaseRefused, LeaseRequest, RangeId, Ticket,
    UnknownBuffer,
};
use vramp_core::Bytes;

impl Deferrables {
    /// Returns a place at the end of the queue, for a request that may enter it later.
    pub fn ticket(&mut self) -> Ticket {
        Ticket(self.next())
    }

    /// Adds a request to the queue: at the end, or at the place of a ticket that it had before. It is
    /// marked, so that the next checks decide about it. O(buffers log queue).
    ///
    /// # Errors
    /// A buffer does not exist.
    pub fn enqueue(
        &mut self,
        request: &LeaseRequest<'_>,
        in_place_allowed: &[BufferId],
        ticket: Option<Ticket>,
    ) -> Result<Ticket, UnknownBuffer> {
        let buffers = self.by_strongest_access(request.buffers)?;
        let ticket = ticket.unwrap_or_else(|| self.ticket());
        let waiter = Waiter {
            buffers,
            in_place_allowed: sorted(in_place_allowed),
            streams: request.streams.into(),
            is_of_pool: false,
            most: Bytes::ZERO,
            holders: request.holders(),
            blocked: Blocked::Unchecked,
            takes: RoomSet::new(),
            followers: BTreeSet::new(),
        };
        let ranges = self.ranges_of(&waiter.buffers);
        let most = ranges.into_iter().map(|range| self.ranges[range].len).sum();
        self.dequeue(ticket);
        self.wait_queue.insert(ticket, Waiter { most, ..waiter });
        let queue = &mut self.wait_queue;
        let is_last = queue.waiters.last_key_value().is_some_and(|(&last, _)| last == ticket);
        if queue.holding.contains(&ticket) || !is_last {
            // What its holders' leases keep from others, and what younger ones want, now waits for what
            // it waits for.
            queue.mark_holding();
        }
        Ok(ticket)
    }

    /// Removes a request from the queue. Returns false if it is not there.
    pub fn dequeue(&mut self, ticket: Ticket) -> bool {
        self.wait_queue.remove(ticket).is_some()
    }

    /// Returns true if waiters are marked.
    pub fn has_to_check(&self) -> bool {
        !self.wait_queue.marked.is_empty() || self.wait_queue.behind_room.is_open()
    }

    /// Returns the oldest marked waiter, for [`recheck`](Deferrables::recheck). `None` if no waiter
    /// can be served.
    pub fn next_to_check(&mut self) -> Option<Ticket> {
        self.wait_queue.next()
    }

    /// Grants a waiter's lease and removes it from the queue, or returns `None` and records what it
    /// waits for. `in_place_allowed` is as for [`lease_in_place`](Deferrables::lease_in_place).
    ///
    /// # Errors
    /// A buffer was removed, or the set can never fit. The waiter has left the queue.
    pub fn recheck(
        &mut self,
        ticket: Ticket,
        in_place_allowed: &[BufferId],
        now_ns: u64,
    ) -> Result<Option<GrantedLease>, LeaseRefused> {
        self.wait_queue.marked.remove(&ticket);
        let in_place_allowed = &*sorted(in_place_allowed);
        self.allow_in_place(ticket, in_place_allowed);
        let Some(waiter) = self.wait_queue.waiters.get(&ticket) else { return Ok(None) };
        if waiter.is_of_pool {
            return Ok(None);
        }
        self.wait_queue.step();
        let place = Place { ticket, holders: &waiter.holders };
        let checked = self.by_strongest_access(&waiter.buffers).map_err(LeaseRefused::from);
        let checked = checked.and_then(|buffers| {
            let wanted = self.split_by_place(&buffers, in_place_allowed);
            self.fits(&wanted.come)?;
            let checked = self.check(&wanted, &place);
            Ok((checked.map_err(|it| (it, self.taken_by(&wanted))), buffers, wanted.stay))
        });
        match checked {
            Err(refused) => {
                self.dequeue(ticket);
                Err(refused)
            }
            Ok((Err((blocked, takes)), ..)) => {
                self.wait_queue.record(ticket, blocked, takes);
                match blocked {
                    Blocked::Room { keeps: true } => self.wait_queue.stop_behind(ticket),
                    Blocked::BehindRoom(older) => self.wait_queue.stop_behind(older),
                    _ => {}
                }
                Ok(None)
            }
            Ok((Ok(()), buffers, stay)) => {
                let waiter = self.wait_queue.remove(ticket).expect("it was found above");
                let (holder, holding) = waiter.holders.split_first().expect("it has a holder");
                let (streams, holder) = (&*waiter.streams, *holder);
                let request = LeaseRequest { buffers: &waiter.buffers, streams, holder, holding };
                Ok(Some(self.grant(buffers, stay, &request, now_ns)))
            }
        }
    }

    /// Returns why a waiter waits, in full. `None` if it is not in the queue, or stalled.
    pub fn refusal_of(&self, ticket: Ticket) -> Option<LeaseRefused> {
        let waiter = self.wait_queue.waiters.get(&ticket)?;
        if waiter.blocked == Blocked::Stalled {
            return None;
        }
        let wanted = self.wanted_by(waiter);
        let place = Place { ticket, holders: &waiter.holders };
        let blocked = self.check(&wanted, &place).err().unwrap_or(waiter.blocked);
        Some(self.describe(&wanted, blocked))
    }

    /// Updates which of a waiter's buffers may be read in place: these, in order.
    fn allow_in_place(&mut self, ticket: Ticket, in_place_allowed: &[BufferId]) {
        let Some(waiter) = self.wait_queue.waiters.get_mut(&ticket) else { return };
        if *waiter.in_place_allowed == *in_place_allowed {
            return;
        }
        let before: SmallVec<[Class; 4]> =
            waiter.buffers.iter().map(|&(id, access)| waiter.class(id, access)).collect();
        waiter.in_place_allowed = in_place_allowed.into();
        let followers = waiter.followers.clone();
        for (&(id, access), before) in waiter.buffers.iter().zip(before) {
            let on = self.wait_queue.by_buffer.get_mut(&id).expect("it has this waiter");
            on.of_mut(before).remove(&ticket);
            on.of_mut(waiter.class(id, access)).insert(ticket);
        }
        // Others may no longer conflict with it.
        self.wait_queue.marked.extend(followers);
    }

    /// Returns the buffers of a range that have waiters. O(its tenants, or the buffers with waiters if
    /// those are fewer).
    pub(in crate::planner) fn waited_tenants(&self, range: RangeId) -> SmallVec<[BufferId; 4]> {
        let tenants = self.ranges.get(range).map_or(0, |range| range.tenants.len());
        let waited = &self.wait_queue.by_buffer;
        if tenants < 2 {
            return self.tenants(range).collect();
        }
        (0..tenants.min(waited.len())).for_each(|_| self.wait_queue.step());
        if tenants < waited.len() {
            return self.tenants(range).filter(|buffer| waited.contains_key(buffer)).collect();
        }
        let lies_there = |buffer: &&BufferId| {
            self.buffers.get(**buffer).is_some_and(|buffer| buffer.range == range)
        };
        waited.keys().filter(lies_there).copied().collect()
    }

    /// Marks the waiters that a change of a buffer may serve. O(1) if the queue is empty.
    pub(in crate::planner) fn touch(&mut self, buffer: BufferId) {
        if !self.wait_queue.is_empty() {
            let is_readable = self.buffers.get(buffer).is_none_or(|buffer| buffer.readable);
            self.wait_queue.mark_buffer(buffer, is_readable);
        }
    }

    /// Returns what keeps a request from its lease: `Ok` if nothing does. Each check looks at little
    /// of the queue, see the page of this module.
    pub(in crate::planner) fn check(
        &self,
        wanted: &SplitRequest,
        place: &Place<'_>,
    ) -> Result<(), Blocked> {
        let mut overtaking = Overtaking::new(self, place.holders);
        if !self.wait_queue.is_empty()
            && let Some(older) = self.older_for_a_buffer(wanted, place.ticket, &mut overtaking)
        {
            return Err(Blocked::Older(older));
        }
        if let Some(buffer) = self.unavailable(wanted) {
            return Err(Blocked::Buffer(buffer));
        }
        if !self.wait_queue.keeping.is_empty()
            && let Some(older) = self
                .older_of_pool(wanted, place, &overtaking)
                .or_else(|| self.older_for_room(wanted, place.ticket, &mut overtaking))
        {
            return Err(Blocked::BehindRoom(older));
        }
        if self.lacks(wanted) {
            return Err(Blocked::Room { keeps: self.lacks_room(wanted) });
        }
        Ok(())
    }

    /// Returns the youngest older waiter that conflicts over a buffer.
    fn older_for_a_buffer(
        &self,
        wanted: &SplitRequest,
        ticket: Ticket,
        overtaking: &mut Overtaking<'_>,
    ) -> Option<Ticket> {
        let come = wanted.come.iter().map(|&(id, access)| match access {
            Access::Exclusive | Access::Overwrite => (id, Class::Exclusive),
            Access::Shared => (id, Class::OnCard),
        });
        let stay = wanted.stay.iter().map(|&id| (id, Class::InPlace));
        let mut youngest = None;
        for (id, class) in come.chain(stay) {
            let Some(on) = self.wait_queue.by_buffer.get(&id) else { continue };
            for &other in conflicting(class, self.can_read_in_place(id)) {
                let older = on.of(other).range(..ticket).rev();
                let mut older = older.take_while(|&&older| Some(older) > youngest);
                let found = older.find(|&&older| {
                    self.wait_queue.step();
                    !overtaking.may_pass(older)
                });
                youngest = youngest.max(found.copied());
            }
        }
        youngest
    }

    /// Returns the youngest older waiter that lacks room, and from which the request would take or
    /// keep some. Also one that lacks the same: then this one has no room either.
    fn older_for_room(
        &self,
        wanted: &SplitRequest,
        ticket: Ticket,
        overtaking: &mut Overtaking<'_>,
    ) -> Option<Ticket> {
        let taken = self.taken_by(wanted);
        if taken.is_empty() {
            return None;
        }
        // One that is not marked lacks room as it did when it was checked.
        let may_have_room = |older: &Ticket| {
            self.wait_queue.step();
            self.wait_queue.keeping.contains(older)
        };
        if overtaking.hold_room() && !self.wait_queue.marked.range(..ticket).any(may_have_room) {
            return None;
        }
        for &older in self.wait_queue.keeping.range(..ticket).rev() {
            self.wait_queue.step();
            if self.wait_queue.of_pool.contains(&older) {
                continue;
            }
            let needed = self.taken_by(&self.wanted_by(&self.wait_queue.waiters[&older]));
            let is_part = taken.iter().all(|range| needed.contains(range));
            if is_part && taken.len() < needed.len() {
                if self.wait_queue.holding.contains(&older) {
                    continue;
                }
                // It overtakes none and takes as much, so it conflicts with all that this one would.
                return None;
            }
            if !overtaking.may_pass(older) {
                return Some(older);
            }
        }
        None
    }

    /// Returns the ranges of which a request takes the room. What a pin keeps on the card anyway is
    /// taken from no other.
    pub(super) fn taken_by(&self, wanted: &SplitRequest) -> RoomSet {
        let mut taken = self.ranges_of(&wanted.come);
        taken.retain(|range| self.ranges[*range].takes_room());
        taken
    }

    pub(in crate::planner) fn wanted_by(&self, waiter: &Waiter) -> SplitRequest {
        self.split_by_place(&waiter.buffers, &waiter.in_place_allowed)
    }

    /// Returns true if the card has no room for a set now.
    fn lacks(&self, wanted: &SplitRequest) -> bool {
        let needed = self.needed(&wanted.come);
        !needed.is_zero() && self.committed + needed > self.config.capacity
    }

    /// Returns true if a request waits for room that it can have once leases end. One that waits
    /// for more, for a pin to be removed, holds up no other.
    pub(in crate::planner) fn lacks_room(&self, wanted: &SplitRequest) -> bool {
        let all_there = wanted.come.iter().all(|&(id, _)| self.buffers.contains_key(id));
        if !all_there || !self.lacks(wanted) {
            return false;
        }
        let own = self.ranges_of(&wanted.come);
        let own = own.iter().map(|&range: &RangeId| &self.ranges[range]);
        // What is kept counts once, also if it is named.
        let more: Bytes = own.filter(|range| range.takes_room()).map(Range::needs).sum();
        self.kept + more <= self.config.capacity
    }

    /// Returns true if a waiter may lack room, or would if it were the next. O(1).
    pub(in crate::planner) fn is_tight(&self) -> bool {
        let most = self.wait_queue.by_most.last().map_or(Bytes::ZERO, |&(most, _)| most);
        self.committed + most > self.config.capacity
    }

    /// Marks the waiters that may overtake others which lack room since a lease took some. O(1) if
    /// none lacks room.
    pub(in crate::planner) fn mark_lacking(&mut self) {
        if self.is_tight() {
            self.wait_queue.mark_holding();
        }
    }

    /// Lets a waiter wait until [`retry_stalled`](Deferrables::retry_stalled): its lease was granted
    /// and ended because memory was lacking, so that no lease stands in its way.
    pub fn stall(&mut self, ticket: Ticket) {
        self.wait_queue.record(ticket, Blocked::Stalled, RoomSet::new());
        self.wait_queue.marked.remove(&ticket);
    }

    /// Marks the oldest stalled waiter: memory may be free again. The next one is to be marked when
    /// this one has its memory, or left.
    pub fn retry_stalled(&mut self) {
        if let Some(&oldest) = self.wait_queue.stalled.first() {
            self.wait_queue.record(oldest, Blocked::Unchecked, RoomSet::new());
            self.wait_queue.marked.insert(oldest);
        }
    }

    /// Returns true if a waiter is stalled, or lacks room. Both may end without a call of the planner.
    pub fn lacks_memory(&self) -> bool {
        let WaitQueue { stalled, keeping, pinned, .. } = &self.wait_queue;
        [stalled, keeping, pinned].into_iter().any(|waiters| !waiters.is_empty())
    }
}
