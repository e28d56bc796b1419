//! Address ranges: one buffer's own, or shared by the small buffers of a group.
//!
//! A buffer's own range frees memory piece by piece. A group is at most one piece long, and its
//! memory becomes free only when no tenant needs any. So its tenants leave together, and so do the pieces of
//! an adopted buffer (`adoption.rs`).

use std::collections::{BTreeMap, BTreeSet};

use super::{BufferId, GroupSetId, RangeId};
use vramp_core::Bytes;

/// Alignment of tenants.
pub(super) const BLOCK_ALIGN: Bytes = Bytes::new(512);

#[derive(Clone, Debug)]
pub(super) struct Range {
    /// A whole number of pages.
    pub len: Bytes,
    pub is_group: bool,
    /// The contents of its one buffer are in memory that was adopted, not in memory of the pool.
    pub is_adopted: bool,
    /// By offset.
    pub tenants: BTreeMap<Bytes, Tenant>,
    /// Number of tenants that must stay on the card.
    pub unevictable_count: u32,
    /// Number of tenants that must stay on the card even without leases.
    pub kept_count: u32,
    /// Number of pieces with memory.
    pub backed: u32,
    /// The same for each page of a group: what small buffers need is known without a look at each.
    pub backed_in_page: Vec<u32>,
    /// Host copies are being mapped at its addresses.
    pub is_mapping: bool,
    /// Number of pieces that were chosen to leave.
    pub leaving: u32,
    /// Free stretches of a group.
    pub gaps: Option<Gaps>,
    /// The set that a group belongs to.
    pub set: Option<GroupSetId>,
    /// Longest gap, as the set lists it.
    pub listed_gap: Bytes,
}

/// Ranges of a set by the length of their longest gap.
pub(super) type GroupSet = BTreeSet<(Bytes, RangeId)>;

#[derive(Clone, Copy, Debug)]
pub(super) struct Tenant {
    pub buffer: BufferId,
    /// A multiple of [`BLOCK_ALIGN`].
    pub len: Bytes,
}

impl Range {
    /// Returns a range of one buffer.
    pub fn of_buffer(len: Bytes) -> Range {
        Range {
            len,
            is_group: false,
            is_adopted: false,
            tenants: BTreeMap::new(),
            unevictable_count: 0,
            kept_count: 0,
            backed: 0,
            backed_in_page: Vec::new(),
            is_mapping: false,
            leaving: 0,
            gaps: None,
            set: None,
            listed_gap: Bytes::ZERO,
        }
    }

    /// Returns true if its memory becomes free only as a whole.
    pub fn leaves_together(&self) -> bool {
        self.is_group || self.is_adopted
    }

    /// Returns the memory of the pool that a lease on it needs.
    pub fn needs(&self) -> Bytes {
        if self.is_adopted { Bytes::ZERO } else { self.len }
    }

    /// Returns true if a lease on it takes room, or keeps some that no pin keeps anyway.
    pub fn takes_room(&self) -> bool {
        self.kept_count == 0 && !self.needs().is_zero()
    }

    /// Returns a range of whole pages for the buffers of a group.
    pub fn group(len: Bytes, page: Bytes, set: Option<GroupSetId>) -> Range {
        let backed_in_page = vec![0; (len.count() / page.count()) as usize];
        let gaps = Some(Gaps::one(len));
        Range { is_group: true, gaps, set, backed_in_page, ..Range::of_buffer(len) }
    }

    /// Counts a piece of a group that got memory, or lost it, in each of its pages.
    pub fn count_pages(&mut self, offset: Bytes, len: Bytes, page: Bytes, backed: bool) {
        let last = (offset + len - Bytes::new(1)).count() / page.count();
        let first = offset.count() / page.count();
        for count in self.backed_in_page.iter_mut().take(last as usize + 1).skip(first as usize) {
            *count = if backed { *count + 1 } else { *count - 1 };
        }
    }
}

