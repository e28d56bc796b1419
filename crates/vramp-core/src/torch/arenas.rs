//! Where the driver puts what PyTorch asks it for.
//!
//! Of free blocks that fit equally well PyTorch takes the one with the lowest address, so what it
//! needs depends on the addresses that `cuMemAlloc` returns. Those of a card differ from run to run;
//! their order does not. It was read off seven recordings made on one H200 (driver 580), all of
//! whose segments this model predicts:
//!
//! - addresses are taken in arenas of whole 32 MiB, each below those taken before;
//! - what an arena has left serves later requests, lowest address first.
//!
//! The pool decides by these addresses and not by the card's, so that it decides alike everywhere.

use std::collections::BTreeMap;

use crate::ids::Spot;

const ARENA_UNIT: u64 = 32 << 20;

/// The addresses of native segments: offsets in one span.
#[derive(Clone, Debug, Default)]
pub(crate) struct Arenas(BTreeMap<u64, Arena>);

#[derive(Clone, Debug)]
struct Arena {
    len: u64,
    /// Start and length of what is free in it; never adjacent.
    holes: BTreeMap<u64, u64>,
}

impl Arenas {
    /// Where a segment of `len` bytes would lie, or `None` if no addresses are left.
    pub(crate) fn find(&self, len: u64) -> Option<u64> {
        let holes = self.0.values().flat_map(|arena| &arena.holes);
        match holes.into_iter().find(|&(_, &hole)| hole >= len) {
            Some((&start, _)) => Some(start),
            None => self.highest_gap(len.checked_next_multiple_of(ARENA_UNIT)?),
        }
    }

    fn highest_gap(&self, len: u64) -> Option<u64> {
        let mut end = Spot::SPAN_LIMIT.count();
        for (&start, arena) in self.0.iter().rev() {
            if end - (start + arena.len) >= len {
                break;
            }
            end = start;
        }
        end.checked_sub(len)
    }

    /// Takes what [`Arenas::find`] has found.
    pub(crate) fn take(&mut self, start: u64, len: u64) {
        if let Some((_, arena)) = self.around(start) {
            let hole = arena.holes.remove(&start).expect("a hole was found here");
            if hole > len {
                arena.holes.insert(start + len, hole - len);
            }
            return;
        }
        let whole = len.next_multiple_of(ARENA_UNIT);
        let rest = (whole > len).then_some((start + len, whole - len));
        self.0.insert(start, Arena { len: whole, holes: rest.into_iter().collect() });
    }

    /// Gives a segment's addresses back; an arena that is free as a whole goes.
    pub(crate) fn give_back(&mut self, start: u64, len: u64) {
        let (at, arena) = self.around(start).expect("a segment lies in an arena");
        let (mut first, mut end) = (start, start + len);
        if let Some((&before, &hole)) = arena.holes.range(..start).next_back()
            && before + hole == start
        {
            arena.holes.remove(&before);
            first = before;
        }
        if let Some(hole) = arena.holes.remove(&end) {
            end += hole;
        }
        if end - first == arena.len {
            self.0.remove(&at);
        } else {
            arena.holes.insert(first, end - first);
        }
    }

    fn around(&mut self, at: u64) -> Option<(u64, &mut Arena)> {
        let (&start, arena) = self.0.range_mut(..=at).next_back()?;
        (at < start + arena.len).then_some((start, arena))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn placed(arenas: &mut Arenas, mib: u64) -> u64 {
        let start = arenas.find(mib * MIB).expect("there are addresses");
        arenas.take(start, mib * MIB);
        (Spot::SPAN_LIMIT.count() - start) / MIB
    }

    #[test]
    fn new_arenas_lie_below_and_what_is_left_of_the_lowest_is_used_first() {
        let mut arenas = Arenas::default();
        assert_eq!(placed(&mut arenas, 148), 160);
        assert_eq!(placed(&mut arenas, 392), 576);
        assert_eq!(placed(&mut arenas, 2), 576 - 392, "behind the lower one");
        assert_eq!(placed(&mut arenas, 20), 576 - 394, "and on");
        assert_eq!(placed(&mut arenas, 20), 608);
        assert_eq!(placed(&mut arenas, 12), 608 - 20, "the lowest");
        assert_eq!(placed(&mut arenas, 12), 160 - 148, "the only one left with room");
    }

    #[test]
    fn what_was_given_back_is_used_again() {
        let mut arenas = Arenas::default();
        let first = arenas.find(20 * MIB).expect("there are addresses");
        arenas.take(first, 20 * MIB);
        let second = placed(&mut arenas, 2);
        assert_eq!(second, 12);
        assert_eq!(placed(&mut arenas, 64), 96);
        arenas.give_back(first, 20 * MIB);
        arenas.give_back(Spot::SPAN_LIMIT.count() - second * MIB, 2 * MIB);
        assert_eq!(placed(&mut arenas, 32), 32, "the whole arena went");
    }

    #[test]
    fn more_than_there_are_addresses_has_no_place() {
        assert_eq!(Arenas::default().find(16 << 40), None);
        assert_eq!(Arenas::default().find(u64::MAX), None);
    }
}
