//! What can go wrong, by operation. Every error says what to do.

use std::fmt;

use vramp_core::{
    ArenaAllocError, ArenaBusy, Bytes, ConfigError, DeviceAddr, Inconsistency, Shortage, StreamId,
};
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
    /// The threshold for giving memory back is no share.
    #[error(
        "garbage_collection_threshold={threshold} is not possible: use a number between 0 and 1"
    )]
    Threshold {
        /// What was asked.
        threshold: f64,
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
    /// The graph arena of the stream's capture has no room, or lost track of the capture.
    /// Boxed: large errors make every request slower.
    #[error("{0}")]
    Arena(Box<ArenaAllocError>),
    /// The tag is another allocator's.
    #[error("the tag is unknown to this allocator: use one that its tag function returned")]
    UnknownTag,
    /// Host memory is behind the addresses that memory was wanted for.
    #[error("host memory is behind the addresses from {at} on: take it away with unhost_part")]
    Hosted {
        /// The offset of the first part of which that is so.
        at: Bytes,
    },
    /// The share of the card is no share.
    #[error("a memory fraction of {0} is not possible: use a number above 0 and at most 1")]
    Fraction(f64),
    /// A panic in an earlier call left the pool inconsistent.
    #[error("an earlier panic left the pool unusable: {0}")]
    Broken(#[from] Inconsistency),
}

/// Why a stream could not be ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// It is not known here, or was ended before.
    #[error("{0} is unknown to this allocator, or was destroyed before")]
    Unknown(StreamId),
    /// It captures a graph, which would be lost.
    #[error("{0} captures a graph: end the capture before the stream")]
    Capturing(StreamId),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A panic in an earlier call left the pool inconsistent.
    #[error("an earlier panic left the pool unusable: {0}")]
    Broken(#[from] Inconsistency),
}

impl AllocError {
    /// True if giving memory back and trying again may help.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            AllocError::OutOfMemory(_) => true,
            AllocError::Arena(refused) => matches!(**refused, ArenaAllocError::Full(_)),
            _ => false,
        }
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

/// What a stream holds of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Whose memory it is, or was last.
    pub stream: StreamId,
    /// In blocks, and in the slabs of the stream's heap.
    pub used: Bytes,
    /// Free, ready for the next request.
    pub free: Bytes,
    /// Freed, waiting for other streams' work.
    pub waiting: Bytes,
}

/// What was asked for under a tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tagged {
    /// The tag's name.
    pub name: String,
    /// Bytes asked for and held.
    pub live: Bytes,
    /// The most that was.
    pub peak: Bytes,
    /// Blocks held.
    pub blocks: u64,
}

/// What an allocator of a group holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolHolding {
    /// The pool's name.
    pub name: String,
    /// Physical memory.
    pub reserved: Bytes,
}

/// Out of memory, in numbers, and who holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What the pool knows.
    pub shortage: Shortage,
    /// The stream that asked.
    pub stream: StreamId,
    /// The allocator that was asked.
    pub pool: String,
    /// By stream, the one with most first. Empty for the driver's pool.
    pub holders: Vec<Holder>,
    /// By tag, the one with most first. Only what was asked for under a tag.
    pub tags: Vec<Tagged>,
    /// Other allocators of the group.
    pub others: Vec<PoolHolding>,
    /// What the card says, where it could be asked.
    pub card: Option<MemoryInfo>,
    /// The driver call that found the card full, if one did.
    pub failed_call: Option<DriverError>,
}

impl fmt::Display for Report {
    /// One line that says what is wrong and what to try, then who holds the memory.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage { requested, reserved, used, free, largest, waiting, limit, .. } =
            &self.shortage;
        write!(
            f,
            "out of memory: asked for {requested} on {}; pool '{}' holds {reserved} ({used} in use, \
             {free} free, {waiting} waiting for other streams), the largest block it could make by \
             remapping is {largest}",
            self.stream, self.pool
        )?;
        if let Some(card) = &self.card {
            write!(f, "; the card has {} of {} free", card.free, card.total)?;
        }
        match limit {
            Some(limit) => {
                write!(f, "; the limit of {limit} is in force: raise it or free memory")?
            }
            None => write!(f, "; free memory, ask for less, or use a larger card")?,
        }
        for Holder { stream, used, free, waiting } in self.holders.iter().take(HOLDERS_SHOWN) {
            write!(f, "\n  {stream}: {used} in use, {free} free, {waiting} waiting")?;
        }
        for Tagged { name, live, blocks, .. } in self.tags.iter().take(HOLDERS_SHOWN) {
            write!(f, "\n  tag '{name}': {live} in {blocks} blocks")?;
        }
        for PoolHolding { name, reserved } in &self.others {
            write!(f, "\n  pool '{name}': holds {reserved}")?;
        }
        Ok(())
    }
}

