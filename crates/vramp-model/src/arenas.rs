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

use vramp_core::PoolAddr;

pub(crate) const ARENA_UNIT: u64 = 32 << 20;

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
        let mut end = PoolAddr::SPAN_LIMIT.count();
        for (&start, arena) in self.0.iter().rev() {
            if end - (start + arena.len) >= len {
                break;
            }
            end = start;
        }
        end.checked_sub(len)
    }

    /// Takes free addresses, such as [`Arenas::find`] has found, or those of a recorded segment, with
    /// the units of 32 MiB around them. Recorded segments come in address order.
    pub(crate) fn take(&mut self, start: u64, len: u64) {
        let end = start + len;
        let first = start / ARENA_UNIT * ARENA_UNIT;
        let last = end.next_multiple_of(ARENA_UNIT);
        let (at, arena) = match self.around(start).map(|(at, _)| at) {
            Some(at) => (at, self.0.get_mut(&at).expect("the arena was found")),
            None => {
                (first, self.0.entry(first).or_insert(Arena { len: 0, holes: BTreeMap::new() }))
            }
        };
        if last > at + arena.len {
            let old_end = at + arena.len;
            arena.len = last - at;
            match arena.holes.last_entry() {
                Some(mut hole) if hole.key() + hole.get() == old_end => {
                    *hole.get_mut() = last - hole.key();
                }
                _ => drop(arena.holes.insert(old_end, last - old_end)),
            }
        }
        let hole = arena.holes.range(..=start).next_back().map(|(&hole, &len)| (hole, hole + len));
        let (hole, hole_end) = hole.expect("the addresses are free");
        arena.holes.remove(&hole);
        if hole < start {
            arena.holes.insert(hole, start - hole);
        }
        if end < hole_end {
            arena.holes.insert(end, hole_end - end);
        }
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
        (PoolAddr::SPAN_LIMIT.count() - start) / MIB
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
        arenas.give_back(PoolAddr::SPAN_LIMIT.count() - second * MIB, 2 * MIB);
        assert_eq!(placed(&mut arenas, 32), 32, "the whole arena went");
    }

    #[test]
    fn recorded_segments_leave_the_rest_of_their_arenas_free() {
        let mut arenas = Arenas::default();
        for (start, len) in [(36, 2), (38, 20), (60, 8), (96, 20)] {
            arenas.take(start * MIB, len * MIB);
        }
        let found = |mib: u64| arenas.find(mib * MIB).map(|start| start / MIB);
        assert_eq!(found(2), Some(32), "before the first");
        assert_eq!(found(12), Some(68), "behind the third, in the unit it reaches into");
        assert_eq!(found(28), Some(68));
        assert_eq!(found(29), Some(PoolAddr::SPAN_LIMIT.count() / MIB - 32));
    }

    #[test]
    fn more_than_there_are_addresses_has_no_place() {
        assert_eq!(Arenas::default().find(16 << 40), None);
        assert_eq!(Arenas::default().find(u64::MAX), None);
    }
}
