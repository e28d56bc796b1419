//! What a slab is cut into, in address order: cutting a piece, and merging it with its neighbours.

use super::{NONE, StreamHeap};
use crate::ids::Mark;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum State {
    Vacant,
    Free,
    Used { requested: u64, uses: Vec<Mark> },
    Waiting { marks: Vec<Mark> },
}

/// A piece of a slab, in units of the grain.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) slab: u32,
    pub(super) start: u32,
    pub(super) units: u32,
    pub(super) state: State,
    pub(super) generation: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) bin_prev: u32,
    pub(super) bin_next: u32,
}

impl StreamHeap {
    pub(super) fn new_piece(&mut self, mut piece: Piece) -> u32 {
        match self.vacant_pieces.pop() {
            Some(index) => {
                piece.generation = self.pieces[index as usize].generation;
                self.pieces[index as usize] = piece;
                index
            }
            None => {
                self.pieces.push(piece);
                let index = self.pieces.len() as u32 - 1;
                assert!(index < NONE, "fewer than four billion blocks");
                index
            }
        }
    }

    pub(super) fn vacate(&mut self, index: u32) {
        let piece = &mut self.pieces[index as usize];
        piece.state = State::Vacant;
        piece.generation = piece.generation.wrapping_add(1);
        self.vacant_pieces.push(index);
    }

    pub(super) fn cut(&mut self, piece: u32, units: u32) -> u32 {
        let front = &mut self.pieces[piece as usize];
        let next = front.next;
        let rest = Piece {
            slab: front.slab,
            start: front.start + units,
            units: front.units - units,
            state: State::Free,
            generation: 0,
            prev: piece,
            next,
            bin_prev: NONE,
            bin_next: NONE,
        };
        front.units = units;
        let rest = self.new_piece(rest);
        self.pieces[piece as usize].next = rest;
        if next != NONE {
            self.pieces[next as usize].prev = rest;
        }
        rest
    }

    pub(super) fn absorb_next(&mut self, piece: u32) {
        let gone = self.pieces[piece as usize].next;
        let (units, next) = (self.pieces[gone as usize].units, self.pieces[gone as usize].next);
        self.pieces[piece as usize].units += units;
        self.pieces[piece as usize].next = next;
        if next != NONE {
            self.pieces[next as usize].prev = piece;
        }
        self.vacate(gone);
    }

    /// Merges a freed piece with its neighbours. Returns its slab.
    pub(super) fn give_back_to_slab(&mut self, piece: u32) -> u32 {
        let Piece { slab, units, .. } = self.pieces[piece as usize];
        self.pieces[piece as usize].state = State::Free;
        let mut front = piece;
        let next = self.pieces[front as usize].next;
        if next != NONE && self.pieces[next as usize].state == State::Free {
            self.unbin(next);
            self.absorb_next(front);
        }
        let prev = self.pieces[front as usize].prev;
        if prev != NONE && self.pieces[prev as usize].state == State::Free {
            self.unbin(prev);
            self.absorb_next(prev);
            front = prev;
        }
        self.bin(front);
        let home = self.home_mut(slab);
        home.taken_units -= units;
        if home.taken_units == 0 {
            self.note_empty(slab);
        }
        slab
    }
}
