//! Which older waiters a request may overtake: those that wait for a lease of the same holder.
//!
//! A waiter waits for the holders of leases that exclude it, and for all holders with room on the
//! card if it lacks room; for what each older waiter in its way waits for; and for all that a waiter
//! waits for whose holder it waits for. If a holder waited behind a waiter that waits for it, both
//! would wait for ever.
//!
//! Growth: O(1) for a request whose holder has no lease, and O(buffers) for a waiter that waits for
//! the holder directly. Else all waiters that wait for the holder are found once, O(queue * buffers).

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use super::lease::Lease;
use super::wait_queue::{Class, Waiter, conflicting};
use super::{Access, BufferId, BufferLeaseId, Deferrables, HolderKey, RangeId, Ticket};

/// Decides which waiters one request may overtake.
pub(super) struct Overtaking<'a> {
    core: &'a Deferrables,
    holders: &'a [HolderKey],
    holds: bool,
    /// All waiters that wait for the holders, once they were looked for.
    waiting: Option<BTreeSet<Ticket>>,
}

impl<'a> Overtaking<'a> {
    pub fn new(core: &'a Deferrables, holders: &'a [HolderKey]) -> Overtaking<'a> {
        let holds = !core.wait_queue.is_empty() && core.leases_of(holders).next().is_some();
        Overtaking { core, holders, holds, waiting: None }
    }

    /// Returns true if the holders have leases with room on the card: each waiter that lacks room waits for
    /// these, and may be overtaken.
    pub fn hold_room(&self) -> bool {
        self.holds && self.core.hold_room(self.holders)
    }

    /// Returns true if a waiter cannot be granted before the holders end a lease.
    pub fn may_pass(&mut self, ticket: Ticket) -> bool {
        if !self.holds {
            return false;
        }
        let Overtaking { core, holders, .. } = *self;
        if core.waits_directly(ticket, holders) {
            return true;
        }
        self.waiting.get_or_insert_with(|| core.waiting_for(holders)).contains(&ticket)
    }
}

/// The search for waiters that wait for some holders.
struct Search {
    /// Those that were not found.
    left: BTreeSet<Ticket>,
    found: BTreeSet<Ticket>,
    /// Found, and not looked at.
    open: Vec<Ticket>,
    holders: Vec<HolderKey>,
    known_holders: BTreeSet<HolderKey>,
}

impl Search {
    fn find(&mut self, ticket: Ticket) {
        if self.left.remove(&ticket) {
            self.found.insert(ticket);
            self.open.push(ticket);
        }
    }
}

impl Deferrables {
    pub(super) fn leases_of(&self, holders: &[HolderKey]) -> impl Iterator<Item = &Lease> {
        let of = |key| self.wait_queue.holders.get(key).map(|holder| &holder.leases);
        let leases = holders.iter().filter_map(of).flatten();
        leases.map(|lease: &BufferLeaseId| &self.leases[lease])
    }

    /// Returns true if one of the holders has a lease that occupies memory on the card.
    fn hold_room(&self, holders: &[HolderKey]) -> bool {
        let of = |key| self.wait_queue.holders.get(key).map_or(0, |holder| holder.with_room);
        holders.iter().any(|key| of(key) > 0)
    }

    fn waits_directly(&self, ticket: Ticket, holders: &[HolderKey]) -> bool {
        let waiter = &self.wait_queue.waiters[&ticket];
        let excludes = |&(buffer, access): &(BufferId, Access)| {
            let class = waiter.class(buffer, access);
            let Some(on) = self.buffers.get(buffer).map(|buffer| &buffer.holders) else {
                return false;
            };
            self.excluded(buffer).contains(&class) && holders.iter().any(|&holder| on.has(holder))
        };
        waiter.buffers.iter().any(excludes)
            || self.hold_room(holders) && self.lacks_room(&self.wanted_by(waiter))
    }

    /// Returns the classes of waiters for a buffer that each of the leases on it excludes.
    fn excluded(&self, buffer: BufferId) -> &'static [Class] {
        use Class::{Exclusive, InPlace, OnCard};
        let holders = &self.buffers[buffer].holders;
        match (holders.read_in_place(), holders.is_exclusive()) {
            (true, _) if self.can_read_in_place(buffer) => &[Exclusive, OnCard],
            (true, _) | (_, true) => &[Exclusive, OnCard, InPlace],
            (false, false) => &[Exclusive],
        }
    }

    /// Returns all waiters that wait for a lease of the holders to end.
    fn waiting_for(&self, holders: &[HolderKey]) -> BTreeSet<Ticket> {
        let queue = &self.wait_queue;
        let lacking = queue.waiters.iter().filter_map(|(&ticket, waiter)| {
            queue.step();
            let wanted = self.wanted_by(waiter);
            self.lacks_room(&wanted).then(|| (ticket, self.ranges_of(&wanted.come)))
        });
        let lacking: BTreeMap<Ticket, SmallVec<[RangeId; 4]>> = lacking.collect();
        let mut search = Search {
            left: queue.waiters.keys().copied().collect(),
            found: BTreeSet::new(),
            open: Vec::new(),
            holders: holders.to_vec(),
            known_holders: holders.iter().copied().collect(),
        };
        // Waiters of a class that are younger than this were found already.
        let mut found_from: BTreeMap<(BufferId, Class), Ticket> = BTreeMap::new();
        loop {
            if let Some(key) = search.holders.pop() {
                for lease in self.leases_of(&[key]) {
                    for &(buffer, _) in &lease.buffers {
                        let Some(on) = queue.by_buffer.get(&buffer) else { continue };
                        let classes = self.excluded(buffer).iter();
                        classes.flat_map(|&class| on.of(class)).for_each(|&t| search.find(t));
                    }
                    if lease.has_room() {
                        lacking.keys().for_each(|&ticket| search.find(ticket));
                    }
                }
            } else if let Some(ticket) = search.open.pop() {
                let waiter = &queue.waiters[&ticket];
                for &key in &waiter.holders {
                    if search.known_holders.insert(key) {
                        search.holders.push(key);
                    }
                }
                for &(buffer, access) in &waiter.buffers {
                    let Some(on) = queue.by_buffer.get(&buffer) else { continue };
                    let class = waiter.class(buffer, access);
                    for &other in conflicting(class, self.can_read_in_place(buffer)) {
                        let end = found_from.entry((buffer, other)).or_insert(Ticket(u64::MAX));
                        if ticket < *end {
                            on.of(other).range(ticket..*end).for_each(|&t| search.find(t));
                            *end = ticket;
                        }
                    }
                }
                if let Some(needed) = lacking.get(&ticket) {
                    let younger = search.left.range(ticket..).copied();
                    let behind = younger.filter(|t| self.takes(&queue.waiters[t], needed));
                    behind.collect::<Vec<_>>().into_iter().for_each(|t| search.find(t));
                }
            } else {
                return search.found;
            }
        }
    }

    /// Returns true if a waiter would take, or keep, room beside `needed`.
    fn takes(&self, waiter: &Waiter, needed: &[RangeId]) -> bool {
        self.wait_queue.step();
        let ranges = self.ranges_of(&self.wanted_by(waiter).come);
        ranges.iter().any(|range| !needed.contains(range) && self.ranges[*range].takes_room())
    }
}
