//! Regions with a backup on a disk.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::common::faulty::{EIO, Fault, Faulty};
use tempfile::TempDir;
use vramp_core::DeviceAddr;
use vramp_host::Direction;
use vramp_testing::fail_each_call;
use vramp_tiers::disk::{Checksum, DiskConfig, DiskTierError, FileNames};
use vramp_tiers::host::HostPoolError;
use vramp_tiers::movers::MoveError;
use vramp_tiers::{DiskStore, MemorySpace, ReservationManager, SpaceConfig, SpaceId};

pub const ON_DISK: RegionOptions =
    RegionOptions { backup: Backup::Disk, read_only: false, graph_pins: true };

/// A card and a host as in [`rig`], above a disk of 256 MiB.
pub struct DiskRig {
    pub rig: Rig,
    pub faulty: Arc<Faulty>,
    pub store: Arc<DiskStore>,
    pub space: MemorySpace,
    pub dir: TempDir,
}

pub fn disk_rig(host: Bytes) -> DiskRig {
    let disk = SpaceId::disk(0);
    let manager = ReservationManager::new([(disk, SpaceConfig::disk(Bytes::mib(256)))]).unwrap();
    let space = manager.space(disk).unwrap();
    let config = DiskConfig {
        file_size: Bytes::mib(64),
        depth: 16,
        checksum: Checksum::Crc32,
        names: FileNames::Shown,
        ..DiskConfig::default()
    };
    let (dir, faulty, rig) = (tempfile::tempdir().unwrap(), Faulty::new(), rig(host));
    let store = DiskStore::open_with(dir.path(), config, &space, Arc::<Faulty>::clone(&faulty));
    let store = Arc::new(store.unwrap());
    rig.regions.set_disk(Some(Arc::clone(&store)));
    DiskRig { rig, faulty, store, space, dir }
}

impl DiskRig {
    /// Waits until there is no file. A thread of the disk engine may have one open for a moment.
    fn wait_for_no_file(&self) {
        for _ in 0..1_000_000 {
            if std::fs::read_dir(self.dir.path()).unwrap().count() == 0 {
                return;
            }
            vramp_testing::moment();
        }
        panic!("there are files in {}", self.dir.path().display());
    }

    /// Checks that neither the disk nor the host has anything.
    pub fn assert_empty(&self) {
        self.wait_for_no_file();
        self.assert_nothing_stored();
    }

    /// As [`assert_empty`](DiskRig::assert_empty), where the disk may have places that failed.
    fn assert_nothing_stored(&self) {
        self.store.audit().unwrap();
        assert_eq!(self.space.total(), Bytes::ZERO);
        assert_eq!(self.rig.host.space().total(), Bytes::ZERO);
        assert_eq!(self.rig.card.hazards(), []);
    }

    fn reads(&self) -> u64 {
        self.store.stats().reads.transfers
    }

    fn writes(&self) -> u64 {
        self.store.stats().writes.transfers
    }
}

/// Blocks of some MiB and some KiB, full of 1, 2 and so on.
fn blocks(rig: &Rig, region: &Region, count: u8) -> Vec<Allocation> {
    let len = |n: u8| MIB * u64::from(n % 5 + 1) + Bytes::kib(u64::from(n));
    (1..=count).map(|n| rig.block(region, len(n), n)).collect()
}

fn hold(rig: &Rig, blocks: &[Allocation]) {
    (1..).zip(blocks).for_each(|(byte, block)| rig.holds(block, byte));
}

