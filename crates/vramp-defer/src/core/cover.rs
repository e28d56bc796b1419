//! Which candidates cover a deficit at the least cost.
//!
//! The exact minimum is a knapsack problem. This takes the cheapest by byte first, and tries each
//! candidate as the last one. The cost is at most twice the minimum, and the minimum itself if all
//! candidates free the same. O(n log n) with the sorting.

use std::cmp::Ordering;

use super::spill_room::TierOrder;
use super::victims::Candidate;
use super::{EvictionClass, SpillRoom};
use vramp_core::Bytes;

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
            .then_with(|| self.pieces.cmp(&other.pieces))
    }

    fn class(&self) -> (EvictionClass, i32) {
        (self.cost.standing, self.cost.priority)
    }
}

/// Picked candidates by index, and what lacked room below the card.
pub(super) struct Cover {
    pub picked: Vec<usize>,
    pub no_room: Bytes,
}

/// Picks from sorted candidates what covers the deficit, by at most one candidate more: all of the
/// lower classes, and of the last class what costs least.
pub(super) fn cover(
    candidates: &[Candidate],
    deficit: Bytes,
    mut room: SpillRoom,
    order: &TierOrder,
) -> Cover {
    let mut picked: Vec<usize> = Vec::new();
    let (mut freed, mut cost, mut no_room) = (Bytes::ZERO, 0u128, Bytes::ZERO);
    let mut first = 0;
    for class in candidates.chunk_by(|a, b| a.class() == b.class()) {
        let mut best: Option<(u128, usize, usize)> = None;
        for (index, candidate) in (first..).zip(class) {
            let mut left = room;
            if !candidate.takes(&mut left, order) {
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

/// Removes what later picks made superfluous, the most expensive first.
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
