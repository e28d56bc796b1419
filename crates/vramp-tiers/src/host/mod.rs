//! Pinned host memory in blocks, charged to a space of the tier Host.
//!
//! Pinning is slow: 128 MiB take 4.6 ms in large pages and 43 ms in small ones. A [`HostPool`] pins
//! ahead of need, so that an allocation rarely waits for it.
//!
//! ```
//! use vramp_tiers::host::{HostPool, HostPoolConfig, HostPoolError};
//! use vramp_tiers::{Bytes, ReservationManager, SpaceConfig, SpaceId};
//!
//! let device = vramp_alloc::open("sim:h200")?;
//! let host = SpaceId::host(0);
//! let manager = ReservationManager::new([(host, SpaceConfig::host(Bytes::mib(256)))])?;
//! let space = manager.space(host).expect("it was configured");
//! let pool = HostPool::new(&space, HostPoolConfig::default(), [device.clone()])?;
//!
//! // Whole blocks of 1 MiB.
//! let mut blocks = pool.allocate(Bytes::kib(1500))?;
//! assert_eq!((blocks.len(), space.total()), (Bytes::mib(2), Bytes::mib(2)));
//! blocks.write(Bytes::ZERO, b"to the device")?;
//!
//! // A copy on a stream reads them. They are reused only after it.
//! let stream = device.create_stream()?;
//! let to = device.alloc_memory(Bytes::mib(2))?;
//! for slice in blocks.slices(&device, Bytes::ZERO, blocks.len())? {
//!     device.copy_to_device(stream, slice, to)?;
//! }
//! blocks.record_stream(&device, stream)?;
//! drop(blocks);
//! assert_eq!(space.total(), Bytes::ZERO);
//!
//! let full = pool.allocate(Bytes::gib(1)).unwrap_err();
//! assert!(matches!(full, HostPoolError::Full(_)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The life of a block:
//!
//! 1. [`HostPool::new`] maps host memory on a NUMA node and pins it for the given devices.
//! 2. [`HostPool::allocate`] charges the space or a reservation and takes free blocks, in as few
//!    runs as possible. When few blocks are left, a background thread pins more.
//! 3. [`HostAllocation::record_stream`] notes that work on a stream uses the blocks.
//! 4. Dropping the allocation credits the charge. Its blocks are free once that work is complete.
//! 5. [`HostPool::trim`] unpins memory that is wholly free. The background thread does so with what was free
//!    for [`HostPoolConfig::idle`], down to [`HostPoolConfig::keep`]. Memory that a device cannot unpin is
//!    quarantined and counted, and each later attempt includes it.
//!
//! [`HostPool::allocate_small`] carves allocations of up to a block from shared blocks.
//!
//! Neither pinned nor charged bytes ever exceed the capacity of the space.
//!
//! # Cost
//!
//! Allocation is O(log n) for each run and makes no driver call, unless returned blocks have to be
//! queried. Best fit keeps the runs few; each run is one copy.
//!
//! # Errors
//!
//! [`HostPoolError`]. A failed call charges nothing and changes no allocation.
//!
//! Deliberately absent: copies ([`movers`](crate::movers)), and choosing what to evict when the
//! space is full.

mod ahead;
mod allocation;
mod background;
mod config;
mod core;
mod idle;
mod part;
mod pool;
mod returns;
mod shared;
mod slabs;
mod small;

pub use allocation::{HostAllocation, HostReader};
pub use config::{HostPoolConfig, HostPoolError, HostPoolStats};
pub use pool::HostPool;
pub use small::SmallHostAllocation;

pub use vramp_alloc::{Driver, DriverError};
pub use vramp_driver::{HostSlice, Stream};
pub use vramp_host::{HostMemory, HostMemoryError, HostSpan, NumaNode, OutOfBounds, PageKind};
