//! What a user of a tracked allocator holds.

use std::fmt;
use std::ops::Deref;

use vramp_alloc::Allocation;

use crate::ledger::shell::charge::Payer;

/// Memory, and who pays for it. Freed by [`TrackedAllocator::free`](super::TrackedAllocator::free), which takes it by
/// value. Dropped without a free it stays taken, and charged.
#[must_use = "memory that is dropped without a free stays taken and charged"]
pub struct TrackedAllocation {
    pub(super) allocation: Allocation,
    pub(super) payer: Payer,
    /// The number of its allocator.
    pub(super) tracked: u64,
}

impl TrackedAllocation {
    /// Who pays for it.
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
        write!(f, "{:?}, paid by {:?}", self.allocation, self.payer)
    }
}
