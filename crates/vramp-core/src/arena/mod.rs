//! Memory for captured graphs: one range of offsets whose blocks keep their place for ever.
//!
//! A graph replays with the addresses it was captured with, so a block of a capture stays where it
//! is as long as the graph lives, whatever became of it in the program. Life of an [`Arena`]:
//!
//! 1. [`Arena::begin`] starts a capture (`blocks.rs`). What no live block holds is free for it:
//!    graphs of one arena never replay at the same time.
//! 2. The shell tells every captured node with its predecessors: [`Arena::add_node`] (`order.rs`).
//! 3. [`Arena::alloc`] finds an offset (`choose.rs`) for a point of a stream, the nodes that its next node will
//!    depend on. Freed memory serves again where the captured order proves that its last use is
//!    before that point (`space.rs`).
//! 4. [`Arena::end`] returns the [`Recording`]: which blocks lived when (`recording.rs`).
//! 5. [`pack()`] plans offsets for it that need hardly more than the peak of live bytes (`pack.rs`, `skyline.rs`).
//!    The next capture of the same shape follows the [`Layout`], as far as the same proof holds.
//! 6. A replay takes a lease (`lease.rs`). An arena without leases and work may lend its memory.
//!
//! A block that outlives its capture stays until it is freed. Freed in a later capture, its memory
//! may serve that capture from there on: graphs of one arena are replayed in the order in which
//! they were captured, and whoever frees a block needs its contents no more.
//!
//! Deliberately absent: addresses, pages, streams and the driver's calls. Whoever owns the memory
//! behind the offsets reads the high-water mark.

mod audit;
mod blocks;
mod bound;
mod choose;
mod errors;
mod lease;
mod order;
mod pack;
mod plan;
mod recording;
mod skyline;
mod space;
#[cfg(test)]
mod tests;

pub use blocks::{Arena, ArenaBlock, ArenaBlockId, ArenaCensus, ArenaFreed, ArenaPolicy};
pub use errors::{
    ArenaAllocError, ArenaCaptureError, ArenaFreeError, ArenaFull, ArenaResetError,
    UnknownArenaBlock,
};
pub use lease::{ArenaBusy, LeaseEndError, LeaseId, LeaseTaken, Leases, Overlap, UnknownLease};
pub use order::{NodeId, Order, UnknownNode};
pub use pack::pack;
pub use plan::{Layout, LayoutError};
pub use recording::Recording;
