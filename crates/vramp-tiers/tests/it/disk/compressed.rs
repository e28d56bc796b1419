//! Compressed writes: read back as written, or refused.

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use vramp_host::{Direction, DiskErrorKind, IoChoice, IoRequest};
use vramp_tiers::disk::{ChargeTo, Checksum, CompressionConfig, DiskConfig, DiskTierError};
use vramp_tiers::reserve::LimitPolicy;

use super::faults::{flip, kind};
use super::faulty::{EINTR, EIO, ENOSPC, Fault, Faulty, fail, stumbling};
use super::*;

/// Compresses whatever saves a tenth, however long that takes.
const ALWAYS: CompressionConfig =
    CompressionConfig { least_saving_per_mille: 100, short_below_per_mille: 1000 };
const PACKED: DiskConfig = DiskConfig { compression: Some(ALWAYS), ..SMALL };

/// Bytes that LZ4 compresses to slightly more than half.
fn compressible(seed: u64, len: u64) -> Vec<u8> {
    let mut bytes = pattern(seed, len);
    bytes.chunks_mut(512).skip(1).step_by(2).for_each(|half| half.fill(seed as u8));
    bytes
}

fn faulty_world() -> (Arc<Faulty>, World) {
    let faulty = Faulty::new();
    let world = world_with(PACKED, Arc::<Faulty>::clone(&faulty));
    (faulty, world)
}

impl World {
    fn write(&self, data: &[u8]) -> Result<vramp_tiers::disk::StoredBytes, DiskTierError> {
        self.store.write(&[span(data)], ChargeTo::Space)
    }
}

#[test]
fn compressed_bytes_of_any_length_come_back_by_either_engine_with_and_without_checks() {
    for io in [IoChoice::Auto, IoChoice::Threads] {
        for checksum in [Checksum::Crc32, Checksum::Off] {
            let world = world(DiskConfig { io, checksum, ..PACKED });
            let lengths =
                [1, 511, 4096, 4097, 8192, 65537, 524_288, 524_289, 1 << 20, (5 << 20) + 123];
            for (seed, len) in lengths.into_iter().enumerate() {
                let data = compressible(seed as u64, len);
                let stored = world.write(&data).unwrap();
                assert_eq!(stored.len(), Bytes::new(len));
                assert!(world.read(&stored).unwrap() == data, "{len} bytes by {io:?}");
                world.assert_holds(stored.charged());
                let most = if len > 64 << 10 { len * 6 / 10 } else { len.next_multiple_of(4096) };
                assert!(stored.charged() <= Bytes::new(most), "{len}: {}", stored.charged());
            }
            world.assert_empty();
            let stats = world.store.stats();
            assert_eq!((stats.writes.transfers, stats.reads.transfers), (10, 10));
            assert!(stats.writes.bytes < Bytes::new(lengths.into_iter().sum::<u64>() * 6 / 10));
            assert!(stats.compression.writes >= 5, "{stats:?}");
            assert!(stats.compression.decompressed >= Bytes::mib(6), "{stats:?}");
        }
    }
}

#[test]
fn random_bytes_are_sampled_and_stored_as_they_are() {
    let world = world(PACKED);
    let data = pattern(1, (3 << 20) + 5);
    let stored = world.write(&data).unwrap();
    assert_eq!(stored.charged(), Bytes::new(data.len() as u64 + 4091));
    assert!(std::fs::read(&files(world.dir.path())[0]).unwrap()[4096..].starts_with(&data));
    assert!(world.read(&stored).unwrap() == data);
    let stats = world.store.stats().compression;
    assert_eq!((stats.writes, stats.saved_too_little, stats.disk_faster), (0, 1, 0));
    assert!(stats.compressing_ns > 0 && stats.decompressed.is_zero());
}

#[test]
fn of_a_write_that_pays_the_frames_that_do_not_stay_as_they_are() {
    let world = world(PACKED);
    // 1 MiB of each kind in turn, and an odd tail that does not compress.
    let mut data = [compressible(1, 1 << 20), pattern(2, 1 << 20)].concat();
    data.extend([compressible(3, 1 << 20), pattern(4, 100_001)].concat());
    let stored = world.write(&data).unwrap();
    let charged = stored.charged().count();
    assert!((1_150_000 + (1 << 20)..2_400_000).contains(&charged), "{charged}");
    assert!(world.read(&stored).unwrap() == data);
    let stats = world.store.stats().compression;
    assert_eq!((stats.writes, stats.bytes), (1, Bytes::new(data.len() as u64)));
    assert_eq!(stats.on_disk, stored.charged());
    assert_eq!(stats.decompressed, Bytes::mib(2));
    world.assert_holds(stored.charged());
    drop(stored);
    world.assert_empty();
}

