//! What the crate `vramp` does with a plan, done on paper.

use vramp_core::{
    AddedArena, ArenaId, Attempt, Block, Bytes, Census, ChunkId, Freed, Leftovers, Mark, Op, Plan,
    Policy, Pool, Range, Request, Slab, Step, StreamHeap, StreamId,
};

use super::{Failure, Paper};

/// More steps than any request may take.
const STEPS_MOST: usize = 10_000;

/// A block and the heap it is from, if it is from one.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    pub block: Block,
    pub heap: Option<StreamId>,
}

enum Served {
    Block(Block),
    Slab(Slab),
    Arena,
}

/// An arena and what is known of its use.
#[derive(Clone, Debug)]
pub struct HeldArena {
    pub id: ArenaId,
    pub capacity: Bytes,
    /// Up to where it was ever backed.
    pub upto: Bytes,
    /// The last work on it.
    pub last: Option<Mark>,
    /// From its start, what may not be lent.
    pub live: Bytes,
}

/// A pool and the device it lives on.
pub struct Shell {
    pub pool: Pool,
    /// By stream.
    pub heaps: Vec<StreamHeap>,
    pub paper: Paper,
    /// Something could not be undone.
    pub quarantined: bool,
    pub arenas: Vec<HeldArena>,
    /// How often pending events were queried.
    pub polls: usize,
}

impl Shell {
    pub fn add_stream(&mut self) -> StreamId {
        self.paper.queues.add();
        let id = self.pool.add_stream();
        self.heaps.push(StreamHeap::new(id));
        id
    }

    /// Ends a stream behind an event. Returns false if that could not be recorded.
    pub fn end_stream(&mut self, stream: StreamId) -> bool {
        self.heaps[stream.index()].shed(&mut self.pool);
        let mark = self.pool.now(stream);
        if self.paper.call(Op::Record(mark)).is_err() {
            return false;
        }
        self.pool.recorded(mark);
        self.pool.end_stream(stream);
        true
    }

    pub fn malloc(&mut self, size: Bytes, stream: StreamId) -> Option<Placed> {
        match self.pool.config().policy {
            Policy::Mixed(mixed) if size <= mixed.heap_limit => self.malloc_in_heap(size, stream),
            _ => match self.climb(Attempt::new(Request { size, stream }))? {
                Served::Block(block) => Some(Placed { block, heap: None }),
                _ => panic!("a block was requested"),
            },
        }
    }

    pub fn add_arena(&mut self, capacity: Bytes) {
        for _ in 0..2 {
            match self.pool.add_arena(capacity) {
                AddedArena::Added(id) => {
                    let (upto, live) = (Bytes::ZERO, Bytes::ZERO);
                    self.arenas.push(HeldArena { id, capacity, upto, last: None, live });
                    return;
                }
                AddedArena::ReserveFirst(plan) => {
                    if self.perform(plan).is_err() {
                        return;
                    }
                }
            }
        }
        panic!("addresses were reserved for {capacity} and are not there");
    }

    /// Backs an arena.
    pub fn back(&mut self, which: usize, upto: Bytes, stream: StreamId) -> bool {
        let arena = self.arenas[which].clone();
        // It cannot be lent meanwhile: it is in use.
        self.arenas[which].live = arena.capacity;
        let backed = self.climb(Attempt::back(arena.id, upto, stream)).is_some();
        self.arenas[which].live = arena.live;
        if backed {
            self.arenas[which].upto = arena.upto.max(upto);
        }
        backed
    }

    /// Orders `stream` behind all that may still touch an arena's memory, and uses it there.
    pub fn order_behind(&mut self, which: usize, stream: StreamId) -> bool {
        let arena = self.arenas[which].clone();
        let marks = self.pool.arena_inherited(arena.id).into_iter().chain(arena.last);
        for mark in marks {
            if mark.stream == stream || self.pool.is_over(mark) {
                continue;
            }
            if self.is_unrecorded(mark) {
                if self.paper.call(Op::Record(mark)).is_err() {
                    return false;
                }
                self.pool.recorded(mark);
            }
            self.paper.queues.wait_for_mark(stream, mark);
            self.pool.waits(stream, mark);
        }
        self.arenas[which].last = Some(self.pool.now(stream));
        true
    }

    /// True if an event can be recorded that is the first to cover the mark.
    fn is_unrecorded(&self, mark: Mark) -> bool {
        self.pool.now(mark.stream) == mark && self.pool.is_open(mark.stream)
    }

