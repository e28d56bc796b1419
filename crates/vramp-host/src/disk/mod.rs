//! Files that bypass the page cache, and engines that move bytes between them and host memory.
//!
//! The life of a transfer:
//!
//! 1. [`open_io`] opens an engine, a [`BlockIo`]: [`UringIo`] where the kernel allows it,
//!    [`ThreadIo`] elsewhere.
//! 2. [`DirectFile::create`] creates a locked file, and [`BlockIo::preallocate`] allocates its
//!    blocks before any data is written.
//! 3. [`submit_transfers`] passes [`FileTransfer`]s to the engine. After a short or interrupted
//!    system call the rest is submitted again.
//! 4. Each transfer completes once, in a thread of the engine: with all bytes moved, or with a
//!    [`DiskError`] that has file, offset and cause.
//! 5. A file is unlinked with its last handle. A dropped engine completes all requests, then ends.
//!
//! Deliberately absent: the layout of files, checksums, budgets and caching.

mod error;
mod file;
mod io;
mod progress;
mod threads;
mod transfer;
mod uring;

pub use error::{DiskError, DiskErrorKind, IoUnavailable, OsCode};
pub use file::{DISK_BLOCK, DirectFile};
pub use io::{BlockIo, Direction, IoCompletion, IoRequest};
pub use threads::{ThreadIo, ThreadPool};
pub use transfer::{FileTransfer, IoChoice, OpenedIo, open_io, submit_transfers};
pub use uring::UringIo;
