//! A read in the middle of its copy, with what other threads may do meanwhile.

#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use std::sync::Arc;

use super::*;
use crate::planner::Access;
use crate::{DeferrableBuffer, SpillConfig, SpillManager, SpillParts};
use vramp_alloc::{Allocator, Config, Driver, StreamId};
use vramp_driver::sim::{Contents, Simulator};
use vramp_tiers::host::HostPoolConfig;
use vramp_tiers::movers::MoverConfig;
use vramp_tiers::{HostPool, Mover, ReservationManager, SpaceConfig, SpaceId};

const MIB: fn(u64) -> Bytes = Bytes::mib;

/// A card of 64 MiB over a host of 32 MiB.
struct Rig {
    manager: SpillManager,
    pool: HostPool,
    spaces: ReservationManager,
    stream: StreamId,
}

impl Rig {
    fn new() -> Rig {
        let sim = Simulator::builder().memory(Bytes::gib(1)).contents(Contents::Stored).checked();
        let driver: Arc<dyn Driver> = Arc::new(sim.build());
        let config = Config { limit: Some(MIB(64)), ..Config::default() };
        let allocator = Arc::new(Allocator::new(Arc::clone(&driver), config).unwrap());
        let host = SpaceId::host(0);
        let spaces = ReservationManager::new([(host, SpaceConfig::host(MIB(32)))]).unwrap();
        let config =
            HostPoolConfig { blocks_per_pool: 16, spare_blocks: 0, ..HostPoolConfig::default() };
        let space = spaces.space(host).unwrap();
        let pool = HostPool::new(&space, config, [Arc::clone(&driver)]).unwrap();
        let step = MoverConfig { step: MIB(4), ..MoverConfig::default() };
        let parts = SpillParts {
            allocator: Arc::clone(&allocator),
            mover: Mover::new(driver, &pool, step).unwrap(),
            disk: None,
            budget: None,
            peers: Vec::new(),
        };
        let config = SpillConfig { piece: MIB(8), ..SpillConfig::default() };
        let manager = SpillManager::new(parts, config).unwrap();
        let stream = allocator.create_stream().unwrap();
        Rig { manager, pool, spaces, stream }
    }

    fn written(&self, len: Bytes, byte: u8) -> DeferrableBuffer {
        let buffer = self.manager.buffer(len).unwrap();
        buffer.write(Bytes::ZERO, &vec![byte; len.count() as usize]).unwrap();
        buffer
    }

    fn host_total(&self) -> Bytes {
        self.spaces.space(SpaceId::host(0)).unwrap().total()
    }
}

#[test]
fn a_read_in_the_middle_of_its_copy_keeps_no_other_call_waiting_and_has_its_bytes() {
    let rig = Rig::new();
    let (buffer, other) = (rig.written(MIB(16), 1), rig.written(MIB(8), 2));
    buffer.spill().unwrap();
    let shared = &buffer.owner.shared;
    let part = (MIB(7), MIB(2));
    let copies = shared.host_copies(buffer.id(), part.0, part.1).expect("it left for the host");
    // Other threads lease, also the buffer itself, and invalidate its copies.
    std::thread::scope(|scope| {
        let leases = scope.spawn(|| drop(other.lease(Access::Exclusive, rig.stream).unwrap()));
        leases.join().unwrap();
        let writes = scope.spawn(|| buffer.write(Bytes::ZERO, &vec![3; 16 << 20]).unwrap());
        writes.join().unwrap();
    });
    rig.manager.census();
    assert_eq!(rig.host_total(), MIB(16), "the blocks that are read are neither reused nor free");
    // What else leaves for the host does not take these blocks.
    other.spill().unwrap();
    let mut into = vec![0; 2 << 20];
    copies.read(&mut into);
    assert!(vramp_testing::is_filled(&into, 1), "as at the start of the read");
    rig.manager.census();
    assert_eq!(rig.host_total(), MIB(8), "its blocks are free after the read");
    buffer.read(part.0, &mut into).unwrap();
    assert!(vramp_testing::is_filled(&into, 3));
    rig.manager.audit().unwrap();
    rig.pool.audit().unwrap();
}
