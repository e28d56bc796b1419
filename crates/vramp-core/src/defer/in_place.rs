//! Reading in place: leases on buffers that stay where they are, on the card or below it.
//!
//! The shell can keep a spilled piece's host copy behind the piece's address. Whether it does is
//! its own knowledge; here is what follows: while such a lease is held, no piece of the buffer moves
//! in any direction, and nobody writes.

use super::piece::{Motion, Place};
use super::{
    Access, BufferId, Deferrables, Granted, HolderKey, LeaseRequest, PieceState, StreamKey,
    UnknownBuffer,
};

impl Deferrables {
    /// Notes that the shell keeps host copies of the buffer's spilled pieces behind its address:
    /// they are neither dropped nor pushed to the disk to relieve the host.
    ///
    /// # Errors
    /// There is no such buffer.
    pub fn set_readable(&mut self, buffer: BufferId) -> Result<(), UnknownBuffer> {
        self.get_mut(buffer)?.readable = true;
        Ok(())
    }

    /// What [`set_readable`](Deferrables::set_readable) said. False if there is no such buffer.
    pub fn is_readable(&self, buffer: BufferId) -> bool {
        self.get(buffer).is_ok_and(|buffer| buffer.readable)
    }

    /// Gives a shared lease that brings nothing back. `None` if a usual one is as good, or needed:
    /// all of the buffer is on the card, a piece is neither there nor on the host, or is on its
    /// way, or somebody holds the buffer to use it on the card, or waits to. What was chosen to leave stays.
    /// It takes nothing of the capacity. O(pieces).
    ///
    /// # Errors
    /// There is no such buffer.
    pub fn lease_in_place(
        &mut self,
        id: BufferId,
        streams: &[StreamKey],
        holder: HolderKey,
        now_ns: u64,
    ) -> Result<Option<Granted>, UnknownBuffer> {
        let buffer = self.get(id)?;
        let is_there = |state| match state {
            PieceState::Resident { .. }
            | PieceState::Cleaning { .. }
            | PieceState::Leaving { .. } => true,
            PieceState::Spilled { copies } => copies.host,
            PieceState::Empty | PieceState::Filling { .. } | PieceState::Pushing { .. } => false,
        };
        let mut pieces = buffer.pieces.iter();
        // What leaves without contents is empty, whatever else it is.
        let there = pieces.all(|piece| piece.place != Place::Empty && is_there(piece.state()));
        let below = buffer.pieces.iter().any(|piece| piece.place == Place::Lower);
        let held = buffer.holders.len() > buffer.in_place as usize || buffer.pins > 0;
        if !there || !below || held || !buffer.readable {
            return Ok(None);
        }
        let fills = |piece: &super::piece::Piece| matches!(piece.motion, Some(Motion::Fill { .. }));
        debug_assert!(!buffer.pieces.iter().any(fills), "what is filled is held");
        let buffers = &[(id, Access::Shared)];
        let request = LeaseRequest { buffers, streams, holder, ticket: None };
        // Nobody uses it on the card while it is read in place: whoever waits to comes before.
        if self.is_in_turn(&[(id, Access::Exclusive)], &request).is_err() {
            return Ok(None);
        }
        Ok(Some(self.grant_in_place(id, &request, now_ns)))
    }
}
