//! Errors, one enum for each operation, with the values and what to do about them.
//!
//! Errors of graph arenas are in [`graph`](crate::graph), those of host memory behind a range in
//! [`range`](crate::range), those of opening a device in [`device`](crate::device).

mod report;

pub use crate::allocator::CloseError;
pub use vramp_core::{ArenaAllocError, ConfigError, Inconsistency, Shortage};
pub use vramp_driver::{Call, DriverError, ErrorKind, MemoryInfo};
pub use vramp_host::HostShortage;

pub use report::{
    Largest, OutOfMemoryReport, QuarantinedMemory, SiblingPool, StreamUsage, TagUsage,
};

use vramp_core::{Bytes, DeviceAddr, StreamId};
use vramp_host::fork::is_forked;

use crate::allocation::Allocation;

/// Why an allocator serves no calls any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unusable {
    /// A panic in an earlier call left the pool inconsistent.
    #[error("an earlier panic left the pool unusable: {0}")]
    Inconsistent(#[from] Inconsistency),
    /// The process was forked after an allocator was created in it.
    #[error(
        "this process was forked from one that uses CUDA, which does not survive a fork: start the \
         child with spawn or exec, or create the first allocator after the fork"
    )]
    Forked,
    /// The pool sleeps: its memory may have left the card.
    #[error("the pool {pool} is asleep: wake it first")]
    Asleep {
        /// Name of the pool.
        pool: String,
    },
    /// The allocator was closed, and its memory is gone.
    #[error("the allocator was closed, and its memory is gone: open another one")]
    Closed,
}

impl Unusable {
    /// Returns an error in the child of a process that created an allocator before it forked. The
    /// threads of the parent do not exist there, and a lock that one of them held is never released.
    ///
    /// # Errors
    /// [`Unusable::Forked`].
    #[inline]
    pub fn check_fork() -> Result<(), Unusable> {
        if is_forked() { Err(Unusable::Forked) } else { Ok(()) }
    }

    /// Returns the error as one of a driver call, which is not made.
    pub(crate) fn check_fork_before(call: Call) -> Result<(), DriverError> {
        let not_initialized = 3;
        let refused =
            |error: Unusable| DriverError::from_code(call, not_initialized, error.to_string());
        Unusable::check_fork().map_err(refused)
    }
}

/// Error of [`Allocator::new`](crate::Allocator::new) and
/// [`create_pool`](crate::Allocator::create_pool).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The configuration is impossible.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The page size is not a multiple of the device's granularity.
    #[error("a page of {page} is not possible on this device: use a multiple of {granularity}")]
    Granularity {
        /// Page size of the configuration.
        page: Bytes,
        /// Allocation granularity of the device.
        granularity: Bytes,
    },
    /// The device lacks a capability that the preset needs.
    #[error("the preset '{preset}' needs {needed}, which this device lacks: use '{instead}'")]
    NotSupported {
        /// Name of the preset.
        preset: &'static str,
        /// Capability that it needs.
        needed: &'static str,
        /// Name of a preset that works on this device.
        instead: &'static str,
    },
    /// The garbage collection threshold is not between 0 and 1.
    #[error(
        "garbage_collection_threshold={threshold} is not possible: use a number between 0 and 1"
    )]
    Threshold {
        /// Threshold of the configuration.
        threshold: f64,
    },
    /// Network cards cannot access memory of this device.
    #[error("rdma=on is not possible on this device: use rdma=auto or rdma=off")]
    Rdma,
    /// A card that is to have access has no link to the device.
    #[error("device {ordinal} is no peer of this one: its peers are {peers:?}")]
    NoPeer {
        /// Ordinal in the configuration.
        ordinal: u32,
        /// The device's peers.
        peers: Vec<u32>,
    },
    /// The memory to reserve at the start is not available.
    #[error("cannot reserve {prefill} at the start: {reason}; use a smaller prefill, or none")]
    Prefill {
        /// Prefill of the configuration.
        prefill: Bytes,
        /// Cause, in words.
        reason: String,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

/// Error of [`Allocator::malloc`](crate::Allocator::malloc) and of other calls that take memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// There is not enough memory. Boxed: the report is long and the case is rare.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemoryReport>),
    /// A driver call failed for another reason. The allocator is as before the call.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The stream is not one of this allocator's, or was destroyed.
    #[error("{0} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream(StreamId),
    /// The graph arena of the stream's capture has no room, or cannot follow the capture.
    /// Boxed: large errors make every request slower.
    #[error("{0}")]
    Arena(Box<ArenaAllocError>),
    /// The tag belongs to another allocator.
    #[error("the tag is unknown to this allocator: use one that its tag function returned")]
    UnknownTag,
    /// Host memory is mapped at the addresses that device memory was requested for.
    #[error("host memory is mapped from offset {at} on: unmap it with unmap_host_part")]
    HostMapped {
        /// Offset of the first such part.
        at: Bytes,
    },
    /// The memory fraction is not from 0 to 1.
    #[error("a memory fraction of {0} is not possible: use a number from 0 to 1")]
    Fraction(f64),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// The host has no memory for the allocator's own records. Nothing was changed.
    #[error(transparent)]
    HostMemory(#[from] HostShortage),
}

impl AllocError {
    /// Returns true if the request may succeed once memory is freed.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            AllocError::OutOfMemory(_) => true,
            AllocError::Arena(refused) => matches!(**refused, ArenaAllocError::Full(_)),
            _ => false,
        }
    }
}

/// Error of [`Allocator::destroy_stream`](crate::Allocator::destroy_stream) and
/// [`capture_number`](crate::Allocator::capture_number).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The stream is not one of this allocator's, or was destroyed before.
    #[error("{0} is unknown to this allocator, or was destroyed before")]
    Unknown(StreamId),
    /// The stream captures a graph, which would be lost.
    #[error("{0} captures a graph: end the capture before the stream")]
    Capturing(StreamId),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

/// Error of [`Allocator::free`](crate::Allocator::free). Returns the allocation where the caller
/// still owns it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreeError {
    /// The allocation belongs to another allocator.
    #[error("the allocation at {} belongs to another allocator: free it there", .0.addr())]
    Foreign(Allocation),
    /// The stream is not one of this allocator's.
    #[error("{stream} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream {
        /// Stream that was given.
        stream: StreamId,
        /// The allocation, still the caller's.
        allocation: Allocation,
    },
    /// A driver call failed. The memory is free all the same, unless the device is lost.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

/// Error of [`Allocator::record_use`](crate::Allocator::record_use).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UseError {
    /// The allocation belongs to another allocator.
    #[error("the allocation at {0} belongs to another allocator: record its uses there")]
    Foreign(DeviceAddr),
    /// The stream is not one of this allocator's, or was destroyed.
    #[error("{0} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream(StreamId),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// The host has no memory for the allocator's own records. Nothing was changed.
    #[error(transparent)]
    HostMemory(#[from] HostShortage),
}
