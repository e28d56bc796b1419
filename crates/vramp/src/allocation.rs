//! What a user holds.

use std::fmt;

use vramp_core::{BlockId, Bytes, DeviceAddr, Spot};

/// Memory in a user's hands. Freed by [`crate::Allocator::free`], which takes it by value: a
/// second free does not compile.
///
/// Dropping it without a free leaks the memory until the allocator goes: nothing is known of when
/// its work ends.
#[derive(PartialEq, Eq)]
#[must_use = "memory that is dropped without a free stays taken until the allocator goes"]
pub struct Allocation {
    pub(crate) addr: DeviceAddr,
    pub(crate) len: Bytes,
    pub(crate) owner: Owner,
}

/// Who handed it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Pool { id: BlockId, at: Spot },
    Driver { slot: u64 },
    Caching { id: BlockId, at: Spot },
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

    /// True if no bytes may be used. Never so: a request for nothing gets a grain.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// The pool's own name for the place, the same on every device; `None` for memory that the
    /// driver's pool placed.
    pub fn spot(&self) -> Option<Spot> {
        match self.owner {
            Owner::Pool { at, .. } | Owner::Caching { at, .. } => Some(at),
            Owner::Driver { .. } => None,
        }
    }

    /// The block's id in the pool, for prints; `None` for memory of the driver's pool.
    pub fn id(&self) -> Option<BlockId> {
        match self.owner {
            Owner::Pool { id, .. } | Owner::Caching { id, .. } => Some(id),
            Owner::Driver { .. } => None,
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.len, self.addr)
    }
}
