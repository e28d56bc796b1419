//! Regions that sleep under pressure: of requests of the pool, of other regions, and of resumes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vramp_alloc::{AllocError, Allocation, Allocator, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Contents, Simulator};
use vramp_tiers::movers::MoverConfig;
use vramp_tiers::regions::{PauseOptions, Phase, Region, RegionError, RegionOptions, Regions};
use vramp_tiers::{Bytes, HostPool, Mover};

use crate::common::blocks::{BLOCKS, MIB, space};

struct Rig {
    card: Arc<Simulator>,
    allocator: Allocator,
    regions: Regions,
    stream: StreamId,
}

/// A card of 256 MiB above a host that holds copies of four regions as large as the card: what is freed while
/// its region sleeps stays in the copy until the region is resumed.
fn rig(config: Config) -> Rig {
    let builder = Simulator::builder().memory(Bytes::mib(256)).contents(Contents::Stored);
    let card = Arc::new(builder.checked().build());
    let driver: Arc<dyn Driver> = card.clone();
    let allocator = Allocator::new(driver.clone(), config).unwrap();
    let stream = allocator.create_stream().unwrap();
    let host = HostPool::new(&space(Bytes::gib(1)), BLOCKS, [driver.clone()]).unwrap();
    let config = MoverConfig { step: MIB * 4, steps_in_flight: 4, staging_pieces: 4 };
    let regions = Regions::new(Mover::new(driver, &host, config).unwrap());
    Rig { card, allocator, regions, stream }
}

impl Rig {
    fn region(&self, tag: &str) -> Arc<Region> {
        self.regions.region(&self.allocator, tag, RegionOptions::default()).unwrap()
    }

    /// A block full of that byte.
    fn block(&self, region: &Region, len: Bytes, byte: u8) -> Result<Allocation, AllocError> {
        let block = region.allocator().malloc(len, self.stream)?;
        let queue = self.allocator.stream(self.stream).unwrap();
        self.card.fill(queue, AddrRange::new(block.addr(), block.len()), byte).unwrap();
        Ok(block)
    }

    fn holds(&self, block: &Allocation, byte: u8) {
        let queue = self.allocator.stream(self.stream).unwrap();
        self.card.synchronize_stream(queue).unwrap();
        let bytes = self.card.peek(AddrRange::new(block.addr(), block.len())).unwrap();
        assert!(vramp_testing::is_filled(&bytes, byte), "{block:?} is not all {byte}");
    }

    fn phases(&self) -> Vec<(String, Phase)> {
        self.regions.status().into_iter().map(|status| (status.tag, status.phase)).collect()
    }
}

fn phases<const N: usize>(expected: [(&str, Phase); N]) -> Vec<(String, Phase)> {
    expected.map(|(tag, phase)| (tag.to_owned(), phase)).to_vec()
}

#[test]
fn a_request_in_another_region_makes_regions_sleep_and_never_its_own() {
    let rig = rig(Config::default());
    let [new, old] = ["new", "old"].map(|tag| rig.region(tag));
    let kept = rig.block(&old, MIB * 80, 1).unwrap();
    let own = rig.block(&new, MIB * 120, 2).unwrap();
    // The region that is short is the first one of the list.
    let handler = rig.regions.on_pressure(&rig.allocator, &["new", "old"]).unwrap();
    let more = rig.block(&new, MIB * 100, 3).unwrap();
    assert_eq!(rig.phases(), phases([("new", Phase::Awake), ("old", Phase::Asleep)]));
    let refused = rig.block(&new, MIB * 100, 4).unwrap_err();
    assert!(matches!(refused, AllocError::OutOfMemory(_)), "{refused:?}");
    assert_eq!(new.status().phase, Phase::Awake);
    rig.holds(&own, 2);
    rig.holds(&more, 3);
    new.allocator().free(more, rig.stream).unwrap();
    rig.regions.resume(&["old"]).unwrap();
    rig.holds(&kept, 1);
    rig.allocator.unregister(handler);
    assert!(rig.block(&new, MIB * 100, 5).is_err(), "the registration ended");
    assert_eq!(rig.card.hazards(), []);
}

