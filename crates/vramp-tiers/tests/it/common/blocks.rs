//! Made for several tests: small host pools, a simulated GPU with a budget, and one in single bytes with requests for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vramp_alloc::{Allocator, Config, Driver, StreamId};
use vramp_driver::sim::Simulator;
use vramp_tiers::host::{HostPoolConfig, PageKind};
use vramp_tiers::space::Level;
use vramp_tiers::tracked::Policies;
use vramp_tiers::{
    Bytes, MemorySpace, RequestBuilder, Reservation, ReservationManager, SpaceConfig, SpaceId,
    Strategy, TrackedAllocator,
};

// --- Small host pools for the tests of pools and of movers ---

pub const MIB: Bytes = Bytes::mib(1);

/// Four blocks of 1 MiB at a time, none spare. Idle memory stays.
pub const BLOCKS: HostPoolConfig = HostPoolConfig {
    block: MIB,
    blocks_per_pool: 4,
    initial_pools: 1,
    spare_blocks: 0,
    node: None,
    pages: PageKind::Small,
    idle: None,
    keep: None,
};

pub fn space(capacity: Bytes) -> MemorySpace {
    let host = SpaceId::host(0);
    let manager = ReservationManager::new([(host, SpaceConfig::host(capacity))]).unwrap();
    manager.space(host).unwrap()
}

// --- Shared by the tests of tracked allocators: a simulated GPU with a budget ---

pub const GPU: SpaceId = SpaceId::gpu(0);
pub const KIB: fn(u64) -> Bytes = Bytes::kib;

pub struct Bench {
    pub device: Arc<Simulator>,
    pub manager: ReservationManager,
    pub space: MemorySpace,
    pub tracked: TrackedAllocator,
    pub streams: [StreamId; 2],
}

impl Bench {
    /// 90 % of the budget can be reserved.
    pub fn new(budget: Bytes, defaults: Policies) -> Bench {
        let device = Arc::new(Simulator::card("h200").unwrap());
        let driver: Arc<dyn Driver> = device.clone();
        let allocator = Arc::new(Allocator::new(driver, Config::default()).unwrap());
        let streams = [(); 2].map(|()| allocator.create_stream().unwrap());
        let manager = ReservationManager::new([(GPU, SpaceConfig::gpu(budget))]).unwrap();
        let space = manager.space(GPU).unwrap();
        let tracked = TrackedAllocator::new(allocator, &space, defaults);
        Bench { device, manager, space, tracked, streams }
    }
}

// --- Shared by the tests of reservations: a GPU in single bytes, and requests for it ---

/// A space of which all bytes can be reserved.
pub fn byte_space(capacity: u64) -> SpaceConfig {
    SpaceConfig {
        limit: Level::Fraction(1.0),
        granule: Bytes::new(1),
        ..SpaceConfig::gpu(Bytes::new(capacity))
    }
}

pub fn ask(manager: &ReservationManager, bytes: u64) -> RequestBuilder<'_> {
    manager.request(Strategy::Specific(GPU), Bytes::new(bytes))
}

pub fn reserve(manager: &ReservationManager, bytes: u64) -> Reservation {
    ask(manager, bytes).now().unwrap()
}

pub fn until(what: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !what() {
        assert!(Instant::now() < end, "it did not happen within 30 s");
        vramp_testing::moment();
    }
}

/// Asserts that no request waits and nothing is charged.
pub fn ends_empty(manager: &ReservationManager) {
    manager.audit().unwrap();
    assert_eq!(manager.waiting(), 0);
    for space in manager.spaces() {
        let census = space.census();
        assert_eq!((census.total, census.reservations), (Bytes::ZERO, 0));
    }
}
