//! Transfers between a device range and host blocks: bytes, order beside other work, and measured rates.

use vramp_tiers::DiskStore;
use vramp_tiers::disk::DiskConfig;
use vramp_tiers::links::{LinkKey, Links};
use vramp_tiers::movers::{MeasuredLink, Profile, Profiler, ProfilerConfig, UnmeasuredLink};

use super::*;

// --- Transfers between a device range and host blocks ---

#[test]
fn bytes_are_intact_for_odd_offsets_and_lengths_across_runs_of_blocks() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(32));
    let whole = put(&bench, range, 1);
    assert_eq!(bench.device.peek(range).unwrap(), whole);
    let mib = MIB.count();
    let cases = [
        (0, 1, 0),
        (1, 4095, 7),
        (mib - 1, 2, mib - 1),
        (12_345, 4 * mib, 3 * mib + 1),
        (777, 13 * mib + 13, 511),
        (0, 32 * mib, 0),
        (5 * mib + 1, 4 * mib + 1, 2 * mib - 3),
    ];
    // Blocks freed out of order leave runs of different lengths.
    let mut held: Vec<_> = (0..12).map(|_| bench.pool.allocate(MIB).unwrap()).collect();
    let mut odd = 0;
    held.retain(|_| {
        odd += 1;
        odd % 3 == 0
    });
    for (offset, len, at) in cases {
        let at = Bytes::new(at);
        let source = part(range, offset, len);
        let host = bench.pool.allocate(at + source.len).unwrap();
        let mut down = bench.mover.to_host(source, host).at(at).start().unwrap();
        down.wait().unwrap();
        let host = down.into_host();
        let expected = &whole[offset as usize..(offset + len) as usize];
        assert!(read(&host, at, source.len) == expected, "{len} from {offset} to {at}");
        // Back to another place.
        let other = memory(&bench.device, source.len + Bytes::new(3));
        let target = part(other, 3, len);
        let mut up = bench.mover.to_device(target, host).at(at).start().unwrap();
        up.wait().unwrap();
        assert!(bench.device.peek(target).unwrap() == expected, "{len} back from {at}");
    }
    no_hazards(&bench.device);
    assert_eq!(waits_for_the_device(&bench.device.take_log()), 0);
}

#[test]
fn a_copy_of_64_mib_makes_twelve_driver_calls_and_none_waits_for_the_device() {
    let bench = bench_with(MoverConfig::default());
    let range = memory(&bench.device, Bytes::mib(64));
    let big = HostPoolConfig { blocks_per_pool: 128, ..BLOCKS };
    let pool = HostPool::new(bench.pool.space(), big, [driver(&bench.device)]).unwrap();
    let mover = Mover::new(driver(&bench.device), &pool, MoverConfig::default()).unwrap();
    for round in 0..2 {
        let host = pool.allocate(range.len).unwrap();
        bench.device.take_log();
        let mut down = mover.to_host(range, host).start().unwrap();
        down.wait().unwrap();
        let mut up = mover.to_device(range, down.into_host()).start().unwrap();
        up.wait().unwrap();
        drop(up);
        let log = bench.device.take_log();
        let of = |call| log.iter().filter(|logged| logged.call == call).count();
        assert_eq!(of(Call::CopyToHost), 4);
        assert_eq!(of(Call::CopyToDevice), 4);
        assert_eq!(of(Call::Record), 8);
        assert_eq!(of(Call::SynchronizeEvent), 8);
        // Events are created once.
        assert_eq!(of(Call::CreateEvent), if round == 0 { 8 } else { 0 });
        assert_eq!(log.len(), if round == 0 { 32 } else { 24 });
    }
    no_hazards(&bench.device);
}

#[test]
fn what_is_in_flight_is_bounded_over_all_transfers_of_a_direction() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(64));
    let most = SMALL.step * u64::from(SMALL.steps_in_flight);
    // Pinning blocks takes longer than many copies.
    let mut hosts = [(); 3].map(|()| bench.pool.allocate(Bytes::mib(32)).unwrap()).into_iter();
    let mut start = |offset: u64| {
        let source = part(range, offset * MIB.count(), 32 * MIB.count());
        bench.mover.to_host(source, hosts.next().unwrap()).start().unwrap()
    };
    let (left_alone, mut driven) = (start(0), start(32));
    assert_eq!(bench.mover.in_flight(), (most, Bytes::ZERO));
    assert_eq!(left_alone.progress().in_flight, most);
    assert_eq!(driven.progress().in_flight, Bytes::ZERO);
    // A transfer that is not polled does not block the other.
    while !driven.poll().unwrap() {
        assert!(bench.mover.in_flight().0 <= most);
    }
    let mut again = start(0);
    again.wait().unwrap();
    drop(left_alone);
    assert_eq!(bench.mover.in_flight().0, Bytes::ZERO);
    no_hazards(&bench.device);
}

