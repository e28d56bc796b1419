//! Stored bytes, read back as written and charged by their blocks; directories; and transfers in flight.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;

use vramp_host::{BlockIo, DiskErrorKind, HostMemory, HostSpan, IoChoice, PageKind};
use vramp_tiers::disk::{ChargeTo, DiskConfig, DiskTierError, FileNames, SweepReport};
use vramp_tiers::reserve::LimitPolicy;
use vramp_tiers::{Bytes, DiskStore, SpaceId, Strategy};

use super::faulty::Faulty;
use super::*;

// --- Stored bytes: read back as written, and charged by their blocks ---

#[test]
fn bytes_of_any_length_come_back_by_either_engine() {
    for io in [IoChoice::Auto, IoChoice::Threads] {
        let world = world(DiskConfig { io, ..SMALL });
        let lengths = [1, 511, 4095, 4096, 4097, 65536, 65537, 1 << 20, (5 << 20) + 123];
        for (seed, len) in lengths.into_iter().enumerate() {
            let data = pattern(seed as u64, len);
            let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
            assert_eq!(stored.len(), Bytes::new(len));
            assert!(world.read(&stored).unwrap() == data, "{len} bytes by {io:?}");
            world.assert_holds(Bytes::new(len.next_multiple_of(4096)));
        }
        world.assert_empty();
        let stats = world.store.stats();
        assert_eq!((stats.writes.transfers, stats.reads.transfers), (9, 9));
        assert_eq!(stats.writes.bytes, Bytes::new(lengths.into_iter().sum()));
        assert!(stats.writes.total_ns > 0 && stats.reads.total_ns > 0);
    }
}

#[test]
fn what_one_engine_wrote_the_other_could_have_written() {
    let file_of = |io: IoChoice| {
        let world = world(DiskConfig { io, ..SMALL });
        let data = pattern(7, 3 << 20);
        let _stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
        let bytes = std::fs::read(&files(world.dir.path())[0]).unwrap();
        assert!(bytes[4096..].starts_with(&data));
        bytes[4096..].to_vec()
    };
    assert!(file_of(IoChoice::Auto) == file_of(IoChoice::Threads));
}

#[test]
fn no_bytes_are_stored_without_a_file_or_a_charge() {
    let world = world(SMALL);
    let stored = world.store.write(&[], ChargeTo::Space).unwrap();
    assert!(stored.is_empty());
    assert_eq!((stored.extents(), stored.charged()), (0, Bytes::ZERO));
    world.store.read(&stored, &[]).unwrap();
    world.assert_empty();
    assert!(files(world.dir.path()).is_empty());
}

#[test]
fn memory_may_be_cut_in_any_way_for_writing_and_in_another_for_reading() {
    let world = world(SMALL);
    let data = pattern(1, 300_000);
    let memory = HostMemory::new(Bytes::mib(1), None, PageKind::Small).unwrap();
    let mut random = fastrand::Rng::with_seed(2);
    for round in 0..20 {
        let mut cut = |write: bool| {
            let (mut spans, mut at, mut offset) = (Vec::new(), 0, random.u64(0..9000));
            while at < data.len() {
                let len = random.usize(0..40_000).min(data.len() - at);
                if random.bool() {
                    offset = u64::next_multiple_of(offset, 4096);
                }
                let bytes = |count: usize| Bytes::new(count as u64);
                let span = HostSpan::new(&memory, Bytes::new(offset), bytes(len)).unwrap();
                if write {
                    span.write(Bytes::ZERO, &data[at..at + len]).unwrap();
                }
                spans.push(span);
                at += len;
                offset += len as u64 + random.u64(0..500);
            }
            spans
        };
        let stored = world.store.write(&cut(true), ChargeTo::Space).unwrap();
        memory.write(Bytes::ZERO, &vec![0; 1 << 20]).unwrap();
        let back = cut(false);
        world.store.read(&stored, &back).unwrap();
        let back: Vec<u8> = back.iter().flat_map(bytes_of).collect();
        assert!(back == data, "round {round}");
    }
    world.assert_empty();
}

