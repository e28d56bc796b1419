//! Why a store could not keep or return bytes.

use std::path::PathBuf;

use crate::ledger::core::{ChargeError, SpaceId};
use vramp_core::Bytes;
use vramp_host::{DiskError, HostMemoryError, IoUnavailable, OsCode};

use super::DiskConfigError;
use crate::ledger::shell::error::SpaceFull;

/// Why a store could not do what it was asked. Nothing is charged or kept after a failed write,
/// and nothing stored is lost by a failed read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DiskTierError {
    /// The directory cannot be read.
    #[error("{}: no directory to keep files in ({code}): make it, or name another", .path.display())]
    NoDirectory {
        /// What was named.
        path: PathBuf,
        /// What the kernel said.
        code: OsCode,
    },
    /// The options make no sense.
    #[error(transparent)]
    Config(#[from] DiskConfigError),
    /// The kernel does not offer the engine that was chosen.
    #[error(transparent)]
    NoEngine(#[from] IoUnavailable),
    /// The disk failed, or is full.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// What was read is not what was written. Take the data from where it came from.
    #[error(
        "{}: {len} from {offset} on have the sum {found:#010x} and were written with \
         {expected:#010x}: the disk or somebody else changed them",
        .file.display()
    )]
    Corrupt {
        /// Which file.
        file: PathBuf,
        /// Where in the file.
        offset: Bytes,
        /// How many bytes the sum is of.
        len: Bytes,
        /// The sum when it was written.
        expected: u32,
        /// The sum of what was read.
        found: u32,
    },
    /// What was read has the sum of what was written, and is not what the compressor made.
    #[error(
        "{compressed} on the disk do not decompress to the {len} that they were: {why}; take the \
         data from where it came from"
    )]
    Garbled {
        /// What was compressed.
        len: Bytes,
        /// Into how much.
        compressed: Bytes,
        /// What the decompressor said.
        why: String,
    },
    /// The space has no room for bytes that no reservation pays for.
    #[error(transparent)]
    Full(#[from] SpaceFull),
    /// The reservation does not pay for so much.
    #[error(transparent)]
    NotReserved(#[from] ChargeError),
    /// The space is no disk's.
    #[error("{0} is no disk: give the store a space of the tier Disk")]
    NotADisk(SpaceId),
    /// A reservation of another space.
    #[error("a reservation in {given} does not pay for bytes in {store}: reserve there")]
    OtherSpace {
        /// The store's.
        store: SpaceId,
        /// The reservation's.
        given: SpaceId,
    },
    /// Bytes that another store keeps.
    #[error("the bytes are kept by another store: ask that one")]
    OtherStore,
    /// Memory of another length than what is stored.
    #[error("{stored} are stored and there is memory for {given}: give exactly as much")]
    Length {
        /// What is stored.
        stored: Bytes,
        /// The memory's length.
        given: Bytes,
    },
    /// There is no memory to put unaligned data in order.
    #[error(transparent)]
    NoMemory(#[from] HostMemoryError),
    /// It was cancelled before all of it had begun.
    #[error("cancelled: {moved} of {len} had moved")]
    Cancelled {
        /// What had moved.
        moved: Bytes,
        /// What there was to move.
        len: Bytes,
    },
}
