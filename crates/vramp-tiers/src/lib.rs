//! Memory reservations for GPUs, pinned host memory and disks, within budgets.
//!
//! ```
//! use std::sync::Mutex;
//! use std::time::Duration;
//! use vramp_tiers::spill::SpillRequest;
//! use vramp_tiers::{
//!     Bytes, Priority, ReservationManager, ReserveError, SpaceConfig, SpaceId, Strategy, Tier,
//! };
//!
//! let gpu = SpaceId::gpu(0);
//! let manager = ReservationManager::new([
//!     (gpu, SpaceConfig::gpu(Bytes::gib(8))),
//!     (SpaceId::host(0), SpaceConfig::host(Bytes::gib(64))),
//! ])?;
//!
//! // A cache that can be dropped. Its spiller is called when a request has to wait.
//! let cache = manager.request(Strategy::Specific(gpu), Bytes::gib(6)).now()?;
//! let cache = Mutex::new(Some(cache));
//! let spiller = move |_: &SpillRequest<'_>| match cache.lock() {
//!     Ok(mut cache) => cache.take().map_or(Bytes::ZERO, |cache| cache.bytes()),
//!     Err(_) => Bytes::ZERO,
//! };
//! let space = manager.space(gpu).expect("it was configured");
//! let _registration = space.register_spiller(Priority(0), spiller);
//!
//! // 4 GiB of a GPU within ten seconds.
//! let sort = manager
//!     .request(Strategy::AnyInTier(Tier::Gpu), Bytes::gib(4))
//!     .deadline(Duration::from_secs(10))
//!     .wait()?;
//! assert_eq!(space.total(), Bytes::gib(4));
//!
//! // The error of a request that fails says what is available and which reservations are largest.
//! match manager.request(Strategy::Specific(gpu), Bytes::gib(4)).now() {
//!     Ok(_) => unreachable!("3.2 GiB are available"),
//!     Err(ReserveError::NotNow(refusal) | ReserveError::TimedOut(refusal)) => {
//!         assert!(refusal.available() < Bytes::gib(4));
//!         assert_eq!(refusal.spaces[0].largest[0].reservation, sort.id());
//!     }
//!     Err(error) => return Err(error.into()),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Life cycle of a reservation:
//!
//! 1. [`ReservationManager::request`] takes a [`Strategy`] and an amount; the builder adds
//!    priority, owner and deadline. It finishes with [`now`](RequestBuilder::now): all bytes or an
//!    error; [`wait`](RequestBuilder::wait): all bytes, in order;
//!    [`enqueue`](RequestBuilder::enqueue): the same for a task, which polls instead of waiting; or
//!    [`up_to`](RequestBuilder::up_to): as many as there are.
//! 2. While a request waits, its thread calls the spillers of the space ([`spill`]). It is woken
//!    once, with its reservation or with the reason why there is none.
//! 3. [`TrackedAllocator`] charges allocations of device memory to the reservation
//!    ([`tracked`]). [`Reservation::charge`] does so for other memory.
//! 4. A reservation can grow, shrink, split and merge.
//! 5. Dropping it returns the unused bytes, and the waiters that fit now are served in the same
//!    step.
//!
//! Where to find what:
//!
//! | module | content |
//! |---|---|
//! | [`reserve`] | requests, reservations, charges, and their errors |
//! | [`space`] | levels, pressure and statistics of a space |
//! | [`spill`] | spillers |
//! | [`wait`] | what waits are made of, in threads and in tasks |
//! | [`reclaim`] | memory that a reservation paid for and needs back |
//! | [`tracked`] | an allocator whose memory is charged to reservations |
//! | [`streams`], [`links`], [`notify`] | stream pools, transfer rates, notification channels |
//! | [`config`] | spaces read from TOML, or derived from the machine |
//! | [`host`], [`disk`] | pinned memory of a host space, files of a disk space |
//! | [`peer`] | free memory of another card, for data of this one |
//! | [`movers`] | transfers between a device, the host and disks |
//! | [`regions`] | memory that leaves the card by name, and comes back at the same addresses |
//! | [`ledger`] | the same budgets and wait queue as a pure state machine |
//!
//! Cost: a request that is served at once takes the lock once, and so do its release, and each
//! charged malloc and free. While other requests wait, a release that serves none costs the same;
//! one that serves a waiter costs O(waiters ahead of it).
//!
//! Deliberately absent: global state, environment variables, and decisions about which request gets
//! memory: [`ledger`] makes them. One value is thread-local: the spaces that a thread is spilling.
#![forbid(unsafe_code)]

pub mod config;
pub mod disk;
mod extents;
pub mod host;
mod kind;
pub mod ledger;
pub mod movers;
pub mod peer;
pub mod regions;
mod sync;
pub mod wait;

pub use disk::DiskStore;
pub use host::HostPool;
pub use ledger::core::{Owner, Priority, SpaceConfig, SpaceId, Strategy, Tier};
pub use ledger::shell::error::ReserveError;
pub use ledger::shell::manager::ReservationManager;
pub use ledger::shell::manager_config::ManagerConfig;
pub use ledger::shell::reservation::Reservation;
pub use ledger::shell::space::MemorySpace;
pub use ledger::shell::tracked::TrackedAllocator;
pub use ledger::shell::wait::{CancelToken, RequestBuilder};
pub use ledger::shell::{notify, reclaim, spill, streams, tracked};
pub use movers::Mover;
pub use peer::PeerStore;
pub use vramp_core::Bytes;
pub use wait::Deadline;

/// Requests for memory, the reservations they become, and why a request failed.
pub mod reserve {
    pub use crate::ledger::core::{
        Bound, Candidates, ChargeError, FactorError, GrowthFactor, Holder, LedgerError,
        LimitPolicy, MergeError, Overrun, OverrunAction, Overtaking, Owner, Priority, QueueConfig,
        ReservationId, ReservationRecord, SpaceRefusal, SplitError, StaleReservation, Strategy,
        StrategyError, Tag, UnknownSpace, UnknownTag, WaiterId,
    };
    pub use crate::ledger::shell::charge::{Charge, LimitRule, Payer};
    pub use crate::ledger::shell::error::{Refusal, ReserveError, SpaceFull, StuckOwner};
    pub use crate::ledger::shell::growth::GrowthRequest;
    pub use crate::ledger::shell::manager::ReservationManager;
    pub use crate::ledger::shell::manager_config::RetryPolicy;
    pub use crate::ledger::shell::manager_config::{DeadlockCheck, ManagerConfig};
    pub use crate::ledger::shell::reservation::{MergeRejected, MergeRejection, Reservation};
    pub use crate::ledger::shell::wait::{
        CancelToken, Enqueued, QueuedReservation, RequestBuilder,
    };
    pub use crate::wait::Deadline;
    pub use vramp_core::Inconsistency;
}

/// Memory spaces: their configuration, levels, pressure and statistics.
pub mod space {
    pub use crate::ledger::core::{
        Crossing, Level, LevelName, Levels, Pressure, SpaceCensus, SpaceConfig, SpaceConfigError,
        SpaceCounters, SpaceId, TagCensus, Tier,
    };
    pub use crate::ledger::shell::pressure::{PressureWatch, Subscription};
    pub use crate::ledger::shell::space::MemorySpace;
}

/// Transfer rates between spaces, by which strategies choose the nearest one.
pub mod links {
    pub use crate::ledger::core::{Distance, LinkKey, Links, Rate};
}