#[test]
fn both_directions_run_at_once() {
    let bench = bench();
    let [down_range, up_range] = [32, 32].map(|mib| memory(&bench.device, Bytes::mib(mib)));
    let bytes = put(&bench, down_range, 2);
    let upward = pattern(up_range.len, 3);
    let host = [bench.pool.allocate(down_range.len).unwrap(), blocks(&bench.pool, MIB, &upward)];
    let [down_host, up_host] = host;
    let alone_ns = 32.0 * (1 << 20) as f64 / 55.0;
    bench.device.take_log();
    let begun = bench.device.now_ns();
    let mut down = bench.mover.to_host(down_range, down_host).start().unwrap();
    let mut up = bench.mover.to_device(up_range, up_host).at(MIB).start().unwrap();
    wait_all(&mut [&mut down, &mut up]).unwrap();
    let took_ns = (bench.device.now_ns() - begun) as f64;
    assert!(took_ns < 1.5 * alone_ns, "{took_ns} ns for both, {alone_ns} ns for one");
    assert!(read(&down.into_host(), Bytes::ZERO, down_range.len) == bytes);
    assert!(bench.device.peek(up_range).unwrap() == upward);
    no_hazards(&bench.device);
}

#[test]
fn calls_of_transfers_in_both_directions_grow_with_steps_and_not_with_time() {
    let mut calls = Vec::new();
    for (mib, steps) in [(32_u64, 8_usize), (128, 32)] {
        let bench = bench();
        let [down_range, up_range] = [(); 2].map(|()| memory(&bench.device, Bytes::mib(mib)));
        let hosts = [(); 2].map(|()| bench.pool.allocate(Bytes::mib(mib)).unwrap());
        let [down_host, up_host] = hosts;
        bench.device.take_log();
        let mut down = bench.mover.to_host(down_range, down_host).start().unwrap();
        let mut up = bench.mover.to_device(up_range, up_host).start().unwrap();
        wait_all(&mut [&mut down, &mut up]).unwrap();
        let log = bench.device.take_log();
        let of = |call| log.iter().filter(|logged| logged.call == call).count();
        assert_eq!(of(Call::Record), 2 * steps);
        assert!(of(Call::SynchronizeEvent) <= 2 * steps, "{} waits", of(Call::SynchronizeEvent));
        assert!(of(Call::Query) <= 10 * steps, "{} queries for {steps} steps", of(Call::Query));
        calls.push(log.len());
        no_hazards(&bench.device);
    }
    assert!(calls[1] <= 5 * calls[0], "{calls:?}");
}

#[test]
fn a_transfer_that_fails_beside_others_is_reported_after_they_ended() {
    let bench = bench();
    let ranges = [(); 2].map(|()| memory(&bench.device, Bytes::mib(40)));
    let bytes = put(&bench, ranges[0], 7);
    let token = CancelToken::new();
    let [one, two] = [(); 2].map(|()| bench.pool.allocate(Bytes::mib(40)).unwrap());
    let mut down = bench.mover.to_host(ranges[0], one).start().unwrap();
    let mut up = bench.mover.to_device(ranges[1], two).cancelled_by(&token).start().unwrap();
    token.cancel();
    let ended = wait_all(&mut [&mut up, &mut down]);
    assert!(matches!(ended, Err(MoveError::Cancelled { .. })), "{ended:?}");
    assert_eq!(up.wait(), Err(ended.unwrap_err()));
    assert!(down.is_done());
    assert!(read(&down.into_host(), Bytes::ZERO, Bytes::mib(40)) == bytes);
    // Several in one direction share the window, which another transfer may use up.
    let mut others = [0, 1, 2].map(|_| {
        let host = bench.pool.allocate(Bytes::mib(40)).unwrap();
        bench.mover.to_host(ranges[0], host).start().unwrap()
    });
    let [first, second, third] = &mut others;
    wait_all(&mut [third, second]).unwrap();
    assert!(!first.is_done());
    wait_all(&mut [first]).unwrap();
    assert!(
        others
            .into_iter()
            .all(|other| read(&other.into_host(), Bytes::ZERO, Bytes::mib(40)) == bytes)
    );
    wait_all(&mut []).unwrap();
    no_hazards(&bench.device);
}

