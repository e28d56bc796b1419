//! How many handles the memory of a region has: each costs driver calls in a pause and in a resume.

use std::sync::Arc;

use crate::common::blocks::{BLOCKS, space};
use vramp_alloc::{Allocator, Config, Driver};
use vramp_driver::sim::Simulator;
use vramp_tiers::movers::MoverConfig;
use vramp_tiers::regions::{PauseOptions, RegionOptions, Regions};
use vramp_tiers::{Bytes, HostPool, Mover};

/// The handles of a region with so many blocks, counted by the calls that create them.
fn handles(blocks: usize, len: Bytes) -> u64 {
    let card = Arc::new(Simulator::builder().memory(Bytes::gib(64)).build());
    let driver: Arc<dyn Driver> = card.clone();
    let allocator = Allocator::new(driver.clone(), Config::default()).unwrap();
    let stream = allocator.create_stream().unwrap();
    let host = HostPool::new(&space(Bytes::gib(64)), BLOCKS, [driver.clone()]).unwrap();
    let regions = Regions::new(Mover::new(driver, &host, MoverConfig::default()).unwrap());
    let options =
        RegionOptions { backup: vramp_tiers::regions::Backup::None, ..RegionOptions::default() };
    let region = regions.region(&allocator, "kv", options).unwrap();
    let blocks: Vec<_> =
        (0..blocks).map(|_| region.allocator().malloc(len, stream).unwrap()).collect();
    regions.pause(&["kv"], PauseOptions::default()).unwrap();
    let before = card.calls_of(vramp_driver::Call::Create);
    regions.resume(&["kv"]).unwrap();
    let created = card.calls_of(vramp_driver::Call::Create) - before;
    blocks.into_iter().for_each(|block| region.allocator().free(block, stream).unwrap());
    created
}

#[test]
fn blocks_share_handles_and_a_large_block_has_one() {
    let gib = |len: Bytes| Bytes::gib(8).count() / len.count();
    for (len, most) in [(2, 512), (32, 264), (256, 34), (1024, 8)] {
        let len = Bytes::mib(len);
        let handles = handles(gib(len) as usize, len);
        assert!(handles <= most, "{handles} handles for 8 GiB in blocks of {len}");
    }
}
