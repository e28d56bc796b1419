//! What can go wrong, by operation. Every error says what to do.

use std::fmt;

use vramp_core::{Bytes, ConfigError, DeviceAddr, Inconsistency, Shortage, StreamId};
use vramp_driver::{DriverError, MemoryInfo};

use crate::Allocation;

/// Why an allocator could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The configuration is impossible.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The page is not a multiple of the device's granularity.
    #[error("a page of {page} is not possible on this device: use a multiple of {granularity}")]
    Granularity {
        /// What was asked.
        page: Bytes,
        /// What the device has.
        granularity: Bytes,
    },
    /// The device lacks what the preset needs.
    #[error(
        "the preset '{preset}' needs {needed}, which this device does not have: use '{instead}'"
    )]
    NotSupported {
        /// The preset.
        preset: &'static str,
        /// What it needs.
        needed: &'static str,
        /// What works here.
        instead: &'static str,
    },
    /// The memory to take at once is more than there is.
    #[error(
        "cannot take {prefill} at once: {reason}; ask for less, or for nothing, and let the pool grow"
    )]
    Prefill {
        /// What was asked.
        prefill: Bytes,
        /// Why not.
        reason: String,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Why memory could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// There is not enough. Boxed: the report is long and the case is rare.
    #[error("{0}")]
    OutOfMemory(Box<Report>),
    /// A driver call failed for another reason. The allocator is as before the call.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The stream was not made by this allocator, or is gone.
    #[error("{0} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream(StreamId),
    /// A panic in an earlier call left the pool inconsistent.
    #[error("an earlier panic left the pool unusable: {0}")]
    Broken(#[from] Inconsistency),
}

impl AllocError {
    /// True if giving memory back and trying again may help.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, AllocError::OutOfMemory(_))
    }
}

/// Why memory could not be given back. Where it still is the caller's, it is in the error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreeError {
    /// The allocation is another allocator's.
    #[error("the allocation at {} belongs to another allocator: free it there", .0.addr())]
    Foreign(Allocation),
    /// The stream was not made by this allocator, or is gone.
    #[error("{stream} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream {
        /// What was given.
        stream: StreamId,
        /// Still the caller's.
        allocation: Allocation,
    },
    /// A driver call failed. The memory is free all the same, unless the device is lost.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A panic in an earlier call left the pool inconsistent.
    #[error("an earlier panic left the pool unusable: {0}")]
    Broken(#[from] Inconsistency),
}

/// Why a use could not be noted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UseError {
    /// The allocation is another allocator's.
    #[error("the allocation at {0} belongs to another allocator: note its uses there")]
    Foreign(DeviceAddr),
    /// The stream was not made by this allocator, or is gone.
    #[error("{0} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream(StreamId),
    /// A panic in an earlier call left the pool inconsistent.
    #[error("an earlier panic left the pool unusable: {0}")]
    Broken(#[from] Inconsistency),
}

/// Out of memory, in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What the pool knows.
    pub shortage: Shortage,
    /// What the card says, where it could be asked.
    pub card: Option<MemoryInfo>,
    /// The driver call that found the card full, if one did.
    pub failed_call: Option<DriverError>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage { requested, reserved, used, free, largest, waiting, limit } = &self.shortage;
        write!(
            f,
            "out of memory: asked for {requested}; the pool holds {reserved} ({used} in use, {free} \
             free, {waiting} waiting for other streams), the largest block it could make is {largest}"
        )?;
        if let Some(card) = &self.card {
            write!(f, "; the card has {} of {} free", card.free, card.total)?;
        }
        match limit {
            Some(limit) => write!(f, "; the limit of {limit} is in force: raise it or free memory"),
            None => write!(f, "; free memory, ask for less, or use a larger card"),
        }
    }
}
