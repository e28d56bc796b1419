//! Budgets that hold: tiers, their spaces, reservations, and who gets memory next.
//!
//! A *space* is one place that holds memory: a card, a NUMA node, a directory on a disk. Whoever
//! wants memory in it reserves first and allocates then. The life of a reservation:
//!
//! 1. A [`Strategy`] names the spaces that will do, the best first.
//! 2. [`Queue::submit`] reserves in the first that has room, or remembers who waits.
//!    ([`Ledger::reserve`] reserves past the queue.)
//! 3. [`Ledger::charge`] accounts for each allocation. What exceeds the reservation is a decision
//!    to make ([`Over`]), by a [`LimitPolicy`] or by the caller, and
//!    [`Ledger::charge_over`] performs it.
//! 4. [`Ledger::uncharge`] credits each free to the reservation that paid, wherever it happens.
//! 5. [`Ledger::release`] ends it. What is still allocated stays charged to the space and comes
//!    back as it is freed.
//! 6. After whatever returned memory to a space (each call says how much), [`Queue::on_change`]
//!    grants exactly the waiters that now fit.
//!
//! In every space, at any time:
//!
//! ```text
//! total = sum of max(size, used) over its reservations + orphaned + unreserved  <=  capacity
//! ```
//!
//! Levels ([`Level`]) are all measured against one base, the capacity; [`Pressure`] compares them
//! with the total.
//!
//! ```
//! use vramp_core::Bytes;
//! use vramp_tiers::{Charged, Ledger, Owner, SpaceConfig, SpaceId, Tag};
//! let gpu = SpaceId::gpu(0);
//! let mut ledger = Ledger::new([(gpu, SpaceConfig::gpu(Bytes::gib(8)))])?;
//! let sort = ledger.reserve(gpu, Bytes::gib(2), Owner(1), Tag::NONE)?;
//! assert_eq!(ledger.charge(sort, Bytes::gib(1))?, Charged::Within);
//! assert_eq!(ledger.release(sort)?, Bytes::gib(1));
//! assert_eq!(ledger.total(gpu)?, Bytes::gib(1)); // still allocated
//! assert_eq!(ledger.uncharge(sort, Bytes::gib(1))?, Bytes::gib(1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Deliberately absent: locks, condition variables, clocks (time is a number of nanoseconds that
//! the caller passes), threads, callbacks, and memory itself. One thread at a time calls.

mod audit;
mod books;
mod census;
mod charging;
mod claim;
mod deadlock;
mod errors;
mod ledger;
mod links;
mod order;
mod policy;
mod pressure;
mod queue;
mod record;
mod request;
mod space;
mod strategy;
#[cfg(test)]
mod tests;

pub use census::{SpaceCensus, SpaceCounters, TagCensus};
pub use deadlock::{Deadlock, Link, WayOut};
pub use errors::{
    Bound, ChargeError, GrowError, Holder, LedgerError, MergeError, Refused, ReserveError,
    SplitError, StaleReservation, UnchargeError, UnknownSpace, UnknownTag, UnreservedError,
};
pub use ledger::{Ledger, Merge, Reserved};
pub use links::{Distance, Hop, Links, Rate};
pub use policy::{Charged, FactorError, GrowthFactor, LimitPolicy, Over, OverAnswer, OverCharged};
pub use pressure::{Crossed, Pressure, Watch};
pub use queue::Queue;
pub use record::{Owner, Reservation, ReservationId, Tag};
pub use request::{
    Expired, Granted, Grants, Overtaking, Priority, QueueConfig, Request, SubmitError, Submitted,
    UnknownWaiter, WaiterId,
};
pub use space::{Level, LevelName, Levels, SpaceConfig, SpaceConfigError, SpaceId, Tier};
pub use strategy::{Candidates, Strategy, StrategyError};
