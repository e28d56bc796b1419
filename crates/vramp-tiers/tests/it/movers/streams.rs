//! Order between copies and other work.

use super::*;

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
