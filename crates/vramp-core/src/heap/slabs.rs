//! The table of a heap's slabs, and the sums over them.

use std::ops::{Index, IndexMut};

use crate::Bytes;
use crate::pool::Slab;

/// A slab and how much of it is not free.
#[derive(Debug)]
pub(super) struct HeapSlab {
    pub(super) slab: Slab,
    /// Its first piece.
    pub(super) first: u32,
    pub(super) taken_units: u32,
}

/// All slabs of a heap.
#[derive(Debug, Default)]
pub(super) struct Slabs {
    slots: Vec<Option<HeapSlab>>,
    vacant: Vec<u32>,
    /// Slabs without taken pieces, by age.
    empty: Vec<u32>,
    pub(super) empty_bytes: Bytes,
    pub(super) bytes: Bytes,
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

    /// All numbers that slabs have or had.
    pub(super) fn numbers(&self) -> std::ops::Range<u32> {
        0..self.slots.len() as u32
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        self.slots[number as usize].is_some()
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
        self.empty.push(number);
    }

    pub(super) fn note_taken(&mut self, number: u32) {
        self.empty_bytes -= self[number].slab.len;
        self.empty.retain(|&empty| empty != number);
    }

    /// True for the slab that has been empty for the longest time.
    pub(super) fn is_first_empty(&self, number: u32) -> bool {
        self.empty.first() == Some(&number)
    }
}
