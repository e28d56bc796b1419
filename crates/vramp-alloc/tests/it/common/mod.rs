//! What the tests of the allocator share: an allocator on a simulator, counted in pages.

use std::sync::Arc;

use vramp_alloc::stats::Census;
use vramp_alloc::{Allocation, Allocator, Bytes, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Kernel, LiveObjects, Simulator, SimulatorBuilder};
use vramp_driver::{Call, Stream};
use vramp_peers::Preset;

pub mod graph_rig;
pub mod range_rig;
pub mod skipping_driver;

pub const PAGE: Bytes = Bytes::mib(2);

pub fn pages(count: u64) -> Bytes {
    PAGE * count
}

pub fn range(block: &Allocation) -> AddrRange {
    AddrRange::new(block.addr(), block.len())
}

/// True if two blocks have an address in common.
pub fn overlap(one: AddrRange, other: AddrRange) -> bool {
    one.start < other.start + other.len && other.start < one.start + one.len
}

/// Driver calls that a malloc costs. A page that moves is mapped; a new one is created and mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    pub maps: u64,
    pub creates: u64,
    pub waits: u64,
}

/// The cost of a request that its stream's own free memory serves.
pub const NOTHING: Cost = Cost { maps: 0, creates: 0, waits: 0 };

/// An allocator, its simulated card, and one stream.
pub struct Rig {
    pub sim: Arc<Simulator>,
    pub allocator: Allocator,
    pub stream: StreamId,
}

impl Rig {
    pub fn new(preset: Preset) -> Rig {
        Rig::on(Simulator::builder(), preset.config())
    }

    pub fn on(builder: SimulatorBuilder, config: Config) -> Rig {
        let sim = Arc::new(builder.build());
        let driver: Arc<dyn Driver> = Arc::clone(&sim) as Arc<dyn Driver>;
        let allocator = Allocator::new(driver, config).expect("the configuration is possible");
        let stream = allocator.create_stream().expect("a stream can be made");
        Rig { sim, allocator, stream }
    }

    /// VPMM with `count` pages ahead of demand, on a checked card.
    pub fn vpmm(count: u64) -> Rig {
        let config = Config { span: Bytes::gib(1), ..Preset::Vpmm.config() };
        let rig = Rig::on(Simulator::builder().checked(), config);
        if count > 0 {
            rig.allocator.prefill(pages(count), rig.stream).expect("the pages can be had");
        }
        rig
    }

    pub fn malloc(&self, count: u64) -> Allocation {
        self.malloc_on(count, self.stream)
    }

    pub fn malloc_on(&self, count: u64, stream: StreamId) -> Allocation {
        let block = self.allocator.malloc(pages(count), stream).expect("there is memory");
        self.allocator.audit().expect("malloc keeps every invariant");
        block
    }

    pub fn free(&self, block: Allocation) {
        self.free_on(block, self.stream);
    }

    pub fn free_on(&self, block: Allocation, stream: StreamId) {
        self.allocator.free(block, stream).expect("the block is this allocator's");
        self.allocator.audit().expect("free keeps every invariant");
    }

    pub fn raw(&self, stream: StreamId) -> Stream {
        self.allocator.stream(stream).expect("the stream is open")
    }

    /// Lets `later` run after what is queued on `earlier`; while `earlier` captures, a fork or a
    /// join.
    pub fn order(&self, earlier: StreamId, later: StreamId) {
        let event = self.sim.create_event().expect("an event can be made");
        self.sim.record(event, self.raw(earlier)).expect("the stream takes work");
        self.sim.wait(self.raw(later), event).expect("the stream takes work");
        self.sim.destroy_event(event).expect("it is there");
    }

    /// Physical memory in pages.
    pub fn held(&self) -> u64 {
        self.census().reserved.count() / PAGE.count()
    }

    pub fn census(&self) -> Census {
        self.allocator.census()
    }

    /// The layout in the document's notation; `newest` with a plus.
    pub fn layout(&self, newest: Option<&Allocation>) -> String {
        let id = newest.and_then(Allocation::id);
        self.allocator.pool_state().expect("there is a virtual pool").layout(id)
    }

    /// How many calls of a kind `work` makes.
    pub fn calls<R>(&self, call: Call, work: impl FnOnce() -> R) -> (u64, R) {
        let before = self.sim.calls_of(call);
        let result = work();
        (self.sim.calls_of(call) - before, result)
    }

    /// What the driver did for `work`.
    pub fn cost<R>(&self, work: impl FnOnce() -> R) -> (Cost, R) {
        let calls = || [Call::Map, Call::Create, Call::Wait].map(|call| self.sim.calls_of(call));
        let before = calls();
        let result = work();
        let [maps, creates, waits] = calls();
        let cost =
            Cost { maps: maps - before[0], creates: creates - before[1], waits: waits - before[2] };
        (cost, result)
    }

    /// Queues a kernel that writes a block and ends only when its stream is waited for.
    pub fn occupy(&self, block: &Allocation, stream: StreamId) {
        let long = Kernel::new("long").writing(range(block)).lasting(1 << 40);
        self.sim.launch(self.raw(stream), long).expect("the stream takes work");
    }

    /// The card holds exactly what the pool says it holds.
    pub fn assert_accounts_agree(&self) {
        let (live, census) = (self.sim.live(), self.census());
        // An injected failure may hit the question itself: ask again.
        let stats = self.allocator.stats().or_else(|_| self.allocator.stats());
        let reserved = stats.expect("statistics are there").reserved;
        assert_eq!(live.device_bytes, reserved, "\n{census}");
        assert_eq!(live.handles_released_but_mapped, 0, "nothing lives on unseen");
        if census.addresses > Bytes::ZERO {
            assert_eq!(live.reserved_addresses, census.addresses);
        }
    }

    /// Closes the allocator: the card is empty again.
    pub fn close(self) {
        self.allocator.close().expect("nothing is in the way");
        assert_eq!(self.sim.live(), LiveObjects::default());
    }
}

/// A splitmix64 generator.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number under `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}
