//! An allocation of a tracked allocator.

use std::fmt;
use std::ops::Deref;

use vramp_alloc::Allocation;

use crate::ledger::shell::charge::Payer;

/// An allocation and what it is charged to. Freed by
/// [`TrackedAllocator::free`](super::TrackedAllocator::free), which takes it by value. Dropped
/// without a free it stays allocated and charged.
#[must_use = "memory that is dropped without a free stays allocated and charged"]
pub struct TrackedAllocation {
    pub(super) allocation: Allocation,
    pub(super) payer: Payer,
    /// Number of its allocator.
    pub(super) tracked: u64,
}

impl TrackedAllocation {
    /// Returns what the allocation is charged to.
    pub fn payer(&self) -> Payer {
        self.payer
    }
}

impl Deref for TrackedAllocation {
    type Target = Allocation;

    fn deref(&self) -> &Allocation {
        &self.allocation
    }
}

impl fmt::Debug for TrackedAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, charged to {:?}", self.allocation, self.payer)
    }
}
