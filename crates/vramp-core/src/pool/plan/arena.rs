//! Backing a part of an arena: the ladder of a block, but memory is wanted at one address.

use std::collections::{BTreeMap, BTreeSet};

use crate::Bytes;
use crate::ids::{ArenaId, ChunkId, Mark, PoolAddr, StreamId};
use crate::pool::arenas::ArenaMemory;
use crate::pool::config::{Mixed, Policy};
use crate::pool::index::RegionKey;
use crate::pool::ops::{Fill, Plan, Range};
use crate::pool::plan::build::{Build, Choice, choose};
use crate::pool::plan::decision::{Climb, Decision};
use crate::pool::plan::fill::Filling;
use crate::pool::plan::sources::{ChunkCount, Source, Sources, SourcesOfLen};
use crate::pool::regions::{Kind, Region};
use crate::pool::request::{Attempt, Rung, Step};
use crate::pool::view::View;

/// A gap to cut in two at `offset`.
struct GapCut {
    gap: RegionKey,
    offset: Bytes,
}

/// A row of an arena's regions without memory of their own.
struct Bare {
    at: PoolAddr,
    /// In address order: gaps, and old mappings of chunks that left.
    regions: Vec<RegionKey>,
    /// Where backing ends at the latest.
    end: PoolAddr,
    /// Bytes in gaps before that.
    gaps: Bytes,
}

