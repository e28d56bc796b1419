//! Indexes of free memory: which free region serves a request, and which hole holds a length.
//!
//! Each stream has one index of free regions, and so has the memory of no stream. The default policy
//! takes the best fit for small requests, and the lowest address for those from 16 or 32 MiB on:
//! first fit keeps large blocks together and whole chunks free, best fit fills what lies between them
//! (`docs/design/placement.md` has the comparison). VPMM prescribes best fit for all.
//!
//! Growth: every operation is O(log n) in the free regions. First fit looks at the lowest region of
//! each larger class of lengths, and at no more than [`SCANNED_MAX`] of the request's own class.

use std::collections::{BTreeMap, BTreeSet};

use crate::Bytes;
use crate::ids::PoolAddr;

/// Slot of a region in the region table.
pub(crate) type RegionKey = u32;

/// Requests of at least this length may be placed by address.
pub(crate) const FIRST_FIT_FROM: Bytes = Bytes::mib(16);

/// Regions of the request's own class that first fit looks at before it takes the best fit.
const SCANNED_MAX: usize = 32;

/// Which of the fitting regions serves a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The smallest; the lowest address for large requests.
    BestThenFirst,
    /// The smallest; of equal ones the highest address, as VPMM's case B needs for X = 10.
    BestHighest,
}

/// Free regions of one owner.
#[derive(Clone, Debug)]
pub(crate) struct FreeIndex {
    fit: Fit,
    by_size: BTreeSet<(Bytes, PoolAddr, RegionKey)>,
    /// Regions that first fit may take: by address, one map for each power of two of the length.
    classes: Vec<BTreeMap<PoolAddr, (Bytes, RegionKey)>>,
    /// Bytes of all regions.
    bytes: Bytes,
}

fn class_of(len: Bytes) -> usize {
    (len.count().ilog2() - FIRST_FIT_FROM.count().ilog2()) as usize
}

impl FreeIndex {
    pub(crate) fn new(fit: Fit) -> FreeIndex {
        FreeIndex { fit, by_size: BTreeSet::new(), classes: Vec::new(), bytes: Bytes::ZERO }
    }

    pub(crate) fn fit(&self) -> Fit {
        self.fit
    }

    fn is_placed_by_address(&self, len: Bytes) -> bool {
        self.fit == Fit::BestThenFirst && len >= FIRST_FIT_FROM
    }

    pub(crate) fn insert(&mut self, at: PoolAddr, len: Bytes, key: RegionKey) {
        self.bytes += len;
        self.by_size.insert((len, at, key));
        if self.is_placed_by_address(len) {
            let class = class_of(len);
            if self.classes.len() <= class {
                self.classes.resize_with(class + 1, BTreeMap::new);
            }
            self.classes[class].insert(at, (len, key));
        }
    }

    pub(crate) fn remove(&mut self, at: PoolAddr, len: Bytes, key: RegionKey) {
        let mut was_there = self.by_size.remove(&(len, at, key));
        if self.is_placed_by_address(len) {
            was_there &= self.classes[class_of(len)].remove(&at) == Some((len, key));
        }
        assert!(was_there, "free index lacks region {key} at {at:?} len={len}");
        self.bytes -= len;
    }

    /// The region to carve `len` bytes from. Requests from `first_fit_from` on are placed by address.
    /// O(log n) for each size class; no heap memory.
    pub(crate) fn find(&self, len: Bytes, first_fit_from: Bytes) -> Option<RegionKey> {
        let &(smallest, _, best) = self.by_size.range((len, PoolAddr::default(), 0)..).next()?;
        match self.fit {
            Fit::BestThenFirst if len >= first_fit_from => self.lowest(len),
            Fit::BestThenFirst => Some(best),
            Fit::BestHighest => {
                let end = (smallest + Bytes::new(1), PoolAddr::default(), 0);
                self.by_size.range(..end).next_back().map(|&(_, _, key)| key)
            }
        }
    }

    /// The fitting region with the lowest address.
    fn lowest(&self, len: Bytes) -> Option<RegionKey> {
        let own = class_of(len);
        // Every region of a larger class fits: the lowest of each is a candidate.
        let larger = self.classes.iter().skip(own + 1);
        let mut best = larger
            .filter_map(|class| class.first_key_value().map(|(&at, &(_, key))| (at, key)))
            .min();
        for (scanned, (&at, &(region_len, key))) in self.classes.get(own)?.iter().enumerate() {
            if best.is_some_and(|(lowest, _)| at > lowest) {
                break;
            }
            if region_len >= len {
                best = Some((at, key));
                break;
            }
            if scanned == SCANNED_MAX {
                let smallest = self.at_least(len).next();
                best = best.into_iter().chain(smallest.map(|(at, _, key)| (at, key))).min();
                break;
            }
        }
        best.map(|(_, key)| key)
    }

