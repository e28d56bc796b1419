//! Transfers through staging buffers.

use super::*;

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
