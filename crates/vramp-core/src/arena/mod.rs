//! Memory for captured graphs: one range of offsets whose blocks never move.
//!
//! A graph replays with the addresses with which it was captured, so a block of a capture stays where
//! it is as long as the graph lives, even after the program freed it. Life of an [`Arena`]:
//!
//! 1. [`Arena::begin`] starts a capture (`blocks.rs`). All that no live block holds is free for it:
//!    graphs of one arena never replay at the same time.
//! 2. The shell adds every captured node with its predecessors: [`Arena::add_node`] (`order.rs`).
//! 3. [`Arena::alloc`] finds an offset (`choose.rs`) for a point of a stream: the nodes on which its
//!    next node will depend. Freed memory is reused where the captured order proves that its last
//!    use is before that point (`space.rs`).
//! 4. [`Arena::end`] returns the [`CaptureRecording`]: which blocks were live when (`recording.rs`).
//! 5. [`pack()`] plans offsets for it that need hardly more than the peak of live bytes (`pack.rs`,
//!    `skyline.rs`). The next capture of the same shape follows the [`Layout`], as far as the same
//!    proof holds.
//! 6. A replay takes a lease (`lease.rs`). An arena without leases and work in flight may lend its
//!    memory.
//!
//! A block that outlives its capture stays until it is freed. Freed in a later capture, its memory
//! can be reused by that capture from there on: graphs of one arena are replayed in the order in
//! which they were captured, and a freed block's contents are not needed any more.
//!
//! Deliberately absent: addresses, pages, streams and driver calls. The owner of the memory behind
//! the offsets reads the high-water mark.

mod audit;
mod blocks;
mod bound;
mod candidates;
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
pub use lease::{
    ArenaBusy, ArenaLeaseId, LeaseEndError, LeaseTaken, Leases, Overlap, UnknownArenaLease,
};
pub use order::{NodeId, Order, UnknownNode};
pub use pack::{Packing, pack};
pub use plan::{Layout, LayoutError};
pub use recording::CaptureRecording;
