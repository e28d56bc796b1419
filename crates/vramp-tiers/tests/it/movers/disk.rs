//! Transfers from a device to a disk and back.

use std::sync::atomic::Ordering;

use tempfile::TempDir;
use vramp_host::{Direction, DiskErrorKind, IoChoice};
use vramp_tiers::disk::{Checksum, DiskConfig, DiskTierError, FileNames};
use vramp_tiers::movers::{DiskBudget, DiskCopy};
use vramp_tiers::reserve::LimitPolicy;
use vramp_tiers::{DiskStore, MemorySpace};

use super::faulty::{EIO, ENOSPC, Fault, Faulty, fail};
use super::*;
use vramp_testing::fail_each_call;

/// Files of 64 MiB with names.
const FILES: DiskConfig = DiskConfig {
    file_size: Bytes::mib(64),
    io: IoChoice::Auto,
    depth: 16,
    piece: MIB,
    checksum: Checksum::Crc32,
    names: FileNames::Shown,
    compression: None,
};

/// A device, and a store on a disk that injects faults.
struct World {
    bench: Bench,
    faulty: Arc<Faulty>,
    store: Arc<DiskStore>,
    space: MemorySpace,
    dir: TempDir,
}

fn world() -> World {
    let disk = SpaceId::disk(0);
    let manager = ReservationManager::new([(disk, SpaceConfig::disk(Bytes::mib(128)))]).unwrap();
    let space = manager.space(disk).unwrap();
    let (dir, faulty) = (tempfile::tempdir().unwrap(), Faulty::new());
    let store = DiskStore::open_with(dir.path(), FILES, &space, Arc::<Faulty>::clone(&faulty));
    World { bench: bench(), faulty, store: Arc::new(store.unwrap()), space, dir }
}

impl World {
    fn to_disk(&self, range: AddrRange) -> Result<DiskCopy, MoveError> {
        self.bench.mover.to_disk(range, &self.store, DiskBudget::Space)?.finish()
    }

    /// Checks that nothing is stored, charged or in flight.
    fn assert_empty(&self) {
        self.store.audit().unwrap();
        assert_eq!(self.space.total(), Bytes::ZERO);
        assert_eq!(self.bench.pool.space().total(), Bytes::ZERO);
        assert_eq!(self.bench.pool.stats().pending_blocks, 0);
        assert_eq!(self.bench.mover.in_flight(), (Bytes::ZERO, Bytes::ZERO));
        no_hazards(&self.bench.device);
    }
}

fn disk_error(error: MoveError) -> DiskTierError {
    match error {
        MoveError::Disk { error, .. } => error,
        other => panic!("{other} is no error of the disk"),
    }
}

#[test]
fn every_byte_comes_back_from_the_disk_through_few_blocks() {
    let world = world();
    let range = memory(&world.bench.device, Bytes::mib(36));
    for (offset, len) in [(0, 1), (3, 4096), (0, 36 << 20), (12_345, (33 << 20) + 77)] {
        let range = part(range, offset, len);
        let bytes = put(&world.bench, range, len);
        world.bench.pool.space().reset_peaks();
        let kept = Arc::new(world.to_disk(range).unwrap());
        assert_eq!(kept.len(), range.len);
        assert_eq!(world.space.total(), range.len.checked_round_up(Bytes::kib(4)).unwrap());
        let stream = world.bench.device.create_stream().unwrap();
        world.bench.device.fill(stream, range, 0).unwrap();
        let back = world.bench.mover.from_disk(&kept, range).unwrap();
        back.after_at_target(CopyDependency::Stream(stream)).unwrap().wait().unwrap();
        assert!(world.bench.device.peek(range).unwrap() == bytes, "{len} from {offset}");
        let most = SMALL.step * u64::from(SMALL.staging_pieces);
        assert!(world.bench.pool.space().peak() <= most);
        drop(kept);
        world.assert_empty();
    }
    assert_eq!(waits_for_the_device(&world.bench.device.take_log()), 0);
}