#[test]
fn a_write_is_charged_as_it_is_first_and_what_it_saves_is_credited() {
    let (faulty, world) = faulty_world();
    let most = world.space.capacity().count();
    faulty.close_gate();
    let write = world.store.begin_write(&[zeros(most)], ChargeTo::Space).unwrap();
    assert_eq!(world.space.available(), Bytes::ZERO);
    let refused = world.store.begin_write(&[zeros(8192)], ChargeTo::Space);
    assert!(matches!(refused, Err(DiskTierError::Full(_))));
    faulty.open_gate();
    // Workers may start the transfer before the gate opens or after.
    let stored = write.wait().unwrap();
    assert!(stored.charged() < Bytes::new(most / 50), "{}", stored.charged());
    world.assert_holds(stored.charged());
    drop(stored);
    world.assert_empty();
}

#[test]
fn a_reservation_gets_back_what_its_write_saved() {
    let world = world(PACKED);
    let reservation = world.space.request(Bytes::mib(2)).now().unwrap();
    let paid = ChargeTo::Reservation(&reservation, &LimitPolicy::Fail);
    let data = compressible(1, 2 << 20);
    let first = world.store.write(&[span(&data)], paid).unwrap();
    assert!(first.charged() < Bytes::kib(1300));
    let second = world.store.write(&[span(&data[..600_000])], paid).unwrap();
    let over = world.store.write(&[span(&data)], paid).unwrap_err();
    assert!(matches!(over, DiskTierError::NotReserved(_)), "{over}");
    assert!(world.read(&first).unwrap() == data && world.read(&second).unwrap() == data[..600_000]);
    drop((first, second, reservation));
    world.assert_empty();
}

