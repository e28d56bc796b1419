//! Reading in place: leases on buffers that stay where they are, on the card or below it.
//!
//! The shell can map a spilled piece's host copy at the piece's address, and says so with each
//! request. While such a lease is held, no piece of the buffer moves in any direction, and no work
//! writes it. Other buffers of the same lease come to the card as usual.
//!
//! Leases under which buffers are overwritten as a whole: what was spilled is not restored.
//!
//! 1. The lease is granted like one that writes.
//! 2. [`Deferrables::overwrite`] gives up the restores of the buffers. Their spilled pieces have memory,
//!    and their copies stay valid.
//! 3. When the lease ends all of the buffers counts as written, on the card, and the copies are stale.
//!    If it is cancelled the pieces are spilled as before.

use std::collections::BTreeSet;

use smallvec::SmallVec;

use super::buffer_state::{ContentPlace, Piece, PieceMove};
use super::lease::{SplitRequest, sorted};
use super::{
    Access, BufferId, BufferLeaseId, Deferrables, GrantedLease, HolderKey, LeaseRefused,
    LeaseRequest, MoveId, PieceId, PieceState, RangeId, SpillRoom, SpillTier, StaleCopy,
    UnknownBuffer, UseToken,
};

impl Deferrables {
    /// Records that the shell maps host copies of the buffer's spilled pieces. They are the last to
    /// be reclaimed from the host, and never while they are read. A piece that leaves gets a host
    /// copy even if it has one on disk, where the host has room.
    ///
    /// # Errors
    /// The buffer does not exist.
    pub fn set_readable(&mut self, buffer: BufferId) -> Result<(), UnknownBuffer> {
        self.get_mut(buffer)?.readable = true;
        self.reindex_buffer(buffer);
        self.note_buffer_changed(buffer);
        Ok(())
    }

    /// Records that the shell maps host copies at a range's addresses, or that it is done. Leases on
    /// its buffers wait until then. O(1), and in a group O(its
    /// tenants, or the buffers with waiters if those are fewer).
    pub fn set_mapping(&mut self, range: RangeId, is_mapping: bool) {
        let Some(known) = self.ranges.get_mut(range) else { return };
        known.is_mapping = is_mapping;
        self.waited_tenants(range).into_iter().for_each(|buffer| self.touch(buffer));
    }

    /// Invalidates the host copy of a piece on the card because it cannot be mapped: another one is
    /// made when the piece leaves. Returns `None` if there is none, or the piece is in flight.
    pub fn forget_host_copy(&mut self, id: PieceId) -> Option<StaleCopy> {
        let piece = self.get(id.buffer).ok()?.pieces.get(id.index as usize)?;
        let there = piece.place == ContentPlace::Card && piece.motion.is_none();
        (there && piece.copies.host).then(|| self.drop_host_copy(id))
    }

    /// Returns true after [`set_readable`](Deferrables::set_readable). False if the buffer does not
    /// exist.
    pub fn is_readable(&self, buffer: BufferId) -> bool {
        self.get(buffer).is_ok_and(|buffer| buffer.readable)
    }

    /// Returns true if a buffer should be promoted: it was read in place often enough since a piece
    /// of it was restored. False if the buffer does not exist.
    pub fn is_hot(&self, buffer: BufferId) -> bool {
        let reads = self.get(buffer).map_or(0, |buffer| buffer.reads);
        reads > 0 && reads >= self.config.promote_after
    }

    /// Grants a lease as [`lease`](Deferrables::lease) does, but restores nothing of some buffers:
    /// those of `in_place_allowed` that are only read and partly spilled. They take nothing of the
    /// capacity, so a set may be larger than the card. Victims among them stay.
    ///
    /// Such a buffer is leased as usual if all of it is on the card, a piece is in flight or has
    /// neither memory nor a host copy, or another lease uses it on the card.
    /// [`GrantedLease::in_place`] names those that stay. All or nothing. O(pieces).
    ///
    /// # Errors
    /// As [`lease`](Deferrables::lease), about the buffers that are leased as usual; or an older
    /// waiter needs on the card what would stay.
    pub fn lease_in_place(
        &mut self,
        request: &LeaseRequest<'_>,
        in_place_allowed: &[BufferId],
        now_ns: u64,
    ) -> Result<GrantedLease, LeaseRefused> {
        let buffers = self.by_strongest_access(request.buffers)?;
        let wanted = self.split_by_place(&buffers, &sorted(in_place_allowed));
        self.check_lease(&wanted, request)?;
        Ok(self.grant(buffers, wanted.stay, request, now_ns))
    }

