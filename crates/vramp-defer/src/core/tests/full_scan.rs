//! The choice of victims by looking at every unit: the reference for the choice by buckets.

use super::super::cost::CostModel;
use super::super::cost::Unit;
use super::super::lists::Listing;
use super::super::spill_room::TierOrder;
use super::super::victims::Candidate;
use super::*;

/// Returns all possible victims, the cheapest first.
pub fn candidates(core: &Deferrables, model: &CostModel<'_>) -> Vec<Candidate> {
    let mut units: Vec<Unit> = Vec::new();
    for (id, range) in &core.ranges {
        let pieces = range.tenants.values().flat_map(|tenant| core.pieces_of(tenant.buffer));
        match range.is_group {
            true => units.push(Unit::Group(id)),
            false => units.extend(pieces.map(Unit::Piece)),
        }
    }
    let candidate = |unit: Unit| match core.listing_of(unit)?.listing {
        Listing::Candidate { bucket, last_use_ns } => {
            let candidate = core.candidate(unit, &bucket, last_use_ns, model);
            candidate.takes(&mut model.room.clone(), model.order).then_some(candidate)
        }
        Listing::Leased | Listing::Pinned | Listing::Moving => None,
    };
    let mut all: Vec<Candidate> = units.into_iter().filter_map(candidate).collect();
    all.sort_by(Candidate::before);
    all
}

/// Picks from sorted candidates: all of the lower classes, and of the last class what costs least.
pub fn cover(all: &[Candidate], deficit: Bytes, model: &CostModel<'_>) -> Vec<Candidate> {
    let mut picked: Vec<Candidate> = Vec::new();
    let (mut freed, mut cost, mut room) = (b(0), 0u128, model.room);
    for class in all.chunk_by(|one, other| one.class() == other.class()) {
        let mut best: Option<(u128, usize, Candidate)> = None;
        for candidate in class {
            let mut left = room;
            if !candidate.takes(&mut left, model.order) {
                continue;
            }
            let total = cost + u128::from(candidate.cost.cost_ns());
            if freed + candidate.frees >= deficit {
                if best.as_ref().is_none_or(|(least, ..)| total < *least) {
                    best = Some((total, picked.len(), candidate.clone()));
                }
                continue;
            }
            (room, cost) = (left, total);
            freed += candidate.frees;
            picked.push(candidate.clone());
        }
        if let Some((_, before, completes)) = best {
            picked.truncate(before);
            picked.push(completes);
            break;
        }
    }
    let freed: Bytes = picked.iter().map(|candidate| candidate.frees).sum();
    let mut spare = freed.saturating_sub(deficit);
    let mut needed: Vec<Candidate> = Vec::new();
    for candidate in picked.into_iter().rev() {
        match candidate.frees <= spare {
            true => spare -= candidate.frees,
            false => needed.insert(0, candidate),
        }
    }
    needed
}

/// Returns the pieces that leave, in order.
pub fn choice(core: &Deferrables, short: &SpillDemand, now_ns: u64) -> Vec<PieceId> {
    let mut core = core.clone();
    core.end_cooldowns(now_ns);
    let short = SpillDemand { room: short.room.beside(core.promised), ..*short };
    let order = TierOrder::by_rate(&short.room, &short.rates);
    let model = core.cost_model(&short, &order, now_ns);
    let picked = cover(&candidates(&core, &model), short.deficit, &model);
    picked.into_iter().flat_map(|candidate| candidate.pieces).collect()
}
