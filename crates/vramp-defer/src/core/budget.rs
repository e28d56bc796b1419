//! Amounts by which leases are charged to a budget.

use super::{Access, BufferId, Deferrables, HolderKey};
use vramp_core::Bytes;

impl Deferrables {
    /// Returns the memory of the pool that these buffers need, resident or not. O(buffers).
    pub fn needed_by(&self, buffers: &[(BufferId, Access)]) -> Bytes {
        self.ranges_of(buffers).into_iter().map(|range| self.ranges[range].needs()).sum()
    }

    /// Returns the occupied memory that nothing keeps on the card.
    pub fn idle(&self) -> Bytes {
        self.occupied.saturating_sub(self.committed)
    }

    /// Returns true if `holder` holds a lease. O(log holders).
    pub fn holds_lease(&self, holder: HolderKey) -> bool {
        let known = self.wait_queue.holders.get(&holder);
        known.is_some_and(|holder| !holder.leases.is_empty())
    }
}
