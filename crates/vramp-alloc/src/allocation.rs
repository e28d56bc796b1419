//! What a user holds.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use vramp_core::{ArenaBlockId, ArenaId, BlockId, Bytes, DeviceAddr, PoolAddr, StreamId};

/// Memory in a user's hands. Freed by [`crate::Allocator::free`], which takes it by value: a
/// second free does not compile.
///
/// Dropping it without a free leaks the memory until the allocator goes: nothing is known of when
/// its work ends.
#[must_use = "memory that is dropped without a free stays taken until the allocator goes"]
pub struct Allocation {
    pub(crate) addr: DeviceAddr,
    pub(crate) len: Bytes,
    pub(crate) requested: Bytes,
    pub(crate) stream: StreamId,
    pub(crate) owner: Owner,
    /// The allocator's number.
    pub(crate) allocator: u64,
    /// One more than its tag's place in the allocator's list; zero for none.
    pub(crate) tag: u16,
    /// True if it was at hand: the pool does not know of the work that the memory saw before.
    pub(crate) recycled: bool,
    /// True once a use on another stream was noted.
    pub(crate) noted: AtomicBool,
}

/// Who handed it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The pool itself.
    Pool { id: BlockId, at: PoolAddr },
    /// The heap of the allocation's stream.
    Heap { id: BlockId, at: PoolAddr },
    /// The driver's own pool.
    Driver { slot: u64 },
    /// PyTorch's caching allocator.
    Caching { id: BlockId, at: PoolAddr },
    /// A graph arena. In the same shape as the others: a hit makes its owner in registers.
    Arena { arena: ArenaId, number: u64 },
}

impl Owner {
    pub(crate) fn of_arena(block: ArenaBlockId) -> Owner {
        Owner::Arena { arena: block.arena(), number: block.number() }
    }
}

impl Allocation {
    /// Where it begins. Good until the allocation is freed; only a number to the host.
    pub fn addr(&self) -> DeviceAddr {
        self.addr
    }

    /// How many bytes may be used: what was asked, or a little more.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// How many bytes were asked for.
    pub fn requested(&self) -> Bytes {
        self.requested
    }

    /// The stream it was asked for.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// True if no bytes may be used. Never so: a request for nothing gets a grain.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// The pool's own name for the place, the same on every device; `None` for memory that the
    /// driver's pool or a graph arena placed.
    pub fn pool_addr(&self) -> Option<PoolAddr> {
        match self.owner {
            Owner::Pool { at, .. } | Owner::Heap { at, .. } | Owner::Caching { at, .. } => Some(at),
            Owner::Driver { .. } | Owner::Arena { .. } => None,
        }
    }

    /// The block's id in the pool, for prints; `None` for memory that a heap or the driver placed.
    pub fn id(&self) -> Option<BlockId> {
        match self.owner {
            Owner::Pool { id, .. } | Owner::Caching { id, .. } => Some(id),
            Owner::Heap { .. } | Owner::Driver { .. } | Owner::Arena { .. } => None,
        }
    }

    /// True if a graph arena placed it.
    pub fn is_of_arena(&self) -> bool {
        matches!(self.owner, Owner::Arena { .. })
    }

    #[inline]
    pub(crate) fn is_noted(&self) -> bool {
        self.noted.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.len, self.addr)
    }
}
