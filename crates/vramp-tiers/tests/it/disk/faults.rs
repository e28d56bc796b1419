//! Failing disks, full disks, flipped bits, file size limits, and processes that are killed while they write.

use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use vramp_host::{Direction, DiskErrorKind, IoChoice};
use vramp_tiers::disk::{ChargeTo, Checksum, DiskConfig, DiskTierError, SweepReport};

use super::faulty::{EINTR, EIO, ENOSPC, Fault, Faulty, fail, stumbling};
use super::*;
use crate::common::faulty::{self, Child};

// --- Failing disks, full disks, and flipped bits ---

fn faulty_world() -> (Arc<Faulty>, World) {
    let faulty = Faulty::new();
    let world = world_with(SMALL, Arc::<Faulty>::clone(&faulty));
    (faulty, world)
}

pub fn kind(error: &DiskTierError) -> DiskErrorKind {
    match error {
        DiskTierError::Disk(error) => error.kind,
        other => panic!("{other} is no error of a disk"),
    }
}

#[test]
fn short_interrupted_and_deferred_calls_are_made_again() {
    for choice in [IoChoice::Auto, IoChoice::Threads] {
        let faulty = Faulty::on(choice);
        let world = world_with(SMALL, Arc::<Faulty>::clone(&faulty));
        faulty.set(stumbling());
        for seed in vramp_testing::seeds(8) {
            let data = pattern(seed, 300_001);
            let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
            assert!(world.read(&stored).unwrap() == data);
        }
        world.assert_empty();
    }
}

#[test]
fn a_failed_write_gives_everything_back_and_leaves_others_whole() {
    let (faulty, world) = faulty_world();
    let data = pattern(1, 1 << 20);
    let kept = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    faulty.set(fail(Direction::Write, EIO));
    let error = world.store.write(&[zeros(128 << 10)], ChargeTo::Space).unwrap_err();
    assert_eq!(kind(&error), DiskErrorKind::Media);
    assert!(error.to_string().contains(".segment"), "{error}");
    world.assert_holds(Bytes::mib(1));
    // Both places of each of the two pieces are bad.
    let stats = world.store.stats();
    assert!(stats.extents.quarantined >= Bytes::kib(128), "{stats:?}");
    assert_eq!(stats.writes.failed, 1);
    faulty.heal();
    assert!(world.read(&kept).unwrap() == data);
}

#[test]
fn a_piece_that_cannot_be_written_goes_elsewhere_once_and_its_place_is_never_used_again() {
    let (faulty, world) = faulty_world();
    let bad: Arc<Mutex<Option<(PathBuf, Bytes)>>> = Arc::default();
    let first = Arc::clone(&bad);
    // The fifth piece meets a bad place, which stays bad.
    let mut calls = 0;
    faulty.set(move |request| {
        calls += 1;
        let mut bad = first.lock().unwrap();
        let place = Some((request.file.path().into(), request.offset));
        if calls == 5 {
            bad.clone_from(&place);
        }
        let hit = *bad == place && request.direction == Direction::Write;
        if hit { Fault::Fail(EIO) } else { Fault::None }
    });
    let data = pattern(1, 1 << 20);
    let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    assert!(stored.extents() > 1);
    world.assert_holds(Bytes::mib(1));
    assert!(world.read(&stored).unwrap() == data);
    let stats = world.store.stats();
    assert_eq!((stats.relocated_pieces, stats.media_errors), (1, 1));
    assert_eq!(stats.extents.quarantined, Bytes::kib(64));
    drop(stored);
    world.assert_empty();
    // All other blocks can be filled: the bad place is not reused, and its file stays.
    let most = world.space.available().count();
    let all = world.store.write(&[zeros(most)], ChargeTo::Space).unwrap();
    assert_eq!(world.store.stats().media_errors, 1);
    drop(all);
    world.store.trim();
    assert_eq!(world.store.stats().extents.backings, 1);
    world.store.audit().unwrap();
}

#[test]
fn a_failed_read_loses_nothing() {
    let (faulty, world) = faulty_world();
    let data = pattern(1, 1 << 20);
    let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    faulty.set(fail(Direction::Read, EIO));
    let error = world.read(&stored).unwrap_err();
    assert_eq!(kind(&error), DiskErrorKind::Media);
    faulty.heal();
    assert!(world.read(&stored).unwrap() == data);
    assert_eq!(world.store.stats().reads.failed, 1);
}

