//! An order to place blocks in: fill the lowest valley of the skyline first.
//!
//! Over time, what was placed so far has a height. Its lowest stretch is a valley; the most important
//! block that lives wholly within the valley goes there. If none does, the valley is filled up to its
//! lower wall. Blocks that are live together at a peak so come to lie on one another without gaps, in
//! whatever order that takes, where an order by size alone leaves holes.
//!
//! Deliberately absent: offsets. Blocks that are placed in this order may get lower ones still, in
//! gaps below other blocks and below blocks that were live before.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::recording::Position;

/// Heights of stretches of time. Neighbours differ.
#[derive(Debug)]
pub(super) struct Skyline {
    /// Each stretch by its start: it ends where the next one starts.
    heights: BTreeMap<Position, u64>,
    /// The same, lowest first.
    lowest: BTreeSet<(u64, Position)>,
    end: Position,
}

impl Skyline {
    /// Flat ground from position 0 on.
    pub(super) fn new(end: Position) -> Skyline {
        Skyline { heights: BTreeMap::from([(0, 0)]), lowest: BTreeSet::from([(0, 0)]), end }
    }

    /// The first of the lowest stretches. O(log n).
    pub(super) fn valley(&self) -> Range<Position> {
        let &(_, start) = self.lowest.first().expect("a skyline has a stretch");
        start..self.end_of(start)
    }

    /// Puts something on a part of a stretch. O(log n).
    pub(super) fn put(&mut self, part: Range<Position>, len: u64) {
        let (&start, &height) =
            self.heights.range(..=part.start).next_back().expect("a skyline begins at 0");
        debug_assert!(part.end <= self.end_of(start), "{part:?} is within one stretch");
        if part.end < self.end_of(start) {
            self.set(part.end, height);
        }
        self.set(part.start, height.saturating_add(len));
        self.merge(part.end);
        self.merge(part.start);
    }

    /// Fills a valley up to its lower wall; one without walls stays. O(log n).
    pub(super) fn fill(&mut self, valley: Range<Position>) {
        let left = self.heights.range(..valley.start).next_back().map(|(_, &height)| height);
        let right = self.heights.get(&valley.end).copied();
        if let Some(wall) = left.into_iter().chain(right).min() {
            self.set(valley.start, wall);
            self.merge(valley.end);
            self.merge(valley.start);
        }
    }

    fn end_of(&self, start: Position) -> Position {
        self.heights.range(start + 1..).next().map_or(self.end, |(&next, _)| next)
    }

    fn set(&mut self, start: Position, height: u64) {
        if let Some(before) = self.heights.insert(start, height) {
            self.lowest.remove(&(before, start));
        }
        self.lowest.insert((height, start));
    }

    /// Makes a stretch one with the stretch before it, if they are of one height.
    fn merge(&mut self, start: Position) {
        let before = self.heights.range(..start).next_back().map(|(_, &height)| height);
        if let Some(&height) = self.heights.get(&start)
            && before == Some(height)
        {
            self.heights.remove(&start);
            self.lowest.remove(&(height, start));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_stretch_is_the_valley() {
        let mut skyline = Skyline::new(10);
        assert_eq!(skyline.valley(), 0..10);
        skyline.put(2..5, 7);
        assert_eq!(skyline.valley(), 0..2);
        skyline.put(0..2, 9);
        assert_eq!(skyline.valley(), 5..10);
        skyline.put(5..10, 8);
        assert_eq!(skyline.valley(), 2..5);
    }

    #[test]
    fn a_valley_is_filled_to_its_lower_wall() {
        let mut skyline = Skyline::new(10);
        skyline.put(0..3, 5);
        skyline.put(6..10, 3);
        skyline.fill(3..6);
        assert_eq!(skyline.valley(), 3..10);
        skyline.fill(3..10);
        assert_eq!(skyline.valley(), 0..10);
        skyline.fill(0..10);
        assert_eq!(skyline.valley(), 0..10);
    }
}
