//! Requests: applies the planner's decisions one after the other.

use super::Pool;
use crate::Bytes;
use crate::ids::StreamId;
use crate::pool::config::BLOCK_ALIGN;
use crate::pool::index::RegionKey;
use crate::pool::ops::Plan;
use crate::pool::plan::decision::Decision;
use crate::pool::request::{Attempt, Relief, Request, Rung, Shortage, Step, Want};

/// Requests for which events are queried after the pool had to move chunks or to exceed its slack.
const WATCHED: u32 = 1024;

impl Pool {
    /// Goes on with a request, in the order of the ladder's rungs.
    ///
    /// A hit makes no driver call and no heap allocation.
    ///
    /// # Panics
    /// If the stream is unknown.
    pub fn place(&mut self, attempt: &mut Attempt) -> Step {
        let stream = attempt.request.stream;
        assert!(self.streams.contains(stream), "{stream} is unknown to the pool");
        self.note_user(stream);
        loop {
            if attempt.rung > Rung::Own {
                // What the stream just took over for the request stays in one piece.
                if attempt.relief < Relief::StreamsOrdered {
                    self.release_overdue();
                }
                self.promote_waiting();
                self.refresh_free_chunks();
            }
            match self.view().decide(attempt) {
                Decision::Carve { region, len } => return self.carve_for(attempt, region, len),
                Decision::TakeOver { idle, len } => {
                    let region = self.take_over(idle, stream);
                    return self.carve_for(attempt, region, len);
                }
                Decision::Miss => self.note_own_miss(attempt),
                Decision::Join { region, len } => {
                    self.unindex(region);
                    let region = self.absorb_idle(region, stream);
                    let region = self.link_free(region);
                    return self.carve_for(attempt, region, len);
                }
                Decision::EndLending { arena, part } => self.end_lending(arena, part, stream),
                Decision::CutGap { gap, offset } => {
                    self.regions.split(gap, offset);
                }
                Decision::Return(step) => {
                    self.note_pressure(&step, attempt);
                    return step;
                }
            }
        }
    }

    /// Where several streams share a pool that had to move chunks, to grow beyond its slack, or to grow while
    /// freed memory waits for work, their events are recorded and queried before memory is chosen, for so
    /// many requests. Events that are recorded only where nothing is free come too late for the request that
    /// records them, and the pool would grow at each.
    fn note_pressure(&mut self, step: &Step, attempt: &Attempt) {
        let Step::Perform(plan) = step else { return };
        let late = plan.fills() && !self.waiting_bytes.is_zero();
        if self.shares_idle() && !attempt.robbed && (plan.moves() || attempt.over_slack || late) {
            self.watched = WATCHED;
        }
    }

    fn carve_for(&mut self, attempt: &Attempt, region: RegionKey, len: Bytes) -> Step {
        self.watched = self.watched.saturating_sub(1);
        let len = attempt.want.carved(len, self.regions.get(region).len);
        match attempt.want {
            Want::Slab { .. } => Step::Slab(self.carve_slab(region, len, attempt.request)),
            Want::Block | Want::Arena { .. } => {
                Step::Placed(self.carve_block(region, len, attempt.request, attempt.planned()))
            }
        }
    }

    /// Returns why a request cannot be served, as the pool stands now. O(free regions that
    /// changed since the last request, streams, pinned chunks).
    pub fn shortage(&mut self, attempt: &Attempt) -> Shortage {
        self.refresh_free_chunks();
        self.view().shortage(attempt)
    }

    /// Returns the next plan towards a free region in which `request` fits, made of the free memory
    /// that its stream may use by now. Perform and settle it, then call again unless it
    /// [fills](Plan::fills): that moved all there is. `None` if nothing is left to move, or the
    /// block fits. O(free chunks).
    ///
    /// # Panics
    /// If the stream is unknown.
    pub fn assemble(&mut self, request: Request) -> Option<Plan> {
        let stream = request.stream;
        assert!(self.streams.contains(stream), "{stream} is unknown to the pool");
        self.note_user(stream);
        self.refresh_free_chunks();
        self.view().assemble(request)
    }

    /// Returns a plan that adds `len` bytes of new memory, free for `stream`, ahead of demand.
    /// `None` if the limit forbids it, or if no span is that large. A plan to reserve addresses may
    /// come first: call again after it.
    pub fn prefill(&self, len: Bytes, stream: StreamId) -> Option<Plan> {
        self.view().prefill(len, stream)
    }

    /// Returns a plan that unmaps retired mappings whose work is over, or `None` if there are none.
    pub fn unmap(&self) -> Option<Plan> {
        self.view().unmap_retired(None)
    }

    /// Returns a plan that releases free chunks whose work is over, so that the pool has `to` bytes
    /// or a little more: the longest first that leave that much, or else the shortest one. Call until
    /// `None`. O(log n) for each chunk.
    pub fn trim(&mut self, to: Bytes) -> Option<Plan> {
        let excess = self.chunks.bytes().saturating_sub(to);
        if excess.is_zero() {
            return None;
        }
        self.promote_waiting();
        self.release_overdue();
        self.refresh_free_chunks();
        self.view().release_excess(excess)
    }

    /// Lists the wholly free chunks as they are now.
    fn refresh_free_chunks(&mut self) {
        if !self.free_chunks.is_fresh() {
            let looked_at = self.free_chunks.refresh(&self.regions, &self.chunks);
            self.looked_at.add(looked_at);
        }
    }

    /// Notes that a request found no memory of its own: whether other streams took what its stream had
    /// freed.
    fn note_own_miss(&mut self, attempt: &mut Attempt) {
        let Request { size, stream } = attempt.request;
        let is_first = !std::mem::replace(&mut attempt.missed, true);
        if !is_first || !self.shares_idle() {
            return;
        }
        let len = self.view().rounded(size, BLOCK_ALIGN);
        let had = self.streams.get(stream).last_freed;
        let is_robbed = len <= had && had <= len.saturating_add(len);
        attempt.robbed = self.streams.note_robbed(stream, is_robbed);
    }
}
