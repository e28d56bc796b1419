//! Regions: every byte is right after pauses and resumes, and a failure loses none.

mod callbacks;
mod disk;
mod growth;

use std::sync::Arc;

use crate::common::blocks::{BLOCKS, MIB, space};
use vramp_alloc::{AllocError, Allocation, Allocator, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::Call;
use vramp_driver::sim::{Contents, FaultPlan, Simulator};
use vramp_testing::fail_each_call;
use vramp_tiers::movers::MoverConfig;
use vramp_tiers::regions::{
    Backup, PauseOptions, Phase, Region, RegionError, RegionOptions, RegionStatus, Regions,
};
use vramp_tiers::{Bytes, HostPool, Mover};

struct Rig {
    card: Arc<Simulator>,
    allocator: Allocator,
    host: HostPool,
    regions: Regions,
    stream: StreamId,
}

/// A card of 256 MiB above a host of so much.
fn rig(host: Bytes) -> Rig {
    let builder = Simulator::builder().memory(Bytes::mib(256)).contents(Contents::Stored);
    let card = Arc::new(builder.checked().build());
    let driver: Arc<dyn Driver> = card.clone();
    let allocator = Allocator::new(driver.clone(), Config::default()).unwrap();
    let stream = allocator.create_stream().unwrap();
    let host = HostPool::new(&space(host), BLOCKS, [driver.clone()]).unwrap();
    let config = MoverConfig { step: MIB * 4, steps_in_flight: 4, staging_pieces: 4 };
    let regions = Regions::new(Mover::new(driver, &host, config).unwrap());
    Rig { card, allocator, host, regions, stream }
}

impl Rig {
    fn region(&self, tag: &str, options: RegionOptions) -> Arc<Region> {
        self.regions.region(&self.allocator, tag, options).unwrap()
    }

    fn fill(&self, block: &Allocation, byte: u8) {
        let queue = self.allocator.stream(self.stream).unwrap();
        self.card.fill(queue, AddrRange::new(block.addr(), block.len()), byte).unwrap();
    }

    /// A block full of that byte. The fill is queued only.
    fn block(&self, region: &Region, len: Bytes, byte: u8) -> Allocation {
        let block = region.allocator().malloc(len, self.stream).unwrap();
        self.fill(&block, byte);
        block
    }

    fn holds(&self, block: &Allocation, byte: u8) {
        let queue = self.allocator.stream(self.stream).unwrap();
        self.card.synchronize_stream(queue).unwrap();
        let bytes = self.card.peek(AddrRange::new(block.addr(), block.len())).unwrap();
        assert!(vramp_testing::is_filled(&bytes, byte), "{block:?} is not all {byte}");
    }

    fn copies_out(&self) -> u64 {
        self.card.calls_of(Call::CopyToHost)
    }

    fn on_card(&self) -> Bytes {
        let memory = self.card.memory_info().unwrap();
        memory.total - memory.free
    }
}

fn pause(rig: &Rig, tag: &str, keep: Bytes) -> Result<(), RegionError> {
    rig.regions.pause(&[tag], PauseOptions { keep, ..PauseOptions::default() })
}

#[test]
fn a_region_sleeps_and_wakes_with_its_bytes_at_its_addresses() {
    let rig = rig(Bytes::mib(128));
    let before = rig.on_card();
    let region = rig.region("weights", RegionOptions::default());
    let blocks: Vec<Allocation> =
        (1..=9).map(|n| rig.block(&region, MIB * n + Bytes::kib(n), n as u8)).collect();
    let small = rig.block(&region, Bytes::new(700), 77);
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    let status = region.status();
    assert_eq!((status.phase, status.on_card), (Phase::Asleep, Bytes::ZERO));
    assert_eq!(status.copied, status.to_copy);
    assert!(status.on_host < MIB * 50, "{status:?}");
    assert_eq!(rig.on_card(), before);
    assert!(matches!(
        region.allocator().malloc(MIB, rig.stream),
        Err(AllocError::Unusable(vramp_alloc::error::Unusable::Asleep { .. }))
    ));
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    rig.regions.resume(&["weights"]).unwrap();
    rig.regions.resume(&["weights"]).unwrap();
    (1..).zip(&blocks).for_each(|(byte, block)| rig.holds(block, byte));
    rig.holds(&small, 77);
    assert_eq!(rig.host.space().total(), Bytes::ZERO, "the copies are gone");
    for block in blocks.into_iter().chain([small]) {
        region.allocator().free(block, rig.stream).unwrap();
    }
    assert_eq!(rig.card.hazards(), []);
}

#[test]
fn valid_copies_are_not_made_again() {
    let rig = rig(Bytes::mib(128));
    let read_only = RegionOptions { read_only: true, ..RegionOptions::default() };
    let weights = rig.region("weights", read_only);
    let cache = rig.region("cache", RegionOptions::default());
    let one = rig.block(&weights, MIB * 20, 1);
    let two = rig.block(&cache, MIB * 10, 2);
    rig.regions.pause(&["weights", "cache"], PauseOptions::default()).unwrap();
    rig.regions.resume(&["weights", "cache"]).unwrap();
    let copies = rig.copies_out();
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    assert_eq!(rig.copies_out(), copies);
    rig.regions.resume(&["weights"]).unwrap();
    rig.fill(&two, 22);
    rig.regions.clean("cache").unwrap();
    let cleaned = rig.copies_out();
    assert!(cleaned > copies);
    pause(&rig, "cache", Bytes::ZERO).unwrap();
    assert_eq!(rig.copies_out(), cleaned);
    rig.regions.resume(&["cache"]).unwrap();
    // A new block makes the copy of the weights invalid.
    let three = rig.block(&weights, MIB * 3, 3);
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    assert!(rig.copies_out() > cleaned);
    rig.regions.resume(&["weights"]).unwrap();
    rig.holds(&one, 1);
    rig.holds(&two, 22);
    rig.holds(&three, 3);
}

#[test]
fn a_copy_made_ahead_ends_with_a_pause_that_fails_and_with_a_resume() {
    let rig = rig(Bytes::mib(128));
    let region = rig.region("cache", RegionOptions::default());
    let block = rig.block(&region, MIB * 8, 1);
    // The program writes again once either returned.
    let fail = || {
        rig.card.set_faults(FaultPlan::nth(1));
        assert!(pause(&rig, "cache", Bytes::ZERO).is_err());
        rig.card.set_faults(FaultPlan::none());
    };
    let resume = || rig.regions.resume(&["cache"]).unwrap();
    for (byte, ends) in [(2, &fail as &dyn Fn()), (3, &resume)] {
        rig.regions.clean("cache").unwrap();
        ends();
        assert_eq!(region.status().on_host, Bytes::ZERO);
        rig.fill(&block, byte);
        pause(&rig, "cache", Bytes::ZERO).unwrap();
        resume();
        rig.holds(&block, byte);
    }
    assert_eq!(rig.card.hazards(), []);
}

#[test]
fn without_a_backup_nothing_is_copied() {
    let rig = rig(Bytes::mib(8));
    let options = RegionOptions { backup: Backup::None, ..RegionOptions::default() };
    let region = rig.region("cache", options);
    let block = rig.block(&region, MIB * 100, 1);
    let address = block.addr();
    pause(&rig, "cache", Bytes::ZERO).unwrap();
    rig.regions.resume(&["cache"]).unwrap();
    assert_eq!((rig.copies_out(), block.addr()), (0, address));
    rig.fill(&block, 2);
    rig.holds(&block, 2);
}

#[test]
fn discarded_contents_are_not_copied_and_their_copies_are_freed() {
    let rig = rig(Bytes::mib(64));
    let discard = PauseOptions { discard: true, ..PauseOptions::default() };
    let region = rig.region("weights", RegionOptions { read_only: true, ..Default::default() });
    let block = rig.block(&region, MIB * 40, 1);
    rig.regions.pause(&["weights"], discard).unwrap();
    assert_eq!((rig.copies_out(), region.status().on_card), (0, Bytes::ZERO));
    rig.regions.resume(&["weights"]).unwrap();
    assert_eq!(rig.card.calls_of(Call::CopyToDevice), 0);
    // What a resume left undefined and the program wrote again is copied, in full.
    rig.fill(&block, 2);
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    assert!(rig.host.space().total() >= MIB * 40);
    rig.regions.resume(&["weights"]).unwrap();
    rig.holds(&block, 2);
    // A region that sleeps, as a whole or in part, loses its copy.
    for keep in [Bytes::ZERO, MIB * 20] {
        pause(&rig, "weights", keep).unwrap();
        let (host, copies) = (rig.host.space().total(), rig.card.calls_of(Call::CopyToDevice));
        assert!(host >= MIB * 20);
        rig.regions.pause(&["weights"], PauseOptions { keep, ..discard }).unwrap();
        assert_eq!((rig.host.space().total(), region.status().on_host), Default::default());
        pause(&rig, "weights", Bytes::ZERO).unwrap();
        assert_eq!(rig.host.space().total(), Bytes::ZERO, "it has no backup until it is resumed");
        rig.regions.resume(&["weights"]).unwrap();
        assert_eq!(rig.card.calls_of(Call::CopyToDevice), copies);
        rig.fill(&block, 3);
        pause(&rig, "weights", Bytes::ZERO).unwrap();
        rig.regions.resume(&["weights"]).unwrap();
        rig.holds(&block, 3);
    }
    assert_eq!(rig.card.hazards(), []);
}

#[test]
fn a_failed_pause_that_discards_leaves_a_region_that_wakes() {
    fail_each_call(|nth| {
        let rig = rig(Bytes::mib(64));
        let region = rig.region("cache", RegionOptions::default());
        let block = rig.block(&region, MIB * 24, 1);
        let before = rig.card.calls();
        rig.card.set_faults(FaultPlan::nth(nth));
        let discard = PauseOptions { discard: true, ..PauseOptions::default() };
        let _ = rig.regions.pause(&["cache"], discard);
        let _ = rig.regions.resume(&["cache"]);
        rig.card.set_faults(FaultPlan::none());
        let calls = rig.card.calls() - before;
        rig.regions.resume(&["cache"]).unwrap();
        assert_eq!(region.status().phase, Phase::Awake);
        rig.fill(&block, 2);
        pause(&rig, "cache", Bytes::ZERO).unwrap();
        rig.regions.resume(&["cache"]).unwrap();
        rig.holds(&block, 2);
        region.allocator().audit().unwrap();
        assert_eq!(rig.card.hazards(), [], "call {nth}");
        calls
    });
}

#[test]
fn a_full_host_leaves_a_region_awake_and_a_deeper_pause_loses_nothing() {
    let rig = rig(Bytes::mib(16));
    let region = rig.region("weights", RegionOptions::default());
    let blocks: Vec<Allocation> = (1..=20).map(|n| rig.block(&region, MIB * 2, n)).collect();
    let refused = pause(&rig, "weights", Bytes::ZERO);
    assert!(matches!(refused, Err(RegionError::HostFull { .. })), "{refused:?}");
    assert_eq!(region.status().phase, Phase::Awake);
    // So much fits; no more does, and what sleeps stays safe.
    pause(&rig, "weights", MIB * 28).unwrap();
    assert!(region.status().on_card <= MIB * 28);
    let refused = pause(&rig, "weights", Bytes::ZERO);
    assert!(matches!(refused, Err(RegionError::HostFull { .. })), "{refused:?}");
    assert_eq!(region.status().phase, Phase::Asleep);
    rig.regions.resume(&["weights"]).unwrap();
    (1..).zip(&blocks).for_each(|(byte, block)| rig.holds(block, byte));
}

#[test]
fn a_region_that_finds_no_memory_sleeps_on_and_wakes_later() {
    let rig = rig(Bytes::mib(256));
    let region = rig.region("weights", RegionOptions::default());
    let block = rig.block(&region, MIB * 100, 1);
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    let other = rig.allocator.malloc(MIB * 200, rig.stream).unwrap();
    let refused = rig.regions.resume(&["weights"]);
    assert!(matches!(refused, Err(RegionError::Memory { .. })), "{refused:?}");
    assert_eq!(region.status().phase, Phase::Asleep);
    assert_eq!(region.status().on_card, Bytes::ZERO, "what came back left again");
    rig.allocator.free(other, rig.stream).unwrap();
    rig.regions.resume(&["weights"]).unwrap();
    rig.holds(&block, 1);
}

#[test]
fn regions_sleep_under_pressure_as_far_as_needed() {
    let rig = rig(Bytes::mib(256));
    let regions = ["old", "new"].map(|tag| rig.region(tag, RegionOptions::default()));
    let blocks: Vec<Allocation> = (1..=20).map(|n| rig.block(&regions[0], MIB * 4, n)).collect();
    let new = rig.block(&regions[1], MIB * 80, 50);
    let handler = rig.regions.on_pressure(&rig.allocator, &["old", "new"]).unwrap();
    let other = rig.allocator.malloc(MIB * 120, rig.stream).unwrap();
    assert_eq!(regions[0].status().phase, Phase::Asleep);
    assert_eq!(regions[1].status().asleep, Bytes::ZERO);
    rig.holds(&new, 50);
    rig.allocator.free(other, rig.stream).unwrap();
    rig.regions.resume(&["old", "new"]).unwrap();
    (1..).zip(&blocks).for_each(|(byte, block)| rig.holds(block, byte));
    rig.allocator.unregister(handler);
}

#[test]
fn whichever_driver_call_fails_every_byte_comes_back() {
    let mut failed = 0;
    fail_each_call(|nth| {
        let rig = rig(Bytes::mib(64));
        let region = rig.region("weights", RegionOptions::default());
        let blocks: Vec<Allocation> = (1..=8).map(|n| rig.block(&region, MIB * 3, n)).collect();
        let before = rig.card.calls();
        rig.card.set_faults(FaultPlan::nth(nth));
        let paused = pause(&rig, "weights", MIB * 6);
        let deeper = pause(&rig, "weights", Bytes::ZERO);
        let resumed = rig.regions.resume(&["weights"]);
        rig.card.set_faults(FaultPlan::none());
        let calls = rig.card.calls() - before;
        failed += [paused, deeper, resumed].iter().filter(|result| result.is_err()).count();
        rig.regions.resume(&["weights"]).unwrap();
        (1..).zip(&blocks).for_each(|(byte, block)| rig.holds(block, byte));
        region.allocator().audit().unwrap();
        for block in blocks {
            region.allocator().free(block, rig.stream).unwrap();
        }
        assert_eq!(rig.card.hazards(), [], "call {nth}");
        calls
    });
    assert!(failed > 5, "{failed} calls failed");
}

/// The calls that fail together: two, three or more in a row, or two apart.
fn failures(nth: u64) -> [FaultPlan; 4] {
    [
        FaultPlan::several(nth, 2),
        FaultPlan::several(nth, 3),
        FaultPlan::several(nth, 40),
        FaultPlan::nth(nth).and(FaultPlan::nth(nth + 2)),
    ]
}

/// Nothing is unmapped under a copy whose end is unknown: the simulator loses its device there.
#[test]
fn whichever_driver_calls_fail_together_every_byte_comes_back() {
    let mut failed = 0;
    // The shapes of failures differ in what follows them, and not by where copies go.
    for (backup, shapes) in [(Backup::Host, 0..4), (Backup::Disk, 0..1)] {
        for shape in shapes {
            fail_each_call(|nth| {
                let disk = disk::disk_rig(Bytes::mib(64));
                let rig = &disk.rig;
                let options = RegionOptions { backup, ..RegionOptions::default() };
                let region = rig.region("weights", options);
                let blocks: Vec<Allocation> =
                    (1..=4).map(|n| rig.block(&region, MIB * 3, n)).collect();
                let before = rig.card.calls();
                rig.card.set_faults(failures(nth)[shape].clone().with_code(800));
                let results = [
                    rig.regions.clean("weights"),
                    pause(rig, "weights", MIB * 5),
                    pause(rig, "weights", Bytes::ZERO),
                    rig.regions.resume(&["weights"]),
                    pause(rig, "weights", Bytes::ZERO),
                    rig.regions.resume(&["weights"]),
                ];
                let calls = rig.card.calls() - before;
                rig.card.set_faults(FaultPlan::none());
                failed += results.iter().filter(|result| result.is_err()).count();
                rig.regions.resume(&["weights"]).unwrap();
                (1..).zip(&blocks).for_each(|(byte, block)| rig.holds(block, byte));
                region.allocator().audit().unwrap();
                for block in blocks {
                    region.allocator().free(block, rig.stream).unwrap();
                }
                region.allocator().trim(Bytes::ZERO).unwrap();
                assert_eq!(rig.on_card(), Bytes::ZERO, "call {nth}");
                assert_eq!(rig.card.device_loss(), None, "call {nth}");
                assert_eq!(rig.card.hazards(), [], "call {nth}");
                calls
            });
        }
    }
    assert!(failed > 20, "{failed} calls failed");
}

#[test]
fn threads_pause_and_resume_at_random_and_lose_no_byte() {
    let rig = rig(Bytes::mib(256));
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let rig = &rig;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                let tag = format!("tag {thread}");
                let options = RegionOptions { read_only: thread == 0, ..RegionOptions::default() };
                let region = rig.region(&tag, options);
                let mut blocks: Vec<(Allocation, u8)> = Vec::new();
                for step in 0..vramp_testing::cases(120) {
                    match random.u32(..6) {
                        0 | 1 if blocks.len() < 8 => {
                            let len = Bytes::new(random.u64(1..4 << 20));
                            let byte = random.u8(..);
                            blocks.push((rig.block(&region, len, byte), byte));
                        }
                        2 if !blocks.is_empty() => {
                            let (block, byte) = blocks.swap_remove(random.usize(..blocks.len()));
                            rig.holds(&block, byte);
                            region.allocator().free(block, rig.stream).unwrap();
                        }
                        3 if thread != 0 => {
                            for (block, byte) in &mut blocks {
                                *byte = random.u8(..);
                                rig.fill(block, *byte);
                            }
                        }
                        4 => {
                            rig.regions.clean(&tag).unwrap();
                            pause(rig, &tag, Bytes::ZERO).unwrap();
                            rig.regions.resume(&[&tag]).unwrap();
                        }
                        _ => {
                            let keep = MIB * random.u64(..12);
                            pause(rig, &tag, keep).unwrap();
                            if random.bool() {
                                pause(rig, &tag, Bytes::ZERO).unwrap();
                            }
                            rig.regions.resume(&[&tag]).unwrap();
                        }
                    }
                    if step % 50 == 0 {
                        blocks.iter().for_each(|(block, byte)| rig.holds(block, *byte));
                    }
                }
                blocks.iter().for_each(|(block, byte)| rig.holds(block, *byte));
            });
        }
    });
    assert_eq!(rig.card.hazards(), []);
}
