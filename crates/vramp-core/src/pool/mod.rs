//! The virtual pool of one device: spans of addresses, chunks of physical memory, regions, blocks.
//!
//! - `state.rs` and `settle.rs` hold the pool's state and are the only files that change it.
//! - `regions.rs`, `chunks.rs`, `streams.rs` and `index.rs` are the tables inside it.
//! - `plan/` reads the state and returns plans of driver calls.
//! - `audit.rs` checks every invariant, `census.rs` adds up every byte.

mod audit;
mod census;
mod chunks;
pub(crate) mod config;
mod index;
mod layout;
pub(crate) mod plan;
mod regions;
mod settle;
mod state;
mod streams;

pub use audit::Inconsistency;
pub use census::{Census, PartKind, Share, Stretch, StretchPart};
pub use config::{ConfigError, Mixed, Policy, PoolConfig};
pub(crate) use index::RegionKey;
pub use plan::{
    ArenaMemory, Attempt, Leftovers, NotVacant, Op, Plan, Range, Request, Shortage, Step,
};
pub(crate) use state::{BLOCK_ALIGN, note_use};
pub use state::{Block, Counters, Pool, UnknownBlock};
