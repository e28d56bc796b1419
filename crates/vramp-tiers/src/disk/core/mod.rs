//! Decisions of a disk store. Pure: times are arguments, and no file is touched.
//!
//! - [`compression`]: whether compressing a write pays, and which ranges of it are the sample.
//! - [`rates`]: throughput of the compressor and of the disk, from bytes and times.
//! - [`growth`]: how long the next file is, and what of an allocation is left after a bad block.

pub(super) mod compression;
pub(super) mod growth;
pub(super) mod rates;
