//! The table of pieces: what slabs are cut into, in address order.

use std::ops::{Index, IndexMut};

use crate::Bytes;
use crate::ids::Mark;
use crate::pool::BLOCK_ALIGN;
use crate::room::make_room;

/// No piece, in a link.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum State {
    Vacant,
    Free,
    Used {
        requested: Bytes,
        /// Uses on other streams, at most one mark for each.
        uses: Vec<Mark>,
    },
    /// Freed; the pool's queue has the marks that it waits for.
    Waiting,
}

/// A piece of a slab, in units of the block alignment.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) slab: u32,
    /// From the origin of the slab.
    pub(super) start: u32,
    pub(super) units: u32,
    pub(super) state: State,
    pub(super) generation: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) bin_prev: u32,
    pub(super) bin_next: u32,
}

impl Piece {
    /// A free piece without neighbours.
    pub(super) fn free(slab: u32, start: u32, units: u32) -> Piece {
        Piece {
            slab,
            start,
            units,
            state: State::Free,
            generation: 0,
            prev: NONE,
            next: NONE,
            bin_prev: NONE,
            bin_next: NONE,
        }
    }

    /// The distance from the origin of its slab.
    pub(super) fn offset(&self) -> Bytes {
        bytes_of(self.start)
    }

    pub(super) fn len(&self) -> Bytes {
        bytes_of(self.units)
    }
}

/// The length of so many units.
pub(super) fn bytes_of(units: u32) -> Bytes {
    BLOCK_ALIGN * u64::from(units)
}

/// All pieces of a heap.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    slots: Vec<Piece>,
    vacant: Vec<u32>,
}

impl Index<u32> for Pieces {
    type Output = Piece;
    fn index(&self, piece: u32) -> &Piece {
        &self.slots[piece as usize]
    }
}

impl IndexMut<u32> for Pieces {
    fn index_mut(&mut self, piece: u32) -> &mut Piece {
        &mut self.slots[piece as usize]
    }
}

impl Pieces {
    pub(super) fn get(&self, piece: u32) -> Option<&Piece> {
        self.slots.get(piece as usize)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Piece> {
        self.slots.iter()
    }

    /// Makes room for `wanted` more pieces. Returns false if the host has no memory for them.
    #[inline]
    pub(super) fn make_room(&mut self, wanted: usize) -> bool {
        make_room(&mut self.slots, &mut self.vacant, wanted)
    }

    pub(super) fn add(&mut self, mut piece: Piece) -> u32 {
        match self.vacant.pop() {
            Some(index) => {
                piece.generation = self[index].generation;
                self[index] = piece;
                index
            }
            None => {
                self.slots.push(piece);
                let index = self.slots.len() as u32 - 1;
                assert!(index < NONE, "fewer than four billion blocks");
                index
            }
        }
    }

    pub(super) fn vacate(&mut self, piece: u32) {
        self[piece].state = State::Vacant;
        self.retire_id(piece);
        self.vacant.push(piece);
    }

    /// Makes every id that names this piece stale.
    pub(super) fn retire_id(&mut self, piece: u32) {
        self[piece].generation = self[piece].generation.wrapping_add(1);
    }

    /// Cuts a piece behind its first `units`. Returns the back, which is free.
    pub(super) fn cut(&mut self, piece: u32, units: u32) -> u32 {
        let front = &mut self[piece];
        let next = front.next;
        let back = Piece::free(front.slab, front.start + units, front.units - units);
        front.units = units;
        let back = self.add(Piece { prev: piece, next, ..back });
        self[piece].next = back;
        if next != NONE {
            self[next].prev = back;
        }
        back
    }

    /// Joins the next piece into this one.
    pub(super) fn absorb_next(&mut self, piece: u32) {
        let gone = self[piece].next;
        let (units, next) = (self[gone].units, self[gone].next);
        self[piece].units += units;
        self[piece].next = next;
        if next != NONE {
            self[next].prev = piece;
        }
        self.vacate(gone);
    }

    /// The piece itself, if it is free.
    pub(super) fn if_free(&self, piece: u32) -> Option<u32> {
        (piece != NONE && self[piece].state == State::Free).then_some(piece)
    }
}
