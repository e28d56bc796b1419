//! How long files are, how many threads serve them, and what a bad block leaves of an allocation.

use vramp_core::Bytes;

use crate::disk::DISK_BLOCK;
use crate::extents::{Extent, ExtentCensus, ExtentList};

/// Most threads of a store that only takes checksums. One keeps up with some GiB per second.
const CHECKSUM_THREADS_MOST: usize = 4;
/// Most threads of a store that compresses. Compressing takes several times as long as a checksum.
pub(in crate::disk) const COMPRESSION_THREADS_MOST: usize = 8;

/// Returns the number of worker threads on a machine with `cores` cores.
pub(in crate::disk) fn worker_threads(cores: usize, compresses: bool) -> usize {
    match compresses {
        false => (cores / 4).clamp(1, CHECKSUM_THREADS_MOST),
        true => (cores / 2).clamp(1, COMPRESSION_THREADS_MOST),
    }
}

/// Lengths to try for a new file, longest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::disk) struct FileLen {
    len: Bytes,
    least: Bytes,
}

impl FileLen {
    /// Returns the first length to try when `missing` bytes lack space: `file_size`, or what
    /// `capacity` still allows, but not less than `missing`.
    ///
    /// Quarantined bytes are charged to no allocation, so they do not count against `capacity`.
    pub fn first(
        file_size: Bytes,
        capacity: Bytes,
        census: &ExtentCensus,
        missing: Bytes,
    ) -> FileLen {
        let allowed = capacity + census.quarantined;
        let allowed = allowed.saturating_sub(census.capacity).max(missing);
        let len = file_size.min(allowed.checked_round_up(DISK_BLOCK).unwrap_or(allowed));
        FileLen { len, least: len.min(missing) }
    }

    pub fn len(self) -> Bytes {
        self.len
    }

    /// Returns half the length, after the disk had no blocks for all of it. `None` if a shorter
    /// file would not hold what is missing.
    pub fn shorter(self) -> Option<FileLen> {
        let half = Bytes::new(self.len.count() / 2).round_down(DISK_BLOCK).max(self.least);
        (self.len > self.least).then_some(FileLen { len: half, ..self })
    }
}

/// Returns what is left of `extents` without `bad`, which lies within one of them.
pub(in crate::disk) fn without(extents: &ExtentList, bad: Extent) -> ExtentList {
    let rest = extents.iter().flat_map(|extent| {
        let hit = extent.backing == bad.backing
            && extent.offset <= bad.offset
            && bad.end() <= extent.end();
        let front = Extent { len: bad.offset.saturating_sub(extent.offset), ..*extent };
        let back =
            Extent { offset: bad.end(), len: extent.end().saturating_sub(bad.end()), ..*extent };
        if hit { [front, back] } else { [*extent, Extent { len: Bytes::ZERO, ..*extent }] }
    });
    rest.filter(|extent| !extent.len.is_zero()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extents::BackingId;

    #[test]
    fn a_quarter_of_the_cores_takes_checksums_and_half_of_them_compresses() {
        let table = [(1, 1, 1), (2, 1, 1), (4, 1, 2), (8, 2, 4), (16, 4, 8), (128, 4, 8)];
        for (cores, plain, compressing) in table {
            assert_eq!(worker_threads(cores, false), plain, "{cores} cores");
            assert_eq!(worker_threads(cores, true), compressing, "{cores} cores");
        }
    }

    #[test]
    fn a_new_file_is_as_long_as_configured_allowed_or_needed() {
        let mib = Bytes::mib;
        // Capacity of the files so far, quarantined bytes, bytes missing, and the length.
        let table = [
            (mib(0), mib(0), mib(1), mib(4)),
            (mib(6), mib(0), mib(1), mib(4)),
            (mib(8), mib(0), mib(1), mib(2)),
            (mib(10), mib(0), mib(1), mib(1)),
            (mib(10), mib(3), mib(1), mib(3)),
            (mib(0), mib(0), mib(9), mib(4)),
        ];
        for (capacity, quarantined, missing, expected) in table {
            let census = ExtentCensus { capacity, quarantined, ..ExtentCensus::default() };
            let first = FileLen::first(mib(4), mib(10), &census, missing);
            assert_eq!(first.len(), expected, "{capacity} {quarantined} {missing}");
        }
    }

    #[test]
    fn a_full_disk_is_tried_with_half_until_only_what_is_missing_is_left() {
        let census = ExtentCensus::default();
        let mut file = FileLen::first(Bytes::mib(4), Bytes::mib(64), &census, Bytes::kib(600));
        let mut lengths = vec![file.len()];
        while let Some(shorter) = file.shorter() {
            file = shorter;
            lengths.push(file.len());
        }
        assert_eq!(lengths, [Bytes::mib(4), Bytes::mib(2), Bytes::mib(1), Bytes::kib(600)]);
    }

    #[test]
    fn a_bad_block_leaves_what_lies_around_it() {
        let extent = |backing, offset, len| Extent {
            backing: BackingId(backing),
            offset: Bytes::kib(offset),
            len: Bytes::kib(len),
        };
        let list: ExtentList = [extent(0, 8, 24), extent(1, 8, 24)].into_iter().collect();
        let left = |bad| without(&list, bad).into_vec();
        let other = extent(1, 8, 24);
        assert_eq!(left(extent(0, 16, 8)), [extent(0, 8, 8), extent(0, 24, 8), other]);
        assert_eq!(left(extent(0, 8, 8)), [extent(0, 16, 16), other]);
        assert_eq!(left(extent(0, 24, 8)), [extent(0, 8, 16), other]);
        assert_eq!(left(extent(0, 8, 24)), [other]);
    }
}
