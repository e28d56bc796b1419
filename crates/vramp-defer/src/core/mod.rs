//! Deferrable buffers: contents that leave the card while nobody uses them, and come back before
//! the next use at the same address.
//!
//! A buffer is a row of *pieces* of one length. It has a range of addresses for life, its own or a
//! place in a group's; whether memory is behind a piece changes. The life of a buffer:
//!
//! 1. [`Deferrables::add_buffer`], or [`Deferrables::add_tenant`] for one shorter than a piece. It
//!    is empty: no contents, no memory.
//! 2. [`Deferrables::lease`] gives the right to use a set of buffers, all of them or none, and says
//!    which pieces to bring back first ([`Fill`]) and what work the streams wait for. Whoever is
//!    refused may line up and ask again; others do not pass it ([`Deferrables::line_up`]).
//! 3. The shell backs the ranges, performs the fills and tells what came of each:
//!    [`Deferrables::settle`] once a move is seen complete, [`Deferrables::queued`] for a fill that
//!    is only queued, [`Deferrables::abandon`] for one that failed.
//! 4. [`Deferrables::end_lease`] notes the work that uses the buffers, and which copies below the
//!    card are stale now; [`Deferrables::cancel_lease`] says that nothing was launched.
//!    [`Deferrables::use_over`] forgets work that is complete.
//! 5. When memory is short, [`Deferrables::choose`] picks what leaves ([`Victim`]). A settled one
//!    is off the card, and [`Deferrables::keep`] says what of its range is still needed.
//! 6. When the host is short, [`Deferrables::choose_lower`] drops copies and pushes others to disk.
//!    When the link is idle, [`Deferrables::clean`] copies out ahead of need.
//! 7. [`Deferrables::discard`] says that contents are not needed, [`Deferrables::remove`] ends it.
//!
//! What a call chooses is marked at once: nobody else can choose it, so nothing is spilled twice
//! and no spill can cause another of the same piece. A victim that is leased before it left stays.
//!
//! ```
//! use vramp_core::Bytes;
//! use vramp_defer::core::{
//!     Access, Deferrables, DeferConfig, LeaseEnd, LeaseRequest, Room, Settled, Short,
//! };
//! let mut buffers = Deferrables::new(DeferConfig::new(Bytes::gib(1)))?;
//! let a = buffers.add_buffer(Bytes::mib(64))?.buffer;
//! let write = [(a, Access::Exclusive)];
//! let request = LeaseRequest { buffers: &write, ..LeaseRequest::default() };
//! let granted = buffers.lease(&request, 0)?;
//! buffers.end_lease(granted.lease, &LeaseEnd::default(), 10)?;
//!
//! let room = Room { host: Bytes::gib(8), disk: Bytes::ZERO };
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
mod buffer;
mod census;
mod config;
mod cost;
mod cover;
mod deferrables;
mod errors;
mod expose;
mod holds;
mod ids;
mod in_place;
mod lease;
mod line;
mod lower;
mod moves;
mod piece;
mod range;
#[cfg(test)]
mod tests;
mod uses;
mod victims;

pub use buffer::Hint;
pub use census::{DeferCensus, DeferCounters};
pub use config::{DeferConfig, DeferConfigError, Rates, Room};
pub use cost::{Standing, Why};
pub use deferrables::{Added, Deferrables};
pub use errors::{
    AddError, ExposeError, HeldError, LeaseEndError, LeaseRefused, SettleError, UnknownBuffer,
    UnknownLease, UnknownMove, UnknownRange,
};
pub use expose::Grade;
pub use holds::Holds;
pub use ids::{
    Access, BufferId, Extent, HolderKey, LeaseId, Lower, MoveId, PieceId, RangeId, StreamKey,
    Ticket, UseToken,
};
pub use lease::{Granted, LeaseEnd, LeaseRequest, Use, Writes, Written};
pub use lower::{LowerChoice, LowerShort};
pub use moves::{Abandoned, CopyOut, Drop, Fill, Push, Settled};
pub use piece::{Copies, PieceState};
pub use victims::{Choice, Short, Shortfall, Victim};
