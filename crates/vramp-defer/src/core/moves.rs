//! Moves of pieces, and how they end.

use super::buffer_state::{ContentPlace, PieceMove};
use super::spill_room::{Outgoing, TierOrder};
use super::{
    Abandoned, Access, BufferId, Deferrables, MoveId, PieceId, RangeId, SettleError, Settled,
    SpillRoom, SpillTier, UnknownBuffer, UnknownMove, UseToken,
};

impl Deferrables {
    /// Settles a move that was *observed* complete. For a victim all uses must be complete as well;
    /// its range may be lent at once. O(1), and O(tenants) in a group.
    ///
    /// # Errors
    /// The move does not exist, or the piece is still used. Nothing changes.
    pub fn settle(&mut self, id: MoveId) -> Result<Settled, SettleError> {
        let piece = self.move_of(id)?;
        match self.motion(piece) {
            PieceMove::Restore { .. } => Ok(self.settle_restore(piece)),
            PieceMove::Push { from, to, .. } => {
                let moved = self.end_move(piece);
                moved.copies.add(to);
                moved.copies.remove(from);
                let len = moved.len;
                self.counters.pushed_bytes += len.count();
                self.reindex(piece);
                Ok(Settled::Pushed { piece })
            }
            PieceMove::Out { leaving: true, to, .. } => self.settle_leaving(piece, to),
            PieceMove::Out { to: Some(to), torn: false, .. } => {
                let moved = self.end_move(piece);
                moved.copies.add(to);
                let len = moved.len;
                self.counters.copied_out_bytes += len.count();
                self.reindex(piece);
                Ok(Settled::Cleaned { piece, to })
            }
            PieceMove::Out { to: stale, .. } => {
                self.end_move(piece);
                Ok(Settled::Stays { piece, stale })
            }
        }
    }

    /// Settles a restore that is queued and can fail only with the device. It then counts as work
    /// that writes the buffer: later uses wait for it.
    ///
    /// # Errors
    /// The move does not exist, or is no restore. Nothing changes.
    pub fn restore_queued(&mut self, id: MoveId, token: UseToken) -> Result<Settled, SettleError> {
        let piece = self.move_of(id)?;
        if !matches!(self.motion(piece), PieceMove::Restore { .. }) {
            return Err(SettleError::NotARestore { id });
        }
        self.note_use_of(piece.buffer, token, Access::Exclusive);
        self.refresh(piece.buffer);
        Ok(self.settle_restore(piece))
    }

    /// Records that all of a copy out is queued, in room that it has, and complete when `token` is.
    /// A writer of the buffer waits for that token, and not for the move to settle. O(1).
    ///
    /// # Errors
    /// The move does not exist, or copies nothing out. Nothing changes.
    pub fn copy_queued(&mut self, id: MoveId, token: UseToken) -> Result<(), SettleError> {
        let piece = self.move_of(id)?;
        let motion = self.motion(piece);
        let len = self.piece(piece).len;
        match &mut self.piece_mut(piece).motion {
            Some(PieceMove::Out { to: Some(_), queued, .. }) => *queued = Some(token),
            _ => return Err(SettleError::NotACopy { id }),
        }
        if let Some(to) = motion.promised() {
            *self.promised.of(to) -= len;
        }
        self.touch(piece.buffer);
        Ok(())
    }

    /// Sends a copy out to another tier instead, because a card has no memory for it after all: to the
    /// host if it has room, else to the disk. Returns the tier; `None`, and nothing changes, if there
    /// is no room, the copy is queued, or it goes to no card. O(1).
    pub fn redirect(&mut self, id: MoveId, room: SpillRoom) -> Option<SpillTier> {
        let piece = self.move_of(id).ok()?;
        let PieceMove::Out { to: Some(from @ SpillTier::Peer(_)), queued: None, .. } =
            self.motion(piece)
        else {
            return None;
        };
        let len = self.piece(piece).len;
        let out = Outgoing { len, may_use_peers: false };
        let instead = room.beside(self.promised).take(out, &TierOrder::default())?;
        if let Some(PieceMove::Out { to, .. }) = &mut self.piece_mut(piece).motion {
            *to = Some(instead);
        }
        *self.promised.of(from) -= len;
        *self.promised.of(instead) += len;
        Some(instead)
    }

    /// Records copies that may be in flight although their transfer has ended: they may read or write
    /// all of the buffer. Its memory stays until they are complete, and later uses wait for them.
    /// Called before the move or the lease ends. Returns the buffer's range. O(copies).
    ///
    /// # Errors
    /// The buffer does not exist.
    pub fn note_copies(
        &mut self,
        buffer: BufferId,
        copies: &[UseToken],
    ) -> Result<RangeId, UnknownBuffer> {
        let known = self.get_mut(buffer)?;
        known.uses.note_copies(copies);
        let range = known.range;
        copies.iter().for_each(|&token| self.uses.note(token, buffer));
        self.refresh(buffer);
        Ok(range)
    }