    /// Lets every arena lend whose work is over.
    pub fn lend(&mut self) {
        for which in 0..self.arenas.len() {
            let HeldArena { id, live, last, .. } = self.arenas[which];
            let mut marks = self.pool.arena_inherited(id);
            marks.extend(last.filter(|last| !marks.contains(last)));
            for &mark in &marks {
                if self.is_unrecorded(mark) && self.paper.call(Op::Record(mark)).is_ok() {
                    self.pool.recorded(mark);
                }
            }
            self.poll();
            if marks.iter().all(|&mark| self.pool.is_over(mark)) {
                let kept = [(Bytes::ZERO, live)];
                let _ = self.pool.lend(id, if live.is_zero() { &[] } else { &kept });
            }
        }
    }

    pub fn remove_arena(&mut self, which: usize) {
        let HeldArena { id, last, .. } = self.arenas.swap_remove(which);
        self.pool.remove_arena(id, last.as_slice());
    }

    fn malloc_in_heap(&mut self, size: Bytes, stream: StreamId) -> Option<Placed> {
        loop {
            let page = self.pool.config().page;
            let heap = &mut self.heaps[stream.index()];
            heap.promote(&mut self.pool);
            if let Some(block) = heap.take(size) {
                return Some(Placed { block, heap: Some(stream) });
            }
            let wanted = heap.wanted(size, page);
            let grows = !self.pool.shares_idle() || heap.is_to_grow_for(size);
            if !grows {
                return match self.climb(Attempt::new(Request { size, stream })) {
                    Some(Served::Block(block)) => Some(Placed { block, heap: None }),
                    Some(_) => panic!("a block was requested"),
                    None => {
                        let heap = &mut self.heaps[stream.index()];
                        heap.promote(&mut self.pool);
                        heap.take(size).map(|block| Placed { block, heap: Some(stream) })
                    }
                };
            }
            let least = size.max(Bytes::new(1)).checked_round_up(page).expect("small sizes fit");
            match self.climb(Attempt::slab(Request { size: least, stream }, wanted))? {
                Served::Slab(slab) => self.heaps[stream.index()].add(slab),
                _ => panic!("a slab was requested"),
            }
        }
    }

    /// A block made of what the pool has: no new chunk.
    pub fn malloc_without_growth(&mut self, size: Bytes, stream: StreamId) -> Option<Block> {
        let mut attempt = Attempt::new(Request { size, stream });
        while attempt.out_of_memory() {}
        match self.climb(attempt)? {
            Served::Block(block) => Some(block),
            _ => panic!("a block was requested"),
        }
    }

    pub fn gather(&mut self) {
        for heap in &mut self.heaps {
            heap.shed(&mut self.pool);
            heap.audit(&self.pool).expect("a heap is whole after it shed");
        }
    }

    fn climb(&mut self, mut attempt: Attempt) -> Option<Served> {
        for _ in 0..STEPS_MOST {
            match self.pool.place(&mut attempt) {
                Step::Placed(block) => return Some(Served::Block(block)),
                Step::Slab(slab) => return Some(Served::Slab(slab)),
                Step::Backed => return Some(Served::Arena),
                Step::Gather => self.gather(),
                Step::Lend(_) => self.lend(),
                Step::Poll => self.poll(),
                Step::Record(marks) => self.ask(&marks),
                Step::Perform(plan) => {
                    let optional = plan.is_optional();
                    match self.perform(plan) {
                        Ok(()) => {}
                        Err((Failure::Full, Op::Create { .. } | Op::Reserve { .. })) => {
                            if !attempt.out_of_memory() {
                                return None;
                            }
                        }
                        Err(_) if optional => {}
                        Err(_) => return None,
                    }
                }
                Step::Short(_) => return None,
            }
        }
        panic!("{attempt:?} does not end");
    }

    /// VPMM closes a stream's epoch at every free.
    pub fn free(&mut self, Placed { block, heap }: Placed, stream: StreamId) {
        if let Some(home) = heap {
            let heap = &mut self.heaps[home.index()];
            let freed = match home == stream {
                true => match heap.free_in_order(block.id).expect("the block is held") {
                    Freed::Noted => heap.free(block.id, stream, &mut self.pool),
                    freed => Ok(freed),
                },
                false => heap.free(block.id, stream, &mut self.pool),
            };
            if let Freed::Surplus(slab) = freed.expect("the block is held") {
                self.pool.take_back(slab, home);
            }
            return;
        }
        self.pool.free(block.id, stream).expect("the block is held");
        if self.pool.config().policy == Policy::Vpmm {
            let mut marks = self.pool.unrecorded_waits();
            if self.pool.is_open(stream) {
                marks.retain(|mark| mark.stream != stream);
                marks.push(self.pool.now(stream));
            }
            for mark in marks {
                if self.paper.call(Op::Record(mark)).is_ok() {
                    self.pool.recorded(mark);
                }
            }
        }
    }

