//! Statistics of a store.

use crate::extents::ExtentCensus;
use vramp_core::Bytes;
use vramp_host::{Direction, DiskErrorKind};

use super::{DiskTierError, StoreErrorKind};

/// Transfers in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStats {
    /// Transfers that moved all their bytes.
    pub transfers: u64,
    /// Bytes that these moved to or from the disk, before rounding to blocks.
    pub bytes: Bytes,
    /// Sum of their times from begin to end. Transfers that overlap count each.
    pub total_ns: u64,
    /// Transfers that failed or were cancelled.
    pub failed: u64,
}

/// Activity of a store since it was opened, and its present contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskStats {
    /// Name of the I/O engine; `objects` with a store of the program.
    pub engine: &'static str,
    /// True with direct I/O. False if the filesystem goes through the page cache.
    pub direct: bool,
    /// Writes.
    pub writes: TransferStats,
    /// Reads.
    pub reads: TransferStats,
    /// Pieces written elsewhere because the disk could not write their first place.
    pub relocated_pieces: u64,
    /// Media errors that the disk reported.
    pub media_errors: u64,
    /// Writes that failed because the disk or quota was full.
    pub full_errors: u64,
    /// Extents that failed verification when read.
    pub corrupt_extents: u64,
    /// Failed calls of [`ObjectStore::delete`](super::ObjectStore::delete).
    pub failed_deletes: u64,
    /// Savings and cost of compression.
    pub compression: CompressionStats,
    /// Files and their extents, added up.
    pub extents: ExtentCensus,
}

/// Savings and cost of compression in one store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompressionStats {
    /// Writes with at least one compressed frame.
    pub writes: u64,
    /// Bytes of those writes before compression.
    pub bytes: Bytes,
    /// Bytes of those writes on the disk, in whole blocks.
    pub on_disk: Bytes,
    /// Writes left uncompressed because the sample saved too little.
    pub saved_too_little: u64,
    /// Writes left uncompressed because the disk was faster than compressing.
    pub disk_faster: u64,
    /// Nanoseconds of compressing, samples included, over all threads.
    pub compressing_ns: u64,
    /// Bytes that decompression produced.
    pub decompressed: Bytes,
    /// Nanoseconds of decompressing, over all threads.
    pub decompressing_ns: u64,
}

/// Event counters of a store.
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
    /// Counts a transfer that has ended.
    pub fn count(
        &mut self,
        direction: Direction,
        bytes: Bytes,
        total_ns: u64,
        failed: Option<&DiskTierError>,
    ) {
        let stats = match direction {
            Direction::Write => &mut self.writes,
            Direction::Read => &mut self.reads,
        };
        let Some(error) = failed else {
            stats.transfers += 1;
            stats.bytes += bytes;
            stats.total_ns = stats.total_ns.saturating_add(total_ns);
            return;
        };
        stats.failed += 1;
        self.count_error(error);
    }

    /// Returns the statistics of a store that compresses nothing.
    pub fn stats(&self, engine: &'static str, direct: bool, extents: ExtentCensus) -> DiskStats {
        let Counters { writes, reads, relocated_pieces, media_errors, .. } = *self;
        let Counters { full_errors, corrupt_extents, .. } = *self;
        DiskStats {
            engine,
            direct,
            writes,
            reads,
            relocated_pieces,
            media_errors,
            full_errors,
            corrupt_extents,
            failed_deletes: 0,
            compression: CompressionStats::default(),
            extents,
        }
    }

    pub fn count_error(&mut self, error: &DiskTierError) {
        match error {
            DiskTierError::Disk(disk) if disk.kind == DiskErrorKind::Full => self.full_errors += 1,
            DiskTierError::Object { error, .. } if error.kind == StoreErrorKind::Full => {
                self.full_errors += 1;
            }
            DiskTierError::Corrupt { .. } | DiskTierError::CorruptObject { .. } => {
                self.corrupt_extents += 1;
            }
            _ => {}
        }
    }
}
