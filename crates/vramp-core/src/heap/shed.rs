//! Shedding: when the pool is short, a heap gives back what it does not use.

use crate::Bytes;
use crate::heap::pieces::{NONE, Piece, State};
use crate::heap::slabs::HeapSlab;
use crate::heap::stream_heap::StreamHeap;
use crate::pool::Pool;

/// Free pieces of at least this length leave a slab.
const SHED_MIN: Bytes = Bytes::kib(512);

impl StreamHeap {
    /// Gives the pool what the heap does not need: empty slabs, and large free pieces.
    pub fn shed(&mut self, pool: &mut Pool) {
        self.promote(pool);
        for number in self.slabs.numbers() {
            if self.slabs.contains(number) {
                self.shed_slab(number, pool);
            }
        }
    }

    /// Cuts the large free pieces of a slab out of it, from the front.
    fn shed_slab(&mut self, number: u32, pool: &mut Pool) {
        let mut number = number;
        let mut piece = self.slabs[number].first;
        while piece != NONE {
            let Piece { start, units, ref state, next, .. } = self.pieces[piece];
            let len = self.pieces[piece].len();
            let whole = len == self.slabs[number].slab.len;
            if *state != State::Free || !(whole || len >= SHED_MIN) {
                piece = next;
                continue;
            }
            if whole {
                let slab = self.remove_empty(number);
                pool.take_back(slab, self.stream);
                return;
            }
            self.bins.remove(piece, &mut self.pieces);
            self.slabs.bytes -= len;
            if next != NONE {
                let behind = self.pieces[piece].offset() + len;
                let back = pool.split_slab(&mut self.slabs[number].slab, behind);
                self.pieces[next].prev = NONE;
                let back = self.slabs.add(HeapSlab { slab: back, first: next, taken_units: 0 });
                self.move_pieces(back, next, start + units);
                let moved = self.slabs[back].taken_units;
                self.slabs[number].taken_units -= moved;
                self.drop_last(number, piece, pool);
                number = back;
            } else {
                self.drop_last(number, piece, pool);
            }
            piece = next;
        }
    }

    /// Gives the last piece of a slab, which is free and in no bin, to the pool; the slab goes with
    /// it if that was all.
    fn drop_last(&mut self, number: u32, piece: u32, pool: &mut Pool) {
        let (prev, offset) = (self.pieces[piece].prev, self.pieces[piece].offset());
        self.pieces.vacate(piece);
        let gone = if prev == NONE {
            self.slabs.remove(number).slab
        } else {
            self.pieces[prev].next = NONE;
            pool.split_slab(&mut self.slabs[number].slab, offset)
        };
        pool.take_back(gone, self.stream);
    }

    /// Makes the pieces from `first` on those of slab `number`, which begins at `offset` units.
    fn move_pieces(&mut self, number: u32, first: u32, offset: u32) {
        let mut piece = first;
        let mut taken = 0;
        while piece != NONE {
            let moved = &mut self.pieces[piece];
            moved.slab = number;
            moved.start -= offset;
            if moved.state != State::Free {
                taken += moved.units;
            }
            piece = moved.next;
        }
        self.slabs[number].taken_units = taken;
    }
}
