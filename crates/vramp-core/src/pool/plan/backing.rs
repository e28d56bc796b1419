//! Memory behind graph arenas: addresses that never change, pages that come and go.
//!
//! An arena owns a range of addresses for its whole life. Mapped parts of it ([`Kind::Arena`]) are
//! the arena's to use. While it is idle it *lends* the chunks it has no live block in: they stay
//! mapped where they are, nothing is placed there, but whoever builds a region may move them away.
//! So lending takes no driver call, and only memory that somebody wanted has to be brought back.
//!
//! Before the arena's graphs run again its range is *backed*: chunks still at home are taken back
//! as they are; where one left, another is mapped at the same address, by the same ladder and the
//! same sources as any other request ([`Attempt::back`]).
//!
//! Deliberately absent: blocks within the arena, and who may use it when (`arena/`).

use std::collections::{BTreeMap, BTreeSet};

use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Epoch, Mark, PoolAddr, StreamId};
use crate::pool::config::{Mixed, Policy};
use crate::pool::index::RegionKey;
use crate::pool::plan::build::{Build, choose};
use crate::pool::plan::place::{Attempt, Rung, Step};
use crate::pool::plan::{Change, Fill, Op, Plan, Range};
use crate::pool::regions::{Free, Kind, Part};
use crate::pool::state::{Pool, note_use};

/// Up to the largest chunk there is, an arena is made of about so many.
const CHUNKS_PER_ARENA: u64 = 8;

/// An arena's addresses.
#[derive(Clone, Debug)]
pub(crate) struct Backing {
    at: PoolAddr,
    len: u64,
    /// The region that begins at `at`.
    first: RegionKey,
    /// Work that may still touch chunks which came here before it was over.
    inherited: Vec<Mark>,
    /// How long its new chunks are, where somebody decided that.
    chunk: Option<u64>,
}

/// What an arena has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaMemory {
    /// Mapped and its own.
    pub backed: Bytes,
    /// Mapped and lent: others may take it.
    pub lent: Bytes,
}

impl Pool {
    /// Sets `capacity` addresses aside for an arena, rounded up to whole pages. No memory yet, and
    /// no driver call unless addresses have to be reserved: then the plan that does, to perform
    /// and settle before calling again.
    ///
    /// # Panics
    /// In VPMM, which has no arenas; and if the capacity is zero or larger than a span can be.
    pub fn add_arena(&mut self, capacity: Bytes) -> Result<ArenaId, Plan> {
        assert!(matches!(self.config.policy, Policy::Mixed(_)), "VPMM has no arenas");
        let page = self.config.page.count();
        let len = self.rounded(capacity.count(), page);
        assert!(len <= PoolAddr::SPAN_LIMIT.count(), "an arena of {capacity} fits no span");
        let Some(&(hole_len, at, hole)) = self.holes.range((len, PoolAddr::default(), 0)..).next()
        else {
            return Err(self.reserve_plan(len));
        };
        // At the end, away from where the pool grows.
        self.drop_hole(hole);
        let first = if hole_len > len {
            let back = self.regions.split(hole, hole_len - len);
            self.holes.insert((hole_len - len, at, hole));
            back
        } else {
            hole
        };
        let arena = ArenaId::new(self.arenas_made);
        self.arenas_made = self.arenas_made.checked_add(1).expect("fewer than four billion arenas");
        let region = self.regions.get_mut(first);
        region.kind = Kind::Gap { arena };
        let at = region.at;
        self.arenas.insert(arena, Backing { at, len, first, inherited: Vec::new(), chunk: None });
        Ok(arena)
    }

    /// Makes new chunks of an arena `len` long, rounded down to whole pages, so that parts of that
    /// length can be lent.
    pub fn set_arena_chunk(&mut self, arena: ArenaId, len: Bytes) {
        let page = self.config.page.count();
        let len = len.count().max(page);
        let backing = self.arenas.get_mut(&arena);
        let backing = backing.unwrap_or_else(|| panic!("{arena} does not exist any more"));
        backing.chunk = Some(len - len % page);
    }

