//! The seam between what is to be moved and who moves it. Tests put failing disks here.

use std::sync::Arc;

use vramp_core::Bytes;

use super::{DirectFile, DiskError, OsCode};
use crate::HostSpan;

/// Which way bytes move.
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

/// Told once how many bytes one call of the kernel moved, or why none. Called in a thread of the
/// engine, which waits meanwhile: it shall be quick, and may submit more.
pub type IoCompletion = Box<dyn FnOnce(Result<Bytes, OsCode>) + Send>;

/// One call of the kernel.
pub struct IoRequest {
    /// Which file.
    pub file: Arc<DirectFile>,
    /// Where in it. A whole number of [`DISK_BLOCK`](super::DISK_BLOCK)s where the file is direct.
    pub offset: Bytes,
    /// The memory, kept alive until the answer. Aligned as the offset.
    pub span: HostSpan,
    /// Which way.
    pub direction: Direction,
    /// Who is told.
    pub done: IoCompletion,
}

/// Moves bytes between files and host memory, many requests at once and in no order.
pub trait BlockIo: Send + Sync {
    /// Its name in tables and errors.
    fn name(&self) -> &'static str;

    /// How many requests it works on at the same time. More wait in it.
    fn depth(&self) -> usize;

    /// Queues one call of the kernel for each request, and returns before they are done. Each is
    /// answered exactly once, also when the engine is dropped meanwhile.
    fn submit(&self, batch: Vec<IoRequest>);

    /// Gets the blocks for `len` bytes of a file, so that no write can run out of them.
    ///
    /// # Errors
    /// There are not so many.
    fn preallocate(&self, file: &DirectFile, len: Bytes) -> Result<(), DiskError> {
        file.preallocate(len)
    }
}
