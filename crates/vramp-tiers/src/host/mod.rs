//! Memory of the host in blocks: pinned, pooled, grown before it is needed.
//!
//! Pinning takes time: 4.6 ms for a pool of 128 MiB in large pages, 43 ms in small ones, so nobody
//! who needs memory should wait for it. A [`HostPool`] pins pools of equal blocks and lends the
//! blocks:
//!
//! 1. [`HostPool::new`] pins the first pools, on the NUMA node and for the devices it is told. On a
//!    machine without a device the memory is plain.
//! 2. [`HostPool::allocate`] takes blocks, charged to the space or to a reservation, in as few runs
//!    of neighbours as there are. When few are left, a thread of the pool pins more.
//! 3. [`HostAllocation::record_stream`] notes that work on a stream still uses them.
//! 4. Dropped, an allocation is no longer charged. Its blocks serve again once that work is done.
//! 5. [`HostPool::shrink`] unpins pools that are wholly free.
//!
//! What the pool holds is never above the capacity of its space, and neither is what is charged.
//!
//! Deliberately absent: copies, which are the movers', and choosing what leaves when it is full.

mod allocation;
mod grower;
mod pool;
mod returns;
mod small;

pub use allocation::HostAllocation;
pub use pool::{HostPool, HostPoolConfig, HostPoolError, HostPoolStats};
pub use small::SmallHostAllocation;
pub use vramp_host::{HostMemory, HostMemoryError, HostSpan, NumaNode, OutOfBounds, PageKind};
