//! Recorded workloads: what a program asked of a GPU's memory, and when.
//!
//! 1. A [`Trace`] is a recording as it was found: events, stacks, settings, the last state.
//! 2. A [`Workload`] is what one device of it needs to be replayed: requests on numbered blocks,
//!    with everything the recording left out repaired and counted.
//!
//! Deliberately absent: allocators and replay. This crate only says what was asked.
#![forbid(unsafe_code)]

mod repairs;
mod stacks;
mod trace;
mod workload;

pub use repairs::Repairs;
pub use stacks::{Frame, Stacks};
pub use trace::{
    ActionId, Block, BlockState, Event, EventKind, Segment, StackId, StreamIndex, Trace,
};
pub use workload::{Request, Workload};