#[test]
fn a_flipped_bit_of_compressed_bytes_is_reported_with_both_sums_and_never_decompressed() {
    for checksum in [Checksum::Crc32, Checksum::Off] {
        let world = world(DiskConfig { checksum, ..PACKED });
        let data = compressible(1, 1 << 20);
        let stored = world.write(&data).unwrap();
        let len = stored.charged().count();
        let decompressed = || world.store.stats().compression.decompressed;
        // The first byte, one in the middle, and the last one, which pads the last frame.
        for at in [4096, 4096 + len / 3, 4096 + len - 1] {
            let before = decompressed();
            flip(&world, at);
            let error = world.read(&stored).err().unwrap();
            let DiskTierError::Corrupt { file, offset, expected, found, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!(file, &files(world.dir.path())[0]);
            assert_eq!(*offset, Bytes::kib(4));
            assert_ne!(found, expected);
            assert_eq!(decompressed(), before);
            flip(&world, at);
            assert!(world.read(&stored).unwrap() == data);
        }
        let stats = world.store.stats();
        assert_eq!((stats.corrupt_extents, stats.reads.failed), (3, 3));
    }
}

#[test]
fn calls_that_are_short_interrupted_and_deferred_are_made_again_for_compressed_bytes() {
    for choice in [IoChoice::Auto, IoChoice::Threads] {
        let faulty = Faulty::on(choice);
        let world = world_with(PACKED, Arc::<Faulty>::clone(&faulty));
        faulty.set(stumbling());
        for seed in 0..10 {
            let data = compressible(seed, 1_300_001);
            let stored = world.write(&data).unwrap();
            assert!(stored.charged() < Bytes::kib(800));
            assert!(world.read(&stored).unwrap() == data);
        }
        world.assert_empty();
    }
}

#[test]
fn a_failed_write_of_compressed_bytes_gives_everything_back_and_a_failed_read_loses_nothing() {
    for code in [EIO, ENOSPC] {
        let (faulty, world) = faulty_world();
        let data = compressible(1, 1 << 20);
        let kept = world.write(&data).unwrap();
        faulty.set(fail(Direction::Write, code));
        let error = world.write(&compressible(2, 2 << 20)).unwrap_err();
        let expected = if code == EIO { DiskErrorKind::Media } else { DiskErrorKind::Full };
        assert_eq!(kind(&error), expected);
        world.assert_holds(kept.charged());
        assert_eq!(world.store.stats().writes.failed, 1);
        faulty.set(fail(Direction::Read, EIO));
        assert_eq!(kind(&world.read(&kept).err().unwrap()), DiskErrorKind::Media);
        faulty.heal();
        assert!(world.read(&kept).unwrap() == data);
        drop(kept);
        world.assert_empty();
    }
}

#[test]
fn a_place_that_cannot_be_written_is_left_for_another_with_compressed_bytes_as_well() {
    let (faulty, world) = faulty_world();
    let mut calls = 0;
    faulty.set(move |_| {
        calls += 1;
        if calls == 3 { Fault::Fail(EIO) } else { Fault::None }
    });
    let data = compressible(1, 2 << 20);
    let stored = world.write(&data).unwrap();
    assert!(stored.extents() > 1);
    assert!(world.read(&stored).unwrap() == data);
    assert_eq!(world.store.stats().relocated_pieces, 1);
    world.assert_holds(stored.charged());
}

#[test]
fn a_disk_without_blocks_for_compressed_bytes_says_so_when_it_is_waited_for() {
    let (faulty, world) = faulty_world();
    faulty.room.store(0, Ordering::Relaxed);
    let error = world.write(&compressible(1, 1 << 20)).unwrap_err();
    assert_eq!(kind(&error), DiskErrorKind::Full);
    world.assert_empty();
    assert_eq!(world.store.stats().full_errors, 1);
    faulty.room.store(u64::MAX, Ordering::Relaxed);
    let data = compressible(1, 1 << 20);
    let stored = world.write(&data).unwrap();
    assert!(world.read(&stored).unwrap() == data);
}

#[test]
fn cancelled_and_dropped_transfers_of_compressed_bytes_leave_nothing() {
    let (faulty, world) = faulty_world();
    let data = compressible(1, 4 << 20);
    for round in 0..40 {
        let write = world.store.begin_write(&[span(&data)], ChargeTo::Space).unwrap();
        for _ in 0..round * 50 {
            std::thread::yield_now();
        }
        match round % 3 {
            0 => drop(write),
            _ => {
                write.cancel();
                match write.wait() {
                    Ok(stored) => assert!(world.read(&stored).unwrap() == data),
                    Err(error) => assert!(matches!(error, DiskTierError::Cancelled { .. })),
                }
            }
        }
        world.assert_empty();
    }
    let stored = world.write(&data).unwrap();
    for round in 0..40 {
        let into = zeros(4 << 20);
        let read = world.store.begin_read(&stored, std::slice::from_ref(&into)).unwrap();
        for _ in 0..round * 5 {
            assert!(!read.is_empty());
            let _ = read.is_done();
        }
        match round % 3 {
            0 => drop(read),
            _ => {
                read.cancel();
                match read.wait() {
                    Ok(()) => assert!(bytes_of(&into) == data),
                    Err(error) => assert!(matches!(error, DiskTierError::Cancelled { .. })),
                }
            }
        }
    }
    drop(faulty);
    assert!(world.read(&stored).unwrap() == data);
    drop(stored);
    world.assert_empty();
}

#[test]
fn asking_is_enough_for_transfers_of_compressed_bytes_to_end() {
    let world = world(PACKED);
    let data = compressible(1, 3 << 20);
    let write = world.store.begin_write(&[span(&data)], ChargeTo::Space).unwrap();
    while !write.is_done() {
        vramp_testing::moment();
    }
    let stored = write.wait().unwrap();
    let into = zeros(3 << 20);
    let read = world.store.begin_read(&stored, std::slice::from_ref(&into)).unwrap();
    while !read.is_done() {
        vramp_testing::moment();
    }
    read.wait().unwrap();
    assert!(bytes_of(&into) == data);
}

#[test]
fn a_read_that_was_seen_to_fail_with_pieces_left_returns_its_error_to_a_wait() {
    let (faulty, world) = faulty_world();
    let data = compressible(1, 4 << 20);
    // More pieces than may be in flight at once: some never begin.
    let stored = world.write(&data).unwrap();
    assert!(stored.charged() > SMALL.piece * 2 * SMALL.depth as u64);
    faulty.set(fail(Direction::Read, EIO));
    let read = world.store.begin_read(&stored, &[zeros(4 << 20)]).unwrap();
    while !read.is_done() {
        vramp_testing::moment();
    }
    let (ends, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || ends.send(read.wait()).unwrap());
    let error = ended.recv_timeout(std::time::Duration::from_secs(20)).expect("it has ended");
    assert_eq!(kind(&error.unwrap_err()), DiskErrorKind::Media);
    faulty.heal();
    assert!(world.read(&stored).unwrap() == data);
}

#[test]
fn a_store_may_be_dropped_while_it_compresses() {
    for _ in 0..20 {
        let World { store, space, dir, .. } = world(PACKED);
        let write = store.begin_write(&[span(&compressible(1, 2 << 20))], ChargeTo::Space).unwrap();
        drop(store);
        let stored = write.wait().unwrap();
        assert_eq!(space.total(), stored.charged());
        drop(stored);
        assert_eq!((space.total(), files(dir.path()).len()), (Bytes::ZERO, 0));
    }
}

/// A disk that takes no time and stores nothing.
struct Instant;

impl BlockIo for Instant {
    fn name(&self) -> &'static str {
        "instant"
    }

    fn depth(&self) -> usize {
        8
    }

    fn submit(&self, batch: Vec<IoRequest>) {
        batch.into_iter().for_each(|request| (request.done)(Ok(request.span.len())));
    }
}

