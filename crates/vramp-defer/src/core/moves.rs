//! Moves of pieces: what they are, and what came of them.

use super::piece::{ContentPlace, Copies, PieceMove};
use super::{
    Access, Deferrables, MoveId, PieceId, PieceState, RangeId, RangeSlice, SettleError, SpillTier,
    UnknownMove, UseToken,
};
use vramp_core::Bytes;

/// A piece to bring back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restore {
    /// Its name.
    pub id: MoveId,
    /// Which piece.
    pub piece: PieceId,
    /// To where.
    pub at: RangeSlice,
    /// Which copy is read. It stays.
    pub from: SpillTier,
}

/// A piece to copy out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyOut {
    /// Its name.
    pub id: MoveId,
    /// Which piece.
    pub piece: PieceId,
    /// From where.
    pub at: RangeSlice,
    /// To where; nothing is copied where there is a copy, or nothing to keep.
    pub to: Option<SpillTier>,
    /// Work that the copy comes behind: what writes.
    pub copy_after: Vec<UseToken>,
    /// Work that has to be over before the memory is another's: all of it.
    pub lend_after: Vec<UseToken>,
}

/// A host copy to move to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Push {
    /// Its name.
    pub id: MoveId,
    /// Which piece.
    pub piece: PieceId,
    /// How much.
    pub len: Bytes,
}

/// A copy that counts no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaleCopy {
    /// Of which piece.
    pub piece: PieceId,
    /// Where it is.
    pub from: SpillTier,
    /// What may still read it: fills that were queued, and what came behind them.
    pub after: Vec<UseToken>,
}

/// What came of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// The piece is back.
    Restored {
        /// Which.
        piece: PieceId,
    },
    /// The piece is on the card, and the copy counts.
    Cleaned {
        /// Which.
        piece: PieceId,
        /// Where the copy is.
        to: SpillTier,
    },
    /// The piece left.
    Spilled {
        /// Which.
        piece: PieceId,
        /// Of which less is needed now, see [`Deferrables::keep`].
        range: RangeId,
        /// Memory that can be had, in whole pages. Nothing while other tenants are there.
        frees: Bytes,
    },
    /// The piece stays: it was wanted before it left.
    Stays {
        /// Which.
        piece: PieceId,
        /// Where a copy was made that is stale: drop it.
        stale: Option<SpillTier>,
    },
    /// The copy is on the disk: drop the host's.
    Pushed {
        /// Of which piece.
        piece: PieceId,
    },
}

/// What is left of a move that was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abandoned {
    /// Which piece.
    pub piece: PieceId,
    /// As before the move.
    pub state: PieceState,
    /// Of which less is needed now, see [`Deferrables::keep`].
    pub less: Option<RangeId>,
}

impl Deferrables {
    /// A move was *seen* complete. For a copy out with the memory to follow, all uses have to be
    /// over as well; the range may be lent at once. O(1), and O(tenants) in a group.
    ///
    /// # Errors
    /// There is no such move, or the piece is still used. Nothing changes.
    pub fn settle(&mut self, id: MoveId) -> Result<Settled, SettleError> {
        let piece = self.move_of(id)?;
        match self.motion(piece) {
            PieceMove::Restore { .. } => Ok(self.settle_restore(piece)),
            PieceMove::Push { .. } => {
                let moved = self.end_move(piece);
                moved.copies = Copies { host: false, disk: true };
                let len = moved.len;
                self.counters.pushed_bytes += len.count();
                Ok(Settled::Pushed { piece })
            }
            PieceMove::Out { leaving: true, to, .. } => self.settle_leaving(piece, to),
            PieceMove::Out { to: Some(to), torn: false, .. } => {
                let moved = self.end_move(piece);
                moved.copies.add(to);
                let len = moved.len;
                self.counters.copied_out_bytes += len.count();
                Ok(Settled::Cleaned { piece, to })
            }
            PieceMove::Out { to: stale, .. } => {
                self.end_move(piece);
                Ok(Settled::Stays { piece, stale })
            }
        }
    }

    /// A fill was queued and cannot fail any more but with the device. It counts as done, and as
    /// work that writes the buffer: others come behind it until it is over.
    ///
    /// # Errors
    /// There is no such move, or it is no fill. Nothing changes.
    pub fn restore_queued(&mut self, id: MoveId, token: UseToken) -> Result<Settled, SettleError> {
        let piece = self.move_of(id)?;
        if !matches!(self.motion(piece), PieceMove::Restore { .. }) {
            return Err(SettleError::NotARestore { id });
        }
        self.buffers[piece.buffer].uses.note(token, Access::Exclusive);
        self.refresh(piece.buffer);
        Ok(self.settle_restore(piece))
    }

    /// All of a copy out is queued, into room that it has, and over when `token` is: whoever writes
    /// its buffer comes behind that, and does not wait for the copy to be settled. O(1).
    ///
    /// # Errors
    /// There is no such move, or it copies nothing out. Nothing changes.
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
        Ok(())
    }

    /// A move failed or was given up, and nothing of it runs any more: the piece is as it was
    /// before, whole. O(1), and O(tenants) in a group.
    ///
    /// # Errors
    /// There is no such move.
    pub fn abandon(&mut self, id: MoveId) -> Result<Abandoned, UnknownMove> {
        let piece = self.move_of(id)?;
        self.end_move(piece);
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

    /// What was chosen in a range and has not left stays: a tenant alone would free nothing.
    pub(super) fn cancel_evictions(&mut self, range: super::RangeId) {
        for buffer in self.tenants(range).collect::<Vec<_>>() {
            for piece in &mut self.buffers[buffer].pieces {
                if let Some(PieceMove::Out { leaving: leaving @ true, .. }) = &mut piece.motion {
                    *leaving = false;
                    self.counters.evictions_cancelled += 1;
                }
            }
        }
    }

    fn move_of(&self, id: MoveId) -> Result<PieceId, UnknownMove> {
        self.moves.get(&id).copied().ok_or(UnknownMove { id })
    }

    fn motion(&self, piece: PieceId) -> PieceMove {
        self.piece(piece).motion.expect("a move in the list moves its piece")
    }

    fn end_move(&mut self, piece: PieceId) -> &mut super::piece::Piece {
        let motion = self.piece_mut(piece).motion.take().expect("the caller found it");
        self.moves.remove(&motion.id());
        if let Some(to) = motion.promised() {
            let len = self.piece(piece).len;
            *self.promised.of(to) -= len;
        }
        self.piece_mut(piece)
    }

    fn settle_restore(&mut self, piece: PieceId) -> Settled {
        let filled = self.end_move(piece);
        filled.place = ContentPlace::Card;
        let len = filled.len;
        self.buffers[piece.buffer].reads = 0;
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
            self.counters.spilled_bytes += len.count();
            match to {
                Some(_) => self.counters.copied_out_bytes += len.count(),
                None => self.counters.spilled_clean_bytes += len.count(),
            }
        }
        let frees = self.set_backed(piece, false);
        let range = self.buffers[piece.buffer].range;
        Ok(Settled::Spilled { piece, range, frees })
    }
}
