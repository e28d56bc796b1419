//! The table of a heap's slabs, and the sums over them.

use std::ops::{Index, IndexMut};

use crate::Bytes;
use crate::heap::pieces::NONE;
use crate::ids::PoolAddr;
use crate::pool::Slab;

/// A slab and how much of it is not free.
#[derive(Debug)]
pub(super) struct HeapSlab {
    pub(super) slab: Slab,
    /// Where its pieces' offsets count from: the start of the slab that it was cut from, so that cutting
    /// it leaves them as they are.
    pub(super) origin: PoolAddr,
    /// Its first piece.
    pub(super) first: u32,
    pub(super) taken_units: u32,
    /// Its neighbours among the empty slabs.
    empty_prev: u32,
    empty_next: u32,
}

impl HeapSlab {
    /// A slab with the pieces from `first` on, so many units of them taken.
    pub(super) fn new(slab: Slab, origin: PoolAddr, first: u32, taken_units: u32) -> HeapSlab {
        HeapSlab { slab, origin, first, taken_units, empty_prev: NONE, empty_next: NONE }
    }
}

/// All slabs of a heap.
#[derive(Debug)]
pub(super) struct Slabs {
    slots: Vec<Option<HeapSlab>>,
    vacant: Vec<u32>,
    /// Slabs without taken pieces: a list from the one that has been empty for the longest time.
    first_empty: u32,
    last_empty: u32,
    pub(super) empty_bytes: Bytes,
    pub(super) bytes: Bytes,
}

impl Default for Slabs {
    fn default() -> Slabs {
        Slabs {
            slots: Vec::new(),
            vacant: Vec::new(),
            first_empty: NONE,
            last_empty: NONE,
            empty_bytes: Bytes::ZERO,
            bytes: Bytes::ZERO,
        }
    }
}

impl Index<u32> for Slabs {
    type Output = HeapSlab;
    fn index(&self, number: u32) -> &HeapSlab {
        self.slots[number as usize].as_ref().expect("a piece lies in a slab")
    }
}

impl IndexMut<u32> for Slabs {
    fn index_mut(&mut self, number: u32) -> &mut HeapSlab {
        self.slots[number as usize].as_mut().expect("a piece lies in a slab")
    }
}

impl Slabs {
    /// Every slab with its number.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &HeapSlab)> {
        let numbered = (0..).zip(&self.slots);
        numbered.filter_map(|(number, slab)| Some((number, slab.as_ref()?)))
    }

    pub(super) fn add(&mut self, slab: HeapSlab) -> u32 {
        match self.vacant.pop() {
            Some(number) => {
                self.slots[number as usize] = Some(slab);
                number
            }
            None => {
                self.slots.push(Some(slab));
                self.slots.len() as u32 - 1
            }
        }
    }

    /// Takes a slab without taken pieces out of the table.
    pub(super) fn remove(&mut self, number: u32) -> HeapSlab {
        let gone = self.slots[number as usize].take().expect("the slab is there");
        assert_eq!(gone.taken_units, 0, "slab {number} is not empty");
        self.vacant.push(number);
        gone
    }

    pub(super) fn note_empty(&mut self, number: u32) {
        self.empty_bytes += self[number].slab.len;
        let last = std::mem::replace(&mut self.last_empty, number);
        self[number].empty_prev = last;
        match last {
            NONE => self.first_empty = number,
            last => self[last].empty_next = number,
        }
    }

    pub(super) fn note_taken(&mut self, number: u32) {
        let slab = &mut self[number];
        let len = slab.slab.len;
        let prev = std::mem::replace(&mut slab.empty_prev, NONE);
        let next = std::mem::replace(&mut slab.empty_next, NONE);
        match prev {
            NONE => self.first_empty = next,
            prev => self[prev].empty_next = next,
        }
        match next {
            NONE => self.last_empty = prev,
            next => self[next].empty_prev = prev,
        }
        self.empty_bytes -= len;
    }

    /// True for the slab that has been empty for the longest time.
    pub(super) fn is_first_empty(&self, number: u32) -> bool {
        self.first_empty == number
    }

    /// True if no slab is empty.
    pub(super) fn none_empty(&self) -> bool {
        self.first_empty == NONE
    }

    /// The slabs without taken pieces, the one that has been empty for the longest time first.
    pub(super) fn empty(&self) -> impl Iterator<Item = u32> {
        let listed = |number: u32| Some(number).filter(|&number| number != NONE);
        std::iter::successors(listed(self.first_empty), move |&number| {
            listed(self[number].empty_next)
        })
    }
}
