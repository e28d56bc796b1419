//! What a pool does to its arenas for caches while its lock is held: what is parked is lent when the pool runs
//! short.

use std::collections::BTreeSet;
use std::ops::Range;

use vramp_core::{ArenaId, Attempt, Bytes, Inconsistency, Mark, StreamId};
use vramp_driver::DriverError;

use super::core::geometry::Geometry;
use super::core::pages::{Marks, PageState, Pages};
use super::tables::{Part, Table, TableId, Tables};
use crate::completion::captures;
use crate::virtual_pool::{Refusal, Served, VirtualPool};

impl VirtualPool {
    /// Reserves the addresses of an arena for caches, in one row, and cuts them into cells. One driver call
    /// at most. O(cells log arenas).
    pub(crate) fn add_table(&mut self, geometry: Geometry) -> Result<TableId, DriverError> {
        let whole = geometry.column() * u64::from(geometry.columns);
        let mut rest = self.add_range(whole)?;
        self.pool.set_arena_chunk(rest, geometry.handle);
        let (columns, blocks) = (geometry.columns as usize, geometry.blocks());
        let mut by_column: Vec<ArenaId> = Vec::with_capacity(columns * blocks as usize);
        for column in 0..columns {
            for block in 0..blocks {
                by_column.push(rest);
                let is_last = column + 1 == columns && block + 1 == blocks;
                if !is_last {
                    rest = self.pool.split_arena(rest, geometry.cell(block));
                }
            }
        }
        let blocks = blocks as usize;
        let cells = (0..blocks).flat_map(|block| (0..columns).map(move |column| (block, column)));
        let cells = cells.map(|(block, column)| by_column[column * blocks + block]).collect();
        let id = self.tables.made;
        self.tables.made += 1;
        let table = Table { pages: Pages::new(geometry), geometry, cells, users: BTreeSet::new() };
        self.tables.by_id.insert(id, table);
        Ok(id)
    }

    /// Removes an arena for caches: its memory serves others once the work of its users is over. No driver
    /// call. O(cells).
    pub(crate) fn remove_table(&mut self, id: TableId) {
        let Some(table) = self.tables.by_id.remove(&id) else { return };
        let mut marks = table.pages.marks();
        for stream in table.users {
            marks.retain(|mark| mark.stream != stream);
            marks.push(self.pool.now(stream));
        }
        let marks: Vec<Mark> = marks.into_iter().filter(|&mark| !self.pool.is_over(mark)).collect();
        for cell in table.cells {
            self.pool.remove_arena(cell, &marks);
        }
    }