#[test]
fn cancelled_midway_it_tells_exactly_what_arrived() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(40));
    let bytes = put(&bench, range, 4);
    let host = blocks(&bench.pool, Bytes::ZERO, &vec![0xee; bytes.len()]);
    let mut transfer = bench.mover.to_host(range, host).start().unwrap();
    while transfer.progress().moved.is_zero() {
        bench.device.advance(10_000);
        assert!(!transfer.poll().unwrap());
    }
    let arrived = transfer.cancel().unwrap();
    // The first of four steps in flight had arrived, and one was queued in its place.
    assert_eq!(arrived, Bytes::mib(20));
    let expected = MoveError::Cancelled { moved: arrived, of: range.len };
    assert_eq!(transfer.wait(), Err(expected.clone()));
    assert_eq!(transfer.poll(), Err(expected));
    assert_eq!(transfer.progress().in_flight, Bytes::ZERO);
    let host = transfer.into_host();
    let (there, rest) = bytes.split_at(arrived.count() as usize);
    assert!(read(&host, Bytes::ZERO, arrived) == there);
    let untouched = read(&host, arrived, Bytes::new(rest.len() as u64));
    assert!(vramp_testing::is_filled(&untouched, 0xee), "it goes no further");
    no_hazards(&bench.device);
}

#[test]
fn a_transfer_that_is_done_is_not_cancelled() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(8));
    let mut transfer =
        bench.mover.to_host(range, bench.pool.allocate(range.len).unwrap()).start().unwrap();
    assert_eq!(transfer.cancel(), Ok(range.len), "all of it was in flight");
    assert_eq!(transfer.wait(), Ok(()));
    assert_eq!(transfer.cancel(), Ok(range.len));
}

#[test]
fn a_token_ends_it_between_two_steps_and_before_the_first() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(40));
    let token = CancelToken::new();
    let mut hosts = [(); 2].map(|()| bench.pool.allocate(range.len).unwrap()).into_iter();
    let mut start = || {
        let host = hosts.next().unwrap();
        bench.mover.to_host(range, host).cancelled_by(&token).start().unwrap()
    };
    let mut transfer = start();
    token.cancel();
    let ended = transfer.wait().unwrap_err();
    assert_eq!(ended, MoveError::Cancelled { moved: Bytes::mib(16), of: range.len });
    let before = bench.device.calls();
    let mut never = start();
    assert_eq!(never.wait(), Err(MoveError::Cancelled { moved: Bytes::ZERO, of: range.len }));
    assert_eq!(bench.device.calls(), before, "no driver call is made for it");
}

#[test]
fn nothing_moves_without_a_driver_call() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(2));
    let stream = bench.device.create_stream().unwrap();
    let before = bench.device.calls();
    let empty = part(range, 5, 0);
    let mut transfer =
        bench.mover.to_host(empty, bench.pool.allocate(Bytes::ZERO).unwrap()).start().unwrap();
    assert_eq!(transfer.poll(), Ok(true));
    assert_eq!(transfer.cancel(), Ok(Bytes::ZERO));
    assert_eq!(transfer.wait(), Ok(()));
    let mut staged = bench.mover.between(empty, &bench.mover, empty).unwrap();
    assert_eq!(staged.poll(), Ok(true));
    assert_eq!(bench.device.calls(), before);
    let host = transfer.into_host();
    let transfer = bench.mover.to_device(empty, host).at(Bytes::ZERO).start().unwrap();
    assert!(transfer.finish_on(stream).is_ok());
}

