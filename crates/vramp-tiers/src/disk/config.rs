//! How a store keeps its bytes.

use vramp_core::Bytes;
use vramp_host::{DISK_BLOCK, IoChoice};

use super::CompressionConfig;

/// Whether what is read is compared with what was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// A CRC-32 for each extent, taken beside the transfer.
    #[default]
    Crc32,
    /// None: the disk is believed. What is compressed has sums anyway: one bit of it decides about
    /// many.
    Off,
}

/// Whether the directory shows the files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileNames {
    /// Files have no name. Their blocks are free again when the process ends, however it ends,
    /// also if no other ever comes to sweep: a job that is killed leaves a disk as it found it.
    /// What it takes meanwhile is told by [`stats`](super::DiskStore::stats) and `df`. (Where the
    /// filesystem has no such files, they are unlinked once they are made.)
    #[default]
    Hidden,
    /// Files are seen by `ls` and `du` as long as the store lives. What a killed process left is
    /// swept by the next store that opens the directory.
    Shown,
}

/// Options of a [`DiskStore`](super::DiskStore).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// How much is preallocated at a time, in one file: 1 GiB.
    pub file_size: Bytes,
    /// Which engine: io_uring where the kernel allows it, threads elsewhere.
    pub io: IoChoice,
    /// How many pieces are under way at the same time: 32, at most 64.
    pub depth: usize,
    /// The most that one call of the kernel moves: 1 MiB, at most 64 MiB.
    pub piece: Bytes,
    /// Whether reads are verified.
    pub checksum: Checksum,
    /// Whether the directory shows the files.
    pub names: FileNames,
    /// When to compress what is written: never, with `None`.
    pub compression: Option<CompressionConfig>,
}

impl Default for DiskConfig {
    fn default() -> DiskConfig {
        DiskConfig {
            file_size: Bytes::gib(1),
            io: IoChoice::Auto,
            depth: 32,
            piece: Bytes::mib(1),
            checksum: Checksum::Crc32,
            names: FileNames::Hidden,
            compression: None,
        }
    }
}

/// What is wrong with a [`DiskConfig`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskConfigError {
    /// Segments that hold no block, or more than files can.
    #[error("segments of {0}: use whole 4 KiB, from 4 KiB to 8 TiB")]
    FileSize(Bytes),
    /// Pieces that no direct transfer can move.
    #[error("pieces of {0}: use whole 4 KiB, from 4 KiB to 64 MiB")]
    Piece(Bytes),
    /// No request, or more than the engines take.
    #[error("a depth of {0}: use 1 to 64")]
    Depth(usize),
    /// Thousandths beyond a thousand.
    #[error("compression with {0} thousandths: use 0 to 1000")]
    PerMille(u16),
    /// The space counts in granules that blocks do not come in.
    #[error("the space's granule of {0} is no part of 4 KiB: real bytes come in whole 4 KiB")]
    Granule(Bytes),
}

impl DiskConfig {
    pub(super) fn check(&self, granule: Bytes) -> Result<(), DiskConfigError> {
        let fits = |bytes: Bytes, most: Bytes| {
            bytes.is_multiple_of(DISK_BLOCK) && !bytes.is_zero() && bytes <= most
        };
        if !fits(self.file_size, Bytes::tib(8)) {
            return Err(DiskConfigError::FileSize(self.file_size));
        }
        if !fits(self.piece, Bytes::mib(64)) {
            return Err(DiskConfigError::Piece(self.piece));
        }
        if !(1..=64).contains(&self.depth) {
            return Err(DiskConfigError::Depth(self.depth));
        }
        self.compression.map_or(Ok(()), CompressionConfig::check)?;
        match DISK_BLOCK.is_multiple_of(granule) {
            true => Ok(()),
            false => Err(DiskConfigError::Granule(granule)),
        }
    }
}
