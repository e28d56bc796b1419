//! Why nothing was attached, allocated or freed.

use crate::ledger::core::{ChargeError, SpaceId};
use vramp_alloc::{AllocError, FreeError, StreamId};

use super::{Scope, TrackedAllocation};
use crate::Reservation;
use crate::ledger::shell::error::SpaceFull;

/// Why a reservation was not attached; it is in the error.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// There is one already.
    #[error("{scope} has a reservation already: detach it first")]
    Occupied {
        /// Whose.
        scope: Scope,
        /// Still the caller's.
        reservation: Reservation,
    },
    /// It is of another space, or of another manager.
    #[error("{reservation:?} is not of {space}, whose memory this allocator gives")]
    OtherSpace {
        /// The allocator's space.
        space: SpaceId,
        /// Still the caller's.
        reservation: Reservation,
    },
}

/// Why nothing was allocated. Nothing is charged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MallocError {
    /// The reservation is exceeded, and its rule is to fail.
    #[error(transparent)]
    OverReservation(#[from] ChargeError),
    /// The space has no room.
    #[error(transparent)]
    SpaceFull(#[from] SpaceFull),
    /// The card has no memory left, or the allocator's own limit is reached.
    #[error("within the budget, but {0}")]
    OutOfMemory(AllocError),
    /// The device failed: not a lack of memory, and never retried.
    #[error(transparent)]
    Device(AllocError),
}

impl MallocError {
    /// True if freeing something and trying again may help. Never for a failed device.
    pub fn is_out_of_memory(&self) -> bool {
        !matches!(self, MallocError::Device(_))
    }
}

/// Why nothing was freed. Nothing changed, unless a driver call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackedFreeError {
    /// Another allocator's.
    #[error("the allocation at {} belongs to another allocator: free it there", .0.addr())]
    Foreign(TrackedAllocation),
    /// No stream of this allocator.
    #[error("{stream} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream {
        /// What was given.
        stream: StreamId,
        /// Still the caller's.
        allocation: TrackedAllocation,
    },
    /// A driver call failed. The memory is free all the same, and credited, unless the device is
    /// lost.
    #[error(transparent)]
    Failed(FreeError),
}
