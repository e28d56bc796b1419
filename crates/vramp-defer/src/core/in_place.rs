//! Reading in place: leases on buffers that stay where they are, on the card or below it.
//!
//! The shell can keep a spilled piece's host copy behind the piece's address. Whether it does is
//! its own knowledge; here is what follows: while such a lease is held, no piece of the buffer moves
//! in any direction, and nobody writes. Other buffers of the same lease come to the card as usual.

use smallvec::SmallVec;

use super::piece::{ContentPlace, Piece, PieceMove};
use super::{
    Access, BufferId, BufferLeaseId, Deferrables, GrantedLease, LeaseRefused, LeaseRequest, MoveId,
    PieceId, PieceState, SpillRoom, SpillTier, StaleCopy, UnknownBuffer, UseToken,
};

/// What is asked for, by where it would be used now. Each buffer once.
#[derive(Clone, Debug)]
pub(super) struct SplitRequest {
    /// On the card.
    pub come: SmallVec<[(BufferId, Access); 4]>,
    /// Read where it is.
    pub stay: SmallVec<[BufferId; 2]>,
}

impl Deferrables {
    /// Notes that the shell keeps host copies of the buffer's spilled pieces behind its address. To
    /// relieve the host they go after all others, and never while they are read there. A piece that
    /// leaves gets a host copy even if the disk has one, where the host has room.
    ///
    /// # Errors
    /// There is no such buffer.
    pub fn set_readable(&mut self, buffer: BufferId) -> Result<(), UnknownBuffer> {
        self.get_mut(buffer)?.readable = true;
        Ok(())
    }

    /// Forgets the host copy of a piece that is on the card, since it is none that can be read below:
    /// when the piece leaves, another is made. `None` if there is none, or the piece moves.
    pub fn forget_host_copy(&mut self, id: PieceId) -> Option<StaleCopy> {
        let piece = self.get(id.buffer).ok()?.pieces.get(id.index as usize)?;
        let there = piece.place == ContentPlace::Card && piece.motion.is_none();
        (there && piece.copies.host).then(|| self.drop_host_copy(id))
    }

    /// What [`set_readable`](Deferrables::set_readable) said. False if there is no such buffer.
    pub fn is_readable(&self, buffer: BufferId) -> bool {
        self.get(buffer).is_ok_and(|buffer| buffer.readable)
    }

    /// True if a buffer was read in place so often since a piece of it came back that it should be on
    /// the card. False if there is no such buffer.
    pub fn is_hot(&self, buffer: BufferId) -> bool {
        let reads = self.get(buffer).map_or(0, |buffer| buffer.reads);
        reads > 0 && reads >= self.config.promote_after
    }

    /// The same as [`lease`](Deferrables::lease), but of the buffers that the shell says `in_place_allowed`
    /// it brings nothing back: those that are only read, that the shell can have read where they
    /// are, and of which a part is below. They take nothing of the capacity, so a set may be larger
    /// than the card. What was chosen to leave of them stays.
    ///
    /// A buffer is leased as usual where that is as good, or needed: all of it is on the card, a
    /// piece is neither there nor on the host, or is on its way, or somebody holds it to use it on
    /// the card. Which they are, [`GrantedLease::in_place`] tells. All or nothing. O(pieces).
    ///
    /// # Errors
    /// As [`lease`](Deferrables::lease), about the buffers that are leased as usual; or somebody who
    /// came before waits to use on the card what would stay.
    pub fn lease_in_place(
        &mut self,
        request: &LeaseRequest<'_>,
        in_place_allowed: &[BufferId],
        now_ns: u64,
    ) -> Result<GrantedLease, LeaseRefused> {
        let buffers = self.by_strongest_access(request.buffers)?;
        let wanted = self.split_by_place(&buffers, in_place_allowed);
        self.check_lease(&wanted, request)?;
        Ok(self.grant(buffers, wanted.stay, request, now_ns))
    }

    /// Parts what is asked for into what comes and what stays. What is not there any more comes.
    pub(super) fn split_by_place(
        &self,
        buffers: &[(BufferId, Access)],
        in_place_allowed: &[BufferId],
    ) -> SplitRequest {
        let stays = |&(id, access): &(BufferId, Access)| {
            access == Access::Shared && in_place_allowed.contains(&id) && self.can_read_in_place(id)
        };
        let stay = buffers.iter().filter(|named| stays(named)).map(|&(id, _)| id).collect();
        SplitRequest { come: buffers.iter().copied().filter(|named| !stays(named)).collect(), stay }
    }

    /// True if all of a buffer is somewhere, a part of it below, and nobody uses it on the card.
    fn can_read_in_place(&self, id: BufferId) -> bool {
        let Ok(buffer) = self.get(id) else { return false };
        let is_there = |state| match state {
            PieceState::Resident { .. }
            | PieceState::Cleaning { .. }
            | PieceState::Leaving { .. } => true,
            PieceState::Spilled { copies } => copies.host,
            PieceState::Empty | PieceState::Restoring { .. } | PieceState::Pushing { .. } => false,
        };
        let mut pieces = buffer.pieces.iter();
        // What leaves without contents is empty, whatever else it is.
        let there =
            pieces.all(|piece| piece.place != ContentPlace::Empty && is_there(piece.state()));
        let below = buffer.pieces.iter().any(|piece| piece.place == ContentPlace::SpillTier);
        let held = buffer.holders.len() > buffer.in_place as usize || buffer.pins > 0;
        buffer.readable && there && below && !held
    }

    /// Holds a buffer where it is. Returns what a reader comes behind.
    pub(super) fn hold_in_place(
        &mut self,
        id: BufferId,
        lease: BufferLeaseId,
        now_ns: u64,
    ) -> Vec<UseToken> {
        let buffer = &mut self.buffers[id];
        let fills = |piece: &Piece| matches!(piece.motion, Some(PieceMove::Restore { .. }));
        debug_assert!(!buffer.pieces.iter().any(fills), "what is filled is held");
        buffer.holders.push((lease, Access::Shared));
        buffer.in_place += 1;
        buffer.reads = buffer.reads.saturating_add(1);
        buffer.last_use_ns = now_ns;
        let after = buffer.uses.before(Access::Shared);
        self.refresh(id);
        after
    }

    /// Lets a piece leave without the copy that is to be made of it, since there is another one: the
    /// room it was promised is free again. False, and nothing changes, where there is none, or the
    /// copy is queued, or the piece does not leave any more.
    pub fn leave_without_copy(&mut self, id: MoveId) -> bool {
        let Some(&piece) = self.moves.get(&id) else { return false };
        let piece = self.piece_mut(piece);
        let (len, has_copy) = (piece.len, piece.copies.any());
        let Some(PieceMove::Out { to, leaving: true, queued: None, .. }) = &mut piece.motion else {
            return false;
        };
        let Some(lower) = to.take_if(|_| has_copy) else { return false };
        *self.promised.of(lower) -= len;
        true
    }

    /// Where one more copy of a piece that leaves is made, for it to be readable below: only the
    /// disk has one, and the host has room to spare.
    pub(super) fn copy_to_read(&self, id: PieceId, spare: &mut SpillRoom) -> Option<SpillTier> {
        let piece = self.piece(id);
        let wanted = self.buffers[id.buffer].readable && piece.place == ContentPlace::Card;
        if !wanted || piece.copies.host || piece.len > spare.host {
            return None;
        }
        spare.host -= piece.len;
        Some(SpillTier::Host)
    }
}
