//! Free pieces by size: 32nds of a power of two, found with two bit scans. What is left of a piece that
//! is hardly longer than a request serves nothing for long, so the classes are narrow.

use crate::heap::pieces::{NONE, Piece, Pieces};

const SUB_BITS: u32 = 5;
const SUBS: usize = 1 << SUB_BITS;
const LEVELS: usize = 32;

/// Pieces of a request's own class that are looked at.
const SCANNED_MAX: usize = 4;

/// Free pieces by size.
#[derive(Clone, Debug)]
pub(super) struct Bins {
    /// 4 KiB, which are too many for the stacks of some threads.
    heads: Box<[[u32; SUBS]]>,
    levels: u32,
    subs: [u32; LEVELS],
}

impl Bins {
    pub(super) fn new() -> Bins {
        let heads = vec![[NONE; SUBS]; LEVELS].into_boxed_slice();
        Bins { heads, levels: 0, subs: [0; LEVELS] }
    }

    fn bin_of(units: u32) -> (usize, usize) {
        let level = units.ilog2();
        let sub = (u64::from(units) << SUB_BITS >> level) as usize & (SUBS - 1);
        (level as usize, sub)
    }

    /// A piece of at least `units`: the first that is long enough of four in their own bin, or else the
    /// first of the lowest occupied bin above.
    pub(super) fn find(&self, units: u32, pieces: &Pieces) -> Option<u32> {
        let (level, sub) = Bins::bin_of(units);
        let mut own = listed(self.heads[level][sub], pieces).take(SCANNED_MAX);
        if let Some(piece) = own.find(|&piece| pieces[piece].units >= units) {
            return Some(piece);
        }
        let above = self.subs[level] >> sub >> 1;
        if above != 0 {
            return Some(self.heads[level][sub + 1 + above.trailing_zeros() as usize]);
        }
        let levels = self.levels.checked_shr(level as u32 + 1).unwrap_or(0);
        if levels == 0 {
            return None;
        }
        let level = level + 1 + levels.trailing_zeros() as usize;
        Some(self.heads[level][self.subs[level].trailing_zeros() as usize])
    }

    /// Adds a free piece.
    pub(super) fn insert(&mut self, piece: u32, pieces: &mut Pieces) {
        let (level, sub) = Bins::bin_of(pieces[piece].units);
        let head = std::mem::replace(&mut self.heads[level][sub], piece);
        self.levels |= 1 << level;
        self.subs[level] |= 1 << sub;
        pieces[piece].bin_prev = NONE;
        pieces[piece].bin_next = head;
        if head != NONE {
            pieces[head].bin_prev = piece;
        }
    }

    /// Takes a piece out.
    pub(super) fn remove(&mut self, piece: u32, pieces: &mut Pieces) {
        let Piece { units, bin_prev, bin_next, .. } = pieces[piece];
        if bin_next != NONE {
            pieces[bin_next].bin_prev = bin_prev;
        }
        if bin_prev != NONE {
            pieces[bin_prev].bin_next = bin_next;
            return;
        }
        let (level, sub) = Bins::bin_of(units);
        assert_eq!(self.heads[level][sub], piece, "piece {piece} heads its bin");
        self.heads[level][sub] = bin_next;
        if bin_next == NONE {
            self.subs[level] &= !(1 << sub);
            if self.subs[level] == 0 {
                self.levels &= !(1 << level);
            }
        }
    }

    /// True if there is a piece of at least `2^level` units.
    pub(super) fn has_from(&self, level: u32) -> bool {
        self.levels >> level != 0
    }

    /// Every piece of at least `2^level` units. O(those).
    pub(super) fn from(&self, level: u32, pieces: &Pieces) -> impl Iterator<Item = u32> {
        let occupied = |level: &usize| self.levels >> level & 1 != 0;
        let levels = (level as usize..LEVELS).filter(occupied);
        levels.flat_map(|level| self.heads[level]).flat_map(move |head| listed(head, pieces))
    }

    /// Number of pieces in all bins. O(n).
    pub(super) fn count(&self, pieces: &Pieces) -> usize {
        self.from(0, pieces).count()
    }
}

/// The pieces of a bin from `head` on.
fn listed(head: u32, pieces: &Pieces) -> impl Iterator<Item = u32> {
    let present = |piece: u32| Some(piece).filter(|&piece| piece != NONE);
    std::iter::successors(present(head), move |&piece| present(pieces[piece].bin_next))
}