    /// True if there is no region.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.by_size.is_empty()
    }

    /// Bytes of all regions.
    pub(crate) fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Length of the longest region.
    pub(crate) fn longest(&self) -> Option<Bytes> {
        self.by_size.last().map(|&(len, _, _)| len)
    }

    /// Every region, smallest first.
    pub(crate) fn iter(
        &self,
    ) -> impl DoubleEndedIterator<Item = (PoolAddr, Bytes, RegionKey)> + '_ {
        self.by_size.iter().map(|&(len, at, key)| (at, len, key))
    }

    /// The regions of at least `len` bytes, smallest first.
    pub(crate) fn at_least(
        &self,
        len: Bytes,
    ) -> impl DoubleEndedIterator<Item = (PoolAddr, Bytes, RegionKey)> + '_ {
        let from = (len, PoolAddr::default(), 0);
        self.by_size.range(from..).map(|&(len, at, key)| (at, len, key))
    }
}

/// A range of addresses with nothing mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Hole {
    pub len: Bytes,
    pub at: PoolAddr,
    pub region: RegionKey,
}

/// Every hole.
#[derive(Clone, Debug, Default)]
pub(crate) struct Holes {
    by_size: BTreeSet<Hole>,
    by_address: BTreeMap<PoolAddr, Hole>,
}

impl Holes {
    pub(crate) fn insert(&mut self, hole: Hole) {
        self.by_size.insert(hole);
        self.by_address.insert(hole.at, hole);
    }

    pub(crate) fn remove(&mut self, hole: Hole) {
        let was_there = self.by_size.remove(&hole) && self.by_address.remove(&hole.at).is_some();
        assert!(was_there, "{hole:?} is not indexed");
    }

    /// The smallest hole of at least `len` bytes.
    pub(crate) fn smallest_of(&self, len: Bytes) -> Option<Hole> {
        self.by_size.range(Hole { len, at: PoolAddr::default(), region: 0 }..).next().copied()
    }

    pub(crate) fn largest(&self) -> Option<Hole> {
        self.by_size.last().copied()
    }

    /// The hole that holds `at`.
    pub(crate) fn at(&self, at: PoolAddr) -> Option<Hole> {
        let (_, &hole) = self.by_address.range(..=at).next_back()?;
        (at < hole.at + hole.len).then_some(hole)
    }

