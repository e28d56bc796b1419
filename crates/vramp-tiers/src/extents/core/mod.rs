//! The best-fit extent allocator. Pure: it counts bytes and touches none.

mod allocator;
#[cfg(test)]
mod tests;

pub use allocator::{BackingId, Extent, ExtentAllocator, ExtentCensus, ExtentList, OutOfExtents};
