//! The addresses of segments, as the driver's `cuMemAlloc` would choose them.
//!
//! Of free blocks that fit equally well PyTorch takes the one with the lowest address, so what it
//! needs depends on the addresses that `cuMemAlloc` returns. Those of a card differ from run to
//! run; their order does not. This order is from seven recordings made on one H200 (driver 580);
//! the model predicts all of their segments:
//!
//! - addresses are taken in areas of whole 32 MiB, each below those taken before;
//! - the rest of an area serves later requests, lowest address first.
//!
//! The pool decides by these addresses and not by the card's, so its decisions are the same
//! everywhere.

use std::collections::BTreeMap;

use vramp_core::PoolAddr;

pub(crate) const AREA_UNIT: u64 = 32 << 20;

/// The addresses of native segments: offsets in one span.
#[derive(Clone, Debug, Default)]
pub(crate) struct DriverAddresses(BTreeMap<u64, Area>);

#[derive(Clone, Debug)]
struct Area {
    len: u64,
    /// Free parts by start, with their lengths; never adjacent.
    holes: BTreeMap<u64, u64>,
}

impl DriverAddresses {
    /// Returns the start of a new segment of `len` bytes, or `None` if no addresses are left.
    pub(crate) fn find(&self, len: u64) -> Option<u64> {
        let holes = self.0.values().flat_map(|area| &area.holes);
        match holes.into_iter().find(|&(_, &hole)| hole >= len) {
            Some((&start, _)) => Some(start),
            None => self.highest_gap(len.checked_next_multiple_of(AREA_UNIT)?),
        }
    }

    fn highest_gap(&self, len: u64) -> Option<u64> {
        let mut end = PoolAddr::SPAN_LIMIT.count();
        for (&start, area) in self.0.iter().rev() {
            if end - (start + area.len) >= len {
                break;
            }
            end = start;
        }
        end.checked_sub(len)
    }

    /// Takes free addresses, such as [`DriverAddresses::find`] has found, or those of a recorded
    /// segment, with the units of 32 MiB around them. Recorded segments come in address order.
    pub(crate) fn take(&mut self, start: u64, len: u64) {
        let end = start + len;
        let first = start / AREA_UNIT * AREA_UNIT;
        let last = end.next_multiple_of(AREA_UNIT);
        let (at, area) = match self.around(start).map(|(at, _)| at) {
            Some(at) => (at, self.0.get_mut(&at).expect("the area was found")),
            None => (first, self.0.entry(first).or_insert(Area { len: 0, holes: BTreeMap::new() })),
        };
        if last > at + area.len {
            let old_end = at + area.len;
            area.len = last - at;
            match area.holes.last_entry() {
                Some(mut hole) if hole.key() + hole.get() == old_end => {
                    *hole.get_mut() = last - hole.key();
                }
                _ => drop(area.holes.insert(old_end, last - old_end)),
            }
        }
        let hole = area.holes.range(..=start).next_back().map(|(&hole, &len)| (hole, hole + len));
        let (hole, hole_end) = hole.expect("the addresses are free");
        area.holes.remove(&hole);
        if hole < start {
            area.holes.insert(hole, start - hole);
        }
        if end < hole_end {
            area.holes.insert(end, hole_end - end);
        }
    }

    /// Frees a segment's addresses, and the area if it is free as a whole.
    pub(crate) fn free(&mut self, start: u64, len: u64) {
        let (at, area) = self.around(start).expect("a segment lies in an area");
        let (mut first, mut end) = (start, start + len);
        if let Some((&before, &hole)) = area.holes.range(..start).next_back()
            && before + hole == start
        {
            area.holes.remove(&before);
            first = before;
        }
        if let Some(hole) = area.holes.remove(&end) {
            end += hole;
        }
        if end - first == area.len {
            self.0.remove(&at);
        } else {
            area.holes.insert(first, end - first);
        }
    }

    fn around(&mut self, at: u64) -> Option<(u64, &mut Area)> {
        let (&start, area) = self.0.range_mut(..=at).next_back()?;
        (at < start + area.len).then_some((start, area))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn placed(areas: &mut DriverAddresses, mib: u64) -> u64 {
        let start = areas.find(mib * MIB).expect("there are addresses");
        areas.take(start, mib * MIB);
        (PoolAddr::SPAN_LIMIT.count() - start) / MIB
    }

    #[test]
    fn new_arenas_lie_below_and_what_is_left_of_the_lowest_is_used_first() {
        let mut areas = DriverAddresses::default();
        assert_eq!(placed(&mut areas, 148), 160);
        assert_eq!(placed(&mut areas, 392), 576);
        assert_eq!(placed(&mut areas, 2), 576 - 392, "behind the lower one");
        assert_eq!(placed(&mut areas, 20), 576 - 394, "and on");
        assert_eq!(placed(&mut areas, 20), 608);
        assert_eq!(placed(&mut areas, 12), 608 - 20, "the lowest");
        assert_eq!(placed(&mut areas, 12), 160 - 148, "the only one left with room");
    }

    #[test]
    fn what_was_given_back_is_used_again() {
        let mut areas = DriverAddresses::default();
        let first = areas.find(20 * MIB).expect("there are addresses");
        areas.take(first, 20 * MIB);
        let second = placed(&mut areas, 2);
        assert_eq!(second, 12);
        assert_eq!(placed(&mut areas, 64), 96);
        areas.free(first, 20 * MIB);
        areas.free(PoolAddr::SPAN_LIMIT.count() - second * MIB, 2 * MIB);
        assert_eq!(placed(&mut areas, 32), 32, "the whole area went");
    }

    #[test]
    fn recorded_segments_leave_the_rest_of_their_arenas_free() {
        let mut areas = DriverAddresses::default();
        for (start, len) in [(36, 2), (38, 20), (60, 8), (96, 20)] {
            areas.take(start * MIB, len * MIB);
        }
        let found = |mib: u64| areas.find(mib * MIB).map(|start| start / MIB);
        assert_eq!(found(2), Some(32), "before the first");
        assert_eq!(found(12), Some(68), "behind the third, in the unit it reaches into");
        assert_eq!(found(28), Some(68));
        assert_eq!(found(29), Some(PoolAddr::SPAN_LIMIT.count() / MIB - 32));
    }

    #[test]
    fn more_than_there_are_addresses_has_no_place() {
        assert_eq!(DriverAddresses::default().find(16 << 40), None);
        assert_eq!(DriverAddresses::default().find(u64::MAX), None);
    }
}
