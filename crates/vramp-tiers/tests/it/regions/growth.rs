//! Regions: how pauses and resumes grow, host memory that is freed meanwhile, and moves by threads at random.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use vramp_host::{BlockIo, DirectFile, DiskError, IoRequest};
use vramp_tiers::disk::{Checksum, DiskConfig};
use vramp_tiers::{DiskStore, ReservationManager, SpaceConfig, SpaceId};

use super::disk::{DiskRig, ON_DISK, disk_rig};
use super::*;

// --- How pauses and resumes grow ---

/// A disk that keeps nothing and counts calls.
#[derive(Default)]
struct Counted {
    calls: AtomicU64,
    bytes: AtomicU64,
}

impl BlockIo for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }

    fn depth(&self) -> usize {
        16
    }

    fn submit(&self, batch: Vec<IoRequest>) {
        for request in batch {
            let len = request.span.len();
            self.calls.fetch_add(1, Ordering::Relaxed);
            self.bytes.fetch_add(len.count(), Ordering::Relaxed);
            (request.done)(Ok(len));
        }
    }

    fn preallocate(&self, _: &DirectFile, _: Bytes) -> Result<(), DiskError> {
        Ok(())
    }
}

/// Longer than what slabs have, so that each block is a piece of its own.
const PIECE: Bytes = Bytes::mib(2);

/// Calls of a pause and a resume, with so many pieces of contents that have no neighbours.
struct Counts {
    copies: u64,
    driver: u64,
    disk: u64,
    bytes: Bytes,
}

fn count(pieces: usize, backup: Backup) -> Counts {
    let card = Arc::new(Simulator::builder().memory(Bytes::gib(64)).build());
    let driver: Arc<dyn Driver> = card.clone();
    let allocator = Allocator::new(driver.clone(), Config::default()).unwrap();
    let stream = allocator.create_stream().unwrap();
    let host = HostPool::new(&space(Bytes::gib(1)), BLOCKS, [driver.clone()]).unwrap();
    let config = MoverConfig { step: MIB * 4, steps_in_flight: 4, staging_pieces: 4 };
    let regions = Regions::new(Mover::new(driver, &host, config).unwrap());
    let disk = SpaceId::disk(0);
    let manager = ReservationManager::new([(disk, SpaceConfig::disk(Bytes::gib(32)))]).unwrap();
    let (dir, io) = (tempfile::tempdir().unwrap(), Arc::new(Counted::default()));
    let config = DiskConfig { checksum: Checksum::Off, ..DiskConfig::default() };
    let on_disk = manager.space(disk).unwrap();
    let store = DiskStore::open_with(dir.path(), config, &on_disk, Arc::<Counted>::clone(&io));
    regions.set_disk(Some(Arc::new(store.unwrap())));
    let options = RegionOptions { backup, read_only: false, graph_pins: true };
    let region = regions.region(&allocator, "weights", options).unwrap();
    let malloc = |_| region.allocator().malloc(PIECE, stream).unwrap();
    let mut blocks: Vec<Allocation> = (0..pieces * 2).map(malloc).collect();
    blocks.sort_by_key(Allocation::addr);
    for block in blocks.into_iter().step_by(2) {
        region.allocator().free(block, stream).unwrap();
    }
    let (calls, copies) = (card.calls(), card.calls_of(Call::CopyToHost));
    regions.pause(&["weights"], PauseOptions::default()).unwrap();
    let bytes = region.status().copied;
    regions.resume(&["weights"]).unwrap();
    assert_eq!(bytes, PIECE * pieces as u64, "one piece for each block");
    Counts {
        copies: card.calls_of(Call::CopyToHost) - copies,
        driver: card.calls() - calls,
        disk: io.calls.load(Ordering::Relaxed),
        bytes: Bytes::new(io.bytes.load(Ordering::Relaxed)),
    }
}

