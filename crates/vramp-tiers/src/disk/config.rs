//! Options of a disk store.

use vramp_core::Bytes;
use vramp_host::{DISK_BLOCK, IoChoice};

use super::CompressionConfig;

/// Whether reads are verified against a checksum of what was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// A CRC-32 for each extent, computed by workers during the transfer.
    #[default]
    Crc32,
    /// No checksums, except for compressed bytes: there one wrong bit changes many bytes.
    Off,
}

/// Whether the files of a store have names in its directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileNames {
    /// Files have no name (`O_TMPFILE`). The kernel frees their blocks when the process ends, even
    /// if it is killed. [`stats`](super::DiskStore::stats) and `df` show the bytes in use. On a
    /// filesystem without such files they are unlinked right after their creation.
    #[default]
    Hidden,
    /// Files are visible to `ls` and `du` until the store is dropped. The next store that opens the
    /// directory removes files of a killed process.
    Shown,
}

/// Options of a [`DiskStore`](super::DiskStore).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Bytes preallocated at a time, in one file. The default is 1 GiB.
    pub file_size: Bytes,
    /// I/O engine. The default is io_uring where the kernel allows it, else threads.
    pub io: IoChoice,
    /// Most pieces in flight, from 1 to 64. The default is 32.
    pub depth: usize,
    /// Most bytes of one I/O request, up to 64 MiB. The default is 1 MiB.
    pub piece: Bytes,
    /// Whether reads are verified against checksums.
    pub checksum: Checksum,
    /// Whether the files have names in the directory.
    pub names: FileNames,
    /// When writes are compressed. `None` for never.
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

/// Why a [`DiskConfig`] was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskConfigError {
    /// The file size is not whole blocks, or out of range.
    #[error("files of {0}: use whole 4 KiB, from 4 KiB to 8 TiB")]
    FileSize(Bytes),
    /// The piece size is not whole blocks, or out of range.
    #[error("pieces of {0}: use whole 4 KiB, from 4 KiB to 64 MiB")]
    IoPiece(Bytes),
    /// The depth is zero, or more than the engines accept.
    #[error("a depth of {0}: use 1 to 64")]
    Depth(usize),
    /// The number of threads is zero or too high.
    #[error("{0} threads: use 1 to 64")]
    Threads(usize),
    /// A share exceeds 1000 thousandths.
    #[error("compression with {0} thousandths: use 0 to 1000")]
    PerMille(u16),
    /// The granule of the space does not divide 4 KiB.
    #[error(
        "the space's granule of {0} does not divide 4 KiB: disk bytes are charged in whole 4 KiB"
    )]
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
            return Err(DiskConfigError::IoPiece(self.piece));
        }
        if !(1..=64).contains(&self.depth) {
            return Err(DiskConfigError::Depth(self.depth));
        }
        if let Some(excess) = self.compression.and_then(CompressionConfig::excess) {
            return Err(DiskConfigError::PerMille(excess));
        }
        match DISK_BLOCK.is_multiple_of(granule) {
            true => Ok(()),
            false => Err(DiskConfigError::Granule(granule)),
        }
    }
}
