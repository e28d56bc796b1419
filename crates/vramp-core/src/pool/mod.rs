//! The virtual pool of one device: spans of addresses, chunks of physical memory, regions, blocks.
//!
//! Its modules depend on each other in one direction, from the first to the last of this list;
//! `cargo xtask tidy` checks that their imports form no circle:
//!
//! 1. `config`, `index`, `regions`, `chunks`, `free_chunks`, `streams`, `heap_waits`, `block`,
//!    `counters`: tables and values.
//! 2. `ops`: driver operations as values, and plans of them. `arenas`: address ranges of arenas.
//! 3. `request`: a request on its way up the ladder.
//! 4. `view`: a read-only view of all tables. `census`, `free_parts`, `audit` and `layout` read it.
//! 5. `plan/`: planners. They read a view and return plans and decisions.
//! 6. `state/`: [`Pool`] itself. Its fields are private to that folder, the only one that changes a
//!    pool: by the planners' decisions (`state/place.rs`), and by performed plans
//!    (`state/settle.rs`).

mod arenas;
mod audit;
mod block;
mod census;
mod chunks;
mod config;
mod counters;
mod free_chunks;
mod free_parts;
mod heap_waits;
mod index;
mod layout;
mod ops;
mod plan;
mod regions;
mod request;
mod state;
mod streams;
mod view;

pub use arenas::{AddedArena, ArenaMemory};
pub use audit::Inconsistency;
pub use block::{Block, ChunkAt, NotPoolMemory, Slab, UnknownBlock};
pub use census::{Census, PartKind, Quarantined, Share, Stretch, StretchPart};
pub(crate) use config::BLOCK_ALIGN;
pub use config::{ConfigError, Mixed, Policy, PoolConfig};
pub use counters::Counters;
pub use free_parts::{FreeParts, PartCount};
pub use ops::{Leftovers, Op, Plan, Range};
pub use plan::hosted::NotVacant;
pub use request::{Attempt, Request, Shortage, Step};
pub use state::Pool;
