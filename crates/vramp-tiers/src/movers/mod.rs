//! Copies between tiers, in steps, on streams of their own.
//!
//! ```
//! use vramp_tiers::host::{HostPool, HostPoolConfig};
//! use vramp_tiers::movers::{AddrRange, CopyDependency, Mover, MoverConfig};
//! use vramp_tiers::{Bytes, ReservationManager, SpaceConfig, SpaceId};
//!
//! let device = vramp_alloc::open("sim:h200")?;
//! let host = SpaceId::host(0);
//! let manager = ReservationManager::new([(host, SpaceConfig::host(Bytes::gib(1)))])?;
//! let space = manager.space(host).expect("it was configured");
//! let pool = HostPool::new(&space, HostPoolConfig::default(), [device.clone()])?;
//! let mover = Mover::new(device.clone(), &pool, MoverConfig::default())?;
//!
//! let range = AddrRange::new(device.alloc_memory(Bytes::mib(64))?, Bytes::mib(64));
//! let compute = device.create_stream()?;
//!
//! // Evict the range, behind the work queued on `compute`.
//! let blocks = pool.allocate(range.len)?;
//! let out = mover.to_host(range, blocks).after(CopyDependency::Stream(compute));
//! let mut out = out.start()?;
//! out.wait()?;
//!
//! // Restore it. Work queued on `compute` from here on runs after the copies.
//! let back = mover.to_device(range, out.into_host()).start()?;
//! let blocks = back.finish_on(compute)?;
//! drop(blocks);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The life of a transfer:
//!
//! 1. [`Mover::new`] creates two streams for each direction of one device.
//! 2. [`Mover::to_host`] and [`Mover::to_device`] return a [`TransferBuilder`], which names the
//!    work that has to come first. [`TransferBuilder::start`] returns a [`Transfer`].
//! 3. A transfer queues its range in steps and keeps a few of them in flight. It has no thread: it
//!    advances when the caller polls ([`Transfer::poll`]) or waits ([`Transfer::wait`]).
//!    [`wait_all()`] waits for several at once, of either direction.
//! 4. [`Transfer::cancel`], a [`CancelToken`](crate::CancelToken) or a drop ends it between two
//!    steps, after the copies in flight. [`Transfer::finish_on`] queues the rest and orders a
//!    stream behind it, without waiting on the host.
//! 5. [`Mover::to_disk`], [`Mover::from_disk`] and [`Mover::between`] copy through a few host
//!    blocks, staging buffers: one piece leaves them while the next one arrives.
//!
//! A [`Profiler`] measures the rates of all links.
//!
//! # Cost
//!
//! A step makes one copy call for each run of host blocks, one to record its event, and one to
//! query it or wait for it. With the default step a transfer of 64 MiB makes 12 driver calls.
//! Events are reused. No call waits for the whole device.
//!
//! # Errors
//!
//! [`MoveError`]; the source is unchanged. [`MoveFailed`] returns the host blocks with it. After an
//! error no copy is in flight, unless it is [`MoveError::Unsettled`].
//!
//! Deliberately absent: threads, budgets (the pool charges blocks and the store charges extents),
//! and choosing what to evict.

mod copy_queue;
mod core;
mod error;
mod hop;
mod mover;
mod profiler;
mod shared;
mod stored;
mod transfer;
mod wait_all;

pub(crate) use core::gather::Gather;
pub use core::profile::{MeasuredLink, MeasuredPair, Profile, UnmeasuredLink};
pub use error::{MoveError, MoveFailed};
pub use mover::{Mover, TransferBuilder};
pub use profiler::{Profiler, ProfilerConfig};
pub use shared::{CopyDependency, MoverConfig};
pub(crate) use stored::Stored;
pub use stored::{DiskBudget, DiskCopy};
pub use transfer::{Transfer, TransferProgress};
pub use wait_all::wait_all;

pub use vramp_alloc::{Driver, DriverError};
pub use vramp_core::AddrRange;
pub use vramp_driver::{Event, Stream};
pub use vramp_host::OutOfBounds;
