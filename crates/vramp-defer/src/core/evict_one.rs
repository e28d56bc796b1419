//! Eviction of one buffer that the caller names, and its way to a tier below.

use super::buffer_state::PieceMove;
use super::spill_room::TierOrder;
use super::{
    BufferId, CopyOut, Deferrables, HeldError, PieceId, Push, Reclaim, SpillDemand, SpillTier,
    StaleCopy, UnknownBuffer,
};
use vramp_core::Bytes;

/// Why a buffer that the caller named was not evicted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvictError {
    /// The buffer does not exist, or it or another one of its group is held.
    #[error(transparent)]
    Held(#[from] HeldError),
    /// No tier below has room for the contents.
    #[error(
        "{needed} of {buffer} have no room below the card: drop buffers, raise the capacity of the \
         host or the disk, or spill to another tier"
    )]
    NoRoom {
        /// The buffer.
        buffer: BufferId,
        /// Contents without a copy.
        needed: Bytes,
    },
}

impl From<UnknownBuffer> for EvictError {
    fn from(unknown: UnknownBuffer) -> EvictError {
        EvictError::Held(unknown.into())
    }
}

impl Deferrables {
    /// Chooses all pieces of a buffer that have memory, with those of its group, and marks them. What
    /// has no copy goes to `to`, or to the fastest tier with room. Work in flight is no obstacle.
    /// Returns the moves, each of which has to be performed and settled, or abandoned; none if the
    /// buffer has no memory on the card. O(pieces of the group).
    ///
    /// # Errors
    /// A lease, a pin or a move holds the buffer or one of its group, or there is no
    /// room. Nothing changes.
    pub fn evict_buffer(
        &mut self,
        buffer: BufferId,
        to: Option<SpillTier>,
        short: &SpillDemand,
    ) -> Result<Vec<CopyOut>, EvictError> {
        let range = self.get(buffer)?.range;
        let tenants: Vec<BufferId> = match self.ranges[range].is_group {
            true => self.tenants(range).collect(),
            false => vec![buffer],
        };
        let pieces = tenants.iter().flat_map(|&tenant| self.pieces_of(tenant));
        let backed: Vec<PieceId> = pieces.filter(|&id| self.piece(id).backed).collect();
        let held = tenants.iter().find(|&&tenant| self.buffers[tenant].stays());
        let moving = || backed.iter().find(|&&id| self.piece(id).motion.is_some());
        let holder = held.copied().or_else(|| moving().map(|id| id.buffer));
        if let Some(buffer) = holder {
            let holds = self.holds(buffer)?;
            return Err(HeldError::Held { buffer, holds }.into());
        }
        let mut room = short.room.beside(self.promised);
        let order = TierOrder::by_rate(&room, &short.rates);
        let mut places = Vec::with_capacity(backed.len());
        for &id in &backed {
            let out = self.piece(id).is_dirty().then(|| self.outgoing(id));
            let place = out.map(|out| match to {
                None => room.take(out, &order),
                Some(tier) => room.take_of(out, tier),
            });
            if place == Some(None) {
                let dirty = backed.iter().filter(|&&id| self.piece(id).is_dirty());
                let needed = dirty.map(|&id| self.piece(id).len).sum();
                return Err(EvictError::NoRoom { buffer, needed });
            }
            places.push(place.flatten());
        }
        let moves = backed.into_iter().zip(places);
        Ok(moves.map(|(id, place)| self.begin_out(id, place, true)).collect())
    }

    /// Chooses the copies of a buffer that lie on faster tiers than `to`, and marks them: copies of
    /// contents that are on `to` or below are dropped, others move there. `missing` is what has no
    /// room. O(pieces).
    ///
    /// # Errors
    /// The buffer does not exist.
    pub fn push_buffer(
        &mut self,
        buffer: BufferId,
        to: SpillTier,
        short: &SpillDemand,
    ) -> Result<Reclaim, UnknownBuffer> {
        self.get(buffer)?;
        let mut room = short.room.beside(self.promised);
        let mut choice = Reclaim::default();
        for id in self.pieces_of(buffer).collect::<Vec<_>>() {
            let (piece, len) = (self.piece(id), self.piece(id).len);
            let above: Vec<SpillTier> = piece.copies.iter().filter(|&tier| tier < to).collect();
            let Some((&from, faster)) = above.split_last() else { continue };
            if piece.backed || piece.motion.is_some() {
                continue;
            }
            let is_below = piece.copies.iter().any(|tier| tier >= to);
            if !is_below && *room.of(to) < len {
                choice.missing += len;
                continue;
            }
            let dropped = if is_below { &above[..] } else { faster };
            choice.stale.extend(dropped.iter().map(|&tier| self.drop_copy(id, tier)));
            if !is_below {
                *room.of(to) -= len;
                let push = self.begin(id, |id| PieceMove::Push { id, from, to });
                choice.pushes.push(Push { id: push, piece: id, len, from, to });
            }
        }
        Ok(choice)
    }

    fn drop_copy(&mut self, id: PieceId, from: SpillTier) -> StaleCopy {
        self.piece_mut(id).copies.remove(from);
        self.reindex(id);
        self.counters.copies_dropped += 1;
        let after = self.buffers[id.buffer].uses.writes();
        StaleCopy { piece: id, from, after }
    }
}
