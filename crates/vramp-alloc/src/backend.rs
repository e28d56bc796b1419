//! An allocator of another project that serves requests in place of the virtual pool, for comparisons.
//!
//! With [`Config::backend`](crate::Config::backend) an allocator holds a boxed [`Backend`]. It has
//! everything else of an allocator: streams and their ends, threads, limits that pools share, shortage
//! handlers, statistics, snapshots. A backend decides where memory lies, and calls the driver for it. It
//! serves all requests, or those under a page beside the virtual pool.
//!
//! Deliberately absent: the backends themselves, which are in `vramp-peers`, and any use of them before
//! a thread's cache and the stream's heap were asked.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use vramp_core::{
    AddrRange, Bytes, Counters, DeviceAddr, Inconsistency, Mark, PoolAddr, Shortage, StreamId,
    Stretch,
};
use vramp_driver::{DriverError, DriverResult, Handle, PoolUsage, Stream};

pub use crate::completion::{Completions, Events, captures};
pub use crate::sharing::Access;
pub use crate::stream_end::StreamEnds;
pub use vramp_core::StreamTable;

use crate::error::{Largest, QuarantinedMemory};
use crate::memory_stats::MemoryStats;
use crate::stream_end::StreamEnd;

/// An allocator of device memory. The allocator that holds it calls it with its lock held.
///
/// A backend that places blocks at addresses of its own, which are the same on every device, returns them
/// as [`BackendBlock::at`]. One that leaves placement to the driver counts its blocks in
/// [`Counters::placed`], because the driver does not say which of them were hits, and has a
/// [usage](Backend::driver_usage).
pub trait Backend: Any + fmt::Debug + Send {
    /// Returns the name in errors and snapshots.
    fn name(&self) -> &'static str;

    /// Adds a stream; `None` for one that ended. Ids below it that were not added are those of streams
    /// that ended, whose work is over.
    fn add_stream(&mut self, _id: StreamId, _stream: Option<Stream>) {}

    /// Makes all ids below this number known: those that were not added are of streams that ended, whose
    /// work is over.
    fn skip_streams(&mut self, _ids: usize) {}

    /// Ends a stream, whose work is over once `end` is reached, or now without one. No driver call.
    fn end_stream(&mut self, id: StreamId, end: Option<&Arc<StreamEnd>>);

    /// Allocates at least `size` bytes for a stream.
    ///
    /// # Errors
    /// There is no memory, or a driver call failed.
    fn malloc(
        &mut self,
        size: Bytes,
        stream: StreamId,
        raw: Stream,
    ) -> Result<BackendBlock, Refused>;

    /// Records that work of `stream` uses a live block.
    fn record_use(&mut self, block: u64, stream: StreamId);

    /// Frees a live block behind the work of `stream`, which is free even if a driver call fails.
    ///
    /// # Errors
    /// A driver call failed.
    fn free(
        &mut self,
        block: u64,
        stream: StreamId,
        streams: &StreamTable<Stream>,
    ) -> DriverResult<()>;

    /// Returns true if the block is live and begins at this address.
    fn holds(&self, block: u64, addr: DeviceAddr) -> bool;

    /// Returns idle memory to the card until no more than `to` is reserved.
    ///
    /// # Errors
    /// A driver call failed.
    fn trim(&mut self, to: Bytes) -> DriverResult<()>;

    /// Sets the limit of reserved memory.
    fn set_limit(&mut self, limit: Option<Bytes>);

    /// Returns the counts of driver work, without the memory of the driver's pool. No driver call.
    fn counters(&self) -> Counters;

    /// Sets peaks to the current values.
    fn reset_peaks(&mut self);

    /// Returns everything to the device. The caller waited for all work. Goes on after a failure and
    /// returns the first one.
    ///
    /// # Errors
    /// A driver call failed.
    fn release_all(&mut self) -> DriverResult<()>;

    /// Returns the usage of the driver's pool, if the memory is there. One driver call then.
    ///
    /// # Errors
    /// The driver call failed.
    fn driver_usage(&self) -> DriverResult<Option<PoolUsage>> {
        Ok(None)
    }

    /// Reserves at least `len` bytes ahead of demand, where the backend can.
    ///
    /// # Errors
    /// As of [`Backend::malloc`].
    fn prefill(&mut self, _len: Bytes, _stream: StreamId, _raw: Stream) -> Result<(), Refused> {
        Ok(())
    }