#[test]
fn reading_leaves_the_memory_around_alone() {
    let world = world(SMALL);
    let stored = world.store.write(&[span(&[7; 5000])], ChargeTo::Space).unwrap();
    let around = span(&[1; 3 * 4096]);
    let into = around.part(Bytes::new(4096), Bytes::new(5000)).unwrap();
    world.store.read(&stored, &[into]).unwrap();
    let bytes = bytes_of(&around);
    assert_eq!(bytes[..4096], [1; 4096]);
    assert_eq!(bytes[4096..9096], [7; 5000]);
    assert_eq!(bytes[9096..], [1; 3192]);
}

#[test]
fn limits_of_the_disk_bound_the_bytes_that_are_really_there() {
    let world = world(SMALL);
    let kept = world.store.write(&[zeros(60 << 20)], ChargeTo::Space).unwrap();
    assert_eq!(kept.charged(), Bytes::mib(60));
    let refused = world.store.write(&[zeros((4 << 20) + 1)], ChargeTo::Space).unwrap_err();
    assert!(matches!(refused, DiskTierError::Full(_)), "{refused}");
    world.assert_holds(Bytes::mib(60));
    let on_disk = |world: &World| -> u64 {
        files(world.dir.path()).iter().map(|file| file.metadata().unwrap().len() - 4096).sum()
    };
    assert!(on_disk(&world) <= 64 << 20);
    drop(kept);
    world.assert_empty();
    assert_eq!(world.store.trim(), Bytes::mib(60) + Bytes::kib(4) * 15);
    assert!(files(world.dir.path()).is_empty());
}

#[test]
fn a_reservation_pays_and_gets_its_bytes_back() {
    let world = world(SMALL);
    let ask = |space| world.manager.request(Strategy::Specific(space), Bytes::mib(1)).now();
    let reservation = ask(DISK).unwrap();
    let fail = LimitPolicy::Fail;
    let paid = ChargeTo::Reservation(&reservation, &fail);
    let stored = world.store.write(&[zeros(1_000_000)], paid).unwrap();
    assert_eq!(reservation.used(), Bytes::new(1_003_520));
    assert_eq!(world.space.total(), Bytes::mib(1));
    world.store.audit().unwrap();

    let refused = world.store.write(&[zeros(100_000)], paid).unwrap_err();
    assert!(matches!(refused, DiskTierError::NotReserved(_)), "{refused}");
    let ignore = LimitPolicy::Ignore;
    let over = ChargeTo::Reservation(&reservation, &ignore);
    let more = world.store.write(&[zeros(100_000)], over).unwrap();
    assert_eq!(reservation.used(), Bytes::new(1_003_520 + 102_400));

    let elsewhere = ask(SpaceId::disk(1)).unwrap();
    let wrong = world.store.write(&[zeros(1)], ChargeTo::Reservation(&elsewhere, &fail));
    assert!(matches!(wrong, Err(DiskTierError::OtherSpace { .. })));

    // Stored bytes outlive the reservation that paid for them.
    drop(reservation);
    world.assert_holds(Bytes::new(1_003_520 + 102_400));
    drop((stored, more));
    world.assert_empty();
}

#[test]
fn stored_bytes_of_another_store_and_memory_of_another_length_are_refused() {
    let (one, other) = (world(SMALL), world(SMALL));
    let stored = one.store.write(&[span(b"mine")], ChargeTo::Space).unwrap();
    let elsewhere = other.store.read(&stored, &[zeros(4)]).unwrap_err();
    assert_eq!(elsewhere, DiskTierError::OtherStore);
    let short = one.store.read(&stored, &[zeros(3)]).unwrap_err();
    assert_eq!(short, DiskTierError::Length { stored: Bytes::new(4), given: Bytes::new(3) });
}

#[test]
fn eight_threads_write_read_and_drop_at_random_and_every_byte_is_verified() {
    for io in [IoChoice::Auto, IoChoice::Threads] {
        let world = world(DiskConfig { io, names: FileNames::Hidden, ..SMALL });
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let world = &world;
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(thread);
                    let mut held = Vec::new();
                    for round in 0..60 {
                        let seed = thread << 32 | round;
                        let data = pattern(seed, random.u64(1..600_000));
                        held.push((
                            world.store.write(&[span(&data)], ChargeTo::Space).unwrap(),
                            data,
                        ));
                        let (stored, data) = &held[random.usize(..held.len())];
                        assert!(&world.read(stored).unwrap() == data);
                        if held.len() > 8 {
                            drop(held.swap_remove(random.usize(..held.len())));
                        }
                        if round % 16 == 0 {
                            world.store.audit().unwrap();
                            world.store.trim();
                        }
                    }
                    for (stored, data) in &held {
                        assert!(&world.read(stored).unwrap() == data);
                    }
                });
            }
        });
        world.assert_empty();
    }
}

