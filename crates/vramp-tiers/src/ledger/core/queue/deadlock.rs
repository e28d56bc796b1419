//! Whether everybody who waits can still be served.
//!
//! A waiter waits for the owners who hold memory in its candidate spaces. Owners who do not wait
//! are taken to end at some time and to return all they hold; memory outside any reservation too.
//! Then a waiter that fits is served, its owner goes on, ends, and returns all. Who is left when
//! this goes no further waits for ever: those wait for one another, in a cycle.
//!
//! A waiter that spills is taken to be served by that, for as long as it has a claim.
//!
//! Order can do the same without any lack of memory: a waiter that was passed to its bound keeps
//! out those whose memory it waits for. Then one of them has to be let pass.

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use super::order::Allowances;
use super::wait_queue::fitting;
use super::{Request, WaitQueue, WaiterId};
use crate::ledger::core::{Candidates, Ledger, Owner, ReservationId, ReservationRecord, SpaceId};
use vramp_core::Bytes;

/// One owner who waits for the next one of a [`Deadlock`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CycleMember {
    /// Who.
    pub owner: Owner,
    /// Its request.
    pub waiter: WaiterId,
    /// What it holds in the spaces that the one before it waits for.
    pub holds: Vec<ReservationId>,
}

/// How to get out of a deadlock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// Cancel this request and return what its owner holds: the one of the cycle with the lowest
    /// priority, and the youngest of those.
    Abort {
        /// Whose request.
        owner: Owner,
        /// Which one.
        waiter: WaiterId,
        /// What to release: what its owner holds of what the one before it waits for.
        reservations: Vec<ReservationId>,
    },
    /// There is memory for this one, only the order keeps it out: [`WaitQueue::grant_out_of_order`].
    GrantOutOfOrder(WaiterId),
}

/// Waiters that can never be served, whoever else ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlock {
    /// All of them, in the order of their age.
    pub stuck: Vec<WaiterId>,
    /// Each waits for memory of the next, the last for the first. Empty if only the order is in
    /// the way.
    pub cycle: Vec<CycleMember>,
    /// What to do about it. There can be more cycles: ask again.
    pub resolution: Resolution,
}

/// What is taken in each space, by those who have not ended.
type Taken = BTreeMap<SpaceId, Bytes>;

/// Owners who are stuck, and the request by which each is.
type StuckOwners = BTreeMap<Owner, WaiterId>;

impl WaitQueue {
    /// Looks for waiters that can never be served. O((waiters + reservations) times waiters); for when
    /// somebody begins to wait, or has waited for long.
    pub fn deadlock(&self, ledger: &Ledger) -> Option<Deadlock> {
        if self.is_empty() {
            return None;
        }
        let (stuck, owners) = self.stuck(ledger, false);
        if !stuck.is_empty() {
            return Some(self.cycle(ledger, stuck, &owners));
        }
        let (stuck, _) = self.stuck(ledger, true);
        let pass = self.waiting().find(|(id, request)| {
            stuck.contains(id) && fitting(ledger, request, |_| true).is_some()
        })?;
        let resolution = Resolution::GrantOutOfOrder(pass.0);
        Some(Deadlock { stuck: stuck.into_iter().collect(), cycle: Vec::new(), resolution })
    }

