//! Files that bypass the page cache, and engines that move bytes between them and host memory.
//!
//! The life of a transfer:
//!
//! 1. [`open_io`] opens an engine, a [`BlockIo`]: [`UringIo`] where the kernel allows it,
//!    [`ThreadIo`] elsewhere.
//! 2. [`DirectFile::create`] makes a file that no other living process takes for abandoned, and
//!    [`BlockIo::preallocate`] gets its blocks before any data is entrusted to it.
//! 3. [`submit_transfers`] hands [`FileTransfer`]s to the engine. What a single call of the kernel moved may
//!    be short, or interrupted: the rest is asked for again.
//! 4. Each transfer is answered once, in a thread of the engine: all bytes moved, or a
//!    [`DiskError`] that names file, place and cause.
//! 5. A file loses its name with its last handle, and an engine ends when all is answered.
//!
//! Deliberately absent: which bytes lie where, checksums, budgets, and caching.

mod error;
mod file;
mod io;
mod open;
mod progress;
mod thread_pool;
mod threads;
mod transfer;
mod uring;

pub use error::{DiskError, DiskErrorKind, IoUnavailable, OsCode};
pub use file::{DISK_BLOCK, DirectFile};
pub use io::{BlockIo, Direction, IoCompletion, IoRequest};
pub use open::{IoChoice, OpenedIo, open_io};
pub use thread_pool::ThreadPool;
pub use threads::ThreadIo;
pub use transfer::{FileTransfer, submit_transfers};
pub use uring::UringIo;