    pub fn record_use(&mut self, Placed { block, heap }: Placed, stream: StreamId) {
        let noted = match heap {
            Some(home) => self.heaps[home.index()].note_use(block.id, self.pool.now(stream)),
            None => self.pool.record_use(block.id, stream),
        };
        noted.expect("the block is held");
    }

    pub fn census(&self) -> Census {
        let mut census = self.pool.census();
        self.heaps.iter().for_each(|heap| heap.count_into(&mut census));
        census
    }

    pub fn poll(&mut self) {
        let pending: Vec<_> = self.pool.pending().collect();
        self.polls += usize::from(!pending.is_empty());
        for last in pending {
            if let Some(mark) = self.paper.queues.reached(last) {
                self.pool.reached(mark);
            }
        }
    }

    fn ask(&mut self, marks: &[Mark]) {
        for &mark in marks {
            if self.paper.call(Op::Record(mark)).is_err() {
                return;
            }
            self.pool.recorded(mark);
        }
        self.poll();
    }

    /// Moves what is free towards a block; the pool holds as much, and users hold as much.
    pub fn assemble(&mut self, size: Bytes, stream: StreamId) {
        let before = self.census();
        while let Some(plan) = self.pool.assemble(Request { size, stream }) {
            let fills = plan.fills();
            if self.perform(plan).is_err() {
                return;
            }
            let now = self.census();
            assert_eq!((now.reserved, now.used), (before.reserved, before.used));
            assert!(now.free >= before.free, "what arenas lent may be free now: {now:?}");
            if fills {
                return;
            }
        }
    }

    pub fn prefill(&mut self, len: Bytes, stream: StreamId) {
        for _ in 0..2 {
            let Some(plan) = self.pool.prefill(len, stream) else { return };
            let before = self.pool.counters().reserved;
            if self.perform(plan).is_err() || self.pool.counters().reserved > before {
                return;
            }
        }
    }

    pub fn unmap(&mut self) {
        if let Some(plan) = self.pool.unmap() {
            // A failure is the pool's to remember.
            let _ = self.perform(plan);
        }
    }

    /// Records what freed memory waits for, until nothing is left to record. False if it failed.
    pub fn record_freed(&mut self) -> bool {
        loop {
            self.gather();
            let marks = self.pool.unrecorded();
            for &mark in &marks {
                if self.paper.call(Op::Record(mark)).is_err() {
                    return false;
                }
                self.pool.recorded(mark);
            }
            self.poll();
            if marks.is_empty() {
                return true;
            }
        }
    }

    /// Tries again what failed: first unmaps, then releases.
    pub fn retry_quarantined(&mut self) {
        for plans in [Pool::unmap_quarantined, Pool::release_quarantined] {
            for plan in plans(&self.pool) {
                let _ = self.perform(plan);
            }
        }
    }

    pub fn trim(&mut self, to: Bytes) {
        self.retry_quarantined();
        if !self.record_freed() {
            return;
        }
        while let Some(plan) = self.pool.trim(to) {
            if self.perform(plan).is_err() {
                return;
            }
        }
    }

    fn perform(&mut self, mut plan: Plan) -> Result<(), (Failure, Op)> {
        for index in 0..plan.ops.len() {
            let op = plan.ops[index];
            match self.paper.call(op) {
                Ok(Some(got)) => plan.got_addresses(got),
                Ok(None) => {}
                Err(failure) => {
                    let leftovers = self.undo(&plan, index);
                    self.quarantined |= !leftovers.mapped.is_empty()
                        || !leftovers.chunks.is_empty()
                        || plan.is_optional();
                    self.pool.abandon(plan, leftovers);
                    return Err((failure, op));
                }
            }
        }
        self.pool.settle(plan);
        Ok(())
    }

    fn undo(&mut self, plan: &Plan, failed: usize) -> Leftovers {
        if plan.is_optional() {
            return Leftovers { performed: failed, ..Leftovers::default() };
        }
        let mut left = Leftovers::default();
        let mut stuck: Vec<ChunkId> = Vec::new();
        for &op in plan.ops[..failed].iter().rev() {
            let undone = op.inverse();
            match op {
                Op::Record(mark) => left.recorded.push(mark),
                Op::Map { chunk, at, len } if self.fails(undone) => {
                    left.mapped.push(Range { at, len });
                    stuck.push(chunk);
                }
                Op::Create { chunk, len } if stuck.contains(&chunk) || self.fails(undone) => {
                    left.chunks.push((chunk, len));
                }
                _ => {}
            }
        }
        left
    }

    fn fails(&mut self, undo: Option<Op>) -> bool {
        undo.is_some_and(|undo| self.paper.call(undo).is_err())
    }
}
