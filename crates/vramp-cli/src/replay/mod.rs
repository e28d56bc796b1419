//! The replay of one workload on one allocator of one device.
//!
//! 1. [`replay`] makes the allocator, with one stream for each stream of the workload.
//! 2. Requests are made in order. Which work is over follows from the trace: see `Outstanding`.
//! 3. The [`Outcome`] tells what was taken, what it cost and a digest of every address decision.
//!
//! Addresses and sizes are replayed; kernels are not. With [`Options::audit`] the simulator queues
//! stand-ins for them, so that it can tell whether memory was handed out too early.

mod audit;
mod engine;
mod fidelity;
mod outcome;
mod outstanding;
mod recorded;
mod start;

pub use engine::{Options, ReplayError, replay};
pub use fidelity::{Fidelity, Segments};
pub use outcome::{CallCount, Outcome};
pub use recorded::{Recorded, RecordedOom};
pub use start::EarlierSegment;

pub(crate) use engine::lingers;

use outstanding::Outstanding;
