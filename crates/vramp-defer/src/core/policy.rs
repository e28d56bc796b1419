//! Victims in an order that a policy of the program gives.
//!
//! 1. [`Deferrables::candidates`] returns buffers that may leave, in the planner's own order.
//! 2. The policy puts them, or some of them, in its order.
//! 3. [`Deferrables::choose_in_order`] takes victims in that order until enough is freed. What is missing
//!    then is chosen by [`Deferrables::choose`], as without a policy.
//!
//! Growth: O(b log b) for the b buckets of each class and O(log b) for each unit offered, however many
//! buffers there are; O(pieces) for each buffer of the order up to the last one needed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::bucket::Unit;
use super::lists::Listing;
use super::spill_room::TierOrder;
use super::victims::Candidate;
use super::{BufferId, Deferrables, EvictionCost, SpillDemand, VictimChoice};
use vramp_core::Bytes;

/// A buffer that may leave the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvictionCandidate {
    /// The buffer.
    pub buffer: BufferId,
    /// Memory that becomes free if it leaves: of its pieces that were looked at, or of its group.
    pub frees: Bytes,
    /// Cost of evicting its first piece, or its group.
    pub cost: EvictionCost,
}

/// Victims in a given order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OrderedChoice {
    /// Victims and what they free; `short` is the caller's to find.
    pub choice: VictimChoice,
    /// Buffers of the order that were not taken: unknown, named twice, held or in flight.
    pub ignored: u64,
}

impl Deferrables {
    /// Returns buffers that may leave, each once, in the order in which [`choose`](Deferrables::choose)
    /// considers them. They are found by looking at `most` pieces or groups.
    pub fn candidates(
        &mut self,
        most: usize,
        short: &SpillDemand,
        now_ns: u64,
    ) -> Vec<EvictionCandidate> {
        let short = &SpillDemand { room: short.room.beside(self.promised), ..*short };
        let order = &TierOrder::by_rate(&short.room, &short.rates);
        self.end_cooldowns(now_ns);
        self.relist();
        let (units, looked_at) = self.cheapest(most, short, order, now_ns);
        self.counters.looked_at += looked_at;
        let mut offered: Vec<EvictionCandidate> = Vec::new();
        let mut places: BTreeMap<BufferId, usize> = BTreeMap::new();
        for Candidate { unit, pieces, frees, cost, .. } in units {
            let mut buffers: Vec<BufferId> = pieces.iter().map(|piece| piece.buffer).collect();
            buffers.dedup();
            for buffer in buffers {
                match places.get(&buffer) {
                    // Another piece of it. A group was looked at as a whole.
                    Some(&place) if matches!(unit, Unit::Piece(_)) => offered[place].frees += frees,
                    Some(_) => {}
                    None => {
                        places.insert(buffer, offered.len());
                        offered.push(EvictionCandidate { buffer, frees, cost });
                    }
                }
            }
        }
        offered
    }

    /// Returns the first units in the order of their cost by byte, class by class.
    fn cheapest(
        &self,
        most: usize,
        short: &SpillDemand,
        order: &TierOrder,
        now_ns: u64,
    ) -> (Vec<Candidate>, u64) {
        let model = self.cost_model(short, order, now_ns);
        let (mut found, mut looked_at) = (Vec::new(), 0);
        let mut buckets = self.lists.buckets.iter().peekable();
        while let Some(&(first, _)) = buckets.peek()
            && found.len() < most
        {
            let class = (first.standing, first.priority);
            let mut heads = BinaryHeap::new();
            while let Some((key, units)) =
                buckets.next_if(|(key, _)| (key.standing, key.priority) == class)
            {
                looked_at += 1;
                heads.extend(self.head(key, units, &model).map(Reverse));
            }
            while let Some(Reverse(head)) = heads.pop()
                && found.len() < most
            {
                found.push(head.candidate.clone());
                heads.extend(self.next_of(head, 0, &model, &mut looked_at).map(Reverse));
            }
        }
        (found, looked_at)
    }

    /// Chooses victims of these buffers in their order, and marks them, until the deficit is covered: by
    /// at most one piece more, and of a buffer no piece more than needed. Buffers that cannot leave are
    /// ignored, and so are those without room below the card. Each move has to be performed and settled,
    /// or abandoned.
    pub fn choose_in_order(
        &mut self,
        buffers: &[BufferId],
        short: &SpillDemand,
        now_ns: u64,
    ) -> OrderedChoice {
        let short = &SpillDemand { room: short.room.beside(self.promised), ..*short };
        let order = &TierOrder::by_rate(&short.room, &short.rates);
        self.end_cooldowns(now_ns);
        self.relist();
        let (mut freed, mut ignored) = (Bytes::ZERO, 0);
        let mut left = short.room;
        let mut picked: Vec<Candidate> = Vec::new();
        let mut named: BTreeSet<BufferId> = BTreeSet::new();
        let mut groups: BTreeSet<Unit> = BTreeSet::new();
        for &buffer in buffers {
            if freed >= short.deficit {
                break;
            }
            let units = if named.insert(buffer) { self.units_of(buffer) } else { Vec::new() };
            let mut is_taken = false;
            for unit in units {
                self.counters.looked_at += 1;
                if matches!(unit, Unit::Group(_)) && !groups.insert(unit) {
                    // It leaves with another one of its group.
                    is_taken = true;
                    continue;
                }
                let Some(candidate) = self.listed_candidate(unit, short, order, now_ns) else {
                    continue;
                };
                is_taken = true;
                if freed < short.deficit && candidate.takes(&mut left, order) {
                    freed += candidate.frees;
                    picked.push(candidate);
                }
            }
            ignored += u64::from(!is_taken);
        }
        OrderedChoice { choice: self.send_all(&picked, order, short.room), ignored }
    }

    /// Returns what leaves with a buffer; nothing for an unknown one.
    fn units_of(&self, buffer: BufferId) -> Vec<Unit> {
        let Ok(known) = self.get(buffer) else { return Vec::new() };
        match self.ranges[known.range].leaves_together() {
            true => vec![Unit::Group(known.range)],
            false => self.pieces_of(buffer).map(Unit::Piece).collect(),
        }
    }

    /// Returns a unit as a possible victim; `None` if it cannot leave.
    fn listed_candidate(
        &self,
        unit: Unit,
        short: &SpillDemand,
        order: &TierOrder,
        now_ns: u64,
    ) -> Option<Candidate> {
        match self.lists.listed.get(&unit)?.listing {
            Listing::Candidate { bucket, last_use_ns } => {
                let model = self.cost_model(short, order, now_ns);
                Some(self.candidate(unit, &bucket, last_use_ns, &model))
            }
            _ => None,
        }
    }
}
