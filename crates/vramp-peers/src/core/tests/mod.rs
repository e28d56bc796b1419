//! The caching allocator without a device: its rules one by one, then random programs.

mod random;
mod rules;

use super::*;
use vramp_core::Request;
use vramp_core::{BlockId, Bytes, Shortage, StreamId};

const MIB: u64 = 1 << 20;

/// A pool on a card that is only a number of bytes.
struct Rig {
    pool: TorchPool,
    card: u64,
    taken: u64,
    /// Operations until one fails.
    fails_in: Option<u32>,
}

impl Rig {
    fn new(settings: &str, card: Bytes, limit: Option<Bytes>) -> Rig {
        let config = TorchConfig::parse(settings).unwrap();
        let mut pool = TorchPool::new(config, card, limit);
        pool.add_stream();
        Rig { pool, card: card.count(), taken: 0, fails_in: None }
    }

    fn plain() -> Rig {
        Rig::new("", Bytes::gib(80), None)
    }

    fn expandable() -> Rig {
        Rig::new("expandable_segments:True", Bytes::gib(80), None)
    }

    fn stream(number: u32) -> StreamId {
        StreamId::new(number)
    }

    fn malloc(&mut self, size: u64) -> TorchBlock {
        self.try_malloc(size, 0).expect("there is memory")
    }

    fn try_malloc(&mut self, size: u64, stream: u32) -> Result<TorchBlock, Shortage> {
        let request = Request { size: Bytes::new(size), stream: Rig::stream(stream) };
        let mut attempt = TorchAttempt::new(request);
        loop {
            let step = self.pool.place(&mut attempt);
            self.pool.audit().unwrap();
            match step {
                TorchStep::Placed(block) => return Ok(block),
                // Work is over only once the test waits for it.
                TorchStep::Poll => {}
                TorchStep::Wait => self.wait(),
                TorchStep::Perform(plan) => {
                    if self.perform(plan.op()) {
                        self.pool.settle(plan);
                    } else {
                        attempt.full(&self.pool);
                    }
                }
                TorchStep::Short(shortage) => return Err(shortage),
            }
            self.pool.audit().unwrap();
        }
    }

    fn free(&mut self, block: TorchBlock) {
        self.free_on(block.id, 0);
    }

    fn free_on(&mut self, id: BlockId, stream: u32) {
        for mark in self.pool.free(id, Rig::stream(stream)).unwrap() {
            self.pool.recorded(mark);
        }
        self.pool.audit().unwrap();
    }

    fn wait(&mut self) {
        for mark in self.pool.waited_for() {
            self.pool.reached(mark);
        }
    }

    fn empty_cache(&mut self) {
        self.wait();
        let mut release = self.pool.release(Bytes::ZERO);
        while let Some(plan) = self.pool.next_release(&mut release) {
            assert!(self.perform(plan.op()), "giving back does not fail here");
            self.pool.settle(plan);
            self.pool.audit().unwrap();
        }
    }

    fn perform(&mut self, op: TorchOp) -> bool {
        if let Some(left) = &mut self.fails_in
            && matches!(
                op,
                TorchOp::Allocate { .. } | TorchOp::Map { .. } | TorchOp::Reserve { .. }
            )
        {
            *left = left.wrapping_sub(1);
            if *left == u32::MAX {
                self.fails_in = None;
                return false;
            }
        }
        match op {
            TorchOp::Allocate { len, .. } | TorchOp::Map { len, .. } => {
                if self.taken + len.count() > self.card {
                    return false;
                }
                self.taken += len.count();
            }
            TorchOp::Free { len, .. } | TorchOp::Unmap { len, .. } => self.taken -= len.count(),
            TorchOp::Reserve { .. } | TorchOp::FreeAddresses { .. } => {}
        }
        true
    }

    fn reserved(&self) -> Bytes {
        assert_eq!(self.pool.counters().reserved.count(), self.taken);
        Bytes::new(self.taken)
    }

    /// Returns the sizes reserved by the last request, in MiB.
    fn reserved_by_last(&self) -> Vec<u64> {
        let taken = |op: &TorchOp| match op {
            TorchOp::Allocate { len, .. } | TorchOp::Map { len, .. } => Some(len.count() / MIB),
            _ => None,
        };
        self.pool.performed().iter().filter_map(taken).collect()
    }

    /// Returns the sizes released by the last request, in MiB.
    fn released_by_last(&self) -> Vec<u64> {
        let released = |op: &TorchOp| match op {
            TorchOp::Free { len, .. } | TorchOp::Unmap { len, .. } => Some(len.count() / MIB),
            _ => None,
        };
        self.pool.performed().iter().filter_map(released).collect()
    }
}