    /// Every hole, smallest first.
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = Hole> {
        self.by_size.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpanId;

    fn spot(mib: u64) -> PoolAddr {
        PoolAddr::new(SpanId::new(0), Bytes::mib(mib))
    }

    /// Regions by address and length in MiB; the key is the position.
    fn filled(fit: Fit, regions: &[(u64, u64)]) -> FreeIndex {
        let mut index = FreeIndex::new(fit);
        for (key, &(at, len)) in regions.iter().enumerate() {
            index.insert(spot(at), Bytes::mib(len), key as RegionKey);
        }
        index
    }

    #[test]
    fn small_requests_take_the_best_fit_and_large_ones_the_lowest_address() {
        let regions = [(0, 100), (200, 40), (300, 64), (500, 4000), (5000, 3), (5100, 3)];
        let index = filled(Fit::BestThenFirst, &regions);
        for (mib, expected) in [
            (2, Some(4)),
            (4, Some(1)),
            (30, Some(0)),
            (100, Some(0)),
            (101, Some(3)),
            (4001, None),
        ] {
            assert_eq!(index.find(Bytes::mib(mib), FIRST_FIT_FROM), expected, "{mib} MiB");
        }
        assert_eq!(index.bytes(), Bytes::mib(4210));
    }

    #[test]
    fn vpmm_takes_the_smallest_and_of_equal_ones_the_highest() {
        let index = filled(Fit::BestHighest, &[(0, 100), (200, 40), (300, 64), (500, 40)]);
        assert_eq!(index.find(Bytes::mib(30), FIRST_FIT_FROM), Some(3));
        assert_eq!(index.find(Bytes::mib(41), FIRST_FIT_FROM), Some(2));
        assert_eq!(index.find(Bytes::mib(65), FIRST_FIT_FROM), Some(0));
    }

    #[test]
    fn among_many_regions_of_one_class_that_do_not_fit_the_one_that_does_is_found() {
        let mut regions: Vec<(u64, u64)> = (0..1000).map(|n| (n * 100, 17)).collect();
        regions.push((200_000, 31));
        let mut index = filled(Fit::BestThenFirst, &regions);
        assert_eq!(index.find(Bytes::mib(30), FIRST_FIT_FROM), Some(1000));
        // A larger one at a lower address is taken before it.
        index.insert(spot(150_000), Bytes::mib(64), 1001);
        assert_eq!(index.find(Bytes::mib(30), FIRST_FIT_FROM), Some(1001));
    }

    #[test]
    fn a_request_as_long_as_the_bound_is_placed_by_address_and_a_shorter_one_is_not() {
        let index = filled(Fit::BestThenFirst, &[(0, 20), (100, 16), (200, 16)]);
        assert_eq!(index.find(FIRST_FIT_FROM, FIRST_FIT_FROM), Some(0));
        assert_eq!(index.find(FIRST_FIT_FROM - Bytes::new(1), FIRST_FIT_FROM), Some(1));
        assert_eq!(index.find(FIRST_FIT_FROM, FIRST_FIT_FROM * 2), Some(1));
    }

    #[test]
    fn within_its_class_a_request_takes_the_lowest_region_that_fits_and_not_the_smallest() {
        // The last region that is looked at fits, and behind it only the smallest that fits counts.
        for (before, expected) in [(0, 0), (1, 1), (SCANNED_MAX, SCANNED_MAX), (33, 34)] {
            let mut regions: Vec<(u64, u64)> = (0..before as u64).map(|n| (n * 100, 17)).collect();
            regions.extend([(100_000, 31), (200_000, 30)]);
            let index = filled(Fit::BestThenFirst, &regions);
            let found = index.find(Bytes::mib(30), FIRST_FIT_FROM);
            assert_eq!(found, Some(expected as RegionKey), "{before} do not fit");
        }
    }

    #[test]
    fn a_hole_holds_its_addresses_until_it_is_removed() {
        let hole = |at, len| Hole { len: Bytes::mib(len), at: spot(at), region: at as RegionKey };
        let mut holes = Holes::default();
        let all = [hole(10, 4), hole(20, 8), hole(40, 4)];
        all.into_iter().for_each(|hole| holes.insert(hole));
        assert_eq!(
            [9, 10, 13, 14].map(|mib| holes.at(spot(mib))),
            [None, Some(all[0]), Some(all[0]), None]
        );
        assert_eq!(
            (holes.smallest_of(Bytes::mib(4)), holes.largest()),
            (Some(all[0]), Some(all[1]))
        );
        assert_eq!(holes.smallest_of(Bytes::mib(5)), Some(all[1]));
        assert_eq!(holes.smallest_of(Bytes::mib(9)), None);
        holes.remove(all[1]);
        assert_eq!((holes.at(spot(22)), holes.iter().len()), (None, 2));
        assert_eq!((holes.smallest_of(Bytes::mib(5)), holes.largest()), (None, Some(all[2])));
    }

    #[test]
    fn a_region_of_a_larger_class_at_a_lower_address_comes_first() {
        let index = filled(Fit::BestThenFirst, &[(0, 100), (500, 31), (600, 31)]);
        assert_eq!(index.find(Bytes::mib(30), FIRST_FIT_FROM), Some(0));
        let index = filled(Fit::BestThenFirst, &[(550, 100), (500, 31), (600, 31)]);
        assert_eq!(index.find(Bytes::mib(30), FIRST_FIT_FROM), Some(1));
    }

    #[test]
    #[should_panic(expected = "free index lacks region 0")]
    fn a_region_that_only_its_class_lists_cannot_be_removed() {
        let mut index = filled(Fit::BestThenFirst, &[(0, 100)]);
        index.by_size.clear();
        index.remove(spot(0), Bytes::mib(100), 0);
    }

    #[test]
    #[should_panic(expected = "free index lacks region 0")]
    fn a_region_that_its_class_does_not_list_cannot_be_removed() {
        let mut index = filled(Fit::BestThenFirst, &[(0, 100)]);
        index.classes.iter_mut().for_each(BTreeMap::clear);
        index.remove(spot(0), Bytes::mib(100), 0);
    }

    #[test]
    fn a_removed_region_is_found_no_more() {
        for fit in [Fit::BestThenFirst, Fit::BestHighest] {
            let mut index = filled(fit, &[(0, 100), (200, 40), (500, 4000)]);
            index.remove(spot(500), Bytes::mib(4000), 2);
            assert_eq!(index.find(Bytes::mib(101), FIRST_FIT_FROM), None);
            assert_eq!(index.iter().count(), 2);
            assert_eq!(index.bytes(), Bytes::mib(140));
        }
    }
}
