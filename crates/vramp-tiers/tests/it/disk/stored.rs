//! Stored bytes: read back as written, and charged by their blocks.

use vramp_host::{HostMemory, HostSpan, IoChoice, PageKind};
use vramp_tiers::disk::{ChargeTo, DiskConfig, DiskTierError, FileNames};
use vramp_tiers::reserve::LimitPolicy;
use vramp_tiers::{Bytes, DiskStore, SpaceId, Strategy};

use super::*;

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
