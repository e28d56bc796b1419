//! A GPU memory allocator that avoids fragmentation by remapping: free physical pages are mapped
//! side by side where a large block is needed.
//!
//! ```
//! use vramp_alloc::{Allocator, Bytes, Config};
//!
//! let device = vramp_alloc::open("sim:h200")?;        // or "auto", "cuda:0"
//! let allocator = Allocator::new(device, Config::default())?;
//! let stream = allocator.create_stream()?;
//! let block = allocator.malloc(Bytes::mib(64), stream)?;
//! println!("{} at {}", block.len(), block.addr());     // give it to a kernel on the stream
//! allocator.free(block, stream)?;
//! println!("{}", allocator.census());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Two streams
//!
//! Memory belongs to the stream it was allocated for: memory freed there can be reused by that
//! stream's next request at once. Record work of another stream on a block with
//! [`Allocator::record_use`]; the block is reused once that work is complete.
//!
//! ```
//! # use vramp_alloc::{Allocator, Bytes, Config};
//! # let device = vramp_alloc::open("sim:h200")?;
//! let allocator = Allocator::new(device.clone(), Config::default())?;
//! let (compute, copies) = (allocator.create_stream()?, allocator.create_stream()?);
//! let block = allocator.malloc(Bytes::mib(64), compute)?;
//!
//! // The copy stream reads what the compute stream wrote: order it behind that work, then record
//! // the use.
//! let queue = |stream| allocator.stream(stream).expect("the stream was created above");
//! let event = device.create_event()?;
//! device.record(event, queue(compute))?;
//! device.wait(queue(copies), event)?;
//! allocator.record_use(&block, copies)?;
//! allocator.free(block, compute)?;      // never waits
//! # device.destroy_event(event)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A limit, and out of memory
//!
//! A request fails only after free memory of every stream was searched and remapped, the group's
//! other pools were trimmed and [handlers](Allocator::on_shortage) freed too little. The error
//! is a report: how much is reserved, allocated and free, by stream and by tag, and what to do.
//!
//! ```
//! # use vramp_alloc::{AllocError, Allocator, Bytes, Config};
//! # let device = vramp_alloc::open("sim:h200")?;
//! let config = Config { limit: Some(Bytes::gib(1)), ..Config::default() };
//! let allocator = Allocator::new(device, config)?;
//! let stream = allocator.create_stream()?;
//! let weights = allocator.malloc_tagged(Bytes::mib(700), stream, allocator.tag("weights"))?;
//! match allocator.malloc(Bytes::mib(400), stream) {
//!     Err(AllocError::OutOfMemory(report)) => {
//!         assert_eq!(report.shortage.limit, Some(Bytes::gib(1)));
//!         assert_eq!(report.tags[0].name, "weights");
//!         println!("{report}");
//!     }
//!     Err(error) => return Err(error.into()),
//!     Ok(_) => unreachable!("700 MiB of 1 GiB are allocated"),
//! }
//! allocator.free(weights, stream)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Cost
//!
//! Memory that the stream itself freed is allocated without a driver call; for memory of another
//! stream the driver's events are queried. A miss makes one create, map and set-access for each new
//! chunk, and one map and set-access for each chunk moved; [`Allocator::stats`] counts them.
//!
//! # Modules
//!
//! - [`config`], [`device`], [`error`], [`stats`], [`observe`]: settings, the driver and its types,
//!   errors and the out-of-memory report, statistics, events and shortage handlers;
//! - [`graph`]: memory for captured CUDA graphs; [`range`]: stable addresses, mapped on demand;
//! - [`kv`]: tensors of caches, whose pages are committed and given up together;
//! - [`sleep`]: pools whose memory leaves the card, and comes back at the same addresses;
//! - [`budget`]: what the process may have of a card that it shares with others;
//! - [`sharing`]: memory of several cards and processes, and registered memory;
//! - [`inspect`]: the pool's own state; [`backend`]: another allocator in place of the pool, such as
//!   those of `vramp-peers`;
//! - `history`: recorded events and snapshots for PyTorch's viewers. Needs the feature `history`,
//!   which is off by default: it brings the file formats of `vramp-trace` (zstd, CSV, JSON), which
//!   a program that only allocates does not need.
//!
//! Deliberately absent: globals, environment variables, threads (but that of an arena for caches that makes
//! pages ready ahead), placement policy (`vramp-core`), raw CUDA calls (`vramp-cuda`).
#![forbid(unsafe_code)]

mod allocation;
mod allocator;
mod arenas;
mod asleep;
pub mod backend;
pub mod budget;
mod cache;
mod completion;
pub mod config;
mod core;
pub mod device;
pub mod error;
mod exec;
pub mod graph;
mod group;
mod guard;
#[cfg(feature = "history")]
pub mod history;
pub mod inspect {
    //! The state of the virtual pool, for diagnostics: what [`Allocator::pool_state`] returns.
    //!
    //! [`Allocator::pool_state`]: crate::Allocator::pool_state

    pub use vramp_core::{
        ArenaId, ArenaMemory, Block, BlockId, Census, Counters, Epoch, Inconsistency, Mark,
        PartKind, Policy, Pool, PoolAddr, PoolConfig, Range, Share, SpanId, Stretch, StretchPart,
        UnknownBlock,
    };
}
pub mod kind;
pub mod kv;
mod live_bytes;
mod local;
#[cfg(all(test, loom))]
mod loom_models;
mod manager;
mod memory_stats;
pub mod observe;
pub mod range;
mod scopes;
mod seen_peaks;
mod shared;
pub mod sharing;
pub mod sleep;
pub mod stats;
mod stream_end;
mod sync;
mod tally;
mod thread_streams;
mod under_a_page;
mod virtual_pool;

pub use allocation::Allocation;
pub use allocator::Allocator;
pub use config::Config;
pub use device::{Driver, DriverError, open};
pub use error::{AllocError, CloseError, CreateError, FreeError};
pub use guard::AllocationGuard;
pub use stream_end::{StreamEnd, StreamWork};
pub use vramp_core::{Bytes, DeviceAddr, StreamId};
pub use vramp_host::HostReserve;
