//! Which waiters a change marks, and the leases of the holders, on which that depends.

use std::collections::BTreeSet;

use super::super::{BufferId, BufferLeaseId, HolderKey, Ticket};
use super::{Blocked, Holder, WaitQueue, Waiter};

impl WaitQueue {
    /// Marks the waiters of holders with leases that wait for older ones: they may overtake now.
    pub(super) fn mark_holding(&mut self) {
        for ticket in &self.holding {
            let blocked = self.waiters[ticket].blocked;
            if matches!(blocked, Blocked::Older(_) | Blocked::BehindRoom(_)) {
                self.marked.insert(*ticket);
            }
        }
    }

    /// Marks the waiters that lack room, and may have some now.
    pub(in crate::planner) fn mark_room(&mut self) {
        self.marked.extend(&self.keeping);
    }

    /// Marks the waiters that lack room, after pins or the capacity changed, and those of holders with
    /// leases: an older one may lack room now and wait for these leases, so that they may overtake it.
    pub(in crate::planner) fn mark_pinned(&mut self) {
        self.mark_room();
        self.marked.extend(&self.pinned);
        self.mark_holding();
    }

    /// Marks those behind a waiter that lacks room which take only a part of what it takes.
    pub(super) fn mark_parts_of(&mut self, ticket: Ticket) {
        let takes = &self.waiters[&ticket].takes;
        let parts = self.behind_room.parts_of(takes, ticket, || self.step());
        self.marked.extend(parts);
    }

    /// Ends the checks behind a waiter that lacks room, except for those that take only a part of what
    /// it takes, or may overtake it.
    pub(super) fn stop_behind(&mut self, ticket: Ticket) {
        if !self.behind_room.is_open() {
            return;
        }
        self.behind_room.close();
        self.mark_parts_of(ticket);
        let WaitQueue { marked, holding, behind_room, .. } = self;
        let holding = holding.range(Ticket(ticket.0 + 1)..).copied();
        marked.extend(holding.filter(|ticket| behind_room.contains(*ticket)));
    }

    /// Marks all waiters for a buffer: its pins have changed.
    pub(in crate::planner) fn mark_all_for(&mut self, buffer: BufferId) {
        let Some(on) = self.by_buffer.get(&buffer) else { return };
        self.marked.extend(on.all());
    }

    /// Marks the waiters that a change of a buffer may serve.
    pub(super) fn mark_buffer(&mut self, buffer: BufferId, is_readable: bool) {
        let Some(on) = self.by_buffer.get(&buffer) else { return };
        self.marked.extend(&on.watching);
        if is_readable {
            // Whether it can be read in place decides which waiters conflict.
            self.marked.extend(on.all());
        }
    }

    /// Adds a lease to its holder. If a request of the holder waits, others that wait for the lease now
    /// wait for what that one waits for. O(log leases), and O(waiters of holders with leases) then.
    pub(in crate::planner) fn add_lease(
        &mut self,
        lease: BufferLeaseId,
        key: HolderKey,
        has_room: bool,
    ) {
        let holder = self.holders.entry(key).or_default();
        holder.leases.insert(lease);
        holder.with_room += usize::from(has_room);
        if !holder.waiters.is_empty() {
            self.holding.extend(&holder.waiters);
            self.mark_holding();
        }
    }

    /// Removes a lease from its holder.
    pub(in crate::planner) fn remove_lease(
        &mut self,
        lease: BufferLeaseId,
        key: HolderKey,
        has_room: bool,
    ) {
        let Some(holder) = self.holders.get_mut(&key) else { return };
        holder.leases.remove(&lease);
        holder.with_room -= usize::from(has_room);
        if holder.leases.is_empty() {
            for ticket in std::mem::take(&mut holder.waiters) {
                let mut keys = self.waiters[&ticket].holders.iter();
                let holds = |key| {
                    self.holders.get(key).is_some_and(|holder: &Holder| !holder.leases.is_empty())
                };
                if !keys.any(holds) {
                    self.holding.remove(&ticket);
                }
                // It may no longer overtake.
                self.marked.insert(ticket);
                self.holders.entry(key).or_default().waiters.insert(ticket);
            }
        }
        self.forget_if_empty(key);
    }

    pub(super) fn forget_if_empty(&mut self, key: HolderKey) {
        if self.holders.get(&key).is_some_and(|holder| *holder == Holder::default()) {
            self.holders.remove(&key);
        }
    }

    /// Checks the indexes against the waiters, and the holders against the leases.
    pub(in crate::planner) fn check_index(
        &self,
        leases: impl Iterator<Item = (BufferLeaseId, HolderKey, bool)>,
    ) -> Result<(), String> {
        let mut again = WaitQueue::default();
        leases.for_each(|(lease, key, has_room)| again.add_lease(lease, key, has_room));
        for (&ticket, waiter) in &self.waiters {
            let unchecked = Waiter {
                blocked: Blocked::Unchecked,
                followers: BTreeSet::new(),
                ..waiter.clone()
            };
            again.insert(ticket, unchecked);
        }
        for (&ticket, waiter) in &self.waiters {
            again.record(ticket, waiter.blocked, waiter.takes.clone());
        }
        let WaitQueue { waiters, by_buffer, holders, holding, keeping, pinned, stalled, .. } = self;
        let is = |what: &str, same: bool| match same {
            true => Ok(()),
            false => Err(format!("the wait queue has other {what} than its waiters say")),
        };
        is("waiters", waiters.iter().all(|(t, w)| again.waiters[t].followers == w.followers))?;
        is("waiters for buffers", *by_buffer == again.by_buffer)?;
        is("holders", *holders == again.holders)?;
        is("waiting holders", *holding == again.holding)?;
        is("most memory", self.by_most == again.by_most)?;
        is("requests of the pool", self.of_pool == again.of_pool)?;
        let sets = (&again.keeping, &again.pinned, &again.stalled);
        is("room", (keeping, pinned, stalled) == sets)?;
        is("waiters behind others", self.behind_room.is_same(&again.behind_room))
    }
}
