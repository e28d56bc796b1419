//! What vramp asks of the machine around the card: memory in whole pages, files that bypass the
//! page cache, and which cards, NUMA nodes and disks there are.
//!
//! [`HostMemory`] is memory that a device can be told to pin and a disk can read and write
//! directly. It is reached through copies, so no reference ever points into memory that a device
//! or a disk changes meanwhile.
//!
//! [`topology`] reads what the machine has off the kernel's files, and says what lies between two
//! devices.
//!
//! Deliberately absent: devices, budgets, policy, environment variables, and pools: a call here is
//! a call of the operating system.

mod disk;
mod memory;
pub mod topology;

pub use disk::{
    BlockIo, DISK_BLOCK, DirectFile, Direction, DiskError, DiskErrorKind, FileTransfer, IoChoice,
    IoCompletion, IoRequest, IoUnavailable, OpenedIo, OsCode, ThreadIo, ThreadPool, UringIo,
    open_io, submit_transfers,
};
pub use memory::{HostMemory, HostMemoryError, HostSpan, NumaNode, OutOfBounds, PageKind};
