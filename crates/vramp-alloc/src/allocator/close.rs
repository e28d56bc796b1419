//! A close that failed returns the allocator.

use vramp_core::StreamId;
use vramp_driver::DriverError;

use crate::Allocator;

/// Error of [`Allocator::close`](crate::Allocator::close).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// A stream captures a graph: waiting for its work would invalidate the capture. Nothing was
    /// returned to the device.
    #[error("{stream} captures a graph: end the capture, then close the allocator")]
    Capturing {
        /// The stream.
        stream: StreamId,
        /// The allocator, as before.
        allocator: Box<Allocator>,
    },
    /// Work cannot be waited for, so it may still use the memory. Nothing was returned to the
    /// device.
    #[error(
        "cannot wait for the work that may use the memory: {error}; close the allocator again, or \
         drop it, which leaves its memory to the device"
    )]
    NotSynchronized {
        /// The driver's error.
        #[source]
        error: DriverError,
        /// The allocator, as before.
        allocator: Box<Allocator>,
    },
    /// A driver call failed, the first one if several did. All others were made; the allocator is
    /// closed.
    #[error(transparent)]
    Driver(DriverError),
}
