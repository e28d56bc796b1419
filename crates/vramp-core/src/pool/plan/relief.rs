//! What is tried before the pool grows beyond its slack, and before a request fails.
//!
//! Free memory moved together ahead of the block that it is for.
//!
//! While memory for a request is freed piece by piece, what is free by now is moved to where the
//! block will lie. Once the last piece is free, only that one is left to move. Nothing is reserved
//! for the request: what was moved is free like all the rest, and if the block is never requested,
//! only the driver calls are lost.
//!
//! Deliberately absent: growth, and waits.

use crate::Bytes;
use crate::ids::ChunkId;
use crate::pool::config::{BLOCK_ALIGN, Policy};
use crate::pool::index::FreeIndex;
use crate::pool::ops::Plan;
use crate::pool::plan::build::Build;
use crate::pool::request::{Attempt, Relief, Request, Rung, Shortage, Step, Want};
use crate::pool::view::View;

impl View<'_> {
    /// The shell's next step for a build; `then` is the rung to go on from once it is performed.
    /// Before the pool grows beyond its slack, idle arenas lend. Other streams' memory is waited for only
    /// where the pool cannot grow: how long their work takes is not known.
    pub(in crate::pool) fn step_for(self, build: Build, attempt: &mut Attempt, then: Rung) -> Step {
        attempt.over_slack =
            matches!(&build, Build::Fill { over_slack, .. } if !over_slack.is_zero());
        let (plan, needed) = match build {
            Build::ClearFirst(plan) => return Step::Perform(plan),
            Build::Fill { plan, over_slack } => (Some(plan), over_slack),
            Build::Short { missing } => (None, missing),
        };
        if !needed.is_zero()
            && let Some(step) = self.relieve(needed, plan.is_some(), attempt, then)
        {
            return step;
        }
        match plan {
            Some(plan) => {
                attempt.rung = then;
                attempt.recut = None;
                Step::Perform(plan)
            }
            None => match self.recut(attempt) {
                Some((chunk, plan)) => {
                    attempt.recut = Some(chunk);
                    attempt.may_grow_again();
                    Step::Perform(plan)
                }
                None => Step::Short(self.shortage(attempt)),
            },
        }
    }

    /// The step that may spare the pool `needed` bytes of growth, or give it what it cannot grow by.
    fn relieve(
        self,
        needed: Bytes,
        can_grow: bool,
        attempt: &mut Attempt,
        then: Rung,
    ) -> Option<Step> {
        if attempt.relief == Relief::Untried {
            attempt.relief = Relief::ArenasLent;
            if !self.arenas.is_empty() && !attempt.spares_arenas {
                return Some(Step::Lend(needed));
            }
        }
        if attempt.relief < Relief::StreamsOrdered
            && !can_grow
            && let Some(plan) = self.order_others(attempt.request.stream, needed)
        {
            attempt.relief = Relief::StreamsOrdered;
            attempt.rung = then;
            return Some(Step::Perform(plan));
        }
        None
    }

    /// A plan that releases the smallest idle chunk, so that others can be made of its memory: free
    /// chunks may fit no gap of an arena.
    fn recut(self, attempt: &Attempt) -> Option<(ChunkId, Plan)> {
        let Want::Arena { .. } = attempt.want else { return None };
        // One that is still there could not be released: it would not be the next time.
        self.release_shortest().filter(|&(chunk, _)| attempt.recut != Some(chunk))
    }

    /// Why the request cannot be served, as the pool stands now. O(streams), and O(log n) for each
    /// pinned chunk.
    pub(in crate::pool) fn shortage(self, attempt: &Attempt) -> Shortage {
        let Request { size, stream } = attempt.request;
        // For the free memory and for the longest region of it.
        self.looked_at.add(2 * self.streams.len());
        let exceeds = |limit: &Bytes| *limit < self.charged().saturating_add(size);
        Shortage {
            requested: size,
            reserved: self.chunks.bytes(),
            used: self.used,
            free: self.free_bytes(),
            largest: self.movable_bytes(stream).max(self.longest_free()),
            waiting: self.waiting_bytes,
            limit: self.config.limit.filter(exceeds),
            block_for: (!matches!(attempt.want, Want::Arena { .. })).then_some(stream),
        }
    }

    /// Bytes of free memory that no arena lends. O(streams).
    pub(in crate::pool) fn free_bytes(self) -> Bytes {
        self.streams.free_indexes().map(FreeIndex::bytes).sum()
    }

    /// Length of the longest free region, lent ones included. O(streams).
    pub(in crate::pool) fn longest_free(self) -> Bytes {
        let free = self.streams.free_indexes().filter_map(FreeIndex::longest);
        free.chain(self.arenas.longest_lent()).max().unwrap_or_default()
    }
}

impl View<'_> {
    /// The next plan towards a free region in which `request` fits. See
    /// [`Pool::assemble`](crate::Pool::assemble).
    pub(in crate::pool) fn assemble(self, request: Request) -> Option<Plan> {
        let Request { size, stream } = request;
        let Policy::Mixed(mixed) = self.config.policy else { return None };
        let len = size.checked_round_up(BLOCK_ALIGN)?;
        if self.fit(stream, len).is_some() {
            return None;
        }
        match self.build_of_free(len, stream, &mixed)? {
            Build::ClearFirst(plan) | Build::Fill { plan, .. } => Some(plan),
            Build::Short { .. } => None,
        }
    }
}
