//! Waiters that must not take room from an older one that lacks it: in order of arrival, and by the
//! ranges that each of them would take.
//!
//! 1. A waiter that would take room from an older one, or that lacks the same, is put here. Room that
//!    becomes free does not mark it.
//! 2. Once no older waiter keeps room any more, the queue is opened: its waiters are checked in order,
//!    up to the first that has to wait for room itself.
//! 3. Of the others only those can go on that take some of the ranges that this one takes, and nothing
//!    else. The oldest for each such set of ranges is checked.
//!
//! Growth: O(log waiters) for each call, and O(sets that share a range) for step 3 if the waiter in front
//! takes more than one range.

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use super::{RangeId, Ticket};

/// The ranges of which a waiter takes the room, sorted.
pub(super) type RoomSet = SmallVec<[RangeId; 4]>;

#[derive(Clone, Debug, Default)]
pub(super) struct BehindRoom {
    all: BTreeSet<Ticket>,
    /// By the first range of a set, and by the set.
    by_set: BTreeMap<RangeId, BTreeMap<RoomSet, BTreeSet<Ticket>>>,
    /// Those from this one on are to be checked.
    open_from: Option<Ticket>,
}

impl BehindRoom {
    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn contains(&self, ticket: Ticket) -> bool {
        self.all.contains(&ticket)
    }

    pub fn insert(&mut self, ticket: Ticket, set: &RoomSet) {
        let first = *set.first().expect("a waiter that takes no room is behind none");
        self.all.insert(ticket);
        self.by_set.entry(first).or_default().entry(set.clone()).or_default().insert(ticket);
    }

    /// Removes a waiter. Returns the next one with the same set, if it will not be checked anyway.
    pub fn remove(&mut self, ticket: Ticket, set: &RoomSet) -> Option<Ticket> {
        self.all.remove(&ticket);
        let sets = self.by_set.get_mut(set.first()?)?;
        let same = sets.get_mut(set)?;
        same.remove(&ticket);
        let next = same.range(ticket..).next().copied();
        if same.is_empty() {
            sets.remove(set);
            if sets.is_empty() {
                self.by_set.remove(&set[0]);
            }
        }
        next.filter(|_| self.open_from.is_none())
    }

    /// Has all of them checked, in order.
    pub fn open(&mut self) {
        if !self.all.is_empty() {
            self.open_from = Some(Ticket(0));
        }
    }

    pub fn is_open(&self) -> bool {
        self.open_from.is_some()
    }

    pub fn close(&mut self) {
        self.open_from = None;
    }

    /// Returns the next one to check.
    pub fn next(&mut self) -> Option<Ticket> {
        let next = self.all.range(self.open_from?..).next().copied();
        if next.is_none() {
            self.open_from = None;
        }
        next
    }

    /// Notes that a waiter is being checked.
    pub fn pass(&mut self, ticket: Ticket) {
        self.open_from = Some(Ticket(ticket.0 + 1));
    }

    /// Returns the oldest younger waiter for each set that is part of a waiter's own, and calls `step`
    /// for each set that it looks at.
    pub fn parts_of(
        &self,
        set: &RoomSet,
        ticket: Ticket,
        mut step: impl FnMut(),
    ) -> SmallVec<[Ticket; 4]> {
        let mut parts = SmallVec::new();
        if set.len() < 2 {
            return parts;
        }
        let sets = set.iter().filter_map(|range| self.by_set.get(range)).flatten();
        for (part, waiters) in sets {
            step();
            if part.len() < set.len() && part.iter().all(|range| set.contains(range)) {
                parts.extend(waiters.range(ticket..).next().copied());
            }
        }
        parts
    }

    /// Returns true if both hold the same waiters with the same sets.
    pub fn is_same(&self, other: &BehindRoom) -> bool {
        (&self.all, &self.by_set) == (&other.all, &other.by_set)
    }
}