#[test]
fn contents_go_to_the_disk_through_few_blocks_and_come_back() {
    let disk = disk_rig(Bytes::mib(32));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let blocks = blocks(rig, &region, 24);
    let used = rig.on_card();
    for _ in 0..3 {
        rig.host.space().reset_peaks();
        pause(rig, "weights", Bytes::ZERO).unwrap();
        let status = region.status();
        assert_eq!((status.on_card, status.on_host), Default::default());
        assert!(status.on_disk > MIB * 60 && status.on_disk == disk.space.total(), "{status:?}");
        assert_eq!(status.copied, status.to_copy);
        assert!(rig.on_card() + MIB * 60 < used);
        rig.regions.resume(&["weights"]).unwrap();
        hold(rig, &blocks);
        assert!(rig.host.space().peak() <= MIB * 16, "four pieces of staging of 4 MiB");
        assert_eq!(region.status().on_disk, Bytes::ZERO);
        disk.assert_empty();
    }
}

#[test]
fn copies_go_on_while_the_disk_writes_and_no_memory_is_released_before_it_has() {
    let disk = disk_rig(Bytes::mib(32));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let blocks = blocks(rig, &region, 24);
    let (used, copies) = (rig.on_card(), rig.copies_out());
    disk.faulty.close_gate();
    std::thread::scope(|scope| {
        let paused = scope.spawn(|| pause(rig, "weights", Bytes::ZERO));
        // Four buffers leave the card, and none of them is on the disk.
        while rig.host.space().total() < MIB * 16 || rig.copies_out() < copies + 4 {
            vramp_testing::moment();
        }
        assert_eq!((rig.on_card(), disk.writes()), (used, 0));
        assert_eq!(region.status().copied, Bytes::ZERO);
        disk.faulty.open_gate();
        paused.join().unwrap().unwrap();
    });
    rig.regions.resume(&["weights"]).unwrap();
    hold(rig, &blocks);
}

#[test]
fn a_disk_copy_of_a_read_only_region_is_written_once_and_a_clean_one_before_the_pause() {
    let disk = disk_rig(Bytes::mib(32));
    let rig = &disk.rig;
    let weights = rig.region("weights", RegionOptions { read_only: true, ..ON_DISK });
    let cache = rig.region("cache", ON_DISK);
    let one = blocks(rig, &weights, 8);
    let two = rig.block(&cache, MIB * 10, 77);
    pause(rig, "weights", Bytes::ZERO).unwrap();
    let written = disk.writes();
    for _ in 0..3 {
        rig.regions.resume(&["weights"]).unwrap();
        assert!(weights.status().on_disk > Bytes::ZERO, "the copy stays valid");
        pause(rig, "weights", Bytes::ZERO).unwrap();
    }
    assert_eq!(disk.writes(), written);
    rig.regions.clean("cache").unwrap();
    let written = disk.writes();
    let copies = rig.copies_out();
    pause(rig, "cache", Bytes::ZERO).unwrap();
    assert_eq!((disk.writes(), rig.copies_out()), (written, copies));
    rig.regions.resume(&["cache", "weights"]).unwrap();
    hold(rig, &one);
    rig.holds(&two, 77);
    // What sleeps as a discarded region has no copy any more.
    let discard = PauseOptions { discard: true, ..PauseOptions::default() };
    rig.regions.pause(&["weights"], discard).unwrap();
    disk.assert_empty();
}

#[test]
fn deeper_pauses_append_to_the_copy_on_the_disk() {
    let disk = disk_rig(Bytes::mib(32));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let blocks = blocks(rig, &region, 24);
    let (mut written, mut deeper) = (Bytes::ZERO, 0);
    for keep in (0..20).rev() {
        let keep = MIB * 4 * keep;
        pause(rig, "weights", keep).unwrap();
        let RegionStatus { on_card, on_disk, .. } = region.status();
        assert!(on_card <= keep && on_disk >= written);
        deeper += usize::from(on_disk > written);
        written = on_disk;
    }
    assert!(deeper > 2, "{deeper} pauses wrote");
    rig.regions.resume(&["weights"]).unwrap();
    hold(rig, &blocks);
    disk.assert_empty();
}