    /// Backs a run of pages in a cell ahead of need, with memory that the pool has or can have without asking
    /// anybody for it. Returns false if there is none.
    pub(crate) fn back_ahead(
        &mut self,
        Part { cell, from, len }: Part,
        stream: StreamId,
    ) -> Result<bool, DriverError> {
        let mut attempt = Attempt::back_part(cell, from, len, stream).without_lending();
        match self.serve(&mut attempt) {
            Ok(Served::Backed) => {
                let mut before = self.pool.arena_inherited(cell);
                before.retain(|mark| mark.stream != stream);
                self.order_behind(stream, &before)?;
                Ok(true)
            }
            Ok(_) => unreachable!("the attempt is for an arena"),
            Err(Refusal::Driver(error)) => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// Orders a stream behind the work that pages were parked behind, except where that is over. An event and a wait
    /// for each stream, and a query whether the stream captures.
    ///
    /// # Errors
    /// A driver call failed. A capture waits for nothing outside it: a stream that captures is refused before the
    /// wait would invalidate its capture.
    pub(super) fn order_commit(
        &mut self,
        stream: StreamId,
        marks: &mut Marks,
    ) -> Result<(), DriverError> {
        if marks.is_empty() {
            return Ok(());
        }
        if self.exec.driver.is_capturing(self.exec.stream(stream))? {
            self.record_all(marks)?;
            self.poll_of(&marks.iter().map(|mark| mark.stream).collect())?;
            marks.retain(|mark| !self.pool.is_over(*mark));
            if !marks.is_empty() {
                return Err(captures(stream));
            }
        }
        self.order_behind(stream, marks)
    }

    /// Records events for the work that keeps parked pages from being lent, so that it can be queried and
    /// waited for. Returns its streams.
    pub(crate) fn record_parked(&mut self) -> Result<BTreeSet<StreamId>, DriverError> {
        let Tables { by_id, .. } = &self.tables;
        let marks = by_id.values().flat_map(|table| table.awaited(&self.pool));
        let marks: Vec<Mark> = marks.collect();
        self.record_all(&marks)?;
        Ok(marks.into_iter().map(|mark| mark.stream).collect())
    }

    /// Lends parked pages, the oldest of each arena first, until `needed` bytes are lent. Returns the bytes
    /// lent. An event and a query for each stream whose work they wait for; none if nothing is parked.
    pub(crate) fn lend_parked(&mut self, needed: Bytes) -> Result<Bytes, DriverError> {
        if self.tables.by_id.values().all(|table| table.pages.counts().parked == 0) {
            return Ok(Bytes::ZERO);
        }
        let users = self.record_parked()?;
        self.poll_of(&users)?;
        let mut lent = Bytes::ZERO;
        let ids: Vec<TableId> = self.tables.by_id.keys().copied().collect();
        for id in ids {
            if lent >= needed {
                break;
            }
            lent += self.lend_of(id, needed - lent).0;
        }
        Ok(lent)
    }

    /// Lends parked pages of one arena whose work is known to be over. Handles that the arena made come first, then
    /// longer ones, which it has from others: their pages leave together. Returns the bytes lent, and the blocks
    /// that they lie in.
    fn lend_of(&mut self, id: TableId, needed: Bytes) -> (Bytes, BTreeSet<u32>) {
        let (pool, table) = (&mut self.pool, self.tables.get_mut(id));
        let (mut lent, mut blocks) = (Bytes::ZERO, BTreeSet::new());
        let geometry = table.geometry;
        let of_block = |page| geometry.pages_of(page / geometry.per_block);
        let widths: [&dyn Fn(u32) -> Range<u32>; 2] = [&|page| geometry.group_of(page), &of_block];
        for together in widths {
            for group in table.pages.lendable_groups(|mark| pool.is_over(mark), together) {
                if lent >= needed {
                    return (lent, blocks);
                }
                let block = group.start / geometry.per_block;
                let here = table.lend_group(pool, group);
                if !here.is_zero() {
                    blocks.insert(block);
                }
                lent += here;
            }
        }
        (lent, blocks)
    }

    /// Lends parked pages of one arena. As [`lend_parked`](VirtualPool::lend_parked).
    pub(crate) fn lend_parked_of(
        &mut self,
        id: TableId,
        needed: Bytes,
    ) -> Result<BTreeSet<u32>, DriverError> {
        let users = self.record_parked()?;
        self.poll_of(&users)?;
        Ok(self.lend_of(id, needed).1)
    }

    /// Lends parked pages of one arena beyond `keep` bytes, and returns them to the card. Returns the bytes
    /// returned.
    pub(crate) fn release_parked(
        &mut self,
        id: TableId,
        keep: Bytes,
    ) -> Result<Bytes, DriverError> {
        let table = self.tables.get_mut(id);
        let parked = table.geometry.page_bytes() * u64::from(table.pages.counts().parked);
        let blocks = self.lend_parked_of(id, parked.saturating_sub(keep))?;
        let before = self.pool.counters().reserved;
        for block in blocks {
            let table = self.tables.get_mut(id);
            let cells = table.cells[table.geometry.cells_of(block)].to_vec();
            for cell in cells {
                while let Some(plan) = self.pool.release_lent(cell) {
                    self.exec.perform(&mut self.pool, plan)?;
                }
            }
        }
        Ok(before.saturating_sub(self.pool.counters().reserved))
    }

    /// Checks that every arena for caches has the memory that it counts.
    pub(crate) fn audit_tables(&self) -> Result<(), Inconsistency> {
        for (id, table) in &self.tables.by_id {
            let wrong =
                |what: String| Inconsistency { what: format!("arena {id} for caches: {what}") };
            table.pages.audit().map_err(wrong)?;
            for block in 0..table.geometry.blocks() {
                let of_block = table.geometry.pages_of(block);
                let has_memory = |page: &u32| match table.pages.state(*page) {
                    Some(PageState::Committed) => true,
                    Some(PageState::Parked) => !table.pages.is_in_part(*page),
                    _ => false,
                };
                let pages = of_block.clone().filter(has_memory).count() as u64;
                for &cell in &table.cells[table.geometry.cells_of(block)] {
                    let backed = self.pool.arena_memory(cell).backed;
                    let least = table.geometry.unit * pages;
                    if backed < least {
                        let what =
                            format!("{pages} pages of block {block} have {backed} of {least}");
                        return Err(wrong(what));
                    }
                }
            }
        }
        Ok(())
    }
}
