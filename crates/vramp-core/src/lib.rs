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
mod bytes;
mod heap;
mod ids;
mod pool;
mod waiting;

pub use arena::{
    Arena, ArenaAllocError, ArenaBlock, ArenaBlockId, ArenaBusy, ArenaCaptureError, ArenaCensus,
    ArenaFreeError, ArenaFreed, ArenaFull, ArenaPolicy, ArenaResetError, Layout, LayoutError,
    LeaseEndError, LeaseId, LeaseTaken, Leases, NodeId, Order, Overlap, Recording,
    UnknownArenaBlock, UnknownLease, UnknownNode, pack,
};
pub use bytes::{AddrRange, Bytes, DeviceAddr, ParseBytesError};
pub use heap::{Freed, StreamHeap};
pub use ids::{ArenaId, BlockId, ChunkId, Epoch, Mark, PoolAddr, SpanId, StreamId};
pub use pool::{
    AddedArena, ArenaMemory, Attempt, Block, Census, ConfigError, Counters, Inconsistency,
    Leftovers, Mixed, NotVacant, Op, PartKind, Plan, Policy, Pool, PoolConfig, Range, Request,
    Share, Shortage, Slab, Step, Stretch, StretchPart, UnknownBlock,
};
