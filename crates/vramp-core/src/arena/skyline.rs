//! Heights over time, of which the lowest stretch is found at once.
//!
//! Over time, what was placed so far has a height. Its lowest stretch is a valley; a block that lives
//! wholly within the valley is put there, or the valley is filled up to its lower wall.
//!
//! A stretch is listed once for each height it ever had, and forgotten when it comes up: n blocks
//! take O(n log n) in all.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::recording::Position;

/// Heights of stretches of time. Neighbours differ.
#[derive(Debug)]
pub(super) struct Skyline {
    /// For each position, the stretch that starts there.
    stretches: Vec<Option<Stretch>>,
    /// Heights and starts. Those that are no longer so are skipped.
    lowest: BinaryHeap<Reverse<(u64, Position)>>,
    end: Position,
}

#[derive(Clone, Copy, Debug)]
struct Stretch {
    height: u64,
    end: Position,
    /// Where the stretch before it starts.
    before: Option<Position>,
}

/// The lowest stretch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Valley {
    pub during: Range<Position>,
    pub height: u64,
}

impl Skyline {
    /// Flat ground from position 0 on. O(end).
    pub(super) fn new(end: Position) -> Skyline {
        let mut stretches = vec![None; end as usize];
        if let Some(first) = stretches.first_mut() {
            *first = Some(Stretch { height: 0, end, before: None });
        }
        Skyline { stretches, lowest: BinaryHeap::from([Reverse((0, 0))]), end }
    }

    /// The first of the lowest stretches, of which there is one unless time is empty.
    pub(super) fn valley(&mut self) -> Option<Valley> {
        while let Some(&Reverse((height, start))) = self.lowest.peek() {
            match self.stretches.get(start as usize).copied().flatten() {
                Some(stretch) if stretch.height == height => {
                    return Some(Valley { during: start..stretch.end, height });
                }
                _ => self.lowest.pop(),
            };
        }
        None
    }

    /// Puts something on a part of the valley.
    pub(super) fn put(&mut self, valley: &Valley, part: Range<Position>, len: u64) {
        let Valley { during, height } = valley;
        debug_assert!(during.start <= part.start && part.end <= during.end, "{part:?} lies in it");
        if part.end < during.end {
            self.split(during.start, part.end);
        }
        if during.start < part.start {
            self.split(during.start, part.start);
        }
        self.raise(part.start, height.saturating_add(len));
    }

    /// Fills the valley up to its lower wall. False if it has no wall: all is flat.
    pub(super) fn fill(&mut self, valley: &Valley) -> bool {
        let before = self.at(valley.during.start).before.map(|before| self.at(before).height);
        let behind = (valley.during.end < self.end).then(|| self.at(valley.during.end).height);
        let Some(wall) = before.into_iter().chain(behind).min() else { return false };
        self.raise(valley.during.start, wall);
        true
    }

    fn at(&self, start: Position) -> Stretch {
        self.stretches[start as usize].expect("a stretch starts here")
    }

    fn split(&mut self, start: Position, at: Position) {
        let whole = self.at(start);
        self.stretches[start as usize] = Some(Stretch { end: at, ..whole });
        self.stretches[at as usize] = Some(Stretch { before: Some(start), ..whole });
        self.set_before(whole.end, at);
        self.lowest.push(Reverse((whole.height, at)));
    }

    /// Changes the height of a stretch, and makes it one with neighbours of that height.
    fn raise(&mut self, start: Position, height: u64) {
        let (mut start, mut stretch) = (start, Stretch { height, ..self.at(start) });
        if stretch.end < self.end && self.at(stretch.end).height == height {
            stretch.end = self.remove(stretch.end).end;
        }
        if let Some(before) = stretch.before
            && self.at(before).height == height
        {
            self.remove(start);
            (start, stretch.before) = (before, self.at(before).before);
        }
        self.stretches[start as usize] = Some(stretch);
        self.set_before(stretch.end, start);
        self.lowest.push(Reverse((height, start)));
    }

    fn remove(&mut self, start: Position) -> Stretch {
        self.stretches[start as usize].take().expect("a stretch starts here")
    }

    fn set_before(&mut self, start: Position, before: Position) {
        if let Some(stretch) = self.stretches.get_mut(start as usize).and_then(Option::as_mut) {
            stretch.before = Some(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(skyline: &mut Skyline, part: Range<Position>, len: u64) {
        let valley = skyline.valley().unwrap();
        skyline.put(&valley, part, len);
    }

    fn valley(skyline: &mut Skyline) -> (Range<Position>, u64) {
        let Valley { during, height } = skyline.valley().unwrap();
        (during, height)
    }

    fn fill(skyline: &mut Skyline) -> bool {
        let valley = skyline.valley().unwrap();
        skyline.fill(&valley)
    }

    #[test]
    fn the_lowest_stretch_is_the_valley() {
        let mut skyline = Skyline::new(10);
        assert_eq!(valley(&mut skyline), (0..10, 0));
        put(&mut skyline, 2..5, 7);
        assert_eq!(valley(&mut skyline), (0..2, 0));
        put(&mut skyline, 0..2, 9);
        assert_eq!(valley(&mut skyline), (5..10, 0));
        put(&mut skyline, 5..10, 8);
        assert_eq!(valley(&mut skyline), (2..5, 7));
    }

    #[test]
    fn a_valley_is_filled_to_its_lower_wall() {
        let mut skyline = Skyline::new(10);
        put(&mut skyline, 0..3, 5);
        put(&mut skyline, 6..10, 3);
        assert!(fill(&mut skyline));
        assert_eq!(valley(&mut skyline), (3..10, 3));
        assert!(fill(&mut skyline));
        assert_eq!(valley(&mut skyline), (0..10, 5));
        assert!(!fill(&mut skyline));
        assert_eq!(valley(&mut skyline), (0..10, 5));
    }

    #[test]
    fn empty_time_has_no_valley() {
        assert_eq!(Skyline::new(0).valley(), None);
    }
}
