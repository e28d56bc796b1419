//! Deferrable buffers: contents that leave the card while nobody uses them, and come back before
//! the next use at the same address.
//!
//! A buffer is a row of *pieces* of one length. It has a range of addresses for life, its own or a
//! place in a group's; whether memory is behind a piece changes. The life of a buffer:
//!
//! 1. [`Deferrables::add_buffer`], or [`Deferrables::add_tenant`] for one shorter than a piece. It
//!    is empty: no contents, no memory.
//! 2. [`Deferrables::lease`] gives the right to use a set of buffers, all of them or none, and says
//!    which pieces to bring back first ([`Restore`]) and what work the streams wait for. Whoever is
//!    refused may line up and ask again; others do not pass it ([`Deferrables::enqueue`]).
//! 3. The shell backs the ranges, performs the fills and tells what came of each:
//!    [`Deferrables::settle`] once a move is seen complete, [`Deferrables::queued`] for a fill that
//!    is only queued, [`Deferrables::abandon`] for one that failed.
//! 4. [`Deferrables::end_lease`] notes the work that uses the buffers, and which copies below the
//!    card are stale now; [`Deferrables::cancel_lease`] says that nothing was launched.
//!    [`Deferrables::complete_use`] forgets work that is complete.
//! 5. When memory is short, [`Deferrables::choose`] picks what leaves ([`Victim`]). A settled one
//!    is off the card, and [`Deferrables::keep`] says what of its range is still needed.
//! 6. When the host is short, [`Deferrables::reclaim_host`] stale copies and pushes others to disk.
//!    When the link is idle, [`Deferrables::clean`] copies out ahead of need.
//! 7. [`Deferrables::discard`] says that contents are not needed, [`Deferrables::remove`] ends it.
//!
//! What a call chooses is marked at once: nobody else can choose it, so nothing is spilled twice
//! and no spill can cause another of the same piece. A victim that is leased before it left stays.
//!
//! ```
//! use vramp_core::Bytes;
//! use vramp_defer::planner::{
//!     Access, Deferrables, DeferConfig, LeaseEnd, LeaseRequest, SpillRoom, Settled, Short,
//! };
//! let mut buffers = Deferrables::new(DeferConfig::new(Bytes::gib(1)))?;
//! let a = buffers.add_buffer(Bytes::mib(64))?.buffer;
//! let write = [(a, Access::Exclusive)];
//! let request = LeaseRequest { buffers: &write, ..LeaseRequest::default() };
//! let granted = buffers.lease(&request, 0)?;
//! buffers.end_lease(granted.lease, &LeaseEnd::default(), 10)?;
//!
//! let room = SpillRoom { host: Bytes::gib(8), disk: Bytes::ZERO };
//! let short = Short { deficit: Bytes::mib(20), room, ..Short::default() };
//! let choice = buffers.choose(&short, 20);
//! assert_eq!(choice.victims.len(), 1); // one piece of the two
//! for out in &choice.victims[0].moves {
//!     // Copy it to `out.to`, wait for its uses, and then:
//!     assert!(matches!(buffers.settle(out.id)?, Settled::Spilled { .. }));
//! }
//! assert_eq!(buffers.occupied(), Bytes::mib(32));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Deliberately absent: memory, copies, files, streams, locks, threads and clocks (time is a number
//! of nanoseconds that the caller passes). One thread at a time calls.

mod audit;
mod buffer_state;
mod census;
mod cost;
mod cover;
mod defer_config;
mod deferrables;
mod expose;
mod failure;
mod grant;
mod holds;
mod host_reclaim;
mod ids;
mod in_place;
mod moves;
mod piece;
mod range;
mod rates;
mod refusal;
mod spill_room;
mod spill_rounds;
#[cfg(test)]
mod tests;
mod uses;
mod victims;
mod wait_queue;

pub use buffer_state::Hint;
pub use census::{DeferCensus, DeferCounters};
pub use cost::{EvictionClass, EvictionCost};
pub use defer_config::{DeferConfig, DeferConfigError};
pub use deferrables::{AddedBuffer, Deferrables};
pub use expose::PointerScope;
pub(crate) use failure::{Failure, RestoreRetry, StagingRetry};
pub use grant::{BufferUse, GrantedLease, LeaseEnd, LeaseRequest, Writes, WrittenRange};
pub use holds::Holds;
pub use host_reclaim::{HostDemand, HostReclaim};
pub use ids::{
    Access, BufferId, BufferLeaseId, HolderKey, MoveId, PieceId, RangeId, RangeSlice, SpillTier,
    StreamKey, Ticket, UseToken,
};
pub use moves::{Abandoned, CopyOut, Push, Restore, Settled, StaleCopy};
pub use piece::{Copies, PieceState};
pub use rates::Rates;
pub use refusal::{
    AddError, ExposeError, HeldError, LeaseEndError, LeaseRefused, SettleError, UnknownBuffer,
    UnknownBufferLease, UnknownMove, UnknownRange,
};
pub use spill_room::SpillRoom;
pub(crate) use spill_rounds::{AfterRound, SpillRounds, allocation_deficit};
pub use victims::{Shortfall, SpillDemand, Victim, VictimChoice};
