//! Building a free region where none fits: which hole, which free chunks to move, how large the
//! new ones are.
//!
//! A free region in front of a hole is grown by just the shortfall; so is one behind a hole, and
//! two with a hole between them are bridged. What was moved away from a place before is taken back
//! there; a fresh hole is the last resort. Each candidate is
//! priced by the handles it takes, because that is what driver calls cost, and by the memory it
//! takes above the slack. The cheapest wins; the sources are few large chunks rather than many
//! small ones, from the smallest free regions first, so that large regions stay whole.
//!
//! Retired mappings in the way are unmapped first. One that still maps a chunk which is free by now
//! is taken back into use: that costs nothing.

use std::collections::BTreeMap;

use crate::Bytes;
use crate::ids::{ChunkId, Mark, PoolAddr, StreamId};
use crate::pool::config::Mixed;
use crate::pool::index::RegionKey;
use crate::pool::plan::place::Attempt;
use crate::pool::plan::sites::Side;
use crate::pool::plan::{Change, Fill, Op, Plan, Range};
use crate::pool::regions::Kind;
use crate::pool::state::Pool;

/// Candidates looked at: the largest free regions.
const BASES: usize = 64;

/// A last chunk that overshoots by at most this is taken before an exact combination is sought.
const OVERSHOOT: u64 = 2 << 20;

/// What a handle above the slack costs, in handles for each MiB: growing beyond it comes last.
const OVER_SLACK_PRICE: u64 = 31;

/// Retired mappings kept for being taken back. Beyond that some are unmapped at every build.
const RETIRED_MOST: usize = 1024;

/// How many are unmapped at a time: half a millisecond's worth.
const RETIRED_BATCH: usize = 32;

/// What a region of an arena counts as among sources: longer than any of the stream's own.
const LENT: u64 = u64::MAX;

pub(crate) enum Build {
    /// Addresses have to be reserved, or old mappings unmapped, first.
    Clear(Plan),
    /// The region can be built.
    Fill { plan: Plan, over_slack: u64 },
    /// It cannot: this many bytes are missing.
    Short { missing: u64 },
}

/// A wholly free chunk of the requesting stream.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    pub chunk: ChunkId,
    home: PoolAddr,
    pub len: u64,
    pub region: RegionKey,
    region_len: u64,
}

#[derive(Clone)]
struct Candidate {
    side: Side,
    base: Option<RegionKey>,
    /// Bytes to fill at least.
    need: u64,
    /// Bytes that fit.
    room: u64,
    /// Retired mappings next to the base whose chunks are free: taken back.
    reactivated: Vec<usize>,
    /// How many sources of each length are moved.
    moves: Vec<(u64, u64)>,
    /// Bytes of new chunks.
    fresh: u64,
    placed: u64,
    price: u64,
    over_slack: u64,
}

/// The sources of one build.
pub(crate) struct Sources {
    pub all: Vec<Source>,
    /// Indices by length; within a length the smallest region first.
    pub by_len: BTreeMap<u64, Vec<usize>>,
    pub by_chunk: BTreeMap<ChunkId, usize>,
    /// How many sources of each length there are, by length.
    pub counts: Vec<(u64, u64)>,
    /// The same for each region, in the slots of `counts`.
    of_region: BTreeMap<RegionKey, Vec<(usize, u64)>>,
}

impl Sources {
    fn new(all: Vec<Source>) -> Sources {
        let mut by_len: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        let mut by_chunk = BTreeMap::new();
        for (index, source) in all.iter().enumerate() {
            by_len.entry(source.len).or_default().push(index);
            by_chunk.insert(source.chunk, index);
        }
        let mut of_region: BTreeMap<RegionKey, Vec<(usize, u64)>> = BTreeMap::new();
        for (slot, group) in by_len.values_mut().enumerate() {
            group.sort_by_key(|&index| (all[index].region_len, all[index].home));
            for &index in group.iter() {
                let slots = of_region.entry(all[index].region).or_default();
                match slots.last_mut() {
                    Some((last, count)) if *last == slot => *count += 1,
                    _ => slots.push((slot, 1)),
                }
            }
        }
        let counts = by_len.iter().map(|(&len, group)| (len, group.len() as u64)).collect();
        Sources { all, by_len, by_chunk, counts, of_region }
    }