    /// Abandons a move that failed or was given up. The piece is as before, with all its contents. A
    /// copy out that is queued counts as reading it; nothing else may be in flight. O(1), and
    /// O(tenants) in a group.
    ///
    /// # Errors
    /// The move does not exist.
    pub fn abandon(&mut self, id: MoveId) -> Result<Abandoned, UnknownMove> {
        let piece = self.move_of(id)?;
        // A copy that was queued reads the piece, also once no thread waits for it.
        if let PieceMove::Out { queued: Some(token), .. } = self.motion(piece) {
            self.note_use_of(piece.buffer, token, Access::Shared);
        }
        self.end_move(piece);
        self.refresh(piece.buffer);
        self.counters.moves_abandoned += 1;
        let unheld = self.buffers[piece.buffer].holders.is_empty();
        let gone = self.piece(piece).place == ContentPlace::SpillTier
            && self.piece(piece).backed
            && unheld;
        if gone {
            self.set_backed(piece, false);
        }
        let less = gone.then(|| self.buffers[piece.buffer].range);
        Ok(Abandoned { piece, state: self.piece(piece).state(), less })
    }

    /// Keeps victims of a range on the card that have not left. A tenant that left alone would free
    /// nothing.
    pub(super) fn cancel_evictions(&mut self, range: super::RangeId) {
        if self.ranges.get(range).is_none_or(|range| range.leaving == 0) {
            return;
        }
        self.ranges[range].leaving = 0;
        for buffer in self.tenants(range).collect::<Vec<_>>() {
            for piece in &mut self.buffers[buffer].pieces {
                if let Some(PieceMove::Out { leaving: leaving @ true, .. }) = &mut piece.motion {
                    *leaving = false;
                    self.counters.evictions_cancelled += 1;
                }
            }
        }
    }

    /// Counts a victim of a range that was chosen, or whose move has ended.
    pub(super) fn count_leaving(&mut self, piece: PieceId, is_leaving: bool, by: i32) {
        if is_leaving {
            let range = self.buffers[piece.buffer].range;
            let leaving = &mut self.ranges[range].leaving;
            *leaving = leaving.saturating_add_signed(by);
        }
    }

    fn move_of(&self, id: MoveId) -> Result<PieceId, UnknownMove> {
        self.moves.get(&id).copied().ok_or(UnknownMove { id })
    }

    fn motion(&self, piece: PieceId) -> PieceMove {
        self.piece(piece).motion.expect("a move in the list moves its piece")
    }

    fn end_move(&mut self, piece: PieceId) -> &mut super::buffer_state::Piece {
        let motion = self.piece_mut(piece).motion.take().expect("the caller found it");
        self.moves.remove(&motion.id());
        self.count_leaving(piece, motion.is_leaving(), -1);
        self.note_let_go(piece.buffer);
        if let Some(to) = motion.promised() {
            let len = self.piece(piece).len;
            *self.promised.of(to) -= len;
        }
        self.touch(piece.buffer);
        self.piece_mut(piece)
    }

    /// Ends a restore that was not begun. The piece is spilled, and has memory for its lease.
    pub(super) fn end_restore(&mut self, id: MoveId) {
        if let Ok(piece) = self.move_of(id) {
            self.end_move(piece);
            self.reindex(piece);
        }
    }

    fn settle_restore(&mut self, piece: PieceId) -> Settled {
        let filled = self.end_move(piece);
        filled.place = ContentPlace::Card;
        let len = filled.len;
        self.reindex(piece);
        let buffer = &mut self.buffers[piece.buffer];
        buffer.reads = 0;
        buffer.deferred -= len;
        self.counters.restored_bytes += len.count();
        Settled::Restored { piece }
    }

    fn settle_leaving(
        &mut self,
        piece: PieceId,
        to: Option<SpillTier>,
    ) -> Result<Settled, SettleError> {
        let uses = self.buffers[piece.buffer].uses.all();
        if !uses.is_empty() {
            return Err(SettleError::StillUsed { piece, uses });
        }
        let left = self.end_move(piece);
        if let Some(to) = to {
            left.copies.add(to);
        }
        let len = left.len;
        if left.place == ContentPlace::Card {
            left.place = ContentPlace::SpillTier;
            self.buffers[piece.buffer].deferred += len;
            self.counters.spilled_bytes += len.count();
            match to {
                Some(_) => self.counters.copied_out_bytes += len.count(),
                None => self.counters.spilled_clean_bytes += len.count(),
            }
        }
        self.reindex(piece);
        let frees = self.set_backed(piece, false);
        let range = self.buffers[piece.buffer].range;
        Ok(Settled::Spilled { piece, range, frees })
    }
}