#[test]
fn a_disk_that_is_full_says_so_before_any_byte_is_entrusted_to_it() {
    let (faulty, world) = faulty_world();
    let data = pattern(1, 3 << 20);
    let kept = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    faulty.room.store(0, Ordering::Relaxed);
    let before = files(world.dir.path());
    let error = world.store.write(&[zeros(2 << 20)], ChargeTo::Space).unwrap_err();
    assert_eq!(kind(&error), DiskErrorKind::Full);
    world.assert_holds(Bytes::mib(3));
    assert_eq!(files(world.dir.path()), before);
    assert_eq!(world.store.stats().full_errors, 1);
    // Blocks that are already preallocated can still be written.
    let last = world.store.write(&[zeros(1 << 20)], ChargeTo::Space).unwrap();
    faulty.room.store(u64::MAX, Ordering::Relaxed);
    let more = world.store.write(&[zeros(2 << 20)], ChargeTo::Space).unwrap();
    assert!(world.read(&kept).unwrap() == data);
    drop((kept, last, more));
    world.assert_empty();
}

#[test]
fn the_last_of_a_disk_is_used_in_smaller_files() {
    let (faulty, world) = faulty_world();
    faulty.room.store((1 << 20) + 4096, Ordering::Relaxed);
    let stored = world.store.write(&[zeros(600 << 10)], ChargeTo::Space).unwrap();
    assert_eq!(world.store.stats().extents.capacity, Bytes::mib(1));
    drop(stored);
    world.assert_empty();
}

#[test]
fn blocks_that_run_out_amid_a_write_are_a_full_disk_and_not_a_bad_one() {
    let (faulty, world) = faulty_world();
    let mut calls = 0;
    faulty.set(move |_| {
        calls += 1;
        if calls == 7 { Fault::Fail(ENOSPC) } else { Fault::None }
    });
    let error = world.store.write(&[zeros(1 << 20)], ChargeTo::Space).unwrap_err();
    assert_eq!(kind(&error), DiskErrorKind::Full);
    world.assert_empty();
    let stats = world.store.stats();
    assert_eq!((stats.full_errors, stats.extents.quarantined), (1, Bytes::ZERO));
}

#[test]
fn random_failures_never_lose_what_was_acknowledged() {
    let (faulty, world) = faulty_world();
    let mut random = fastrand::Rng::with_seed(11);
    faulty.set(move |_| match random.u16(0..400) {
        0..4 => Fault::Fail(EIO),
        4..6 => Fault::Fail(ENOSPC),
        6..60 => Fault::Fail(EINTR),
        60..120 => Fault::Short(Bytes::kib(4)),
        _ => Fault::None,
    });
    let mut kept = Vec::new();
    let mut failed = 0;
    for seed in vramp_testing::seeds(30) {
        let data = pattern(seed, 200_000 + seed * 31);
        match world.store.write(&[span(&data)], ChargeTo::Space) {
            Ok(stored) => kept.push((stored, data)),
            Err(error) => {
                failed += 1;
                let known = [DiskErrorKind::Full, DiskErrorKind::Media];
                assert!(known.contains(&kind(&error)), "{error}");
            }
        }
        world.store.audit().unwrap();
    }
    assert!(failed > 0 && kept.len() > 10, "{failed} failed of 120");
    faulty.heal();
    for (stored, data) in &kept {
        assert!(&world.read(stored).unwrap() == data);
    }
    let sum: Bytes = kept.iter().map(|(stored, _)| stored.charged()).sum();
    world.assert_holds(sum);
    drop(kept);
    world.assert_empty();
}

