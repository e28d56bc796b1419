//! Building a free region where none fits: at which site, which free chunks to move there, how large
//! the new ones are.
//!
//! A free region in front of a hole is grown by just the shortfall; so is one behind a hole, and
//! two with a hole between them are bridged. Chunks that were moved away from a place before may
//! return there; a fresh hole is the last resort. Each candidate is priced by the handles it takes,
//! because that is what driver calls cost, and by the memory it takes above the slack. The cheapest
//! wins; the sources are few large chunks rather than many small ones, from the smallest free
//! regions first, so that large regions stay whole.
//!
//! Retired mappings in the way are unmapped first. One that still maps a chunk which is free by now
//! is reactivated: that costs no driver call.

use std::collections::BTreeMap;

use crate::Bytes;
use crate::ids::{PoolAddr, StreamId};
use crate::pool::config::Mixed;
use crate::pool::index::{FreeIndex, RegionKey};
use crate::pool::ops::{Fill, Plan};
use crate::pool::plan::fill::{FillPlan, Filling};
use crate::pool::plan::growth::cut;
use crate::pool::plan::sites::{BuildSite, FreshSite};
use crate::pool::plan::sources::{ChunkCount, Source, Sources};
use crate::pool::request::Attempt;
use crate::pool::view::View;

/// Number of free regions considered as bases: the largest ones.
pub(in crate::pool) const BASES: usize = 64;

/// A last chunk that overshoots by at most this is taken before an exact combination is sought.
const OVERSHOOT: Bytes = Bytes::mib(2);

/// Price of a MiB above the slack, in handles: growing beyond the slack comes last.
const OVER_SLACK_PRICE: u64 = 31;

/// Retired mappings kept to be reactivated. Beyond that some are unmapped at every build.
const RETIRED_MAX: usize = 1024;

/// Number of mappings unmapped at a time: about half a millisecond of driver time.
const RETIRED_BATCH: usize = 32;

/// How a free region can be built.
#[derive(Debug)]
pub(in crate::pool) enum Build {
    /// This plan reserves addresses, or unmaps old mappings; then plan again.
    ClearFirst(Plan),
    /// By this plan, which grows the pool by `over_slack` bytes more than its slack allows.
    Fill { plan: Plan, over_slack: Bytes },
    /// It cannot: this many bytes are missing.
    Short { missing: Bytes },
}

impl Build {
    pub(in crate::pool) fn of(plan: FillPlan, over_slack: Bytes) -> Build {
        match plan {
            FillPlan::Fill(plan) => Build::Fill { plan, over_slack },
            FillPlan::ClearFirst(plan) => Build::ClearFirst(plan),
        }
    }

    /// True unless more sources could make it better: the pool grows beyond its slack, or it fails.
    pub(in crate::pool) fn is_enough(&self) -> bool {
        match self {
            Build::ClearFirst(_) => true,
            Build::Fill { over_slack, .. } => over_slack.is_zero(),
            Build::Short { .. } => false,
        }
    }
}

/// A region to build.
#[derive(Clone, Copy)]
struct Target {
    len: Bytes,
    stream: StreamId,
    /// How much the pool may grow before the price of growth counts.
    budget: Bytes,
    /// Least growth at a time within that budget.
    growth_min: Bytes,
    /// The longest new chunk.
    longest: Bytes,
}

/// A way to build it.
#[derive(Clone)]
struct Candidate {
    site: BuildSite,
    /// Bytes to fill at least.
    need: Bytes,
    /// Bytes that can be filled at most.
    room: Bytes,
    /// Sources whose retired mappings are at the site: reactivated.
    reactivated: Vec<Source>,
    /// Sources to move.
    moves: Vec<ChunkCount>,
    /// Bytes of new chunks.
    fresh: Bytes,
    placed: Bytes,
    price: u64,
    over_slack: Bytes,
}

