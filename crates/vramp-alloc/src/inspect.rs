//! The state of the virtual pool, for diagnostics: what [`Allocator::inspect`] gives access to.
//!
//! [`Allocator::inspect`]: crate::Allocator::inspect

pub use vramp_core::{
    ArenaId, ArenaMemory, Block, BlockId, Census, Counters, Epoch, Inconsistency, Mark, PartKind,
    Policy, Pool, PoolAddr, PoolConfig, Range, Share, SpanId, Stretch, StretchPart, UnknownBlock,
};
