//! `vramp replay`: the replay of one workload on one allocator of one device.
//!
//! 1. [`replay`] creates the allocator, with one stream for each stream of the workload.
//! 2. It makes the requests in order. When work ends follows from the trace: see `PendingUses`.
//! 3. The [`Outcome`] holds the reserved memory, the driver calls and a digest of every address
//!    decision.
//!
//! Addresses and sizes are replayed; kernels are not. With [`Options::audit`] the simulator queues
//! stand-ins for kernels, so that it detects memory that is reused too early.

mod audit;
mod command;
mod engine;
mod fidelity;
mod initial;
mod outcome;
mod pending_uses;
mod recorded;
mod table;

pub use engine::{Options, ReplayError, replay};
pub use fidelity::{Fidelity, SegmentChanges};
pub use initial::InitialSegment;
pub use outcome::{CallCount, Outcome};
pub use recorded::{Recorded, RecordedOom};

pub(crate) use command::{read, run};
pub(crate) use engine::has_pending_uses;

use pending_uses::PendingUses;
