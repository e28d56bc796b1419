//! Settling: the one place where a performed plan changes the pool. Nothing here can fail.

use std::collections::BTreeSet;

use smallvec::smallvec;

use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Epoch, Mark, PoolAddr, StreamId};
use crate::pool::config::Policy;
use crate::pool::index::RegionKey;
use crate::pool::plan::{Change, Fill, Leftovers, Op, Plan, Range};
use crate::pool::regions::{Free, Kind, Part};
use crate::pool::state::Pool;

impl Pool {
    /// Makes a plan's change true after all its operations were performed.
    pub fn settle(&mut self, plan: Plan) {
        match plan.change {
            Change::Reserve { span, len } => {
                let key = self.regions.add_span(PoolAddr::new(span, Bytes::ZERO), len);
                self.add_hole(key);
            }
            Change::Fill { at, fills, stream, waits, records } => {
                self.settle_order(stream, &waits, &records);
                self.settle_fill(at, &fills, stream);
            }
            Change::Back { arena, at, fills, stream, waits, records } => {
                self.settle_order(stream, &waits, &records);
                self.settle_back(arena, at, &fills, stream);
            }
            Change::Unmap { ranges } => {
                ranges.iter().for_each(|&range| self.settle_unmap(range));
            }
            Change::Trim { chunk, ranges } => {
                ranges.iter().for_each(|&range| self.settle_unmap(range));
                self.counters.released += Bytes::new(self.chunks.get(chunk).len);
                self.chunks.remove(chunk);
                self.counters.chunks_released += 1;
            }
            Change::Order { stream, waits, records, need } => {
                self.settle_order(stream, &waits, &records);
                self.take_over_ordered(stream, need);
            }
        }
        let reserved = Bytes::new(self.chunks.bytes());
        self.counters.reserved_peak = self.counters.reserved_peak.max(reserved);
    }

    /// Takes note of a plan that failed and was undone: the pool is as before, but for what could
    /// not be undone.
    pub fn abandon(&mut self, plan: Plan, leftovers: Leftovers) {
        self.counters.plans_undone += 1;
        let done = plan.ops.iter().take(leftovers.performed);
        let unmapped: Vec<Range> = done
            .filter_map(|op| if let Op::Unmap(range) = op { Some(*range) } else { None })
            .collect();
        unmapped.iter().for_each(|&range| self.settle_unmap(range));
        match plan.change {
            Change::Unmap { ranges } => {
                // The one that failed: still mapped, and nobody knows in what state.
                if let Some(&range) = ranges.get(unmapped.len()) {
                    self.quarantine(range);
                }
            }
            Change::Trim { chunk, ranges } if unmapped.len() == ranges.len() => {
                // Mapped nowhere any more, and not released.
                let len = self.chunks.get(chunk).len;
                self.chunks.remove(chunk);
                self.chunks.add(chunk, len, None);
            }
            _ => {}
        }
        for &range in &leftovers.mapped {
            self.quarantine(range);
        }
        for &(chunk, len) in &leftovers.chunks {
            self.chunks.add(chunk, len.count(), None);
        }
        self.keep_stuck_chunks(&plan.ops, &leftovers);
        // Events that were recorded before the failure close their epochs all the same.
        for op in &plan.ops {
            if let Op::Record(mark) = *op
                && leftovers.recorded.contains(&mark)
            {
                self.streams.record(mark);
            }
        }
    }

    /// A chunk that was to move and is stuck at its new address too is never given back: released
    /// while mapped there it would live on uncounted.
    fn keep_stuck_chunks(&mut self, ops: &[Op], leftovers: &Leftovers) {
        for op in ops {
            if let Op::Map { chunk, at, len } = *op
                && leftovers.mapped.contains(&Range { at, len })
            {
                self.chunks.add_alias(chunk, at);
            }
        }
    }

    fn settle_order(&mut self, stream: StreamId, waits: &[Mark], records: &[Mark]) {
        records.iter().for_each(|&mark| self.streams.record(mark));
        waits.iter().for_each(|&on| self.streams.waits(stream, on));
    }