#[test]
fn regions_that_are_created_later_and_pools_beside_them_make_regions_sleep_too() {
    let rig = rig(Config::default());
    let old = rig.region("old");
    let kept = rig.block(&old, MIB * 150, 1).unwrap();
    rig.regions.on_pressure(&rig.allocator, &["old"]).unwrap();
    let beside = rig.allocator.create_pool("beside").unwrap();
    let first = beside.malloc(MIB * 150, rig.stream).unwrap();
    assert_eq!(old.status().phase, Phase::Asleep);
    beside.free(first, rig.stream).unwrap();
    rig.regions.resume(&["old"]).unwrap();
    let later = rig.region("later");
    let second = rig.block(&later, MIB * 150, 2).unwrap();
    assert_eq!(old.status().phase, Phase::Asleep);
    later.allocator().free(second, rig.stream).unwrap();
    rig.regions.resume(&["old"]).unwrap();
    rig.holds(&kept, 1);
}

#[test]
fn a_limit_of_the_group_makes_regions_sleep_too() {
    let rig = rig(Config { limit: Some(Bytes::mib(128)), ..Config::default() });
    let [new, old] = ["new", "old"].map(|tag| rig.region(tag));
    let kept = rig.block(&old, MIB * 80, 1).unwrap();
    rig.regions.on_pressure(&rig.allocator, &["old"]).unwrap();
    let taken = rig.block(&new, MIB * 100, 2).unwrap();
    assert_eq!(old.status().phase, Phase::Asleep);
    new.allocator().free(taken, rig.stream).unwrap();
    rig.regions.resume(&["old"]).unwrap();
    rig.holds(&kept, 1);
}

#[test]
fn a_request_that_would_fail_all_the_same_makes_no_region_sleep() {
    for limit in [None, Some(Bytes::mib(192))] {
        let rig = rig(Config { limit, ..Config::default() });
        let [a, b] = ["a", "b"].map(|tag| rig.region(tag));
        let blocks = [(&a, 1), (&b, 2)].map(|(region, byte)| rig.block(region, MIB * 60, byte));
        let beside = rig.allocator.malloc(MIB * 60, rig.stream).unwrap();
        rig.regions.on_pressure(&rig.allocator, &["a", "b"]).unwrap();
        let most = limit.unwrap_or(MIB * 256) - MIB * 60;
        for len in [most + MIB * 2, Bytes::mib(300), Bytes::tib(1)] {
            assert!(rig.allocator.malloc(len, rig.stream).is_err(), "{len}");
            assert_eq!(rig.phases(), phases([("a", Phase::Awake), ("b", Phase::Awake)]), "{len}");
        }
        // One that needs all of it is served.
        let all = rig.allocator.malloc(most, rig.stream).unwrap();
        assert_eq!(rig.phases(), phases([("a", Phase::Asleep), ("b", Phase::Asleep)]));
        for block in [beside, all] {
            rig.allocator.free(block, rig.stream).unwrap();
        }
        rig.allocator.trim(Bytes::ZERO).unwrap();
        rig.regions.resume(&["a", "b"]).unwrap();
        for (block, byte) in blocks.iter().zip([1, 2]) {
            rig.holds(block.as_ref().unwrap(), byte);
        }
    }
}

#[test]
fn a_resume_that_finds_no_memory_makes_others_of_the_list_sleep() {
    let rig = rig(Config::default());
    let [a, b] = ["a", "b"].map(|tag| rig.region(tag));
    rig.regions.on_pressure(&rig.allocator, &["a", "b"]).unwrap();
    let of_a = rig.block(&a, MIB * 180, 1).unwrap();
    let of_b = rig.block(&b, MIB * 170, 2).unwrap();
    for round in 0..3 {
        assert_eq!(a.status().phase, Phase::Asleep, "round {round}");
        rig.holds(&of_b, 2);
        rig.regions.resume(&["a"]).unwrap();
        assert_eq!(rig.phases(), phases([("a", Phase::Awake), ("b", Phase::Asleep)]));
        rig.holds(&of_a, 1);
        rig.regions.resume(&["b"]).unwrap();
    }
    assert_eq!(rig.card.hazards(), []);
}

