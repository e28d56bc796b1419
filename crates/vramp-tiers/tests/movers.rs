//! Data on its way between a device and the host: every byte, in order, and nothing left in flight.

#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use std::sync::Arc;

use vramp::Driver;
use vramp_core::{AddrRange, DeviceAddr};
use vramp_driver::sim::{Backing, FaultPlan, Kernel, LiveObjects, LoggedCall, Simulator};
use vramp_driver::{Call, CaptureMode, Place, Stream};
use vramp_tiers::{
    After, Bytes, CancelToken, HostAllocation, HostPool, HostPoolConfig, HostPoolError, MoveError,
    Mover, MoverConfig, PageKind, Progress, ReservationManager, SpaceConfig, SpaceId, Transfer,
};

const MIB: Bytes = Bytes::mib(1);

/// Runs of four blocks at most.
const BLOCKS: HostPoolConfig = HostPoolConfig {
    block: MIB,
    blocks_per_pool: 4,
    initial_pools: 1,
    spare_blocks: 0,
    node: None,
    pages: PageKind::Small,
};

/// The smallest steps there are.
const SMALL: MoverConfig =
    MoverConfig { step: Bytes::mib(4), steps_in_flight: 4, staging_pieces: 4 };

struct Bench {
    device: Arc<Simulator>,
    pool: HostPool,
    mover: Mover,
}

fn simulator() -> Arc<Simulator> {
    let builder = Simulator::builder().memory(Bytes::gib(1)).backing(Backing::Stored);
    Arc::new(builder.checked().logged(100_000).build())
}

fn pool(devices: &[&Arc<Simulator>]) -> HostPool {
    let host = SpaceId::host(0);
    let manager = ReservationManager::new([(host, SpaceConfig::host(Bytes::gib(1)))]).unwrap();
    let devices = devices.iter().map(|&device| driver(device));
    HostPool::new(&manager.space(host).unwrap(), BLOCKS, devices).unwrap()
}

fn driver(device: &Arc<Simulator>) -> Arc<dyn Driver> {
    device.clone()
}

fn bench_with(config: MoverConfig) -> Bench {
    let device = simulator();
    let pool = pool(&[&device]);
    let mover = Mover::new(driver(&device), &pool, config).unwrap();
    Bench { device, pool, mover }
}

fn bench() -> Bench {
    bench_with(SMALL)
}

/// Mapped memory of whole pages.
fn memory(device: &Simulator, len: Bytes) -> AddrRange {
    let len = len.checked_round_up(device.info().limits.page).unwrap();
    let range = AddrRange::new(device.reserve(len, device.info().limits.page).unwrap(), len);
    let handle = device.create(len, Place::Device).unwrap();
    device.map(range.start, handle).unwrap();
    device.set_access(range).unwrap();
    device.release(handle).unwrap();
    range
}

/// Bytes that tell their place.
fn pattern(len: Bytes, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len.count() as usize];
    random.fill(&mut bytes);
    bytes
}

fn blocks(pool: &HostPool, offset: Bytes, bytes: &[u8]) -> HostAllocation {
    let mut blocks = pool.allocate(offset + Bytes::new(bytes.len() as u64)).unwrap();
    blocks.write(offset, bytes).unwrap();
    blocks
}

fn read(blocks: &HostAllocation, offset: Bytes, len: Bytes) -> Vec<u8> {
    let mut bytes = vec![0; len.count() as usize];
    blocks.read(offset, &mut bytes).unwrap();
    bytes
}

/// Puts bytes into the device's memory.
fn put(bench: &Bench, range: AddrRange, seed: u64) -> Vec<u8> {
    let bytes = pattern(range.len, seed);
    let host = blocks(&bench.pool, Bytes::ZERO, &bytes);
    bench.mover.to_device(range, host).start().unwrap().wait().unwrap();
    bytes
}

fn part(range: AddrRange, offset: u64, len: u64) -> AddrRange {
    AddrRange::new(range.start + Bytes::new(offset), Bytes::new(len))
}

