//! The wait queue: refused requests in order of arrival, by what each of them waits for.
//!
//! 1. A refused request enters the queue ([`Deferrables::enqueue`]). It holds nothing there.
//! 2. A change that may serve waiters marks them. [`Deferrables::next_to_check`] returns the marked
//!    ones, the oldest first, and [`Deferrables::recheck`] grants a waiter's lease, or records what
//!    it waits for now. When `next_to_check` returns `None`, no waiter can be served.
//! 3. A served request has left the queue. Another one is removed ([`Deferrables::dequeue`]).
//!
//! Each waiter is recorded under one thing that keeps it from its lease, and only a change of that
//! thing marks it:
//!
//! | recorded under | because | marked when |
//! |---|---|---|
//! | an older waiter | both name a buffer that one of them writes, or that one uses on the card and the other reads in place | the older one leaves the queue |
//! | a buffer | a lease excludes the waiter, or a move has to settle | the buffer's leases or moves change |
//! | the room | the card has none for its set | room becomes free |
//! | pins | there is no room before one is removed | one is |
//! | an older waiter for room | that one lacks only room, and this one takes some from it or lacks the same | no such waiter is left in front, see below |
//! | an older request of the pool | buffers leave for it, and this one names one of those, or one that lacks memory: `pool_request.rs` | no older one is left |
//! | nothing (stalled) | its lease was granted, and memory for it was lacking | [`Deferrables::retry_stalled`] |
//!
//! There is one exception to the order. The holder of a lease that an older waiter needs, directly or
//! through other waiters, may overtake it: `overtake.rs`.
//!
//! Growth: a request looks at waiters for the same buffers, one by one from the youngest until one
//! conflicts, and at the oldest that lacks room: not at the others. A lease that ends marks the next
//! waiter for its buffers, or all readers that come next. Room that becomes free marks the oldest that
//! lacks some, and those that take a part of the same; when it is served, the next ones up to the first
//! that lacks some. A pin marks all waiters for its buffer, and all that wait for pins.
//! [`DeferCounters::queue_steps`] counts what is looked at.
//!
//! Deliberately absent: deadlines. The caller that gives up leaves the queue.
//!
//! [`DeferCounters::queue_steps`]: super::DeferCounters::queue_steps
//! [`Deferrables::dequeue`]: super::Deferrables::dequeue
//! [`Deferrables::enqueue`]: super::Deferrables::enqueue
//! [`Deferrables::next_to_check`]: super::Deferrables::next_to_check
//! [`Deferrables::recheck`]: super::Deferrables::recheck
//! [`Deferrables::retry_stalled`]: super::Deferrables::retry_stalled
//!
//! [`BehindRoom`] has the waiters that must not take room from an older one that lacks it: in order of
//! arrival, and by the ranges that each of them would take.
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

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use super::{Access, BufferId, BufferLeaseId, HolderKey, RangeId, StreamKey, Ticket};
use vramp_core::Bytes;

mod checks;
mod marks;
mod pool_request;

/// A request in the queue.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    /// Each once, with the stronger access.
    pub buffers: SmallVec<[(BufferId, Access); 4]>,
    /// Buffers that it reads in place if possible when it is granted, in order.
    pub in_place_allowed: SmallVec<[BufferId; 2]>,
    streams: SmallVec<[StreamKey; 2]>,
    /// It is a request of the pool: it names no buffer, and gets no lease.
    pub is_of_pool: bool,
    /// Most memory that its buffers can need.
    most: Bytes,
    /// The holder of the lease, and those whose leases the caller keeps while it waits.
    pub holders: SmallVec<[HolderKey; 2]>,
    pub blocked: Blocked,
    /// What it takes of the room, as it was recorded.
    takes: RoomSet,
    /// Waiters that are recorded under this one.
    followers: BTreeSet<Ticket>,
}

/// What a waiter is recorded under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocked {
    /// It was not checked yet.
    Unchecked,
    /// An older waiter that names the same buffer.
    Older(Ticket),
    /// A buffer that another lease holds, or that moves.
    Buffer(BufferId),
    /// An older waiter that lacks room, or another behind it.
    BehindRoom(Ticket),
    /// It lacks room. `keeps`: younger ones must not take any. Not if it waits for a pin to be
    /// removed.
    Room { keeps: bool },
    /// Memory was lacking when its lease was restored.
    Stalled,
}

/// How a waiter uses one of its buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Exclusive,
    /// Reads it on the card.
    OnCard,
    /// Reads it in place if that is possible.
    InPlace,
}