/// A report names at most so many streams and tags.
const HOLDERS_SHOWN: usize = 8;

/// Why there is no arena.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// Only the default preset has arenas.
    #[error("graph arenas need the preset vramp on a device with virtual memory management")]
    NotSupported,
    /// No addresses for nothing, and not more than a reservation can be long.
    #[error("an arena of {capacity} is not possible: use more than 0 and at most {most}")]
    Capacity {
        /// What was asked.
        capacity: Bytes,
        /// The most there can be.
        most: Bytes,
    },
    /// A driver call failed. Nothing was made.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A panic in an earlier call left the pool inconsistent.
    #[error("an earlier panic left the pool unusable: {0}")]
    Broken(#[from] Inconsistency),
}

/// Why a capture failed. But for [`CaptureError::OtherThread`] the allocator and the stream are out
/// of the capture.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// The arena is another allocator's.
    #[error("the arena belongs to another allocator: capture there")]
    ForeignArena,
    /// The arena serves another capture.
    #[error("the arena serves a capture already: end that one first, or take another arena")]
    ArenaBusy,
    /// The stream was not made by this allocator, or is gone.
    #[error("{0} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream(StreamId),
    /// There is no capture to serve.
    #[error("{0} captures no graph: begin the capture first, and attach on a stream of it")]
    NotCapturing(StreamId),
    /// A capture gets its memory from one place.
    #[error("the capture of {0} is served by an arena already")]
    Served(StreamId),
    /// The stream's capture cannot be asked about.
    #[error("{stream} does not tell which capture it is part of: {error}")]
    Ask {
        /// What was given.
        stream: StreamId,
        /// What the driver says.
        #[source]
        error: DriverError,
    },
    /// Memory for the arena could not be had.
    #[error(transparent)]
    Alloc(AllocError),
    /// The capture could not begin.
    #[error("the capture did not begin: {0}")]
    Begin(#[source] DriverError),
    /// Something spoilt the capture while it ran, or the graph could not be made ready.
    #[error(
        "the capture came to nothing: {0}; while a stream captures, do not synchronize, query \
         events or allocate around the allocator, and join every stream that was forked"
    )]
    Spoilt(#[source] DriverError),
    /// The capture did not end: the driver lets only the thread that began it do that, unless the
    /// mode is relaxed.
    #[error("the capture goes on: end it on the thread that began it ({0})")]
    OtherThread(#[source] DriverError),
    /// It was ended before, or its allocator was closed.
    #[error("the capture is over: it was ended before, or its allocator was closed")]
    Over,
    /// A panic in an earlier call left the pool inconsistent.
    #[error("an earlier panic left the pool unusable: {0}")]
    Broken(#[from] Inconsistency),
}

/// Why a graph was not launched. Nothing was queued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Another stream's work uses the arena.
    #[error(transparent)]
    Busy(#[from] ArenaBusy),
    /// The arena's memory was lent and does not fit any more.
    #[error("the arena's memory cannot be brought back: {0}")]
    Alloc(AllocError),
    /// The stream was not made by this allocator, or is gone.
    #[error("{0} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream(StreamId),
    /// A replay within a capture would be part of that graph, which no lease could guard.
    #[error("{0} captures a graph: launch after the capture, or on another stream")]
    Capturing(StreamId),
    /// The allocator was closed, and its memory is gone.
    #[error("the allocator was closed: its graphs cannot run any more")]
    Closed,
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A panic in an earlier call left the pool inconsistent.
    #[error("an earlier panic left the pool unusable: {0}")]
    Broken(#[from] Inconsistency),
}
