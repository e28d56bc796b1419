//! Whether memory can become free without a call of the caller that lacks it.

use std::collections::BTreeSet;

use super::{Deferrables, HolderKey};

impl Deferrables {
    /// Returns true if nothing ends by which memory could become free: no move, no lease of other
    /// holders than these, no pin and no buffer without handles. Idle buffers count as
    /// there to stay. O(holders log holders).
    pub fn are_all_idle(&self, holders: &[HolderKey]) -> bool {
        self.moves.is_empty()
            && self.kept.is_zero()
            && self.held_by(holders) == self.leases.len()
            && self.without_handles == 0
    }

    /// Returns the number of leases of some holders.
    fn held_by(&self, holders: &[HolderKey]) -> usize {
        let distinct: BTreeSet<HolderKey> = holders.iter().copied().collect();
        let of = |key| self.wait_queue.holders.get(&key).map_or(0, |holder| holder.leases.len());
        distinct.into_iter().map(of).sum()
    }
}
