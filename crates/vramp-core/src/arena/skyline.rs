//! Heights over time, of which a stretch lower than its neighbours is found at once.
//!
//! Over time, what was placed so far has a height. A stretch between higher ones is a valley; a block
//! that lives wholly within the valley is put there, or the valley is filled up to its lower wall.
//!
//! A block within one valley lies in no other, and a valley changes only until it is filled up to a
//! wall. So the order in which valleys are looked at does not change where blocks come to lie, and the
//! cheapest order does: the stretches are two stacks, left and right of the valley. Each step is O(1)
//! amortized, at any number of blocks.

use std::ops::Range;

use super::recording::Position;

/// Heights of stretches of time. Neighbours differ.
#[derive(Debug)]
pub(super) struct Skyline {
    /// What is left of the current stretch, each lower than the one before.
    left: Vec<Stretch>,
    current: Stretch,
    /// What is right of it, the next one last.
    right: Vec<Stretch>,
    end: Position,
}

/// It ends where the next one starts.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    start: Position,
    height: u64,
}

/// A stretch that is lower than its neighbours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Valley {
    pub during: Range<Position>,
    pub height: u64,
}

impl Skyline {
    /// Flat ground from position 0 on.
    pub(super) fn new(end: Position) -> Skyline {
        let current = Stretch { start: 0, height: 0 };
        Skyline { left: Vec::new(), current, right: Vec::new(), end }
    }

    /// The first valley from the current stretch on; there is one unless time is empty.
    pub(super) fn valley(&mut self) -> Option<Valley> {
        while let Some(next) = self.right.pop_if(|next| next.height < self.current.height) {
            self.left.push(std::mem::replace(&mut self.current, next));
        }
        let Stretch { start, height } = self.current;
        let during = start..self.right.last().map_or(self.end, |next| next.start);
        (!during.is_empty()).then_some(Valley { during, height })
    }

    /// Puts something on a part of the valley.
    pub(super) fn put(&mut self, valley: &Valley, part: Range<Position>, len: u64) {
        let Valley { during, height } = valley;
        debug_assert!(during.start <= part.start && part.end <= during.end, "{part:?} lies in it");
        if part.end < during.end {
            self.right.push(Stretch { start: part.end, height: *height });
        }
        let raised = Stretch { start: part.start, height: height.saturating_add(len) };
        if during.start < part.start {
            self.join_right(raised.height);
            self.right.push(raised);
        } else {
            self.raise(raised.height);
        }
    }

    /// Fills the valley up to its lower wall. False if it has no wall: all is flat.
    pub(super) fn fill(&mut self) -> bool {
        let walls = self.left.last().into_iter().chain(self.right.last());
        let Some(wall) = walls.map(|wall| wall.height).min() else { return false };
        self.raise(wall);
        true
    }

    /// Changes the height of the current stretch, and makes it one with neighbours of that height.
    fn raise(&mut self, height: u64) {
        self.current.height = height;
        self.join_right(height);
        if let Some(before) = self.left.pop_if(|before| before.height <= height) {
            if before.height < height {
                self.right.push(self.current);
            }
            self.current = before;
        }
    }

    /// Removes the next stretch if it has this height: the one before it reaches to its end.
    fn join_right(&mut self, height: u64) {
        self.right.pop_if(|next| next.height == height);
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
        skyline.valley().unwrap();
        skyline.fill()
    }

    #[test]
    fn a_stretch_lower_than_its_neighbours_is_a_valley() {
        let mut skyline = Skyline::new(10);
        assert_eq!(valley(&mut skyline), (0..10, 0));
        put(&mut skyline, 2..5, 7);
        assert_eq!(valley(&mut skyline), (0..2, 0));
        put(&mut skyline, 0..2, 9);
        assert_eq!(valley(&mut skyline), (5..10, 0));
        put(&mut skyline, 5..10, 8);
        assert_eq!(valley(&mut skyline), (2..5, 7));
        put(&mut skyline, 3..4, 5);
        assert_eq!(valley(&mut skyline), (2..3, 7));
        // Neighbours of the same height are one.
        put(&mut skyline, 2..3, 5);
        assert_eq!(valley(&mut skyline), (0..2, 9));
        assert!(fill(&mut skyline));
        assert_eq!(valley(&mut skyline), (4..5, 7));
        put(&mut skyline, 4..5, 5);
        assert_eq!(valley(&mut skyline), (5..10, 8));
        assert!(fill(&mut skyline));
        assert_eq!(valley(&mut skyline), (0..10, 12));
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