#[test]
fn a_dropped_store_leaves_an_empty_directory() {
    let world = world(SMALL);
    let stored = world.store.write(&[zeros(9 << 20)], ChargeTo::Space).unwrap();
    assert_eq!(files(world.dir.path()).len(), 3);
    let World { store, space, dir, .. } = world;
    drop(store);
    assert!(files(dir.path()).is_empty());
    assert_eq!(space.total(), Bytes::mib(9));
    drop(stored);
    assert_eq!(space.total(), Bytes::ZERO);
}

#[test]
fn hidden_files_are_never_seen() {
    let world = world(DiskConfig { names: FileNames::Hidden, ..SMALL });
    let data = pattern(3, 6 << 20);
    let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    assert!(files(world.dir.path()).is_empty());
    assert!(world.read(&stored).unwrap() == data);
    assert_eq!(world.store.stats().extents.backings, 2);
}

#[test]
fn options_that_make_no_sense_are_refused_by_name() {
    let (_manager, space) = space();
    let dir = tempfile::tempdir().unwrap();
    for (config, word) in [
        (DiskConfig { file_size: Bytes::ZERO, ..SMALL }, "files"),
        (DiskConfig { file_size: Bytes::new(5000), ..SMALL }, "files"),
        (DiskConfig { piece: Bytes::gib(2), ..SMALL }, "pieces"),
        (DiskConfig { piece: Bytes::new(512), ..SMALL }, "pieces"),
        (DiskConfig { depth: 0, ..SMALL }, "depth"),
        (DiskConfig { depth: 65, ..SMALL }, "depth"),
    ] {
        let error = DiskStore::open(dir.path(), config, &space).unwrap_err();
        assert!(matches!(error, DiskTierError::Config(_)), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

// --- Sweeping a directory, and directories that cannot be used ---

fn open(dir: &Path) -> Result<DiskStore, DiskTierError> {
    let (_manager, space) = space();
    DiskStore::open(dir, SMALL, &space)
}

#[test]
fn directories_that_will_not_do_are_errors_that_name_them() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let error = open(&missing).unwrap_err();
    assert!(matches!(error, DiskTierError::NoDirectory { .. }), "{error}");
    assert!(error.to_string().contains("missing"), "{error}");
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = open(&file).unwrap_err();
    assert!(matches!(error, DiskTierError::NoDirectory { .. }), "{error}");
    // Not even root creates files there.
    let error = open(Path::new("/sys")).unwrap_err();
    let DiskTierError::Disk(disk) = &error else { panic!("{error}") };
    assert_eq!(disk.kind, DiskErrorKind::Denied);
    assert!(error.to_string().contains("/sys/vramp-"), "{error}");
}

#[test]
fn a_space_that_is_no_disk_and_odd_granules_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, _) = space();
    let host = manager.space(SpaceId::host(0)).unwrap();
    // Its granule of 1 MiB is refused first.
    assert!(matches!(DiskStore::open(dir.path(), SMALL, &host), Err(DiskTierError::Config(_))));
    let gpu = SpaceConfig { granule: Bytes::new(512), ..SpaceConfig::gpu(Bytes::gib(1)) };
    let manager = ReservationManager::new([(SpaceId::gpu(0), gpu)]).unwrap();
    let gpu = manager.space(SpaceId::gpu(0)).unwrap();
    let error = DiskStore::open(dir.path(), SMALL, &gpu).unwrap_err();
    assert_eq!(error, DiskTierError::NotADisk(SpaceId::gpu(0)));
}

