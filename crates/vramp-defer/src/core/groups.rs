//! Groups: ranges that small buffers share, and sets of such ranges.
//!
//! 1. [`Deferrables::add_group_set`] returns a set without ranges, for buffers with the same lifetime.
//! 2. [`Deferrables::add_member`] places a buffer in a range of the set. If none has room, the caller
//!    adds one with [`Deferrables::add_group`].
//! 3. [`Deferrables::end_group_set`] ends the set. A range goes with its last buffer.
//!
//! Growth: ranges are found by their longest gap, and gaps by their length: O(log n) for each buffer
//! that is added or removed.

use super::range::{BLOCK_ALIGN, GroupSet, Range};
use super::{AddError, AddedBuffer, Deferrables, GroupSetId, RangeId, UnknownRange};
use vramp_core::Bytes;

impl Deferrables {
    /// Adds a set without ranges.
    pub fn add_group_set(&mut self) -> GroupSetId {
        self.group_sets.insert(GroupSet::new())
    }

    /// Adds a range for small buffers that are used together and have the same lifetime. It belongs to
    /// the set, if one is named.
    ///
    /// # Errors
    /// The length is zero, or more than a piece.
    pub fn add_group(&mut self, len: Bytes, set: Option<GroupSetId>) -> Result<RangeId, AddError> {
        self.check_len(len, self.config.piece)?;
        let len = self.config.pages(len);
        let range = self.ranges.insert(Range::group(len, self.config.page, set));
        self.list_gap(range);
        Ok(range)
    }

    /// Adds a buffer to a group, in the shortest gap where it fits. O(log n).
    ///
    /// # Errors
    /// The group does not exist, or has no such gap.
    pub fn add_tenant(&mut self, group: RangeId, len: Bytes) -> Result<AddedBuffer, AddError> {
        self.check_len(len, self.config.piece)?;
        let unknown = UnknownRange { range: group };
        let gaps = self.ranges.get_mut(group).and_then(|range| range.gaps.as_mut());
        let gaps = gaps.ok_or(unknown)?;
        let full = AddError::Full { group, len, longest: gaps.longest() };
        let offset = gaps.take(block(len)).ok_or(full)?;
        self.list_gap(group);
        Ok(self.add(group, offset, len))
    }

    /// Adds a buffer to a range of a set: one whose longest gap is the shortest where it fits. `None`
    /// if none has room. O(log n).
    ///
    /// # Errors
    /// The length is zero, or more than a piece.
    pub fn add_member(
        &mut self,
        set: GroupSetId,
        len: Bytes,
    ) -> Result<Option<AddedBuffer>, AddError> {
        self.check_len(len, self.config.piece)?;
        let fits = |set: &GroupSet| set.range((block(len), first_range())..).next().copied();
        match self.group_sets.get(set).and_then(fits) {
            Some((_, range)) => self.add_tenant(range, len).map(Some),
            None => Ok(None),
        }
    }

    /// Ends a set: it gets no more buffers, and each range is removed with its last buffer. Returns the
    /// ranges without buffers, which are removed now. O(ranges of the set).
    pub fn end_group_set(&mut self, set: GroupSetId) -> Vec<RangeId> {
        let ended = self.group_sets.remove(set).unwrap_or_default();
        let ranges = ended.into_iter().map(|(_, range)| range);
        ranges.filter(|&range| self.remove_group(range)).collect()
    }

    /// Removes a group without tenants. Returns false if it has some, or does not exist.
    pub fn remove_group(&mut self, group: RangeId) -> bool {
        let empty = |range: &Range| range.is_group && range.tenants.is_empty();
        if !self.ranges.get(group).is_some_and(empty) {
            return false;
        }
        self.unlist_group(group);
        let range = self.ranges.remove(group).expect("it was found above");
        if let Some(set) = range.set.and_then(|set| self.group_sets.get_mut(set)) {
            set.remove(&(range.listed_gap, group));
        }
        true
    }

    /// Returns the place of a tenant that was removed to its group. The group is removed too if its set
    /// has ended and no tenant is left.
    pub(super) fn vacate(&mut self, group: RangeId, offset: Bytes, len: Bytes) {
        let range = &mut self.ranges[group];
        range.gaps.as_mut().expect("a group has gaps").give_back(offset, block(len));
        let has_ended = range.set.is_some_and(|set| !self.group_sets.contains_key(set));
        if !(has_ended && self.remove_group(group)) {
            self.list_gap(group);
        }
    }

    /// Lists a range by its longest gap.
    fn list_gap(&mut self, group: RangeId) {
        let range = &mut self.ranges[group];
        let longest = range.gaps.as_ref().map_or(Bytes::ZERO, super::range::Gaps::longest);
        let before = std::mem::replace(&mut range.listed_gap, longest);
        if let Some(set) = range.set.and_then(|set| self.group_sets.get_mut(set)) {
            set.remove(&(before, group));
            set.insert((longest, group));
        }
    }
}

/// Returns the length of a tenant's place.
pub(super) fn block(len: Bytes) -> Bytes {
    len.checked_round_up(BLOCK_ALIGN).expect("a piece is no longer than 32 MiB")
}

/// Returns an id that is not after any other.
fn first_range() -> RangeId {
    slotmap::KeyData::from_ffi(0).into()
}
