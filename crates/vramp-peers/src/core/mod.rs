//! PyTorch's caching allocator as a pure state machine: the presets `torch` and `torch-expandable`.
//!
//! The pool makes decisions; the caller performs them on a device, or without one as here:
//!
//! ```
//! use vramp_peers::torch::{Bytes, Request, TorchAttempt, TorchConfig, TorchPool, TorchStep};
//!
//! let config: TorchConfig = "max_split_size_mb:128".parse()?;
//! let mut pool = TorchPool::new(config, Bytes::gib(80), None);
//! let stream = pool.add_stream();
//!
//! let mut attempt = TorchAttempt::new(Request { size: Bytes::mib(3), stream });
//! let block = loop {
//!     match pool.place(&mut attempt) {
//!         TorchStep::Placed(block) => break block,
//!         TorchStep::Perform(plan) => pool.settle(plan),     // after plan.op() on the device
//!         other => unreachable!("an empty pool neither polls nor waits: {other:?}"),
//!     }
//! };
//! assert_eq!(pool.stats().reserved_bytes.all.current, Bytes::mib(20).count());
//! assert_eq!(block.len, Bytes::mib(3));
//! assert!(pool.free(block.id, stream)?.is_empty());          // no other stream to wait for
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Life cycle of a request:
//!
//! 1. [`TorchPool::place`] frees blocks whose work is over, then searches the best fit among the
//!    free blocks of the request's stream (`place.rs`).
//! 2. On a miss it plans a new segment, or more mapped memory in an expandable one: a
//!    [`TorchStep::Perform`] with one [`TorchOp`].
//! 3. [`TorchPool::settle`] applies a performed operation to the state (`settle.rs`). A plan that
//!    is dropped changes nothing. If the card or the limit is full, unused segments are released
//!    (`release.rs`).
//! 4. A block that is larger than needed is split, and the rest stays free.
//! 5. [`TorchPool::free`] merges the block with its free neighbours. A block that other streams use
//!    waits for them first.
//!
//! Small requests (up to 1 MiB) and large ones have separate pools, each stream has its own free
//! blocks, and a segment is released only as a whole: this is why PyTorch reserves more than it
//! needs.
//!
//! Deliberately absent: a device and a clock; captures of graphs and private pools; memory shared
//! between processes.

mod addresses;
mod audit;
pub(crate) mod block;
mod config;
mod free;
mod layout;
mod parse;
mod place;
mod pool;
mod release;
mod restore;
mod settle;
mod stats;
#[cfg(test)]
mod tests;

pub use block::SegmentId;
pub use config::{Divisions, TorchConfig};
pub use layout::TorchStretch;
pub use parse::TorchConfigError;
pub use place::{TorchAttempt, TorchStep};
pub use pool::{TorchBlock, TorchPool};
pub use release::TorchRelease;
pub use restore::TorchSegment;
pub use settle::{TorchOp, TorchPlan};
pub use stats::TorchStats;

pub use vramp_core::{
    BlockId, Bytes, Counters, DeviceAddr, Epoch, Inconsistency, Mark, PartKind, PoolAddr, Request,
    Shortage, StreamId, Stretch, StretchPart, UnknownBlock,
};