#[test]
fn calls_grow_with_the_pieces_of_contents_and_no_faster() {
    // Pinned memory of the host is real, so there are fewer pieces.
    let sizes = [(Backup::Host, &[10, 100, 300][..]), (Backup::Disk, &[10, 100, 1_000, 10_000])];
    for (backup, sizes) in sizes {
        let mut last: Option<(u64, Counts)> = None;
        for &pieces in sizes {
            let (now, many) = (count(pieces, backup), pieces as u64);
            // A piece lies in two steps, or in several blocks of a buffer.
            assert!((many..=many * 4).contains(&now.copies), "{} of {pieces}", now.copies);
            assert!(now.driver <= many * 20 + 60, "{} driver calls for {pieces}", now.driver);
            // Each byte is written and read once, in disk calls of 1 MiB.
            let on_disk = if backup == Backup::Disk { PIECE * many * 2 } else { Bytes::ZERO };
            assert_eq!((now.bytes, Bytes::mib(now.disk)), (on_disk, on_disk));
            if let Some((fewer, before)) = last {
                let most = before.driver * (many / fewer) + 60;
                assert!(now.driver <= most, "{} driver calls, at most {most}", now.driver);
            }
            last = Some((many, now));
        }
    }
}

#[test]
fn hundreds_of_pauses_leave_no_file_and_no_host_memory() {
    let disk = disk_rig(Bytes::mib(64));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let read_only = rig.region("read only", RegionOptions { read_only: true, ..ON_DISK });
    let one = rig.block(&region, MIB + Bytes::kib(3), 1);
    let two = rig.block(&read_only, MIB * 2, 2);
    let mut steady = 0;
    for round in 0..vramp_testing::cases(300) {
        rig.regions.pause(&["weights", "read only"], PauseOptions::default()).unwrap();
        if round % 3 == 0 {
            rig.regions.prefetch("weights").unwrap();
        }
        rig.regions.resume(&["weights", "read only"]).unwrap();
        assert_eq!(rig.host.space().total(), Bytes::ZERO);
        assert_eq!(disk.space.total(), MIB * 2, "the copy of the read-only region");
        let extents = disk.store.stats().extents;
        match round {
            10 => steady = extents.backings,
            11.. => assert!(extents.backings <= steady, "{extents:?}"),
            _ => {}
        }
    }
    rig.holds(&one, 1);
    rig.holds(&two, 2);
    let discard = PauseOptions { discard: true, ..PauseOptions::default() };
    rig.regions.pause(&["read only"], discard).unwrap();
    disk.assert_empty();
}

// --- Host memory of blocks that are freed while their region sleeps ---

#[test]
fn what_is_freed_while_a_region_sleeps_leaves_the_host_and_the_rest_is_whole() {
    for keep in [0, 20, 60] {
        let rig = rig(Bytes::mib(128));
        let region = rig.region("weights", RegionOptions::default());
        let mut blocks: Vec<Option<Allocation>> =
            (1..=12).map(|n| Some(rig.block(&region, MIB * 5 + Bytes::kib(n), n as u8))).collect();
        pause(&rig, "weights", MIB * keep).unwrap();
        let before = region.status().on_host;
        for nth in [0, 3, 4, 7, 8, 9, 11] {
            let block = blocks[nth].take().unwrap();
            region.allocator().free(block, rig.stream).unwrap();
        }
        rig.regions.reclaim();
        let after = region.status().on_host;
        let most = if keep == 0 { MIB * 28 } else { before };
        assert!(after < most.max(MIB), "{after} of {before} stay with {keep} MiB on the card");
        assert_eq!(rig.host.space().total(), after);
        let mut bytes = vec![0; 5 << 20];
        for (nth, block) in blocks.iter().enumerate() {
            let Some(block) = block else { continue };
            match rig.regions.read_backup(block.addr(), &mut bytes) {
                Ok(()) => assert!(vramp_testing::is_filled(&bytes, nth as u8 + 1)),
                Err(error) => assert!(keep > 0, "{error}"),
            }
        }
        // What stays on the card leaves too, behind what was moved together.
        pause(&rig, "weights", Bytes::ZERO).unwrap();
        rig.regions.resume(&["weights"]).unwrap();
        for (nth, block) in blocks.into_iter().enumerate() {
            let Some(block) = block else { continue };
            rig.holds(&block, nth as u8 + 1);
            region.allocator().free(block, rig.stream).unwrap();
        }
        assert_eq!(rig.host.space().total(), Bytes::ZERO);
        assert_eq!(rig.card.hazards(), []);
    }
}

