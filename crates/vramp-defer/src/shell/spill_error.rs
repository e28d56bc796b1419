//! Why a buffer was not made, leased or moved. Every error says what to do.

use crate::planner::{
    AddError, BufferId, DeferConfigError, ExposeError, Failure, HeldError, LeaseRefused,
    UnknownBuffer,
};
use vramp_alloc::graph::ArenaError;
use vramp_alloc::range::HostBackingError;
use vramp_alloc::{AllocError, DriverError};
use vramp_core::Bytes;
use vramp_driver::Stream;

use super::report::FailedMove;
use vramp_tiers::disk::DiskTierError;
use vramp_tiers::host::HostPoolError;
use vramp_tiers::movers::{MoveError, MoveFailed};
use vramp_tiers::peer::PeerStoreError;
use vramp_tiers::reserve::SpaceFull;

/// Why a call of the manager failed. A failed call changes nothing that it was to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpillError {
    /// The planner rejected the configuration.
    #[error(transparent)]
    Config(#[from] DeferConfigError),
    /// The manager rejected the configuration or a part it was given.
    #[error("the spill manager cannot be made: {0}")]
    Settings(&'static str),
    /// The length is invalid, or the group is full.
    #[error(transparent)]
    Add(#[from] AddError),
    /// No addresses could be reserved.
    #[error(transparent)]
    Addresses(#[from] ArenaError),
    /// The buffer belongs to another manager.
    #[error("the buffer belongs to another manager: lease it there")]
    OtherManager,
    /// The lease has no buffer at that index.
    #[error("the lease has no buffer at index {index}: count from zero in the request's order")]
    NotNamed {
        /// The index.
        index: usize,
    },
    /// A write was declared for a buffer that is leased shared.
    #[error("the lease on the buffer at index {index} is shared: lease it exclusive to write it")]
    NotWritable {
        /// The index.
        index: usize,
    },
    /// The buffer cannot be read in place.
    #[error("the buffer cannot be made readable while spilled: {0}; lease it to read it")]
    NotReadable(&'static str),
    /// A host copy could not be unmapped from the buffer's addresses.
    #[error(transparent)]
    HostBacking(#[from] HostBackingError),
    /// The buffer was removed.
    #[error(transparent)]
    Unknown(#[from] UnknownBuffer),
    /// The stream is unknown to the allocator.
    #[error("stream {0} is unknown to the allocator: use one that its create_stream returned")]
    UnknownStream(String),
    /// The stream captures a graph: what is queued on it runs at each launch, after no one event.
    #[error(
        "stream {} captures a graph: take the lease before the capture, or around the launch",
        .0.number()
    )]
    Capturing(Stream),
    /// The lease was refused, and waiting did not help or cannot.
    #[error("no lease: {0}")]
    Refused(LeaseRefused),
    /// The allocator had no memory for the buffers. Their contents stay whole, on the card or below.
    #[error(
        "no memory to restore the buffers: end leases, pins or exposures, or free memory: \
         {error}{}",
        .failed.iter().map(|failed| format!("; meanwhile {failed}")).collect::<String>()
    )]
    NoMemory {
        /// The allocator's error.
        error: Box<AllocError>,
        /// A move that failed meanwhile, which may be why nothing could leave.
        failed: Option<Box<FailedMove>>,
    },
    /// The card's space has no budget left for the buffers.
    #[error("no budget to restore the buffers: {0}")]
    NoBudget(SpaceFull),
    /// Another card has no memory for a copy, or failed. The contents stay where they were.
    #[error(transparent)]
    Peer(#[from] PeerStoreError),
    /// The memory of the buffer is pinned, so it stays on the card.
    #[error("memory of {buffer} is pinned: unpin it to let the buffer leave the card")]
    PinnedMemory {
        /// The buffer.
        buffer: BufferId,
    },
    /// A transfer failed. The contents stay where they were.
    #[error(transparent)]
    Move(#[from] MoveError),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The bytes do not lie in the buffer.
    #[error("{len} at offset {offset} do not lie in a buffer of {whole}")]
    Outside {
        /// Offset of the first byte.
        offset: Bytes,
        /// Number of bytes.
        len: Bytes,
        /// Length of the buffer or view.
        whole: Bytes,
    },
    /// A pin or an exposure was refused.
    #[error(transparent)]
    Expose(#[from] ExposeError),
    /// The buffer is held.
    #[error(transparent)]
    Held(#[from] HeldError),
}

impl SpillError {
    /// Returns the kind of failure, by which the planner decides what follows.
    pub(super) fn failure(&self) -> Failure {
        match self {
            SpillError::Refused(_) => Failure::Refused,
            SpillError::NoMemory { .. } => Failure::CardFull,
            SpillError::NoBudget(_) => Failure::BudgetFull,
            SpillError::Move(MoveError::Host(
                HostPoolError::Full(_) | HostPoolError::Exhausted { .. },
            )) => Failure::HostFull,
            SpillError::Move(MoveError::Disk { error: DiskTierError::Full(_), .. }) => {
                Failure::DiskFull
            }
            SpillError::Peer(error) if error.is_full() => Failure::PeerFull,
            SpillError::PinnedMemory { .. } => Failure::Pinned,
            _ => Failure::Broken,
        }
    }
}

impl From<Box<MoveFailed>> for SpillError {
    fn from(failed: Box<MoveFailed>) -> SpillError {
        SpillError::Move(failed.error)
    }
}
