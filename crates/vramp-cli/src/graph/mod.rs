//! `vramp graph`: what memory a captured graph of recorded work would need.
//!
//! 1. [`Job::new`] takes a device's requests of a recording, or of a window of it: what one capture
//!    allocates and frees.
//! 2. [`layouts()`] puts them through arenas of the core, as captures do: one that never reuses, one
//!    that does, and that one again by the plan that [`vramp_core::pack`] makes of its recording.
//! 3. [`Outcome`] holds all of them side by side with the bound that none can go below.
//!
//! A recording tells which stream a block is for and not what the streams wait for. So each stream
//! is a chain of captured work, and no two chains are ordered: memory never goes from one stream to
//! another, and what several streams used serves nobody again.
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