#[test]
fn what_does_not_fit_is_refused_with_the_blocks() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(4));
    let before = bench.device.calls();
    let host = blocks(&bench.pool, Bytes::ZERO, &[42; 100]);
    let refused = bench.mover.to_device(range, host).start().unwrap_err();
    let MoveError::Outside(outside) = refused.error else { panic!("{}", refused.error) };
    assert_eq!((outside.len, outside.size), (range.len, MIB));
    assert_eq!(read(&refused.host, Bytes::ZERO, Bytes::new(100)), [42; 100]);
    let far = Bytes::new(u64::MAX);
    let tiny = part(range, 0, 2);
    let refused = bench.mover.to_device(tiny, refused.host).at(far).start().unwrap_err();
    assert!(matches!(refused.error, MoveError::Outside(_)));
    let beyond = AddrRange::new(DeviceAddr::new(u64::MAX), Bytes::new(2));
    let refused = bench.mover.to_host(beyond, refused.host).start().unwrap_err();
    assert_eq!(refused.error, MoveError::BadRange(beyond));
    let other = bench.mover.between(tiny, &bench.mover, part(range, 2, 1)).unwrap_err();
    assert_eq!(other, MoveError::OtherLength { from: Bytes::new(2), to: Bytes::new(1) });
    assert_eq!(bench.device.calls(), before);
    // Addresses without memory: the device fails, as with any other work.
    let nowhere = AddrRange::new(bench.device.reserve(range.len, range.len).unwrap(), range.len);
    let host = bench.pool.allocate(range.len).unwrap();
    let started = bench.mover.to_host(nowhere, host).start();
    let error = started.map_or_else(|failed| failed.error, |mut far| far.wait().unwrap_err());
    let error = error.driver_error().expect("it is the device's").clone();
    assert!(error.is_device_lost() && !error.is_out_of_memory());
}

#[test]
fn a_mover_that_makes_no_sense_is_refused() {
    let bench = bench();
    let wrong = [
        MoverConfig { step: Bytes::mib(3), ..SMALL },
        MoverConfig { step: Bytes::mib(33), ..SMALL },
        MoverConfig { steps_in_flight: 0, ..SMALL },
        MoverConfig { steps_in_flight: 65, ..SMALL },
        MoverConfig { staging_pieces: 1, ..SMALL },
    ];
    for config in wrong {
        let refused = Mover::new(driver(&bench.device), &bench.pool, config).unwrap_err();
        assert!(matches!(refused, MoveError::Config(_)), "{refused}");
    }
    let other = simulator();
    let refused = Mover::new(driver(&other), &bench.pool, SMALL).unwrap_err();
    assert!(matches!(refused, MoveError::Host(HostPoolError::NotPinnedFor(_))), "{refused}");
    let elsewhere = Mover::new(driver(&other), &pool(&[&other]), SMALL).unwrap();
    let range = memory(&bench.device, MIB);
    let refused = bench.mover.between(range, &elsewhere, range).unwrap_err();
    assert!(matches!(refused, MoveError::Host(HostPoolError::NotPinnedFor(_))), "{refused}");
}

#[test]
fn it_goes_on_from_thread_to_thread() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(30));
    let bytes = put(&bench, range, 8);
    let transfers: Vec<Transfer> = (0..4)
        .map(|_| {
            let host = bench.pool.allocate(range.len).unwrap();
            bench.mover.to_host(range, host).start().unwrap()
        })
        .collect();
    std::thread::scope(|scope| {
        for mut transfer in transfers {
            let bytes = &bytes;
            scope.spawn(move || {
                transfer.wait().unwrap();
                assert!(read(&transfer.into_host(), Bytes::ZERO, range.len) == *bytes);
            });
        }
    });
    no_hazards(&bench.device);
}

// --- Order between copies and other work ---

#[test]
fn polling_never_waits() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(40));
    let other = bench.device.create_stream().unwrap();
    let gate = bench.device.gate();
    bench.device.launch(other, Kernel::new("long").writing(range).until(gate)).unwrap();
    let host = bench.pool.allocate(range.len).unwrap();
    let moving = bench.mover.to_host(range, host).after(CopyDependency::Stream(other));
    let mut transfer = moving.start().unwrap();
    for _ in 0..100 {
        // Waiting for a kernel behind a closed gate would never return.
        assert!(!transfer.poll().unwrap());
    }
    let TransferProgress { moved, in_flight, total } = transfer.progress();
    assert_eq!((moved, in_flight, total), (Bytes::ZERO, Bytes::mib(16), range.len));
    bench.device.open(gate);
    transfer.wait().unwrap();
    no_hazards(&bench.device);
}

