//! Errors of arenas, captures and launches.

use vramp_core::{ArenaBusy, Bytes, StreamId};
use vramp_driver::DriverError;
use vramp_host::HostShortage;

use crate::error::{AllocError, Unusable};

/// Error of [`Allocator::graph_arena`](crate::Allocator::graph_arena) and
/// [`stable_range`](crate::Allocator::stable_range).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// Only the default preset has arenas and stable ranges.
    #[error("this needs the preset vramp on a device with virtual memory management and graphs")]
    NotSupported,
    /// The length is zero, or more than one reservation can have.
    #[error("{capacity} of addresses are not possible: use more than 0 and at most {max}")]
    Capacity {
        /// Length that was given.
        capacity: Bytes,
        /// Largest length possible.
        max: Bytes,
    },
    /// A driver call failed. Nothing was reserved.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// The host has no memory for the allocator's own records. Nothing was changed.
    #[error(transparent)]
    HostMemory(#[from] HostShortage),
}

/// Error of a capture. Except for [`CaptureError::OtherThread`] the capture is over, for the
/// allocator and for the stream.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// The arena belongs to another allocator.
    #[error("the arena belongs to another allocator: capture with that one")]
    ForeignArena,
    /// The arena serves another capture.
    #[error("the arena serves another capture: end that one first, or use another arena")]
    ArenaBusy,
    /// The stream is not one of this allocator's, or was destroyed.
    #[error("{0} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream(StreamId),
    /// The stream is part of no capture.
    #[error("{0} captures no graph: begin the capture first, and attach on a stream of it")]
    NotCapturing(StreamId),
    /// Another arena serves the capture already.
    #[error("the capture of {0} is served by an arena already")]
    Served(StreamId),
    /// The driver did not return the stream's capture.
    #[error("cannot find the capture that {stream} is part of: {error}")]
    Query {
        /// Stream that was given.
        stream: StreamId,
        /// The driver's error.
        #[source]
        error: DriverError,
    },
    /// Memory for the arena was not available.
    #[error(transparent)]
    Alloc(AllocError),
    /// The capture did not begin.
    #[error("the capture did not begin: {0}")]
    Begin(#[source] DriverError),
    /// The capture was invalidated while it ran, or the graph could not be instantiated.
    #[error(
        "the capture was invalidated: {0}; while a stream captures, do not synchronize, query \
         events or allocate without the allocator, and join every stream that was forked"
    )]
    Invalidated(#[source] DriverError),
    /// The capture goes on: unless its mode is relaxed, only the thread that began it can end it.
    #[error("the capture goes on: end it on the thread that began it")]
    OtherThread,
    /// The capture was ended before, or its allocator was closed.
    #[error("the capture is over: it was ended before, or its allocator was closed")]
    Over,
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

/// Error of [`CapturedGraph::launch`](super::CapturedGraph::launch). Nothing was queued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Work of another stream uses the arena.
    #[error(transparent)]
    Busy(#[from] ArenaBusy),
    /// The arena's memory was lent, and there is not enough to back it again.
    #[error("the arena's memory cannot be restored: {0}")]
    Alloc(AllocError),
    /// The stream is not one of this allocator's, or was destroyed.
    #[error("{0} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream(StreamId),
    /// The stream captures. The replay would be part of that graph, which no lease can guard.
    #[error("{0} captures a graph: launch after the capture, or on another stream")]
    Capturing(StreamId),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}
