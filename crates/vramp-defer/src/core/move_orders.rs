//! Moves as the caller sees them: what it has to do, and the results.

use super::{MoveId, PieceId, PieceState, RangeId, RangeSlice, SpillTier, UseToken};
use vramp_core::Bytes;

/// A piece to restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restore {
    /// Id of the move.
    pub id: MoveId,
    /// The piece.
    pub piece: PieceId,
    /// Addresses to restore it to.
    pub at: RangeSlice,
    /// Tier of the copy that is read. The copy stays.
    pub from: SpillTier,
}

/// A piece to copy out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyOut {
    /// Id of the move.
    pub id: MoveId,
    /// The piece.
    pub piece: PieceId,
    /// Addresses of the piece.
    pub at: RangeSlice,
    /// Tier to copy it to. `None` if it has a copy, or no contents.
    pub to: Option<SpillTier>,
    /// Work that the copy waits for: all that writes the buffer.
    pub copy_after: Vec<UseToken>,
    /// Work that must be complete before the memory is lent: all that uses the buffer.
    pub lend_after: Vec<UseToken>,
}

/// A copy to move to another tier: from a card to the host or the disk, or from the host to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Push {
    /// Id of the move.
    pub id: MoveId,
    /// The piece.
    pub piece: PieceId,
    /// Length of the copy.
    pub len: Bytes,
    /// Tier that it leaves.
    pub from: SpillTier,
    /// Tier that it goes to.
    pub to: SpillTier,
}

/// A copy that is invalid now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaleCopy {
    /// The piece.
    pub piece: PieceId,
    /// Tier of the copy.
    pub from: SpillTier,
    /// Work that may still read it: restores that were queued, and work ordered after them.
    pub after: Vec<UseToken>,
}

/// Result of a settled move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// The piece is on the card again.
    Restored {
        /// The piece.
        piece: PieceId,
    },
    /// The piece is on the card, and the copy is valid.
    Cleaned {
        /// The piece.
        piece: PieceId,
        /// Tier of the copy.
        to: SpillTier,
    },
    /// The piece left the card.
    Spilled {
        /// The piece.
        piece: PieceId,
        /// Range that needs less memory now, see [`Deferrables::needed_memory`](super::Deferrables::needed_memory).
        range: RangeId,
        /// Memory that becomes free, in whole pages. Zero while other tenants of a group are there.
        frees: Bytes,
    },
    /// The piece stays: it was leased before it left.
    Stays {
        /// The piece.
        piece: PieceId,
        /// Tier of a copy that was made and is stale: drop it.
        stale: Option<SpillTier>,
    },
    /// The copy is on the new tier: drop the old one.
    Pushed {
        /// The piece.
        piece: PieceId,
    },
}

/// Result of an abandoned move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abandoned {
    /// The piece.
    pub piece: PieceId,
    /// Its state, as before the move.
    pub state: PieceState,
    /// Range that needs less memory now, see [`Deferrables::needed_memory`](super::Deferrables::needed_memory).
    pub less: Option<RangeId>,
}