#[test]
fn a_copy_runs_after_its_dependencies_and_a_missing_one_is_a_hazard() {
    for ordered in [true, false] {
        let bench = bench();
        let range = memory(&bench.device, Bytes::mib(20));
        let [writer, event_writer] = [(); 2].map(|()| bench.device.create_stream().unwrap());
        let event = bench.device.create_event().unwrap();
        let (front, back) = (part(range, 0, 10 << 20), part(range, 10 << 20, 10 << 20));
        let slow = |name, range| Kernel::new(name).writing(range).lasting(50_000_000);
        bench.device.launch(writer, slow("front", front)).unwrap();
        bench.device.launch(event_writer, slow("back", back)).unwrap();
        bench.device.fill(writer, front, 1).unwrap();
        bench.device.fill(event_writer, back, 2).unwrap();
        bench.device.record(event, event_writer).unwrap();
        let mut moving = bench.mover.to_host(range, bench.pool.allocate(range.len).unwrap());
        if ordered {
            moving =
                moving.after(CopyDependency::Stream(writer)).after(CopyDependency::Event(event));
        }
        let mut transfer = moving.start().unwrap();
        transfer.wait().unwrap();
        let arrived = read(&transfer.into_host(), Bytes::ZERO, range.len);
        let (ones, twos) = arrived.split_at(10 << 20);
        let whole = vramp_testing::is_filled(ones, 1) && vramp_testing::is_filled(twos, 2);
        assert_eq!(whole, ordered);
        assert_eq!(bench.device.hazards().is_empty(), ordered);
    }
}

#[test]
fn finished_on_a_stream_the_host_never_waits_and_a_kernel_behind_it_sees_the_bytes() {
    for steps_before in [0, 1, 3] {
        let bench = bench();
        let range = memory(&bench.device, Bytes::mib(45));
        let copy = memory(&bench.device, Bytes::mib(45));
        let odd = part(range, 1, 44 * MIB.count() + 3);
        let bytes = pattern(odd.len, 5);
        let host = blocks(&bench.pool, MIB, &bytes);
        let stream = bench.device.create_stream().unwrap();
        let mut transfer = bench.mover.to_device(odd, host).at(MIB).start().unwrap();
        while transfer.progress().moved < Bytes::mib(4) * steps_before {
            bench.device.advance(10_000);
            transfer.poll().unwrap();
        }
        bench.device.take_log();
        let begun = bench.device.now_ns();
        let host = transfer.finish_on(stream).unwrap();
        let target = part(copy, 0, odd.len.count());
        let onward = vramp_driver::DeviceCopy { from: odd.start, to: target.start, len: odd.len };
        bench.device.copy(stream, onward).unwrap();
        let took_ns = bench.device.now_ns() - begun;
        let copies_ns = (odd.len.count() as f64 / 55.6) as u64;
        assert!(took_ns < copies_ns / 4, "{took_ns} ns on the host, {copies_ns} ns on the link");
        let log = bench.device.take_log();
        let waits = [Call::SynchronizeEvent, Call::SynchronizeStream];
        assert!(!log.iter().any(|logged| waits.contains(&logged.call)), "{log:?}");
        // Once dropped, the blocks are reused only after the copies.
        drop(host);
        assert!(bench.pool.stats().pending_blocks > 0);
        bench.device.synchronize_stream(stream).unwrap();
        assert!(bench.device.peek(target).unwrap() == bytes);
        assert_eq!(bench.pool.stats().pending_blocks, 0);
        no_hazards(&bench.device);
    }
}

#[test]
fn finished_on_a_stream_there_is_no_bound_and_later_transfers_still_find_room() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(60));
    let bytes = put(&bench, range, 6);
    let stream = bench.device.create_stream().unwrap();
    let mut hosts = [(); 2].map(|()| bench.pool.allocate(range.len).unwrap()).into_iter();
    let mut to_host = || bench.mover.to_host(range, hosts.next().unwrap()).start().unwrap();
    let first = to_host().finish_on(stream).unwrap();
    assert_eq!(bench.mover.in_flight().0, range.len);
    let mut second = to_host();
    assert_eq!(second.progress().in_flight, Bytes::ZERO);
    second.wait().unwrap();
    bench.device.synchronize_stream(stream).unwrap();
    assert!(read(&first, Bytes::ZERO, range.len) == bytes);
    assert!(read(&second.into_host(), Bytes::ZERO, range.len) == bytes);
    no_hazards(&bench.device);
}

