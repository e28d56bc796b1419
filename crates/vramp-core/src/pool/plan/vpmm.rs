//! The preset `vpmm`: OpenVM's virtual pool as its document describes it.
//!
//! Every request is whole pages, every chunk one page. Malloc goes through the document's phases:
//!
//! * phase 0 unmaps zombies (here: retired mappings) whose work is over;
//! * phase 1 takes the best fit of the own stream, then the best fit of others that is complete;
//! * phase 2 takes the smallest hole that holds the request, creates the shortfall at its
//!   beginning, moves free pages there (own stream first, then others, oldest first, behind waits),
//!   and merges the whole with a free region of the own stream in front of the hole.
//!
//! That region in front counts as the last of the own ones and is harvested in place: its pages are
//! where they should be. The document's walkthrough (cases B and D) needs the first, its order of
//! streams the second.

use crate::Bytes;
use crate::ids::{Mark, PoolAddr, StreamId};
use crate::pool::index::RegionKey;
use crate::pool::ops::Fill;
use crate::pool::plan::decision::{Climb, Decision};
use crate::pool::plan::fill::Filling;
use crate::pool::request::{Attempt, Relief, Rung, Step};
use crate::pool::view::View;

impl View<'_> {
    pub(in crate::pool) fn climb_vpmm(self, attempt: &mut Attempt) -> Climb {
        let stream = attempt.request.stream;
        let len = self.rounded(attempt.request.size, self.config.page);
        let fit = || match self.fit(stream, len) {
            Some(region) => Climb::Stay(Decision::Carve { region, len }),
            None => Climb::Up,
        };
        let pending = || self.streams.any_pending();
        let poll = Climb::ThenUp(Decision::Return(Step::Poll));
        match attempt.rung {
            Rung::Retired if !self.retired.is_empty() && pending() => poll,
            Rung::Unmap => match self.unmap_retired(None) {
                Some(plan) => Climb::ThenUp(Decision::Return(Step::Perform(plan))),
                None => Climb::Up,
            },
            Rung::Own => match fit() {
                Climb::Up => Climb::ThenUp(Decision::Miss),
                found => found,
            },
            Rung::Learn if self.streams.are_several() && pending() => poll,
            // Where blocks wait for streams on which nothing is freed, no other request records an event.
            Rung::LearnAgain => {
                let marks: Vec<Mark> = self.unrecorded_waits().collect();
                match marks.is_empty() {
                    true => Climb::Up,
                    false => Climb::ThenUp(Decision::Return(Step::Record(marks))),
                }
            }
            Rung::Idle | Rung::Merged => match fit() {
                Climb::Up => self
                    .smallest_complete(stream, len)
                    .map_or(Climb::Up, |idle| Climb::ThenUp(Decision::TakeOver { idle, len })),
                found => found,
            },
            Rung::Build => {
                attempt.note_plan();
                // The memory that the plan makes is found as the stream's own.
                attempt.rung = Rung::Own;
                Climb::Stay(Decision::Return(self.harvest(len, attempt)))
            }
            Rung::Retired
            | Rung::Early
            | Rung::Learn
            | Rung::Gather
            | Rung::Return
            | Rung::Watch => Climb::Up,
        }
    }

    /// The smallest region of another stream that fits and whose work is all over.
    fn smallest_complete(self, stream: StreamId, len: Bytes) -> Option<RegionKey> {
        let is_complete =
            |key: &RegionKey| self.free_of(*key).marks().all(|mark| self.streams.is_over(mark));
        self.foreign(stream)
            .into_iter()
            .filter(|&key| self.regions.get(key).len >= len)
            .filter(is_complete)
            .min_by_key(|&key| (self.regions.get(key).len, self.regions.get(key).at))
    }

    /// True if work on `stream` can be ordered behind all work on another stream's region: neither of
    /// the two captures, or the work is over.
    fn may_harvest(self, key: RegionKey, stream: StreamId) -> bool {
        let waits = !self.streams.get(stream).held;
        let may_wait = |mark| waits && !self.streams.is_out_of_reach(mark);
        let mut marks = self.free_of(key).marks();
        marks.all(|mark| self.streams.is_ordered(stream, mark) || may_wait(mark))
    }

    /// True if a page of a region is pinned: none of the region is harvested then.
    fn holds_pinned(self, key: RegionKey) -> bool {
        let region = self.regions.get(key);
        self.chunks.has_pinned_within(region.at, region.len)
    }

    /// Phase 2.
    fn harvest(self, len: Bytes, attempt: &mut Attempt) -> Step {
        let stream = attempt.request.stream;
        let page = self.config.page;
        let mut foreign = self.foreign(stream);
        foreign.retain(|&key| self.may_harvest(key, stream) && !self.holds_pinned(key));
        let mut own: Vec<RegionKey> =
            self.streams.get(stream).free.iter().map(|(_, _, key)| key).collect();
        own.retain(|&key| !self.holds_pinned(key));
        own.sort_by_key(|&key| self.free_of(key).born);
        let total: Bytes = own.iter().chain(&foreign).map(|&key| self.regions.get(key).len).sum();
        let shortfall = len.saturating_sub(total);
        if shortfall > self.growth_allowed(attempt) || len > PoolAddr::SPAN_LIMIT {
            // Blocks that other streams used wait for those: no other request records an event
            // there.
            if attempt.relief < Relief::StreamsOrdered
                && self.waiting.iter().next().is_some()
                && let Some(plan) = self.order_others(stream, len)
            {
                attempt.relief = Relief::StreamsOrdered;
                return Step::Perform(plan);
            }
            return Step::Short(self.shortage(attempt));
        }
        let Some(hole) = self.holes.smallest_of(len) else {
            return Step::Perform(self.reserve_plan(len));
        };
        let front = self.regions.prev(hole.region).filter(|prev| own.contains(prev));
        let mut fills: Vec<Fill> = (0..shortfall.whole(page))
            .map(|n| Fill::New { chunk: self.chunks.upcoming(n as usize), len: page })
            .collect();
        let mut remaining = len - shortfall;
        let mut waits: Vec<Mark> = Vec::new();
        own.retain(|&key| Some(key) != front);
        for key in own.into_iter().chain(front).chain(foreign) {
            let region = self.regions.get(key);
            let taken = remaining.min(region.len);
            remaining -= taken;
            if Some(key) == front {
                continue;
            }
            for mapped in self.chunks.within(region.at, taken) {
                fills.push(Fill::Move { chunk: mapped.chunk, len: mapped.len, from: key });
            }
            let free = self.free_of(key);
            let mark = Mark { stream: free.owner, epoch: free.epoch_of(Bytes::ZERO, taken) };
            if !taken.is_zero() && !self.streams.is_ordered(stream, mark) {
                waits.push(mark);
            }
        }
        // One wait a stream: a later event covers the earlier ones.
        waits.sort_by(|a, b| (a.stream, b.epoch).cmp(&(b.stream, a.epoch)));
        waits.dedup_by_key(|mark| mark.stream);
        let filling = Filling { at: hole.at, fills, stream, waits, arena: None };
        Step::Perform(self.fill_plan(filling).next())
    }
}
