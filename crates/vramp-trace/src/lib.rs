//! Recorded GPU memory workloads: traces, their file formats, and the requests to replay.
//!
//! 1. [`read_trace`] reads a PyTorch memory snapshot, an RMM log or a `.vtrace` file.
//! 2. A [`Trace`] holds the recording unchanged: events, call stacks, allocator settings and the
//!    segments at its end. [`Trace::write_vtrace`] writes the compact format of this project,
//!    [`Trace::write_snapshot`] a PyTorch snapshot, [`Trace::write_perfetto`] a timeline.
//! 3. A [`Workload`] is the sequence of requests on one device; [`Workload::all`] returns those of all
//!    devices in one pass, [`Trace::retain_devices`] selects some, and [`Trace::merge`] makes one
//!    trace of several. Requests name blocks by number
//!    instead of address. [`Repairs`] counts what had to be added or left out, because recordings
//!    begin in the middle and lose events; [`Coverage`] says how much of the past is missing.
//!
#![cfg_attr(feature = "formats", doc = "```")]
#![cfg_attr(not(feature = "formats"), doc = "```ignore")]
//! use vramp_core::Bytes;
//! use vramp_trace::{ReadError, ReadLimits, Workload, read};
//!
//! let log = "Thread,Time,Action,Pointer,Size,Stream
//! 1,16:06:30.678500,allocate,0x7f2e40000000,1024,0x0
//! 1,16:06:30.678600,allocate,0x7f2e40000400,4096,0x0
//! 1,16:06:30.678700,free,0x7f2e40000000,1024,0x0
//! 1,16:06:30.678800,free,0x7f2e40008000,2048,0x0";
//! let trace = read(log.as_bytes(), &ReadLimits::default())?;
//! let workload = Workload::from_trace(&trace, 0);
//! assert_eq!(workload.peak_live, Bytes::kib(7));
//!
//! // The last line frees a block that was allocated before the log began.
//! assert_eq!(workload.blocks, 3);
//! assert_eq!(workload.repairs.blocks_known_from_free, 1);
//!
//! // Untrusted files: limits bound time and memory, and an error says which limit was reached.
//! let limits = ReadLimits { events: 2, ..ReadLimits::default() };
//! let error = read(log.as_bytes(), &limits).unwrap_err();
//! assert!(matches!(error, ReadError::Limit { limit: "events", .. }));
//!
//! // For PyTorch's viewers. A log has no segments, so they are inferred from the events.
//! let mut trace = trace;
//! trace.infer_segments();
//! let mut file = Vec::new();
//! trace.write_snapshot(&mut file)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A running allocator records into a [`History`], a ring of its last events. A program that `vramp exec`
//! runs records into a file, [`spool`].
//!
//! Feature `formats` (default): reading and writing files. Without it the crate has the trace
//! types, [`Workload`] and [`History`], and depends on no parser or compressor.
//!
//! Deliberately absent: allocators and replay.
#![forbid(unsafe_code)]

mod annotation;
mod coverage;
mod devices;
#[cfg(feature = "formats")]
mod formats;
mod history;
mod infer;
mod labels;
mod repairs;
pub mod spool;
mod stacks;
mod trace;
mod workload;

pub use annotation::{Annotation, Stage};
pub use coverage::{Coverage, OlderBlocks};
pub use devices::UnknownDevice;
#[cfg(feature = "formats")]
pub use formats::{Format, ReadError, ReadLimits, read, read_trace};
pub use history::{History, HistorySize, Record};
pub use labels::{Label, Labels, PoolId};
pub use repairs::Repairs;
pub use stacks::{Frame, Stacks};
pub use trace::{
    ActionId, Block, BlockState, Event, EventKind, Segment, StackId, StreamIndex, Trace,
};
pub use workload::{Request, Workload};