#[test]
fn what_the_disk_writes_sooner_is_not_compressed_unless_room_is_short() {
    let data = compressible(1, 4 << 20);
    let usual = DiskConfig { compression: Some(CompressionConfig::default()), ..SMALL };
    let world = world_with(usual, Arc::new(Instant));
    // The store has not measured the disk yet.
    let first = world.write(&data).unwrap();
    assert!(first.charged() < Bytes::mib(3));
    let second = world.write(&data).unwrap();
    assert_eq!(second.charged(), Bytes::mib(4));
    // Less than 16 of 64 MiB are available.
    let much = world.write(&pattern(1, 44 << 20)).unwrap();
    let third = world.write(&data).unwrap();
    assert!(third.charged() < Bytes::mib(3));
    let stats = world.store.stats().compression;
    assert_eq!((stats.writes, stats.disk_faster, stats.saved_too_little), (2, 1, 1));
    drop((first, second, third, much));
    world.assert_empty();
}

#[test]
fn thousandths_beyond_a_thousand_are_refused() {
    let (_manager, space) = space();
    let dir = tempfile::tempdir().unwrap();
    for compression in [
        CompressionConfig { least_saving_per_mille: 1001, ..ALWAYS },
        CompressionConfig { short_below_per_mille: u16::MAX, ..ALWAYS },
    ] {
        let config = DiskConfig { compression: Some(compression), ..SMALL };
        let error = DiskStore::open(dir.path(), config, &space).unwrap_err();
        assert!(error.to_string().contains("thousandths"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(12)))]

    /// Writes of any mixture, from any spans, on a disk that fails at random.
    #[test]
    fn what_was_acknowledged_comes_back_from_any_mixture_of_bytes(
        seed: u64,
        parts in prop::collection::vec((0..3_u8, 1..400_000_u64, 0..5000_u64), 1..24),
        failing: bool,
        checked: bool,
        frugal: bool,
    ) {
        let faulty = Faulty::new();
        let least = if frugal { 0 } else { 200 };
        let compression = CompressionConfig { least_saving_per_mille: least, ..ALWAYS };
        let checksum = if checked { Checksum::Crc32 } else { Checksum::Off };
        let config = DiskConfig { compression: Some(compression), checksum, ..SMALL };
        let world = world_with(config, Arc::<Faulty>::clone(&faulty));
        let mut dice = fastrand::Rng::with_seed(seed);
        if failing {
            faulty.set(move |_| match dice.u16(0..300) {
                0..2 => Fault::Fail(EIO),
                2 => Fault::Fail(ENOSPC),
                3..40 => Fault::Fail(EINTR),
                40..80 => Fault::Short(Bytes::kib(4)),
                _ => Fault::None,
            });
        }
        let mut kept = Vec::new();
        let mut random = fastrand::Rng::with_seed(seed);
        for some in parts.chunks(4) {
            let data: Vec<_> = some
                .iter()
                .map(|&(what, len, _)| match what {
                    0 => vec![seed as u8; len as usize],
                    1 => compressible(seed, len),
                    _ => pattern(seed, len),
                })
                .collect();
            // Each part begins at some offset in memory of its own.
            let spans: Vec<_> = data.iter().zip(some).map(|(data, &(_, len, skip))| {
                let memory = zeros(len + skip);
                memory.write(Bytes::new(skip), data).unwrap();
                memory.part(Bytes::new(skip), Bytes::new(len)).unwrap()
            }).collect();
            if let Ok(stored) = world.store.write(&spans, ChargeTo::Space) {
                prop_assert!(stored.charged() <= stored.len() + Bytes::kib(4));
                kept.push((stored, data.concat()));
            }
            world.store.audit().unwrap();
            if random.u8(..4) == 0 && !kept.is_empty() {
                drop(kept.swap_remove(random.usize(..kept.len())));
            }
        }
        faulty.heal();
        for (stored, data) in &kept {
            // Reads into other spans.
            let len = stored.len().count();
            let whole = zeros(len + 100);
            let at = random.u64(..=len);
            let into = [(100, at), (100 + at, len - at)]
                .map(|(offset, len)| whole.part(Bytes::new(offset), Bytes::new(len)).unwrap());
            world.store.read(stored, &into).unwrap();
            prop_assert!(&bytes_of(&whole)[100..] == data.as_slice());
        }
        let sum: Bytes = kept.iter().map(|(stored, _)| stored.charged()).sum();
        world.assert_holds(sum);
        drop(kept);
        world.assert_empty();
    }
}