    /// Memory that `stream` is ordered behind by now becomes its own.
    fn take_over_ordered(&mut self, stream: StreamId, need: u64) {
        let had = self.adopt(stream, need, |pool, mark| pool.streams.is_ordered(stream, mark));
        let mut missing = need.saturating_sub(had);
        let present = self.streams.now(stream).epoch;
        for key in std::mem::take(&mut self.waiting) {
            let Kind::Waiting { owner, epoch, marks } = &self.regions.get(key).kind else {
                panic!("region {key} waits for nothing");
            };
            let own = Mark { stream: *owner, epoch: *epoch };
            let ordered = |&mark: &Mark| self.streams.is_ordered(stream, mark);
            if missing > 0 && ordered(&own) && marks.iter().all(ordered) {
                missing = missing.saturating_sub(self.regions.get(key).len);
                self.make_free(key, stream, present);
            } else {
                self.waiting.push(key);
            }
        }
    }

    fn settle_fill(&mut self, at: PoolAddr, fills: &[Fill], stream: StreamId) {
        let epochs: Vec<Epoch> = fills.iter().map(|&fill| self.epoch_for(fill, stream)).collect();
        let target = self.unmapped_region_at(at);
        self.take_sources(fills);
        let mut here = target;
        if self.regions.get(here).at < at {
            self.drop_hole(here);
            let back = self.regions.split(here, at.since(self.regions.get(here).at));
            self.note_hole(here);
            self.note_hole(back);
            here = back;
        }
        let first = here;
        for (&fill, &epoch) in fills.iter().zip(&epochs) {
            let place = self.regions.get(here).at;
            self.take_place(here, fill.len());
            self.give_home(fill, place);
            let born = self.births;
            let parts = smallvec![Part { len: fill.len(), epoch }];
            self.regions.get_mut(here).kind =
                Kind::Free(Free { owner: stream, parts, born, lent_by: None });
            here = self.regions.next(here).unwrap_or(here);
        }
        self.births += 1;
        for _ in 1..fills.len() {
            self.merge_next(first);
        }
        self.link_free(first);
    }

    /// Makes `place` the home of the chunk that a fill brings.
    pub(crate) fn give_home(&mut self, fill: Fill, place: PoolAddr) {
        match fill {
            Fill::New { chunk, len } => {
                self.chunks.add(chunk, len, Some(place));
                self.counters.chunks_created += 1;
            }
            Fill::Move { chunk, len, .. } => {
                self.chunks.move_home(chunk, place);
                self.counters.chunks_moved += 1;
                self.counters.moved += Bytes::new(len);
            }
            Fill::Reactivate { chunk, len, .. } => {
                self.chunks.move_home(chunk, place);
                self.counters.chunks_reactivated += 1;
                self.counters.moved += Bytes::new(len);
            }
        }
    }

    /// The epoch of `stream` after which a filled piece is anybody's.
    fn epoch_for(&self, fill: Fill, stream: StreamId) -> Epoch {
        let Some(from) = fill.from() else { return Epoch::START };
        let mark = self.source_mark(fill.chunk(), from);
        match mark {
            mark if self.streams.is_over(mark) => Epoch::START,
            mark if mark.stream == stream => mark.epoch,
            // Ordered behind a wait of the stream: over when the stream's present epoch is.
            _ => self.streams.now(stream).epoch,
        }
    }