fn no_hazards(device: &Simulator) {
    assert_eq!(device.hazards(), [], "accesses without order");
    assert_eq!(device.fault(), None);
}

/// Calls that wait for more than one stream.
fn waits_for_the_device(log: &[LoggedCall]) -> usize {
    let waits = [Call::FreeMemory, Call::AllocMemory];
    log.iter().filter(|logged| waits.contains(&logged.call)).count()
}

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
    // Blocks taken and returned out of order leave runs of different lengths.
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
        // Back to somewhere else.
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
fn parts_arrive_in_order_without_gap_or_overlap() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(26));
    let odd = part(range, 5, 25 * MIB.count() + 77);
    for polled in [false, true] {
        let host = bench.pool.allocate(odd.len).unwrap();
        let mut transfer = bench.mover.to_host(odd, host).start().unwrap();
        let mut at = odd.start;
        let mut parts = 0;
        while !(transfer.is_done() && at == odd.start + odd.len) {
            let next = match polled {
                true => transfer.poll_part().unwrap(),
                false => transfer.wait_part().unwrap(),
            };
            if let Some(told) = next {
                assert_eq!(told.start, at);
                at = at + told.len;
                parts += 1;
            }
        }
        assert_eq!(transfer.wait_part().unwrap(), None);
        assert!(parts >= 2, "{parts} parts");
        if !polled {
            assert_eq!(parts, 7, "one for each step");
        }
    }
    no_hazards(&bench.device);
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
        // Events are made once.
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
    // Pinning blocks takes the time of many copies.
    let mut hosts = [(); 3].map(|()| bench.pool.allocate(Bytes::mib(32)).unwrap()).into_iter();
    let mut start = |offset: u64| {
        let source = part(range, offset * MIB.count(), 32 * MIB.count());
        bench.mover.to_host(source, hosts.next().unwrap()).start().unwrap()
    };
    let (left_alone, mut driven) = (start(0), start(32));
    assert_eq!(bench.mover.in_flight(), (most, Bytes::ZERO));
    assert_eq!(left_alone.progress().in_flight, most);
    assert_eq!(driven.progress().in_flight, Bytes::ZERO);
    // The one that nobody drives holds up nobody.
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
    let begun = bench.device.now_ns();
    let mut down = bench.mover.to_host(down_range, down_host).start().unwrap();
    let mut up = bench.mover.to_device(up_range, up_host).at(MIB).start().unwrap();
    while !(down.poll().unwrap() & up.poll().unwrap()) {}
    let took_ns = (bench.device.now_ns() - begun) as f64;
    assert!(took_ns < 1.5 * alone_ns, "{took_ns} ns for both, {alone_ns} ns for one");
    assert!(read(&down.into_host(), Bytes::ZERO, down_range.len) == bytes);
    assert!(bench.device.peek(up_range).unwrap() == upward);
    no_hazards(&bench.device);
}

