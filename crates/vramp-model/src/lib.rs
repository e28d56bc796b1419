//! PyTorch's caching allocator as a state machine: the presets `torch` and `torch-expandable`.
//!
//! Life of a request:
//!
//! 1. [`TorchPool::place`] learns which freed blocks are over, and looks for the best fit among the
//!    free blocks of the request's stream (`place.rs`).
//! 2. Failing that it asks the shell for a segment of the driver's, or for more of an expandable
//!    one to be mapped: a [`TorchStep::Perform`] with one [`TorchOp`].
//! 3. [`TorchPool::settle`] makes a performed operation true (`settle.rs`); one that failed changes
//!    nothing. If the card or the limit is full, unused segments are given back (`release.rs`).
//! 4. What is larger than needed is split, and the rest stays free.
//! 5. [`TorchPool::free`] merges the block with its free neighbours. One that other streams use waits
//!    for them first.
//!
//! Small requests (up to 1 MiB) and large ones have pools of their own, and each stream its own
//! free blocks: that, and segments that cannot be given back while any block in them is used, is
//! what makes PyTorch hold more than it needs.
//!
//! Deliberately absent: a device and a clock; captures of graphs and private pools; memory shared
//! between processes.
#![forbid(unsafe_code)]

mod arenas;
mod audit;
mod block;
mod config;
mod free;
mod layout;
mod parse;
mod place;
mod pool;
mod release;
mod restore;
mod segment;
mod settle;
mod stats;
#[cfg(test)]
mod tests;

pub use config::{Divisions, TorchConfig};
pub use layout::TorchStretch;
pub use parse::TorchConfigError;
pub use place::{TorchAttempt, TorchStep};
pub use pool::{TorchBlock, TorchPool};
pub use release::TorchRelease;
pub use restore::TorchSegment;
pub use segment::SegmentId;
pub use settle::{TorchOp, TorchPlan};
pub use stats::{Stat, StatByPool, TorchStats};
