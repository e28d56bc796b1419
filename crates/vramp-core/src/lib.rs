//! The core of vramp: everything that decides, and nothing that acts.
//!
//! A [`Pool`] holds the whole state of one device's memory: spans of addresses, chunks of physical
//! memory, blocks. Asked for memory it returns a block, or a [`Plan`] of driver operations to be
//! performed first. The crate `vramp` performs plans on a device; tests perform them on paper. The
//! same requests and the same facts give the same decisions, always.
//!
//! One malloc, in hops: [`Pool::place`] (`place.rs`) climbs the ladder; on a miss `build.rs`
//! chooses chunks and writes a [`Plan`]; the shell performs it; [`Pool::settle`] (`settle.rs`)
//! makes it true; `place` again finds the region and carves the block.
//!
//! Deliberately absent: devices, locks, clocks, environment variables, logs, hash order, `unsafe`.
#![forbid(unsafe_code)]

mod arena;
mod assemble;
mod audit;
mod backing;
mod build;
mod bytes;
mod census;
mod chunk;
mod config;
pub mod defer;
mod fit;
mod heap;
mod hosted;
mod ids;
mod layout;
mod place;
mod plan;
mod pool;
mod region;
mod room;
mod settle;
mod stream;
pub mod tiers;
mod torch;
mod vpmm;

pub use arena::{
    Arena, ArenaAllocError, ArenaBlock, ArenaBlockId, ArenaBusy, ArenaCaptureError, ArenaCensus,
    ArenaFreeError, ArenaFreed, ArenaFull, ArenaPolicy, ArenaResetError, Layout, LayoutError,
    LeaseEndError, LeaseId, LeaseTaken, Leases, NodeId, Order, Overlap, Recording,
    UnknownArenaBlock, UnknownLease, UnknownNode, pack,
};
pub use audit::Inconsistency;
pub use backing::ArenaMemory;
pub use bytes::{AddrRange, Bytes, DeviceAddr, ParseBytesError};
pub use census::{Census, PartKind, Share, Stretch, StretchPart};
pub use config::{ConfigError, Mixed, Policy, PoolConfig};
pub use heap::{Freed, Slab, StreamHeap};
pub use hosted::NotVacant;
pub use ids::{ArenaId, BlockId, ChunkId, Epoch, Mark, SegmentId, SpanId, Spot, StreamId};
pub use place::{Attempt, Request, Shortage, Step};
pub use plan::{Leftovers, Op, Plan, Range};
pub use pool::{Block, Counters, Pool, UnknownBlock};
pub use torch::{
    Divisions, Stat, StatByPool, TorchAttempt, TorchBlock, TorchConfig, TorchConfigError, TorchOp,
    TorchPlan, TorchPool, TorchRelease, TorchSegment, TorchStats, TorchStep, TorchStretch,
};