#[test]
fn cancelled_midway_it_tells_exactly_what_arrived() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(40));
    let bytes = put(&bench, range, 4);
    let host = blocks(&bench.pool, Bytes::ZERO, &vec![0xee; bytes.len()]);
    let mut transfer = bench.mover.to_host(range, host).start().unwrap();
    transfer.wait_part().unwrap().unwrap();
    let arrived = transfer.cancel().unwrap();
    // The first of four steps in flight had arrived, and no other was queued for it.
    assert_eq!(arrived, Bytes::mib(16));
    let expected = MoveError::Cancelled { moved: arrived, of: range.len };
    assert_eq!(transfer.wait(), Err(expected.clone()));
    assert_eq!(transfer.poll(), Err(expected));
    assert_eq!(transfer.progress().in_flight, Bytes::ZERO);
    let host = transfer.into_host();
    let (there, rest) = bytes.split_at(arrived.count() as usize);
    assert!(read(&host, Bytes::ZERO, arrived) == there);
    let untouched = read(&host, arrived, Bytes::new(rest.len() as u64));
    assert!(untouched.iter().all(|byte| *byte == 0xee), "it goes no further");
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
fn polling_never_waits() {
    let bench = bench();
    let range = memory(&bench.device, Bytes::mib(40));
    let other = bench.device.create_stream().unwrap();
    let gate = bench.device.gate();
    bench.device.launch(other, Kernel::new("long").writing(range).until(gate)).unwrap();
    let host = bench.pool.allocate(range.len).unwrap();
    let moving = bench.mover.to_host(range, host).after(After::Stream(other));
    let mut transfer = moving.start().unwrap();
    for _ in 0..100 {
        // Waiting for a kernel that nobody lets end would never return.
        assert!(!transfer.poll().unwrap());
        assert_eq!(transfer.poll_part().unwrap(), None);
    }
    let Progress { moved, in_flight, total } = transfer.progress();
    assert_eq!((moved, in_flight, total), (Bytes::ZERO, Bytes::mib(16), range.len));
    bench.device.open(gate);
    transfer.wait().unwrap();
    no_hazards(&bench.device);
}

