//! Memory that is reserved before it is used: cards, pinned host memory and disks under budgets
//! that hold.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use vramp_alloc::{Allocator, Bytes, Config, Preset};
//! use vramp_tiers::reserve::LimitPolicy;
//! use vramp_tiers::tracked::{Policies, Scope};
//! use vramp_tiers::{ReservationManager, SpaceConfig, SpaceId, Strategy, Tier, TrackedAllocator};
//!
//! let manager = ReservationManager::new([
//!     (SpaceId::gpu(0), SpaceConfig::gpu(Bytes::gib(8))),
//!     (SpaceId::host(0), SpaceConfig::host(Bytes::gib(64))),
//! ])?;
//!
//! // Two GiB of a card, as soon as it is our turn.
//! let sort = manager
//!     .request(Strategy::AnyInTier(Tier::Gpu), Bytes::gib(2))
//!     .deadline(Duration::from_secs(10))
//!     .wait()?;
//!
//! // All that is allocated on this stream is paid from it.
//! let device = vramp_alloc::open("sim:h200")?.driver;
//! let allocator = Arc::new(Allocator::new(device, Config::preset(Preset::Vramp))?);
//! let stream = allocator.create_stream()?;
//! let gpu = manager.space(SpaceId::gpu(0)).expect("it was configured");
//! let memory = TrackedAllocator::new(allocator, &gpu, Policies::default());
//! memory.attach(Scope::Stream(stream), sort)?;
//! let block = memory.malloc(Bytes::gib(1), stream)?;
//! assert_eq!(gpu.total(), Bytes::gib(2));
//!
//! // Without the reservation the block alone is charged, and nothing once it is freed.
//! drop(memory.detach(Scope::Stream(stream)));
//! assert_eq!(gpu.total(), Bytes::gib(1));
//! memory.free(block, stream)?;
//! assert_eq!(gpu.total(), Bytes::ZERO);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The life of a reservation:
//!
//! 1. [`ReservationManager::request`] says where, how much, how urgently and until when. Its last
//!    word asks: all [`now`](RequestBuilder::now) or nothing, all as soon as it is our turn
//!    ([`wait`](RequestBuilder::wait)), or as much as there is ([`up_to`](RequestBuilder::up_to)).
//! 2. Who waits is woken with the reservation in hand, or with the reason why not: no wake-up is
//!    lost and nobody wakes in vain.
//!    Until then it makes room itself, if somebody can spill ([`MemorySpace::register_spiller`]).
//! 3. [`TrackedAllocator`] charges it with what is allocated. [`Reservation::charge`] does so for memory of
//!    other kinds.
//! 4. It grows, shrinks, splits and merges.
//! 5. Dropping it returns the rest, and whoever fits now is served in the same step.
//!
//! [`MemorySpace::subscribe`] tells when a space fills up to its trigger and when it has emptied to
//! its stop.
//!
//! Which spaces there are is told in code, read from TOML ([`TiersConfig`]), or drawn up for the
//! machine ([`TiersBuilder`]).
//!
//! What it costs: a request that is served at once and its release are two turns of one lock; one
//! more turn for each malloc and each free. While others wait, a turn that can serve nobody costs
//! the same; one that serves somebody costs O(those ahead).
//!
//! [`HostPool`] holds the memory behind a host's space, [`DiskStore`] the files behind a disk's, and a
//! [`Mover`] moves data between them and a card. With all of them, a [`SpillManager`] keeps
//! [`DeferrableBuffer`]s, which leave the card while nobody uses them.
//!
//! Deliberately absent: globals (but which spaces a thread is spilling), environment variables, and
//! all decisions about who gets what, which are the ledger's and the queue's in
//! [`crate::ledger::core`] and [`vramp_defer::planner`].
#![forbid(unsafe_code)]

pub mod config;
pub mod disk;
mod extents;
pub mod host;
pub mod ledger;
pub mod movers;
mod sync;

pub use disk::DiskStore;
pub use host::HostPool;
pub use ledger::core::{Owner, Priority, SpaceConfig, SpaceId, Strategy, Tier};
pub use ledger::shell::error::ReserveError;
pub use ledger::shell::manager::{ManagerConfig, ReservationManager};
pub use ledger::shell::reservation::Reservation;
pub use ledger::shell::space::MemorySpace;
pub use ledger::shell::tracked::TrackedAllocator;
pub use ledger::shell::wait::{CancelToken, Deadline, RequestBuilder};
pub use ledger::shell::{notify, spill, streams, tracked};
pub use movers::Mover;
pub use vramp_core::Bytes;

/// Requests for memory, the reservations they become, and why a request failed.
pub mod reserve {
    pub use crate::ledger::core::{
        Bound, ChargeError, FactorError, GrowthFactor, Holder, LedgerError, LimitPolicy,
        MergeError, Overrun, OverrunAction, Overtaking, Owner, Priority, QueueConfig,
        ReservationId, ReservationRecord, SpaceRefusal, SplitError, StaleReservation, Strategy,
        StrategyError, Tag, UnknownTag,
    };
    pub use crate::ledger::shell::charge::{Charge, LimitRule, Payer};
    pub use crate::ledger::shell::error::{
        MergeRejected, MergeRejection, Refusal, ReserveError, SpaceFull, StuckOwner,
    };
    pub use crate::ledger::shell::manager::{DeadlockCheck, ManagerConfig, ReservationManager};
    pub use crate::ledger::shell::reservation::Reservation;
    pub use crate::ledger::shell::retry::RetryPolicy;
    pub use crate::ledger::shell::wait::{CancelToken, Deadline, RequestBuilder};
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
