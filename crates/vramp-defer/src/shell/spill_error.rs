//! Why a buffer was not made, leased or moved. Every error says what to do.

use crate::planner::{
    AddError, BufferId, DeferConfigError, EvictError, Failure, HeldError, LeaseRefused, PinError,
    UnknownBuffer,
};
use vramp_alloc::graph::ArenaError;
use vramp_alloc::range::HostBackingError;
use vramp_alloc::{AllocError, DriverError, StreamId};
use vramp_core::{AddrRange, Bytes};
use vramp_driver::Stream;

use super::report::FailedMove;
use vramp_tiers::disk::DiskTierError;
use vramp_tiers::host::HostPoolError;
use vramp_tiers::movers::{MoveError, MoveFailed};
use vramp_tiers::peer::PeerStoreError;
use vramp_tiers::{ReserveError, SpaceId};

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
    /// The reservation that is to pay for a lease is of another space, or of another manager of spaces.
    #[error(
        "the reservation is of {reserved}, and the buffers are charged to another space: reserve in \
         the space that the spill manager was given, {charged}"
    )]
    OtherSpace {
        /// Space of the reservation.
        reserved: SpaceId,
        /// Space that the buffers are charged to.
        charged: SpaceId,
    },
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
    /// The wait for a lease was cancelled by
    /// [`SpillManager::cancel_waits`](super::SpillManager::cancel_waits).
    #[error("the wait for a lease was cancelled: what it waits for is being ended")]
    Cancelled,
    /// The job that restores a lease's buffers was dropped before it ran. The lease has ended.
    #[error("the job that restores the buffers was dropped: run every job that `restore_on` gets")]
    JobDropped,
    /// The allocator had no memory for the buffers. Their contents stay whole, on the card or below.
    #[error(
        "no memory to restore the buffers: end leases or pins, or free memory: \
         {error}{}{}",
        meanwhile(.failed), cannot_leave(*.stuck)
    )]
    NoMemory {
        /// The allocator's error.
        error: Box<AllocError>,
        /// A move that failed meanwhile, which may be why nothing could leave.
        failed: Option<Box<FailedMove>>,
        /// True if all buffers are idle, so that they could leave if a tier below had room.
        stuck: bool,
    },
    /// The card's space has no room within its limit for the buffers, or older requests go first.
    #[error(
        "no budget to restore the buffers: {error}{}{}",
        meanwhile(.failed), cannot_leave(*.stuck)
    )]
    NoBudget {
        /// The space's error.
        error: Box<ReserveError>,
        /// A move that failed meanwhile, which may be why nothing could leave.
        failed: Option<Box<FailedMove>>,
        /// True if all buffers are idle, so that they could leave if a tier below had room.
        stuck: bool,
    },
    /// The lease has no deadline, and waiting cannot help: no buffer can leave the card, and no other
    /// owner holds memory that it could free. Contents stay whole.
    #[error(
        "no buffer can leave the card, and waiting cannot help, since all are idle and no tier below \
         has room: drop or discard buffers, raise the capacity of the host or the disk, or lease \
         fewer at once; with a deadline the lease waits until another thread does that: {error}"
    )]
    NothingCanLeave {
        /// What the last attempt lacked.
        error: Box<SpillError>,
    },
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
    /// The contents of a buffer on the disk are damaged: they are never restored. A lease with
    /// [`Access::Overwrite`](crate::Access::Overwrite) replaces them; `discard` drops them.
    #[error(
        "{buffer} cannot be restored: {error}; write it anew from its source, under a lease with \
         Access::Overwrite or after discard"
    )]
    Damaged {
        /// The buffer.
        buffer: BufferId,
        /// What the disk store found.
        error: DiskTierError,
    },
    /// The driver cannot copy the memory, or it was adopted before.
    #[error("{memory} cannot be adopted: {error}")]
    NotAdoptable {
        /// The memory.
        memory: AddrRange,
        /// The driver's error.
        error: DriverError,
    },
    /// The memory to adopt is that of a deferrable buffer, which leaves these addresses.
    #[error("{0} is a deferrable buffer's already: use that buffer, or a view of it")]
    AddressesOfBuffer(AddrRange),
    /// The memory to adopt is that of another pool of the allocator's group, such as a region: a pause
    /// would take it from the card under leases.
    #[error(
        "{memory} is memory of the pool or region {pool:?}, which may take it from the card under a \
         lease: allocate it outside of regions, in the pool of the buffers, or make a deferrable buffer \
         and copy the contents there"
    )]
    MemoryOfPool {
        /// The memory.
        memory: AddrRange,
        /// Name of the pool: the tag of a region.
        pool: String,
    },
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
    /// A buffer that was to leave the card is held, or has no room below.
    #[error(transparent)]
    Evict(#[from] EvictError),
    /// A move failed, so the buffer left in part or not at all. Its contents are whole.
    #[error("the buffer was not spilled: {0}")]
    NotSpilled(Box<FailedMove>),
    /// There is no such lock.
    #[error(
        "the lock of stream {stream} does not exist: it was unlocked, alone or with its stream, or \
         belongs to another manager"
    )]
    UnknownLock {
        /// Stream of the lock.
        stream: StreamId,
    },
    /// A stream captures a graph.
    #[error("a stream captures a graph: no buffer can leave the card before the capture ends")]
    CaptureInProgress,
    /// A pin was refused.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The buffer is held.
    #[error(transparent)]
    Held(#[from] HeldError),
}

fn meanwhile(failed: &Option<Box<FailedMove>>) -> String {
    failed.as_ref().map(|failed| format!("; meanwhile {failed}")).unwrap_or_default()
}

fn cannot_leave(stuck: bool) -> &'static str {
    if !stuck {
        return "";
    }
    "; no buffer can leave the card, since no tier below has room: drop or discard buffers, or raise the \
     capacity of the host or the disk"
}

impl SpillError {
    /// Says in an error about missing memory that nothing can leave the card.
    pub(super) fn when_stuck(mut self) -> SpillError {
        if let SpillError::NoMemory { stuck, .. } | SpillError::NoBudget { stuck, .. } = &mut self {
            *stuck = true;
        }
        self
    }

    /// Adds a failed move to an error about missing memory that has none.
    pub(super) fn after(mut self, last: Option<FailedMove>) -> SpillError {
        if let SpillError::NoMemory { failed, .. } | SpillError::NoBudget { failed, .. } = &mut self
            && failed.is_none()
        {
            *failed = last.map(Box::new);
        }
        self
    }

    /// Returns the kind of failure, by which the planner decides what follows.
    pub(super) fn failure(&self) -> Failure {
        match self {
            SpillError::Refused(_) => Failure::Refused,
            SpillError::NoMemory { .. } => Failure::CardFull,
            SpillError::NoBudget { .. } => Failure::BudgetFull,
            SpillError::NothingCanLeave { error } => error.failure(),
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

impl SpillError {
    /// Returns the error of a restore of `buffer`, with the remedy where its contents are damaged.
    pub(super) fn of_restore(self, buffer: BufferId) -> SpillError {
        match self {
            SpillError::Move(MoveError::Disk { error, .. }) if error.is_damage() => {
                SpillError::Damaged { buffer, error }
            }
            other => other,
        }
    }
}

impl From<Box<MoveFailed>> for SpillError {
    fn from(failed: Box<MoveFailed>) -> SpillError {
        SpillError::Move(failed.error)
    }
}

impl From<LeaseRefused> for SpillError {
    fn from(refused: LeaseRefused) -> SpillError {
        match refused {
            LeaseRefused::Unknown(unknown) => unknown.into(),
            refused => SpillError::Refused(refused),
        }
    }
}