    /// Returns what failed calls left unusable.
    fn quarantined(&self) -> QuarantinedMemory {
        QuarantinedMemory::default()
    }

    /// Returns what [`Shortage::largest`] is.
    fn largest_is(&self) -> Largest {
        Largest::Unknown
    }

    /// Checks every invariant.
    ///
    /// # Errors
    /// One is broken.
    fn audit(&self) -> Result<(), Inconsistency> {
        Ok(())
    }

    /// Returns the mark that covers the work queued on a stream so far, if the backend has marks.
    fn mark(&self, _stream: StreamId) -> Option<Mark> {
        None
    }

    /// Replaces what the backend itself counts of the card's memory.
    fn complete_stats(&self, stats: MemoryStats) -> MemoryStats {
        stats
    }

    /// Returns the memory by address, for snapshots; `None` where the backend does not know it.
    fn stretches(&self) -> Option<Vec<BackendStretch>> {
        None
    }

    /// Returns what memory is created and mapped as; `None` where the backend maps none.
    fn access_mut(&mut self) -> Option<&mut Access> {
        None
    }

    /// Returns the ranges that are mapped; `None` where access to memory cannot be changed.
    fn mapped_ranges(&self) -> Option<Vec<AddrRange>> {
        None
    }

    /// Returns the handles that a block lies in with their lengths, in address order, and the address of
    /// the first; `None` where it lies in none.
    fn handles_of(&self, _block: u64) -> Option<(DeviceAddr, Vec<(Handle, Bytes)>)> {
        None
    }
}

/// A block that a backend placed.
#[derive(Clone, Copy, Debug)]
pub struct BackendBlock {
    /// Its first byte.
    pub addr: DeviceAddr,
    /// Usable bytes.
    pub len: Bytes,
    /// The number by which the backend knows it.
    pub id: u64,
    /// Its address in the backend's own numbers, if it has such.
    pub at: Option<PoolAddr>,
    /// True if no driver call created it.
    pub hit: bool,
}

/// Why a backend did not allocate.
#[derive(Debug)]
pub enum Refused {
    /// No memory, and the driver call that failed, if one did. Boxed: the case is rare.
    Short(Box<Shortage>, Option<DriverError>),
    /// A driver call failed for another reason.
    Driver(DriverError),
}

impl From<DriverError> for Refused {
    fn from(error: DriverError) -> Refused {
        Refused::Driver(error)
    }
}

/// Memory of a backend without a gap.
#[derive(Clone, Debug)]
pub struct BackendStretch {
    /// Its first byte.
    pub start: DeviceAddr,
    /// Blocks in it, and what is free.
    pub memory: Stretch,
    /// True in the pool of requests up to 1 MiB.
    pub is_small: bool,
    /// True in a range that grows.
    pub is_expandable: bool,
}

/// The backend of an allocator that a fork closed: it has no memory, and serves nothing.
#[derive(Debug)]
pub(crate) struct NoMemory;

impl Backend for NoMemory {
    fn name(&self) -> &'static str {
        "closed"
    }

    fn end_stream(&mut self, _id: StreamId, _end: Option<&Arc<StreamEnd>>) {}

    fn malloc(
        &mut self,
        size: Bytes,
        stream: StreamId,
        _raw: Stream,
    ) -> Result<BackendBlock, Refused> {
        unreachable!("{size} for {stream} was requested of a closed allocator")
    }

    fn record_use(&mut self, _block: u64, _stream: StreamId) {}

    fn free(
        &mut self,
        _block: u64,
        _stream: StreamId,
        _streams: &StreamTable<Stream>,
    ) -> DriverResult<()> {
        Ok(())
    }

    fn holds(&self, _block: u64, _addr: DeviceAddr) -> bool {
        false
    }

    fn trim(&mut self, _to: Bytes) -> DriverResult<()> {
        Ok(())
    }

    fn set_limit(&mut self, _limit: Option<Bytes>) {}

    fn counters(&self) -> Counters {
        Counters::default()
    }

    fn reset_peaks(&mut self) {}

    fn release_all(&mut self) -> DriverResult<()> {
        Ok(())
    }
}
