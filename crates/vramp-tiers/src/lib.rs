//! Memory that is reserved before it is used: cards, pinned host memory and disks under budgets
//! that hold.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use vramp_alloc::{Allocator, Bytes, Config, Preset};
//! use vramp_tiers::{
//!     LimitPolicy, Policies, ReservationManager, Scope, SpaceConfig, SpaceId, Strategy, Tier,
//!     Tracked,
//! };
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
//! let memory = Tracked::new(allocator, &gpu, Policies::default());
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
//!    ([`wait`](RequestBuilder::wait)), or as much as there is ([`upto`](RequestBuilder::upto)).
//! 2. Who waits is woken with the reservation in hand, or with the reason why not: no wake-up is
//!    lost and nobody wakes in vain.
//!    Until then it makes room itself, if somebody can spill ([`MemorySpace::on_shortage`]).
//! 3. [`Tracked`] charges it with what is allocated. [`Reservation::charge`] does so for memory of
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

mod config;
mod disk;
mod extents;
mod host;
pub mod ledger;
mod movers;
mod sync;

pub use config::{
    Card, ConfigError, DiskSpaceConfig, GpuChoice, GpuSpaceConfig, HostBlocks, HostCapacity,
    HostPer, HostSpaceConfig, SpaceLevels, TiersBuilder, TiersConfig,
};
pub use disk::{
    ChargeTo, Checksum, CompressionConfig, CompressionStats, DiskConfig, DiskConfigError,
    DiskStats, DiskStore, DiskTierError, DiskTransfer, FileNames, StoredBytes, SweepReport,
    TransferStats,
};
pub use host::{
    HostAllocation, HostPool, HostPoolConfig, HostPoolError, HostPoolStats, SmallHostAllocation,
};
pub use ledger::core::{
    ChargeError, Crossed, Distance, GrowthFactor, Hop, Level, Levels, LimitPolicy, Links, Over,
    OverAnswer, Overtaking, Owner, Pressure, Priority, QueueConfig, Rate, Refused, ReservationId,
    SpaceCensus, SpaceConfig, SpaceId, SplitError, Strategy, Tag, TagCensus, Tier,
};
pub use ledger::shell::*;
pub use movers::{
    CopyDependency, CopyEndpoint, DiskBudget, DiskCopy, DiskSource, DiskTarget, GpuEndpoint,
    InFlightCopy, InFlightGpuCopy, InFlightRead, InFlightWrite, MeasuredLink, MeasuredPair,
    MoveError, MoveFailed, Mover, MoverConfig, Profile, Profiler, ProfilerConfig, StagedPiece,
    StagedTransfer, Transfer, TransferBuilder, TransferProgress, UnmeasuredLink,
};
pub use vramp_core::Bytes;
pub use vramp_host::{HostMemory, HostMemoryError, HostSpan, NumaNode, OutOfBounds, PageKind};
