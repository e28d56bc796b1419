//! The preset `vpmm`: OpenVM's virtual pool as its document tells it.
//!
//! Every request is whole pages, every chunk one page. Malloc goes through the document's phases:
//!
//! * phase 0 unmaps zombies (here: retired mappings) whose work is over;
//! * phase 1 takes the best fit of the own stream, then the best fit of others that is complete;
//! * phase 2 takes the smallest hole that holds the request, creates the shortfall at its
//!   beginning, moves free pages there (own stream first, then others, oldest first, behind waits),
//!   and lets the whole merge with a free region of the own stream in front of the hole.
//!
//! That region in front counts as harvested last and in place: its pages are where they should be.
//! The document's walkthrough (cases B and D) needs this.

use crate::Bytes;
use crate::ids::{Epoch, Mark};
use crate::pool::index::RegionKey;
use crate::pool::plan::place::{Attempt, Found, Rung, Step};
use crate::pool::plan::{Change, Fill, Op, Plan, Range};
use crate::pool::regions::Kind;
use crate::pool::state::Pool;

impl Pool {
    pub(crate) fn find_vpmm(&mut self, attempt: &mut Attempt) -> Found {
        let stream = attempt.request.stream;
        let len = self.rounded(attempt.request.size.count(), self.config.page.count());
        loop {
            match attempt.rung {
                Rung::Own => {
                    attempt.rung = Rung::Learn;
                    if !self.retired.is_empty() && self.streams.any_pending() {
                        return Found::Step(Step::Poll);
                    }
                }
                Rung::Learn => {
                    attempt.rung = Rung::Idle;
                    if let Some(plan) = self.unmap_retired(usize::MAX) {
                        return Found::Step(Step::Perform(plan));
                    }
                }
                Rung::Idle => {
                    if let Some(key) = self.streams.get(stream).free.find(len) {
                        return Found::Region(key);
                    }
                    attempt.rung = Rung::Gather;
                    if self.streams.len() > 1 && self.streams.any_pending() {
                        return Found::Step(Step::Poll);
                    }
                }
                Rung::Gather | Rung::Adopt => {
                    attempt.rung = Rung::Build;
                    if self.promote_waiting()
                        && let Some(key) = self.streams.get(stream).free.find(len)
                    {
                        return Found::Region(key);
                    }
                    if let Some(key) = self.take_complete(stream, len) {
                        return Found::Region(key);
                    }
                }
                Rung::Build => {
                    attempt.planned = true;
                    // What the plan makes is found as the stream's own.
                    attempt.rung = Rung::Idle;
                    return Found::Step(self.harvest(len, attempt));
                }
            }
        }
    }

    /// A plan that unmaps retired mappings whose work is over, at most so many, neighbours in one
    /// call.
    pub(crate) fn unmap_retired(&self, most: usize) -> Option<Plan> {
        let mut ranges: Vec<Range> = Vec::new();
        let mut found = 0;
        for &key in self.retired.values() {
            if found == most {
                break;
            }
            let region = self.regions.get(key);
            let Kind::Retired { mark, .. } = region.kind else {
                panic!("region {key} is indexed as retired");
            };
            if !self.streams.is_over(mark) {
                continue;
            }
            found += 1;
            match ranges.last_mut() {
                Some(last) if last.at.plus(last.len.count()) == region.at => {
                    last.len += Bytes::new(region.len);
                }
                _ => ranges.push(Range { at: region.at, len: Bytes::new(region.len) }),
            }
        }
        let ops = ranges.iter().map(|&range| Op::Unmap(range)).collect();
        (!ranges.is_empty()).then_some(Plan { ops, change: Change::Unmap { ranges } })
    }

    /// The smallest region of another stream that fits and is complete, now the caller's.
    fn take_complete(&mut self, stream: crate::ids::StreamId, len: u64) -> Option<RegionKey> {
        let complete = |key: &RegionKey| {
            let free = self.free_of(*key);
            let mark = |epoch| Mark { stream: free.owner, epoch };
            free.parts.iter().all(|part| self.streams.is_over(mark(part.epoch)))
        };
        let key = self
            .foreign(stream)
            .into_iter()
            .filter(|&key| self.regions.get(key).len >= len)
            .filter(complete)
            .min_by_key(|&key| (self.regions.get(key).len, self.regions.get(key).at))?;
        self.unindex(key);
        let free = self.free_of_mut(key);
        free.owner = stream;
        free.parts.iter_mut().for_each(|part| part.epoch = Epoch::START);
        Some(self.link_free(key))
    }

    /// Phase 2.
    fn harvest(&mut self, len: u64, attempt: &mut Attempt) -> Step {
        let stream = attempt.request.stream;
        let page = self.config.page.count();
        let mut regions: Vec<RegionKey> =
            self.streams.get(stream).free.iter().map(|(_, _, key)| key).collect();
        regions.sort_by_key(|&key| self.free_of(key).born);
        regions.extend(self.foreign(stream));
        let total: u64 = regions.iter().map(|&key| self.regions.get(key).len).sum();
        let shortfall = len.saturating_sub(total);
        if shortfall > self.growth_allowed(attempt)
            || len > crate::ids::PoolAddr::SPAN_LIMIT.count()
        {
            // Blocks that other streams used wait for them; nobody else would record an event there.
            if !attempt.ordered
                && !self.waiting.is_empty()
                && let Some(plan) = self.order_others(stream, len)
            {
                attempt.ordered = true;
                return Step::Perform(plan);
            }
            return Step::Short(self.shortage(attempt));
        }
        let Some(&(_, at, hole)) = self.holes.range((len, Default::default(), 0)..).next() else {
            return Step::Perform(self.reserve_plan(len));
        };
        let front = self.regions.prev(hole).filter(|&prev| self.is_free_of(prev, stream));
        let mut fills: Vec<Fill> = (0..shortfall / page)
            .map(|n| Fill::New { chunk: self.chunks.upcoming(n as usize), len: page })
            .collect();
        let merged = match front {
            Some(front) if shortfall > 0 => shortfall + self.regions.get(front).len,
            _ => shortfall,
        };
        let mut remaining = len.saturating_sub(merged);
        let mut waits: Vec<Mark> = Vec::new();
        for key in regions.into_iter().filter(|&key| Some(key) != front) {
            let region = self.regions.get(key);
            let taken = remaining.min(region.len);
            remaining -= taken;
            for (chunk, _, len) in self.chunks.within(region.at, taken) {
                fills.push(Fill::Move { chunk, len, from: key });
            }
            let free = self.free_of(key);
            let mark = Mark { stream: free.owner, epoch: free.epoch_of(0, taken) };
            if taken > 0 && !self.streams.is_ordered(stream, mark) {
                waits.push(mark);
            }
        }
        // One wait a stream: a later event covers the earlier ones.
        waits.sort_by(|a, b| (a.stream, b.epoch).cmp(&(b.stream, a.epoch)));
        waits.dedup_by_key(|mark| mark.stream);
        match self.fill_plan(at, fills, stream, waits) {
            Ok(plan) | Err(plan) => Step::Perform(plan),
        }
    }
}