#[test]
fn the_next_pieces_leave_the_device_while_one_is_written() {
    let world = world();
    let range = memory(&world.bench.device, Bytes::mib(40));
    let bytes = put(&world.bench, range, 1);
    world.faulty.close_gate();
    world.bench.device.take_log();
    let mut moving = world.bench.mover.to_disk(range, &world.store, DiskBudget::Space).unwrap();
    for _ in 0..50 {
        assert!(!moving.poll().unwrap());
        world.bench.device.advance(1_000_000);
    }
    let log = world.bench.device.take_log();
    let copies = log.iter().filter(|logged| logged.call == Call::CopyToHost);
    assert_eq!(copies.count(), 4, "as many as there are pieces of staging, of one run each");
    assert_eq!(moving.progress().moved, Bytes::ZERO);
    world.faulty.open_gate();
    let kept = Arc::new(moving.finish().unwrap());
    // A mover with another step length reads it too.
    let config = MoverConfig { step: Bytes::mib(32), ..SMALL };
    let other = Mover::new(driver(&world.bench.device), &world.bench.pool, config).unwrap();
    let copy = memory(&world.bench.device, Bytes::mib(40));
    other.from_disk(&kept, copy).unwrap().wait().unwrap();
    assert!(world.bench.device.peek(copy).unwrap() == bytes);
}

#[test]
fn a_full_disk_leaves_the_source_whole_and_nothing_behind() {
    let world = world();
    let range = memory(&world.bench.device, Bytes::mib(30));
    let bytes = put(&world.bench, range, 2);
    world.faulty.room.store(0, Ordering::Relaxed);
    let refused = disk_error(world.to_disk(range).unwrap_err());
    let DiskTierError::Disk(full) = &refused else { panic!("{refused}") };
    assert_eq!(full.kind, DiskErrorKind::Full);
    world.assert_empty();
    world.faulty.room.store(u64::MAX, Ordering::Relaxed);
    let mut writes = 0;
    world.faulty.set(move |_| {
        writes += 1;
        if writes > 13 { Fault::Fail(ENOSPC) } else { Fault::None }
    });
    let refused = world.to_disk(range).unwrap_err();
    let MoveError::Disk { moved, of, .. } = &refused else { panic!("{refused}") };
    assert!(moved < of, "{moved}");
    world.assert_empty();
    world.faulty.heal();
    // The capacity of the space is a limit as well.
    let held = world.space.charge(Bytes::mib(110)).unwrap();
    assert!(matches!(disk_error(world.to_disk(range).unwrap_err()), DiskTierError::Full(_)));
    drop(held);
    world.assert_empty();
    assert!(world.bench.device.peek(range).unwrap() == bytes);
    drop(world.to_disk(range).unwrap());
}

#[test]
fn a_read_error_and_a_flipped_bit_are_errors_and_the_copy_stays() {
    let world = world();
    let range = memory(&world.bench.device, Bytes::mib(20));
    let bytes = put(&world.bench, range, 3);
    let kept = Arc::new(world.to_disk(range).unwrap());
    let back = || world.bench.mover.from_disk(&kept, range).unwrap().wait();
    world.faulty.set(fail(Direction::Read, EIO));
    let error = disk_error(back().unwrap_err());
    assert!(matches!(error, DiskTierError::Disk(_)), "{error}");
    world.faulty.heal();
    let path = std::fs::read_dir(world.dir.path()).unwrap().next().unwrap().unwrap().path();
    let flip = || {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let mut byte = [0];
        file.read_at(&mut byte, 11 << 20).unwrap();
        file.write_at(&[byte[0] ^ 1], 11 << 20).unwrap();
        file.sync_all().unwrap();
    };
    flip();
    let error = disk_error(back().unwrap_err());
    assert!(matches!(error, DiskTierError::Corrupt { .. }), "{error}");
    flip();
    back().unwrap();
    assert!(world.bench.device.peek(range).unwrap() == bytes);
    drop(kept);
    world.assert_empty();
}

