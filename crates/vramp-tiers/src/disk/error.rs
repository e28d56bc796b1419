//! Errors of a disk store.

use std::path::PathBuf;

use crate::ledger::core::{ChargeError, SpaceId};
use vramp_core::Bytes;
use vramp_host::{DiskError, HostMemoryError, IoUnavailable, OsCode};

use super::{DiskConfigError, StoreError};
use crate::ledger::shell::error::SpaceFull;

/// Why an operation of a store failed. After a failed write nothing is charged or stored. A failed
/// read loses nothing that is stored.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DiskTierError {
    /// The directory cannot be read.
    #[error("{}: cannot read it ({code}): create the directory, or choose another", .path.display())]
    NoDirectory {
        /// Directory that was given.
        path: PathBuf,
        /// Error code of the kernel.
        code: OsCode,
    },
    /// The options are invalid.
    #[error(transparent)]
    Config(#[from] DiskConfigError),
    /// The kernel does not offer the chosen engine.
    #[error(transparent)]
    NoEngine(#[from] IoUnavailable),
    /// The disk failed or is full.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The bytes read differ from the bytes written. Restore the data from its source.
    #[error(
        "{}: {len} at {offset} have checksum {found:#010x} and were written with \
         {expected:#010x}: the disk or another process changed them; write them anew from \
         their source, all at once",
        .file.display()
    )]
    Corrupt {
        /// File that was read.
        file: PathBuf,
        /// First byte in the file.
        offset: Bytes,
        /// Bytes that the checksum covers.
        len: Bytes,
        /// Checksum of what was written.
        expected: u32,
        /// Checksum of what was read.
        found: u32,
    },
    /// The compressed bytes have the right checksum, but do not decompress.
    #[error(
        "{compressed} on the disk do not decompress to {len}: {why}; restore the data from its \
         source"
    )]
    Undecodable {
        /// Length before compression.
        len: Bytes,
        /// Length after compression.
        compressed: Bytes,
        /// Error of the decompressor.
        why: String,
    },
    /// The program's own store failed.
    #[error("{operation} of object {key} failed in the program's store: {error}")]
    Object {
        /// `put`, `get` or `delete`.
        operation: &'static str,
        /// Key of the object.
        key: u64,
        /// Error of the store.
        error: StoreError,
    },
    /// The program's own store returned other bytes than it was given.
    #[error(
        "object {key} of {len} has checksum {found:#010x} and was put with {expected:#010x}: its \
         store changed it"
    )]
    CorruptObject {
        /// Key of the object.
        key: u64,
        /// Length of the object.
        len: Bytes,
        /// Checksum of what was written.
        expected: u32,
        /// Checksum of what was read.
        found: u32,
    },
    /// The space cannot be charged.
    #[error(transparent)]
    Full(#[from] SpaceFull),
    /// The reservation cannot be charged.
    #[error(transparent)]
    NotReserved(#[from] ChargeError),
    /// The space is not of the tier Disk.
    #[error("{0} is not a disk: open the store with a space of the tier Disk")]
    NotADisk(SpaceId),
    /// The reservation is in another space.
    #[error("a reservation in {given} cannot pay for bytes in {store}: reserve in {store}")]
    OtherSpace {
        /// Space of the store.
        store: SpaceId,
        /// Space of the reservation.
        given: SpaceId,
    },
    /// Another store wrote the bytes.
    #[error("another store wrote the bytes: read them with that store")]
    OtherStore,
    /// The memory differs in length from the stored bytes.
    #[error("{stored} are stored and the memory has {given}: use memory of the same length")]
    Length {
        /// Length of the stored bytes.
        stored: Bytes,
        /// Length of the memory.
        given: Bytes,
    },
    /// The kernel has no memory for bounce blocks.
    #[error(transparent)]
    NoMemory(#[from] HostMemoryError),
    /// The transfer was cancelled before all pieces had begun.
    #[error("cancelled after {moved} of {len}")]
    Cancelled {
        /// Bytes transferred before.
        moved: Bytes,
        /// Bytes to transfer.
        len: Bytes,
    },
}

impl DiskTierError {
    /// Returns true if the stored bytes are damaged, so that reading again does not help.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            DiskTierError::Corrupt { .. }
                | DiskTierError::CorruptObject { .. }
                | DiskTierError::Undecodable { .. }
        )
    }
}
