//! Free pieces by size: eighths of a power of two, found with two bit scans.

use super::pieces::Piece;
use super::{NONE, StreamHeap};

const SUB_BITS: u32 = 3;
const SUBS: usize = 1 << SUB_BITS;
const LEVELS: usize = 32;

/// Free pieces by size.
#[derive(Clone, Debug)]
pub(super) struct Bins {
    pub(super) heads: [[u32; SUBS]; LEVELS],
    pub(super) levels: u32,
    pub(super) subs: [u8; LEVELS],
}

impl Bins {
    pub(super) fn new() -> Bins {
        Bins { heads: [[NONE; SUBS]; LEVELS], levels: 0, subs: [0; LEVELS] }
    }

    pub(super) fn bin_of(units: u32) -> (usize, usize) {
        let level = units.ilog2();
        let sub = (u64::from(units) << SUB_BITS >> level) as usize & (SUBS - 1);
        (level as usize, sub)
    }

    /// The first piece of the lowest occupied bin above `units`' own.
    pub(super) fn head_above(&self, units: u32) -> Option<u32> {
        let (level, sub) = Bins::bin_of(units);
        let above = (u32::from(self.subs[level]) >> sub >> 1) as u8;
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
}

impl StreamHeap {
    pub(super) fn bin(&mut self, piece: u32) {
        let (level, sub) = Bins::bin_of(self.pieces[piece as usize].units);
        let head = std::mem::replace(&mut self.bins.heads[level][sub], piece);
        self.bins.levels |= 1 << level;
        self.bins.subs[level] |= 1 << sub;
        self.pieces[piece as usize].bin_prev = NONE;
        self.pieces[piece as usize].bin_next = head;
        if head != NONE {
            self.pieces[head as usize].bin_prev = piece;
        }
    }

    pub(super) fn unbin(&mut self, piece: u32) {
        let Piece { units, bin_prev, bin_next, .. } = self.pieces[piece as usize];
        if bin_next != NONE {
            self.pieces[bin_next as usize].bin_prev = bin_prev;
        }
        if bin_prev != NONE {
            self.pieces[bin_prev as usize].bin_next = bin_next;
            return;
        }
        let (level, sub) = Bins::bin_of(units);
        assert_eq!(self.bins.heads[level][sub], piece, "piece {piece} heads its bin");
        self.bins.heads[level][sub] = bin_next;
        if bin_next == NONE {
            self.bins.subs[level] &= !(1 << sub);
            if self.bins.subs[level] == 0 {
                self.bins.levels &= !(1 << level);
            }
        }
    }

    pub(super) fn binned(&self) -> usize {
        let heads = self.bins.heads.iter().flatten().copied();
        heads
            .map(|head| {
                std::iter::successors(Some(head).filter(|&head| head != NONE), |&piece| {
                    Some(self.pieces[piece as usize].bin_next).filter(|&next| next != NONE)
                })
                .count()
            })
            .sum()
    }
}
