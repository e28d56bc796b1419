//! Decisions about regions. Pure: callbacks are numbers, and regions are tags.

pub(super) mod callbacks;
