//! Errors, with what to do about them.

use cudarc::driver::DriverError;
use vramp_alloc::device::CudaOpenError;
use vramp_alloc::error::{CreateError, UseError};
use vramp_alloc::{AllocError, Allocation, Bytes};

/// Error of [`Pool::new`](crate::Pool::new) and [`Pool::of`](crate::Pool::of).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The context is not the primary one of its device, whose memory vramp has.
    #[error(
        "the context is not the primary one of device {ordinal}: use CudaContext::new({ordinal})"
    )]
    NotPrimary {
        /// Device of the context.
        ordinal: usize,
    },
    /// The card is another one than the context's.
    #[error(
        "the context is of device {context} and the allocator of {allocator}: open device {context}"
    )]
    OtherCard {
        /// Device of the context.
        context: usize,
        /// Device of the allocator.
        allocator: String,
    },
    /// The card cannot be opened.
    #[error(transparent)]
    Card(#[from] CudaOpenError),
    /// The allocator cannot be created.
    #[error(transparent)]
    Create(#[from] CreateError),
}

/// Error of the calls that make slices, and of those that name a stream.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SliceError {
    /// The stream is of another context than the pool.
    #[error(
        "the stream is of another context, on device {stream}, than the pool on device {pool}: use a \
         stream of the pool's context, or a pool of the stream's"
    )]
    OtherContext {
        /// Device of the stream.
        stream: usize,
        /// Device of the pool.
        pool: usize,
    },
    /// `CudaContext::per_thread_stream` means another stream in each thread, and slices move between threads.
    #[error(
        "the per-thread default stream cannot order slices, which move between threads: use \
         CudaContext::new_stream"
    )]
    PerThread,
    /// The bytes of the slice do not fit 64 bits.
    #[error("a slice of {len} elements of {size} bytes is not possible: its bytes exceed 64 bits")]
    TooLong {
        /// Elements requested.
        len: usize,
        /// Bytes of one.
        size: usize,
    },
    /// The pool was closed.
    #[error("the pool was closed: open another one")]
    Closed,
    /// The memory is not there, or a driver call of vramp failed.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The slice is another pool's.
    #[error(transparent)]
    Use(#[from] UseError),
    /// A call of cudarc failed: filling or copying, or an earlier one whose error it kept.
    #[error(transparent)]
    Cuda(#[from] DriverError),
    /// The block is another allocator's.
    #[error("the block is of another allocator: make the slice with the pool of its allocator")]
    ForeignBlock,
    /// The block is shorter than the slice would be.
    #[error(
        "the block of {len} is shorter than the slice, which needs {needed}: ask for fewer elements"
    )]
    ShortBlock {
        /// Bytes of the block.
        len: Bytes,
        /// Bytes of the slice.
        needed: Bytes,
    },
}

/// Error of [`Pool::adopt`](crate::Pool::adopt), with the block as it was.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct AdoptError {
    /// The block, still the caller's.
    pub block: Allocation,
    /// Why it became no slice.
    #[source]
    pub error: SliceError,
}