    /// An arena's addresses.
    ///
    /// # Panics
    /// If there is no such arena.
    pub fn arena_range(&self, arena: ArenaId) -> Range {
        let backing = self.backing(arena);
        Range { at: backing.at, len: Bytes::new(backing.len) }
    }

    /// What an arena has. O(its regions).
    pub fn arena_memory(&self, arena: ArenaId) -> ArenaMemory {
        let mut memory = ArenaMemory::default();
        for key in self.regions_of(arena) {
            let region = self.regions.get(key);
            match region.kind {
                Kind::Arena { .. } => memory.backed += Bytes::new(region.len),
                Kind::Free(_) => memory.lent += Bytes::new(region.len),
                _ => {}
            }
        }
        memory
    }

    /// Work that may still touch memory the arena got, at most one mark for each stream: an
    /// arena's graph runs behind it.
    pub fn arena_inherited(&self, arena: ArenaId) -> Vec<Mark> {
        let marks = self.backing(arena).inherited.iter();
        marks.copied().filter(|&mark| !self.streams.is_over(mark)).collect()
    }

    /// True if some arena has memory that it could lend.
    pub(crate) fn could_lend(&self) -> bool {
        let own = |key| matches!(self.regions.get(key).kind, Kind::Arena { .. });
        self.arenas.keys().any(|&arena| self.regions_of(arena).any(own))
    }

    /// Lends every chunk of an arena that none of the `live` ranges touches: offsets from the
    /// arena's start, sorted, not overlapping. All work on that memory must be *over*, not only
    /// ordered. Returns how much is lent now that was not. No driver call.
    pub fn lend(&mut self, arena: ArenaId, live: &[(Bytes, Bytes)]) -> Bytes {
        let start = self.backing(arena).at;
        let touched = |at: PoolAddr, len: u64| {
            let (from, to) = (at.since(start), at.since(start) + len);
            let next = live.partition_point(|(offset, len)| offset.count() + len.count() <= from);
            live.get(next).is_some_and(|(offset, _)| offset.count() < to)
        };
        let mut lent = 0;
        for key in self.regions_of(arena).collect::<Vec<_>>() {
            let region = self.regions.get(key);
            let Kind::Arena { stream, .. } = region.kind else { continue };
            let mut runs: Vec<(u64, u64)> = Vec::new();
            for (_, home, len) in self.chunks.within(region.at, region.len) {
                if touched(home, len) {
                    continue;
                }
                let offset = home.since(region.at);
                match runs.last_mut() {
                    Some((from, run)) if *from + *run == offset => *run += len,
                    _ => runs.push((offset, len)),
                }
            }
            // From the back: the front of a region keeps its key.
            for (offset, len) in runs.into_iter().rev() {
                if offset + len < self.regions.get(key).len {
                    self.regions.split(key, offset + len);
                }
                let piece = if offset > 0 { self.regions.split(key, offset) } else { key };
                let born = self.births;
                self.births += 1;
                let parts = smallvec::smallvec![Part { len, epoch: Epoch::START }];
                self.regions.get_mut(piece).kind =
                    Kind::Free(Free { owner: stream, parts, born, lent_by: Some(arena) });
                lent += len;
            }
        }
        self.used -= lent;
        Bytes::new(lent)
    }

    /// Ends an arena: its addresses are anybody's, and so is its memory once the work of `marks`
    /// is over. No driver call.
    pub fn remove_arena(&mut self, arena: ArenaId, marks: &[Mark]) {
        let keys: Vec<RegionKey> = self.regions_of(arena).collect();
        let mut uses = marks.to_vec();
        uses.extend(self.arena_inherited(arena));
        self.arenas.remove(&arena);
        for key in keys {
            match &mut self.regions.get_mut(key).kind {
                Kind::Gap { .. } => self.add_hole(key),
                Kind::Retired { arena, .. } => *arena = None,
                Kind::Free(free) => {
                    free.lent_by = None;
                    self.link_free(key);
                }
                Kind::Arena { stream, .. } => {
                    let stream = *stream;
                    self.release_region(key, stream, uses.clone());
                }
                // Nobody is left who would unmap it.
                kind @ Kind::Hosted { .. } => *kind = Kind::Quarantined,
                Kind::Quarantined => {}
                other => panic!("region {key} of {arena} is {other:?}"),
            }
        }
    }

