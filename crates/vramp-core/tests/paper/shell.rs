//! What the crate `vramp` does with a plan, done on paper.

use vramp_core::{
    Attempt, Block, BlockId, Bytes, ChunkId, Leftovers, Op, Plan, Policy, Pool, Range, Request,
    Step, StreamId,
};

use super::{Failure, Paper};

/// More steps than any request may take.
const STEPS_MOST: usize = 10_000;

/// A pool and the device it lives on.
#[derive(Clone)]
pub struct Shell {
    pub pool: Pool,
    pub paper: Paper,
    /// Something could not be undone.
    pub quarantined: bool,
}

impl Shell {
    pub fn add_stream(&mut self) -> StreamId {
        self.paper.queues.add();
        self.pool.add_stream()
    }

    pub fn malloc(&mut self, size: Bytes, stream: StreamId) -> Option<Block> {
        self.climb(Attempt::new(Request { size, stream }))
    }

    /// A block made of what the pool has: no new chunk.
    pub fn malloc_without_growth(&mut self, size: Bytes, stream: StreamId) -> Option<Block> {
        let mut attempt = Attempt::new(Request { size, stream });
        while attempt.out_of_memory() {}
        self.climb(attempt)
    }

    fn climb(&mut self, mut attempt: Attempt) -> Option<Block> {
        for _ in 0..STEPS_MOST {
            match self.pool.place(&mut attempt) {
                Step::Placed(block) => return Some(block),
                Step::Poll => self.poll(),
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
    pub fn free(&mut self, id: BlockId, stream: StreamId) {
        self.pool.free(id, stream).expect("the block is held");
        if self.pool.config().policy == Policy::Vpmm {
            let mark = self.pool.now(stream);
            if self.paper.call(Op::Record(mark)).is_ok() {
                self.pool.recorded(mark);
            }
        }
    }

    pub fn poll(&mut self) {
        let pending: Vec<_> = self.pool.pending().collect();
        for last in pending {
            if let Some(mark) = self.paper.queues.reached(last) {
                self.pool.reached(mark);
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

    pub fn trim(&mut self, to: Bytes) {
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
