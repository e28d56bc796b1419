//! Ids of segments.

use std::fmt;

/// Id of a segment of PyTorch's allocator: an allocation of the driver, or a range of addresses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(u32);

impl SegmentId {
    /// Returns the id with this number.
    pub const fn new(number: u32) -> SegmentId {
        SegmentId(number)
    }

    /// Returns the number as an index: ids are dense.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Debug for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment{}", self.0)
    }
}

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
