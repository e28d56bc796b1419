//! The interface of engines. Tests implement it with failing disks.

use std::sync::Arc;

use vramp_core::Bytes;

use super::{DirectFile, DiskError, OsCode};
use crate::HostSpan;

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the file into memory.
    Read,
    /// From memory into the file.
    Write,
}

impl Direction {
    pub(super) fn what(self) -> &'static str {
        match self {
            Direction::Read => "reading",
            Direction::Write => "writing",
        }
    }
}

/// Called once with the number of bytes that one system call moved, or its error. It runs in a
/// thread of the engine, so it must be quick. It may submit more requests.
pub type IoCompletion = Box<dyn FnOnce(Result<Bytes, OsCode>) + Send>;

/// One read or write system call.
pub struct IoRequest {
    /// The file.
    pub file: Arc<DirectFile>,
    /// Offset in the file. A multiple of [`DISK_BLOCK`](super::DISK_BLOCK) if the file is direct.
    pub offset: Bytes,
    /// Memory to read into or write from, kept alive until completion. Aligned as the offset.
    pub span: HostSpan,
    /// Direction of the transfer.
    pub direction: Direction,
    /// Called on completion.
    pub done: IoCompletion,
}

/// An engine that moves bytes between files and host memory. Requests complete in any order.
pub trait BlockIo: Send + Sync {
    /// Returns its name for tables and errors.
    fn name(&self) -> &'static str;

    /// Returns the number of requests in flight at the same time. More requests are queued.
    fn depth(&self) -> usize;

    /// Queues one system call for each request and returns before they complete. Each completes
    /// exactly once, even if the engine is dropped before.
    fn submit(&self, batch: Vec<IoRequest>);

    /// Allocates the blocks for `len` bytes of a file, so that no write can find the disk full.
    ///
    /// # Errors
    /// The disk is full.
    fn preallocate(&self, file: &DirectFile, len: Bytes) -> Result<(), DiskError> {
        file.preallocate(len)
    }
}
