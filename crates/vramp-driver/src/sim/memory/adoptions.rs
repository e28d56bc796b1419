//! Adopted ranges.

use std::collections::BTreeMap;

/// Adopted ranges, by start: length and device. They do not overlap.
#[derive(Debug, Default)]
pub struct Adoptions(pub(super) BTreeMap<u64, (u64, usize)>);

impl Adoptions {
    /// Returns the device that adopted all of a range.
    pub fn owner(&self, start: u64, end: u64) -> Option<usize> {
        let (at, (len, device)) = self.0.range(..=start).next_back()?;
        (end <= at + len).then_some(*device)
    }

    pub fn overlaps(&self, start: u64, end: u64) -> bool {
        self.0.range(..end).next_back().is_some_and(|(at, (len, _))| at + len > start)
    }
}
