//! Reclaiming memory of other cards: which copies there are dropped, and which move on.

use super::piece::PieceMove;
use super::spill_room::{Outgoing, TierOrder};
use super::{Deferrables, PeerId, PieceId, Push, Reclaim, SpillRoom, SpillTier, StaleCopy};
use vramp_core::Bytes;

/// Bytes of another card to reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerDemand {
    /// The card.
    pub peer: PeerId,
    /// Bytes of copies to remove from it.
    pub deficit: Bytes,
    /// Free space below the card, promises to moves in flight included. No copy moves to another
    /// card.
    pub room: SpillRoom,
}

impl Deferrables {
    /// Chooses copies on another card to drop or to push to the host or the disk, and marks them. In
    /// this order: copies of contents that are elsewhere too, the most recently used first, since
    /// those leave their card last; then the others, the least recently used first. Copies in flight
    /// and those of leased buffers stay. O(log n) for each copy chosen, O(1) for each that stays.
    pub fn reclaim_peer(&mut self, short: &PeerDemand) -> Reclaim {
        let mut choice = Reclaim { missing: short.deficit, ..Reclaim::default() };
        let mut room = short.room.beside(self.promised);
        let mut needless: Vec<PieceId> = Vec::new();
        let mut sole: Vec<PieceId> = Vec::new();
        let mut left = short.deficit;
        let (mut looked_at, bounds) = (0, |is_sole| Deferrables::peer_bounds(short.peer, is_sole));
        for &(_, id) in self.peer_copies.range(bounds(false)).rev() {
            if left.is_zero() {
                break;
            }
            looked_at += 1;
            let piece = self.piece(id);
            if piece.motion.is_none() {
                left = left.saturating_sub(piece.len);
                needless.push(id);
            }
        }
        for &(_, id) in self.peer_copies.range(bounds(true)) {
            if left.is_zero() {
                break;
            }
            looked_at += 1;
            let (piece, buffer) = (self.piece(id), &self.buffers[id.buffer]);
            if piece.motion.is_none() && buffer.holders.is_empty() {
                left = left.saturating_sub(piece.len);
                sole.push(id);
            }
        }
        self.counters.peer_copies_looked_at += looked_at;
        for id in needless {
            choice.missing = choice.missing.saturating_sub(self.piece(id).len);
            choice.stale.extend(self.drop_peer_copy(id));
        }
        for id in sole {
            let len = self.piece(id).len;
            let out = Outgoing { len, may_use_peers: false };
            let Some(to) = room.take(out, &TierOrder::default()) else { continue };
            let from = SpillTier::Peer(short.peer);
            choice.missing = choice.missing.saturating_sub(len);
            let id_of_move = self.begin(id, |id| PieceMove::Push { id, from, to });
            choice.pushes.push(Push { id: id_of_move, piece: id, len, from, to });
        }
        choice
    }

    /// Returns the number of copies on a card. O(copies there).
    pub fn copies_on(&self, peer: PeerId) -> usize {
        let on = |is_sole| self.peer_copies.range(Deferrables::peer_bounds(peer, is_sole)).count();
        on(false) + on(true)
    }

    fn drop_peer_copy(&mut self, id: PieceId) -> Option<StaleCopy> {
        let from = SpillTier::Peer(self.piece_mut(id).copies.peer.take()?);
        self.reindex(id);
        self.counters.copies_dropped += 1;
        Some(StaleCopy { piece: id, from, after: self.buffers[id.buffer].uses.writes() })
    }
}