    /// The region of the stream's own with the most bytes in sources.
    fn most_of_one(&self) -> Option<RegionKey> {
        let mut of_region: BTreeMap<RegionKey, u64> = BTreeMap::new();
        for source in self.all.iter().filter(|source| source.region_len != LENT) {
            *of_region.entry(source.region).or_default() += source.len;
        }
        of_region.into_iter().max_by_key(|&(_, bytes)| bytes).map(|(key, _)| key)
    }

    /// How many sources of each length can be moved when the regions named and the sources taken
    /// back already are left out.
    fn movable(&self, left_out: [Option<RegionKey>; 2], taken_back: &[usize]) -> Vec<(u64, u64)> {
        let mut counts = self.counts.clone();
        for region in left_out.into_iter().flatten() {
            for &(slot, count) in self.of_region.get(&region).into_iter().flatten() {
                counts[slot].1 -= count;
            }
        }
        for &index in taken_back {
            let len = self.all[index].len;
            let slot = counts.partition_point(|&(known, _)| known < len);
            counts[slot].1 -= 1;
        }
        counts
    }
}

impl Pool {
    /// Bytes of all wholly free chunks in regions of `stream`.
    pub(crate) fn movable_bytes(&self, stream: StreamId) -> u64 {
        self.sources(stream).all.iter().map(|source| source.len).sum()
    }

    /// The wholly free chunks that `stream` may move: its own, and what arenas lend, last.
    pub(crate) fn sources(&self, stream: StreamId) -> Sources {
        let mut all = Vec::new();
        let lent = self.lent().map(|(at, len, region)| (at, len, region, LENT));
        let own = self.streams.get(stream).free.iter();
        for (at, len, region, rank) in own.map(|(at, len, key)| (at, len, key, len)).chain(lent) {
            for (chunk, home, len) in self.chunks.within(at, len) {
                all.push(Source { chunk, home, len, region, region_len: rank });
            }
        }
        Sources::new(all)
    }

    /// Plans a free region of `len` bytes for the attempt's stream, which has none.
    pub(crate) fn build(&mut self, len: u64, attempt: &Attempt, mixed: &Mixed) -> Build {
        let stream = attempt.request.stream;
        if len > PoolAddr::SPAN_LIMIT.count() {
            return Build::Short { missing: len };
        }
        if self.retired.len() > RETIRED_MOST
            && let Some(plan) = self.unmap_retired(RETIRED_BATCH)
        {
            return Build::Clear(plan);
        }
        let allowed = self.growth_allowed(attempt);
        let budget = self.growth_budget(len, attempt, mixed);
        let sources = self.sources(stream);

        let mut best: Option<Candidate> = None;
        let mut missing = u64::MAX;
        for candidate in self.candidates(len, stream, budget, &sources, mixed) {
            if candidate.fresh > allowed {
                missing = missing.min(candidate.fresh - allowed);
                continue;
            }
            if best.as_ref().is_none_or(|best| candidate.price < best.price) {
                best = Some(candidate);
            }
        }
        match best {
            None => Build::Short { missing },
            Some(candidate) => {
                debug_assert!(candidate.placed >= candidate.need);
                self.plan_fill(candidate, len, &sources, stream, mixed)
            }
        }
    }

    /// The part of a build of `len` bytes that needs no new chunks: what is free now, moved to where
    /// all of it fits. `None` if nothing is to be moved.
    pub(crate) fn build_of_free(
        &mut self,
        len: u64,
        stream: StreamId,
        mixed: &Mixed,
    ) -> Option<Build> {
        if len > PoolAddr::SPAN_LIMIT.count() {
            return None;
        }
        if self.retired.len() > RETIRED_MOST
            && let Some(plan) = self.unmap_retired(RETIRED_BATCH)
        {
            return Some(Build::Clear(plan));
        }
        let sources = self.sources(stream);
        // What was moved together before stays, however many larger regions there are.
        let moved = sources
            .most_of_one()
            .map(|key| self.sides(key, len).into_iter().map(move |side| (Some(key), side)));
        let moved = moved
            .into_iter()
            .flatten()
            .filter_map(|(base, side)| self.candidate(base, side, len, 0, &sources, mixed));
        let candidates = moved.chain(self.candidates(len, stream, 0, &sources, mixed));
        let mut best = candidates.min_by_key(|candidate| candidate.price)?;
        best.placed -= std::mem::take(&mut best.fresh);
        (best.placed > 0).then(|| self.plan_fill(best, len, &sources, stream, mixed))
    }

