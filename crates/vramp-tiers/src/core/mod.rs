//! Free space of a host's slabs and a disk's files, as extents.

mod extents;
#[cfg(test)]
mod tests;

pub use extents::{Extent, ExtentCensus, ExtentList, Extents, NoExtents, SegmentId};
