//! The decision of malloc: a free block, an operation to perform first, or a shortage.
//!
//! A [`TorchAttempt`] climbs this ladder, and the caller performs the steps:
//!
//! 1. `Poll`: query which freed blocks are free of work.
//! 2. `Search`: the best fit of the stream. No driver call.
//! 3. `Collect`: release old unused segments, if garbage collection is on and the threshold passed.
//! 4. `Grow`: allocate a segment, or map more of an expandable one.
//! 5. `Available`: with a bound on splitting, release oversize blocks that make room; grow.
//! 6. `Wait` for all streams that freed blocks wait for, `Release` everything unused; grow.
//!
//! The end of the ladder is the [`Shortage`].

use super::block::SegmentId;
use super::block::{Class, Slot, State};
use super::config::fixed::{SMALL_LIMIT, SMALL_SEGMENT};
use super::pool::{TorchBlock, TorchPool};
use super::release::Victims;
use super::settle::{Target, TorchOp, TorchPlan};
use super::stats::ByClass;
use vramp_core::Bytes;
use vramp_core::{PoolAddr, SpanId, StreamId};
use vramp_core::{Request, Shortage};

/// A request on its way up the ladder.
#[derive(Clone, Debug)]
pub struct TorchAttempt {
    request: Request,
    rung: Rung,
    /// Blocks that the present rung releases.
    victims: Victims,
    /// True once something had to be performed.
    planned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rung {
    Poll,
    Search,
    Collect,
    Grow(Try),
    Available { enough: bool },
    Wait,
    Release { chosen: bool },
    Short,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Try {
    First,
    Second,
    Last,
}

/// What the caller does next.
#[derive(Debug)]
#[must_use = "the attempt goes on only when the caller performs the step"]
pub enum TorchStep {
    /// The block is allocated. The attempt is over.
    Placed(TorchBlock),
    /// Query the events of [`TorchPool::pending`], call [`TorchPool::reached`], then place again.
    Poll,
    /// Wait for [`TorchPool::waited_for`], call [`TorchPool::reached`], then place again.
    Wait,
    /// Perform and settle the plan, then place again. If the card has no memory for it, call
    /// [`TorchAttempt::full`] instead of settling.
    Perform(TorchPlan),
    /// There is no memory. The attempt is over.
    Short(Shortage),
}

impl TorchAttempt {
    /// Returns a request at the first rung.
    pub fn new(request: Request) -> TorchAttempt {
        TorchAttempt { request, rung: Rung::Poll, victims: Victims::new(), planned: false }
    }

    /// Records that the card has no memory for the last plan: the attempt goes on at the next rung.
    pub fn full(&mut self, pool: &TorchPool) {
        self.rung = match self.rung {
            Rung::Grow(Try::First) => {
                let stream = self.request.stream;
                let (victims, enough) = match pool.fit(self.request.size) {
                    Some((class, rounded, _)) => pool.oversize_victims(class, stream, rounded),
                    None => (Victims::new(), false),
                };
                self.victims = victims;
                Rung::Available { enough }
            }
            Rung::Grow(Try::Second) => Rung::Wait,
            _ => Rung::Short,
        };
    }
}

impl TorchPool {
    /// Advances the attempt to the next step that needs the caller.
    ///
    /// # Panics
    /// If the stream is unknown to the pool.
    pub fn place(&mut self, attempt: &mut TorchAttempt) -> TorchStep {
        let stream = attempt.request.stream;
        assert!(self.streams.knows(stream), "{stream} is unknown to the pool");
        let Some((class, rounded, segment_len)) = self.fit(attempt.request.size) else {
            return self.short(attempt);
        };
        loop {
            match attempt.rung {
                Rung::Poll => {
                    self.performed.clear();
                    self.fresh = None;
                    attempt.rung = Rung::Search;
                    if !self.pending().is_empty() {
                        return TorchStep::Poll;
                    }
                }
                Rung::Search => {
                    if let Some(slot) = self.best_fit(class, stream, rounded) {
                        self.unlist(slot);
                        return TorchStep::Placed(self.allocate(slot, rounded, attempt));
                    }
                    attempt.planned = true;
                    attempt.victims = self.garbage();
                    attempt.rung = Rung::Collect;
                }
                Rung::Collect => match self.next_victim(&mut attempt.victims) {
                    Some(plan) => return TorchStep::Perform(plan),
                    None => attempt.rung = Rung::Grow(Try::First),
                },
                Rung::Grow(_) => match self.grow(class, stream, rounded, segment_len) {
                    Grown::Block(slot) => {
                        self.unlist(slot);
                        return TorchStep::Placed(self.allocate(slot, rounded, attempt));
                    }
                    Grown::Perform(plan) => return TorchStep::Perform(plan),
                    Grown::Full => attempt.full(self),
                },
                Rung::Available { enough } => match self.next_victim(&mut attempt.victims) {
                    Some(plan) => return TorchStep::Perform(plan),
                    None if enough => attempt.rung = Rung::Grow(Try::Second),
                    None => attempt.rung = Rung::Wait,
                },
                Rung::Wait => {
                    attempt.rung = Rung::Release { chosen: false };
                    // PyTorch counts it also if there is nothing to wait for.
                    self.stats.num_sync_all_streams += 1;
                    if !self.waited_for().is_empty() {
                        return TorchStep::Wait;
                    }
                }
                Rung::Release { chosen: false } => {
                    attempt.victims = self.all_unused();
                    attempt.rung = Rung::Release { chosen: true };
                }
                Rung::Release { chosen: true } => {
                    // A range of addresses goes with the last of its memory.
                    let plan = self.empty_range();
                    match plan.or_else(|| self.next_victim(&mut attempt.victims)) {
                        Some(plan) => return TorchStep::Perform(plan),
                        None => {
                            self.stats.num_alloc_retries += 1;
                            attempt.rung = Rung::Grow(Try::Last);
                        }
                    }
                }
                Rung::Short => return self.short(attempt),
            }
        }
    }

    /// Returns the class of a request, its rounded size, and the size of a new segment for it.
    fn fit(&self, size: Bytes) -> Option<(Class, u64, u64)> {
        let rounded = self.config.round(size)?.count();
        let class = if rounded <= SMALL_LIMIT { Class::Small } else { Class::Large };
        let segment_len = self.config.segment_size(rounded)?;
        (segment_len <= PoolAddr::SPAN_LIMIT.count()).then_some((class, rounded, segment_len))
    }

    fn short(&mut self, attempt: &TorchAttempt) -> TorchStep {
        self.stats.num_ooms += 1;
        let used = self.stats.allocated_bytes.all.current;
        let (free, largest) = self.free_bytes();
        TorchStep::Short(Shortage {
            requested: attempt.request.size,
            reserved: Bytes::new(self.reserved),
            used: Bytes::new(used),
            free: Bytes::new(free),
            largest: Bytes::new(largest),
            waiting: Bytes::new(self.stats.active_bytes.all.current - used),
            limit: self.limit.map(Bytes::new),
            block_for: Some(attempt.request.stream),
        })
    }

    /// Allocates an unlisted free block, and makes its rest a free block of its own.
    fn allocate(&mut self, slot: Slot, rounded: u64, attempt: &TorchAttempt) -> TorchBlock {
        let block = self.blocks.get(slot);
        let (class, was_split, len) = (block.class, block.is_split(), block.len);
        let counted = !self.is_expandable(block);
        let split = self.splits(class, len, rounded);
        let taken = if split {
            let taken = self.blocks.split_front(slot, rounded);
            self.list(slot);
            taken
        } else {
            slot
        };
        let block = self.blocks.get_mut(taken);
        block.state = State::Used;
        block.requested = attempt.request.size.count();
        let taken_len = block.len;
        if counted {
            let (count, bytes) =
                (&mut self.stats.inactive_split, &mut self.stats.inactive_split_bytes);
            match (was_split, split) {
                (true, true) => bytes.decrease(class, taken_len),
                (true, false) => {
                    count.decrease(class, 1);
                    bytes.decrease(class, taken_len);
                }
                (false, true) => {
                    count.increase(class, 1);
                    bytes.increase(class, len - taken_len);
                }
                (false, false) => {}
            }
        }
        self.count_allocated(class, taken_len, attempt.request.size);
        if attempt.planned {
            self.counters.misses += 1;
        } else {
            self.counters.hits += 1;
        }
        self.block(self.blocks.id(taken)).expect("the block was made a moment ago")
    }

    pub(crate) fn count_allocated(&mut self, class: Class, len: u64, requested: Bytes) {
        self.stats.allocation.increase(class, 1);
        self.stats.active.increase(class, 1);
        self.stats.allocated_bytes.increase(class, len);
        self.stats.active_bytes.increase(class, len);
        self.stats.requested_bytes.increase(class, requested.count());
        if len >= self.config.oversize() {
            self.stats.oversize_allocations.increase(1);
        }
        let counters = &mut self.counters;
        counters.live += requested;
        counters.live_peak = counters.live_peak.max(counters.live);
        counters.placed += 1;
    }

    // --- growing ---

    fn grow(&mut self, class: Class, stream: StreamId, rounded: u64, segment_len: u64) -> Grown {
        let fresh = self.fresh.take();
        // As in PyTorch: checked for a whole segment, before the handles of an expandable one are
        // counted. `expand` counts them.
        let under_limit = |limit| self.reserved.saturating_add(segment_len) <= limit;
        if fresh.is_none() && !self.limit.is_none_or(under_limit) {
            return Grown::Full;
        }
        if self.config.expandable_segments {
            return self.expand(class, stream, rounded, fresh);
        }
        if let Some(slot) = fresh {
            return Grown::Block(slot);
        }
        let Some(start) = self.addresses.find(segment_len) else { return Grown::Full };
        let op = TorchOp::Allocate { segment: self.vacant_segment(), len: Bytes::new(segment_len) };
        let at = PoolAddr::new(SpanId::new(0), Bytes::new(start));
        Grown::Perform(TorchPlan { op, target: Target::New { class, stream, at } })
    }

    /// Plans one step until a free block of an expandable segment is large enough. `fresh` is the
    /// block that was mapped last.
    fn expand(&self, class: Class, stream: StreamId, rounded: u64, fresh: Option<Slot>) -> Grown {
        let handle = self.handle_size(class);
        let Some(found) = fresh.or_else(|| self.expandable_block(class, stream, rounded)) else {
            // As in PyTorch: addresses for all of the card and an eighth more.
            let len = (self.card + self.card / 8).next_multiple_of(handle);
            if rounded > len || len > PoolAddr::SPAN_LIMIT.count() {
                return Grown::Full;
            }
            let segment = self.vacant_segment();
            let at = PoolAddr::new(SpanId::new(segment.index() as u32), Bytes::ZERO);
            let op = TorchOp::Reserve { segment, len: Bytes::new(len) };
            return Grown::Perform(TorchPlan { op, target: Target::New { class, stream, at } });
        };
        let block = self.blocks.get(found);
        let (target, wanted) = match (block.state, block.next) {
            (State::Unmapped, _) => (found, rounded),
            (_, _) if block.len >= rounded => return Grown::Block(found),
            (_, Some(next)) => (next, rounded - block.len),
            (_, None) => return Grown::Full,
        };
        let hole = self.blocks.get(target);
        let segment = hole.segment;
        let len = hole.len.min(wanted).next_multiple_of(handle);
        // Unlike PyTorch, which ends up to one handle above the limit.
        if self.limit.is_some_and(|limit| self.reserved.saturating_add(len) > limit) {
            return Grown::Full;
        }
        let op = TorchOp::Map {
            segment,
            offset: Bytes::new(hole.at.since(self.segment(segment).at)),
            len: Bytes::new(len),
            handle: Bytes::new(handle),
        };
        Grown::Perform(TorchPlan { op, target: Target::Block(target) })
    }

    /// Returns the lowest free or unmapped block of the stream's expandable segments that begins
    /// enough free or unmapped bytes in a row.
    fn expandable_block(&self, class: Class, stream: StreamId, len: u64) -> Option<Slot> {
        let idle =
            |slot: Slot| matches!(self.blocks.get(slot).state, State::Free | State::Unmapped);
        let unmapped = self.lists(class).unmapped.range((stream, PoolAddr::default(), 0)..);
        for &(_, _, hole) in unmapped.take_while(|entry| entry.0 == stream) {
            let first = self.blocks.get(hole).prev.filter(|&prev| idle(prev)).unwrap_or(hole);
            let (mut room, mut next) = (0u64, Some(first));
            while let Some(slot) = next.filter(|&slot| room < len && idle(slot)) {
                let block = self.blocks.get(slot);
                room += block.len;
                next = block.next;
            }
            if room >= len {
                return Some(first);
            }
        }
        None
    }

    /// Returns the handle size of a class's expandable segments.
    pub(crate) fn handle_size(&self, class: Class) -> u64 {
        match class {
            Class::Small => SMALL_SEGMENT,
            Class::Large => self.config.large_segment_size.count(),
        }
    }

    fn vacant_segment(&self) -> SegmentId {
        let vacant = self.segments.iter().position(Option::is_none);
        let index = vacant.unwrap_or(self.segments.len());
        SegmentId::new(u32::try_from(index).expect("fewer than four billion segments"))
    }
}

enum Grown {
    /// A free block that is large enough.
    Block(Slot),
    Perform(TorchPlan),
    Full,
}