    fn backing(&self, arena: ArenaId) -> &Backing {
        self.arenas.get(&arena).unwrap_or_else(|| panic!("{arena} does not exist any more"))
    }

    /// An arena's regions in address order.
    pub(crate) fn regions_of(&self, arena: ArenaId) -> impl Iterator<Item = RegionKey> {
        let backing = self.backing(arena);
        let end = backing.at.plus(backing.len);
        std::iter::successors(Some(backing.first), |&key| self.regions.next(key))
            .take_while(move |&key| self.regions.get(key).at < end)
    }

    /// Memory that arenas lend: address, length, region.
    pub(crate) fn lent(&self) -> impl Iterator<Item = (PoolAddr, u64, RegionKey)> {
        self.arenas.keys().flat_map(|&arena| self.lent_of(arena))
    }

    /// The same of one arena.
    pub(crate) fn lent_of(
        &self,
        arena: ArenaId,
    ) -> impl Iterator<Item = (PoolAddr, u64, RegionKey)> {
        self.regions_of(arena)
            .filter(|&key| matches!(self.regions.get(key).kind, Kind::Free(_)))
            .map(|key| (self.regions.get(key).at, self.regions.get(key).len, key))
    }

    /// True if the first `upto` bytes of an arena are made of more than twice as many chunks as
    /// they would be if they were made at once, or if over a 64th more is behind it.
    pub fn is_ill_cut(&self, arena: ArenaId, upto: Bytes) -> bool {
        let Policy::Mixed(mixed) = self.config.policy else { return false };
        let ArenaMemory { backed, lent } = self.arena_memory(arena);
        let chunks = self.chunks.within(self.backing(arena).at, self.backing(arena).len).count();
        let upto = self.rounded(upto.count(), self.config.page.count());
        (backed + lent).count() > upto + upto / 64
            || chunks as u64 > 2 * upto.div_ceil(self.arena_chunk(upto, &mixed))
    }

    /// The gap of an arena that holds `at`.
    pub(crate) fn gap_at(&self, at: PoolAddr) -> Option<RegionKey> {
        let holds = |backing: &Backing| backing.at <= at && at < backing.at.plus(backing.len);
        let (&arena, _) = self.arenas.iter().find(|(_, backing)| holds(backing))?;
        self.regions_of(arena).find(|&key| {
            let region = self.regions.get(key);
            region.at <= at && at < region.end() && matches!(region.kind, Kind::Gap { .. })
        })
    }

    /// Turns a region into a gap of its arena.
    pub(crate) fn add_gap(&mut self, key: RegionKey, arena: ArenaId) {
        self.regions.get_mut(key).kind = Kind::Gap { arena };
        self.merge_alike(arena);
    }

    /// Joins an arena's gaps, and its own memory, where they touch. The first region stays first.
    pub(crate) fn merge_alike(&mut self, arena: ArenaId) {
        let end = self.backing(arena).at.plus(self.backing(arena).len);
        let mut key = self.backing(arena).first;
        while let Some(next) = self.regions.next(key) {
            if self.regions.get(next).at >= end {
                break;
            }
            let alike = match (&self.regions.get(key).kind, &self.regions.get(next).kind) {
                (Kind::Gap { .. }, Kind::Gap { .. }) => true,
                (Kind::Arena { stream: a, .. }, Kind::Arena { stream: b, .. }) => a == b,
                _ => false,
            };
            if alike {
                self.regions.absorb_next(key);
            } else {
                key = next;
            }
        }
    }
}

// --- backing ---

impl Attempt {
    /// Memory behind the first `upto` bytes of an arena, for work on `stream`.
    pub fn back(arena: ArenaId, upto: Bytes, stream: StreamId) -> Attempt {
        Attempt::back_part(arena, Bytes::ZERO, upto, stream)
    }

    /// Memory behind `len` bytes of an arena from `from` on, in whole pages.
    pub fn back_part(arena: ArenaId, from: Bytes, len: Bytes, stream: StreamId) -> Attempt {
        let request = crate::pool::plan::place::Request { size: len, stream };
        Attempt { arena: Some(arena), from: from.count(), ..Attempt::new(request) }
    }
}