#[test]
fn two_living_stores_share_a_directory_and_leave_each_others_files_alone() {
    let dir = tempfile::tempdir().unwrap();
    let one = open(dir.path()).unwrap();
    let data = pattern(1, 1 << 20);
    let stored = one.write(&[span(&data)], ChargeTo::Space).unwrap();
    let other = open(dir.path()).unwrap();
    assert_eq!(other.swept(), SweepReport { in_use: 1, ..SweepReport::default() });
    drop(other);
    let back = zeros(1 << 20);
    one.read(&stored, std::slice::from_ref(&back)).unwrap();
    assert!(bytes_of(&back) == data);
}

#[test]
fn strangers_and_garbage_are_left_alone_and_only_what_is_ours_is_swept() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let name = |index: u32| format!("vramp-4711-00000000deadbeef-{index}.segment");
    // A dead store's file: a copy of a live one under another name.
    let store = open(dir.path()).unwrap();
    let _stored = store.write(&[zeros(4096)], ChargeTo::Space).unwrap();
    let ours = files(dir.path()).remove(0);
    let copy = fs::read(&ours).unwrap();
    let own = ours.file_name().unwrap().to_str().unwrap().replace("-1.segment", "-99.segment");
    fs::write(at(&own), &copy).unwrap();
    // Created, but never written.
    fs::write(at(&name(0)), "").unwrap();
    fs::write(at(&name(1)), [0; 4096]).unwrap();
    // Names of this format with another content: another owner's header, garbage, a directory.
    fs::write(at(&name(2)), &copy).unwrap();
    fs::write(at(&name(3)), "garbage").unwrap();
    fs::create_dir(at(&name(4))).unwrap();
    // Other names.
    fs::write(at("data.bin"), "data").unwrap();
    fs::write(at("vramp-1-2-3.segment"), "").unwrap();

    let swept = open(dir.path()).unwrap().swept();
    let bytes = Bytes::new(copy.len() as u64) + Bytes::kib(4);
    assert_eq!(swept, SweepReport { removed: 3, bytes, in_use: 1, foreign: 3 });
    for kept in [name(2), name(3), name(4), "data.bin".into(), "vramp-1-2-3.segment".into()] {
        assert!(at(&kept).exists(), "{kept}");
    }
    for gone in [own, name(0), name(1)] {
        assert!(!at(&gone).exists(), "{gone}");
    }
    assert!(ours.exists());
}

#[test]
fn a_reservation_on_a_disk_has_the_directory_of_its_store() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, disk) = space();
    let before = disk.request(Bytes::kib(4)).now().unwrap();
    assert_eq!((disk.directory(), before.directory()), (None, None));
    let store = DiskStore::open(dir.path(), SMALL, &disk).unwrap();
    assert_eq!(before.directory().as_deref(), store.dir());
    assert_eq!(disk.directory().as_deref(), Some(dir.path()));
    let host = manager.space(SpaceId::host(0)).unwrap();
    assert_eq!(host.request(Bytes::kib(4)).now().unwrap().directory(), None);
    // A program that writes files of its own names the directory itself.
    let other = tempfile::tempdir().unwrap();
    disk.set_directory(other.path());
    assert_eq!(before.directory().as_deref(), Some(other.path()));
}

// --- Transfers in flight: waited for later, polled, cancelled, dropped ---

fn gated() -> (Arc<Faulty>, World) {
    let faulty = Faulty::new();
    let world = world_with(SMALL, Arc::<Faulty>::clone(&faulty));
    (faulty, world)
}

#[test]
fn several_transfers_are_under_way_at_the_same_time() {
    let (faulty, world) = gated();
    let data: Vec<_> = (0..6).map(|seed| pattern(seed, 1 << 20)).collect();
    faulty.close_gate();
    let begun: Vec<_> = data
        .iter()
        .map(|data| world.store.begin_write(&[span(data)], ChargeTo::Space).unwrap())
        .collect();
    assert!(begun.iter().all(|write| !write.is_done()));
    world.assert_holds(Bytes::mib(6));
    faulty.open_gate();
    let stored: Vec<_> = begun.into_iter().map(|write| write.wait().unwrap()).collect();
    let back: Vec<_> = data.iter().map(|_| zeros(1 << 20)).collect();
    let reads: Vec<_> = stored
        .iter()
        .zip(&back)
        .map(|(stored, back)| world.store.begin_read(stored, std::slice::from_ref(back)).unwrap())
        .collect();
    // Polling works as well as waiting.
    while !reads.iter().all(|read| read.is_done()) {
        vramp_testing::moment();
    }
    reads.into_iter().for_each(|read| read.wait().unwrap());
    assert!(back.iter().map(bytes_of).eq(data));
}

