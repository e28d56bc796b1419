//! Transfers between a device range and host blocks.

use super::*;

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
