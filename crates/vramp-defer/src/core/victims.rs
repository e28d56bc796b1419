//! Victims: what leaves the card when memory is short.

use std::fmt;

use smallvec::SmallVec;

use super::buffer_state::Buffer;
use super::cost::CostModel;
use super::cover::cover;
use super::piece::{ContentPlace, Piece, PieceMove};
use super::range::Range;
use super::spill_room::{Outgoing, TierOrder};
use super::{CopyOut, Deferrables, EvictionCost, PieceId, Rates, SpillRoom};
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

/// Why too little could be chosen, in bytes of memory on the card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shortfall {
    /// Bytes that are missing.
    pub missing: Bytes,
    /// Held by leases.
    pub leased: Bytes,
    /// Pinned.
    pub pinned: Bytes,
    /// Exposed.
    pub exposed: Bytes,
    /// In flight: chosen before, or being copied out.
    pub moving: Bytes,
    /// Dirty, with no room on host and disk.
    pub no_room: Bytes,
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} more cannot leave the card:", self.missing)?;
        let Shortfall { leased, pinned, exposed, moving, no_room, .. } = self;
        write!(f, " {leased} are leased, {pinned} pinned, {exposed} exposed, {moving} in flight,")?;
        write!(f, " {no_room} have no room on host and disk")
    }
}

/// A possible victim.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub pieces: SmallVec<[PieceId; 1]>,
    pub frees: Bytes,
    /// Its dirty pieces.
    dirty: SmallVec<[Outgoing; 1]>,
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
    /// pinned, exposed and moving buffers are never chosen. Each move has to be performed and
    /// settled, or abandoned.
    ///
    /// Idle buffers come first, then those wanted soon, then those in use; within a class lower
    /// priorities first. Among equals the cheapest comes first: the time to write back, plus the
    /// time to restore times the probability of an early use. O(n log n) in pieces.
    pub fn choose(&mut self, short: &SpillDemand, now_ns: u64) -> VictimChoice {
        if short.deficit.is_zero() {
            return VictimChoice::default();
        }
        let short = &SpillDemand { room: short.room.beside(self.promised), ..*short };
        let order = &TierOrder::by_rate(&short.room, &short.rates);
        let mut shortfall = Shortfall::default();
        let mut candidates = self.candidates(short, order, now_ns, &mut shortfall);
        candidates.sort_by(Candidate::before);
        let cover = cover(&candidates, short.deficit, short.room, order);
        let (mut room, mut spare) = (short.room, short.room);
        for &index in &cover.picked {
            let covered = candidates[index].takes(&mut spare, order);
            debug_assert!(covered, "the cover took the same room");
        }
        let victims: Vec<Victim> = cover
            .picked
            .into_iter()
            .map(|index| self.send(&candidates[index], order, &mut room, &mut spare))
            .collect();
        let frees = victims.iter().map(|victim| victim.frees).sum();
        shortfall.missing = short.deficit.saturating_sub(frees);
        shortfall.no_room += cover.no_room;
        self.counters.victims += victims.len() as u64;
        let short = (!shortfall.missing.is_zero()).then_some(shortfall);
        VictimChoice { victims, frees, short }
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

    /// Returns all possible victims, in any order, and adds what cannot leave to the shortfall.
    pub(super) fn candidates(
        &self,
        short: &SpillDemand,
        order: &TierOrder,
        now_ns: u64,
        stay: &mut Shortfall,
    ) -> Vec<Candidate> {
        let model = CostModel { config: &self.config, rates: &short.rates, now_ns };
        let below = &(short.room, order);
        let mut all = Vec::new();
        for range in self.ranges.values() {
            let buffers = range.tenants.values().map(|tenant| tenant.buffer);
            let pieces = buffers.flat_map(|buffer| self.pieces_of(buffer));
            let backed = pieces.filter(|&id| self.piece(id).backed);
            if range.is_group {
                let together: SmallVec<[PieceId; 1]> = backed.collect();
                all.extend(self.candidate(&model, range, together, below, stay));
            } else {
                all.extend(backed.filter_map(|id| {
                    self.candidate(&model, range, SmallVec::from_elem(id, 1), below, stay)
                }));
            }
        }
        all
    }

    fn candidate(
        &self,
        model: &CostModel<'_>,
        range: &Range,
        pieces: SmallVec<[PieceId; 1]>,
        &(room, order): &(SpillRoom, &TierOrder),
        stay: &mut Shortfall,
    ) -> Option<Candidate> {
        let first = *pieces.first()?;
        let frees = match range.is_group {
            true => range.len,
            false => self.config.pages(self.piece(first).len),
        };
        let mut tenants = range.tenants.values().map(|tenant| &self.buffers[tenant.buffer]);
        if let Some(stays) = tenants.find(|buffer| buffer.stays()) {
            *reason_to_stay(stays, stay) += frees;
            return None;
        }
        if pieces.iter().any(|&id| self.piece(id).motion.is_some()) {
            stay.moving += frees;
            return None;
        }
        let mut left = room;
        let mut candidate =
            Candidate { pieces, frees, dirty: SmallVec::new(), cost: EvictionCost::default() };
        for (place, id) in candidate.pieces.iter().enumerate() {
            let piece: &Piece = self.piece(*id);
            let dirty = piece.is_dirty().then(|| self.outgoing(*id));
            let to = dirty.and_then(|out| left.take(out, order));
            if dirty.is_some() && to.is_none() {
                stay.no_room += frees;
                return None;
            }
            candidate.dirty.extend(dirty);
            let cost = model.cost(&self.buffers[id.buffer], id.index as usize, to);
            match place {
                0 => candidate.cost = cost,
                _ => candidate.cost.join(cost),
            }
        }
        debug_assert!(
            candidate.pieces.iter().all(|&id| self.piece(id).place != ContentPlace::SpillTier)
        );
        Some(candidate)
    }
}

/// Returns the sum in which a buffer that cannot leave is counted.
fn reason_to_stay<'a>(buffer: &Buffer, stay: &'a mut Shortfall) -> &'a mut Bytes {
    if !buffer.holders.is_empty() {
        &mut stay.leased
    } else if buffer.pins > 0 || buffer.has_pinned_memory {
        &mut stay.pinned
    } else {
        &mut stay.exposed
    }
}
