//! Deferrable buffers: contents that leave the card while nobody uses them, at addresses that stay.
//!
//! 1. A [`SpillManager`] keeps a card's buffers, beside an allocator and a mover.
//! 2. A [`DeferrableBuffer`] has an address for life. Memory is behind it while it is needed.
//! 3. Each use takes a lease ([`SpillManager::lease`]) on all the buffers of a kernel: what is not
//!    there is brought, behind which the stream waits. The host does not. Where others hold it, who
//!    asks has its turn in the order of arrival (`queued_request.rs`).
//! 4. The lease ends when it is dropped: an event says when the stream has passed. No device is
//!    ever synchronised.
//! 5. When memory runs short, for a malloc, a lease or a reservation, just enough of what nobody
//!    uses leaves, piece by piece: copied to the host or the disk unless a copy is there, its memory
//!    lent to the pool. Other memory comes to the same addresses later.
//!
//! A buffer can be made readable while spilled: its copies are then mapped at its address, a kernel
//! reads them over the bus, and what is read often comes back (`mapped_copy.rs`, `acquire.rs`).
//!
//! Whoever needs the memory does the work, in its own thread, with no lock held while it waits.
//! What is chosen is marked first, so nothing is spilled twice, and spilling never asks for memory
//! of the card, so it cannot cause itself.
//!
//! Deliberately absent: choosing, which is [`crate::planner`]'s; user callbacks.

mod acquire;
mod buffer_handle;
mod cleaner;
mod copy_out;
mod events;
mod lease_set;
mod manager;
mod map_copies;
mod mapped_copy;
mod push_copy;
mod queued_request;
mod relieve_host;
mod report;
mod restore;
mod spill;
mod spill_config;
mod spill_error;
mod staging;
mod state;

pub use buffer_handle::{DeferrableBuffer, Pin};
pub use lease_set::{Exposure, LeaseSet};
pub use manager::{BufferGroup, SpillManager, SpillParts};
pub use report::{FailedMove, MoveKind, MoveRecord, SpillStats, Spilled, WaitRecord};
pub use spill_config::{CleanerConfig, SpillConfig};
pub use spill_error::SpillError;
