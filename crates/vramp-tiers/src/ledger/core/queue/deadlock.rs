//! Deadlock detection: waiters that can never be served.
//!
//! A waiter waits for the owners of memory in its candidate spaces. The check assumes that owners
//! without a waiter end some time and return all their memory, and that memory outside any
//! reservation is freed. Then waiters that fit are served, and their owners end in turn. The
//! waiters that are left when no other fits wait for one another, in a cycle.
//!
//! A waiter with a claim counts as served: memory is being spilled for it.
//!
//! The order alone can block waiters too: a waiter that was overtaken up to its bound keeps out
//! the owners whose memory it waits for. Then one of them has to be served out of order. Here what an owner keeps
//! outside reservations counts as well ([`Request::held`]): the leases of the owner of a request. No owner has to
//! give up for those, since another thread may end them.

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use super::wait_queue::{Allowances, Waiter, fitting};
use super::{Request, WaitQueue, WaiterId};
use crate::ledger::core::{Candidates, Ledger, Owner, ReservationId, ReservationRecord, SpaceId};
use vramp_core::Bytes;

/// An owner in the cycle of a [`Deadlock`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CycleMember {
    /// Owner that waits for memory of the next member.
    pub owner: Owner,
    /// Its waiter.
    pub waiter: WaiterId,
    /// Reservations that it holds in the spaces that the member before it waits for.
    pub holds: Vec<ReservationId>,
}

/// How to end a deadlock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// Cancel one waiter and release its owner's reservations. It is the waiter of the cycle with
    /// the lowest priority, and the youngest of these.
    Abort {
        /// Owner of the waiter.
        owner: Owner,
        /// Waiter to cancel.
        waiter: WaiterId,
        /// Reservations to release: those that the member before it waits for.
        reservations: Vec<ReservationId>,
    },
    /// Serve this waiter by [`WaitQueue::grant_out_of_order`]: it fits, and only the order keeps it
    /// out.
    GrantOutOfOrder(WaiterId),
}

/// Waiters that can never be served, whichever other owners end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlock {
    /// All such waiters, the oldest first.
    pub stuck: Vec<WaiterId>,
    /// Each member waits for memory of the next, and the last for the first. Empty if only the
    /// order blocks them.
    pub cycle: Vec<CycleMember>,
    /// How to end it. There can be further cycles: check again afterwards.
    pub resolution: Resolution,
}

/// Bytes of each space held by owners that have not ended.
type Taken = BTreeMap<SpaceId, Bytes>;

/// Owners that are stuck, and the waiter of each.
type StuckOwners = BTreeMap<Owner, WaiterId>;

impl WaitQueue {
    /// True if a check for deadlock now takes at most `max_steps` steps. O(`max_steps` / waiters).
    pub fn deadlock_check_is_within(&self, ledger: &Ledger, max_steps: usize) -> bool {
        let waiters = self.len();
        let max = max_steps / waiters.max(1);
        waiters + ledger.reservations().take(max + 1).count() <= max
    }

    /// Looks for waiters that can never be served. O((waiters + reservations) times waiters): meant
    /// for the start of a wait, and for waits that take long.
    pub fn deadlock(&self, ledger: &Ledger) -> Option<Deadlock> {
        if self.is_empty() {
            return None;
        }
        let (stuck, owners) = self.stuck(ledger, false);
        if !stuck.is_empty() {
            return Some(self.cycle(ledger, stuck, &owners));
        }
        let (stuck, _) = self.stuck(ledger, true);
        let fits = self.waiting().find(|(id, request)| {
            stuck.contains(id) && fitting(ledger, request, |_| true).is_some()
        })?;
        let resolution = Resolution::GrantOutOfOrder(fits.0);
        Some(Deadlock { stuck: stuck.into_iter().collect(), cycle: Vec::new(), resolution })
    }

    /// The waiters that are left when no other can be served: with `ordered` as the order permits,
    /// otherwise as memory does. An owner with several requests goes on as soon as one of them is
    /// served. It is stuck only if none is, and then by its oldest request.
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
        let held_by = |request: &Request| if ordered { request.held } else { Bytes::ZERO };
        for Waiter { request, .. } in self.waiters.values() {
            for space in &request.candidates {
                *taken.entry(*space).or_default() += held_by(request);
            }
        }
        let mut stuck: BTreeSet<WaiterId> = self.waiters.keys().copied().collect();
        loop {
            let mut allowances = Allowances::default();
            let mut served = Vec::new();
            for rank in self.order.iter().filter(|rank| stuck.contains(&rank.id)) {
                let waiter = &self.waiters[&rank.id];
                let claim = self.claims.get(&rank.id);
                if claim.is_some_and(|claim| claim.in_step || !ordered) {
                    // Memory is being spilled for it. To serve one out of order, a pause is no reason to wait.
                    served.push(rank.id);
                    continue;
                }
                let fits = |&space: &SpaceId| {
                    let Ok(levels) = ledger.levels(space) else { return false };
                    let bytes = levels.round_up(waiter.request.bytes);
                    let free = levels.limit.saturating_sub(taken[&space]);
                    bytes <= free && (!ordered || allowances.permit(space, waiter.request.takes()))
                };
                if waiter.request.candidates.iter().any(fits) {
                    served.push(rank.id);
                } else {
                    allowances.restrict(waiter);
                }
            }
            if served.is_empty() {
                return (stuck, waiting);
            }
            for id in served {
                stuck.remove(&id);
                let request = &self.waiters[&id].request;
                waiting.remove(&request.owner);
                let outside = request.candidates.iter().map(|&space| (space, held_by(request)));
                let of_owner = held.remove(&request.owner).unwrap_or_default();
                for (space, bytes) in of_owner.into_iter().chain(outside) {
                    let taken = taken.entry(space).or_default();
                    *taken = taken.saturating_sub(bytes);
                }
            }
        }
    }

    /// The cycle among stuck owners that is reached from the oldest waiter.
    fn cycle(&self, ledger: &Ledger, stuck: BTreeSet<WaiterId>, owners: &StuckOwners) -> Deadlock {
        let first = *owners.values().min().expect("a stuck waiter waits for a stuck owner");
        let mut path = vec![CycleMember {
            owner: self.waiters[&first].request.owner,
            waiter: first,
            holds: Vec::new(),
        }];
        loop {
            let last = path.last().expect("the path begins with the first stuck owner");
            let link = self.next_link(ledger, last.waiter, owners);
            if let Some(start) = path.iter().position(|known| known.owner == link.owner) {
                path.drain(..start);
                path[0].holds = link.holds;
                break;
            }
            path.push(link);
        }
        let victim = path
            .iter()
            .min_by_key(|link| {
                (self.waiters[&link.waiter].request.priority, std::cmp::Reverse(link.waiter))
            })
            .expect("a cycle has a link");
        let resolution = Resolution::Abort {
            owner: victim.owner,
            waiter: victim.waiter,
            reservations: victim.holds.clone(),
        };
        Deadlock { stuck: stuck.into_iter().collect(), cycle: path, resolution }
    }

    /// The owner that `waiter` waits for: the first other stuck owner with memory in a space where
    /// the request would fit beside its owner's own memory. Its own owner if there is no such
    /// space.
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
