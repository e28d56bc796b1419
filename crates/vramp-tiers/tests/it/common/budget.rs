//! Shared by the tests of tracked allocators: a simulated GPU with a budget.
use std::sync::Arc;

use vramp_alloc::{Allocator, Config, Driver, StreamId};
use vramp_driver::sim::Simulator;
use vramp_tiers::tracked::Policies;
use vramp_tiers::{Bytes, MemorySpace, ReservationManager, SpaceConfig, SpaceId, TrackedAllocator};

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
