//! Settling: a performed plan changes the pool. Nothing here can fail.
//!
//! Settling a fill: chunks get a new home, and their old addresses become retired mappings.

use super::Pool;
use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Epoch, Mark, PoolAddr, StreamId};
use crate::pool::index::RegionKey;
use crate::pool::ops::{Change, Fill, Leftovers, Op, Order, Plan, Range, Trim};
use crate::pool::regions::{Free, Kind, Parts};
use crate::waiting::add_mark;

impl Pool {
    /// Makes a plan's change after all its operations were performed.
    pub fn settle(&mut self, plan: Plan) {
        match plan.change {
            Change::Reserve { span, len } => {
                let key = self.regions.add_span(PoolAddr::new(span, Bytes::ZERO), len);
                self.add_hole(key);
            }
            Change::Fill { at, fills, order } => {
                self.settle_order(&order);
                self.settle_fill(at, &fills, order.stream);
            }
            Change::Back { arena, at, fills, order } => {
                self.settle_order(&order);
                self.settle_back(arena, at, &fills, order.stream);
            }
            Change::Unmap { ranges } => {
                ranges.iter().for_each(|&range| self.note_unmapped(range));
            }
            Change::Trim { trims } => trims.iter().for_each(|trim| self.settle_trim(trim)),
            Change::Release { chunk } => self.settle_release(chunk),
            Change::Order { order, free, waiting } => {
                self.settle_order(&order);
                self.take_over_ordered(order.stream, &free, &waiting);
            }
        }
        let reserved = self.chunks.bytes();
        self.counters.reserved_peak = self.counters.reserved_peak.max(reserved);
    }

    fn settle_order(&mut self, order: &Order) {
        order.records.iter().for_each(|&mark| self.note_recorded(mark));
        order.waits.iter().for_each(|&on| self.waits(order.stream, on));
    }

    fn settle_trim(&mut self, trim: &Trim) {
        trim.aliases.iter().for_each(|&range| self.note_unmapped(range));
        self.note_home_unmapped(trim);
        self.counters.released += trim.home.len;
        self.counters.chunks_released += 1;
        self.chunks.remove(trim.chunk);
    }

    /// Notes what a plan to release chunks did before it failed: the first `performed` operations.
    fn abandon_trim(&mut self, trims: &[Trim], performed: usize) {
        let mut left = performed;
        for trim in trims {
            let ops = trim.aliases.len() + 2;
            if left >= ops {
                self.settle_trim(trim);
                left -= ops;
                continue;
            }
            trim.aliases.iter().take(left).for_each(|&range| self.note_unmapped(range));
            // Mapped nowhere any more, and not released.
            if left > trim.aliases.len() {
                self.note_home_unmapped(trim);
                self.chunks.remove(trim.chunk);
                self.chunks.add(trim.chunk, trim.home.len, None);
            }
            return;
        }
    }

    /// Notes that a plan failed and was undone: the pool is as before, except for what could not be
    /// undone.
    pub fn abandon(&mut self, plan: Plan, leftovers: Leftovers) {
        self.counters.plans_undone += 1;
        match &plan.change {
            Change::Unmap { ranges } => {
                let unmapped = leftovers.performed;
                ranges.iter().take(unmapped).for_each(|&range| self.note_unmapped(range));
                // The one that failed: still mapped, in an unknown state.
                if let Some(&range) = ranges.get(unmapped) {
                    self.quarantine_retired(range);
                }
            }
            Change::Trim { trims } => self.abandon_trim(trims, leftovers.performed),
            _ => {}
        }
        for &(chunk, len) in &leftovers.chunks {
            self.chunks.add(chunk, len, None);
        }
        self.quarantine_mapped(&plan.ops, &leftovers);
        // Events that were recorded before the failure close their epochs all the same.
        for op in &plan.ops {
            if let Op::Record(mark) = *op
                && leftovers.recorded.contains(&mark)
            {
                self.note_recorded(mark);
            }
        }
    }

    /// A chunk that was to move and is stuck at its new address too is not released before it is unmapped
    /// there: its memory would stay taken, uncounted.
    fn quarantine_mapped(&mut self, ops: &[Op], leftovers: &Leftovers) {
        for op in ops {
            if let Op::Map { chunk, at, len } = *op
                && leftovers.mapped.contains(&Range { at, len })
            {
                self.quarantine_new(chunk, at, len);
            }
        }
    }
}

/// A chunk to cut out of the free region where it is at home.
struct Cut {
    region: RegionKey,
    home: PoolAddr,
    len: Bytes,
    chunk: ChunkId,
    mark: Mark,
}