    /// Cuts the moved chunks out of their free regions; what stays behind is a retired mapping.
    pub(crate) fn take_sources(&mut self, fills: &[Fill]) {
        let mut cuts: Vec<(RegionKey, PoolAddr, u64, ChunkId, Mark)> = fills
            .iter()
            .filter_map(|&fill| {
                let from = fill.from()?;
                let home = self.chunks.get(fill.chunk()).home.expect("a source has a home");
                let mark = self.source_mark(fill.chunk(), from);
                Some((from, home, fill.len(), fill.chunk(), mark))
            })
            .collect();
        // From the back: the front of a region keeps the region's key.
        cuts.sort_by_key(|cut| std::cmp::Reverse(cut.1));
        let mut regions: Vec<RegionKey> = cuts.iter().map(|cut| cut.0).collect();
        regions.sort_unstable();
        regions.dedup();
        regions.iter().for_each(|&key| self.unindex(key));
        for (from, home, len, chunk, mark) in cuts {
            let offset = home.since(self.regions.get(from).at);
            if self.regions.get(from).len > offset + len {
                let rest = self.split_free(from, offset + len);
                let born = self.births;
                self.births += 1;
                self.free_of_mut(rest).born = born;
                self.index(rest);
            }
            let piece = if offset > 0 { self.split_free(from, offset) } else { from };
            let arena = self.free_of(piece).lent_by;
            self.regions.get_mut(piece).kind = Kind::Retired { chunk, mark, arena };
            self.retired.insert(home, piece);
            if offset == 0 {
                regions.retain(|&key| key != from);
            }
        }
        regions.iter().for_each(|&key| self.index(key));
    }

    /// Takes the first `len` bytes of a hole, a gap or a retired mapping out of their index.
    pub(crate) fn take_place(&mut self, key: RegionKey, len: u64) {
        let (at, region_len) = (self.regions.get(key).at, self.regions.get(key).len);
        match self.regions.get(key).kind {
            Kind::Hole => {
                self.drop_hole(key);
                if region_len > len {
                    let rest = self.regions.split(key, len);
                    self.note_hole(rest);
                }
            }
            Kind::Gap { .. } => {
                if region_len > len {
                    self.regions.split(key, len);
                }
            }
            Kind::Retired { .. } => {
                assert_eq!(region_len, len, "a mapping at {at:?} is taken back whole");
                self.retired.remove(&at);
            }
            ref other => panic!("region {key} at {at:?} cannot be filled: {other:?}"),
        }
    }

    fn note_hole(&mut self, key: RegionKey) {
        let region = self.regions.get(key);
        self.holes.insert((region.len, region.at, key));
    }

    /// The hole, gap or retired mapping that holds `at`.
    pub(crate) fn unmapped_region_at(&self, at: PoolAddr) -> RegionKey {
        if let Some(&key) = self.retired.get(&at) {
            return key;
        }
        if let Some(key) = self.gap_at(at) {
            return key;
        }
        self.holes
            .iter()
            .find(|&&(len, start, _)| start <= at && at < start.plus(len))
            .map(|&(_, _, key)| key)
            .unwrap_or_else(|| panic!("no hole holds {at:?}"))
    }

    /// Turns unmapped ranges, each of one or more whole mappings, into holes.
    fn settle_unmap(&mut self, range: Range) {
        let (mut at, end) = (range.at, range.at.plus(range.len.count()));
        while at < end {
            let next = match self.retired.remove(&at) {
                Some(key) => {
                    let Kind::Retired { chunk, .. } = self.regions.get(key).kind else {
                        panic!("region {key} is indexed as retired");
                    };
                    self.chunks.drop_alias(chunk, at);
                    let next = self.regions.get(key).end();
                    self.empty(key);
                    next
                }
                // The home of a chunk that is trimmed.
                None => {
                    let key = self.cut_home(at, range.len.count());
                    self.empty(key);
                    end
                }
            };
            at = next;
        }
    }

    /// Notes that nothing is mapped in a region any more: a hole, or an arena's gap.
    fn empty(&mut self, key: RegionKey) {
        let arena = match &self.regions.get(key).kind {
            Kind::Retired { arena, .. } => *arena,
            Kind::Free(free) => free.lent_by,
            _ => None,
        };
        match arena {
            Some(arena) => self.add_gap(key, arena),
            None => self.add_hole(key),
        }
    }

    /// Cuts a trimmed chunk's home out of the free region around it.
    fn cut_home(&mut self, at: PoolAddr, len: u64) -> RegionKey {
        let key = self
            .regions
            .iter()
            .find(|(_, region)| region.at <= at && at < region.end())
            .map(|(key, _)| key)
            .unwrap_or_else(|| panic!("no region holds {at:?}"));
        self.unindex(key);
        let mut piece = key;
        let offset = at.since(self.regions.get(key).at);
        if offset > 0 {
            piece = self.split_free(key, offset);
            self.index(key);
        }
        if self.regions.get(piece).len > len {
            let rest = self.split_free(piece, len);
            self.index(rest);
        }
        piece
    }