/// Joins adjacent stretches. They come sorted.
pub(super) fn merged(stretches: impl Iterator<Item = (Bytes, Bytes)>) -> Vec<(Bytes, Bytes)> {
    let mut all: Vec<(Bytes, Bytes)> = Vec::new();
    for (offset, len) in stretches {
        match all.last_mut() {
            Some((start, before)) if *start + *before == offset => *before += len,
            _ => all.push((offset, len)),
        }
    }
    all
}

/// Gaps by offset and by length. None touches another one.
#[derive(Clone, Debug)]
pub(super) struct Gaps {
    by_offset: BTreeMap<Bytes, Bytes>,
    /// Lengths and offsets.
    by_len: BTreeSet<(Bytes, Bytes)>,
}

impl Gaps {
    /// Returns one gap of `len` at the start.
    pub fn one(len: Bytes) -> Gaps {
        let mut gaps = Gaps { by_offset: BTreeMap::new(), by_len: BTreeSet::new() };
        gaps.insert(Bytes::ZERO, len);
        gaps
    }

    fn insert(&mut self, offset: Bytes, len: Bytes) {
        if !len.is_zero() {
            self.by_offset.insert(offset, len);
            self.by_len.insert((len, offset));
        }
    }

    fn remove(&mut self, offset: Bytes, len: Bytes) {
        self.by_offset.remove(&offset);
        self.by_len.remove(&(len, offset));
    }

    /// Takes `len` bytes from the start of the shortest gap that has as many, the lowest of equals.
    /// Returns their offset. O(log gaps).
    pub fn take(&mut self, len: Bytes) -> Option<Bytes> {
        let &(whole, offset) = self.by_len.range((len, Bytes::ZERO)..).next()?;
        self.remove(offset, whole);
        self.insert(offset + len, whole - len);
        Some(offset)
    }

    /// Returns bytes, and joins them with the gaps beside them. O(log gaps).
    pub fn give_back(&mut self, offset: Bytes, len: Bytes) {
        let (mut start, mut end) = (offset, offset + len);
        if let Some((&before, &its)) = self.by_offset.range(..offset).next_back()
            && before + its == offset
        {
            self.remove(before, its);
            start = before;
        }
        if let Some(&its) = self.by_offset.get(&end) {
            self.remove(end, its);
            end += its;
        }
        self.insert(start, end - start);
    }

    /// Returns the length of the longest gap. O(log gaps).
    pub fn longest(&self) -> Bytes {
        self.by_len.last().map_or(Bytes::ZERO, |&(len, _)| len)
    }

    /// Returns the gaps as offsets and lengths, sorted.
    pub fn iter(&self) -> impl Iterator<Item = (Bytes, Bytes)> {
        self.by_offset.iter().map(|(&offset, &len)| (offset, len))
    }

    /// Returns the number of gaps in each index.
    pub fn counts(&self) -> [usize; 2] {
        [self.by_offset.len(), self.by_len.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn b(count: u64) -> Bytes {
        Bytes::new(count)
    }

    #[test]
    fn the_shortest_gap_that_is_long_enough_is_taken_and_neighbours_join() {
        let mut gaps = Gaps::one(b(100));
        let taken: Vec<_> = [10, 20, 30, 40].map(|len| gaps.take(b(len))).to_vec();
        assert_eq!(taken, [0, 10, 30, 60].map(|offset| Some(b(offset))));
        assert_eq!((gaps.take(b(1)), gaps.longest()), (None, b(0)));
        gaps.give_back(b(60), b(40));
        gaps.give_back(b(0), b(10));
        assert_eq!(gaps.take(b(10)), Some(b(0)), "not the longer one");
        gaps.give_back(b(0), b(10));
        gaps.give_back(b(30), b(30));
        assert_eq!(gaps.iter().collect::<Vec<_>>(), [(b(0), b(10)), (b(30), b(70))]);
        gaps.give_back(b(10), b(20));
        assert_eq!(gaps.iter().collect::<Vec<_>>(), [(b(0), b(100))]);
        assert_eq!(gaps.counts(), [1, 1]);
    }
}
