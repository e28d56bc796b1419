//! Which of many candidates cover a deficit at the least cost.
//!
//! Finding the very least is a knapsack. Taking the cheapest by byte first, and trying each
//! candidate as the one that completes, costs twice the least at most, and the least itself where
//! all free the same. O(n log n) with the sorting.

use std::cmp::Ordering;

use super::victims::Candidate;
use super::{EvictionClass, SpillRoom};
use vramp_core::Bytes;

impl Candidate {
    /// The cheaper by byte first; of equals the one unused longest, then the older name.
    pub fn before(&self, other: &Candidate) -> Ordering {
        let per_byte = |one: &Candidate, by: &Candidate| {
            u128::from(one.cost.cost_ns()) * u128::from(by.frees.count())
        };
        self.class()
            .cmp(&other.class())
            .then_with(|| per_byte(self, other).cmp(&per_byte(other, self)))
            .then_with(|| other.cost.idle_ns.cmp(&self.cost.idle_ns))
            .then_with(|| self.pieces.cmp(&other.pieces))
    }

    fn class(&self) -> (EvictionClass, i32) {
        (self.cost.standing, self.cost.priority)
    }
}

/// What was picked, as indices, and what lower room refused.
pub(super) struct Cover {
    pub picked: Vec<usize>,
    pub no_room: Bytes,
}

/// Picks of sorted candidates what covers the deficit, at most one candidate above it: all of the
/// classes that come first, and of the last what costs least.
pub(super) fn cover(candidates: &[Candidate], deficit: Bytes, mut room: SpillRoom) -> Cover {
    let mut picked: Vec<usize> = Vec::new();
    let (mut freed, mut cost, mut no_room) = (Bytes::ZERO, 0u128, Bytes::ZERO);
    let mut first = 0;
    for class in candidates.chunk_by(|a, b| a.class() == b.class()) {
        let mut best: Option<(u128, usize, usize)> = None;
        for (index, candidate) in (first..).zip(class) {
            let mut left = room;
            if !candidate.takes(&mut left) {
                no_room += candidate.frees;
                continue;
            }
            let total = cost + u128::from(candidate.cost.cost_ns());
            if freed + candidate.frees >= deficit {
                if best.is_none_or(|(least, ..)| total < least) {
                    best = Some((total, picked.len(), index));
                }
                continue;
            }
            (room, cost) = (left, total);
            freed += candidate.frees;
            picked.push(index);
        }
        if let Some((_, before, completes)) = best {
            picked.truncate(before);
            picked.push(completes);
            break;
        }
        first += class.len();
    }
    drop_needless(candidates, deficit, &mut picked);
    Cover { picked, no_room }
}

/// The dearest first: what is not needed any more beside what came after it.
fn drop_needless(candidates: &[Candidate], deficit: Bytes, picked: &mut Vec<usize>) {
    let freed: Bytes = picked.iter().map(|&index| candidates[index].frees).sum();
    let mut spare = freed.saturating_sub(deficit);
    for place in (0..picked.len()).rev() {
        let frees = candidates[picked[place]].frees;
        if frees <= spare {
            spare -= frees;
            picked.remove(place);
        }
    }
}