    /// Splits a request by place. A buffer that does not exist comes to the card. The allowed ones are
    /// sorted. O(buffers log allowed + pieces).
    pub(super) fn split_by_place(
        &self,
        buffers: &[(BufferId, Access)],
        in_place_allowed: &[BufferId],
    ) -> SplitRequest {
        let stays = |&(id, access): &(BufferId, Access)| {
            access == Access::Shared
                && in_place_allowed.binary_search(&id).is_ok()
                && self.can_read_in_place(id)
        };
        let stay = buffers.iter().filter(|named| stays(named)).map(|&(id, _)| id).collect();
        SplitRequest { come: buffers.iter().copied().filter(|named| !stays(named)).collect(), stay }
    }

    /// Returns true if all of a buffer is readable, part of it is spilled, and no lease uses it on
    /// the card.
    pub(super) fn can_read_in_place(&self, id: BufferId) -> bool {
        let Ok(buffer) = self.get(id) else { return false };
        let is_there = |state| match state {
            PieceState::Resident { .. }
            | PieceState::Cleaning { .. }
            | PieceState::Leaving { .. } => true,
            PieceState::Spilled { copies } => copies.host,
            PieceState::Empty | PieceState::Restoring { .. } | PieceState::Pushing { .. } => false,
        };
        let mut pieces = buffer.pieces.iter();
        // A piece without contents is empty, also while it leaves.
        let there =
            pieces.all(|piece| piece.place != ContentPlace::Empty && is_there(piece.state()));
        let below = buffer.pieces.iter().any(|piece| piece.place == ContentPlace::SpillTier);
        let pinned = buffer.pins > 0 || buffer.has_pinned_memory;
        buffer.readable && there && below && !pinned && !buffer.holders.use_card()
    }

    /// Holds a buffer where it is. Returns what a reader waits for.
    pub(super) fn hold_in_place(
        &mut self,
        id: BufferId,
        (lease, holder): (BufferLeaseId, HolderKey),
        now_ns: u64,
    ) -> Vec<UseToken> {
        let buffer = &mut self.buffers[id];
        let fills = |piece: &Piece| matches!(piece.motion, Some(PieceMove::Restore { .. }));
        debug_assert!(!buffer.pieces.iter().any(fills), "what is filled is held");
        buffer.holders.add(lease, holder, Access::Shared, true);
        buffer.reads = buffer.reads.saturating_add(1);
        buffer.last_use_ns = now_ns;
        let after = buffer.uses.before(Access::Shared);
        self.reindex_buffer(id);
        self.refresh(id);
        after
    }

    /// Lets a victim leave without another copy, since it has one, and returns the room promised to
    /// it. Returns false, and changes nothing, if it has none, the copy is queued, or the piece no
    /// longer leaves.
    pub fn leave_without_copy(&mut self, id: MoveId) -> bool {
        let Some(&piece) = self.moves.get(&id) else { return false };
        let buffer = piece.buffer;
        let piece = self.piece_mut(piece);
        let (len, has_copy) = (piece.len, piece.copies.any());
        let Some(PieceMove::Out { to, leaving: true, queued: None, .. }) = &mut piece.motion else {
            return false;
        };
        let Some(lower) = to.take_if(|_| has_copy) else { return false };
        *self.promised.of(lower) -= len;
        self.touch(buffer);
        true
    }

    /// Returns the tier of one more copy of a victim, to be read in place: only the disk has one,
    /// and the host has room to spare.
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

/// Returns the buffers of a request that are overwritten, in order. One that is named with another access
/// as well is not. O(n log n), and O(n) if there are none.
pub fn overwritten(named: &[(BufferId, Access)]) -> SmallVec<[BufferId; 2]> {
    if named.iter().all(|(_, access)| *access != Access::Overwrite) {
        return SmallVec::new();
    }
    let (all, others): (Vec<_>, Vec<_>) =
        named.iter().partition(|(_, access)| *access == Access::Overwrite);
    let all: BTreeSet<BufferId> = all.into_iter().map(|(id, _)| id).collect();
    let others: BTreeSet<BufferId> = others.into_iter().map(|(id, _)| id).collect();
    all.difference(&others).copied().collect()
}

impl Deferrables {
    /// Gives up the restores of buffers that a lease overwrites, in order. They were not begun.
    /// O(log n) for each restore.
    pub fn overwrite(&mut self, granted: &mut GrantedLease, buffers: SmallVec<[BufferId; 2]>) {
        granted.restores.retain(|restore| {
            let is_needed = buffers.binary_search(&restore.piece.buffer).is_err();
            if !is_needed {
                self.end_restore(restore.id);
            }
            is_needed
        });
        if let Some(lease) = self.leases.get_mut(&granted.lease) {
            lease.overwritten = buffers;
        }
    }
}
