//! Blocks that small allocations share.

use std::collections::BTreeMap;

use crate::extents::ExtentAllocator;

use super::part::Part;
use crate::ledger::shell::charge::Charge;

/// A block divided into pieces of one size class.
pub(super) struct Slab {
    pub part: Part,
    pub charge: Charge,
    pub free: Vec<u32>,
    pub pieces: usize,
}

/// Identifies a piece: its size class, its slab, and its index in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Piece {
    pub class: u64,
    pub slab: u64,
    pub index: u32,
}

/// All slabs, by size class and number.
#[derive(Default)]
pub(super) struct Slabs {
    pub slabs: BTreeMap<(u64, u64), Slab>,
    pub made: u64,
}

impl Slabs {
    /// Frees a piece that no work uses.
    pub fn free(&mut self, piece: Piece) {
        let slab = self.slabs.get_mut(&(piece.class, piece.slab));
        slab.expect("a slab outlives its pieces").free.push(piece.index);
    }

    /// Frees the blocks of slabs without allocated pieces, and returns their charges.
    pub fn end_idle(&mut self, blocks: &mut ExtentAllocator) -> Vec<Charge> {
        let (idle, used) = std::mem::take(&mut self.slabs)
            .into_iter()
            .partition(|(_, slab)| slab.free.len() == slab.pieces);
        self.slabs = used;
        let idle: BTreeMap<_, Slab> = idle;
        let ended = idle.into_values().map(|slab| {
            blocks.free(slab.part.run).expect("a slab's block is returned once");
            slab.charge
        });
        ended.collect()
    }
}
