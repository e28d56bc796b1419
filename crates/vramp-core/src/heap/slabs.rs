//! The slabs of a heap: taken from the pool, kept while empty, and given back.

use super::pieces::{Piece, State};
use super::{Freed, NONE, StreamHeap};
use crate::Bytes;
use crate::ids::PoolAddr;
use crate::pool::RegionKey;
use crate::pool::{BLOCK_ALIGN, Pool};

/// Slabs do not grow beyond this.
const SLAB_MOST: u64 = 32 << 20;
/// How much a heap keeps in slabs that hold nothing.
const EMPTY_MOST: u64 = 32 << 20;
/// Free pieces of at least this length leave a slab when the pool is short.
const SHED_LEAST: u64 = 512 << 10;

/// A stretch of the pool's memory for a heap to cut up.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a slab that is dropped is lost to the pool"]
pub struct Slab {
    pub(crate) region: RegionKey,
    pub(crate) at: PoolAddr,
    pub(crate) len: u64,
}

/// A slab and what of it is not free.
#[derive(Debug)]
pub(super) struct Home {
    pub(super) slab: Slab,
    pub(super) first: u32,
    pub(super) taken_units: u32,
}

impl StreamHeap {
    /// How large a slab to ask the pool for when a request finds no room: a quarter of what the
    /// heap has, within bounds.
    pub fn wanted(&self, request: Bytes, page: Bytes) -> Bytes {
        let least = request.max(Bytes::new(1)).checked_round_up(page).unwrap_or(request);
        Bytes::new((self.bytes / 4).min(SLAB_MOST)).round_down(page).max(least)
    }

    /// Takes a slab into the heap.
    pub fn add(&mut self, slab: Slab) {
        self.bytes += slab.len;
        let units = (slab.len / BLOCK_ALIGN) as u32;
        let number = self.new_home(Home { slab, first: NONE, taken_units: 0 });
        let whole = self.new_piece(Piece {
            slab: number,
            start: 0,
            units,
            state: State::Free,
            generation: 0,
            prev: NONE,
            next: NONE,
            bin_prev: NONE,
            bin_next: NONE,
        });
        self.home_mut(number).first = whole;
        self.note_empty(number);
        self.bin(whole);
    }

    /// Frees a piece. Returns its slab if that is empty and not worth keeping.
    pub(super) fn give_back(&mut self, piece: u32) -> Freed {
        let slab = self.give_back_to_slab(piece);
        let home = self.home(slab);
        let first = self.empty.first() == Some(&slab);
        if home.taken_units > 0 || first || self.empty_bytes <= EMPTY_MOST {
            return Freed::Kept;
        }
        Freed::Surplus(self.remove(slab))
    }

    /// Gives the pool what the heap does not need: empty slabs, and large free pieces.
    pub fn shed(&mut self, pool: &mut Pool) {
        self.promote(pool);
        for number in 0..self.slabs.len() as u32 {
            if self.slabs[number as usize].is_some() {
                self.shed_slab(number, pool);
            }
        }
    }

    /// Cuts the free pieces of a slab that are worth it out of it, from the back.
    pub(super) fn shed_slab(&mut self, number: u32, pool: &mut Pool) {
        let mut number = number;
        let mut piece = self.home(number).first;
        while piece != NONE {
            let Piece { start, units, ref state, next, .. } = self.pieces[piece as usize];
            let len = u64::from(units) * BLOCK_ALIGN;
            let whole = u64::from(units) * BLOCK_ALIGN == self.home(number).slab.len;
            if *state != State::Free || !(whole || len >= SHED_LEAST) {
                piece = next;
                continue;
            }
            if whole {
                let slab = self.remove(number);
                pool.take_back(slab, self.stream);
                return;
            }
            self.unbin(piece);
            self.bytes -= len;
            if next != NONE {
                let behind = u64::from(start + units) * BLOCK_ALIGN;
                let back = pool.split_slab(&mut self.home_mut(number).slab, behind);
                self.pieces[next as usize].prev = NONE;
                let back = self.new_home(Home { slab: back, first: next, taken_units: 0 });
                self.adopt_pieces(back, next, start + units);
                let moved = self.home(back).taken_units;
                self.home_mut(number).taken_units -= moved;
                self.drop_front_or_tail(number, piece, start, pool);
                number = back;
            } else {
                self.drop_front_or_tail(number, piece, start, pool);
            }
            piece = next;
        }
    }

    /// Gives the last piece of a slab, which is free and in no bin, to the pool; the slab goes with
    /// it if that was all.
    fn drop_front_or_tail(&mut self, number: u32, piece: u32, start: u32, pool: &mut Pool) {
        let prev = self.pieces[piece as usize].prev;
        self.vacate(piece);
        if prev == NONE {
            let home = self.slabs[number as usize].take().expect("the slab is there");
            assert_eq!(home.taken_units, 0, "slab {number} is its first piece");
            self.vacant_slabs.push(number);
            pool.take_back(home.slab, self.stream);
        } else {
            self.pieces[prev as usize].next = NONE;
            let home = self.home_mut(number);
            let tail = pool.split_slab(&mut home.slab, u64::from(start) * BLOCK_ALIGN);
            pool.take_back(tail, self.stream);
        }
    }

    /// Makes the pieces from `first` on those of slab `number`, which begins at `offset` units.
    fn adopt_pieces(&mut self, number: u32, first: u32, offset: u32) {
        let mut piece = first;
        let mut taken = 0;
        while piece != NONE {
            let known = &mut self.pieces[piece as usize];
            known.slab = number;
            known.start -= offset;
            if known.state != State::Free {
                taken += known.units;
            }
            piece = known.next;
        }
        self.home_mut(number).taken_units = taken;
    }

    pub(super) fn home(&self, slab: u32) -> &Home {
        self.slabs[slab as usize].as_ref().expect("a piece lies in a slab")
    }

    pub(super) fn home_mut(&mut self, slab: u32) -> &mut Home {
        self.slabs[slab as usize].as_mut().expect("a piece lies in a slab")
    }

    pub(super) fn new_home(&mut self, home: Home) -> u32 {
        match self.vacant_slabs.pop() {
            Some(number) => {
                self.slabs[number as usize] = Some(home);
                number
            }
            None => {
                self.slabs.push(Some(home));
                self.slabs.len() as u32 - 1
            }
        }
    }

    /// Forgets an empty slab.
    pub(super) fn remove(&mut self, number: u32) -> Slab {
        self.forget_empty(number);
        let home = self.slabs[number as usize].take().expect("an empty slab is there");
        assert_eq!(home.taken_units, 0, "slab {number} is not empty");
        self.unbin(home.first);
        self.vacate(home.first);
        self.vacant_slabs.push(number);
        self.bytes -= home.slab.len;
        home.slab
    }

    pub(super) fn note_empty(&mut self, slab: u32) {
        self.empty_bytes += self.home(slab).slab.len;
        self.empty.push(slab);
    }

    pub(super) fn forget_empty(&mut self, slab: u32) {
        self.empty_bytes -= self.home(slab).slab.len;
        self.empty.retain(|&empty| empty != slab);
    }
}