    /// Where the region may be built, the largest bases first; the first of equals is the best.
    fn candidates(
        &self,
        len: u64,
        stream: StreamId,
        budget: u64,
        sources: &Sources,
        mixed: &Mixed,
    ) -> impl Iterator<Item = Candidate> {
        let mut bases: Vec<(u64, RegionKey)> =
            self.streams.get(stream).free.iter().map(|(_, len, key)| (len, key)).collect();
        bases.sort_unstable_by(|a, b| b.cmp(a));
        bases.truncate(BASES);
        bases
            .into_iter()
            .flat_map(move |(_, key)| {
                self.sides(key, len).into_iter().map(move |side| (Some(key), side))
            })
            .chain(self.old_places(sources).into_iter().map(|key| (None, Side::Return(key))))
            .chain([(None, Side::Fresh)])
            .filter_map(move |(base, side)| self.candidate(base, side, len, budget, sources, mixed))
    }

    /// How much the pool may still grow: up to its limit, or not at all once the card was full.
    pub(crate) fn growth_allowed(&self, attempt: &Attempt) -> u64 {
        if !attempt.may_grow {
            return 0;
        }
        let limit = self.config.limit.map_or(u64::MAX, Bytes::count);
        limit.saturating_sub(self.charged()) / self.config.page.count() * self.config.page.count()
    }

    /// How much the pool may grow for `len` bytes more without going beyond its slack.
    pub(crate) fn growth_budget(&self, len: u64, attempt: &Attempt, mixed: &Mixed) -> u64 {
        let page = self.config.page.count();
        let slack = if attempt.frugal { 0 } else { mixed.slack_per_mille };
        let target = (self.used_peak.max(self.used.saturating_add(len)) as u128
            * u128::from(1000 + slack)
            / 1000) as u64;
        let target = if attempt.roomy && !attempt.frugal { u64::MAX } else { target };
        target.saturating_sub(self.chunks.bytes()).min(self.growth_allowed(attempt)) / page * page
    }

    fn sides(&self, base: RegionKey, len: u64) -> Vec<Side> {
        let mut sides = vec![Side::Behind, Side::Before];
        let room = self.room_behind(base, len);
        if let Some(next) = room.stopped_by
            && let (Kind::Free(free), Kind::Free(own)) =
                (&self.regions.get(next).kind, &self.regions.get(base).kind)
            && free.owner == own.owner
            && self.regions.get(base).len + room.len + self.regions.get(next).len >= len
        {
            sides.push(Side::Bridge(next));
        }
        sides
    }

    fn candidate(
        &self,
        base: Option<RegionKey>,
        side: Side,
        len: u64,
        budget: u64,
        sources: &Sources,
        mixed: &Mixed,
    ) -> Option<Candidate> {
        let page = self.config.page.count();
        let base_len = base.map_or(0, |key| self.regions.get(key).len);
        let need = (len - base_len).checked_next_multiple_of(page)?;
        // The last chunk may overshoot, by less than its own size.
        let enough = need + sources.counts.last().map_or(0, |&(largest, _)| largest);
        let (room, need, bridged) = match (side, base) {
            (Side::Behind, Some(base)) => (self.room_behind(base, enough).len, need, None),
            (Side::Before, Some(base)) => (self.room_before(base, enough).len, need, None),
            (Side::Bridge(next), Some(base)) => {
                let room = self.room_behind(base, len).len;
                (room, room, Some(next))
            }
            (Side::Return(first), _) if self.fillable(first) => {
                let here = self.regions.get(first).len;
                (here + self.room_behind(first, enough.saturating_sub(here)).len, need, None)
            }
            (Side::Return(_), _) => return None,
            _ => (u64::MAX, need, None),
        };
        if room < need || need == 0 {
            return None;
        }
        let reactivated = self.reactivable(base, side, need, bridged, sources);
        let taken_back: u64 = reactivated.iter().map(|&index| sources.all[index].len).sum();
        let counts = sources.movable([base, bridged], &reactivated);
        let total: u64 = counts.iter().map(|(chunk_len, count)| chunk_len * count).sum();
        let rest = need.saturating_sub(taken_back);
        let mut fresh = rest.saturating_sub(total).max(budget.min(rest));
        let exact = bridged.is_some();
        let (moves, unmet) = choose(rest - fresh, counts, exact);
        fresh += unmet;
        let moved: u64 = moves.iter().map(|(chunk_len, count)| chunk_len * count).sum();
        let placed = taken_back + moved + fresh;
        if placed > room || (exact && placed != need) {
            return None;
        }
        let over_slack = fresh.saturating_sub(budget);
        let handles = moves.iter().map(|&(_, count)| count).sum::<u64>()
            + new_chunks(fresh, len, self.used_peak.max(self.used + len), mixed).len() as u64;
        let price = handles + (over_slack >> 20).saturating_mul(OVER_SLACK_PRICE);
        Some(Candidate {
            side,
            base,
            need,
            room,
            reactivated,
            moves,
            fresh,
            placed,
            price,
            over_slack,
        })
    }

