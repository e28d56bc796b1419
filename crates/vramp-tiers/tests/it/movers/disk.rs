//! Transfers to a disk and back, through staging buffers, and failing driver calls.

use std::sync::atomic::Ordering;

use tempfile::TempDir;
use vramp_host::{Direction, DiskErrorKind, IoChoice};
use vramp_testing::fail_each_call;
use vramp_tiers::disk::{Checksum, DiskConfig, DiskTierError, FileNames};
use vramp_tiers::movers::{DiskBudget, DiskCopy};
use vramp_tiers::reserve::LimitPolicy;
use vramp_tiers::{DiskStore, MemorySpace};

use super::faulty::{EIO, ENOSPC, Fault, Faulty, fail};
use super::*;

// --- Transfers from a device to a disk and back ---

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

// --- Transfers through staging buffers ---

#[test]
fn between_two_devices_data_goes_through_few_blocks_and_both_links_at_once() {
    let devices = [simulator(), simulator()];
    let pool = pool(&[&devices[0], &devices[1]]);
    // The clocks of the devices differ.
    devices[1].advance(1_000_000_000);
    let [near, far] =
        [0, 1].map(|index| Mover::new(driver(&devices[index]), &pool, SMALL).unwrap());
    let [from, to] = [0, 1].map(|index| memory(&devices[index], Bytes::mib(42)));
    let (from, to) = (part(from, 3, 41 << 20), part(to, 5, 41 << 20));
    let bytes = pattern(from.len, 9);
    let host = blocks(&pool, Bytes::ZERO, &bytes);
    near.to_device(from, host).start().unwrap().wait().unwrap();
    let begun = devices[0].now_ns();
    let stream = devices[1].create_stream().unwrap();
    devices[1].launch(stream, Kernel::new("old").reading(to).lasting(1_000_000)).unwrap();
    let staged = near.between(from, &far, to).unwrap();
    let mut staged = staged.after_at_target(CopyDependency::Stream(stream)).unwrap();
    pool.space().reset_peaks();
    staged.wait().unwrap();
    assert!(devices[1].peek(to).unwrap() == bytes);
    assert!(pool.space().peak() <= SMALL.step * u64::from(SMALL.staging_pieces));
    drop(staged);
    assert_eq!(pool.space().total(), Bytes::ZERO);
    let took_ns = (devices[0].now_ns() - begun) as f64;
    assert!(took_ns < 2.0 * from.len.count() as f64 / 55.0, "{took_ns}");
    devices.iter().for_each(|device| no_hazards(device));
}

#[test]
fn within_one_device_data_is_copied_there() {
    let bench = bench();
    let [from, to] = [20, 20].map(|mib| memory(&bench.device, Bytes::mib(mib)));
    let bytes = put(&bench, from, 10);
    bench.device.take_log();
    bench.mover.between(from, &bench.mover.clone(), to).unwrap().wait().unwrap();
    assert!(bench.device.peek(to).unwrap() == bytes);
    let log = bench.device.take_log();
    assert_eq!(log.iter().filter(|logged| logged.call == Call::Copy).count(), 5);
    assert!(!log.iter().any(|logged| logged.call == Call::CopyToHost));
    no_hazards(&bench.device);
}

#[test]
fn a_staged_move_is_cancelled_between_two_pieces_and_gives_its_blocks_back() {
    let bench = bench();
    let other = simulator();
    let pool = pool(&[&bench.device, &other]);
    let [near, far] =
        [&bench.device, &other].map(|device| Mover::new(driver(device), &pool, SMALL).unwrap());
    let [from, to] = [&bench.device, &other].map(|device| memory(device, Bytes::mib(64)));
    let token = CancelToken::new();
    let mut staged = near.between(from, &far, to).unwrap().cancelled_by(&token);
    while staged.progress().moved.is_zero() {
        staged.poll().unwrap();
        // Only calls advance the clock of a simulated device.
        [&bench.device, &other].iter().for_each(|device| device.advance(10_000));
    }
    token.cancel();
    let Err(MoveError::Cancelled { moved, of }) = staged.wait() else { panic!("it goes on") };
    assert!(!moved.is_zero() && moved < of, "{moved}");
    assert_eq!(pool.space().total(), Bytes::ZERO, "idle buffers are freed");
    drop(near.between(from, &far, to).unwrap());
    let mut dropped = near.between(from, &far, to).unwrap();
    dropped.poll().unwrap();
    drop(dropped);
    assert_eq!(pool.space().total(), Bytes::ZERO);
    no_hazards(&bench.device);
    no_hazards(&other);
}

#[test]
fn where_no_block_is_to_be_had_a_staged_move_says_so_and_with_few_it_goes_slower() {
    let bench = bench();
    let other = simulator();
    let devices = [driver(&bench.device), driver(&other)];
    let pool = HostPool::new(&space(Bytes::mib(8)), BLOCKS, devices).unwrap();
    let [near, far] =
        [&bench.device, &other].map(|device| Mover::new(driver(device), &pool, SMALL).unwrap());
    let [from, to] = [&bench.device, &other].map(|device| memory(device, Bytes::mib(20)));
    let held = pool.allocate(Bytes::mib(4)).unwrap();
    near.between(from, &far, to).unwrap().wait().unwrap();
    let more = pool.allocate(Bytes::mib(4)).unwrap();
    let refused = near.between(from, &far, to).unwrap().wait().unwrap_err();
    assert!(matches!(refused, MoveError::Host(HostPoolError::Full(_))), "{refused}");
    drop((held, more));
}

// --- Failing driver calls ---