/// The waiters for one buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BufferWaiters {
    exclusive: BTreeSet<Ticket>,
    on_card: BTreeSet<Ticket>,
    in_place: BTreeSet<Ticket>,
    /// Those that a change of the buffer marks.
    watching: BTreeSet<Ticket>,
}

impl BufferWaiters {
    pub fn of(&self, class: Class) -> &BTreeSet<Ticket> {
        match class {
            Class::Exclusive => &self.exclusive,
            Class::OnCard => &self.on_card,
            Class::InPlace => &self.in_place,
        }
    }

    fn of_mut(&mut self, class: Class) -> &mut BTreeSet<Ticket> {
        match class {
            Class::Exclusive => &mut self.exclusive,
            Class::OnCard => &mut self.on_card,
            Class::InPlace => &mut self.in_place,
        }
    }

    fn all(&self) -> impl Iterator<Item = Ticket> {
        self.exclusive.iter().chain(&self.on_card).chain(&self.in_place).copied()
    }

    fn is_empty(&self) -> bool {
        self.exclusive.is_empty() && self.on_card.is_empty() && self.in_place.is_empty()
    }
}

/// Leases and waiters of one holder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Holder {
    pub leases: BTreeSet<BufferLeaseId>,
    /// Number of leases that occupy memory on the card.
    pub with_room: usize,
    waiters: BTreeSet<Ticket>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct WaitQueue {
    /// The oldest first.
    pub waiters: BTreeMap<Ticket, Waiter>,
    /// Those of them that are requests of the pool.
    pub of_pool: BTreeSet<Ticket>,
    /// Buffers with waiters.
    pub by_buffer: BTreeMap<BufferId, BufferWaiters>,
    /// Holders with leases or waiters.
    pub holders: BTreeMap<HolderKey, Holder>,
    /// Waiters of holders with leases.
    holding: BTreeSet<Ticket>,
    /// Waiters that lack room, from which younger ones must not take any. Each takes a part of what the
    /// one before takes, unless its holder has leases. Requests of the pool are among them.
    pub keeping: BTreeSet<Ticket>,
    /// Waiters that lack room until a pin is removed.
    pinned: BTreeSet<Ticket>,
    behind_room: BehindRoom,
    stalled: BTreeSet<Ticket>,
    marked: BTreeSet<Ticket>,
    /// Waiters by the most memory that their buffers can need.
    by_most: BTreeSet<(Bytes, Ticket)>,
    /// Waiters looked at.
    pub steps: Cell<u64>,
}

/// Younger than all.
pub(super) const LAST: Ticket = Ticket(u64::MAX);

/// The place and the holders of a request that is checked.
pub(super) struct Place<'a> {
    pub ticket: Ticket,
    pub holders: &'a [HolderKey],
}

impl WaitQueue {
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Returns the number of entries beside the waiters. Those of holders with leases count.
    pub fn entries(&self) -> usize {
        let sets = [&self.holding, &self.keeping, &self.pinned, &self.stalled, &self.marked];
        let behind = self.behind_room.len();
        self.by_buffer.len()
            + self.holders.len()
            + behind
            + sets.map(BTreeSet::len).iter().sum::<usize>()
    }

    /// Counts a waiter that is looked at.
    pub fn step(&self) {
        self.steps.set(self.steps.get() + 1);
    }

    fn insert(&mut self, ticket: Ticket, waiter: Waiter) {
        if waiter.is_of_pool {
            self.of_pool.insert(ticket);
        }
        for &(buffer, access) in &waiter.buffers {
            let class = waiter.class(buffer, access);
            self.by_buffer.entry(buffer).or_default().of_mut(class).insert(ticket);
        }
        for &key in &waiter.holders {
            let holder = self.holders.entry(key).or_default();
            holder.waiters.insert(ticket);
            if !holder.leases.is_empty() {
                self.holding.insert(ticket);
            }
        }
        self.marked.insert(ticket);
        self.by_most.insert((waiter.most, ticket));
        self.waiters.insert(ticket, waiter);
    }

    fn remove(&mut self, ticket: Ticket) -> Option<Waiter> {
        self.record(ticket, Blocked::Unchecked, RoomSet::new());
        let waiter = self.waiters.remove(&ticket)?;
        self.of_pool.remove(&ticket);
        for &(buffer, access) in &waiter.buffers {
            let Some(on) = self.by_buffer.get_mut(&buffer) else { continue };
            on.of_mut(waiter.class(buffer, access)).remove(&ticket);
            if on.is_empty() {
                self.by_buffer.remove(&buffer);
            }
        }
        for key in &waiter.holders {
            if let Some(holder) = self.holders.get_mut(key) {
                holder.waiters.remove(&ticket);
            }
            self.forget_if_empty(*key);
        }
        self.holding.remove(&ticket);
        self.marked.remove(&ticket);
        self.by_most.remove(&(waiter.most, ticket));
        for follower in &waiter.followers {
            let follower = self.waiters.get_mut(follower).expect("it is in the queue");
            follower.blocked = Blocked::Unchecked;
        }
        self.marked.extend(&waiter.followers);
        Some(waiter)
    }

