//! The replay of one workload on one allocator of one device.
//!
//! 1. [`replay()`] creates the allocator, with one stream for each stream of the workload.
//! 2. It makes the requests in order. When work ends follows from the trace: see `PendingUses`.
//! 3. The [`Outcome`] holds the reserved memory, the driver calls and a digest of every address
//!    decision.
//!
//! A recording of several devices is one workload for each, replayed on a device of its own. [`Total`]
//! adds up the outcomes.
//!
//! Addresses and sizes are replayed; kernels are not. With [`Options::audit`] the simulator queues
//! stand-ins for kernels, so that it detects memory that is reused too early.
//!
//! The replay makes no decision about memory. The trace alone, and no clock, determines when work
//! ends, so that allocators get the same requests and make the same decisions on a card and on the
//! simulator.

mod audit;
mod engine;
mod fidelity;
mod initial;
mod outcome;
mod pending_uses;
mod recorded;
mod total;

pub use engine::{Options, ReplayError, has_pending_uses, replay};
pub use fidelity::{Fidelity, SegmentChanges};
pub use initial::InitialSegment;
pub use outcome::{CallCount, CurvePoint, Outcome, SCHEMA_VERSION};
pub use recorded::{Past, Recorded, RecordedOom, Reserved};
pub use total::Total;

use pending_uses::PendingUses;
