//! Decisions of the host pool. Pure: sizes and query results are arguments.
//!
//! - [`growth`]: how much to pin next, and what to unpin.
//! - [`progress`]: which work is complete, with the fewest queries.

pub(super) mod growth;
pub(super) mod progress;