/// Runs every kind of transfer. All of them end, whatever fails.
fn everything(
    devices: &[Arc<Simulator>; 2],
    pool: &HostPool,
    memory: &[AddrRange; 2],
    stream: Stream,
) -> Result<(), MoveError> {
    let near = Mover::new(driver(&devices[0]), pool, SMALL)?;
    let far = Mover::new(driver(&devices[1]), pool, SMALL)?;
    let host = pool.allocate(memory[0].len)?;
    let moving = near.to_host(memory[0], host).after(CopyDependency::Stream(stream));
    let mut down = moving.start()?;
    let side = near.to_host(memory[0], pool.allocate(memory[0].len)?);
    let side = side.start()?;
    down.poll()?;
    down.wait()?;
    // It reads what the next transfer writes.
    drop(side);
    let up = near.to_device(memory[0], down.into_host());
    let up = up.start()?;
    drop(up.finish_on(stream)?);
    near.between(memory[0], &far, memory[1])?.after(CopyDependency::Stream(stream))?.wait()
}

#[test]
fn whichever_driver_call_fails_the_error_is_typed_and_nothing_leaks() {
    for code in [2, 1] {
        let mut failed = 0;
        fail_each_call(|nth| {
            let devices = [simulator(), simulator()];
            let memory = [0, 1].map(|index| memory(&devices[index], Bytes::mib(10)));
            let stream = devices[0].create_stream().unwrap();
            let before = devices.clone().map(|device| device.live());
            let pool = pool(&[&devices[0], &devices[1]]);
            let before_calls = devices[0].calls();
            devices[0].set_faults(FaultPlan::nth(nth).with_code(code));
            let outcome = everything(&devices, &pool, &memory, stream);
            devices[0].set_faults(FaultPlan::none());
            let calls = devices[0].calls() - before_calls;
            devices[0].synchronize_stream(stream).unwrap();
            assert_eq!(pool.space().total(), Bytes::ZERO, "call {nth}");
            assert_eq!(pool.stats().pending_blocks, 0, "call {nth}");
            drop(pool);
            for (device, before) in devices.iter().zip(before) {
                // The last handle of a mover may have met the failure while it destroyed a stream
                // or event.
                let LiveObjects { streams, events, .. } = before;
                let now = device.live();
                let left = now.streams + now.events - streams - events;
                assert!(left <= usize::from(outcome.is_ok()), "call {nth} leaves {now:?}");
                assert_eq!(now.host_buffers, before.host_buffers, "call {nth}");
                no_hazards(device);
            }
            match outcome {
                Ok(()) => {}
                Err(error) => {
                    assert!(!error.is_unsettled(), "call {nth}: {error}");
                    let driver = error.driver_error().unwrap_or_else(|| panic!("{nth}: {error}"));
                    assert_eq!(driver.code, code, "call {nth}: {error}");
                    assert_eq!(driver.is_out_of_memory(), code == 2);
                    failed += 1;
                }
            }
            calls
        });
        assert!(failed > 5, "{failed} calls failed");
    }
}

#[test]
fn a_device_that_is_lost_midway_is_an_error_of_its_own_and_never_out_of_memory() {
    for nth in [1, 3, 6, 9, 12, 20] {
        let bench = bench();
        let range = memory(&bench.device, Bytes::mib(40));
        let host = bench.pool.allocate(range.len).unwrap();
        bench.device.set_faults(FaultPlan::nth(nth).with_code(700));
        let moved = match bench.mover.to_host(range, host).start() {
            Ok(mut transfer) => transfer.wait().map_err(|error| (error, transfer.progress().moved)),
            Err(failed) => Err((failed.error, Bytes::ZERO)),
        };
        let (error, progress) = moved.unwrap_err();
        let MoveError::Device { moved, of, error } = error else { panic!("{error}") };
        assert!(moved < of && moved == progress, "{moved}");
        assert!(error.is_device_lost() && !error.is_out_of_memory());
        assert_eq!(error.code, 700);
    }
}

#[test]
fn blocks_of_a_copy_whose_end_is_unknown_are_not_reused_under_it() {
    let unsettled = |records: FaultPlan| records.and(FaultPlan::nth_of(Call::SynchronizeStream, 1));
    // The use of the blocks can be recorded later, or never.
    for (records, pending, leaked) in [
        (FaultPlan::nth_of(Call::Record, 1), 4, 0),
        (FaultPlan::from_nth_of(Call::Record, 1), 0, 4),
    ] {
        for staged in [true, false] {
            let devices = [simulator(), simulator()];
            let [from, to] = [0, 1].map(|index| memory(&devices[index], Bytes::mib(4)));
            let pool = pool(&[&devices[0], &devices[1]]);
            let near = Mover::new(driver(&devices[0]), &pool, SMALL).unwrap();
            let far = Mover::new(driver(&devices[1]), &pool, SMALL).unwrap();
            let stream = devices[1].create_stream().unwrap();
            let gate = devices[1].gate();
            devices[1].launch(stream, Kernel::new("busy").until(gate)).unwrap();
            let event = devices[1].create_event().unwrap();
            devices[1].record(event, stream).unwrap();
            let after = CopyDependency::Event(event);
            if staged {
                let moving = near.between(from, &far, to).unwrap();
                let mut moving = moving.after_at_target(after).unwrap();
                devices[1].set_faults(unsettled(records.clone()));
                assert!(moving.wait().unwrap_err().is_unsettled());
            } else {
                let moving = far.to_device(to, pool.allocate(to.len).unwrap()).after(after);
                devices[1].set_faults(unsettled(records.clone()));
                assert!(moving.start().unwrap_err().error.is_unsettled());
            }
            devices[1].set_faults(FaultPlan::none());
            let stats = pool.stats();
            assert_eq!((stats.pending_blocks, stats.leaked_blocks), (pending, leaked));
            assert_eq!(pool.space().total(), MIB * leaked);
            devices[1].open(gate);
            no_hazards(&devices[1]);
        }
    }
}
