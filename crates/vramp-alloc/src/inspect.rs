//! The state of the virtual pool, for diagnostics: what [`Allocator::pool_state`] returns.
//!
//! [`Allocator::pool_state`]: crate::Allocator::pool_state

pub use vramp_core::{
    ArenaId, ArenaMemory, Block, BlockId, Census, Counters, Epoch, Inconsistency, Mark, PartKind,
    Policy, Pool, PoolAddr, PoolConfig, Range, Share, SpanId, Stretch, StretchPart, UnknownBlock,
};
