//! Which bytes of a sleeping pool are contents, and where they are in their copy.

use std::ops::Range;

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use crate::movers::Gather;

/// The contents of a pool: ranges in ascending order, which a copy has one behind the other.
#[derive(Clone, Debug)]
pub(super) struct Contents {
    bytes: Gather,
}

impl Contents {
    pub fn new(ranges: &[AddrRange]) -> Contents {
        Contents { bytes: Gather::new(ranges.iter().copied()) }
    }

    pub fn len(&self) -> Bytes {
        self.bytes.len()
    }

    pub fn ranges(&self) -> &[AddrRange] {
        self.bytes.ranges()
    }

    /// Returns the ranges of the bytes `part` of the copy.
    pub fn pieces(&self, part: Range<Bytes>) -> impl Iterator<Item = AddrRange> {
        self.bytes.pieces(part.start, part.end)
    }

    /// Returns where a range begins in the copy; `None` if some of it is not contents. O(log ranges).
    pub fn find(&self, range: AddrRange) -> Option<Bytes> {
        let end = range.checked_end()?;
        let ranges = self.bytes.ranges();
        let own = ranges.get(ranges.partition_point(|own| own.start + own.len <= range.start))?;
        (own.start <= range.start && end <= own.start + own.len).then(|| self.below(range.start))
    }

    /// Returns the bytes of contents below an address. O(log ranges).
    pub fn below(&self, address: DeviceAddr) -> Bytes {
        self.bytes.below(address)
    }
}

/// Returns the bytes of contents below each chunk's end: chunks `..n` have the first `ends[n - 1]`.
pub(super) fn ends(contents: &Contents, chunks: &[AddrRange]) -> Vec<Bytes> {
    chunks.iter().map(|chunk| contents.below(chunk.start + chunk.len)).collect()
}