#[test]
fn a_capturing_stream_is_refused_and_its_capture_goes_on() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(10));
    let bytes = put(&bench, range, 7);
    let stream = bench.device.create_stream().unwrap();
    bench.device.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    bench.device.fill(stream, part(range, 0, 1), 0).unwrap();
    let host = bench.pool.allocate(range.len).unwrap();
    let moving = bench.mover.to_host(range, host).after(CopyDependency::Stream(stream));
    let refused = moving.start().unwrap_err();
    assert_eq!(refused.error, MoveError::Capturing);
    let transfer = bench.mover.to_host(range, refused.host).start().unwrap();
    let refused = transfer.finish_on(stream).unwrap_err();
    assert_eq!(refused.error, MoveError::Capturing);
    // The copies that were in flight have completed.
    assert!(read(&refused.host, Bytes::ZERO, range.len) == bytes);
    assert_eq!(bench.device.invalidated_captures(), 0);
    bench.device.end_capture(stream).unwrap();
    no_hazards(&bench.device);
}

#[test]
fn dropped_in_flight_it_waits_so_that_memory_can_go() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(40));
    let host = bench.pool.allocate(range.len).unwrap();
    drop(bench.mover.to_host(range, host).start().unwrap());
    assert_eq!(bench.pool.stats().pending_blocks, 0, "no copy outlives it");
    // Unmapping memory that queued work still uses would lose the device.
    bench.device.unmap(range).unwrap();
    bench.device.free_addresses(range).unwrap();
    no_hazards(&bench.device);
    assert_eq!(bench.mover.in_flight(), (Bytes::ZERO, Bytes::ZERO));
}

#[test]
fn a_transfer_dropped_while_a_stream_captures_waits_and_leaves_the_capture_as_it_is() {
    for mode in CaptureMode::ALL {
        let bench = bench();
        let range = memory(&bench.device, Bytes::mib(40));
        let captured = bench.device.create_stream().unwrap();
        let store = bench.pool.allocate(range.len).unwrap();
        let mut moving = bench.mover.to_host(range, store).start().unwrap();
        bench.device.begin_capture(captured, mode).unwrap();
        assert_eq!(moving.cancel().unwrap(), Bytes::mib(16), "what was queued arrives");
        drop(moving);
        bench.device.end_capture(captured).unwrap();
        assert_eq!(bench.device.invalidated_captures(), 0, "{mode:?}");
        assert_eq!(bench.mover.in_flight(), (Bytes::ZERO, Bytes::ZERO));
        no_hazards(&bench.device);
    }
}

// --- Measured transfer rates ---

const GPUS: [SpaceId; 2] = [SpaceId::gpu(0), SpaceId::gpu(1)];
const HOST: SpaceId = SpaceId::host(0);
const DISK: SpaceId = SpaceId::disk(0);