impl Pool {
    /// Makes `at..` a free region of `stream`, filled in order.
    pub(super) fn settle_fill(&mut self, at: PoolAddr, fills: &[Fill], stream: StreamId) {
        self.note_user(stream);
        let epochs: Vec<Epoch> = fills.iter().map(|&fill| self.epoch_for(fill, stream)).collect();
        let target = self.unmapped_region_at(at);
        self.take_sources(fills);
        let mut here = target;
        if self.regions.get(here).at < at {
            self.unindex_hole(here);
            let back = self.regions.split(here, at - self.regions.get(here).at);
            self.index_hole(here);
            self.index_hole(back);
            here = back;
        }
        let first = here;
        let born = self.next_birth();
        for (&fill, &epoch) in fills.iter().zip(&epochs) {
            let place = self.regions.get(here).at;
            self.take_place(here, fill.len());
            self.give_home(fill, place);
            let parts = Parts::one(fill.len(), epoch);
            self.regions.get_mut(here).kind =
                Kind::Free(Free { owner: stream, parts, born, lent_by: None });
            here = self.regions.next(here).unwrap_or(here);
        }
        for _ in 1..fills.len() {
            self.merge_next(first);
        }
        // The site may be beside idle memory, which is to be part of the same region.
        if self.shares_idle() {
            let front = self.absorb_idle(first, stream);
            self.link_free(front);
        } else {
            self.link_free(first);
        }
    }

    /// Makes an arena's addresses `at..` its own memory, filled in order.
    pub(super) fn settle_back(
        &mut self,
        arena: ArenaId,
        at: PoolAddr,
        fills: &[Fill],
        stream: StreamId,
    ) {
        let marks: Vec<Mark> = (fills.iter())
            .filter_map(|&fill| Some(self.view().source_mark(fill.chunk(), fill.from()?)))
            .filter(|&mark| !self.streams.is_over(mark))
            // Another stream's work is ordered before what the arena's stream does from now on.
            .map(|mark| if mark.stream == stream { mark } else { self.streams.now(stream) })
            .collect();
        let inherited = &mut self.arenas.get_mut(arena).inherited;
        marks.into_iter().for_each(|mark| add_mark(inherited, mark));
        let mut here = self.unmapped_region_at(at);
        self.take_sources(fills);
        for &fill in fills {
            let place = self.regions.get(here).at;
            self.take_place(here, fill.len());
            self.give_home(fill, place);
            self.regions.get_mut(here).kind = Kind::Arena { arena, stream };
            self.used += fill.len();
            here = self.regions.next(here).unwrap_or(here);
        }
        self.used_peak = self.used_peak.max(self.used);
        self.merge_arena(arena);
    }

    /// Makes `place` the home of the chunk of a fill.
    fn give_home(&mut self, fill: Fill, place: PoolAddr) {
        match fill {
            Fill::New { chunk, len } => {
                self.chunks.add(chunk, len, Some(place));
                self.counters.chunks_created += 1;
            }
            Fill::Move { chunk, len, .. } => {
                self.chunks.move_home(chunk, place);
                self.counters.chunks_moved += 1;
                self.counters.moved += len;
            }
            Fill::Reactivate { chunk, len, .. } => {
                self.chunks.move_home(chunk, place);
                self.counters.chunks_reactivated += 1;
                self.counters.moved += len;
            }
        }
    }

    /// The epoch of `stream` after which any stream may use a filled piece.
    fn epoch_for(&self, fill: Fill, stream: StreamId) -> Epoch {
        let Some(from) = fill.from() else { return Epoch::START };
        let mark = self.view().source_mark(fill.chunk(), from);
        match mark {
            mark if self.streams.is_over(mark) => Epoch::START,
            mark if mark.stream == stream => mark.epoch,
            // Ordered behind a wait of the stream: over when the stream's present epoch is.
            _ => self.streams.now(stream).epoch,
        }
    }

    /// Cuts the moved chunks out of their free regions; a retired mapping stays behind.
    fn take_sources(&mut self, fills: &[Fill]) {
        let mut cuts: Vec<Cut> = fills.iter().filter_map(|&fill| self.cut_for(fill)).collect();
        // From the back: the front of a region keeps the region's key.
        cuts.sort_by_key(|cut| std::cmp::Reverse(cut.home));
        let mut regions: Vec<RegionKey> = cuts.iter().map(|cut| cut.region).collect();
        regions.sort_unstable();
        regions.dedup();
        regions.iter().for_each(|&key| self.unindex(key));
        for Cut { region, home, len, chunk, mark } in cuts {
            let offset = home - self.regions.get(region).at;
            if self.regions.get(region).len > offset + len {
                let rest = self.split_free(region, offset + len);
                self.free_of_mut(rest).born = self.next_birth();
                self.index(rest);
            }
            let piece = if offset.is_zero() { region } else { self.split_free(region, offset) };
            let arena = self.view().free_of(piece).lent_by;
            self.regions.get_mut(piece).kind = Kind::Retired { chunk, mark, arena };
            self.retired.insert(home, piece);
            if offset.is_zero() {
                regions.retain(|&key| key != region);
            }
        }
        regions.iter().for_each(|&key| self.index(key));
    }

    fn cut_for(&self, fill: Fill) -> Option<Cut> {
        let (region, chunk) = (fill.from()?, fill.chunk());
        let home = self.chunks.get(chunk).home.expect("a source has a home");
        let mark = self.view().source_mark(chunk, region);
        Some(Cut { region, home, len: fill.len(), chunk, mark })
    }
}