#[test]
fn a_reservation_pays_for_what_goes_to_the_disk_and_bounds_it() {
    let world = world();
    let range = memory(&world.bench.device, Bytes::mib(20));
    let reservation = Arc::new(world.space.request(Bytes::mib(20)).now().unwrap());
    let payer = DiskBudget::Reservation(Arc::clone(&reservation), Arc::new(LimitPolicy::Fail));
    let write = || world.bench.mover.to_disk(range, &world.store, payer.clone()).unwrap().finish();
    let kept = write().unwrap();
    assert_eq!(world.space.total(), Bytes::mib(20), "no byte is charged twice");
    let refused = disk_error(write().unwrap_err());
    assert!(matches!(refused, DiskTierError::NotReserved(_)), "{refused}");
    assert_eq!(world.space.total(), Bytes::mib(20));
    drop(kept);
    drop(write().unwrap());
    drop((payer, reservation));
    world.assert_empty();
}

#[test]
fn cancelled_or_dropped_midway_nothing_is_left_on_the_disk() {
    let world = world();
    let range = memory(&world.bench.device, Bytes::mib(40));
    let token = CancelToken::new();
    let moving = world.bench.mover.to_disk(range, &world.store, DiskBudget::Space).unwrap();
    let mut moving = moving.cancelled_by(&token);
    while moving.progress().moved.is_zero() {
        moving.poll().unwrap();
        world.bench.device.advance(100_000);
    }
    token.cancel();
    let cancelled = moving.finish().unwrap_err();
    let MoveError::Cancelled { moved, of } = cancelled else { panic!("{cancelled}") };
    assert!(!moved.is_zero() && moved < of);
    world.assert_empty();
    let mut moving = world.bench.mover.to_disk(range, &world.store, DiskBudget::Space).unwrap();
    moving.poll().unwrap();
    drop(moving);
    world.assert_empty();
}

#[test]
fn a_device_that_fails_on_the_way_to_the_disk_or_back_leaves_nothing_behind() {
    let world = world();
    let range = memory(&world.bench.device, Bytes::mib(10));
    let bytes = put(&world.bench, range, 4);
    let round = || {
        let kept = Arc::new(world.to_disk(range)?);
        world.bench.mover.from_disk(&kept, range)?.wait()
    };
    fail_each_call(|nth| {
        let before = world.bench.device.calls();
        world.bench.device.set_faults(FaultPlan::nth(nth).with_code(1));
        let outcome = round();
        world.bench.device.set_faults(FaultPlan::none());
        world.assert_empty();
        assert!(world.bench.device.peek(range).unwrap() == bytes, "call {nth}");
        let calls = world.bench.device.calls() - before;
        match outcome {
            Ok(()) => assert!(calls > 15 && (nth == 0 || nth > calls), "call {nth} of {calls}"),
            Err(error) => assert_eq!(error.driver_error().map(|error| error.code), Some(1)),
        }
        calls
    });
}

#[test]
fn no_bytes_go_to_the_disk_and_back_and_other_lengths_are_refused() {
    let world = world();
    let range = memory(&world.bench.device, Bytes::mib(2));
    let empty = Arc::new(world.to_disk(part(range, 1, 0)).unwrap());
    assert!(empty.is_empty());
    world.bench.mover.from_disk(&empty, part(range, 2, 0)).unwrap().wait().unwrap();
    let refused = world.bench.mover.from_disk(&empty, range).unwrap_err();
    assert_eq!(refused, MoveError::OtherLength { from: Bytes::ZERO, to: range.len });
    world.assert_empty();
}

#[test]
fn a_piece_whose_write_failed_did_not_arrive() {
    let world = world();
    let range = memory(&world.bench.device, Bytes::mib(40));
    let bytes = put(&world.bench, range, 3);
    world.faulty.set(fail(Direction::Write, EIO));
    match world.to_disk(range).unwrap_err() {
        MoveError::Disk { moved, of, .. } => assert_eq!((moved, of), (Bytes::ZERO, range.len)),
        other => panic!("{other}"),
    }
    world.faulty.heal();
    let kept = Arc::new(world.to_disk(range).unwrap());
    world.bench.mover.from_disk(&kept, range).unwrap().wait().unwrap();
    assert!(world.bench.device.peek(range).unwrap() == bytes);
}