#[test]
fn it_comes_behind_the_work_it_was_told_and_a_missing_word_is_found() {
    for told in [true, false] {
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
        if told {
            moving = moving.after(After::Stream(writer)).after(After::Event(event));
        }
        let mut transfer = moving.start().unwrap();
        transfer.wait().unwrap();
        let arrived = read(&transfer.into_host(), Bytes::ZERO, range.len);
        let (ones, twos) = arrived.split_at(10 << 20);
        let whole = ones.iter().all(|byte| *byte == 1) && twos.iter().all(|byte| *byte == 2);
        assert_eq!(whole, told);
        assert_eq!(bench.device.hazards().is_empty(), told);
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
        for _ in 0..steps_before {
            transfer.wait_part().unwrap().unwrap();
        }
        bench.device.take_log();
        let begun = bench.device.now_ns();
        let host = transfer.finish_on(stream).unwrap();
        let target = part(copy, 0, odd.len.count());
        let onward = vramp_driver::Copy { from: odd.start, to: target.start, len: odd.len };
        bench.device.copy(stream, onward).unwrap();
        let took_ns = bench.device.now_ns() - begun;
        let copies_ns = (odd.len.count() as f64 / 55.6) as u64;
        assert!(took_ns < copies_ns / 4, "{took_ns} ns on the host, {copies_ns} ns on the link");
        let log = bench.device.take_log();
        let waits = [Call::SynchronizeEvent, Call::SynchronizeStream];
        assert!(!log.iter().any(|logged| waits.contains(&logged.call)), "{log:?}");
        // Dropped, the blocks serve others only behind the copies.
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
    let moving = bench.mover.to_host(range, host).after(After::Stream(stream));
    let refused = moving.start().unwrap_err();
    assert_eq!(refused.error, MoveError::Capturing);
    let transfer = bench.mover.to_host(range, refused.host).start().unwrap();
    let refused = transfer.finish_on(stream).unwrap_err();
    assert_eq!(refused.error, MoveError::Capturing);
    // What was in flight has arrived, and nothing is.
    assert!(read(&refused.host, Bytes::ZERO, range.len) == bytes);
    assert_eq!(bench.device.spoilt_captures(), 0);
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
    // Unmapping memory that queued work still touches would lose the device.
    bench.device.unmap(range).unwrap();
    bench.device.free_addresses(range).unwrap();
    no_hazards(&bench.device);
    assert_eq!(bench.mover.in_flight(), (Bytes::ZERO, Bytes::ZERO));
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
    assert_eq!(transfer.wait_part(), Ok(None));
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
    assert_eq!((outside.len, outside.whole), (range.len, MIB));
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
    // Addresses where no memory is: the device says so, as for any work.
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

#[test]
fn between_two_devices_data_goes_through_few_blocks_and_both_links_at_once() {
    let devices = [simulator(), simulator()];
    let pool = pool(&[&devices[0], &devices[1]]);
    // Clocks that are far apart.
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
    let mut staged = staged.after_at_target(After::Stream(stream)).unwrap();
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
        // Only the calls of a device move its clock.
        [&bench.device, &other].iter().for_each(|device| device.advance(10_000));
    }
    token.cancel();
    let Err(MoveError::Cancelled { moved, of }) = staged.wait() else { panic!("it goes on") };
    assert!(!moved.is_zero() && moved < of, "{moved}");
    assert_eq!(pool.space().total(), Bytes::ZERO, "nothing is kept for nobody");
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
    let host = SpaceId::host(0);
    let manager = ReservationManager::new([(host, SpaceConfig::host(Bytes::mib(8)))]).unwrap();
    let devices = [driver(&bench.device), driver(&other)];
    let pool = HostPool::new(&manager.space(host).unwrap(), BLOCKS, devices).unwrap();
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

/// A round with everything that a mover does. Whatever fails, all ends.
fn everything(
    devices: &[Arc<Simulator>; 2],
    pool: &HostPool,
    memory: &[AddrRange; 2],
    stream: Stream,
) -> Result<(), MoveError> {
    let near = Mover::new(driver(&devices[0]), pool, SMALL)?;
    let far = Mover::new(driver(&devices[1]), pool, SMALL)?;
    let host = pool.allocate(memory[0].len)?;
    let moving = near.to_host(memory[0], host).after(After::Stream(stream));
    let mut down = moving.start().map_err(|failed| failed.error)?;
    let side = near.to_host(memory[0], pool.allocate(memory[0].len)?);
    let side = side.start().map_err(|failed| failed.error)?;
    down.poll()?;
    while down.wait_part()?.is_some() {}
    // It reads what is about to be written.
    drop(side);
    let up = near.to_device(memory[0], down.into_host());
    let up = up.start().map_err(|failed| failed.error)?;
    drop(up.finish_on(stream).map_err(|failed| failed.error)?);
    near.between(memory[0], &far, memory[1])?.after(After::Stream(stream))?.wait()
}

#[test]
fn whichever_driver_call_fails_the_error_is_typed_and_nothing_leaks() {
    for code in [2, 1] {
        let mut failed = 0;
        for nth in 1.. {
            let devices = [simulator(), simulator()];
            let memory = [0, 1].map(|index| memory(&devices[index], Bytes::mib(10)));
            let stream = devices[0].create_stream().unwrap();
            let before = devices.clone().map(|device| device.live());
            let pool = pool(&[&devices[0], &devices[1]]);
            let calls = devices[0].calls();
            devices[0].set_faults(FaultPlan::nth(nth).with_code(code));
            let outcome = everything(&devices, &pool, &memory, stream);
            devices[0].set_faults(FaultPlan::none());
            let all_passed = nth > devices[0].calls() - calls;
            devices[0].synchronize_stream(stream).unwrap();
            assert_eq!(pool.space().total(), Bytes::ZERO, "call {nth}");
            assert_eq!(pool.stats().pending_blocks, 0, "call {nth}");
            drop(pool);
            for (device, before) in devices.iter().zip(before) {
                // The last handle of a mover may have met the failure when it gave things back.
                let LiveObjects { streams, events, .. } = before;
                let now = device.live();
                let left = now.streams + now.events - streams - events;
                assert!(left <= usize::from(outcome.is_ok()), "call {nth} leaves {now:?}");
                assert_eq!(now.host_buffers, before.host_buffers, "call {nth}");
                no_hazards(device);
            }
            match outcome {
                Ok(()) if all_passed => break,
                Ok(()) => {}
                Err(error) => {
                    let driver = error.driver_error().unwrap_or_else(|| panic!("{nth}: {error}"));
                    assert_eq!(driver.code, code, "call {nth}: {error}");
                    assert_eq!(driver.is_out_of_memory(), code == 2);
                    failed += 1;
                }
            }
        }
        assert!(failed > 50, "{failed} calls failed");
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