#[test]
fn no_call_is_larger_than_a_piece_however_much_is_written() {
    let (faulty, world) = gated();
    let data = pattern(1, 20 << 20);
    let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    assert!(world.read(&stored).unwrap() == data);
    assert_eq!(faulty.largest.load(Ordering::Relaxed), 64 << 10);
}

#[test]
fn a_cancelled_write_ends_between_pieces_and_gives_everything_back() {
    let (faulty, world) = gated();
    faulty.close_gate();
    let write = world.store.begin_write(&[zeros(4 << 20)], ChargeTo::Space).unwrap();
    write.cancel();
    assert!(!write.is_done());
    faulty.open_gate();
    let error = write.wait().unwrap_err();
    // Pieces that had begun have ended: as many as the depth of the engine.
    let moved = Bytes::kib(64) * faulty.depth() as u64;
    assert_eq!(error, DiskTierError::Cancelled { moved, len: Bytes::mib(4) });
    world.assert_empty();
    assert_eq!(world.store.stats().writes.failed, 1);
}

#[test]
fn a_cancelled_read_leaves_what_is_stored() {
    let (faulty, world) = gated();
    let data = pattern(1, 4 << 20);
    let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    faulty.close_gate();
    let into = zeros(4 << 20);
    let read = world.store.begin_read(&stored, &[into]).unwrap();
    read.cancel();
    faulty.open_gate();
    assert!(matches!(read.wait(), Err(DiskTierError::Cancelled { .. })));
    assert!(world.read(&stored).unwrap() == data);
}

#[test]
fn a_cancellation_that_comes_too_late_changes_nothing() {
    let (_faulty, world) = gated();
    let write = world.store.begin_write(&[zeros(64 << 10)], ChargeTo::Space).unwrap();
    while !write.is_done() {
        vramp_testing::moment();
    }
    write.cancel();
    let stored = write.wait().unwrap();
    world.assert_holds(Bytes::kib(64));
    drop(stored);
    world.assert_empty();
}

#[test]
fn a_transfer_dropped_without_a_wait_frees_everything() {
    let (_faulty, world) = gated();
    drop(world.store.begin_write(&[zeros(8 << 20)], ChargeTo::Space).unwrap());
    world.assert_empty();
}

#[test]
fn what_is_read_stays_until_it_is_read_though_its_owner_lets_go() {
    let (faulty, world) = gated();
    let data = pattern(1, 256 << 10);
    let stored = world.store.write(&[span(&data)], ChargeTo::Space).unwrap();
    faulty.close_gate();
    let into = zeros(256 << 10);
    let read = world.store.begin_read(&stored, std::slice::from_ref(&into)).unwrap();
    drop(stored);
    world.assert_holds(Bytes::kib(256));
    faulty.open_gate();
    read.wait().unwrap();
    assert!(bytes_of(&into) == data);
    world.assert_empty();
}

#[test]
fn a_store_dropped_with_transfers_under_way_lets_them_end() {
    let (faulty, world) = gated();
    let kept = world.store.write(&[span(&pattern(1, 1 << 20))], ChargeTo::Space).unwrap();
    faulty.close_gate();
    let write = world.store.begin_write(&[zeros(4 << 20)], ChargeTo::Space).unwrap();
    let into = zeros(1 << 20);
    let read = world.store.begin_read(&kept, std::slice::from_ref(&into)).unwrap();
    let World { store, space, dir, manager } = world;
    drop((store, manager));
    assert!(files(dir.path()).is_empty());
    faulty.open_gate();
    read.wait().unwrap();
    assert!(bytes_of(&into) == pattern(1, 1 << 20));
    let stored = write.wait().unwrap();
    assert_eq!(space.total(), Bytes::mib(5));
    drop((stored, kept));
    assert_eq!(space.total(), Bytes::ZERO);
}