    fn plan_fill(
        &mut self,
        candidate: Candidate,
        len: u64,
        sources: &Sources,
        stream: StreamId,
        mixed: &Mixed,
    ) -> Build {
        let Candidate { placed, over_slack, .. } = candidate;
        let at = match (candidate.side, candidate.base) {
            (Side::Behind | Side::Bridge(_), Some(base)) => self.regions.get(base).end(),
            (Side::Before, Some(base)) => self.regions.get(base).at.minus(placed),
            (Side::Return(first), _) => self.regions.get(first).at,
            _ => match self.fresh_hole(placed.max(candidate.need)) {
                Ok(at) => at,
                Err(plan) => return Build::Clear(plan),
            },
        };
        let mut fills: Vec<Fill> = Vec::new();
        for &index in &candidate.reactivated {
            let Source { chunk, len, region: from, .. } = sources.all[index];
            fills.push(Fill::Reactivate { chunk, len, from });
        }
        for &(chunk_len, count) in &candidate.moves {
            let usable = sources.by_len[&chunk_len].iter().filter(|&&index| {
                let source = &sources.all[index];
                Some(source.region) != candidate.base
                    && candidate.side != Side::Bridge(source.region)
                    && !candidate.reactivated.contains(&index)
            });
            for &index in usable.take(count as usize) {
                let Source { chunk, region: from, .. } = sources.all[index];
                fills.push(Fill::Move { chunk, len: chunk_len, from });
            }
        }
        for (n, len) in new_chunks(candidate.fresh, len, self.used_peak.max(self.used + len), mixed)
            .into_iter()
            .enumerate()
        {
            fills.push(Fill::New { chunk: self.chunks.upcoming(n), len });
        }
        if candidate.side == Side::Before {
            fills.reverse();
        }
        debug_assert!(placed <= candidate.room);
        self.fill_plan(at, fills, stream, Vec::new())
            .map_or_else(Build::Clear, |plan| Build::Fill { plan, over_slack })
    }

    /// The operations that fill `at..` with `fills`, or, if retired mappings are in the way, the
    /// plan that unmaps those first.
    pub(crate) fn fill_plan(
        &self,
        at: PoolAddr,
        fills: Vec<Fill>,
        stream: StreamId,
        waits: Vec<Mark>,
    ) -> Result<Plan, Plan> {
        let mut ops = Vec::new();
        let mut in_the_way: Vec<Range> = Vec::new();
        let mut access: Vec<Range> = Vec::new();
        let mut retires_present = false;
        let present = self.streams.now(stream);
        let mut here = at;
        for &fill in &fills {
            let (chunk, len) = (fill.chunk(), fill.len());
            let mapped = Range { at: here, len: Bytes::new(len) };
            if let Some(from) = fill.from() {
                retires_present |= self.source_mark(chunk, from) == present;
            }
            if !matches!(fill, Fill::Reactivate { .. }) {
                if let Fill::New { .. } = fill {
                    ops.push(Op::Create { chunk, len: Bytes::new(len) });
                }
                in_the_way.extend(self.retired_within(here, len));
                ops.push(Op::Map { chunk, at: here, len: Bytes::new(len) });
                match access.last_mut() {
                    Some(last) if last.at.plus(last.len.count()) == here => last.len += mapped.len,
                    _ => access.push(mapped),
                }
            }
            here = here.plus(len);
        }
        if !in_the_way.is_empty() {
            in_the_way.sort_by_key(|range| range.at);
            in_the_way.dedup();
            return Err(Plan {
                ops: in_the_way.iter().map(|&range| Op::Unmap(range)).collect(),
                change: Change::Unmap { ranges: in_the_way },
            });
        }
        ops.extend(access.into_iter().map(Op::SetAccess));
        let (mut records, ordering) = self.waiting_ops(stream, &waits);
        ops.extend(ordering);
        // Old addresses may be unmapped once the work before the move is over, and only an event
        // recorded after it can tell.
        if retires_present && !records.contains(&present) && !self.streams.is_out_of_reach(present)
        {
            records.push(present);
            ops.push(Op::Record(present));
        }
        Ok(Plan { ops, change: Change::Fill { at, fills, stream, waits, records } })
    }

