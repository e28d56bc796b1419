//! Free stretches of a group's range.

use std::collections::{BTreeMap, BTreeSet};

use vramp_core::Bytes;

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
