//! Which units cover a deficit at the least cost.
//!
//! The exact minimum is a knapsack problem. This takes the cheapest by byte first, and tries each unit
//! as the last one. The cost is at most twice the minimum, and the minimum itself if all units free the
//! same.
//!
//! Of each bucket only the first units are looked at: the next one costs no less, and one that covers
//! what is missing is the best of its bucket. O(log b) for each unit that is picked, and O(b log b) for
//! the b buckets of a class, however many units they hold.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, btree_set};

use super::cost::CostModel;
use super::cost::{BucketKey, Unit};
use super::lists::Bucket;
use super::victims::Candidate;
use super::{Deferrables, EvictionClass};
use vramp_core::Bytes;

/// Most of those in one list that are tried though they lack room below the card.
pub(super) const TRIES: usize = 8;

impl Candidate {
    /// Orders by cost by byte; of equals the least recently used, then the older id comes first.
    pub fn before(&self, other: &Candidate) -> Ordering {
        let per_byte = |one: &Candidate, by: &Candidate| {
            u128::from(one.cost.cost_ns()) * u128::from(by.frees.count())
        };
        self.class()
            .cmp(&other.class())
            .then_with(|| per_byte(self, other).cmp(&per_byte(other, self)))
            .then_with(|| other.cost.idle_ns.cmp(&self.cost.idle_ns))
            .then_with(|| self.unit.cmp(&other.unit))
    }

    pub fn class(&self) -> (EvictionClass, i32) {
        (self.cost.standing, self.cost.priority)
    }
}

/// The cheapest unit of a bucket that was not looked at, and those after it.
pub(super) struct Head<'a> {
    pub candidate: Candidate,
    bucket: &'a BucketKey,
    rest: btree_set::Iter<'a, (u64, Unit)>,
    /// Number of its units that lacked room.
    lacked: usize,
}

impl PartialEq for Head<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Head<'_> {}

impl PartialOrd for Head<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Head<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.candidate.before(&other.candidate)
    }
}

/// Units that were picked.
pub(super) struct Cover {
    pub picked: Vec<Candidate>,
    /// Memory of units without room below the card.
    pub no_room: Bytes,
    pub looked_at: u64,
}

impl Deferrables {
    /// Picks what covers the deficit, by at most one unit more: all of the lower classes, and of the
    /// last class what costs least.
    pub(super) fn cover(&self, deficit: Bytes, model: &CostModel<'_>) -> Cover {
        let mut cover = Cover { picked: Vec::new(), no_room: Bytes::ZERO, looked_at: 0 };
        let (mut freed, mut cost, mut room) = (Bytes::ZERO, 0u128, model.room);
        let mut buckets = self.lists.buckets.iter().peekable();
        while let Some(&(first, _)) = buckets.peek() {
            let class = (first.standing, first.priority);
            let mut heads = BinaryHeap::new();
            while let Some((key, units)) =
                buckets.next_if(|(key, _)| (key.standing, key.priority) == class)
            {
                cover.looked_at += 1;
                heads.extend(self.head(key, units, model).map(Reverse));
            }
            let mut best: Option<(u128, usize, Candidate)> = None;
            while let Some(Reverse(head)) = heads.pop() {
                let frees = head.candidate.frees;
                let mut left = room;
                if !head.candidate.takes(&mut left, model.order) {
                    cover.no_room += frees;
                    match head.lacked + 1 < TRIES {
                        true => heads.extend(
                            self.next_of(head, 1, model, &mut cover.looked_at).map(Reverse),
                        ),
                        false => cover.no_room += frees * head.rest.len() as u64,
                    }
                    continue;
                }
                let total = cost + u128::from(head.candidate.cost.cost_ns());
                if freed + frees >= deficit {
                    if best.as_ref().is_none_or(|(least, ..)| total < *least) {
                        best = Some((total, cover.picked.len(), head.candidate));
                    }
                    continue;
                }
                if best.as_ref().is_some_and(|(least, ..)| *least <= total) {
                    break;
                }
                (room, cost) = (left, total);
                freed += frees;
                cover.picked.push(head.candidate.clone());
                heads.extend(self.next_of(head, 0, model, &mut cover.looked_at).map(Reverse));
            }
            if let Some((_, before, completes)) = best {
                cover.picked.truncate(before);
                cover.picked.push(completes);
                break;
            }
        }
        drop_needless(deficit, &mut cover.picked);
        cover
    }

    pub(super) fn head<'a>(
        &self,
        bucket: &'a BucketKey,
        units: &'a Bucket,
        model: &CostModel<'_>,
    ) -> Option<Head<'a>> {
        let mut rest = units.iter();
        let &(last_use_ns, unit) = rest.next()?;
        let candidate = self.candidate(unit, bucket, last_use_ns, model);
        Some(Head { candidate, bucket, rest, lacked: 0 })
    }

    /// Returns the next unit of a bucket.
    pub(super) fn next_of<'a>(
        &self,
        head: Head<'a>,
        lacked: usize,
        model: &CostModel<'_>,
        looked_at: &mut u64,
    ) -> Option<Head<'a>> {
        let Head { bucket, mut rest, lacked: before, .. } = head;
        let &(last_use_ns, unit) = rest.next()?;
        *looked_at += 1;
        let candidate = self.candidate(unit, bucket, last_use_ns, model);
        Some(Head { candidate, bucket, rest, lacked: before + lacked })
    }
}

/// Removes what later picks made superfluous, the most expensive first.
fn drop_needless(deficit: Bytes, picked: &mut Vec<Candidate>) {
    let freed: Bytes = picked.iter().map(|candidate| candidate.frees).sum();
    let mut spare = freed.saturating_sub(deficit);
    for place in (0..picked.len()).rev() {
        let frees = picked[place].frees;
        if frees <= spare {
            spare -= frees;
            picked.remove(place);
        }
    }
}