impl<'a> View<'a> {
    /// Plans a free region of `len` bytes for the attempt's stream, which has none.
    pub(in crate::pool) fn build(self, len: Bytes, attempt: &Attempt, mixed: &Mixed) -> Build {
        if len > PoolAddr::SPAN_LIMIT {
            return Build::Short { missing: len };
        }
        if let Some(plan) = self.unmap_some_retired() {
            return Build::ClearFirst(plan);
        }
        let stream = attempt.request.stream;
        let allowed = self.growth_allowed(attempt);
        let budget = self.growth_budget(len, attempt, mixed);
        let some = self.sources_for(len, stream, &[]);
        let longest = self.longest_chunk(len, self.stranded(&some), mixed);
        let growth_min = mixed.growth_min;
        let target = Target { len, stream, budget, growth_min, longest };
        let build = self.build_from(target, allowed, &some);
        if some.complete || build.is_enough() {
            return build;
        }
        self.build_from(target, allowed, &self.sources(stream))
    }

    /// Free memory that no build can move: in chunks that are partly used.
    fn stranded(self, sources: &Sources<'a>) -> Bytes {
        let free = self.streams.get(sources.stream()).free.bytes() + self.streams.idle().bytes();
        free.saturating_sub(sources.bytes())
    }

    fn build_from(self, target: Target, allowed: Bytes, sources: &Sources<'a>) -> Build {
        let mut best: Option<Candidate> = None;
        let mut missing = Bytes::MAX;
        for candidate in self.candidates(target, sources) {
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
                self.plan_candidate(candidate, target, sources)
            }
        }
    }

    /// Plans the part of a build of `len` bytes that needs no new chunks: what is free now, moved to
    /// where all of it fits. `None` if nothing is to be moved.
    pub(in crate::pool) fn build_of_free(
        self,
        len: Bytes,
        stream: StreamId,
        mixed: &Mixed,
    ) -> Option<Build> {
        if len > PoolAddr::SPAN_LIMIT {
            return None;
        }
        if let Some(plan) = self.unmap_some_retired() {
            return Some(Build::ClearFirst(plan));
        }
        let sources = self.sources(stream);
        let longest = self.longest_chunk(len, Bytes::ZERO, mixed);
        let (budget, growth_min) = (Bytes::ZERO, Bytes::ZERO);
        let target = Target { len, stream, budget, growth_min, longest };
        // What was moved together before stays, however many larger regions there are.
        let moved = sources.richest_region().into_iter();
        let moved = moved
            .flat_map(|base| self.sites_beside(base, len, stream))
            .filter_map(|site| self.candidate(site, target, &sources));
        let candidates = moved.chain(self.candidates(target, &sources));
        let mut best = candidates.min_by_key(|candidate| candidate.price)?;
        best.placed -= std::mem::take(&mut best.fresh);
        (!best.placed.is_zero()).then(|| self.plan_candidate(best, target, &sources))
    }

    /// A plan that unmaps some retired mappings, if there are more than are worth keeping.
    pub(in crate::pool) fn unmap_some_retired(self) -> Option<Plan> {
        (self.retired.len() > RETIRED_MAX)
            .then(|| self.unmap_retired(Some(RETIRED_BATCH)))
            .flatten()
    }

    /// The ways to build a region, the largest bases first; the first of equals is the best.
    fn candidates<'b>(
        self,
        target: Target,
        sources: &'b Sources<'a>,
    ) -> impl Iterator<Item = Candidate> + use<'a, 'b> {
        let largest = |free: &'a FreeIndex| free.iter().rev().take(BASES);
        let own = largest(&self.streams.get(target.stream).free);
        let bases = own.chain(largest(self.streams.idle()));
        let mut bases: Vec<(Bytes, RegionKey)> = bases.map(|(_, len, key)| (len, key)).collect();
        bases.sort_unstable_by(|a, b| b.cmp(a));
        bases.truncate(BASES);
        self.looked_at.add(bases.len());
        bases
            .into_iter()
            .flat_map(move |(_, base)| self.sites_beside(base, target.len, target.stream))
            .chain(self.old_places(sources))
            .chain([BuildSite::Fresh])
            .filter_map(move |site| self.candidate(site, target, sources))
    }

    /// What building at a site takes, or `None` if the region does not fit there.
    fn candidate(
        self,
        site: BuildSite,
        target: Target,
        sources: &Sources<'a>,
    ) -> Option<Candidate> {
        let Target { len, budget, growth_min, longest, .. } = target;
        let base_len = site.base().map_or(Bytes::ZERO, |key| self.regions.get(key).len);
        let need = len.saturating_sub(base_len).checked_round_up(self.config.page)?;
        // The last chunk may overshoot, by less than its own size, and growth by what is left of its
        // least amount.
        let largest = sources.counts.last().map_or(Bytes::ZERO, |largest| largest.len);
        let enough = need + largest.max(growth_min);
        let (room, need) = match site {
            BuildSite::Behind { base } => (self.fillable_behind(base, enough).len, need),
            BuildSite::Before { base } => (self.fillable_before(base, enough).len, need),
            BuildSite::Bridge { base, .. } => {
                let room = self.fillable_behind(base, len).len;
                (room, room)
            }
            BuildSite::Return { first } if self.is_fillable(first) => {
                let here = self.regions.get(first).len;
                let behind = self.fillable_behind(first, enough.saturating_sub(here)).len;
                (here + behind, need)
            }
            BuildSite::Return { .. } => return None,
            BuildSite::Fresh => (Bytes::MAX, need),
        };
        if room < need || need.is_zero() {
            return None;
        }
        let reactivated = self.reactivable(site, need, sources);
        let returned: Bytes = reactivated.iter().map(|source| source.len).sum();
        let counts = sources.movable([site.base(), site.bridged()], &reactivated);
        let movable = ChunkCount::total(&counts);
        let rest = need.saturating_sub(returned);
        let mut fresh = rest.saturating_sub(movable).max(budget.min(rest));
        let exact = site.bridged().is_some();
        let Choice { moves, unmet } = choose(rest - fresh, counts, exact);
        fresh += unmet;
        let old = returned + ChunkCount::total(&moves);
        if !exact && !fresh.is_zero() {
            let most = budget.min(room.saturating_sub(old));
            fresh = fresh.max(growth_min.min(most).round_down(self.config.page));
        }
        let placed = old + fresh;
        if placed > room || (exact && placed != need) {
            return None;
        }
        let over_slack = fresh.saturating_sub(budget);
        let new = cut(fresh, longest).len() as u64;
        let handles = moves.iter().map(|chunks| chunks.count).sum::<u64>() + new;
        let price = handles + over_slack.whole(Bytes::mib(1)).saturating_mul(OVER_SLACK_PRICE);
        Some(Candidate { site, need, room, reactivated, moves, fresh, placed, price, over_slack })
    }

    fn plan_candidate(self, candidate: Candidate, target: Target, sources: &Sources<'a>) -> Build {
        let Candidate { site, placed, need, over_slack, .. } = candidate;
        let at = match site {
            BuildSite::Behind { base } | BuildSite::Bridge { base, .. } => {
                self.regions.get(base).end()
            }
            BuildSite::Before { base } => self.regions.get(base).at - placed,
            BuildSite::Return { first } => self.regions.get(first).at,
            BuildSite::Fresh => match self.fresh_site(placed.max(need)) {
                FreshSite::At(at) => at,
                FreshSite::MakeFirst(plan) => return Build::ClearFirst(plan),
            },
        };
        debug_assert!(placed <= candidate.room);
        let fills = self.fills(&candidate, target, sources);
        let stream = target.stream;
        let filling = Filling { at, fills, stream, waits: Vec::new(), arena: None };
        Build::of(self.fill_plan(filling), over_slack)
    }

    /// The chunks of a candidate in address order.
    fn fills(self, candidate: &Candidate, target: Target, sources: &Sources<'a>) -> Vec<Fill> {
        let mut fills: Vec<Fill> = Vec::new();
        for &Source { chunk, len, region: from } in &candidate.reactivated {
            fills.push(Fill::Reactivate { chunk, len, from });
        }
        let left_out = [candidate.site.base(), candidate.site.bridged()];
        for chunks in &candidate.moves {
            let usable = sources.of_len(chunks.len).filter(|source| {
                !left_out.contains(&Some(source.region)) && !candidate.reactivated.contains(source)
            });
            for Source { chunk, len, region: from } in usable.take(chunks.count as usize) {
                self.looked_at.add(1);
                fills.push(Fill::Move { chunk, len, from });
            }
        }
        let new = cut(candidate.fresh, target.longest);
        for (n, len) in new.enumerate() {
            fills.push(Fill::New { chunk: self.chunks.upcoming(n), len });
        }
        if let BuildSite::Before { .. } = candidate.site {
            fills.reverse();
        }
        fills
    }
}

