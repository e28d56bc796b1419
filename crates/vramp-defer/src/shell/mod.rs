//! Deferrable buffers: contents that leave the card while nobody uses them, at addresses that stay.
//!
//! 1. A [`SpillManager`] keeps a card's buffers, beside an allocator and a mover.
//! 2. A [`DeferrableBuffer`] has an address for life. Memory is behind it while it is needed.
//! 3. Each use takes a lease ([`SpillManager::lease`]) on all the buffers of a kernel: what is not
//!    there is brought, behind which the stream waits. The host does not. Where others hold it, who
//!    asks has its turn in the order of arrival (`turn.rs`).
//! 4. The lease ends when it is dropped: an event says when the stream has passed. No device is
//!    ever synchronised.
//! 5. When memory runs short, for a malloc, a lease or a reservation, just enough of what nobody
//!    uses leaves, piece by piece: copied to the host or the disk unless a copy is there, its memory
//!    lent to the pool. Other memory comes to the same addresses later.
//!
//! A buffer can be made readable while spilled: its copies are then mapped at its address, a kernel
//! reads them over the bus, and what is read often comes back (`hosted.rs`, `in_place.rs`).
//!
//! Whoever needs the memory does the work, in its own thread, with no lock held while it waits.
//! What is chosen is marked first, so nothing is spilled twice, and spilling never asks for memory
//! of the card, so it cannot cause itself.
//!
//! Deliberately absent: choosing, which is [`crate::core`]'s; user callbacks.

mod buffer;
mod cleaner;
mod config;
mod error;
mod events;
mod fill;
mod hosted;
mod in_place;
mod lease;
mod lower;
mod manager;
mod mount;
mod push;
mod report;
mod spill;
mod state;
mod turn;

pub use buffer::{DeferrableBuffer, Pin};
pub use config::{CleanerConfig, SpillConfig};
pub use error::SpillError;
pub use lease::{Exposure, LeaseSet};
pub use manager::{BufferGroup, SpillManager, SpillParts};
pub use report::{FailedMove, MoveRecord, Moved, SpillStats, Spilled, WaitRecord};
