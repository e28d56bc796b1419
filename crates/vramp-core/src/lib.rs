//! The allocator's decisions as a pure state machine, and the units and ids of all crates.
//!
//! A [`Pool`] has the whole state of one device's memory: spans of addresses, chunks of physical
//! memory, blocks. A request returns a block, or a [`Plan`] of driver operations to perform first.
//! `vramp-alloc` performs plans on a device; tests perform them on a model of a device. The
//! same requests and the same reports of completed work always give the same decisions.
//!
//! ```
//! use vramp_core::{Attempt, Bytes, Mixed, Policy, Pool, PoolConfig, Request, Step};
//!
//! let (page, span) = (Bytes::mib(2), Bytes::gib(64));
//! let policy = Policy::Mixed(Mixed::default());
//! let mut pool = Pool::new(PoolConfig { page, span, first_span: span, limit: Some(Bytes::gib(1)), policy })?;
//! let stream = pool.add_stream();
//! let mut attempt = Attempt::new(Request { size: Bytes::mib(64), stream });
//! let block = loop {
//!     match pool.place(&mut attempt) {
//!         Step::Placed(block) => break block,
//!         // A shell performs `plan.ops` on its device here.
//!         Step::Perform(plan) => pool.settle(plan),
//!         Step::Short(shortage) => panic!("{} is more than the limit", shortage.requested),
//!         // Nothing is in flight, in caches or in arenas here.
//!         Step::Poll | Step::Gather | Step::Lend(_) | Step::Record(_) => {}
//!         Step::Slab(_) | Step::Backed => unreachable!("a block was requested"),
//!     }
//! };
//! assert_eq!(block.len, Bytes::mib(64));
//! pool.free(block.id, stream)?;
//! assert_eq!(pool.census().free, Bytes::mib(64));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! One malloc: [`Pool::place`] (`pool/state/place.rs`) tries the rungs of `pool/plan/place.rs`; on
//! a miss `pool/plan/build.rs` chooses chunks and returns a plan; the shell performs it;
//! [`Pool::settle`] (`pool/state/settle.rs`) changes the pool; `place` then finds the region and
//! carves the block. Small blocks come from a [`StreamHeap`] (`heap/`), blocks of captured graphs
//! from an [`Arena`] (`arena/`).
//!
//! Deliberately absent: devices, locks, clocks, environment variables, logs, hash order, `unsafe`.
#![forbid(unsafe_code)]

mod arena;
mod bytes;
mod heap;
mod ids;
mod pool;
mod room;
mod stat;
mod stream_table;
mod waiting;

pub use arena::{
    Arena, ArenaAllocError, ArenaBlock, ArenaBlockId, ArenaBusy, ArenaCaptureError, ArenaCensus,
    ArenaFreeError, ArenaFreed, ArenaFull, ArenaLeaseId, ArenaPolicy, ArenaResetError,
    CaptureRecording, Layout, LayoutError, LeaseEndError, LeaseTaken, Leases, NodeId, Order,
    Overlap, Packing, UnknownArenaBlock, UnknownArenaLease, UnknownNode, pack,
};
pub use bytes::{AddrRange, Bytes, DeviceAddr, ParseBytesError};
pub use heap::{Freed, StreamHeap};
pub use ids::{ArenaId, BlockId, ChunkId, Epoch, Mark, PoolAddr, SpanId, StreamId};
pub use pool::{
    AddedArena, ArenaMemory, Attempt, Block, Census, ChunkAt, ConfigError, Counters, FreeParts,
    Inconsistency, Leftovers, Mixed, NotPoolMemory, NotVacant, Op, PartCount, PartKind, Plan,
    Policy, Pool, PoolConfig, Quarantined, Range, Request, Share, Shortage, Slab, Step, Stretch,
    StretchPart, UnknownBlock,
};
pub use stat::{Stat, StatByPool};
pub use stream_table::StreamTable;