/// Addresses of an arena that want memory.
#[derive(Clone, Copy)]
struct Wanted {
    from: PoolAddr,
    end: PoolAddr,
}

impl Wanted {
    fn touches(self, at: PoolAddr, len: u64) -> bool {
        at < self.end && self.from < at.plus(len)
    }
}

/// A row of an arena's regions without memory of their own.
struct Bare {
    at: PoolAddr,
    /// In address order: gaps, and old mappings of chunks that left.
    pieces: Vec<RegionKey>,
    /// Where backing ends at the latest.
    end: PoolAddr,
    /// Bytes in gaps before that.
    gaps: u64,
}

impl Pool {
    /// Goes on with backing an arena: the ladder of a block, but memory is wanted at one address.
    pub(crate) fn place_arena(&mut self, attempt: &mut Attempt, mixed: &Mixed) -> Step {
        let arena = attempt.arena.expect("the attempt is for an arena");
        let part = self.part_of(arena, attempt);
        loop {
            match attempt.rung {
                Rung::Own => {
                    self.end_lending(arena, part, attempt.request.stream);
                    if self.bare(arena, part).is_none() {
                        return self.backed(arena, part, attempt);
                    }
                    attempt.rung = Rung::Gather;
                }
                Rung::Idle | Rung::Gather => {
                    attempt.rung = Rung::Learn;
                    return Step::Gather;
                }
                Rung::Learn => {
                    attempt.rung = Rung::Adopt;
                    let marks = self.unrecorded_at_home(arena, part, attempt.request.stream);
                    if !marks.is_empty() {
                        return Step::Ask(marks);
                    }
                    if self.streams.any_pending() {
                        return Step::Poll;
                    }
                }
                Rung::Adopt => {
                    attempt.rung = Rung::Build;
                    self.promote_waiting();
                    let stream = attempt.request.stream;
                    self.adopt(stream, u64::MAX, |pool, mark| pool.streams.is_over(mark));
                }
                Rung::Build => {
                    attempt.planned = true;
                    let Some(bare) = self.bare(arena, part) else {
                        return self.backed(arena, part, attempt);
                    };
                    let build = self.build_arena(arena, &bare, attempt, mixed);
                    // What is left of the arena needs no second look at the lower rungs.
                    return self.step_of(build, attempt, Rung::Build);
                }
            }
        }
    }

    /// Work that keeps chunks from coming back to a part of an arena, where nobody knows yet whether
    /// it is over: chunks that left, and that others have freed. If it is, they come back without a
    /// driver call.
    fn unrecorded_at_home(&self, arena: ArenaId, part: Wanted, stream: StreamId) -> Vec<Mark> {
        let retired = self.regions_of(arena).map(|key| self.regions.get(key));
        let left: BTreeSet<ChunkId> = retired
            .filter(|region| part.touches(region.at, region.len))
            .filter_map(|region| match region.kind {
                Kind::Retired { chunk, .. } => Some(chunk),
                _ => None,
            })
            .collect();
        let mut marks = BTreeSet::new();
        if left.is_empty() {
            return Vec::new();
        }
        for key in self.foreign(stream) {
            let region = self.regions.get(key);
            let chunks = self.chunks.within(region.at, region.len);
            let here = chunks.filter(|(chunk, ..)| left.contains(chunk));
            marks.extend(here.map(|(chunk, ..)| self.source_mark(chunk, key)));
        }
        marks.retain(|&mark| {
            self.streams.is_unrecorded(mark) && !self.streams.is_out_of_reach(mark)
        });
        marks.into_iter().collect()
    }

    /// Which of an arena's addresses want memory.
    fn part_of(&self, arena: ArenaId, attempt: &Attempt) -> Wanted {
        let page = self.config.page.count();
        let Backing { at, len, .. } = *self.backing(arena);
        let from = attempt.from - attempt.from % page;
        let end = self.rounded((attempt.from + attempt.request.size.count()).min(len), page);
        Wanted { from: at.plus(from), end: at.plus(end) }
    }

