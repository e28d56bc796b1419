//! `vramp graph`: the memory of a captured graph of recorded work.
//!
//! 1. [`Job::new`] collects one device's requests of a recording, or of a window of it, as those of
//!    one capture.
//! 2. [`layouts()`] places them in arenas of the core, as captures do: in one that never reuses
//!    memory, in one that does, and in that one again by the plan that [`vramp_core::pack`] makes.
//! 3. [`Outcome`] holds the memory of each layout and the lower bound.
//!
//! A recording has the stream of each block and not the waits between streams. So each stream is a
//! chain of captured work, and no two chains are ordered: no stream reuses memory of another one,
//! and a block that several streams used is never reused.
//!
//! Deliberately absent: devices, and decisions about memory.

mod command;
mod job;
mod layouts;
mod outcome;
mod pool;

pub use job::{Job, JobError, Step, Window, WindowError};
pub use layouts::{GraphError, Layouts, layouts};
pub use outcome::Outcome;

pub(crate) use command::run;