#[test]
fn a_copy_of_which_all_was_freed_is_dropped_wherever_it_is() {
    for backup in [Backup::Host, Backup::Disk] {
        let disk = disk::disk_rig(Bytes::mib(64));
        let rig = &disk.rig;
        let options = RegionOptions { backup, ..RegionOptions::default() };
        let region = rig.region("moments", options);
        let blocks: Vec<Allocation> = (1..=4).map(|n| rig.block(&region, MIB * 3, n)).collect();
        pause(rig, "moments", Bytes::ZERO).unwrap();
        for block in blocks {
            assert!(region.keeps_copy_asleep());
            let len = block.len();
            region.allocator().free(block, rig.stream).unwrap();
            region.note_free(len);
        }
        let RegionStatus { on_host, on_disk, phase, .. } = region.status();
        assert_eq!((on_host, on_disk, phase), (Bytes::ZERO, Bytes::ZERO, Phase::Asleep));
        rig.regions.resume(&["moments"]).unwrap();
        let block = rig.block(&region, MIB * 3, 9);
        rig.holds(&block, 9);
        region.allocator().free(block, rig.stream).unwrap();
    }
}

#[test]
fn frees_copy_at_most_three_bytes_for_each_that_they_free() {
    let rig = rig(Bytes::mib(128));
    let region = rig.region("weights", RegionOptions::default());
    let mut blocks: Vec<Allocation> =
        (0..64).map(|n| rig.block(&region, MIB * 2 - Bytes::kib(64), n)).collect();
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    let (mut before, mut moved, mut freed) = (region.status().on_host, Bytes::ZERO, Bytes::ZERO);
    while let Some(block) = blocks.pop() {
        let len = block.len();
        region.allocator().free(block, rig.stream).unwrap();
        region.note_free(len);
        freed += len;
        let now = region.status().on_host;
        if now < before {
            moved += now;
        }
        before = now;
        let held = MIB * 2 * blocks.len() as u64;
        assert!(now <= held + held, "{now} on the host for {held}");
    }
    assert!(moved <= freed * 3, "{moved} moved for {freed}");
    assert_eq!((before, rig.host.space().total()), (Bytes::ZERO, Bytes::ZERO));
}

// --- Regions of all kinds, moved by threads at random ---

/// A region, its blocks and the bytes that they have to have. `None` for undefined contents.
struct Tagged {
    tag: String,
    options: RegionOptions,
    region: Arc<Region>,
    blocks: Vec<(Allocation, Option<u8>)>,
}

fn all_kinds(rig: &Rig) -> Vec<Mutex<Tagged>> {
    let mut made = Vec::new();
    for backup in [Backup::Disk, Backup::Host, Backup::None] {
        for read_only in [false, true] {
            let (tag, options) = (
                format!("{backup:?} {read_only}"),
                RegionOptions { backup, read_only, ..RegionOptions::default() },
            );
            let region = rig.region(&tag, options);
            made.push(Mutex::new(Tagged { tag, options, region, blocks: Vec::new() }));
        }
    }
    made
}

impl Tagged {
    fn check(&self, rig: &Rig) {
        for (block, byte) in &self.blocks {
            byte.iter().for_each(|&byte| rig.holds(block, byte));
        }
    }