impl View<'_> {
    pub(in crate::pool) fn climb_arena(
        self,
        arena: ArenaId,
        from: Bytes,
        attempt: &mut Attempt,
        mixed: &Mixed,
    ) -> Climb {
        let part = self.part_to_back(arena, from, attempt.request.size);
        let stream = attempt.request.stream;
        match attempt.rung {
            Rung::Own => Climb::ThenUp(Decision::EndLending { arena, part }),
            Rung::Early => match self.bare(arena, part) {
                Ok(None) => Climb::Stay(self.backed(arena, part, attempt)),
                Ok(Some(_)) => Climb::Up,
                Err(GapCut { gap, offset }) => Climb::Stay(Decision::CutGap { gap, offset }),
            },
            Rung::Gather => Climb::ThenUp(Decision::Return(Step::Gather)),
            Rung::Return => {
                let marks = self.unrecorded_at_home(arena, part, stream);
                if !marks.is_empty() {
                    return Climb::ThenUp(Decision::Return(Step::Record(marks)));
                }
                match self.streams.any_pending() {
                    true => Climb::ThenUp(Decision::Return(Step::Poll)),
                    false => Climb::Up,
                }
            }
            Rung::Learn | Rung::LearnAgain => self.learn(),
            Rung::Build => {
                attempt.note_plan();
                match self.bare(arena, part) {
                    Ok(None) => Climb::Stay(self.backed(arena, part, attempt)),
                    Ok(Some(bare)) => {
                        let build = self.build_arena(arena, &bare, attempt, mixed);
                        // The rest of the arena needs no second look at the lower rungs.
                        let step = self.step_for(build, attempt, Rung::Build);
                        Climb::Stay(Decision::Return(step))
                    }
                    Err(GapCut { gap, offset }) => Climb::Stay(Decision::CutGap { gap, offset }),
                }
            }
            Rung::Retired | Rung::Unmap | Rung::Watch | Rung::Idle | Rung::Merged => Climb::Up,
        }
    }

    /// Work that keeps chunks from returning to a part of an arena, where no event shows yet whether
    /// it is over: chunks that left, and that other streams have freed. If it is over, they return
    /// without a driver call.
    fn unrecorded_at_home(self, arena: ArenaId, part: Range, stream: StreamId) -> Vec<Mark> {
        let within = self.arena_regions(arena).filter(|(_, r)| part.touches(r.at, r.len));
        let left: BTreeSet<ChunkId> = within
            .filter_map(|(_, region)| match region.kind {
                Kind::Retired { chunk, .. } => Some(chunk),
                _ => None,
            })
            .collect();
        let mut marks = BTreeSet::new();
        if left.is_empty() {
            return Vec::new();
        }
        for chunk in left {
            if let Some((region, owner)) = self.free_chunks.find(chunk)
                && owner != stream
            {
                marks.insert(self.source_mark(chunk, region));
            }
        }
        marks.retain(|&mark| self.can_be_recorded(mark));
        marks.into_iter().collect()
    }

    /// The addresses to back, in whole pages.
    fn part_to_back(self, arena: ArenaId, from: Bytes, len: Bytes) -> Range {
        let page = self.config.page;
        let whole = self.arenas.get(arena).range();
        let start = from.round_down(page);
        let end = self.rounded((from + len).min(whole.len), page);
        // An end before the start backs nothing.
        Range::new(whole.at + start, end.saturating_sub(start))
    }

    /// Nothing is left to fill: done, unless a failed driver call left part of the range unusable.
    fn backed(self, arena: ArenaId, part: Range, attempt: &Attempt) -> Decision {
        let mut within = self.arena_regions(arena).filter(|(_, r)| part.touches(r.at, r.len));
        let unusable = |kind: &Kind| matches!(kind, Kind::Hosted { .. } | Kind::Quarantined { .. });
        Decision::Return(match within.any(|(_, region)| unusable(&region.kind)) {
            true => Step::Short(self.shortage(attempt)),
            false => Step::Backed,
        })
    }

    /// The first row of regions without memory within a part of an arena.
    ///
    /// # Errors
    /// A gap begins before the part: it is to be cut there.
    fn bare(self, arena: ArenaId, part: Range) -> Result<Option<Bare>, GapCut> {
        let straddles = |region: &Region| {
            region.at < part.at && part.at < region.end() && matches!(region.kind, Kind::Gap { .. })
        };
        if let Some((gap, region)) = self.arena_regions(arena).find(|(_, r)| straddles(r)) {
            return Err(GapCut { gap, offset: part.at - region.at });
        }
        let end = part.end();
        let is_bare =
            |region: &Region| matches!(region.kind, Kind::Gap { .. } | Kind::Retired { .. });
        let regions: Vec<RegionKey> = self
            .arena_regions(arena)
            .take_while(|(_, region)| region.at < end)
            .skip_while(|(_, region)| region.end() <= part.at || !is_bare(region))
            .take_while(|(_, region)| is_bare(region))
            .map(|(key, _)| key)
            .collect();
        let Some(&first) = regions.first() else { return Ok(None) };
        let at = self.regions.get(first).at;
        let gaps = regions.iter().map(|&key| self.regions.get(key));
        let gaps = gaps
            .filter(|region| matches!(region.kind, Kind::Gap { .. }))
            .map(|region| region.end().min(end) - region.at)
            .sum();
        Ok(Some(Bare { at, regions, end, gaps }))
    }

    fn build_arena(self, arena: ArenaId, bare: &Bare, attempt: &Attempt, mixed: &Mixed) -> Build {
        if let Some(plan) = self.unmap_some_retired() {
            return Build::ClearFirst(plan);
        }
        let stream = attempt.request.stream;
        let left = bare.regions.iter().filter_map(|&key| match self.regions.get(key).kind {
            Kind::Retired { chunk, .. } => Some(chunk),
            _ => None,
        });
        let left: BTreeSet<ChunkId> = left.collect();
        let left: Vec<ChunkId> = left.into_iter().collect();
        let some = self.sources_for(bare.gaps, stream, &left);
        let build = self.build_arena_from(&some, arena, bare, attempt, mixed);
        if some.complete || build.is_enough() {
            return build;
        }
        self.build_arena_from(&self.sources(stream), arena, bare, attempt, mixed)
    }

    fn build_arena_from(
        self,
        sources: &Sources<'_>,
        arena: ArenaId,
        bare: &Bare,
        attempt: &Attempt,
        mixed: &Mixed,
    ) -> Build {
        let stream = attempt.request.stream;
        // Chunks that left and are free again return without a driver call, each to one of its old
        // places; other old mappings make room.
        let mut returning: Vec<Source> = Vec::new();
        let mut leftover: Vec<Range> = Vec::new();
        for &key in &bare.regions {
            let region = self.regions.get(key);
            let Kind::Retired { chunk, .. } = region.kind else { continue };
            match sources.find(chunk) {
                Some(source) if !returning.iter().any(|known| known.chunk == chunk) => {
                    returning.push(source);
                }
                _ => leftover.push(Range::new(region.at, region.len)),
            }
        }
        if !leftover.is_empty() {
            return Build::ClearFirst(Plan::unmap(leftover));
        }
        let mut counts = sources.movable([None, None], &returning);
        let is_returning = |source: &Source| returning.iter().any(|r| r.chunk == source.chunk);
        let mut usable: BTreeMap<Bytes, SourcesOfLen<'_>> = BTreeMap::new();
        let budget = self.growth_budget(bare.gaps, attempt, mixed);
        let mut to_move = bare.gaps.saturating_sub(budget).min(ChunkCount::total(&counts));
        let chunk_len = self.arenas.get(arena).chunk;
        let chunk_len = chunk_len.unwrap_or_else(|| self.arena_chunk(attempt.request.size, mixed));
        let mut fills: Vec<Fill> = Vec::new();
        let (mut fresh, mut new) = (Bytes::ZERO, 0);
        for &key in &bare.regions {
            let region = self.regions.get(key);
            if let Kind::Retired { chunk, .. } = region.kind {
                let source = sources.find(chunk).expect("it returns");
                fills.push(Fill::Reactivate { chunk, len: region.len, from: source.region });
                continue;
            }
            let mut rest = region.end().min(bare.end) - region.at;
            let Choice { moves, .. } = choose(rest.min(to_move), counts.clone(), true);
            for ChunkCount { len, count } in moves {
                ChunkCount::take(&mut counts, len, count);
                let group = usable.entry(len).or_insert_with(|| sources.of_len(len));
                let moved = group.filter(|source| !is_returning(source)).take(count as usize);
                for source in moved {
                    fills.push(Fill::Move { chunk: source.chunk, len, from: source.region });
                }
                rest -= len * count;
                to_move -= len * count;
            }
            fresh += rest;
            while !rest.is_zero() {
                let len = rest.min(chunk_len);
                fills.push(Fill::New { chunk: self.chunks.upcoming(new), len });
                new += 1;
                rest -= len;
            }
        }
        let allowed = self.growth_allowed(attempt);
        if fresh > allowed {
            return Build::Short { missing: fresh - allowed };
        }
        let (at, waits) = (bare.at, Vec::new());
        let filling = Filling { at, fills, stream, waits, arena: Some(arena) };
        Build::of(self.fill_plan(filling), fresh.saturating_sub(budget))
    }

    /// True if the first `upto` bytes of an arena are made of more than twice as many chunks as
    /// they would be if they were made at once, or if over a 64th more is mapped.
    pub(in crate::pool) fn is_ill_cut(self, arena: ArenaId, upto: Bytes) -> bool {
        let Policy::Mixed(mixed) = self.config.policy else { return false };
        let ArenaMemory { backed, lent } = self.arena_memory(arena);
        let Range { at, len } = self.arenas.get(arena).range();
        let chunks = self.chunks.within(at, len).count() as u64;
        let upto = self.rounded(upto, self.config.page);
        let usual = upto.count().div_ceil(self.arena_chunk(upto, &mixed).count());
        backed + lent > upto + Bytes::new(upto.count() / 64) || chunks > 2 * usual
    }
}
