//! Leases under which buffers are overwritten as a whole: what was spilled is not restored.
//!
//! 1. The lease is granted like one that writes.
//! 2. [`Deferrables::overwrite`] gives up the restores of the buffers. Their spilled pieces have memory,
//!    and their copies stay valid.
//! 3. When the lease ends all of the buffers counts as written, on the card, and the copies are stale.
//!    If it is cancelled the pieces are spilled as before.

use std::collections::BTreeSet;

use smallvec::SmallVec;

use super::{Access, BufferId, Deferrables, GrantedLease};

/// Returns the buffers of a request that are overwritten, in order. One that is named with another access
/// as well is not. O(n log n), and O(n) if there are none.
pub fn overwritten(named: &[(BufferId, Access)]) -> SmallVec<[BufferId; 2]> {
    if named.iter().all(|(_, access)| *access != Access::Overwrite) {
        return SmallVec::new();
    }
    let (all, others): (Vec<_>, Vec<_>) =
        named.iter().partition(|(_, access)| *access == Access::Overwrite);
    let all: BTreeSet<BufferId> = all.into_iter().map(|(id, _)| id).collect();
    let others: BTreeSet<BufferId> = others.into_iter().map(|(id, _)| id).collect();
    all.difference(&others).copied().collect()
}

impl Deferrables {
    /// Gives up the restores of buffers that a lease overwrites, in order. They were not begun.
    /// O(log n) for each restore.
    pub fn overwrite(&mut self, granted: &mut GrantedLease, buffers: SmallVec<[BufferId; 2]>) {
        granted.restores.retain(|restore| {
            let is_needed = buffers.binary_search(&restore.piece.buffer).is_err();
            if !is_needed {
                self.end_restore(restore.id);
            }
            is_needed
        });
        if let Some(lease) = self.leases.get_mut(&granted.lease) {
            lease.overwritten = buffers;
        }
    }
}