    /// Compares what the copies have of the blocks of a region that sleeps as a whole.
    fn check_backup(&self, rig: &Rig) {
        for (block, byte) in
            self.blocks.iter().filter_map(|(block, byte)| byte.map(|is| (block, is)))
        {
            let mut bytes = vec![0; block.len().count() as usize];
            rig.regions.read_backup(block.addr(), &mut bytes).unwrap();
            assert!(vramp_testing::is_filled(&bytes, byte), "{block:?} is not all {byte}");
        }
    }

    fn lose(&mut self) {
        self.blocks.iter_mut().for_each(|(_, byte)| *byte = None);
    }

    /// Allocates, frees, writes and compares while the region is awake.
    fn work(&mut self, rig: &Rig, random: &mut fastrand::Rng) {
        for _ in 0..random.usize(..4) {
            match random.u32(..4) {
                0 | 1 if self.blocks.len() < 6 => {
                    let (len, byte) = (Bytes::new(random.u64(1..4 << 20)), random.u8(..));
                    self.blocks.push((rig.block(&self.region, len, byte), Some(byte)));
                }
                2 if !self.blocks.is_empty() => {
                    let (block, byte) = self.blocks.swap_remove(random.usize(..self.blocks.len()));
                    byte.iter().for_each(|&byte| rig.holds(&block, byte));
                    self.region.allocator().free(block, rig.stream).unwrap();
                }
                _ if !self.options.read_only => {
                    for (block, byte) in &mut self.blocks {
                        *byte = Some(random.u8(..));
                        rig.fill(block, byte.unwrap());
                    }
                }
                _ => {}
            }
        }
    }

    /// Puts the region to sleep in some way, and wakes it.
    fn move_about(&mut self, disk: &DiskRig, random: &mut fastrand::Rng) {
        let (rig, tag) = (&disk.rig, self.tag.as_str());
        if random.u32(..4) == 0 {
            rig.regions.clean(tag).unwrap();
        }
        let discard = random.u32(..12) == 0;
        let keep = MIB * random.u64(..10) * random.u64(..2);
        rig.regions.pause(&[tag], PauseOptions { keep, discard }).unwrap();
        if random.bool() {
            let _ = rig.regions.prefetch(tag);
        }
        if random.bool() {
            pause(rig, tag, Bytes::ZERO).unwrap();
            match self.options.backup {
                Backup::None => {}
                _ if discard => {}
                _ => self.check_backup(rig),
            }
        }
        if random.u32(..4) == 0 && !self.blocks.is_empty() {
            let (block, _) = self.blocks.swap_remove(random.usize(..self.blocks.len()));
            self.region.allocator().free(block, rig.stream).unwrap();
            if random.bool() {
                rig.regions.reclaim();
            }
        }
        rig.regions.resume(&[tag]).unwrap();
        if discard || self.options.backup == Backup::None {
            self.lose();
        }
    }
}

#[test]
fn threads_move_regions_of_all_kinds_and_every_byte_is_right() {
    let disk = disk_rig(Bytes::mib(128));
    let rig = &disk.rig;
    let kinds = all_kinds(rig);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (disk, kinds) = (&disk, &kinds);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                for step in 0..120 {
                    // All threads use all regions; status and idle calls are made beside moves.
                    let tagged = &kinds[random.usize(..kinds.len())];
                    if random.u32(..8) == 0 {
                        assert_eq!(disk.rig.regions.status().len(), kinds.len());
                    }
                    let mut tagged = tagged.lock().unwrap();
                    tagged.work(&disk.rig, &mut random);
                    tagged.move_about(disk, &mut random);
                    if step % 3 == 0 {
                        tagged.check(&disk.rig);
                    }
                }
            });
        }
    });
    for tagged in &kinds {
        let tagged = tagged.lock().unwrap();
        tagged.check(rig);
        tagged.region.allocator().audit().unwrap();
        let discard = PauseOptions { discard: true, ..PauseOptions::default() };
        rig.regions.pause(&[&tagged.tag], discard).unwrap();
    }
    disk.assert_empty();
}

