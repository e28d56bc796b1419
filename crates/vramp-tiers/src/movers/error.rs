//! Why data did not move, or not all of it.

use vramp_alloc::DriverError;
use vramp_core::{AddrRange, Bytes};
use vramp_host::OutOfBounds;

use crate::disk::DiskTierError;
use crate::host::{HostAllocation, HostPoolError};

/// Why data did not move, or not all of it. What it was copied from is as it was.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MoveError {
    /// A driver call failed. The error keeps the driver's code, and is out of memory only if the
    /// driver said so.
    #[error("the device failed when {moved} of {of} had arrived: {error}")]
    Device {
        /// How much had arrived, from the front.
        moved: Bytes,
        /// Of how much.
        of: Bytes,
        /// What failed.
        error: DriverError,
    },
    /// The blocks of the host are not to be had, or not pinned for the device.
    #[error(transparent)]
    Host(#[from] HostPoolError),
    /// The disk is full or failed, nobody pays for it, or it does not return what was written.
    #[error("the disk failed when {moved} of {of} had arrived: {error}")]
    Disk {
        /// How much had arrived, from the front. To a disk: what is given back again.
        moved: Bytes,
        /// Of how much.
        of: Bytes,
        /// What failed.
        error: DiskTierError,
    },
    /// The part of the host's memory is not there.
    #[error(transparent)]
    Outside(#[from] OutOfBounds),
    /// The addresses end beyond the address space.
    #[error("{0} ends beyond the address space: name addresses that were allocated")]
    BadRange(AddrRange),
    /// Two ranges of different lengths.
    #[error("{from} do not fit into {to}: name ranges of one length")]
    OtherLength {
        /// What should move.
        from: Bytes,
        /// What there is for it.
        to: Bytes,
    },
    /// Copies of a mover are not part of anybody's graph.
    #[error("the stream captures a graph: move data before the capture begins or after it ends")]
    Capturing,
    /// It was cancelled.
    #[error("the move was cancelled when {moved} of {of} had arrived")]
    Cancelled {
        /// How much had arrived, from the front.
        moved: Bytes,
        /// Of how much.
        of: Bytes,
    },
    /// The configuration makes no sense.
    #[error("a mover cannot be made: {0}")]
    Config(&'static str),
}

impl MoveError {
    /// What the driver said, if it was the driver.
    pub fn driver_error(&self) -> Option<&DriverError> {
        match self {
            MoveError::Device { error, .. } | MoveError::Host(HostPoolError::Pin(error)) => {
                Some(error)
            }
            _ => None,
        }
    }
}

/// A move that was refused or could not be finished, with the caller's blocks.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct MoveFailed {
    /// Why.
    #[source]
    pub error: MoveError,
    /// Still the caller's. No copy uses them any more, or they are noted as used by it.
    pub host: HostAllocation,
}

impl From<Box<MoveFailed>> for MoveError {
    /// Lets go of the blocks.
    fn from(failed: Box<MoveFailed>) -> MoveError {
        failed.error
    }
}
