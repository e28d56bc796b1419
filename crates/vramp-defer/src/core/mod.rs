//! The planner: pure decisions about the deferrable buffers of one card.
//!
//! A buffer is a row of *pieces* of one length. It has an address range for life, its own or a part
//! of a group's; which pieces are backed by memory changes. The life of a buffer:
//!
//! 1. [`Deferrables::add_buffer`], or [`Deferrables::add_tenant`] for one shorter than a piece. It
//!    is empty: no contents, no memory.
//! 2. [`Deferrables::lease`] grants the right to use a set of buffers, all or nothing. It returns
//!    the pieces to restore first ([`Restore`]) and the work that the streams wait for. A request
//!    that is refused may wait in the queue ([`Deferrables::enqueue`]).
//! 3. The shell maps memory, performs the restores and reports each result:
//!    [`Deferrables::settle`] once a move is observed complete, [`Deferrables::restore_queued`] for
//!    a restore that is only queued, [`Deferrables::abandon`] for one that failed.
//! 4. [`Deferrables::end_lease`] records the work that uses the buffers, and returns the copies that
//!    are stale now. [`Deferrables::cancel_lease`] ends a lease under which nothing was launched.
//!    [`Deferrables::complete_use`] forgets work that is complete.
//! 5. When memory is short, [`Deferrables::choose`] picks what leaves ([`Victim`]). Once a victim is
//!    settled it is off the card, and [`Deferrables::needed_memory`] returns what of its range still
//!    needs memory.
//! 6. When the host is short, [`Deferrables::reclaim_host`] drops copies and pushes others to disk.
//!    [`Deferrables::demote`] pushes old copies so that new victims find room there.
//!    When another card needs its memory, [`Deferrables::reclaim_peer`] does so for the copies there.
//!    When the link is idle, [`Deferrables::clean`] copies out ahead of need.
//! 7. [`Deferrables::discard`] forgets contents, [`Deferrables::remove`] ends the buffer.
//!
//! A call marks what it chooses, so no other call can choose it: nothing is spilled twice, and no
//! spill can cause another one of the same piece. A victim that is leased before it left stays.
//!
//! ```
//! use vramp_core::Bytes;
//! use vramp_defer::planner::{
//!     Access, DeferConfig, Deferrables, LeaseEnd, LeaseRequest, Settled, SpillDemand, SpillRoom,
//! };
//! let mut buffers = Deferrables::new(DeferConfig::new(Bytes::gib(1)))?;
//! let a = buffers.add_buffer(Bytes::mib(64))?.buffer;
//! let write = [(a, Access::Exclusive)];
//! let request = LeaseRequest { buffers: &write, ..LeaseRequest::default() };
//! let granted = buffers.lease(&request, 0)?;
//! buffers.end_lease(granted.lease, &LeaseEnd::default(), 10)?;
//!
//! let room = SpillRoom { host: Bytes::gib(8), ..SpillRoom::default() };
//! let demand = SpillDemand { deficit: Bytes::mib(20), room, ..SpillDemand::default() };
//! let choice = buffers.choose(&demand, 20);
//! assert_eq!(choice.victims.len(), 1); // one piece of the two
//! for out in &choice.victims[0].moves {
//!     // Copy it to `out.to`, wait for its uses, and then:
//!     assert!(matches!(buffers.settle(out.id)?, Settled::Spilled { .. }));
//! }
//! assert_eq!(buffers.occupied(), Bytes::mib(32));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Deliberately absent: memory, copies, files, streams, locks, threads and clocks. Time is a number
//! of nanoseconds that the caller passes. One thread at a time calls.

mod adoption;
mod audit;
mod buffer_state;
mod census;
mod cost;
mod cover;
mod defer_config;
mod deferrables;
mod evict_one;
mod failure;
mod grant;
mod groups;
mod ids;
mod in_place;
mod lease;
mod listing;
mod lists;
mod move_orders;
mod moves;
mod overtake;
mod peers;
mod pins;
mod range;
mod rates;
mod reclaim;
mod refusal;
mod spill_room;
mod status;
#[cfg(test)]
mod tests;
mod uses;
mod victims;
mod wait_queue;

pub use buffer_state::{Copies, Hint, PieceState};
pub use census::DeferCensus;
pub use cost::{EvictionClass, EvictionCost};
pub use defer_config::{DeferConfig, DeferConfigError, DeferCounters};
pub use deferrables::{AddedBuffer, Deferrables};
pub use evict_one::EvictError;
pub(crate) use failure::{Backoff, Failure, RestoreRetry, StagingRetry};
pub use ids::{
    Access, BufferId, BufferLeaseId, GroupSetId, HolderKey, MoveId, PeerId, PeerTable, PieceId,
    RangeId, RangeSlice, SpillTier, StreamKey, Ticket, UseToken,
};
pub use in_place::overwritten;
pub use lease::{BufferUse, GrantedLease, LeaseEnd, LeaseRequest, Writes, WrittenRange};
pub use move_orders::{Abandoned, CopyOut, Push, Restore, Settled, StaleCopy};
pub use rates::Rates;
pub use reclaim::{HostDemand, PeerDemand, Reclaim};
pub use refusal::{
    AddError, HeldError, Holds, LeaseEndError, LeaseRefused, PinError, SettleError, UnknownBuffer,
    UnknownBufferLease, UnknownMove, UnknownRange,
};
pub(crate) use spill_room::{AfterRound, EvictionRounds, allocation_deficit, other_pool_deficit};
pub use spill_room::{Shortfall, SpillRoom};
pub use status::{BufferProgress, BufferStatus};
pub use victims::{SpillDemand, Victim, VictimChoice};
