//! Deferrable buffers.
#![forbid(unsafe_code)]

pub mod core;
mod shell;
mod sync;

pub use crate::core::{
    Access, BufferId, DeferCensus, DeferCounters, Grade, PieceState, Rates, Shortfall,
};
pub use shell::*;
