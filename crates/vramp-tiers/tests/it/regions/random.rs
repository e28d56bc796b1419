//! Regions of all kinds, moved by threads at random.

use std::sync::Mutex;

use super::disk::{DiskRig, ON_DISK, disk_rig};
use super::*;

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