    /// Takes back what an arena lent within a part of it, where it is still at home.
    fn end_lending(&mut self, arena: ArenaId, part: Wanted, stream: StreamId) {
        for key in self.regions_of(arena).collect::<Vec<_>>() {
            let region = self.regions.get(key);
            if !part.touches(region.at, region.len) || !matches!(region.kind, Kind::Free(_)) {
                continue;
            }
            let (at, len) = (region.at, region.len);
            let homes =
                self.chunks.within(at, len).filter(|&(_, home, len)| part.touches(home, len));
            let homes: Vec<(u64, u64)> =
                homes.map(|(_, home, len)| (home.since(at), home.since(at) + len)).collect();
            let (Some(&(first, _)), Some(&(_, last))) = (homes.first(), homes.last()) else {
                continue;
            };
            if last < len {
                self.split_lent(key, last);
            }
            let key = if first > 0 { self.split_lent(key, first) } else { key };
            let region = self.regions.get_mut(key);
            region.kind = Kind::Arena { arena, stream };
            self.used += region.len;
        }
        self.used_peak = self.used_peak.max(self.used);
        self.merge_alike(arena);
    }

    /// Cuts lent memory in two, between two chunks.
    fn split_lent(&mut self, key: RegionKey, offset: u64) -> RegionKey {
        let back = self.regions.split(key, offset);
        for piece in [key, back] {
            let region = self.regions.get_mut(piece);
            let len = region.len;
            let Kind::Free(free) = &mut region.kind else { panic!("region {piece} is not lent") };
            free.parts = smallvec::smallvec![Part { len, epoch: Epoch::START }];
        }
        back
    }

    /// Nothing is left to fill: done, unless a failed driver call left part of the range unusable.
    fn backed(&self, arena: ArenaId, part: Wanted, attempt: &Attempt) -> Step {
        let mut within = self
            .regions_of(arena)
            .map(|key| self.regions.get(key))
            .filter(|region| part.touches(region.at, region.len));
        let unusable = |kind: &Kind| matches!(kind, Kind::Hosted { .. } | Kind::Quarantined);
        if within.any(|region| unusable(&region.kind)) {
            return Step::Short(self.shortage(attempt));
        }
        Step::Backed
    }

    /// The first row of regions without memory within a part of an arena. A gap that begins before
    /// the part is cut there.
    fn bare(&mut self, arena: ArenaId, part: Wanted) -> Option<Bare> {
        let straddles = |key: &RegionKey| {
            let region = self.regions.get(*key);
            region.at < part.from
                && part.from < region.end()
                && matches!(region.kind, Kind::Gap { .. })
        };
        let straddling = self.regions_of(arena).find(straddles);
        if let Some(key) = straddling {
            let offset = part.from.since(self.regions.get(key).at);
            self.regions.split(key, offset);
        }
        let end = part.end;
        let is_bare = |key: &RegionKey| {
            matches!(self.regions.get(*key).kind, Kind::Gap { .. } | Kind::Retired { .. })
        };
        let within = |key: &RegionKey| self.regions.get(*key).at < end;
        let pieces: Vec<RegionKey> = self
            .regions_of(arena)
            .take_while(within)
            .skip_while(|key| self.regions.get(*key).end() <= part.from || !is_bare(key))
            .take_while(is_bare)
            .collect();
        let at = self.regions.get(*pieces.first()?).at;
        let regions = pieces.iter().map(|&key| self.regions.get(key));
        let gaps = regions
            .filter(|region| matches!(region.kind, Kind::Gap { .. }))
            .map(|region| region.end().min(end).since(region.at))
            .sum();
        Some(Bare { at, pieces, end, gaps })
    }

