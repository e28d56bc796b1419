//! The free space of an arena: pieces in the order of their offsets, each with the work that must
//! be over before it is used again.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::order::{Frontier, Point};

/// A free range: its length in bytes, and its last uses.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    len: u64,
    frontier: Frontier,
}

/// Neighbours are merged where they have the same frontier; a request may span several pieces.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    pieces: BTreeMap<u64, Piece>,
    /// Starts of the pieces with a frontier.
    unsettled: BTreeSet<u64>,
}

/// A range that a request may use, of one piece or several.
type Run = Range<u64>;

impl Space {
    pub(crate) fn new(capacity: u64) -> Space {
        let mut space = Space { pieces: BTreeMap::new(), unsettled: BTreeSet::new() };
        space.give(0..capacity, Frontier::default());
        space
    }

    /// Takes out a range that lies in free pieces.
    pub(crate) fn take(&mut self, range: Range<u64>) {
        let first = self.pieces.range(..=range.start).next_back().map(|(&start, _)| start);
        let mut at = first.unwrap_or_else(|| panic!("{range:?} is free"));
        while at < range.end {
            let piece = self.remove(at).unwrap_or_else(|| panic!("{range:?} is free"));
            let end = at + piece.len;
            if at < range.start {
                let front = Piece { len: range.start - at, frontier: piece.frontier.clone() };
                self.insert(at, front);
            }
            if range.end < end {
                self.insert(range.end, Piece { len: end - range.end, ..piece });
            }
            at = end;
        }
    }

    /// Puts a range back, to be used where the frontier is covered.
    pub(crate) fn give(&mut self, range: Range<u64>, frontier: Frontier) {
        let mut range = range;
        if let Some((&start, before)) = self.pieces.range(..range.start).next_back()
            && start + before.len == range.start
            && before.frontier == frontier
        {
            self.remove(start);
            range.start = start;
        }
        if let Some(behind) = self.pieces.get(&range.end)
            && behind.frontier == frontier
        {
            let end = range.end + behind.len;
            self.remove(range.end);
            range.end = end;
        }
        if !range.is_empty() {
            self.insert(range.start, Piece { len: range.end - range.start, frontier });
        }
    }

    fn insert(&mut self, start: u64, piece: Piece) {
        if piece.frontier != Frontier::default() {
            self.unsettled.insert(start);
        }
        self.pieces.insert(start, piece);
    }

    fn remove(&mut self, start: u64) -> Option<Piece> {
        self.unsettled.remove(&start);
        self.pieces.remove(&start)
    }

    /// Removes all frontiers: all that comes now is ordered after those uses. O(log n) for each piece
    /// that has one.
    pub(crate) fn settle(&mut self) {
        for start in std::mem::take(&mut self.unsettled) {
            if let Some(piece) = self.pieces.remove(&start) {
                self.give(start..start + piece.len, Frontier::default());
            }
        }
    }

    /// The ranges that may be used at a point, lowest first. O(pieces).
    pub(crate) fn runs<'a>(&'a self, at: Point<'a>) -> impl Iterator<Item = Run> + 'a {
        let mut usable = self
            .pieces
            .iter()
            .filter(move |(_, piece)| at.covers(&piece.frontier))
            .map(|(&start, piece)| start..start + piece.len)
            .peekable();
        std::iter::from_fn(move || {
            let mut run = usable.next()?;
            while let Some(next) = usable.next_if(|next| next.start == run.end) {
                run.end = next.end;
            }
            Some(run)
        })
    }

    /// True if the whole range is free and may be used at this point. O(log n) and its pieces.
    pub(crate) fn is_usable(&self, range: Range<u64>, at: Point<'_>) -> bool {
        let first = self.pieces.range(..=range.start).next_back();
        let mut reached = range.start;
        let rest = first.map_or(range.start, |(&start, _)| start);
        for (&start, piece) in self.pieces.range(rest..range.end) {
            if start > reached || !at.covers(&piece.frontier) {
                return false;
            }
            reached = start + piece.len;
        }
        reached >= range.end
    }

    /// All free ranges with any frontier, in order and not merged.
    pub(crate) fn stretches(&self) -> impl Iterator<Item = Range<u64>> {
        self.pieces.iter().map(|(&start, piece)| start..start + piece.len)
    }

    /// The first pair of neighbours that ought to be one piece.
    pub(crate) fn unmerged(&self) -> Option<u64> {
        let pairs = self.pieces.iter().zip(self.pieces.iter().skip(1));
        let mut unmerged = pairs.filter(|((start, piece), (behind, next))| {
            *start + piece.len == **behind && piece.frontier == next.frontier
        });
        unmerged.next().map(|((&start, _), _)| start)
    }
}
