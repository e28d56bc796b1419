//! The host side of vramp: page-aligned memory, direct disk I/O, and the topology of the machine.
//!
//! - [`HostMemory`] is memory that a driver can pin and that a disk can read and write directly.
//!   The host accesses it through copies, so no reference points into memory that a device or a
//!   disk may change.
//! - [`MappedMemory`] is memory that is mapped at addresses in pieces, for a simulated card.
//!   [`SharedFile`] exports ranges of it to other processes.
//! - [`SharedTable`] is numbers that several processes change by atomic instructions, with bells to wait
//!   on. [`lock_byte`] makes a lock that ends with its process.
//! - [`DirectFile`] is a preallocated file that bypasses the page cache. A [`BlockIo`] engine,
//!   io_uring or a thread pool, moves bytes between files and host memory.
//! - [`check_host`] tells before a request whether the process has memory for its records, and
//!   [`HostReserve`] keeps a request that is under way from aborting the process.
//! - [`topology`] reads GPUs, NUMA nodes, disks and network cards from sysfs and procfs, and
//!   classifies the PCIe path between two devices.
//! - [`barrier`] orders a fast path and a rare one, at the cost of the rare one.
//! - [`peer`] returns the process at the other end of a Unix socket.
//! - [`fork`] tells a forked child that locks and devices of its parent are out of its reach.
//!   [`PrivateFd`] is a descriptor that forked children do not have.
//!
//! ```
//! use std::sync::{Arc, mpsc};
//! use vramp_core::Bytes;
//! use vramp_host::{
//!     DirectFile, Direction, FileTransfer, HostMemory, HostSpan, IoChoice, PageKind, open_io,
//!     submit_transfers,
//! };
//!
//! # let dir = tempfile::tempdir()?;
//! let memory = HostMemory::new(Bytes::mib(1), None, PageKind::default())?;
//! memory.write(Bytes::ZERO, b"contents")?;
//!
//! // Access out of bounds is an error.
//! assert!(memory.write(Bytes::mib(1), &[0]).is_err());
//!
//! // Where the kernel forbids io_uring, a thread pool takes its place and `fell_back` says why.
//! let engine = open_io(IoChoice::Auto, 8)?;
//! let file = Arc::new(DirectFile::create(&dir.path().join("spill"))?);
//! file.preallocate(Bytes::mib(1))?; // A full disk is found here, before any data is written.
//! let (completed, completion) = mpsc::channel();
//! let transfer = FileTransfer {
//!     file,
//!     offset: Bytes::ZERO,
//!     span: HostSpan::new(&memory, Bytes::ZERO, Bytes::mib(1))?,
//!     direction: Direction::Write,
//!     done: Box::new(move |result| completed.send(result).expect("the receiver waits")),
//! };
//! submit_transfers(&engine.io, [transfer]);
//! completion.recv()??;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Deliberately absent: devices, budgets, policy, environment variables and pools.

pub mod barrier;
mod disk;
pub mod fork;
mod mapped;
mod memory;
pub mod peer;
mod private;
mod reserve;
mod shared;
mod table;
pub mod topology;

pub use disk::{
    BlockIo, DISK_BLOCK, DirectFile, Direction, DiskError, DiskErrorKind, FileTransfer, IoChoice,
    IoCompletion, IoRequest, IoUnavailable, OpenedIo, OsCode, ThreadIo, ThreadPool, UringIo,
    open_io, submit_transfers,
};
pub use mapped::{MapError, MappedMemory};
pub use memory::{HostMemory, HostMemoryError, HostSpan, NumaNode, OutOfBounds, PageKind};
pub use private::PrivateFd;
pub use reserve::{
    HostReserve, HostShortage, check_host, check_host_for, is_host_short, reserve_allocations,
};
pub use shared::{FileId, SharedFile, SharedKind, SharedRange};
pub use table::{SharedTable, TableShape, is_byte_locked, lock_byte};
