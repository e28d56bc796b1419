//! Recorded workloads: what a program asked of a GPU's memory, and when.
//!
//! 1. [`read_trace`] reads a PyTorch memory snapshot, an RMM log or a `.vtrace` file.
//! 2. A [`Trace`] is a recording as it was found: events, stacks, settings, the last state.
//!    [`Trace::write_vtrace`] keeps it in this project's own compact format.
//!    [`Trace::write_snapshot`] makes it a PyTorch snapshot again, [`Trace::write_perfetto`] a
//!    timeline.
//! 3. A [`Workload`] is what one device of it needs to be replayed: requests on numbered blocks,
//!    with everything the recording left out repaired and counted.
//!
//! ```
//! use vramp_core::Bytes;
//! use vramp_trace::{ReadLimits, Workload, read};
//!
//! let log = "Thread,Time,Action,Pointer,Size,Stream
//! 1,16:06:30.678500,allocate,0x7f2e40000000,1024,0x0
//! 1,16:06:30.678600,allocate,0x7f2e40000400,4096,0x0
//! 1,16:06:30.678700,free,0x7f2e40000000,1024,0x0";
//! let trace = read(log.as_bytes(), &ReadLimits::default())?;
//! let workload = Workload::from_trace(&trace, 0);
//! assert_eq!(workload.blocks, 2);
//! assert_eq!(workload.peak_live, Bytes::kib(5));
//! # Ok::<(), vramp_trace::ReadError>(())
//! ```
//!
//! A running allocator records into a [`History`], which makes a trace of its last events.
//!
//! Reading costs what [`ReadLimits`] allows and no more, whatever the file holds.
//!
//! Deliberately absent: allocators and replay. This crate only says what was asked.
#![forbid(unsafe_code)]

mod builder;
mod check;
mod error;
mod history;
mod infer;
mod input;
mod perfetto;
mod pickle;
mod read;
mod repairs;
mod rmm;
mod stacks;
mod trace;
mod vtrace;
mod workload;

pub use error::{ReadError, ReadLimits};
pub use history::{History, HistorySize, Record};
pub use read::{Format, read, read_trace};
pub use repairs::Repairs;
pub use stacks::{Frame, Stacks};
pub use trace::{
    ActionId, Block, BlockState, Event, EventKind, Segment, StackId, StreamIndex, Trace,
};
pub use workload::{Request, Workload};