#[test]
fn without_a_disk_a_region_is_refused_and_a_pause_changes_nothing() {
    let disk = disk_rig(Bytes::mib(32));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let blocks = blocks(rig, &region, 4);
    rig.regions.set_disk(None);
    let refused = rig.regions.region(&rig.allocator, "other", ON_DISK);
    assert!(matches!(refused, Err(RegionError::NoDisk { .. })), "{refused:?}");
    let refused = pause(rig, "weights", Bytes::ZERO);
    assert!(matches!(refused, Err(RegionError::NoDisk { .. })), "{refused:?}");
    assert_eq!(region.status().phase, Phase::Awake);
    hold(rig, &blocks);
}

#[test]
fn a_copy_stays_in_the_store_that_it_was_written_to() {
    let disk = disk_rig(Bytes::mib(32));
    let other = disk_rig(Bytes::mib(32));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let blocks = blocks(rig, &region, 12);
    pause(rig, "weights", MIB * 8).unwrap();
    rig.regions.set_disk(Some(Arc::clone(&other.store)));
    pause(rig, "weights", Bytes::ZERO).unwrap();
    assert_eq!((other.space.total(), region.status().on_disk), (Bytes::ZERO, disk.space.total()));
    rig.regions.resume(&["weights"]).unwrap();
    hold(rig, &blocks);
    pause(rig, "weights", Bytes::ZERO).unwrap();
    assert_eq!((disk.space.total(), region.status().on_disk), (Bytes::ZERO, other.space.total()));
    rig.regions.resume(&["weights"]).unwrap();
    hold(rig, &blocks);
}

#[test]
fn a_full_disk_leaves_a_region_awake_with_its_bytes() {
    let disk = disk_rig(Bytes::mib(32));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let blocks = blocks(rig, &region, 24);
    let is_full = |refused: Result<(), RegionError>| match refused {
        Err(RegionError::Copy { error: MoveError::Disk { error, .. }, .. }) => {
            matches!(error, DiskTierError::Full(_) | DiskTierError::Disk(_))
        }
        other => panic!("{other:?}"),
    };
    // The filesystem is full at once, and the budget in the middle.
    disk.faulty.room.store(0, Ordering::Relaxed);
    assert!(is_full(pause(rig, "weights", Bytes::ZERO)));
    disk.faulty.room.store(u64::MAX, Ordering::Relaxed);
    hold(rig, &blocks);
    let most = disk.space.charge(MIB * 200).unwrap();
    assert!(is_full(pause(rig, "weights", Bytes::ZERO)));
    assert_eq!(region.status().phase, Phase::Awake);
    hold(rig, &blocks);
    // Some of it fits. What is asleep then stays safe when no more does.
    pause(rig, "weights", MIB * 40).unwrap();
    assert!(is_full(pause(rig, "weights", Bytes::ZERO)));
    assert_eq!(region.status().phase, Phase::Asleep);
    assert!(is_full(rig.regions.clean("weights").and_then(|()| pause(rig, "weights", MIB))));
    drop(most);
    pause(rig, "weights", Bytes::ZERO).unwrap();
    rig.regions.resume(&["weights"]).unwrap();
    hold(rig, &blocks);
    disk.assert_empty();
}

#[test]
fn without_a_block_for_staging_a_pause_and_a_resume_change_nothing() {
    let disk = disk_rig(Bytes::mib(8));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let blocks = blocks(rig, &region, 12);
    let is_full = |refused: Result<(), RegionError>| match refused {
        Err(RegionError::Copy { error: MoveError::Host(HostPoolError::Full(_)), .. }) => true,
        other => panic!("{other:?}"),
    };
    let taken = rig.host.allocate(MIB * 6).unwrap();
    assert!(is_full(pause(rig, "weights", Bytes::ZERO)));
    assert_eq!(region.status().phase, Phase::Awake);
    hold(rig, &blocks);
    // One piece of staging is enough.
    drop(taken);
    let taken = rig.host.allocate(MIB * 4).unwrap();
    pause(rig, "weights", Bytes::ZERO).unwrap();
    let more = rig.host.allocate(MIB * 2).unwrap();
    assert!(is_full(rig.regions.resume(&["weights"])));
    let status = region.status();
    assert_eq!((status.phase, status.on_card), (Phase::Asleep, Bytes::ZERO));
    drop(more);
    rig.regions.resume(&["weights"]).unwrap();
    hold(rig, &blocks);
    drop(taken);
    disk.assert_empty();
}