    /// Puts a mapped range that should be unmapped out of use for good.
    fn quarantine(&mut self, range: Range) {
        let (mut at, end) = (range.at, range.at.plus(range.len.count()));
        while at < end {
            let key = self.unmapped_region_at(at);
            let len = end.since(at).min(self.regions.get(key).end().since(at));
            let mut piece = key;
            match self.regions.get(key).kind {
                Kind::Hole => {
                    self.drop_hole(key);
                    let offset = at.since(self.regions.get(key).at);
                    if offset > 0 {
                        piece = self.regions.split(key, offset);
                        self.note_hole(key);
                    }
                    if self.regions.get(piece).len > len {
                        let rest = self.regions.split(piece, len);
                        self.note_hole(rest);
                    }
                }
                Kind::Gap { .. } => {
                    let offset = at.since(self.regions.get(key).at);
                    if offset > 0 {
                        piece = self.regions.split(key, offset);
                    }
                    if self.regions.get(piece).len > len {
                        self.regions.split(piece, len);
                    }
                }
                _ => {
                    self.retired.remove(&at);
                }
            }
            self.regions.get_mut(piece).kind = Kind::Quarantined;
            at = at.plus(len);
        }
    }

    // --- plans that nobody waits for ---

    /// A plan that adds `len` bytes of new memory, free for `stream`, ahead of demand. `None` if
    /// the limit forbids it, or if no span is that large. A plan to reserve addresses may come
    /// first: call again after it.
    pub fn prefill(&self, len: Bytes, stream: StreamId) -> Option<Plan> {
        let page = self.config.page.count();
        let len = len.count().checked_next_multiple_of(page)?;
        let limit = self.config.limit.map_or(u64::MAX, Bytes::count);
        let possible = limit.saturating_sub(self.charged()).min(PoolAddr::SPAN_LIMIT.count());
        if len == 0 || len > possible {
            return None;
        }
        let Some(&(_, at, _)) = self.holes.range((len, PoolAddr::default(), 0)..).next() else {
            return Some(self.reserve_plan(len));
        };
        let chunk = match self.config.policy {
            Policy::Vpmm => page,
            Policy::Mixed(mixed) => mixed.chunk_max.count(),
        };
        let mut fills = Vec::new();
        let mut rest = len;
        while rest > 0 {
            let piece = rest.min(chunk);
            fills.push(Fill::New { chunk: self.chunks.upcoming(fills.len()), len: piece });
            rest -= piece;
        }
        match self.fill_plan(at, fills, stream, Vec::new()) {
            Ok(plan) | Err(plan) => Some(plan),
        }
    }

    /// A plan that unmaps retired mappings whose work is over, or `None` if there are none.
    pub fn unmap(&self) -> Option<Plan> {
        self.unmap_retired(usize::MAX)
    }

    /// A plan that gives one free chunk whose work is over back to the card, where the pool holds
    /// more than `to`: the largest without which it still holds `to`, or else the smallest. Call
    /// until `None`.
    pub fn trim(&mut self, to: Bytes) -> Option<Plan> {
        let excess = self.chunks.bytes().checked_sub(to.count()).filter(|&excess| excess > 0)?;
        self.promote_waiting();
        let most = |chunks: &[(u64, ChunkId)]| {
            chunks.iter().copied().filter(|&(len, _)| len <= excess).max()
        };
        let (len, id) = match most(&self.idle_chunks()) {
            Some(found) => found,
            // Idle memory of several streams may meet in one chunk.
            None => {
                let heir = self.streams.ids().next()?;
                self.adopt(heir, u64::MAX, |pool, mark| pool.streams.is_over(mark));
                let idle = self.idle_chunks();
                most(&idle).or_else(|| idle.into_iter().min())?
            }
        };
        Some(self.release_plan(id, len))
    }

