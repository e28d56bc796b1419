//! What a store has done.

use crate::extents::ExtentCensus;
use vramp_core::Bytes;
use vramp_host::DiskErrorKind;

use super::{CompressionStats, DiskTierError};

/// Transfers in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStats {
    /// Transfers that moved all their bytes.
    pub transfers: u64,
    /// Their bytes on the disk, not rounded.
    pub bytes: Bytes,
    /// Their times from begin to end, added up. Several at the same time count each.
    pub total_ns: u64,
    /// Transfers that failed or were cancelled.
    pub failed: u64,
}

/// What a store has done since it was opened, and what it holds now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskStats {
    /// Which engine moves the bytes.
    pub engine: &'static str,
    /// False if the filesystem has transfers go through the page cache.
    pub direct: bool,
    /// What was written.
    pub writes: TransferStats,
    /// What was read.
    pub reads: TransferStats,
    /// Pieces that went elsewhere for the disk could not write their first place.
    pub relocated_pieces: u64,
    /// Failures of the disk's medium.
    pub media_errors: u64,
    /// Writes that found no blocks.
    pub full_errors: u64,
    /// ExtentAllocator that were read back changed.
    pub corrupt_extents: u64,
    /// What compression saved, and took.
    pub compression: CompressionStats,
    /// The segments and what they hold.
    pub extents: ExtentCensus,
}

/// What is counted as it happens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub writes: TransferStats,
    pub reads: TransferStats,
    pub relocated_pieces: u64,
    pub media_errors: u64,
    pub full_errors: u64,
    pub corrupt_extents: u64,
}

impl Counters {
    pub fn count_error(&mut self, error: &DiskTierError) {
        match error {
            DiskTierError::Disk(disk) if disk.kind == DiskErrorKind::Full => self.full_errors += 1,
            DiskTierError::Corrupt { .. } => self.corrupt_extents += 1,
            _ => {}
        }
    }
}