    /// Records what a waiter waits for, and what it takes of the room.
    fn record(&mut self, ticket: Ticket, blocked: Blocked, takes: RoomSet) {
        let Some(waiter) = self.waiters.get_mut(&ticket) else { return };
        let before = std::mem::replace(&mut waiter.blocked, blocked);
        if before == blocked && waiter.takes == takes {
            return;
        }
        let is_of_pool = waiter.is_of_pool;
        let took = std::mem::replace(&mut waiter.takes, takes.clone());
        let buffers: SmallVec<[BufferId; 4]> =
            waiter.buffers.iter().map(|&(buffer, _)| buffer).collect();
        let watch = |queue: &mut WaitQueue, buffer: &BufferId, watches: bool| {
            let Some(on) = queue.by_buffer.get_mut(buffer) else { return };
            match watches {
                true => on.watching.insert(ticket),
                false => on.watching.remove(&ticket),
            };
        };
        match before {
            Blocked::Unchecked => {}
            Blocked::Older(older) => {
                if let Some(older) = self.waiters.get_mut(&older) {
                    older.followers.remove(&ticket);
                }
            }
            Blocked::Buffer(buffer) => watch(self, &buffer, false),
            Blocked::BehindRoom(_) => {
                // The next one with the same set was not checked because of this one.
                self.marked.extend(self.behind_room.remove(ticket, &took));
            }
            Blocked::Room { .. } => {
                self.pinned.remove(&ticket);
                buffers.iter().for_each(|buffer| watch(self, buffer, false));
                if self.keeping.remove(&ticket) {
                    self.marked.extend(self.keeping.range(ticket..));
                    match self.keeping.range(..ticket).next_back() {
                        Some(&older) if !is_of_pool => self.mark_parts_of(older),
                        _ => self.behind_room.open(),
                    }
                }
            }
            Blocked::Stalled => {
                self.stalled.remove(&ticket);
            }
        }
        match blocked {
            Blocked::Unchecked => {}
            Blocked::Older(older) => {
                let older = self.waiters.get_mut(&older).expect("it is in the queue");
                older.followers.insert(ticket);
            }
            Blocked::Buffer(buffer) => watch(self, &buffer, true),
            Blocked::BehindRoom(_) => self.behind_room.insert(ticket, &takes),
            Blocked::Room { keeps } => {
                buffers.iter().for_each(|buffer| watch(self, buffer, true));
                if !keeps {
                    self.pinned.insert(ticket);
                } else {
                    // Younger ones that keep room may have to wait for this one.
                    self.marked.extend(self.keeping.range(ticket..));
                    self.keeping.insert(ticket);
                    // It waits for every lease on the card from now on.
                    self.mark_holding();
                }
            }
            Blocked::Stalled => {
                self.stalled.insert(ticket);
            }
        }
    }

    /// Returns the oldest marked waiter.
    fn next(&mut self) -> Option<Ticket> {
        let behind = self.behind_room.next();
        let next = [behind, self.marked.first().copied()].into_iter().flatten().min()?;
        self.marked.remove(&next);
        if behind == Some(next) {
            self.behind_room.pass(next);
        }
        Some(next)
    }
}

impl Waiter {
    pub fn class(&self, buffer: BufferId, access: Access) -> Class {
        match access {
            Access::Exclusive | Access::Overwrite => Class::Exclusive,
            Access::Shared if self.in_place_allowed.binary_search(&buffer).is_ok() => {
                Class::InPlace
            }
            Access::Shared => Class::OnCard,
        }
    }
}

/// Returns the classes that one of `class` conflicts with, on a buffer that can be read in place now
/// or not.
pub(super) fn conflicting(class: Class, can_read_in_place: bool) -> &'static [Class] {
    use Class::{Exclusive, InPlace, OnCard};
    match (class, can_read_in_place) {
        (Exclusive, _) => &[Exclusive, OnCard, InPlace],
        (OnCard, true) => &[Exclusive, InPlace],
        (InPlace, true) => &[Exclusive, OnCard],
        (OnCard | InPlace, false) => &[Exclusive],
    }
}

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
