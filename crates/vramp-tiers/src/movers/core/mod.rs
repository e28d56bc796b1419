//! Decisions of transfers. Pure: events are opaque values, and times are arguments.
//!
//! - [`window`]: which stream takes the next step, and how many steps are in flight.
//! - [`pipeline`]: which piece of a staged transfer begins or is waited for.
//! - [`profile`]: rates from measured times.
//! - [`turns`]: which of several transfers to wait for.

pub(crate) mod gather;
pub(super) mod pipeline;
pub(super) mod profile;
pub(super) mod turns;
pub(super) mod window;