#[test]
fn regions_on_a_disk_sleep_under_pressure_as_far_as_needed() {
    let disk = disk_rig(Bytes::mib(32));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let blocks: Vec<Allocation> = (1..=40).map(|n| rig.block(&region, MIB * 4, n)).collect();
    let handler = rig.regions.on_pressure(&rig.allocator, &["weights"]).unwrap();
    let other = rig.allocator.malloc(MIB * 150, rig.stream).unwrap();
    let status = region.status();
    assert_eq!(status.phase, Phase::Asleep);
    assert!(status.on_disk >= MIB * 48 && status.on_card >= MIB * 32, "{status:?}");
    rig.allocator.free(other, rig.stream).unwrap();
    rig.regions.resume(&["weights"]).unwrap();
    hold(rig, &blocks);
    rig.allocator.unregister(handler);
    disk.assert_empty();
}

#[test]
fn what_was_read_ahead_is_copied_from_the_host() {
    let disk = disk_rig(Bytes::mib(128));
    let rig = &disk.rig;
    let region = rig.region("weights", RegionOptions { read_only: true, ..ON_DISK });
    let host = rig.region("host", RegionOptions::default());
    let blocks = blocks(rig, &region, 24);
    let one = rig.block(&host, MIB * 9, 99);
    rig.regions.prefetch("weights").unwrap();
    pause(rig, "weights", MIB * 30).unwrap();
    rig.regions.prefetch("weights").unwrap();
    let some = disk.reads();
    assert!(some > 0);
    rig.regions.pause(&["weights", "host"], PauseOptions::default()).unwrap();
    // The card is full: reading ahead needs none of it. The rest is read, and nothing twice.
    let other = rig.allocator.malloc(MIB * 240, rig.stream).unwrap();
    for tag in ["weights", "host", "weights"] {
        rig.regions.prefetch(tag).unwrap();
    }
    let status = region.status();
    assert!(status.on_host >= MIB * 60 && status.on_disk >= MIB * 60, "{status:?}");
    let all = disk.reads();
    assert!(all > some && all <= disk.writes() + 1, "{all} reads of {} pieces", disk.writes());
    assert!(rig.regions.resume(&["weights"]).is_err());
    rig.allocator.free(other, rig.stream).unwrap();
    rig.regions.resume(&["weights", "host"]).unwrap();
    assert_eq!(disk.reads(), all, "the resume reads nothing");
    hold(rig, &blocks);
    rig.holds(&one, 99);
    assert_eq!(rig.host.space().total(), Bytes::ZERO);
    assert_eq!(region.status().on_disk, disk.space.total());
}

