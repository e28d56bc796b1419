//! What the tests of captured graphs share: a checked card that stores bytes, two streams, and the
//! work of a program on them.
use vramp_alloc::graph::{ArenaConfig, ArenaPolicy, CapturedGraph, GraphArena};
use vramp_alloc::{Allocation, Bytes, Config, Driver, StreamId};
use vramp_driver::sim::{Contents, Kernel, Simulator, SimulatorBuilder};
use vramp_driver::{DeviceCopy, Stream};

use crate::common::Rig;
pub use crate::common::range;

/// How long a kernel runs that is still running when the test looks.
pub const LONG_NS: u64 = 1 << 40;

/// An allocator on a checked card that stores bytes, and two streams.
pub struct GraphRig {
    pub base: Rig,
    pub a: StreamId,
    pub b: StreamId,
}

pub fn card() -> SimulatorBuilder {
    Simulator::builder().contents(Contents::Stored).checked()
}

impl GraphRig {
    pub fn new() -> GraphRig {
        GraphRig::with(card(), Config::default())
    }

    /// A pool that may not grow beyond `limit`.
    pub fn limited(limit: Bytes) -> GraphRig {
        GraphRig::with(card(), Config { limit: Some(limit), ..Config::default() })
    }

    pub fn with(card: SimulatorBuilder, config: Config) -> GraphRig {
        let rig = Rig::on(card, config);
        let a = rig.stream;
        let b = rig.allocator.create_stream().expect("a stream can be made");
        GraphRig { base: rig, a, b }
    }

    pub fn raw(&self, stream: StreamId) -> Stream {
        self.base.raw(stream)
    }

    // --- memory ---

    pub fn arena(&self) -> GraphArena {
        self.arena_of(ArenaConfig::default())
    }

    pub fn monotone(&self, capacity: Bytes) -> GraphArena {
        let policy = ArenaPolicy::Monotone;
        self.arena_of(ArenaConfig { policy, capacity, ..ArenaConfig::default() })
    }

    pub fn arena_of(&self, config: ArenaConfig) -> GraphArena {
        self.base.allocator.graph_arena(config).expect("there are addresses")
    }

    pub fn malloc(&self, size: Bytes, stream: StreamId) -> Allocation {
        self.base.allocator.malloc(size, stream).expect("there is memory")
    }

    pub fn free(&self, block: Allocation, stream: StreamId) {
        self.base.allocator.free(block, stream).expect("the block is this allocator's");
    }

    /// A capture that must come to something, and an audit.
    pub fn capture<R>(
        &self,
        stream: StreamId,
        arena: &GraphArena,
        body: impl FnOnce() -> R,
    ) -> (CapturedGraph, R) {
        let captured = self.base.allocator.capture(stream, arena, body);
        let captured = captured.expect("the capture is not disturbed");
        self.audit();
        captured
    }

    /// A replay whose lease ends at once: no other stream reads its results.
    pub fn replay(&self, graph: &CapturedGraph, stream: StreamId) {
        drop(graph.launch(stream).expect("the arena is free for it"));
        self.audit();
    }

    // --- work ---

    pub fn fill(&self, stream: StreamId, block: &Allocation, byte: u8) {
        let filled = self.base.sim.fill(self.raw(stream), range(block), byte);
        filled.expect("the stream takes work");
    }

    /// As much as both have.
    pub fn copy(&self, stream: StreamId, from: &Allocation, to: &Allocation) {
        let len = from.len().min(to.len());
        let copy = DeviceCopy { from: from.addr(), to: to.addr(), len };
        self.base.sim.copy(self.raw(stream), copy).expect("the stream takes work");
    }

    pub fn write(&self, name: &'static str, stream: StreamId, block: &Allocation, ns: u64) {
        self.launch(stream, Kernel::new(name).writing(range(block)).lasting(ns));
    }

    pub fn read(&self, name: &'static str, stream: StreamId, block: &Allocation, ns: u64) {
        self.launch(stream, Kernel::new(name).reading(range(block)).lasting(ns));
    }

    pub fn launch(&self, stream: StreamId, kernel: Kernel) {
        self.base.sim.launch(self.raw(stream), kernel).expect("the stream takes work");
    }

    /// As [`Rig::order`]: while `earlier` captures, a fork or a join.
    pub fn order(&self, earlier: StreamId, later: StreamId) {
        self.base.order(earlier, later);
    }

    pub fn sync(&self, stream: StreamId) {
        self.base.sim.synchronize_stream(self.raw(stream)).expect("its work is sound");
    }

    /// What is in a block once both streams are done.
    pub fn bytes(&self, block: &Allocation) -> Vec<u8> {
        self.sync(self.a);
        self.sync(self.b);
        self.base.sim.peek(range(block)).expect("the block can be touched")
    }

    /// The one byte that fills a block.
    pub fn byte(&self, block: &Allocation) -> u8 {
        let bytes = self.bytes(block);
        let first = bytes[0];
        assert!(vramp_testing::is_filled(&bytes, first), "{block:?} is filled with one byte");
        first
    }

    // --- looking ---

    pub fn audit(&self) {
        self.base.allocator.audit().expect("every step keeps every invariant");
        assert_eq!(self.base.sim.hazards(), []);
        assert_eq!(self.base.sim.device_loss(), None);
        self.base.assert_accounts_agree();
    }

    pub fn is_capturing(&self, stream: StreamId) -> bool {
        self.base.sim.is_capturing(self.raw(stream)).expect("the stream is known")
    }

    /// A stream is out of every capture, the allocator serves it, and nothing is amiss.
    pub fn assert_serves(&self) {
        for stream in [self.a, self.b] {
            assert!(!self.is_capturing(stream), "{stream} is out of the capture");
            for size in [Bytes::kib(4), Bytes::mib(16)] {
                let block = self.malloc(size, stream);
                self.fill(stream, &block, 1);
                self.free(block, stream);
            }
        }
        self.audit();
    }

    /// Everything is given back: the card is empty.
    pub fn close(self) {
        self.sync(self.a);
        self.sync(self.b);
        self.audit();
        let live = self.base.allocator.stats().expect("no call fails").live;
        assert_eq!(live, Bytes::ZERO, "no block was lost");
        self.base.close();
    }
}
