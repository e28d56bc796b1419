//! Indexes of free memory: which free region serves a request, and which hole holds a length.
//!
//! Each stream has one index of free regions: first fit by address, or best fit. First fit keeps
//! used memory together and whole chunks free (`docs/design/placement.md` has the comparison);
//! best fit is what VPMM prescribes.

use std::collections::{BTreeMap, BTreeSet};

use crate::Bytes;
use crate::ids::PoolAddr;

/// Slot of a region in the region table.
pub(crate) type RegionKey = u32;

/// Free regions of one stream, ordered for one way of fitting.
#[derive(Clone, Debug)]
pub(crate) enum FreeIndex {
    /// Lowest address first: one address-ordered map per power of two of the length.
    FirstFit { classes: Vec<BTreeMap<PoolAddr, (Bytes, RegionKey)>>, occupied: u64 },
    /// Smallest first; of equal ones the highest address, as VPMM's case B needs for X = 10.
    BestFit { by_size: BTreeSet<(Bytes, PoolAddr, RegionKey)> },
}

fn class_of(len: Bytes) -> usize {
    len.count().ilog2() as usize
}

impl FreeIndex {
    pub(crate) fn first_fit() -> FreeIndex {
        FreeIndex::FirstFit { classes: vec![BTreeMap::new(); 64], occupied: 0 }
    }

    pub(crate) fn best_fit() -> FreeIndex {
        FreeIndex::BestFit { by_size: BTreeSet::new() }
    }

    pub(crate) fn insert(&mut self, at: PoolAddr, len: Bytes, key: RegionKey) {
        match self {
            FreeIndex::FirstFit { classes, occupied } => {
                let class = class_of(len);
                classes[class].insert(at, (len, key));
                *occupied |= 1 << class;
            }
            FreeIndex::BestFit { by_size } => {
                by_size.insert((len, at, key));
            }
        }
    }

    pub(crate) fn remove(&mut self, at: PoolAddr, len: Bytes, key: RegionKey) {
        let was_there = match self {
            FreeIndex::FirstFit { classes, occupied } => {
                let class = class_of(len);
                let removed = classes[class].remove(&at);
                if classes[class].is_empty() {
                    *occupied &= !(1 << class);
                }
                removed == Some((len, key))
            }
            FreeIndex::BestFit { by_size } => by_size.remove(&(len, at, key)),
        };
        assert!(was_there, "free index lacks region {key} at {at:?} len={len}");
    }

    /// The region to carve `len` bytes from. O(log n) for each size class; no heap memory.
    pub(crate) fn find(&self, len: Bytes) -> Option<RegionKey> {
        match self {
            FreeIndex::BestFit { by_size } => {
                let &(smallest, _, _) = by_size.range((len, PoolAddr::default(), 0)..).next()?;
                let mut alike = by_size.range(..(smallest + Bytes::new(1), PoolAddr::default(), 0));
                alike.next_back().map(|&(_, _, key)| key)
            }
            FreeIndex::FirstFit { classes, occupied } => {
                let own = class_of(len);
                let mut best: Option<(PoolAddr, RegionKey)> = None;
                // Every region of a larger class fits: the lowest of each is a candidate.
                let mut larger = occupied.checked_shr(own as u32 + 1).unwrap_or(0);
                let mut class = own + 1;
                while larger != 0 {
                    let skip = larger.trailing_zeros();
                    class += skip as usize;
                    let (&at, &(_, key)) =
                        classes[class].first_key_value().expect("an occupied class has a region");
                    if best.is_none_or(|(lowest, _)| at < lowest) {
                        best = Some((at, key));
                    }
                    larger = larger.checked_shr(skip + 1).unwrap_or(0);
                    class += 1;
                }
                for (&at, &(region_len, key)) in &classes[own] {
                    if best.is_some_and(|(lowest, _)| at > lowest) {
                        break;
                    }
                    if region_len >= len {
                        best = Some((at, key));
                        break;
                    }
                }
                best.map(|(_, key)| key)
            }
        }
    }

    /// Every region, in an order that depends on the contents only.
    pub(crate) fn iter(&self) -> Box<dyn Iterator<Item = (PoolAddr, Bytes, RegionKey)> + '_> {
        match self {
            FreeIndex::FirstFit { classes, .. } => Box::new(
                classes
                    .iter()
                    .flat_map(|class| class.iter().map(|(&at, &(len, key))| (at, len, key))),
            ),
            FreeIndex::BestFit { by_size } => {
                Box::new(by_size.iter().map(|&(len, at, key)| (at, len, key)))
            }
        }
    }
}

/// A range of addresses with nothing mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Hole {
    pub len: Bytes,
    pub at: PoolAddr,
    pub region: RegionKey,
}

/// Every hole, smallest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Holes(BTreeSet<Hole>);

impl Holes {
    pub(crate) fn insert(&mut self, hole: Hole) {
        self.0.insert(hole);
    }

    pub(crate) fn remove(&mut self, hole: Hole) {
        assert!(self.0.remove(&hole), "{hole:?} is not indexed");
    }

    /// The smallest hole of at least `len` bytes.
    pub(crate) fn smallest_of(&self, len: Bytes) -> Option<Hole> {
        self.0.range(Hole { len, at: PoolAddr::default(), region: 0 }..).next().copied()
    }

    pub(crate) fn largest(&self) -> Option<Hole> {
        self.0.last().copied()
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = Hole> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpanId;

    fn spot(offset: u64) -> PoolAddr {
        PoolAddr::new(SpanId::new(0), Bytes::new(offset))
    }

    fn filled(mut index: FreeIndex) -> FreeIndex {
        for (key, (at, len)) in
            [(0, 100), (200, 40), (300, 64), (500, 4000)].into_iter().enumerate()
        {
            index.insert(spot(at), Bytes::new(len), key as RegionKey);
        }
        index
    }

    #[test]
    fn first_fit_takes_the_lowest_address_of_any_class() {
        let index = filled(FreeIndex::first_fit());
        assert_eq!(index.find(Bytes::new(30)), Some(0));
        assert_eq!(index.find(Bytes::new(100)), Some(0));
        assert_eq!(index.find(Bytes::new(101)), Some(3));
        assert_eq!(index.find(Bytes::new(4001)), None);
    }

    #[test]
    fn best_fit_takes_the_smallest() {
        let index = filled(FreeIndex::best_fit());
        assert_eq!(index.find(Bytes::new(30)), Some(1));
        assert_eq!(index.find(Bytes::new(41)), Some(2));
        assert_eq!(index.find(Bytes::new(65)), Some(0));
    }

    #[test]
    fn a_removed_region_is_found_no_more() {
        for mut index in [filled(FreeIndex::first_fit()), filled(FreeIndex::best_fit())] {
            index.remove(spot(500), Bytes::new(4000), 3);
            assert_eq!(index.find(Bytes::new(101)), None);
            assert_eq!(index.iter().count(), 3);
        }
    }
}