    fn build_arena(&self, arena: ArenaId, bare: &Bare, attempt: &Attempt, mixed: &Mixed) -> Build {
        let stream = attempt.request.stream;
        let sources = self.sources(stream);
        // Chunks that left and are free again come back without a driver call, each to one of its
        // old places; other old mappings make room.
        let mut returning: Vec<usize> = Vec::new();
        let mut leftover: Vec<Range> = Vec::new();
        for &key in &bare.pieces {
            let region = self.regions.get(key);
            let Kind::Retired { chunk, .. } = region.kind else { continue };
            match sources.by_chunk.get(&chunk) {
                Some(&index) if !returning.contains(&index) => returning.push(index),
                _ => leftover.push(Range { at: region.at, len: Bytes::new(region.len) }),
            }
        }
        if !leftover.is_empty() {
            let ops = leftover.iter().map(|&range| Op::Unmap(range)).collect();
            return Build::Clear(Plan { ops, change: Change::Unmap { ranges: leftover } });
        }
        let mut counts = sources.counts.clone();
        let take = |counts: &mut Vec<(u64, u64)>, len: u64, count: u64| {
            let slot = counts.partition_point(|&(known, _)| known < len);
            counts[slot].1 -= count;
        };
        for &index in &returning {
            take(&mut counts, sources.all[index].len, 1);
        }
        let mut usable: BTreeMap<u64, Vec<usize>> = sources.by_len.clone();
        for group in usable.values_mut() {
            group.retain(|index| !returning.contains(index));
            group.reverse();
        }
        let movable: u64 = counts.iter().map(|(len, count)| len * count).sum();
        let budget = self.growth_budget(bare.gaps, attempt, mixed);
        let mut to_move = bare.gaps.saturating_sub(budget).min(movable);
        let mut fills: Vec<Fill> = Vec::new();
        let (mut fresh, mut new) = (0, 0);
        for &key in &bare.pieces {
            let region = self.regions.get(key);
            if let Kind::Retired { chunk, .. } = region.kind {
                let source = &sources.all[sources.by_chunk[&chunk]];
                fills.push(Fill::Reactivate { chunk, len: region.len, from: source.region });
                continue;
            }
            let mut rest = region.end().min(bare.end).since(region.at);
            let (moves, _) = choose(rest.min(to_move), counts.clone(), true);
            for (len, count) in moves {
                take(&mut counts, len, count);
                let group = usable.get_mut(&len).expect("a source of that length");
                for index in group.split_off(group.len() - count as usize).into_iter().rev() {
                    let source = &sources.all[index];
                    fills.push(Fill::Move { chunk: source.chunk, len, from: source.region });
                }
                rest -= len * count;
                to_move -= len * count;
            }
            fresh += rest;
            while rest > 0 {
                let usual = || self.arena_chunk(attempt.request.size.count(), mixed);
                let len = rest.min(self.backing(arena).chunk.unwrap_or_else(usual));
                fills.push(Fill::New { chunk: self.chunks.upcoming(new), len });
                new += 1;
                rest -= len;
            }
        }
        let allowed = self.growth_allowed(attempt);
        if fresh > allowed {
            return Build::Short { missing: fresh - allowed };
        }
        match self.fill_plan(bare.at, fills, stream, Vec::new()) {
            Err(plan) => Build::Clear(plan),
            Ok(Plan { ops, change: Change::Fill { at, fills, stream, waits, records } }) => {
                let change = Change::Back { arena, at, fills, stream, waits, records };
                Build::Fill { plan: Plan { ops, change }, over_slack: fresh.saturating_sub(budget) }
            }
            Ok(Plan { change, .. }) => panic!("a plan to fill is {change:?}"),
        }
    }

    /// New chunks of an arena are large beside it: bringing one back costs the same at any size.
    fn arena_chunk(&self, arena: u64, mixed: &Mixed) -> u64 {
        let page = self.config.page.count();
        (1u64 << (arena / CHUNKS_PER_ARENA).max(1).ilog2()).clamp(page, mixed.chunk_max.count())
    }

    pub(crate) fn settle_back(
        &mut self,
        arena: ArenaId,
        at: PoolAddr,
        fills: &[Fill],
        stream: StreamId,
    ) {
        let marks: Vec<Mark> = (fills.iter())
            .filter_map(|&fill| Some(self.source_mark(fill.chunk(), fill.from()?)))
            .filter(|&mark| !self.streams.is_over(mark))
            // Another stream's work is ordered before what the arena's stream does from now on.
            .map(|mark| if mark.stream == stream { mark } else { self.streams.now(stream) })
            .collect();
        let inherited = &mut self.arenas.get_mut(&arena).expect("it is backed").inherited;
        marks.into_iter().for_each(|mark| note_use(inherited, mark));
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
        self.merge_alike(arena);
    }
}
