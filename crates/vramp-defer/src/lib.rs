//! Deferrable buffers: contents that leave a card while no lease holds them, and are restored
//! before their next use, at the same addresses. A program may keep more buffers than fit.
//!
//! ```
//! use vramp_defer::{Access, Deadline, LeaseRefused, SpillError, Tiers};
//! use vramp_tiers::Bytes;
//!
//! // The tiers: a simulated card of which 256 MiB may be used, and 1 GiB of pinned host memory.
//! // Without `device` it is the first card of the machine.
//! let config = r#"
//!     device = "sim:h200"
//!     [[gpu]]
//!     index = 0
//!     capacity = "256MiB"
//!     limit = 1.0
//!     [[host]]
//!     index = 0
//!     capacity = "1GiB"
//! "#;
//! let tiers = Tiers::from_toml(config)?;
//! let buffer = tiers.buffer(Bytes::mib(64))?;
//! buffer.write(Bytes::ZERO, b"first bytes")?;
//!
//! // Four buffers of 128 MiB do not fit: the first ones are evicted.
//! let stream = tiers.stream();
//! let buffers = (0..4).map(|_| tiers.buffer(Bytes::mib(128))).collect::<Result<Vec<_>, _>>()?;
//! for buffer in &buffers {
//!     let lease = buffer.lease(Access::Exclusive, stream)?;
//!     tiers.device().fill(tiers.queue(), lease.address(0), 7)?; // or a kernel
//! }
//! assert!(!buffer.is_resident() && buffers[3].is_resident());
//!
//! // A lease on two buffers restores those that were evicted. The stream waits for the copies,
//! // the host does not. A dropped lease ends once the work queued by then is complete.
//! let both = [(&buffers[0], Access::Shared), (&buffers[1], Access::Exclusive)];
//! let lease = tiers.lease(&both, stream)?;
//! assert_eq!(lease.address(0), buffers[0].addresses());
//! drop(lease);
//!
//! // An allocation that finds too little free memory evicts the missing bytes.
//! let block = tiers.allocator().malloc(Bytes::mib(160), stream)?;
//! tiers.allocator().free(block, stream)?;
//! for record in tiers.manager().history() {
//!     println!("{record}"); // the moved piece, its destination, and its cost
//! }
//!
//! // Three of them never fit at once: the lease is refused, with the sizes.
//! let three = [0, 1, 2].map(|index| (&buffers[index], Access::Shared));
//! let at_once = Deadline::from(std::time::Instant::now());
//! match tiers.manager().lease_on(&three, &[stream], at_once) {
//!     Err(SpillError::Refused(LeaseRefused::TooLarge { needed, capacity })) => {
//!         assert_eq!((needed, capacity), (Bytes::mib(384), Bytes::mib(256)));
//!     }
//!     // These may succeed later: other leases, work or memory are in the way.
//!     Err(SpillError::Refused(refused)) => println!("in the way: {refused}"),
//!     Err(SpillError::NoMemory { error, .. }) => println!("even after spilling: {error}"),
//!     // A driver call, the disk or the host pool failed. Contents stay where they were.
//!     Err(error) => return Err(error.into()),
//!     Ok(_) => unreachable!("384 MiB do not fit below 256 MiB"),
//! }
//!
//! let mut back = [0; 11];
//! buffer.read(Bytes::ZERO, &mut back)?;
//! assert_eq!(&back, b"first bytes");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `docs/deferrable.md` is the guide; `docs/reference/deferrable.md` has the rules, costs and limits.
//!
//! # Map
//!
//! The folder `core/` decides: it is the module [`planner`], a state machine without locks, clocks
//! and devices. The folder `shell/` performs its decisions: threads, copies, driver calls. No file
//! name occurs in both.
//!
//! | question | `core/` decides | `shell/` acts |
//! |---|---|---|
//! | Which request gets a lease, and when? | `lease`, `grant`, `wait_queue`, `overtake`, `uses` | `pool_request`, `acquire`, `queued_request`, `hand_over`, `watch`, `lease_builder`, `lease_owner`, `lease_set`, `stream_locks`, `lock_buffers` |
//! | What is overwritten? | `in_place` | `queued_request` |
//! | What is read in place? | `in_place` | `acquire`, `copies`, `mapped_copy` |
//! | Which pieces are evicted? | `cost`, `lists`, `listing`, `victims`, `cover`, `rates`, `spill_room` | `spill`, `choose`, `copy_out`, `transfers` |
//! | Where do they go? | `spill_room`, `rates`, `peers` | `copy_out`, `peer_stores`, `transfers` |
//! | Which buffer is evicted by its name? | `evict_one` | `spill` |
//! | What is restored? | `grant`, `move_orders`, `moves` | `restore` |
//! | Which host copies are dropped or moved? | `buffer_state`, `reclaim`, `peers` | `relieve`, `service` |
//! | What follows a failure? | `failure`, `refusal` | `spill_error` |
//! | What keeps a buffer on the card? | `pins`, `refusal` | `lease_set`, `buffer_handle`, `buffer_owner`, `pinned_memory` |
//! | What is the state? | `deferrables`, `buffer_state`, `range`, `status` | `state`, `events`, `buffer_events`, `emit` |
//! | Which statistics and checks are there? | `defer_config`, `census`, `audit` | `manager`, `report` |
//! | What memory of others is in use? | `adoption` | `homes`, `adopt` |
//! | What opens and closes the parts? | | `tiers`, `service` |
#![forbid(unsafe_code)]

