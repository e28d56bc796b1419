//! Requests: applies the planner's decisions one after the other.

use super::Pool;
use crate::Bytes;
use crate::ids::StreamId;
use crate::pool::index::RegionKey;
use crate::pool::ops::Plan;
use crate::pool::plan::decision::Decision;
use crate::pool::request::{Attempt, Request, Shortage, Step, Want};

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
        loop {
            match self.view().decide(attempt) {
                Decision::Carve { region, len } => return self.carve_for(attempt, region, len),
                Decision::TakeOver { idle, len } => {
                    let region = self.take_over(idle, stream);
                    return self.carve_for(attempt, region, len);
                }
                Decision::Promote => self.promote_waiting(),
                Decision::Adopt => {
                    self.promote_waiting();
                    self.adopt_idle(stream);
                }
                Decision::EndLending { arena, part } => self.end_lending(arena, part, stream),
                Decision::CutGap { gap, offset } => {
                    self.regions.split(gap, offset);
                }
                Decision::Return(step) => return step,
            }
        }
    }

    fn carve_for(&mut self, attempt: &Attempt, region: RegionKey, len: Bytes) -> Step {
        let len = attempt.want.carved(len, self.regions.get(region).len);
        match attempt.want {
            Want::Slab { .. } => Step::Slab(self.carve_slab(region, len, attempt.request)),
            Want::Block | Want::Arena { .. } => {
                Step::Placed(self.carve_block(region, len, attempt.request, attempt.planned()))
            }
        }
    }

    /// Returns why a request cannot be served, as the pool stands now. O(n).
    pub fn shortage(&self, attempt: &Attempt) -> Shortage {
        self.view().shortage(attempt)
    }

    /// Returns the next plan towards a free region in which `request` fits, made of the free memory
    /// that its stream may use by now. Perform and settle it, then call again unless it
    /// [fills](Plan::fills): that moved all there is. `None` if nothing is left to move, or the
    /// block fits. O(free chunks).
    ///
    /// # Panics
    /// If the stream is unknown.
    pub fn assemble(&self, request: Request) -> Option<Plan> {
        let stream = request.stream;
        assert!(self.streams.contains(stream), "{stream} is unknown to the pool");
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

    /// Returns a plan that releases one free chunk whose work is over, where the pool has more than
    /// `to`: the largest without which it still has `to`, or else the smallest. Call until `None`.
    pub fn trim(&mut self, to: Bytes) -> Option<Plan> {
        let excess = self.chunks.bytes().saturating_sub(to);
        if excess.is_zero() {
            return None;
        }
        self.promote_waiting();
        let chunk = match self.view().largest_idle_chunk(excess) {
            Some(chunk) => chunk,
            // Idle memory of several streams may meet in one chunk.
            None => {
                let heir = self.streams.ids().next()?;
                self.adopt_idle(heir);
                let largest = self.view().largest_idle_chunk(excess);
                largest.or_else(|| self.view().smallest_idle_chunk())?
            }
        };
        Some(self.view().release_plan(chunk))
    }
}
