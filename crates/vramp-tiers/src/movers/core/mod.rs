//! Decisions of transfers. Pure: events are opaque values, and times are arguments.
//!
//! - [`window`]: which stream takes the next step, and how many steps are in flight.
//! - [`pipeline`]: which piece of a transfer begins or is waited for, and which of several transfers.
//! - [`profile`]: rates from measured times.

pub(crate) mod gather;
pub(super) mod pipeline;
pub(super) mod profile;
pub(super) mod window;
