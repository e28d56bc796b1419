//! The reservation ledger as a pure state machine: budgets of memory spaces, reservations in them,
//! and the wait queue.
//!
//! [`ReservationManager`](crate::ReservationManager) runs one ledger and one queue behind a lock.
//! Use them directly for a simulator or for another front end.
//!
//! A *space* is one place that holds memory: a GPU, a NUMA node, a directory on a disk. Memory is
//! reserved before it is allocated:
//!
//! 1. A [`Strategy`] names the candidate spaces, the best first.
//! 2. [`WaitQueue::submit`] reserves in the first candidate with room, or queues the request.
//!    ([`Ledger::reserve`] bypasses the queue.)
//! 3. [`Ledger::charge`] accounts for an allocation. An allocation that exceeds its reservation is
//!    an [`Overrun`]: a [`LimitPolicy`] or the caller decides what happens, and
//!    [`Ledger::charge_overrun`] does it.
//! 4. [`Ledger::uncharge`] credits a free to the reservation that was charged.
//! 5. [`Ledger::release`] ends the reservation. What is still allocated stays charged to the space
//!    until it is freed.
//! 6. Every call that returns memory to a space says how much. The caller then calls
//!    [`WaitQueue::serve_waiters`], which grants the waiters that fit now.
//!
//! In every space, at any time:
//!
//! ```text
//! total = sum of max(size, used) over its reservations + orphaned + unreserved  <=  capacity
//! ```
//!
//! All levels ([`Level`]) are parts of one base, the capacity. [`Pressure`] compares them with the
//! total.
//!
//! ```
//! use vramp_tiers::ledger::{Charged, Ledger, Owner, Tag};
//! use vramp_tiers::{Bytes, SpaceConfig, SpaceId};
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
//! Deliberately absent: locks, condition variables, clocks, deadlines (a caller that gives up leaves the
//! queue), threads, callbacks, and the memory itself. One thread at a time calls.

pub(crate) mod core;
pub(crate) mod shell;

pub use core::*;