    /// The work that may still touch a free chunk at its home in region `from`.
    pub(crate) fn source_mark(&self, chunk: ChunkId, from: RegionKey) -> Mark {
        let chunk = self.chunks.get(chunk);
        let home = chunk.home.expect("a source has a home");
        let free = self.free_of(from);
        let epoch = free.epoch_of(home.since(self.regions.get(from).at), chunk.len);
        Mark { stream: free.owner, epoch }
    }

    fn retired_within(&self, at: PoolAddr, len: u64) -> Vec<Range> {
        let end = at.plus(len);
        self.retired
            .range(..end)
            .rev()
            .map(|(_, &key)| self.regions.get(key))
            .take_while(|region| region.end() > at)
            .map(|region| Range { at: region.at, len: Bytes::new(region.len) })
            .collect()
    }
}

/// The sources that fill `rest` bytes with the fewest handles: how many of each length, largest
/// first, and what stays unmet. `counts` is sorted by length.
pub(crate) fn choose(
    mut rest: u64,
    mut counts: Vec<(u64, u64)>,
    exact: bool,
) -> (Vec<(u64, u64)>, u64) {
    let mut moves: Vec<(u64, u64)> = Vec::new();
    while rest > 0 {
        let covering = counts.iter().position(|&(len, count)| len >= rest && count > 0);
        if let Some(index) = covering
            && (counts[index].0 == rest || (!exact && counts[index].0 - rest <= OVERSHOOT))
        {
            moves.push((counts[index].0, 1));
            return (merged(moves), 0);
        }
        if let Some((len, count)) =
            counts.iter_mut().rev().find(|(len, count)| *len <= rest && *count > 0)
        {
            let taken = (rest / *len).min(*count);
            moves.push((*len, taken));
            *count -= taken;
            rest -= *len * taken;
            continue;
        }
        match covering.filter(|_| !exact) {
            Some(index) => {
                moves.push((counts[index].0, 1));
                return (merged(moves), 0);
            }
            None => break,
        }
    }
    (merged(moves), rest)
}

fn merged(moves: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    let mut sum: BTreeMap<u64, u64> = BTreeMap::new();
    for (len, count) in moves {
        *sum.entry(len).or_default() += count;
    }
    sum.into_iter().rev().collect()
}

/// How `bytes` of new memory for a request of `len` are cut into chunks, in a pool whose
/// high-water mark is `peak`. Small pools and small requests get small chunks: what a partly used
/// chunk strands stays small beside what the pool holds.
pub(crate) fn new_chunks(mut bytes: u64, len: u64, peak: u64, mixed: &Mixed) -> Vec<u64> {
    let floor_to = |amount: u64| 1u64 << amount.max(1).ilog2();
    let by_request = floor_to(len / mixed.chunks_per_request.max(1));
    let by_pool = floor_to(peak / mixed.chunks_per_pool.max(1))
        .clamp(mixed.chunk_min.count(), mixed.chunk_usual.count());
    let largest = by_request.max(by_pool).min(mixed.chunk_max.count());
    let mut chunks = Vec::new();
    while bytes > 0 {
        let chunk = bytes.min(largest);
        chunks.push(chunk);
        bytes -= chunk;
    }
    chunks
}
