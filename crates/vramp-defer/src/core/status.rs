//! The state of a buffer as a whole, in O(1).

use super::{
    BufferId, BufferLeaseId, Deferrables, PieceId, PieceState, SpillTier, StreamKey, UnknownBuffer,
};
use vramp_core::Bytes;

/// State of a buffer as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferStatus {
    /// Length of the buffer.
    pub len: Bytes,
    /// Contents that are below the card only. The next lease restores them.
    pub deferred: Bytes,
    /// Number of leases on the buffer.
    pub leases: usize,
}

impl BufferStatus {
    /// Returns true if contents have to be restored before the buffer is used.
    pub fn is_deferred(&self) -> bool {
        !self.deferred.is_zero()
    }

    /// Returns true if a lease holds the buffer where it is.
    pub fn is_locked(&self) -> bool {
        self.leases > 0
    }
}

/// Bytes of a buffer in moves that are neither settled nor abandoned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BufferProgress {
    /// On the card, and being copied out ahead of need.
    pub cleaning: Bytes,
    /// Chosen to leave the card.
    pub leaving: Bytes,
    /// Being restored.
    pub restoring: Bytes,
    /// Moving from one tier below to another.
    pub pushing: Bytes,
}

impl Deferrables {
    /// Returns what moves of a buffer. O(pieces).
    ///
    /// # Errors
    /// The buffer does not exist.
    pub fn progress(&self, buffer: BufferId) -> Result<BufferProgress, UnknownBuffer> {
        let mut progress = BufferProgress::default();
        for piece in &self.get(buffer)?.pieces {
            match piece.state() {
                PieceState::Cleaning { .. } => progress.cleaning += piece.len,
                PieceState::Leaving { .. } => progress.leaving += piece.len,
                PieceState::Restoring { .. } => progress.restoring += piece.len,
                PieceState::Pushing { .. } => progress.pushing += piece.len,
                PieceState::Empty | PieceState::Resident { .. } | PieceState::Spilled { .. } => {}
            }
        }
        Ok(progress)
    }

    /// Returns the last stream of the last lease on a buffer that had one.
    ///
    /// # Errors
    /// The buffer does not exist.
    pub fn last_stream(&self, buffer: BufferId) -> Result<Option<StreamKey>, UnknownBuffer> {
        Ok(self.get(buffer)?.last_stream)
    }

    /// Returns the state of a buffer. O(1).
    ///
    /// # Errors
    /// The buffer does not exist.
    pub fn status(&self, buffer: BufferId) -> Result<BufferStatus, UnknownBuffer> {
        let buffer = self.get(buffer)?;
        let (len, deferred, leases) = (buffer.len, buffer.deferred, buffer.holders.len());
        Ok(BufferStatus { len, deferred, leases })
    }

    /// Returns all buffers.
    pub fn ids(&self) -> impl Iterator<Item = BufferId> {
        self.buffers.keys()
    }

    /// Returns the buffers of a lease, each once; none for a lease that ended.
    pub fn leased(&self, lease: BufferLeaseId) -> impl Iterator<Item = BufferId> {
        let buffers = self.leases.get(&lease).map(|lease| &lease.buffers);
        buffers.into_iter().flatten().map(|&(buffer, _)| buffer)
    }

    /// Returns the tier that a piece is restored from; `None` if it is on the card or empty.
    pub fn spilled_to(&self, piece: PieceId) -> Option<SpillTier> {
        let piece = self.buffers.get(piece.buffer)?.pieces.get(piece.index as usize)?;
        match piece.place {
            super::buffer_state::ContentPlace::SpillTier => piece.copies.best(),
            _ => None,
        }
    }
}
