//! Errors of the planner. A refused call changes nothing.

use std::fmt;

use super::{BufferId, BufferLeaseId, MoveId, PieceId, RangeId, StreamKey, Ticket, UseToken};
use vramp_core::Bytes;

/// A buffer id that names no buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{buffer} does not exist: it was removed, or belongs to another card")]
pub struct UnknownBuffer {
    /// The id.
    pub buffer: BufferId,
}

/// A range id that names no range, or no group where one is required.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{range} does not exist, or is not a group: make one with add_group")]
pub struct UnknownRange {
    /// The id.
    pub range: RangeId,
}

/// A lease id that names no lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{lease} does not exist: it ended, or was never granted")]
pub struct UnknownBufferLease {
    /// The id.
    pub lease: BufferLeaseId,
}

/// A move id that names no move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{id} does not exist: it was settled or abandoned")]
pub struct UnknownMove {
    /// The id.
    pub id: MoveId,
}

/// Why no buffer was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// The length is zero, or too large.
    #[error("length {len} is invalid: request at least 1 B and at most {most}")]
    Length {
        /// Requested length.
        len: Bytes,
        /// Largest length allowed.
        most: Bytes,
    },
    /// The group does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownRange),
    /// The group has no gap of that length.
    #[error("{group} has no gap of {len}, the longest is {longest}: make another group")]
    Full {
        /// The group.
        group: RangeId,
        /// Requested length.
        len: Bytes,
        /// Longest gap of the group.
        longest: Bytes,
    },
}

/// Why a buffer was not discarded or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeldError {
    /// The buffer does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownBuffer),
    /// The buffer is held.
    #[error("{buffer} is still needed: {holds}")]
    Held {
        /// The buffer.
        buffer: BufferId,
        /// What holds it.
        holds: Holds,
    },
}

/// Why no lease was granted. None of the buffers is held.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseRefused {
    /// A buffer does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownBuffer),
    /// The set never fits: waiting does not help.
    #[error("the buffers need {needed} at once, the card has {capacity} for them: lease fewer")]
    TooLarge {
        /// Memory of the set, in whole pages.
        needed: Bytes,
        /// Most memory that leased buffers may occupy.
        capacity: Bytes,
    },
    /// Other leases exclude this one.
    #[error("{} other leases hold the buffers: try again when one has ended", held_by.len())]
    Busy {
        /// Leases to wait for.
        held_by: Vec<BufferLeaseId>,
    },
    /// Pieces are being restored or pushed to the disk, or would be written while a copy out that is
    /// not queued yet may read them.
    #[error("{} pieces are in flight: try again when they have settled", moves.len())]
    Settling {
        /// Moves to wait for. A push to the disk may be abandoned instead.
        moves: Vec<(MoveId, PieceId)>,
    },
    /// Too much of the card is unevictable.
    #[error(
        "the buffers need {needed} more, and {committed} of {capacity} may not leave the card: \
         try again when a lease or a pin has ended"
    )]
    Full {
        /// Memory of the set, in whole pages, without what is unevictable already.
        needed: Bytes,
        /// Memory that is leased or pinned.
        committed: Bytes,
        /// Most memory that leased buffers may occupy.
        capacity: Bytes,
        /// Leases that occupy memory on the card. Empty if only pins do.
        held_by: Vec<BufferLeaseId>,
    },
    /// The lease was granted, and the card, its budget or the host had no memory to restore the buffers.
    #[error("there was no memory for the buffers: try again when some is free")]
    NoMemory,
    /// Older waiters conflict with this request.
    #[error("an older request ({behind}) waits for the same: try again once it is served")]
    OlderWaiters {
        /// The youngest of them: it is served last.
        behind: Ticket,
    },
}

/// Why a lease did not end. It is still held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseEndError {
    /// The lease does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownBufferLease),
    /// A piece is not on the card.
    #[error("{piece} was not restored: settle its restore first, or cancel the lease")]
    NotRestored {
        /// The first such piece.
        piece: PieceId,
    },
    /// Work on a buffer that the lease does not hold.
    #[error("the lease does not hold {buffer}: name buffers that it was granted for")]
    OtherBuffer {
        /// The buffer.
        buffer: BufferId,
    },
    /// Work on a stream that did not wait for earlier uses.
    #[error("the lease is not for {stream}: name every stream in the request")]
    OtherStream {
        /// The stream.
        stream: StreamKey,
    },
    /// The lease is shared, or the bytes lie outside the buffer.
    #[error("the lease does not allow writing {len} at {offset} of {buffer}")]
    InvalidWrite {
        /// The buffer.
        buffer: BufferId,
        /// Offset of the first byte.
        offset: Bytes,
        /// Number of bytes.
        len: Bytes,
    },
}

/// Why a move was not settled. It is still in flight.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettleError {
    /// The move does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownMove),
    /// Work that uses the piece is in flight: its memory must not be unmapped.
    #[error(
        "{piece} is still used by {} streams: report their ends with complete_use first",
        uses.len()
    )]
    StillUsed {
        /// The piece.
        piece: PieceId,
        /// Work to wait for.
        uses: Vec<UseToken>,
    },
    /// Only a restore may be settled while it is queued.
    #[error("{id} restores nothing: settle it when it is complete")]
    NotARestore {
        /// The move.
        id: MoveId,
    },
    /// Only a copy out can be waited for in stream order.
    #[error("{id} copies nothing out: settle it when it is complete")]
    NotACopy {
        /// The move.
        id: MoveId,
    },
}

/// Why a pin was not recorded, or not removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// The buffer does not exist.
    #[error(transparent)]
    Buffer(#[from] UnknownBuffer),
    /// The lease does not exist.
    #[error(transparent)]
    Lease(#[from] UnknownBufferLease),
    /// Without a lease the buffer may leave before the pin counts.
    #[error("the lease does not hold {buffer}: pin buffers that it was granted for")]
    NotLeased {
        /// The buffer.
        buffer: BufferId,
    },
    /// The lease does not keep the buffer on the card.
    #[error("{buffer} is read in place: pin it under a lease that brings it to the card")]
    InPlace {
        /// The buffer.
        buffer: BufferId,
    },
    /// Unpinned more often than pinned.
    #[error("{buffer} is not pinned")]
    NotPinned {
        /// The buffer.
        buffer: BufferId,
    },
}

/// Everything that must end before all of a buffer may leave the card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holds {
    /// Leases on the buffer.
    pub leases: Vec<BufferLeaseId>,
    /// Number of pins.
    pub pins: u32,
    /// Work in flight. The buffer can be chosen, and leaves when the work is complete.
    pub uses: Vec<UseToken>,
    /// Moves of its pieces.
    pub moves: Vec<MoveId>,
}

impl Holds {
    /// Returns true if the buffer may leave at once.
    pub fn is_free(&self) -> bool {
        *self == Holds::default()
    }
}

impl fmt::Display for Holds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.leases.len(), "leases to end"),
            (self.pins as usize, "pins to remove"),
            (self.uses.len(), "uses to be over"),
            (self.moves.len(), "moves to settle"),
        ];
        let parts = parts.iter().filter(|(count, _)| *count > 0);
        let parts: Vec<String> = parts.map(|(count, what)| format!("{count} {what}")).collect();
        match parts.is_empty() {
            true => f.write_str("nothing holds it"),
            false => f.write_str(&parts.join(", ")),
        }
    }
}