    /// A plan that gives the smallest idle chunk back to the card, so that others can be made of
    /// its memory: free chunks fit no gap of an arena.
    pub(crate) fn recut(&self) -> Option<(ChunkId, Plan)> {
        let (len, id) = self.idle_chunks().into_iter().min()?;
        Some((id, self.release_plan(id, len)))
    }

    /// A plan that gives one chunk that an arena lends back to the card, or `None`.
    pub fn release_lent(&self, arena: ArenaId) -> Option<Plan> {
        let (len, id) = self.idle_within(self.lent_of(arena)).into_iter().next()?;
        Some(self.release_plan(id, len))
    }

    /// Unmaps an idle chunk everywhere and releases it.
    pub(crate) fn release_plan(&self, id: ChunkId, len: u64) -> Plan {
        let chunk = self.chunks.get(id);
        let home = chunk.home.expect("a free chunk has a home");
        let ranges: Vec<Range> = chunk
            .aliases
            .iter()
            .chain([&home])
            .map(|&at| Range { at, len: Bytes::new(len) })
            .collect();
        let unmaps = ranges.iter().map(|&range| Op::Unmap(range));
        let ops = unmaps.chain([Op::Release { chunk: id }]).collect();
        Plan { ops, change: Change::Trim { chunk: id, ranges } }
    }

    /// Chunks that are wholly free, and whose mappings nobody uses any more, with their lengths.
    pub(crate) fn idle_chunks(&self) -> Vec<(u64, ChunkId)> {
        let owned = self.streams.ids().flat_map(|id| self.streams.get(id).free.iter());
        self.idle_within(owned.chain(self.lent()))
    }

    /// The same within some free regions: address, length, region.
    fn idle_within(
        &self,
        regions: impl Iterator<Item = (PoolAddr, u64, RegionKey)>,
    ) -> Vec<(u64, ChunkId)> {
        let mut free: Vec<(u64, ChunkId)> = Vec::new();
        for (at, len, key) in regions {
            for (chunk, _, len) in self.chunks.within(at, len) {
                if self.is_idle(chunk, key) {
                    free.push((len, chunk));
                }
            }
        }
        free
    }

    /// True if nobody uses a chunk any more that lies in a free region, here or at old addresses.
    pub(crate) fn is_idle(&self, chunk: ChunkId, region: RegionKey) -> bool {
        let over = self.streams.is_over(self.source_mark(chunk, region));
        let mut aliases = self.chunks.get(chunk).aliases.iter();
        over && aliases.all(|alias| {
            self.retired.get(alias).is_some_and(|&key| match self.regions.get(key).kind {
                Kind::Retired { mark, .. } => self.streams.is_over(mark),
                _ => false,
            })
        })
    }

    /// Events to record so that all freed memory and every old mapping can be seen to be idle: the
    /// present mark of every stream that one of them waits for.
    ///
    /// What can be free by now is freed first. Recording and learning may free more: call until
    /// there are none.
    pub fn unrecorded(&mut self) -> Vec<Mark> {
        self.promote_waiting();
        let mut wanted: BTreeSet<Mark> = self.awaited.iter().copied().collect();
        for (_, region) in self.regions.iter() {
            match &region.kind {
                Kind::Free(Free { owner, parts, .. }) => {
                    wanted.extend(parts.iter().map(|p| Mark { stream: *owner, epoch: p.epoch }));
                }
                Kind::Waiting { owner, epoch, marks } => {
                    wanted.extend(marks.iter().chain([&Mark { stream: *owner, epoch: *epoch }]));
                }
                Kind::Retired { mark, .. } => {
                    wanted.insert(*mark);
                }
                Kind::Hole
                | Kind::Used(_)
                | Kind::Arena { .. }
                | Kind::Gap { .. }
                | Kind::Hosted { .. }
                | Kind::Quarantined => {}
            }
        }
        wanted.retain(|&mark| {
            self.streams.is_unrecorded(mark) && !self.streams.is_out_of_reach(mark)
        });
        wanted.into_iter().collect()
    }
}
