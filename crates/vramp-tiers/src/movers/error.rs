//! Errors of transfers.

use vramp_alloc::DriverError;
use vramp_core::{AddrRange, Bytes};
use vramp_host::OutOfBounds;

use crate::disk::DiskTierError;
use crate::host::{HostAllocation, HostPoolError};

/// Why a transfer failed. Its source is unchanged.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MoveError {
    /// A driver call failed. It is an out-of-memory error only if the driver returned one.
    #[error("the device failed after {moved} of {of}: {error}")]
    Device {
        /// Bytes that had arrived, from the front.
        moved: Bytes,
        /// Bytes to transfer.
        of: Bytes,
        /// Error of the driver.
        error: DriverError,
    },
    /// Host blocks could not be allocated, or are not pinned for the device.
    #[error(transparent)]
    Host(#[from] HostPoolError),
    /// The disk is full or failed, the charge was refused, or the bytes read are corrupt.
    #[error("the disk failed after {moved} of {of}: {error}")]
    Disk {
        /// Bytes that had arrived, from the front. Bytes written to a disk are freed.
        moved: Bytes,
        /// Bytes to transfer.
        of: Bytes,
        /// Error of the store.
        error: DiskTierError,
    },
    /// The range lies outside the host memory.
    #[error(transparent)]
    Outside(#[from] OutOfBounds),
    /// The addresses end beyond the address space.
    #[error("{0} ends beyond the address space: use allocated addresses")]
    BadRange(AddrRange),
    /// Source and target differ in length.
    #[error("{from} do not fit into {to}: use ranges of the same length")]
    OtherLength {
        /// Length of the source.
        from: Bytes,
        /// Length of the target.
        to: Bytes,
    },
    /// The stream captures a graph. The copies would become nodes of it.
    #[error("the stream captures a graph: transfer before the capture begins or after it ends")]
    Capturing,
    /// The transfer was cancelled.
    #[error("cancelled after {moved} of {of}")]
    Cancelled {
        /// Bytes that had arrived, from the front.
        moved: Bytes,
        /// Bytes to transfer.
        of: Bytes,
    },
    /// The transfer failed or was cancelled, and waiting for its copies failed too: they may still
    /// read or write the memory of the device. Keep that memory until the work on
    /// [`Mover::copy_streams`](super::Mover::copy_streams) is complete.
    #[error(
        "{0}; copies may still be in flight: keep their memory until the mover's streams are idle"
    )]
    Unsettled(Box<MoveError>),
    /// The configuration is invalid.
    #[error("invalid mover configuration: {0}")]
    Config(&'static str),
}

impl MoveError {
    /// Returns the error of a call, before any byte arrived.
    pub(crate) fn device(error: DriverError) -> MoveError {
        MoveError::Device { moved: Bytes::ZERO, of: Bytes::ZERO, error }
    }

    /// Returns the error of a disk, before any byte arrived.
    pub(crate) fn disk(error: DiskTierError) -> MoveError {
        MoveError::Disk { moved: Bytes::ZERO, of: Bytes::ZERO, error }
    }

    /// Returns the error of the driver, if there is one.
    pub fn driver_error(&self) -> Option<&DriverError> {
        match self {
            MoveError::Device { error, .. } | MoveError::Host(HostPoolError::Pin(error)) => {
                Some(error)
            }
            MoveError::Unsettled(error) => error.driver_error(),
            _ => None,
        }
    }

    /// Returns true if copies of the transfer may still be in flight.
    pub fn is_unsettled(&self) -> bool {
        matches!(self, MoveError::Unsettled(_))
    }

    /// Returns the same error, as [`Unsettled`](MoveError::Unsettled) if copies may be in flight. On
    /// a lost device none is.
    pub(super) fn unless_settled(self, settled: bool) -> MoveError {
        let is_lost = self.driver_error().is_some_and(DriverError::is_device_lost);
        match settled || is_lost || self.is_unsettled() {
            true => self,
            false => MoveError::Unsettled(Box::new(self)),
        }
    }
}

/// A transfer that was refused or failed, with the caller's blocks.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct MoveFailed {
    /// Why it failed.
    #[source]
    pub error: MoveError,
    /// The caller's blocks. If the error is [`MoveError::Unsettled`] copies may still use them: once
    /// dropped, they are reused only after those copies, or never if the device cannot tell.
    pub host: HostAllocation,
}

impl From<Box<MoveFailed>> for MoveError {
    /// Drops the blocks.
    fn from(failed: Box<MoveFailed>) -> MoveError {
        failed.error
    }
}