// The folder is `core/`, as in every crate: pure code, checked by `cargo xtask tidy`. The module has
// another name because `core` is Rust's own.
mod kind;
#[path = "core/mod.rs"]
pub mod planner;
mod shell;
mod sync;

pub use crate::planner::{Access, BufferId, BufferProgress, BufferStatus, LeaseRefused, SpillTier};
pub use shell::{
    BufferGroup, DeferrableBuffer, LeaseBuilder, LeaseFuture, LeaseOwner, LeaseSet, LockId,
    ObjectTier, PeerPart, Pin, RestoreJob, SpillConfig, SpillError, SpillManager, SpillParts,
    SpillStats, StreamLock, Tiers, TiersError, TiersOptions,
};
pub use vramp_tiers::Deadline;

/// Settings beside [`SpillConfig`]: the cleaner and transfer rates.
pub mod config {
    pub use crate::planner::{DeferConfigError, Rates};
    pub use crate::shell::CleanerConfig;
}

/// Changes of buffers' states, for subscribers.
pub mod events {
    pub use crate::planner::{BufferId, BufferStatus, SpillTier};
    pub use crate::shell::{BufferChange, BufferEvent, EventStream, EventsError};
}

/// Statistics, records of moves and waits, and the state of each piece.
pub mod report {
    pub use crate::planner::{
        Copies, DeferCensus, DeferCounters, EvictionClass, EvictionCost, PeerId, PeerTable,
        PieceId, PieceState, Shortfall, SpillTier,
    };
    pub use crate::shell::{FailedMove, MoveKind, MoveRecord, SpillStats, Spilled, WaitRecord};
}

/// [`SpillError`] and every type that it names.
pub mod error {
    pub use crate::planner::{
        AddError, BufferLeaseId, DeferConfigError, EvictError, HeldError, Holds, LeaseRefused,
        MoveId, PieceId, PinError, RangeId, Ticket, UnknownBuffer, UnknownBufferLease,
        UnknownRange, UseToken,
    };
    pub use crate::shell::{AdoptFailed, FailedMove, SpillError};
    pub use vramp_alloc::graph::ArenaError;
    pub use vramp_alloc::range::HostBackingError;
    pub use vramp_alloc::{AllocError, DriverError};
    pub use vramp_core::Inconsistency;
    pub use vramp_driver::Stream;
    pub use vramp_tiers::movers::MoveError;
    pub use vramp_tiers::reserve::{LedgerError, Refusal, ReserveError, SpaceRefusal};
}