#[test]
fn a_full_host_or_a_failed_read_ahead_changes_nothing() {
    let disk = disk_rig(Bytes::mib(24));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let blocks = blocks(rig, &region, 24);
    pause(rig, "weights", Bytes::ZERO).unwrap();
    let refused = rig.regions.prefetch("weights");
    let Err(RegionError::NoRoomToPrefetch { error, needed, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert!(needed > MIB * 60 && matches!(error, HostPoolError::Full(_)), "{error}");
    assert_eq!(region.status().on_host, Bytes::ZERO);
    rig.regions.resume(&["weights"]).unwrap();
    hold(rig, &blocks);
    let all = region.status().on_card;
    pause(rig, "weights", all - MIB * 16).unwrap();
    for nth in [1, 3, 9] {
        let mut calls = 0;
        disk.faulty.set(move |request| {
            calls += u64::from(request.direction == Direction::Read);
            if calls == nth { Fault::Fail(EIO) } else { Fault::None }
        });
        let failed = rig.regions.prefetch("weights");
        assert!(matches!(failed, Err(RegionError::Copy { .. })), "{failed:?}");
        assert_eq!(rig.host.space().total(), Bytes::ZERO);
    }
    disk.faulty.heal();
    rig.regions.prefetch("weights").unwrap();
    rig.regions.resume(&["weights"]).unwrap();
    hold(rig, &blocks);
    disk.assert_empty();
}

#[test]
fn bytes_of_a_sleeping_block_are_read_from_its_copy() {
    let disk = disk_rig(Bytes::mib(160));
    let rig = &disk.rig;
    let host = RegionOptions::default();
    let none = RegionOptions { backup: Backup::None, ..host };
    let regions = [("disk", ON_DISK), ("host", host), ("none", none)];
    let regions = regions.map(|(tag, options)| rig.region(tag, options));
    let [on_disk, on_host, nowhere] = regions.each_ref().map(|region| blocks(rig, region, 12));
    let read = |address: DeviceAddr, len: usize| {
        let mut bytes = vec![0; len];
        let checked = rig.regions.check_backup(address, Bytes::new(len as u64));
        let read = rig.regions.read_backup(address, &mut bytes).map(|()| bytes);
        assert_eq!(format!("{:?}", checked.err()), format!("{:?}", read.as_ref().err()));
        read
    };
    let refused = read(on_disk[0].addr(), 8);
    assert!(matches!(refused, Err(RegionError::Awake { .. })), "{refused:?}");
    rig.regions.pause(&["disk", "host", "none"], PauseOptions::default()).unwrap();
    for prefetched in [false, true] {
        for (byte, block) in (1..).zip(&on_disk).chain((1..).zip(&on_host)) {
            let bytes = read(block.addr(), block.len().count() as usize).unwrap();
            assert!(vramp_testing::is_filled(&bytes, byte));
            assert_eq!(read(block.addr() + Bytes::new(77), 3).unwrap(), [byte; 3]);
        }
        assert!(disk.reads() > 0 && region_is_prefetched(&regions[0]) == prefetched);
        rig.regions.prefetch("disk").unwrap();
    }
    let refused = read(nowhere[0].addr(), 8);
    assert!(matches!(refused, Err(RegionError::NoBackup { .. })), "{refused:?}");
    // A block that was freed in its sleep was contents when the sleep began; other addresses were not.
    let outside = rig.allocator.malloc(MIB, rig.stream).unwrap();
    let behind = on_disk.iter().map(|block| block.addr() + block.len()).max().unwrap();
    for address in [outside.addr(), DeviceAddr::new(77), behind + MIB * 64] {
        let refused = read(address, 8);
        assert!(matches!(refused, Err(RegionError::NotContents { .. })), "{refused:?}");
    }
    rig.regions.resume(&["disk", "host"]).unwrap();
    // What is on the card still has no copy.
    pause(rig, "disk", MIB * 20).unwrap();
    let last = on_disk.iter().max_by_key(|block| block.addr()).unwrap();
    let refused = read(last.addr(), 8);
    assert!(matches!(refused, Err(RegionError::NoBackup { .. })), "{refused:?}");
    rig.regions.resume(&["disk"]).unwrap();
    hold(rig, &on_disk);
    hold(rig, &on_host);
}

fn region_is_prefetched(region: &Region) -> bool {
    !region.status().on_host.is_zero()
}

/// Pauses, deeper, cleans or reads ahead, and resumes. Returns how many of the calls failed.
fn go_round(rig: &Rig) -> usize {
    let results = [
        pause(rig, "weights", MIB * 6),
        rig.regions.prefetch("weights"),
        pause(rig, "weights", Bytes::ZERO),
        rig.regions.resume(&["weights"]),
        rig.regions.clean("weights"),
        // Its end is within a piece of the copy: a deeper pause that is undone reads from there on.
        pause(rig, "weights", MIB * 7),
        pause(rig, "weights", Bytes::ZERO),
        rig.regions.resume(&["weights"]),
        rig.regions.clean("weights"),
        pause(rig, "weights", MIB * 7),
        rig.regions.prefetch("weights"),
        pause(rig, "weights", Bytes::ZERO),
        rig.regions.prefetch("weights"),
        rig.regions.resume(&["weights"]),
    ];
    results.iter().filter(|result| result.is_err()).count()
}

#[test]
fn whichever_driver_call_fails_every_byte_comes_back_from_the_disk() {
    let mut failed = 0;
    fail_each_call(|nth| {
        let disk = disk_rig(Bytes::mib(64));
        let rig = &disk.rig;
        let region = rig.region("weights", ON_DISK);
        let blocks = blocks(rig, &region, 5);
        let before = rig.card.calls();
        rig.card.set_faults(FaultPlan::nth(nth));
        failed += go_round(rig);
        rig.card.set_faults(FaultPlan::none());
        let calls = rig.card.calls() - before;
        // A pause that failed at its beginning left the copy that was made ahead of it.
        pause(rig, "weights", Bytes::ZERO).unwrap();
        rig.regions.resume(&["weights"]).unwrap();
        hold(rig, &blocks);
        region.allocator().audit().unwrap();
        for block in blocks {
            region.allocator().free(block, rig.stream).unwrap();
        }
        disk.assert_empty();
        calls
    });
    assert!(failed > 5, "{failed} calls failed");
}

#[test]
fn whichever_disk_call_fails_every_byte_comes_back() {
    // One call fails, which a write survives elsewhere; or all do from some call on.
    for lasting in [false, true] {
        let mut failed = 0;
        fail_each_call(|nth| {
            let disk = disk_rig(Bytes::mib(64));
            let rig = &disk.rig;
            let region = rig.region("weights", ON_DISK);
            let blocks = blocks(rig, &region, 5);
            let calls = Arc::new(AtomicU64::new(0));
            let counted = Arc::clone(&calls);
            disk.faulty.set(move |_| {
                let call = counted.fetch_add(1, Ordering::Relaxed) + 1;
                let fails = nth > 0 && if lasting { call >= nth } else { call == nth };
                if fails { Fault::Fail(EIO) } else { Fault::None }
            });
            failed += go_round(rig);
            disk.faulty.heal();
            rig.regions.resume(&["weights"]).unwrap();
            hold(rig, &blocks);
            region.allocator().audit().unwrap();
            disk.assert_nothing_stored();
            calls.load(Ordering::Relaxed)
        });
        assert!(failed > 5, "{failed} calls failed");
    }
}

#[test]
fn a_disk_that_fails_while_a_pause_is_undone_leaves_a_region_that_sleeps_and_wakes_later() {
    let disk = disk_rig(Bytes::mib(32));
    let rig = &disk.rig;
    let region = rig.region("weights", ON_DISK);
    let blocks = blocks(rig, &region, 60);
    let released = Arc::new(Mutex::new(0));
    let calls = Arc::clone(&released);
    // The disk takes 100 MiB, so that memory was released, and then neither reads nor writes.
    disk.faulty.set(move |_| {
        *calls.lock().unwrap() += 1;
        if *calls.lock().unwrap() > 100 { Fault::Fail(EIO) } else { Fault::None }
    });
    let stuck = pause(rig, "weights", Bytes::ZERO);
    let Err(RegionError::Stuck { asleep, .. }) = stuck else { panic!("{stuck:?}") };
    assert_eq!((region.status().phase, region.status().asleep), (Phase::Asleep, asleep));
    assert!(!asleep.is_zero());
    assert!(rig.regions.resume(&["weights"]).is_err());
    disk.faulty.heal();
    rig.regions.resume(&["weights"]).unwrap();
    hold(rig, &blocks);
    disk.assert_nothing_stored();
}
