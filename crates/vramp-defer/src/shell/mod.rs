//! The shell: threads, copies and driver calls of a [`SpillManager`]. The planner decides.
//!
//! 1. A [`SpillManager`] keeps a card's buffers, beside an allocator and a mover.
//! 2. A [`DeferrableBuffer`] has an address for life. Memory is behind it while it is needed.
//! 3. Each use takes a lease ([`SpillManager::lease`]) on all the buffers of a kernel. What is not
//!    on the card is restored; the stream waits for that, the host does not. If other leases are in
//!    the way the request waits in order of arrival, and the thread that ends the wait hands the lease
//!    over (`acquire.rs`, `queued_request.rs`, `hand_over.rs`).
//! 4. Dropping the lease ends it: an event marks when the stream has passed. No device is ever
//!    synchronized.
//! 5. When memory is short for an allocation, a lease or a reservation, just enough unused pieces
//!    leave: copied to another card (`peer_stores.rs`), the host or the disk unless they have a copy,
//!    their memory lent to the pool.
//!    Other memory comes to the same addresses later (`spill.rs`, `copy_out.rs`, `restore.rs`).
//!
//! A buffer can be made readable while spilled: its copies are then mapped at its addresses, and
//! kernels read them over the bus (`mapped_copy.rs`).
//!
//! The thread that needs memory does the work, and holds no lock while it waits. Victims are marked
//! first, so nothing is spilled twice. Spilling allocates no memory of the card, so it cannot cause
//! itself.
//!
//! Locks, in this order: the manager's, then its allocator's or a budget's or a [`PeerStore`]'s, then the
//! driver's. A thread holds one manager's lock at most, and none while it waits for work, allocates on
//! another card, or calls back. So managers of cards that spill to each other never wait for each other:
//! a card without memory for a copy refuses it at once, and the copy goes to the host.
//!
//! [`PeerStore`]: vramp_tiers::PeerStore
//!
//! Deliberately absent: decisions, which are the [`planner`](crate::planner)'s; callbacks for changes: they are
//! recorded for subscribers, who read them on threads of their own (`buffer_events.rs`).

mod account;
mod acquire;
mod adopt;
mod buffer_events;
mod buffer_handle;
mod buffer_owner;
mod choose;
mod closed_disk;
mod copies;
mod copy_out;
mod emit;
mod events;
mod hand_over;
mod homes;
mod lease_builder;
mod lease_owner;
mod lease_set;
mod lock_buffers;
mod manager;
mod mapped_copy;
mod pay;
mod peer_stores;
mod pinned_memory;
mod pool_request;
mod queued_request;
mod read_copy;
mod relieve;
mod report;
mod restore;
mod room;
mod service;
mod spill;
mod spill_config;
mod spill_error;
mod state;
mod stream_locks;
mod tiers;
mod transfers;
mod watch;

pub use buffer_events::{BufferChange, BufferEvent, EventStream, EventsError};
pub use buffer_handle::DeferrableBuffer;
pub use buffer_owner::Pin;
pub use homes::AdoptFailed;
pub use lease_builder::{LeaseBuilder, LeaseFuture, RestoreJob};
pub use lease_owner::LeaseOwner;
pub use lease_set::LeaseSet;
pub use manager::{BufferGroup, SpillManager, SpillParts};
pub use peer_stores::PeerPart;
pub use report::{FailedMove, MoveKind, MoveRecord, SpillStats, Spilled, WaitRecord};
pub use spill_config::{CleanerConfig, SpillConfig};
pub use spill_error::SpillError;
pub use stream_locks::{LockId, StreamLock};
pub use tiers::{ObjectTier, Tiers, TiersError, TiersOptions};