/// Threads call on the same region with no lock of their own.
#[test]
fn threads_that_move_one_region_at_once_lose_no_byte() {
    let disk = disk_rig(Bytes::mib(128));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let blocks: Vec<Allocation> = (1..=8).map(|n| rig.block(&region, MIB * 3, n)).collect();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                for _ in 0..60 {
                    match random.u32(..6) {
                        0 | 1 => pause(rig, "weights", MIB * random.u64(..20)).unwrap(),
                        2 => rig.regions.prefetch("weights").unwrap(),
                        3 => rig.regions.clean("weights").unwrap(),
                        4 => rig.regions.reclaim(),
                        _ => rig.regions.resume(&["weights"]).unwrap(),
                    }
                }
            });
        }
    });
    rig.regions.resume(&["weights"]).unwrap();
    (1..).zip(&blocks).for_each(|(byte, block)| rig.holds(block, byte));
    drop(blocks);
    let discard = PauseOptions { discard: true, ..PauseOptions::default() };
    rig.regions.pause(&["weights"], discard).unwrap();
    disk.assert_empty();
}

/// Repeats a call of the test itself until no failure is injected into it.
fn insist<T, E: std::fmt::Debug>(mut call: impl FnMut() -> Result<T, E>) -> T {
    let mut tries = (0..1000).map(|_| call());
    tries.find(Result::is_ok).expect("failures end").expect("it is the one that was found")
}

/// Any call may fail, also several in a row. What a call left undone, a later one goes on with.
#[test]
fn calls_that_fail_at_random_lose_no_byte_and_unmap_nothing_in_use() {
    for seed in vramp_testing::seeds(6) {
        let rig = rig(Bytes::mib(128));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let rig = &rig;
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed * 4 + thread);
                    let tag = format!("tag {thread}");
                    let region = insist(|| {
                        rig.regions.region(&rig.allocator, &tag, RegionOptions::default())
                    });
                    let mut blocks: Vec<(Allocation, u8)> = Vec::new();
                    for _ in 0..60 {
                        // A failed move may leave the region asleep.
                        let is_awake = region.status().phase == Phase::Awake;
                        // Two calls in a row, or so many that several moves meet them.
                        let several = FaultPlan::several(random.u64(1..40), random.u64(2..8));
                        rig.card.set_faults(several.with_code(800));
                        match random.u32(..7) {
                            0 | 1 if is_awake && blocks.len() < 5 => {
                                let (len, byte) =
                                    (Bytes::new(random.u64(1..3 << 20)), random.u8(..));
                                let Ok(block) = region.allocator().malloc(len, rig.stream) else {
                                    continue;
                                };
                                let queue = rig.allocator.stream(rig.stream).unwrap();
                                let range = AddrRange::new(block.addr(), block.len());
                                insist(|| rig.card.fill(queue, range, byte));
                                blocks.push((block, byte));
                            }
                            2 if !blocks.is_empty() => {
                                let (block, _) = blocks.swap_remove(random.usize(..blocks.len()));
                                // One whose free failed stays allocated, and is not looked at again.
                                let _ = region.allocator().free(block, rig.stream);
                            }
                            3 => drop(rig.regions.resume(&[&tag])),
                            4 => rig.regions.reclaim(),
                            _ => drop(pause(rig, &tag, MIB * random.u64(..8))),
                        }
                    }
                    insist(|| rig.regions.resume(&[&tag]));
                    for (block, byte) in &blocks {
                        let queue = rig.allocator.stream(rig.stream).unwrap();
                        insist(|| rig.card.synchronize_stream(queue));
                        let bytes =
                            rig.card.peek(AddrRange::new(block.addr(), block.len())).unwrap();
                        assert!(
                            vramp_testing::is_filled(&bytes, *byte),
                            "{block:?} is not all {byte}"
                        );
                    }
                    insist(|| region.allocator().audit());
                });
            }
        });
        assert_eq!(rig.card.device_loss(), None);
        assert_eq!(rig.card.hazards(), []);
    }
}
