//! Address ranges: one buffer's own, or shared by the small buffers of a group.
//!
//! A buffer's own range frees memory piece by piece. A group is at most one piece long, and its
//! memory becomes free only when no tenant needs any. So its tenants leave together.

use std::collections::BTreeMap;

use super::BufferId;
use vramp_core::Bytes;

/// Alignment of tenants.
pub(super) const BLOCK_ALIGN: Bytes = Bytes::new(512);

#[derive(Clone, Debug)]
pub(super) struct Range {
    /// A whole number of pages.
    pub len: Bytes,
    pub is_group: bool,
    /// By offset.
    pub tenants: BTreeMap<Bytes, Tenant>,
    /// Number of tenants that must stay on the card.
    pub unevictable_count: u32,
    /// Number of pieces with memory.
    pub backed: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Tenant {
    pub buffer: BufferId,
    /// A multiple of [`BLOCK_ALIGN`].
    pub len: Bytes,
}

impl Range {
    pub fn new(len: Bytes, is_group: bool) -> Range {
        Range { len, is_group, tenants: BTreeMap::new(), unevictable_count: 0, backed: 0 }
    }

    /// Returns the lowest gap of at least `len`. O(tenants).
    pub fn gap(&self, len: Bytes) -> Option<Bytes> {
        let mut start = Bytes::ZERO;
        for (&offset, tenant) in &self.tenants {
            if len <= offset - start {
                return Some(start);
            }
            start = offset + tenant.len;
        }
        (len <= self.len - start).then_some(start)
    }

    pub fn longest_gap(&self) -> Bytes {
        let mut start = Bytes::ZERO;
        let mut longest = Bytes::ZERO;
        for (&offset, tenant) in &self.tenants {
            longest = longest.max(offset - start);
            start = offset + tenant.len;
        }
        longest.max(self.len - start)
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
