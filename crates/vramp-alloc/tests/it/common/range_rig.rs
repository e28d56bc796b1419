//! What the tests of stable addresses share: a checked card that stores bytes, and what is written
//! to and read from it at an address.
use std::sync::Arc;

use vramp_alloc::range::StableRange;
use vramp_alloc::{Allocator, Bytes, Config, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Contents, Simulator};
use vramp_driver::{DeviceCopy, Driver, Stream};

use crate::common;

pub const MIB: fn(u64) -> Bytes = Bytes::mib;

pub struct RangeRig {
    pub sim: Arc<Simulator>,
    pub allocator: Allocator,
    pub stream: StreamId,
    pub queue: Stream,
}

impl RangeRig {
    /// A card of which the allocator may have so much.
    pub fn limited(limit: Bytes) -> RangeRig {
        RangeRig::with(Config { limit: Some(limit), ..Config::default() })
    }

    pub fn with(config: Config) -> RangeRig {
        let card = Simulator::builder().memory(Bytes::gib(1)).contents(Contents::Stored).checked();
        let rig = common::Rig::on(card, config);
        let queue = rig.raw(rig.stream);
        RangeRig { sim: rig.sim, allocator: rig.allocator, stream: rig.stream, queue }
    }

    pub fn fill(&self, range: AddrRange, byte: u8) {
        self.sim.fill(self.queue, range, byte).expect("the stream takes work");
        self.sim.synchronize_stream(self.queue).expect("its work is sound");
    }

    pub fn copy(&self, from: AddrRange, to: AddrRange) {
        let copy = DeviceCopy { from: from.start, to: to.start, len: from.len };
        self.sim.copy(self.queue, copy).expect("the stream takes work");
        self.sim.synchronize_stream(self.queue).expect("its work is sound");
    }

    pub fn byte(&self, range: AddrRange, offset: Bytes) -> u8 {
        let one = AddrRange::new(range.start + offset, Bytes::new(1));
        self.sim.peek(one).expect("bytes are stored")[0]
    }

    pub fn holds(&self, range: AddrRange, byte: u8) {
        let bytes = self.sim.peek(range).expect("bytes are stored");
        assert!(vramp_testing::is_filled(&bytes, byte), "{range} is not all {byte}");
    }
}

/// So much of a range, from there on.
pub fn part(range: &StableRange, from: Bytes, len: Bytes) -> AddrRange {
    AddrRange::new(range.range().start + from, len)
}
