//! Why a buffer was not made, leased, or moved. Every error says what to do.

use crate::planner::{
    AddError, DeferConfigError, ExposeError, Failure, HeldError, LeaseRefused, UnknownBuffer,
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
use vramp_tiers::reserve::SpaceFull;

/// Why the manager did not do what it was asked. What was asked about is as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpillError {
    /// The configuration makes no sense.
    #[error(transparent)]
    Config(#[from] DeferConfigError),
    /// The levels or numbers make no sense.
    #[error("a manager of deferrable buffers cannot be made: {0}")]
    Settings(&'static str),
    /// No buffer of that length, or no place in the group.
    #[error(transparent)]
    Add(#[from] AddError),
    /// No addresses.
    #[error(transparent)]
    Addresses(#[from] ArenaError),
    /// The buffer is another manager's.
    #[error("the buffer is another manager's: lease it there")]
    OtherManager,
    /// A lease was asked about a buffer that it was not taken for.
    #[error(
        "the lease names no buffer at place {index}: count from zero in the order it was asked in"
    )]
    NotNamed {
        /// What was asked.
        index: usize,
    },
    /// Something was said to be written that the lease only reads.
    #[error("the lease only reads what it names at place {index}: lease it exclusive to write it")]
    NotWritable {
        /// What was asked.
        index: usize,
    },
    /// The buffer cannot be read at its address while it is spilled.
    #[error("the buffer cannot be made readable while spilled: {0}; lease it to read it")]
    NotReadable(&'static str),
    /// Host memory could not be taken away from the buffer's address.
    #[error(transparent)]
    HostBacking(#[from] HostBackingError),
    /// The buffer was removed.
    #[error(transparent)]
    Unknown(#[from] UnknownBuffer),
    /// The stream is not one of the allocator's.
    #[error("stream {0} is unknown to the allocator: use one that its create_stream returned")]
    UnknownStream(String),
    /// Whatever is queued on the stream becomes part of a graph, and no event tells when it is done.
    #[error("stream {} captures a graph: take the lease before the capture, or around the launch", .0.number())]
    Capturing(Stream),
    /// The lease was refused, and waiting did not or cannot help.
    #[error("no lease: {0}")]
    Refused(LeaseRefused),
    /// Memory for the buffers could not be had. They stay where they were, whole.
    #[error(
        "no memory to bring the buffers back, end leases, pins or exposures, or free memory: {error}{}",
        .failed.iter().map(|failed| format!("; meanwhile {failed}")).collect::<String>()
    )]
    NoMemory {
        /// What the allocator said.
        error: Box<AllocError>,
        /// A move that failed meanwhile: why nothing could leave, perhaps.
        failed: Option<Box<FailedMove>>,
    },
    /// The budget of the card's space is used up by what may not leave.
    #[error("no budget to bring the buffers back: {0}")]
    NoBudget(SpaceFull),
    /// A handler or an observer of the allocator panicked while memory was had for the buffers. They
    /// stay where they were, whole.
    #[error("a handler or an observer of the allocator panicked: see its message, and ask again")]
    Panicked,
    /// Data did not move. It is where it was.
    #[error(transparent)]
    Move(#[from] MoveError),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The part does not lie in the buffer.
    #[error("{len} from {offset} on do not lie in a buffer of {whole}")]
    Outside {
        /// Where the part begins.
        offset: Bytes,
        /// How long it is.
        len: Bytes,
        /// What there is.
        whole: Bytes,
    },
    /// A pin or an exposure is not there, or the buffer not leased.
    #[error(transparent)]
    Expose(#[from] ExposeError),
    /// Somebody still needs the contents.
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
            _ => Failure::Broken,
        }
    }
}

impl From<Box<MoveFailed>> for SpillError {
    fn from(failed: Box<MoveFailed>) -> SpillError {
        SpillError::Move(failed.error)
    }
}
