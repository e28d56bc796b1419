//! Pure parts of turns: names of entries, the order in which they hold the turn, and messages.
//!
//! No file, pipe, process or clock.

pub mod candidate;
pub mod entry;
#[cfg(test)]
mod model;