/// Measures two devices, a host and a disk. The simulator keeps no bytes.
fn measured(sizes: &[Bytes], memory_len: Bytes, disk: Bytes) -> Profile {
    let devices = [(); 2].map(|()| Arc::new(Simulator::card("h200").unwrap()));
    let manager = ReservationManager::new([(DISK, SpaceConfig::disk(disk))]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let config = DiskConfig { file_size: Bytes::mib(16), ..DiskConfig::default() };
    let store = DiskStore::open(dir.path(), config, &manager.space(DISK).unwrap()).unwrap();
    let pool = pool(&[&devices[0], &devices[1]]);
    let config = ProfilerConfig { sizes: sizes.to_vec(), warm_up: 1, rounds: 3 };
    let mut profiler = Profiler::new(config).disk(&Arc::new(store));
    for (space, device) in GPUS.into_iter().zip(&devices) {
        let mover = Mover::new(driver(device), &pool, SMALL).unwrap();
        profiler = profiler.gpu(space, &mover, memory(device, memory_len));
    }
    let profile = profiler.measure().unwrap();
    drop(profiler);
    assert_eq!(pool.space().total(), Bytes::ZERO, "nothing is kept");
    assert_eq!(manager.space(DISK).unwrap().total(), Bytes::ZERO);
    profile
}

#[test]
fn every_pair_is_measured_each_way_at_every_size_with_positive_numbers() {
    let sizes = [Bytes::kib(4), Bytes::mib(1), Bytes::mib(8)];
    let profile = measured(&sizes, Bytes::mib(16), Bytes::mib(64));
    assert_eq!(profile.unmeasured, []);
    let [one, two] = GPUS;
    let pairs = [(one, HOST), (two, HOST), (one, two), (one, DISK), (two, DISK), (HOST, DISK)];
    let expected = pairs.into_iter().flat_map(|(from, to)| [(from, to), (to, from)]);
    let expected: Vec<_> = expected.flat_map(|way| sizes.map(|size| (way, size))).collect();
    for ((from, to), size) in &expected {
        let is_it = |link: &&MeasuredLink| {
            (link.from, link.to, link.size_bytes) == (*from, *to, size.count())
        };
        let found: Vec<_> = profile.links.iter().filter(is_it).collect();
        let [link] = found[..] else { panic!("{from} to {to}, {size}: {found:?}") };
        assert!(link.took_ns > 0 && link.bytes_per_s > 0, "{link:?}");
    }
    // No link from a disk to itself or to another disk.
    assert_eq!(profile.links.len(), expected.len());
    assert_eq!((profile.step_bytes, profile.rounds), (4 << 20, 3));
    assert_eq!(profile.both_ways.len(), 2 * sizes.len());
}

#[test]
fn the_defaults_are_four_sizes_and_a_tiny_one_in_ten_rounds_after_three() {
    let ProfilerConfig { sizes, warm_up, rounds } = ProfilerConfig::default();
    assert_eq!(sizes[1..], [1, 16, 64, 256].map(Bytes::mib));
    assert_eq!((sizes[0], warm_up, rounds), (Bytes::kib(4), 3, 10));
}

#[test]
fn a_large_move_is_as_fast_as_the_link_and_a_tiny_one_tells_the_latency() {
    let sizes = [Bytes::kib(4), Bytes::mib(64)];
    let profile = measured(&sizes, Bytes::mib(128), Bytes::mib(64));
    let links: Links = profile.rates().collect();
    let rate = |from, to| links.rate(LinkKey { from, to }).unwrap().bytes_per_s as f64 / 1e9;
    // The simulated link has the rate of two streams, because streams do not compete there.
    for (from, to, alone) in [(GPUS[0], HOST, 55.4), (HOST, GPUS[1], 55.6)] {
        let rate = rate(from, to);
        assert!((0.95 * alone..=2.0 * alone).contains(&rate), "{rate} GB/s");
    }
    let both = profile.both_ways.iter().find(|pair| pair.size_bytes == 64 << 20).unwrap();
    assert!(both.bytes_per_s as f64 > 1.7 * 55.4e9, "{both:?}");
    assert_eq!(links.iter().count(), 12, "each way once");
}

#[test]
fn links_that_cannot_be_measured_are_listed_with_the_reason() {
    let profile = measured(&[Bytes::mib(1), Bytes::mib(8)], Bytes::mib(8), Bytes::mib(4));
    let why = |from, to, size: u64| {
        let is_it =
            |way: &&UnmeasuredLink| (way.from, way.to, way.size_bytes) == (from, to, size << 20);
        profile.unmeasured.iter().find(is_it).map(|way| way.reason.as_str())
    };
    assert_eq!(why(GPUS[0], DISK, 1), None);
    assert!(why(GPUS[0], DISK, 8).unwrap().contains("disk"), "{:?}", profile.unmeasured);
    // Both directions at once need twice the memory.
    assert!(why(GPUS[1], HOST, 8).unwrap().contains("fit"));
    assert!(profile.links.iter().any(|link| link.size_bytes == 8 << 20 && link.to == GPUS[1]));
}

#[test]
fn a_profile_is_kept_as_toml_or_json_and_comes_back_the_same() {
    let profile = measured(&[Bytes::mib(1), Bytes::mib(8)], Bytes::mib(8), Bytes::mib(4));
    let toml = toml::to_string(&profile).unwrap();
    assert!(toml.contains("from = \"gpu0\"\nto = \"host0\""), "{toml}");
    assert_eq!(toml::from_str::<Profile>(&toml).unwrap(), profile);
    let json = serde_json::to_string(&profile).unwrap();
    assert_eq!(serde_json::from_str::<Profile>(&json).unwrap(), profile);
    let wrong = toml.replace("gpu0", "gpu").replace("gpu1", "card");
    let error = toml::from_str::<Profile>(&wrong).unwrap_err().to_string();
    assert!(error.contains("is no space"), "{error}");
}