#[test]
fn a_resume_that_nothing_helps_fails_and_sleeps_on() {
    let rig = rig(Config::default());
    let [a, b] = ["a", "b"].map(|tag| rig.region(tag));
    let of_a = rig.block(&a, MIB * 100, 1).unwrap();
    let of_b = rig.block(&b, MIB * 20, 2).unwrap();
    rig.regions.pause(&["a"], PauseOptions::default()).unwrap();
    rig.regions.on_pressure(&rig.allocator, &["a", "b"]).unwrap();
    let outside = rig.allocator.malloc(MIB * 220, rig.stream).unwrap();
    let refused = rig.regions.resume(&["a"]).unwrap_err();
    assert!(matches!(refused, RegionError::Memory { .. }), "{refused}");
    assert_eq!(a.status().phase, Phase::Asleep);
    rig.allocator.free(outside, rig.stream).unwrap();
    rig.regions.resume(&["a", "b"]).unwrap();
    rig.holds(&of_a, 1);
    rig.holds(&of_b, 2);
}

/// More memory than the card has, in regions that four threads allocate in and resume.
#[test]
fn threads_that_press_each_other_end_and_leave_every_pool_consistent() {
    let rig = rig(Config::default());
    let tags = ["t0", "t1", "t2", "t3"];
    let regions = tags.map(|tag| rig.region(tag));
    // So whichever thread runs first makes the regions of others sleep.
    let kept = [0, 1, 2, 3].map(|at| rig.block(&regions[at], MIB * 60, at as u8 + 1).unwrap());
    rig.regions.on_pressure(&rig.allocator, &tags).unwrap();
    let slept = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (number, region) in regions.iter().enumerate() {
            let (rig, slept) = (&rig, &slept);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(number as u64);
                let mut blocks: Vec<Allocation> = Vec::new();
                for _ in 0..120 {
                    match region.allocator().malloc(MIB * random.u64(8..48), rig.stream) {
                        Ok(block) => blocks.push(block),
                        Err(AllocError::OutOfMemory(_)) => {}
                        Err(error) => {
                            let text = error.to_string();
                            assert!(text.contains("sleeps") || text.contains("asleep"), "{text}");
                            slept.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    while blocks.len() > 6 || random.u8(..) < 40 && !blocks.is_empty() {
                        let block = blocks.swap_remove(random.usize(..blocks.len()));
                        region.allocator().free(block, rig.stream).unwrap();
                    }
                    if random.bool() {
                        // Others may need the memory: it sleeps on then.
                        let _ = rig.regions.resume(&[tags[number]]);
                    }
                }
                for block in blocks {
                    region.allocator().free(block, rig.stream).unwrap();
                }
            });
        }
    });
    assert!(slept.into_inner() > 0, "no region slept: the test tests nothing");
    for (region, (tag, block)) in regions.iter().zip(tags.iter().zip(kept)) {
        // Of those before only this much is left, and others sleep for this one.
        if let Err(error) = rig.regions.resume(&[tag]) {
            panic!("{tag}: {error}\n{:#?}", rig.regions.status());
        }
        rig.holds(&block, tag.as_bytes()[1] - b'0' + 1);
        region.allocator().free(block, rig.stream).unwrap();
        region.allocator().audit().unwrap();
        assert_eq!(region.allocator().stats().unwrap().live, Bytes::ZERO);
    }
    assert_eq!(rig.card.hazards(), []);
}

// --- How many handles the memory of a region has: each costs driver calls in a pause and in a resume ---

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
