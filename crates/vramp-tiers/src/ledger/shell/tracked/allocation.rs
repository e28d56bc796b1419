//! An allocation of a tracked allocator.

use std::fmt;
use std::ops::Deref;

use super::payers::Scope;
use crate::Reservation;
use crate::ledger::core::{ChargeError, SpaceId};
use crate::ledger::shell::charge::Payer;
use crate::ledger::shell::error::SpaceFull;
use vramp_alloc::{AllocError, Allocation, FreeError, StreamId};

/// An allocation and what it is charged to. Freed by
/// [`TrackedAllocator::free`](super::TrackedAllocator::free), which takes it by value. Dropped
/// without a free it stays allocated and charged.
#[must_use = "memory that is dropped without a free stays allocated and charged"]
pub struct TrackedAllocation {
    pub(super) allocation: Allocation,
    pub(super) payer: Payer,
    /// Number of its allocator.
    pub(super) tracked: u64,
}

impl TrackedAllocation {
    /// Returns what the allocation is charged to.
    pub fn payer(&self) -> Payer {
        self.payer
    }
}

impl Deref for TrackedAllocation {
    type Target = Allocation;

    fn deref(&self) -> &Allocation {
        &self.allocation
    }
}

impl fmt::Debug for TrackedAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, charged to {:?}", self.allocation, self.payer)
    }
}

/// Why a reservation was not attached. The error contains it.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The scope has a reservation already.
    #[error("{scope} has a reservation already: detach it first")]
    Occupied {
        /// The given scope.
        scope: Scope,
        /// The reservation; still the caller's.
        reservation: Reservation,
    },
    /// The reservation is of another space or another manager.
    #[error("{reservation:?} is not of {space}, the space of this allocator")]
    OtherSpace {
        /// Space of the allocator.
        space: SpaceId,
        /// The reservation; still the caller's.
        reservation: Reservation,
    },
}

/// Why nothing was allocated. Nothing is charged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MallocError {
    /// The allocation exceeds its reservation, and the rule fails it.
    #[error(transparent)]
    OverReservation(#[from] ChargeError),
    /// The space has no room.
    #[error(transparent)]
    SpaceFull(#[from] SpaceFull),
    /// The device is out of memory, or the allocator's own limit is reached.
    #[error("the budget has room, but {0}")]
    OutOfMemory(AllocError),
    /// The device failed. Not a lack of memory, and never retried.
    #[error(transparent)]
    Device(AllocError),
}

impl MallocError {
    /// True if a retry may succeed after memory was freed. False for a failed device.
    pub fn is_out_of_memory(&self) -> bool {
        !matches!(self, MallocError::Device(_))
    }
}

/// Why nothing was freed. Nothing changed, unless a driver call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackedFreeError {
    /// The allocation is another allocator's.
    #[error("the allocation at {} belongs to another allocator: free it there", .0.addr())]
    Foreign(TrackedAllocation),
    /// The stream is not of this allocator.
    #[error("{stream} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream {
        /// The given stream.
        stream: StreamId,
        /// The allocation; still the caller's.
        allocation: TrackedAllocation,
    },
    /// A driver call failed. The memory is freed and credited even so, unless the device is lost.
    #[error(transparent)]
    Failed(FreeError),
}
