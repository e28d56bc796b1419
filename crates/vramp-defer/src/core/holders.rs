//! The leases on one buffer.
//!
//! All of them use it alike: one of them exclusively, or several shared on the card, or several in
//! place. So whether a request conflicts is known without a look at each of them.
//!
//! Growth: an entry for each lease, O(log leases) to add, find or remove one; O(1) for one lease.

use super::few_map::FewMap;
use super::{Access, BufferLeaseId, HolderKey};

#[derive(Clone, Debug)]
pub(super) struct Holders {
    /// Access of all leases. Meaningless without one.
    access: Access,
    is_in_place: bool,
    /// By their holders.
    leases: FewMap<(HolderKey, BufferLeaseId), ()>,
}

impl Default for Holders {
    fn default() -> Holders {
        Holders { access: Access::Shared, is_in_place: false, leases: FewMap::default() }
    }
}

impl Holders {
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Returns the number of leases.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Returns true if leases use the buffer on the card.
    pub fn use_card(&self) -> bool {
        !self.is_in_place && !self.is_empty()
    }

    /// Returns true if leases read the buffer in place.
    pub fn read_in_place(&self) -> bool {
        self.is_in_place && !self.is_empty()
    }

    /// Returns true if one lease excludes all others.
    pub fn is_exclusive(&self) -> bool {
        self.access == Access::Exclusive && !self.is_empty()
    }

    /// Returns true if the leases exclude another one that comes to the card.
    pub fn exclude(&self, wanted: Access) -> bool {
        let excludes = self.is_in_place || self.access.max(wanted) == Access::Exclusive;
        excludes && !self.is_empty()
    }

    /// Adds a lease that does not conflict with the others.
    pub fn add(
        &mut self,
        lease: BufferLeaseId,
        holder: HolderKey,
        access: Access,
        is_in_place: bool,
    ) {
        let is_alike = (self.access, self.is_in_place) == (Access::Shared, is_in_place);
        let may_join = is_alike && access == Access::Shared;
        debug_assert!(self.is_empty() || may_join, "{lease} conflicts with {self:?}");
        (self.access, self.is_in_place) = (access, is_in_place);
        self.leases.insert((holder, lease), ());
    }

    /// Removes a lease. Returns true if it was there.
    pub fn remove(&mut self, lease: BufferLeaseId, holder: HolderKey) -> bool {
        self.leases.remove((holder, lease)).is_some()
    }

    /// Returns true if this lease is there, with this access.
    pub fn contains(&self, lease: BufferLeaseId, holder: HolderKey, access: Access) -> bool {
        self.leases.get((holder, lease)).is_some() && self.access == access
    }

    /// Returns true if a lease has this holder.
    pub fn has(&self, holder: HolderKey) -> bool {
        let first = self.leases.first_from((holder, BufferLeaseId(0)));
        first.is_some_and(|((found, _), ())| found == holder)
    }

    /// Returns the leases, oldest first. O(leases log leases).
    pub fn leases(&self) -> Vec<BufferLeaseId> {
        let mut leases: Vec<BufferLeaseId> =
            self.leases.iter().map(|((_, lease), ())| lease).collect();
        leases.sort_unstable();
        leases
    }
}
