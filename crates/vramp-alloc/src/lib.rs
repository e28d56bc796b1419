//! One GPU memory manager: a pool that remaps instead of fragmenting.
//!
//! ```
//! use vramp_alloc::{Allocator, Bytes, Config, Preset};
//!
//! let device = vramp_alloc::open("sim:h200")?.driver;        // or "auto", "cuda:0"
//! let allocator = Allocator::new(device, Config::preset(Preset::Vramp))?;
//! let stream = allocator.create_stream()?;
//! let block = allocator.malloc(Bytes::mib(64), stream)?;
//! println!("{} at {}", block.len(), block.addr());     // give it to a kernel on the stream
//! allocator.free(block, stream)?;
//! println!("{}", allocator.census());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Which manager: [`Preset::Vramp`], the default, takes within a few percent of what the program
//! holds at any time; [`Preset::Vpmm`] is OpenVM's pool; [`Preset::StreamOrdered`] is the driver's
//! own; [`Preset::Torch`] and [`Preset::TorchExpandable`] are PyTorch's caching allocator. All stand
//! behind [`Allocator`].
//!
//! What it costs: memory that the stream itself freed is handed out without a driver call; memory
//! of another stream after asking about its events. A miss makes one create, map and set-access for each
//! new chunk, one map and set-access for each moved one; [`Stats`] counts them.
//!
//! Deliberately absent: globals, environment variables, threads, placement policy (`vramp-core`),
//! raw CUDA calls (`vramp-cuda`).
#![forbid(unsafe_code)]

mod allocation;
mod allocator;
mod arenas;
mod cache;
mod caching;
mod config;
mod error;
mod events;
mod exec;
mod graphs;
mod group;
mod history;
mod hosted;
mod local;
mod manager;
#[cfg(all(test, loom))]
mod models;
mod open;
mod ordered;
mod shared;
mod stable;
mod stats;
mod sync;
mod tally;
mod virtual_pool;
mod watch;

pub use allocation::Allocation;
pub use allocator::{Allocator, Stats, TagId};
pub use config::{Config, EnvError, Preset, Progress, UnknownPreset};
pub use error::{
    AllocError, ArenaError, CaptureError, CreateError, FreeError, Holder, LaunchError, PoolHolding,
    Report, StreamError, Tagged, UseError,
};
pub use graphs::{
    ArenaConfig, ArenaReport, AttachedCapture, Capture, CaptureReport, CapturedGraph, GraphArena,
    GraphHold, Lease,
};
pub use history::{OwnedFrames, Recording, StackSource};
pub use hosted::{HostBacking, HostedError};
pub use open::{OpenError, Opened, open};
pub use stable::{RangeMemory, StableRange};
pub use stats::MemoryStats;
pub use vramp_trace::{HistorySize, Trace};
pub use watch::{Event, Registration};

pub use vramp_core::NotVacant;
pub use vramp_core::{
    ArenaAllocError, ArenaBusy, ArenaFull, ArenaPolicy, ArenaResetError, Overlap,
};
pub use vramp_core::{
    Block, Bytes, Census, Counters, DeviceAddr, Epoch, Inconsistency, Mark, Mixed, Pool, PoolAddr,
    Shortage, StreamId,
};
pub use vramp_driver::{Call, CaptureMode, Driver, DriverError, ErrorKind};
pub use vramp_model::{Stat, StatByPool};
pub use vramp_model::{
    TorchConfig, TorchConfigError, TorchOp, TorchPool, TorchSegment, TorchStats,
};

/// The page people read first: its examples are tests here.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
