//! The two sides of a staged transfer.

use super::core::pipeline::StagedPiece;
use super::error::MoveError;
use crate::host::HostAllocation;

/// Fills staging buffers or drains them: a device range, or a disk.
pub trait CopyEndpoint: Send {
    /// A piece that this endpoint copies.
    type InFlight: InFlightCopy;

    /// Returns false if the endpoint needs no staging buffer.
    fn uses_staging(&self) -> bool {
        true
    }

    /// Returns the part of a piece that can be filled in one buffer. The default is the whole piece.
    fn cut(&self, piece: StagedPiece) -> StagedPiece {
        piece
    }

    /// Begins to copy a piece from or to the bytes of `staging` from `piece.skip` on. Returns `None` if
    /// too much is in flight.
    ///
    /// # Errors
    /// The copy could not begin. None of it is in flight, unless the error is
    /// [`MoveError::Unsettled`].
    fn begin(
        &mut self,
        piece: StagedPiece,
        staging: Option<&HostAllocation>,
    ) -> Result<Option<Self::InFlight>, MoveError>;

    /// Waits until a copy in flight completes.
    ///
    /// # Errors
    /// A copy in flight failed.
    fn wait_for_capacity(&mut self) -> Result<(), MoveError>;

    /// Takes a completed piece. Pieces complete in order.
    fn finished(&mut self, copy: Self::InFlight) {
        drop(copy);
    }

    /// Notes on `staging` that copies of this endpoint may still use it, after their completion
    /// could not be determined. If that fails too, the blocks are never reused.
    fn record_use(&self, staging: &mut HostAllocation);
}

/// A piece that a [`CopyEndpoint`] has begun to copy.
pub trait InFlightCopy: Send {
    /// Returns true if the copy is complete. Never blocks.
    ///
    /// # Errors
    /// The copy failed.
    fn is_done(&mut self) -> Result<bool, MoveError>;

    /// Waits for the copy.
    ///
    /// # Errors
    /// The copy failed.
    fn wait(&mut self) -> Result<(), MoveError>;

    /// Waits until no part of a failed copy is in flight.
    ///
    /// # Errors
    /// The device cannot report that.
    fn settle(&mut self) -> Result<(), MoveError>;
}
