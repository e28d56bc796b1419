//! Handing leases over to waiters: the thread that makes a change decides which waiters are served.
//!
//! 1. A refused request enters the planner's queue, with a slot here.
//! 2. A change marks waiters in the planner. Before the manager's lock is released, the marked ones are
//!    checked in order of arrival, and each that is served gets its lease in its slot
//!    ([`Waiting::hand_over`]).
//! 3. After unlocking, exactly those are woken.
//! 4. A waiter that gives up takes the lock: it is in the queue and leaves it, or its outcome is in its
//!    slot ([`Waiting::leave`]).
//!
//! Growth: an entry for each waiter, O(log waiters) to add or remove one. A look at the deadlines sees those
//! that have passed and one more. A wake-up is counted, one for each waiter that was served, refused
//! for good, cancelled, or timed out here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

use super::wait_slot::WaitSlot;
use crate::planner::{BufferId, BufferLeaseId, Deferrables, GrantedLease, LeaseRefused, Ticket};

pub(super) type LeaseSlot = WaitSlot<Outcome>;

/// How a wait ended.
pub(super) enum Outcome {
    Granted(GrantedLease),
    /// The request can never be granted.
    Refused(LeaseRefused),
    /// The deadline of a waiter that does not watch the clock itself. Without a refusal, memory was
    /// lacking.
    TimedOut(Option<LeaseRefused>),
    /// The wait was cancelled.
    Cancelled,
}

/// A waiter: its slot, and how it waits.
pub(super) struct Entry {
    pub slot: Arc<LeaseSlot>,
    /// Buffers that may be read in place while all that is spilled of them is mapped.
    pub in_place: SmallVec<[BufferId; 2]>,
    /// Deadline of a future.
    pub until: Option<Instant>,
}

/// What the manager does for the hand-over.
pub(super) struct Hooks<'a> {
    /// Returns true for a buffer of which all that is spilled is mapped.
    pub is_mapped: &'a dyn Fn(&Deferrables, BufferId) -> bool,
    /// Called directly after each grant.
    pub on_grant: &'a mut dyn FnMut(&Deferrables, BufferLeaseId),
}

/// The waiters' slots.
#[derive(Default)]
pub(super) struct Waiting {
    entries: BTreeMap<Ticket, Entry>,
    /// Slots with an outcome. Their waiters are woken after unlocking.
    pub to_wake: Vec<Arc<LeaseSlot>>,
    /// Number of waiters woken.
    pub woken: u64,
    /// Entries with a deadline, the earliest first.
    by_deadline: BTreeSet<(Instant, Ticket)>,
    /// Deadlines looked at.
    pub deadline_steps: u64,
    /// No request may wait.
    pub is_cancelled: bool,
}

impl Waiting {
    /// Adds a waiter that is in the planner's queue.
    pub fn add(&mut self, ticket: Ticket, entry: Entry) {
        self.by_deadline.extend(entry.until.map(|until| (until, ticket)));
        let before = self.entries.insert(ticket, entry);
        debug_assert!(before.is_none(), "{ticket} has one slot");
    }

    fn remove(&mut self, ticket: Ticket) -> Option<Entry> {
        let entry = self.entries.remove(&ticket)?;
        if let Some(until) = entry.until {
            self.by_deadline.remove(&(until, ticket));
        }
        Some(entry)
    }

    /// Returns the number of waiters.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there is no waiter.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns true if a waiter's deadline has to be watched.
    pub fn has_deadlines(&self) -> bool {
        !self.by_deadline.is_empty()
    }

    fn complete(&mut self, ticket: Ticket, outcome: Outcome) {
        let entry = self.remove(ticket).expect("a waiter in the queue has a slot");
        entry.slot.put(outcome);
        self.to_wake.push(entry.slot);
        self.woken += 1;
    }

    /// Serves all waiters that can be served.
    pub fn hand_over(&mut self, core: &mut Deferrables, hooks: Hooks<'_>, now_ns: u64) {
        let Hooks { is_mapped, on_grant } = hooks;
        while let Some(ticket) = core.next_to_check() {
            let in_place = self.entries.get(&ticket).map(|entry| entry.in_place.clone());
            let mut allowed = in_place.unwrap_or_default();
            allowed.retain(|buffer| is_mapped(core, *buffer));
            match core.recheck(ticket, &allowed, now_ns) {
                Ok(Some(granted)) => {
                    on_grant(core, granted.lease);
                    self.complete(ticket, Outcome::Granted(granted));
                }
                Ok(None) => {}
                Err(refused) => self.complete(ticket, Outcome::Refused(refused)),
            }
        }
    }

    /// Removes a waiter that gives up. Returns the outcome if it has one already.
    pub fn leave(
        &mut self,
        core: &mut Deferrables,
        ticket: Ticket,
        slot: &LeaseSlot,
    ) -> Option<Outcome> {
        if core.dequeue(ticket) {
            self.remove(ticket);
            return None;
        }
        slot.take()
    }

    /// Ends all waits, and refuses others until [`Waiting::allow`].
    pub fn cancel(&mut self, core: &mut Deferrables) {
        self.is_cancelled = true;
        for ticket in self.entries.keys().copied().collect::<Vec<_>>() {
            core.dequeue(ticket);
            self.complete(ticket, Outcome::Cancelled);
        }
    }

    /// Lets requests wait again.
    pub fn allow(&mut self) {
        self.is_cancelled = false;
    }

    /// Ends the waits whose deadlines have passed, the earliest first. Looks at these and one more.
    pub fn expire(&mut self, core: &mut Deferrables, now: Instant) {
        while let Some(&(until, ticket)) = self.by_deadline.first() {
            self.deadline_steps += 1;
            if until > now {
                break;
            }
            let refused = core.refusal_of(ticket);
            core.dequeue(ticket);
            self.complete(ticket, Outcome::TimedOut(refused));
        }
    }
}

#[cfg(all(test, loom))]
mod models;

#[cfg(all(test, not(loom)))]
mod tests;
