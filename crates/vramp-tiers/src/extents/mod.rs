//! Free space of pinned host pools and of disk files, as extents of whole units.
//!
//! The host pool and the disk store both hand out ranges of a few large backings. Which ranges are
//! free is decided in [`core`]; what the bytes of a backing are is up to its owner.

mod core;

pub use core::{BackingId, Extent, ExtentAllocator, ExtentCensus, ExtentList, OutOfExtents};
