//! The arenas for caches of a pool: their pages, and the pool's arenas that these lie in.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use vramp_core::{ArenaId, Bytes, Mark, Pool, StreamId};

use super::core::geometry::{Geometry, Run};
use super::core::pages::{Begun, Counts, Marks, PageState, Pages};

/// Number of an arena for caches in its pool. None is used twice.
pub(crate) type TableId = u64;

/// The arenas for caches of a pool. One that was dropped leaves nothing.
#[derive(Default)]
pub(crate) struct Tables {
    pub(super) by_id: BTreeMap<TableId, Table>,
    pub(super) made: TableId,
}

/// The pages of an arena, and the pool's arenas that they lie in.
pub(crate) struct Table {
    pub pages: Pages,
    pub geometry: Geometry,
    /// By block, then by column.
    pub cells: Vec<ArenaId>,
    /// Streams that pages were committed for or parked behind.
    pub users: BTreeSet<StreamId>,
}

/// Some bytes of a cell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub cell: ArenaId,
    pub from: Bytes,
    pub len: Bytes,
}

impl Tables {
    pub(crate) fn get_mut(&mut self, id: TableId) -> &mut Table {
        self.by_id.get_mut(&id).unwrap_or_else(|| panic!("table {id} was removed while it is used"))
    }
}

impl Tables {
    /// Returns the bytes that are committed, and those that are parked. O(arenas).
    pub(crate) fn bytes(&self) -> (Bytes, Bytes) {
        let of = |pages: fn(Counts) -> u32| {
            let bytes = |table: &Table| {
                table.geometry.page_bytes() * u64::from(pages(table.pages.counts()))
            };
            self.by_id.values().map(bytes).sum()
        };
        (of(|counts| counts.committed + counts.moving), of(|counts| counts.parked))
    }
}

impl Table {
    /// Notes a stream whose work may use the arena. Of many streams, those are forgotten that ended and whose
    /// work is over.
    pub(crate) fn note_user(&mut self, pool: &Pool, stream: StreamId) {
        if self.users.insert(stream) && self.users.len() > 16 {
            let is_over = |user| !pool.is_open(user) && pool.is_over(pool.now(user));
            self.users.retain(|&user| user == stream || !is_over(user));
        }
    }

    /// The work that keeps parked pages from being lent: what they were parked behind, and what used their
    /// memory before and was only ordered behind. O(parks + parked pages + cells of their blocks).
    pub(super) fn awaited(&self, pool: &Pool) -> Vec<Mark> {
        let marks = self.pages.marks().into_iter().filter(|&mark| !pool.is_over(mark));
        let blocks = self.pages.parked_blocks().into_iter();
        let cells = blocks.flat_map(|block| &self.cells[self.geometry.cells_of(block)]);
        marks.chain(cells.flat_map(|&cell| pool.arena_inherited(cell))).collect()
    }

    /// The parts of cells that a run lies in.
    pub(crate) fn parts(&self, run: Run) -> impl Iterator<Item = Part> + '_ {
        let (from, len) = self.geometry.part(run);
        let cells = &self.cells[self.geometry.cells_of(run.block)];
        cells.iter().map(move |&cell| Part { cell, from, len })
    }

    /// Lends what is parked among pages of one block, where its work is over and nothing of the handle is in use.
    /// Returns the bytes lent.
    pub(super) fn lend_group(&mut self, pool: &mut Pool, group: Range<u32>) -> Bytes {
        let block = group.start / self.geometry.per_block;
        let of_block = self.geometry.pages_of(block);
        let first = of_block.start;
        let unit = self.geometry.unit;
        let mut keep: Vec<(Bytes, Bytes)> = Vec::new();
        let mut lendable: Vec<u32> = Vec::new();
        for page in of_block {
            if group.contains(&page) && self.pages.is_lendable(page, |mark| pool.is_over(mark)) {
                lendable.push(page);
            } else if self.pages.state(page) != Some(PageState::Absent) {
                keep.push((unit * u64::from(page - first), unit));
            }
        }
        let mut lent = Bytes::ZERO;
        for &cell in &self.cells[self.geometry.cells_of(block)] {
            if pool.arena_inherited(cell).is_empty() {
                lent += pool.lend(cell, &keep);
            }
        }
        if lent.is_zero() && !lendable.iter().any(|&page| self.pages.is_in_part(page)) {
            return lent;
        }
        self.note_memory(pool, block, &lendable);
        lent
    }

    /// Notes what parked pages of a block have: those without memory become absent.
    fn note_memory(&mut self, pool: &Pool, block: u32, parked: &[u32]) {
        let unit = self.geometry.unit;
        let first = self.geometry.pages_of(block).start;
        let cells = &self.cells[self.geometry.cells_of(block)];
        let parts: Vec<Vec<(Bytes, Bytes)>> =
            cells.iter().map(|&cell| pool.backed_parts(cell)).collect();
        for &page in parked {
            let at = unit * u64::from(page - first);
            let backed: Bytes = parts.iter().map(|parts| backed_within(parts, at, unit)).sum();
            if backed < self.geometry.page_bytes() {
                self.pages.lent(page, backed.is_zero());
            }
        }
    }

    /// Undoes a commit. Memory that was mapped for it may be in use by the work of `marks`; `None` if none was
    /// mapped.
    pub(super) fn undo_commit(&mut self, pool: &Pool, begun: Begun, marks: Option<Marks>) {
        let runs = runs(self.geometry, &begun.absent);
        let mapped = marks.is_some();
        self.pages.undo_commit(begun, marks);
        for run in runs.into_iter().filter(|_| mapped) {
            let first = self.geometry.pages_of(run.block).start + run.first;
            let pages: Vec<u32> = (first..first + run.pages).collect();
            self.note_memory(pool, run.block, &pages);
        }
    }
}

/// Bytes of a page that are among the backed parts of its cell.
fn backed_within(parts: &[(Bytes, Bytes)], at: Bytes, len: Bytes) -> Bytes {
    let next = parts.partition_point(|&(from, long)| from + long <= at);
    let within = parts[next..].iter().take_while(|&&(from, _)| from < at + len);
    within.map(|&(from, long)| (from + long).min(at + len) - from.max(at)).sum()
}

/// Ranges of pages as runs within blocks.
pub(crate) fn runs(geometry: Geometry, ranges: &[Range<u32>]) -> Vec<Run> {
    ranges.iter().cloned().flat_map(|range| geometry.runs(range)).collect()
}
