//! What may be wrong with a request. A refused request changes nothing.

use super::{
    BufferId, BufferLeaseId, Holds, MoveId, PieceId, RangeId, StreamKey, Ticket, UseToken,
};
use vramp_core::Bytes;

/// A buffer that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{buffer} does not exist: it was removed, or is another card's")]
pub struct UnknownBuffer {
    /// What was given.
    pub buffer: BufferId,
}

/// A range that is not there, or no group where one is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{range} is not there, or is no group: make one with add_group")]
pub struct UnknownRange {
    /// What was given.
    pub range: RangeId,
}

/// A lease that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{lease} does not exist: it ended, or was never given")]
pub struct UnknownBufferLease {
    /// What was given.
    pub lease: BufferLeaseId,
}

/// A move that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{id} does not exist: it was settled or abandoned")]
pub struct UnknownMove {
    /// What was given.
    pub id: MoveId,
}

/// Why no buffer was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// Nothing, or too much.
    #[error("{len} will not do: ask for at least 1 B and at most {most}")]
    Length {
        /// What was asked.
        len: Bytes,
        /// The most there can be.
        most: Bytes,
    },
    /// No such group.
    #[error(transparent)]
    Unknown(#[from] UnknownRange),
    /// The group has no such gap.
    #[error("{group} has no room for {len}, {longest} at most: make another group")]
    Full {
        /// Which.
        group: RangeId,
        /// What was asked.
        len: Bytes,
        /// Its longest gap.
        longest: Bytes,
    },
}

/// Why a buffer was not discarded or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeldError {
    /// There is none.
    #[error(transparent)]
    Unknown(#[from] UnknownBuffer),
    /// Somebody needs it.
    #[error("{buffer} is still needed: {holds}")]
    Held {
        /// Which.
        buffer: BufferId,
        /// By what.
        holds: Holds,
    },
}

/// Why no lease was given. None of the buffers is held.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseRefused {
    /// A buffer is not there.
    #[error(transparent)]
    Unknown(#[from] UnknownBuffer),
    /// They never fit at once: waiting does not help.
    #[error("the buffers need {needed} at once, the card has {capacity} for them: lease fewer")]
    TooLarge {
        /// In whole pages.
        needed: Bytes,
        /// What leased buffers may have.
        capacity: Bytes,
    },
    /// Others use them in a way that excludes this one.
    #[error("{} other leases hold the buffers: try again when one has ended", held_by.len())]
    Busy {
        /// Whose end to wait for.
        held_by: Vec<BufferLeaseId>,
    },
    /// Some pieces are on their way in, or further down; or a copy out may still begin to read what
    /// would be written.
    #[error("{} pieces are on their way: try again when they have settled", moves.len())]
    Settling {
        /// Which moves to wait for. One that goes to disk may be abandoned instead.
        moves: Vec<(MoveId, PieceId)>,
    },
    /// Too much of the card may not leave it now.
    #[error(
        "the buffers need {needed} more, and {committed} of {capacity} may not leave the card: \
         try again when a lease, a pin or an exposure has ended"
    )]
    Full {
        /// In whole pages, without what is there and may not leave.
        needed: Bytes,
        /// What is leased, pinned or exposed.
        committed: Bytes,
        /// What leased buffers may have.
        capacity: Bytes,
        /// All leases of something on the card; none if only pins and exposures are in the way.
        held_by: Vec<BufferLeaseId>,
    },
    /// Others have waited longer for the same.
    #[error("{} older requests wait for the same: try again once they are served", waiting.len())]
    OlderWaiters {
        /// The oldest first.
        waiting: Vec<Ticket>,
    },
}

/// Why a lease did not end. It is still held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseEndError {
    /// There is none.
    #[error(transparent)]
    Unknown(#[from] UnknownBufferLease),
    /// Work on pieces that are not there.
    #[error("{piece} was not brought back: settle its fill first, or cancel the lease")]
    NotRestored {
        /// The first such.
        piece: PieceId,
    },
    /// Work on a buffer that the lease does not hold.
    #[error("the lease does not hold {buffer}: name the buffers it was given for")]
    OtherBuffer {
        /// Which.
        buffer: BufferId,
    },
    /// Work of a stream that did not wait for what came before.
    #[error("the lease is not for stream {}: ask for a lease with all streams that use it", stream.0)]
    OtherStream {
        /// Which.
        stream: StreamKey,
    },
    /// A shared lease does not allow writing, and nobody writes behind the end.
    #[error("the lease does not allow to write {len} at {offset} of {buffer}")]
    WrittenRange {
        /// Which.
        buffer: BufferId,
        /// From where.
        offset: Bytes,
        /// How much.
        len: Bytes,
    },
}

/// Why a move was not settled. It goes on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettleError {
    /// There is none.
    #[error(transparent)]
    Unknown(#[from] UnknownMove),
    /// Memory is never taken from under work.
    #[error("{piece} is still used by {} streams: report their ends with complete_use first", uses.len())]
    StillUsed {
        /// Which.
        piece: PieceId,
        /// What to wait for.
        uses: Vec<UseToken>,
    },
    /// Only fills can be as good as done while they are queued.
    #[error("{id} does not bring anything back: settle it when it is complete")]
    NotARestore {
        /// What was given.
        id: MoveId,
    },
    /// Only copies out are read behind.
    #[error("{id} copies nothing out: settle it when it is complete")]
    NotACopy {
        /// What was given.
        id: MoveId,
    },
}

/// Why an exposure or a use was not noted, or not released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExposeError {
    /// There is no such buffer.
    #[error(transparent)]
    Buffer(#[from] UnknownBuffer),
    /// There is no such lease.
    #[error(transparent)]
    Lease(#[from] UnknownBufferLease),
    /// Without a lease the buffer may be gone before the pointer is used.
    #[error("the lease does not hold {buffer}: pin it and hand pointers out under a lease")]
    NotLeased {
        /// Which.
        buffer: BufferId,
    },
    /// The lease says nothing of the card.
    #[error("{buffer} is read where it is: pin it and hand pointers out under a usual lease")]
    InPlace {
        /// Which.
        buffer: BufferId,
    },
    /// Nothing says that the buffer is on the card.
    #[error(
        "{buffer} is not exposed to streams: note uses of a leased buffer where the lease ends"
    )]
    NotExposed {
        /// Which.
        buffer: BufferId,
    },
    /// Released more often than exposed.
    #[error("{buffer} has no exposure to release")]
    NotOpaque {
        /// Which.
        buffer: BufferId,
    },
    /// Unpinned more often than pinned.
    #[error("{buffer} is not pinned")]
    NotPinned {
        /// Which.
        buffer: BufferId,
    },
}
