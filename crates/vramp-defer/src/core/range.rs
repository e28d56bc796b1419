//! Address ranges: one buffer's own, or shared by the small buffers of a group.
//!
//! A buffer's own range frees memory piece by piece. A group is at most one piece long, and its
//! memory becomes free only when no tenant needs any. So its tenants leave together, and so do the pieces of
//! an adopted buffer (`adoption.rs`).

use std::collections::{BTreeMap, BTreeSet};

use super::gaps::Gaps;
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
