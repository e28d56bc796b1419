//! Deferrable buffers.
#![forbid(unsafe_code)]

// The folder is `core/`, as in every crate: pure code, checked by `cargo xtask tidy`. The module has
// another name because `core` is Rust's own.
#[path = "core/mod.rs"]
pub mod planner;
mod shell;
mod sync;

pub use crate::planner::{Access, BufferId, LeaseRefused};
pub use shell::{
    BufferGroup, DeferrableBuffer, LeaseSet, Pin, SpillConfig, SpillError, SpillManager,
    SpillParts, SpillStats,
};
pub use vramp_tiers::Deadline;

/// Settings beside [`SpillConfig`]: the cleaner and transfer rates.
pub mod config {
    pub use crate::planner::{DeferConfigError, Rates};
    pub use crate::shell::CleanerConfig;
}

/// Pointers that outlive a lease.
pub mod pointers {
    pub use crate::planner::{ExposeError, PointerScope};
    pub use crate::shell::{Exposure, Pin};
}

/// What moved, why, and what waited: statistics, records, and the state of each piece.
pub mod report {
    pub use crate::planner::{
        Copies, DeferCensus, DeferCounters, EvictionClass, EvictionCost, PieceId, PieceState,
        Shortfall, SpillTier,
    };
    pub use crate::shell::{FailedMove, MoveKind, MoveRecord, SpillStats, Spilled, WaitRecord};
}

/// [`SpillError`] and every type that it names.
pub mod error {
    pub use crate::planner::{
        AddError, BufferLeaseId, DeferConfigError, ExposeError, HeldError, Holds, LeaseRefused,
        MoveId, PieceId, RangeId, Ticket, UnknownBuffer, UnknownBufferLease, UnknownRange,
        UseToken,
    };
    pub use crate::shell::{FailedMove, SpillError};
    pub use vramp_alloc::graph::ArenaError;
    pub use vramp_alloc::range::HostBackingError;
    pub use vramp_alloc::{AllocError, DriverError};
    pub use vramp_core::Inconsistency;
    pub use vramp_driver::Stream;
    pub use vramp_tiers::movers::MoveError;
    pub use vramp_tiers::reserve::SpaceFull;
}
