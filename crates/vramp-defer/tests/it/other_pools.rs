//! Idle buffers give way to requests of other pools of the group, and to resumes of regions.

use std::sync::Arc;

use vramp_alloc::{Allocation, Allocator, Driver};
use vramp_core::AddrRange;
use vramp_defer::{Access, DeferrableBuffer};
use vramp_tiers::Bytes;
use vramp_tiers::regions::{PauseOptions, Phase, Region, RegionOptions, Regions};

use super::{MIB, PIECE, Plan, Rig, rig};

/// Fills the card with buffers of a piece.
fn full(rig: &Rig) -> Vec<DeferrableBuffer> {
    let buffers = (0..8).map(|byte| rig.filled(PIECE, byte)).collect();
    assert_eq!(rig.manager.census().resident, MIB(64));
    buffers
}

fn region(rig: &Rig, regions: &Regions, tag: &str) -> Arc<Region> {
    regions.region(&rig.allocator, tag, RegionOptions::default()).unwrap()
}

fn hold(rig: &Rig, buffers: &[DeferrableBuffer]) {
    for (byte, buffer) in (0..).zip(buffers) {
        rig.expect(buffer, byte);
    }
}

fn block_of(rig: &Rig, pool: &Allocator, len: Bytes, byte: u8) -> Allocation {
    let block = pool.malloc(len, rig.stream).unwrap();
    rig.sim.fill(rig.queue, AddrRange::new(block.addr(), block.len()), byte).unwrap();
    block
}

#[test]
fn a_request_in_a_region_evicts_what_it_lacks_and_no_more() {
    let rig = rig();
    let buffers = full(&rig);
    let regions = Regions::new(rig.mover());
    let region = region(&rig, &regions, "weights");
    let block = block_of(&rig, region.allocator(), PIECE * 2, 9);
    assert_eq!(rig.manager.census().resident, MIB(64) - PIECE * 2);
    assert_eq!(rig.manager.counters().victims, 2);
    // What the region has free needs none.
    region.allocator().free(block, rig.stream).unwrap();
    let again = region.allocator().malloc(PIECE * 2, rig.stream).unwrap();
    assert_eq!(rig.manager.counters().victims, 2);
    region.allocator().free(again, rig.stream).unwrap();
    hold(&rig, &buffers);
    rig.check();
}

#[test]
fn a_resume_evicts_what_it_lacks_and_has_its_contents() {
    let rig = rig();
    let regions = Regions::new(rig.mover());
    let region = region(&rig, &regions, "weights");
    let block = block_of(&rig, region.allocator(), PIECE * 3, 9);
    regions.pause(&["weights"], PauseOptions::default()).unwrap();
    let buffers = full(&rig);
    let before = rig.manager.counters().victims;
    regions.resume(&["weights"]).unwrap();
    assert_eq!(region.status().phase, Phase::Awake);
    let gone = MIB(64) - rig.manager.census().resident;
    assert!(gone >= PIECE * 3 && gone <= region.status().on_card, "{gone}");
    assert_eq!(PIECE * (rig.manager.counters().victims - before), gone);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let bytes = rig.sim.peek(AddrRange::new(block.addr(), block.len())).unwrap();
    assert!(vramp_testing::is_filled(&bytes, 9));
    region.allocator().free(block, rig.stream).unwrap();
    hold(&rig, &buffers);
    rig.check();
}

#[test]
fn idle_buffers_leave_before_regions_and_regions_when_no_buffer_can() {
    let rig = rig();
    let regions = Regions::new(rig.mover());
    let [old, new] = ["old", "new"].map(|tag| region(&rig, &regions, tag));
    let kept = block_of(&rig, old.allocator(), PIECE * 4, 9);
    regions.on_pressure(&rig.allocator, &["old"]).unwrap();
    let buffers: Vec<_> = (0..2).map(|byte| rig.filled(PIECE, byte)).collect();
    let rest = MIB(64) - old.status().on_card - PIECE * 2;
    let first = new.allocator().malloc(rest + PIECE, rig.stream).unwrap();
    assert_eq!((old.status().phase, rig.manager.counters().victims), (Phase::Awake, 1));
    new.allocator().free(first, rig.stream).unwrap();
    let uses: Vec<_> = buffers.iter().map(|one| (one, Access::Shared)).collect();
    let lease = rig.manager.lease(&uses, rig.stream).unwrap();
    let second = new.allocator().malloc(rest + PIECE, rig.stream).unwrap();
    assert_eq!((old.status().phase, rig.manager.counters().victims), (Phase::Asleep, 1));
    drop(lease);
    new.allocator().free(second, rig.stream).unwrap();
    regions.resume(&["old"]).unwrap();
    old.allocator().free(kept, rig.stream).unwrap();
    hold(&rig, &buffers);
    rig.check();
}

#[test]
fn without_a_limit_a_request_of_another_pool_evicts_what_the_card_lacks() {
    let rig = Plan { limit: MIB(1024), host: MIB(2048), ..Plan::default() }.build();
    rig.allocator.set_limit(None).unwrap();
    let buffers: Vec<_> = (0..16).map(|byte| rig.filled(MIB(60), byte)).collect();
    let beside = rig.allocator.create_pool("beside").unwrap();
    let free = MIB(1024) - MIB(60) * 16;
    let block = beside.malloc(free + PIECE * 4, rig.stream).unwrap();
    let gone = MIB(960) - rig.manager.census().resident;
    assert!(gone >= PIECE * 4 && gone <= PIECE * 6, "{gone}");
    beside.free(block, rig.stream).unwrap();
    hold(&rig, &buffers);
    rig.check();
}

#[test]
fn leased_buffers_stay_and_the_request_of_another_pool_fails() {
    let rig = rig();
    let buffers = full(&rig);
    let beside = rig.allocator.create_pool("beside").unwrap();
    let uses: Vec<_> = buffers.iter().map(|one| (one, Access::Shared)).collect();
    let lease = rig.manager.lease(&uses, rig.stream).unwrap();
    assert!(beside.malloc(PIECE, rig.stream).is_err());
    assert_eq!(rig.manager.census().resident, MIB(64));
    drop(lease);
    let block = beside.malloc(PIECE, rig.stream).unwrap();
    beside.free(block, rig.stream).unwrap();
    rig.check();
}