/// Sources to move, and the bytes that they leave unfilled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::pool) struct Choice {
    /// Largest chunks first.
    pub moves: Vec<ChunkCount>,
    pub unmet: Bytes,
}

/// Returns the sources that fill `need` bytes with the fewest handles. `counts` is sorted by length.
/// An exact choice never exceeds `need`.
pub(in crate::pool) fn choose(need: Bytes, mut counts: Vec<ChunkCount>, exact: bool) -> Choice {
    let mut moves: BTreeMap<Bytes, u64> = BTreeMap::new();
    let mut rest = need;
    while !rest.is_zero() {
        let covering = counts.iter().find(|chunks| chunks.len >= rest && chunks.count > 0);
        let covering = covering.map(|chunks| chunks.len);
        let fits = |&len: &Bytes| len == rest || (!exact && len - rest <= OVERSHOOT);
        let last = match covering.filter(fits) {
            Some(len) => Some(len),
            None => {
                let mut shorter = counts.iter_mut().rev();
                let shorter = shorter.find(|chunks| chunks.len <= rest && chunks.count > 0);
                if let Some(chunks) = shorter {
                    let taken = rest.whole(chunks.len).min(chunks.count);
                    *moves.entry(chunks.len).or_default() += taken;
                    chunks.count -= taken;
                    rest -= chunks.len * taken;
                    continue;
                }
                covering.filter(|_| !exact)
            }
        };
        let Some(len) = last else { break };
        *moves.entry(len).or_default() += 1;
        rest = Bytes::ZERO;
    }
    let moves = moves.into_iter().rev().map(|(len, count)| ChunkCount { len, count });
    Choice { moves: moves.collect(), unmet: rest }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(of: &[(u64, u64)]) -> Vec<ChunkCount> {
        let one = |&(mib, count): &(u64, u64)| ChunkCount { len: Bytes::mib(mib), count };
        of.iter().map(one).collect()
    }

    /// Needed MiB, exactly or not, from these chunks: what is moved, and what is unmet.
    type Row = (u64, bool, &'static [(u64, u64)], &'static [(u64, u64)], u64);

    #[test]
    fn the_fewest_handles_that_fill_the_need_are_chosen() {
        let rows: [Row; 11] = [
            // Nothing is needed.
            (0, false, &[(8, 1)], &[], 0),
            // One chunk of that length.
            (32, true, &[(8, 9), (32, 1)], &[(32, 1)], 0),
            // A chunk that overshoots by at most 2 MiB comes before an exact sum.
            (30, false, &[(10, 3), (32, 1)], &[(32, 1)], 0),
            (30, true, &[(10, 3), (32, 1)], &[(10, 3)], 0),
            // Large chunks first, as many as fit.
            (40, false, &[(8, 5), (16, 2)], &[(16, 2), (8, 1)], 0),
            // A larger chunk only where no shorter one is left.
            (20, false, &[(16, 1), (64, 1)], &[(64, 1), (16, 1)], 0),
            (20, true, &[(16, 1), (64, 1)], &[(16, 1)], 4),
            // The shortest of the larger ones.
            (4, false, &[(16, 1), (64, 1)], &[(16, 1)], 0),
            // All there is, and it is not enough.
            (100, false, &[(8, 2), (16, 1)], &[(16, 1), (8, 2)], 68),
            // A length of which nothing is left is no choice.
            (16, false, &[(16, 0), (8, 2)], &[(8, 2)], 0),
            // No chunks at all.
            (16, false, &[], &[], 16),
        ];
        for (need, exact, counts, moves, unmet) in rows {
            let mut counts = chunks(counts);
            counts.sort_by_key(|chunks| chunks.len);
            let expected = Choice { moves: chunks(moves), unmet: Bytes::mib(unmet) };
            let chosen = choose(Bytes::mib(need), counts.clone(), exact);
            assert_eq!(chosen, expected, "{need} MiB exact={exact} of {counts:?}");
        }
    }
}