/// Flips one bit on the disk.
pub fn flip(world: &World, offset: u64) {
    let path = &files(world.dir.path())[0];
    let byte = std::fs::read(path).unwrap()[offset as usize];
    let mut file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.seek(SeekFrom::Start(offset)).unwrap();
    file.write_all(&[byte ^ 0x10]).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn a_flipped_bit_is_found_and_reported_with_both_sums() {
    let world = world(SMALL);
    let data = pattern(1, 700_001);
    let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    let other = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    for at in [4096, 4096 + 700_000] {
        flip(&world, at);
        let error = world.read(&stored).unwrap_err();
        let DiskTierError::Corrupt { file, offset, len, expected, found } = &error else {
            panic!("{error}")
        };
        assert_eq!(file, &files(world.dir.path())[0]);
        assert_eq!((*offset, *len), (Bytes::kib(4), Bytes::new(700_001)));
        assert_eq!(*expected, crc32fast::hash(&data));
        assert_ne!(found, expected);
        flip(&world, at);
        assert!(world.read(&stored).unwrap() == data);
    }
    assert!(world.read(&other).unwrap() == data);
    assert_eq!(world.store.stats().corrupt_extents, 2);
    // Padding of the last block is not data.
    flip(&world, 4096 + 700_001);
    assert!(world.read(&stored).unwrap() == data);
}

#[test]
fn without_checks_the_disk_is_believed() {
    let world = world(DiskConfig { checksum: Checksum::Off, ..SMALL });
    let data = pattern(1, 10_000);
    let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    assert!(world.read(&stored).unwrap() == data);
    flip(&world, 4096);
    assert!(world.read(&stored).unwrap() != data);
}

#[test]
fn a_file_that_somebody_cut_is_named() {
    let world = world(SMALL);
    let stored = world.store.write(&[zeros(1 << 20)], ChargeTo::Space).unwrap();
    let path = &files(world.dir.path())[0];
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(500_000).unwrap();
    let error = world.read(&stored).unwrap_err();
    assert_eq!(kind(&error), DiskErrorKind::Short);
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    assert!(world.store.audit().unwrap_err().contains("long"));
}

// --- Processes that are killed while they write, and file size limits ---

/// In the child: writes until it is killed.
fn write_until_killed(dir: &Path) -> ! {
    let (_manager, space) = space();
    let config = DiskConfig { names: faulty::names(), ..SMALL };
    let store = DiskStore::open(dir, config, &space).unwrap();
    let data = [span(&pattern(1, 8 << 20))];
    let _kept = store.write(&data, ChargeTo::Space).unwrap();
    // All files exist from here on. A file that is being created may be swept and created again.
    drop(store.write(&data, ChargeTo::Space).unwrap());
    faulty::ready();
    loop {
        drop(store.write(&data, ChargeTo::Space).unwrap());
    }
}

#[test]
fn what_a_killed_process_left_is_swept_and_a_living_ones_files_are_not() {
    if let Some(dir) = faulty::directory() {
        write_until_killed(&dir);
    }
    let name = "disk::faults::what_a_killed_process_left_is_swept_and_a_living_ones_files_are_not";
    let dir = tempfile::tempdir().unwrap();
    let (_manager, space) = space();
    let open = || DiskStore::open(dir.path(), SMALL, &space).unwrap();
    let mut child = Child::start(name, dir.path(), FileNames::Shown);
    let living = open().swept();
    assert_eq!(living, SweepReport { in_use: 4, ..SweepReport::default() });
    assert!(child.is_alive(), "the child still writes");

    child.kill();
    assert_eq!(files(dir.path()).len(), 4);
    // The kernel unlocks the last files only after their transfers.
    let mut store = open();
    let mut removed = store.swept().removed;
    for _ in 0..100 {
        if store.swept().in_use == 0 {
            break;
        }
        store = open();
        removed += store.swept().removed;
    }
    assert_eq!((removed, store.swept().foreign), (4, 0));
    assert!(files(dir.path()).is_empty());
    drop(store.write(&[zeros(1 << 20)], ChargeTo::Space).unwrap());
    assert_eq!(open().swept().removed, 0);
}

#[test]
fn of_hidden_files_nothing_is_left_when_a_process_is_killed() {
    if let Some(dir) = faulty::directory() {
        write_until_killed(&dir);
    }
    let name = "disk::faults::of_hidden_files_nothing_is_left_when_a_process_is_killed";
    let dir = tempfile::tempdir().unwrap();
    let child = Child::start(name, dir.path(), FileNames::Hidden);
    assert!(files(dir.path()).is_empty());
    child.kill();
    assert!(files(dir.path()).is_empty());
}

#[test]
fn a_limit_on_the_size_of_files_is_a_full_disk_and_does_not_kill() {
    if let Some(dir) = faulty::directory() {
        let (_manager, space) = space();
        let store = DiskStore::open(dir, SMALL, &space).unwrap();
        // Files of 4 MiB are too long here; shorter ones are not.
        drop(store.write(&[zeros(500 << 10)], ChargeTo::Space).unwrap());
        let error = store.write(&[zeros(3 << 20)], ChargeTo::Space).unwrap_err();
        assert!(error.to_string().contains("ulimit -f"), "{error}");
        assert_eq!(space.total(), Bytes::ZERO);
        store.audit().unwrap();
        return;
    }
    let name = "disk::faults::a_limit_on_the_size_of_files_is_a_full_disk_and_does_not_kill";
    let dir = tempfile::tempdir().unwrap();
    // 2048 blocks of 512 bytes.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 2048 && exec \"$0\" --exact \"$1\""]);
    limited.arg(std::env::current_exe().unwrap()).arg(name).env(faulty::DIR, dir.path());
    let output = limited.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
}
