//! A block of memory as its user holds it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use vramp_core::{ArenaBlockId, ArenaId, BlockId, Bytes, DeviceAddr, PoolAddr, StreamId};

/// An allocated block. [`Allocator::free`](crate::Allocator::free) takes it by value, so a second
/// free does not compile.
///
/// Dropping it without a free leaks the memory until the allocator is closed: nothing says when
/// work on it ends.
#[must_use = "a block that is dropped without a free leaks until the allocator is closed"]
pub struct Allocation {
    pub(crate) addr: DeviceAddr,
    pub(crate) len: Bytes,
    pub(crate) requested: Bytes,
    pub(crate) stream: StreamId,
    pub(crate) owner: Owner,
    /// Number of the allocator.
    pub(crate) allocator: u64,
    /// One more than the index of its tag; zero for none.
    pub(crate) tag: u16,
    /// True if it came from a thread's cache: the pool did not see the work on it before.
    pub(crate) from_cache: bool,
    /// True once a use on another stream was recorded.
    pub(crate) has_recorded_uses: AtomicBool,
}

/// Memory that a manager allocated.
pub(crate) struct Found {
    pub addr: DeviceAddr,
    pub len: Bytes,
    pub owner: Owner,
    /// True if no driver call created it.
    pub hit: bool,
}

/// What allocated a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The virtual pool.
    Pool { id: BlockId, at: PoolAddr },
    /// The heap of the allocation's stream.
    Heap { id: BlockId, at: PoolAddr },
    /// A backend that leaves placement to the driver.
    Driver { id: u64 },
    /// A backend that places blocks at addresses of its own.
    Backend { id: BlockId, at: PoolAddr },
    /// A graph arena. In the same shape as the others: a hit builds its owner in registers.
    Arena { arena: ArenaId, number: u64 },
}

impl Owner {
    pub(crate) fn in_arena(block: ArenaBlockId) -> Owner {
        Owner::Arena { arena: block.arena(), number: block.number() }
    }

    /// Returns the number by which a backend knows the block, if one allocated it.
    pub(crate) fn backend_id(self) -> Option<u64> {
        match self {
            Owner::Driver { id } => Some(id),
            Owner::Backend { id, .. } => Some(id.number()),
            Owner::Pool { .. } | Owner::Heap { .. } | Owner::Arena { .. } => None,
        }
    }
}

impl Allocation {
    /// Returns the address of its first byte, valid until the allocation is freed.
    pub fn addr(&self) -> DeviceAddr {
        self.addr
    }

    /// Returns the usable bytes: those requested, rounded up.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// Returns the bytes requested.
    pub fn requested(&self) -> Bytes {
        self.requested
    }

    /// Returns the number of its pool: [`Allocator::number`](crate::Allocator::number).
    #[inline]
    pub fn pool_number(&self) -> u64 {
        self.allocator
    }

    /// Returns the stream it was allocated for.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// Returns false: a request for zero bytes gets 512.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// Returns the block's address in the pool's own numbers, the same on every device. `None` for
    /// memory of the driver's pool or of a graph arena.
    pub fn pool_addr(&self) -> Option<PoolAddr> {
        match self.owner {
            Owner::Pool { at, .. } | Owner::Heap { at, .. } | Owner::Backend { at, .. } => Some(at),
            Owner::Driver { .. } | Owner::Arena { .. } => None,
        }
    }

    /// Returns the block's id in the pool, for diagnostics. `None` for memory of a heap, of the
    /// driver's pool or of a graph arena.
    pub fn id(&self) -> Option<BlockId> {
        match self.owner {
            Owner::Pool { id, .. } | Owner::Backend { id, .. } => Some(id),
            Owner::Heap { .. } | Owner::Driver { .. } | Owner::Arena { .. } => None,
        }
    }

    /// Returns true if it lies in a slab of the heap of its stream. Blocks up to 64 KiB do, up to 256 KiB
    /// those of one stream that has the pool for itself, and under contention larger ones.
    pub fn is_in_slab(&self) -> bool {
        matches!(self.owner, Owner::Heap { .. })
    }

    /// Returns true if the virtual pool has it, outside of slabs and arenas.
    pub fn is_in_pool(&self) -> bool {
        matches!(self.owner, Owner::Pool { .. })
    }

    /// Returns true if it lies in a graph arena.
    pub fn is_in_arena(&self) -> bool {
        matches!(self.owner, Owner::Arena { .. })
    }

    #[inline]
    pub(crate) fn has_recorded_uses(&self) -> bool {
        self.has_recorded_uses.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.len, self.addr)
    }
}