    /// Who is left when everybody has gone on who can: as the order allows, or as memory does. An
    /// owner with several requests goes on as soon as one of them is served: only owners of whom
    /// none is, are stuck, each by its oldest request.
    fn stuck(&self, ledger: &Ledger, ordered: bool) -> (BTreeSet<WaiterId>, StuckOwners) {
        let mut waiting: StuckOwners = BTreeMap::new();
        for (&id, waiter) in &self.waiters {
            waiting.entry(waiter.request.owner).or_insert(id);
        }
        let mut held: BTreeMap<Owner, SmallVec<[(SpaceId, Bytes); 2]>> = BTreeMap::new();
        let mut taken: Taken = ledger.spaces().map(|space| (space, Bytes::ZERO)).collect();
        for (_, record) in ledger.reservations() {
            if waiting.contains_key(&record.owner) {
                held.entry(record.owner).or_default().push((record.space, record.charged()));
                *taken.entry(record.space).or_default() += record.charged();
            }
        }
        let mut stuck: BTreeSet<WaiterId> = self.waiters.keys().copied().collect();
        loop {
            let mut allowances = Allowances::default();
            let mut served = Vec::new();
            for rank in self.order.iter().filter(|rank| stuck.contains(&rank.id)) {
                let waiter = &self.waiters[&rank.id];
                if self.claims.contains_key(&rank.id) {
                    // It spills what it lacks.
                    served.push(rank.id);
                    continue;
                }
                let fits = |&space: &SpaceId| {
                    let Ok(levels) = ledger.levels(space) else { return false };
                    let bytes = levels.round_up(waiter.request.bytes);
                    let free = levels.limit.saturating_sub(taken[&space]);
                    bytes <= free && (!ordered || allowances.admit(space, waiter.request.bytes))
                };
                if waiter.request.candidates.iter().any(fits) {
                    served.push(rank.id);
                } else {
                    allowances.narrow(waiter);
                }
            }
            if served.is_empty() {
                return (stuck, waiting);
            }
            for id in served {
                stuck.remove(&id);
                let owner = self.waiters[&id].request.owner;
                waiting.remove(&owner);
                for (space, bytes) in held.remove(&owner).unwrap_or_default() {
                    let taken = taken.entry(space).or_default();
                    *taken = taken.saturating_sub(bytes);
                }
            }
        }
    }

    /// The cycle among owners who are stuck, reached from the oldest request.
    fn cycle(&self, ledger: &Ledger, stuck: BTreeSet<WaiterId>, owners: &StuckOwners) -> Deadlock {
        let first = *owners.values().min().expect("who is stuck waits for an owner who is");
        let mut path = vec![CycleMember {
            owner: self.waiters[&first].request.owner,
            waiter: first,
            holds: Vec::new(),
        }];
        loop {
            let last = path.last().expect("the path begins with the first who is stuck");
            let link = self.next_link(ledger, last.waiter, owners);
            if let Some(start) = path.iter().position(|known| known.owner == link.owner) {
                path.drain(..start);
                path[0].holds = link.holds;
                break;
            }
            path.push(link);
        }
        let least = path
            .iter()
            .min_by_key(|link| {
                (self.waiters[&link.waiter].request.priority, std::cmp::Reverse(link.waiter))
            })
            .expect("a cycle has a link");
        let resolution = Resolution::Abort {
            owner: least.owner,
            waiter: least.waiter,
            reservations: least.holds.clone(),
        };
        Deadlock { stuck: stuck.into_iter().collect(), cycle: path, resolution }
    }

    /// Whom `waiter` waits for: the first other owner who is stuck and holds memory where there
    /// would be room without the others, or its own if there is no such space.
    fn next_link(&self, ledger: &Ledger, waiter: WaiterId, stuck: &StuckOwners) -> CycleMember {
        let Request { candidates, bytes, owner: asker, .. } = &self.waiters[&waiter].request;
        let held_by = |owner: Owner, space: SpaceId| {
            let records = ledger.reservations().map(|(_, record)| record);
            let held = records.filter(|record| record.owner == owner && record.space == space);
            held.map(ReservationRecord::charged).sum::<Bytes>()
        };
        let has_room = |&space: &SpaceId| {
            let Ok(levels) = ledger.levels(space) else { return false };
            levels.round_up(*bytes) <= levels.limit.saturating_sub(held_by(*asker, space))
        };
        let possible: Candidates = candidates.iter().copied().filter(has_room).collect();
        let holds = |owner: Owner, spaces: &[SpaceId]| -> Vec<ReservationId> {
            let all = ledger.reservations();
            all.filter(|(_, record)| record.owner == owner && spaces.contains(&record.space))
                .map(|(id, _)| id)
                .collect()
        };
        let mut others = stuck.iter().filter(|(owner, _)| *owner != asker);
        let other = others
            .find(|&(&owner, _)| possible.iter().any(|&space| !held_by(owner, space).is_zero()));
        match other {
            Some((&owner, &waiter)) => {
                CycleMember { owner, waiter, holds: holds(owner, &possible) }
            }
            None => CycleMember {
                owner: *asker,
                waiter: stuck[asker],
                holds: holds(*asker, candidates),
            },
        }
    }
}
