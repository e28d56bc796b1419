//! Whether memory can become free without a call of the caller that lacks it.

use super::{Deferrables, HolderKey};

impl Deferrables {
    /// Returns true if nothing ends by which memory could become free: no move, no lease of other
    /// holders than these, no pin, no exposure and no buffer without handles. Idle buffers count as
    /// there to stay. O(leases), and O(buffers) if there is nothing else.
    pub fn are_all_idle(&self, holders: &[HolderKey]) -> bool {
        self.moves.is_empty()
            && self.kept.is_zero()
            && self.leases.values().all(|lease| holders.contains(&lease.holder))
            && self.buffers.values().all(|buffer| !buffer.is_ending)
    }
}
