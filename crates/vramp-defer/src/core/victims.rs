//! Victims: what leaves the card when memory is short.

use smallvec::SmallVec;

use super::buffer_state::PieceMove;
use super::cost::CostModel;
use super::cost::{BucketKey, Unit};
use super::spill_room::{Outgoing, TierOrder};
use super::{CopyOut, Deferrables, EvictionCost, PieceId, Rates, Shortfall, SpillRoom};
use vramp_core::Bytes;

/// Bytes to free, and what moves cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpillDemand {
    /// Bytes to free.
    pub deficit: Bytes,
    /// Transfer rates.
    pub rates: Rates,
    /// Free space below the card, promises to moves in flight included.
    pub room: SpillRoom,
}

/// What leaves together: a piece, or all mapped pieces of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Victim {
    /// Memory that becomes free once all its moves are settled, in whole pages.
    pub frees: Bytes,
    /// A move for each piece.
    pub moves: SmallVec<[CopyOut; 1]>,
    /// Cost by which it was chosen.
    pub cost: EvictionCost,
}

/// Victims of one request, within each class the cheapest by byte first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VictimChoice {
    /// Victims, marked as such. Each of their moves has to be settled or abandoned.
    pub victims: Vec<Victim>,
    /// Memory that all of them free.
    pub frees: Bytes,
    /// What keeps the rest on the card. `None` if the victims free enough.
    pub short: Option<Shortfall>,
}

/// A possible victim.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub unit: Unit,
    pub pieces: SmallVec<[PieceId; 1]>,
    pub frees: Bytes,
    /// Its dirty pieces.
    pub dirty: SmallVec<[Outgoing; 1]>,
    pub cost: EvictionCost,
}

impl Candidate {
    /// Takes the room it needs below the card. Returns false if there is too little.
    pub fn takes(&self, room: &mut SpillRoom, order: &TierOrder) -> bool {
        self.dirty.iter().all(|&out| room.take(out, order).is_some())
    }
}

impl Deferrables {
    /// Chooses victims and marks them. They free at most one piece more than the deficit. Leased,
    /// pinned and moving buffers are never chosen. Each move has to be performed and
    /// settled, or abandoned.
    ///
    /// Idle buffers come first, then those wanted soon, then those in use; within a class lower
    /// priorities first. Among equals the cheapest comes first: the time to write back, plus the
    /// time to restore times the probability of an early use. O(log n) for each victim and for each
    /// piece that changed since the last choice, and O(members) for each such group.
    pub fn choose(&mut self, short: &SpillDemand, now_ns: u64) -> VictimChoice {
        if short.deficit.is_zero() {
            return VictimChoice::default();
        }
        let short = &SpillDemand { room: short.room.beside(self.promised), ..*short };
        let order = &TierOrder::by_rate(&short.room, &short.rates);
        self.end_cooldowns(now_ns);
        self.relist();
        let cover = self.cover(short.deficit, &self.cost_model(short, order, now_ns));
        self.counters.looked_at += cover.looked_at;
        let shortfall = Shortfall { no_room: cover.no_room, ..self.lists.staying };
        let choice = self.send_all(&cover.picked, order, short.room);
        let missing = short.deficit.saturating_sub(choice.frees);
        let short = (!missing.is_zero()).then_some(Shortfall { missing, ..shortfall });
        VictimChoice { short, ..choice }
    }

    /// Marks victims that take this room together.
    pub(super) fn send_all(
        &mut self,
        picked: &[Candidate],
        order: &TierOrder,
        room: SpillRoom,
    ) -> VictimChoice {
        let (mut room, mut spare) = (room, room);
        for candidate in picked {
            let covered = candidate.takes(&mut spare, order);
            debug_assert!(covered, "the choice took the same room");
        }
        let victims: Vec<Victim> = picked
            .iter()
            .map(|candidate| self.send(candidate, order, &mut room, &mut spare))
            .collect();
        let frees = victims.iter().map(|victim| victim.frees).sum();
        self.counters.victims += victims.len() as u64;
        VictimChoice { victims, frees, short: None }
    }

    /// Dirty pieces take of `room`, additional copies of `spare`.
    fn send(
        &mut self,
        candidate: &Candidate,
        order: &TierOrder,
        room: &mut SpillRoom,
        spare: &mut SpillRoom,
    ) -> Victim {
        let mut moves = SmallVec::new();
        for &piece in &candidate.pieces {
            let dirty = self.piece(piece).is_dirty().then(|| self.outgoing(piece));
            let to = match dirty {
                Some(out) => Some(room.take(out, order).expect("the cover took the same room")),
                None => self.copy_to_read(piece, spare),
            };
            moves.push(self.begin_out(piece, to, true));
        }
        Victim { frees: candidate.frees, moves, cost: candidate.cost }
    }

    /// Returns what a piece needs room for.
    pub(super) fn outgoing(&self, id: PieceId) -> Outgoing {
        let may_use_peers = !self.buffers[id.buffer].readable;
        Outgoing { len: self.piece(id).len, may_use_peers }
    }

    pub(super) fn begin_out(
        &mut self,
        piece: PieceId,
        to: Option<super::SpillTier>,
        leaving: bool,
    ) -> CopyOut {
        let id =
            self.begin(piece, |id| PieceMove::Out { id, to, leaving, torn: false, queued: None });
        let uses = &self.buffers[piece.buffer].uses;
        let (copy_after, lend_after) = (uses.writes(), uses.all());
        CopyOut { id, piece, at: self.piece_slice(piece), to, copy_after, lend_after }
    }

    pub(super) fn cost_model<'a>(
        &'a self,
        short: &'a SpillDemand,
        order: &'a TierOrder,
        now_ns: u64,
    ) -> CostModel<'a> {
        CostModel { config: &self.config, rates: &short.rates, room: short.room, order, now_ns }
    }

    /// Returns a unit of a bucket as a possible victim. O(1), and O(tenants) of a group.
    pub(super) fn candidate(
        &self,
        unit: Unit,
        bucket: &BucketKey,
        last_use_ns: u64,
        model: &CostModel<'_>,
    ) -> Candidate {
        let pieces = self.backed_pieces(unit);
        let dirty = pieces.iter().filter(|&&id| self.piece(id).is_dirty());
        let dirty: SmallVec<[Outgoing; 1]> = dirty.map(|&id| self.outgoing(id)).collect();
        let mut cost = model.cost(bucket, last_use_ns);
        cost.dirty = dirty.iter().map(|out| out.len).sum();
        Candidate { unit, pieces, frees: bucket.frees, dirty, cost }
    }
}
