//! Streams, managers and events end or fail while work on buffers runs: contents stay whole, and
//! nothing stays held for ever.

use std::sync::Mutex;

use vramp_alloc::Driver;
use vramp_alloc::device::CaptureMode;
use vramp_driver::Call;
use vramp_driver::sim::Kernel;

use super::hooked::Hooked;
use super::*;

const LONG_NS: u64 = 50_000_000;

/// Queues a long kernel and then a fill with `byte` on a new stream, under an exclusive lease.
fn late_write(rig: &Rig, buffer: &DeferrableBuffer, byte: u8) -> (vramp_defer::LeaseSet, StreamId) {
    let stream = rig.allocator.create_stream().unwrap();
    let queue = rig.allocator.stream(stream).unwrap();
    let lease = buffer.lease(Access::Exclusive, stream).unwrap();
    let slow = Kernel::new("slow").writing(lease.address(0)).lasting(LONG_NS);
    rig.sim.launch(queue, slow).unwrap();
    rig.sim.fill(queue, lease.address(0), byte).unwrap();
    (lease, stream)
}

#[test]
fn a_buffer_leaves_only_after_the_work_of_a_stream_destroyed_under_its_lease() {
    let rig = rig();
    let buffer = rig.filled(MIB(64), 1);
    let (lease, stream) = late_write(&rig, &buffer, 9);
    let begin = rig.sim.now_ns();
    rig.allocator.destroy_stream(stream).unwrap();
    drop(lease);
    assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(64));
    assert!(rig.sim.now_ns() > begin + LONG_NS / 2, "the kernel was waited for");
    rig.expect(&buffer, 9);
    rig.check();
}

#[test]
fn a_restored_buffer_is_ordered_behind_a_destroyed_stream() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let (lease, stream) = late_write(&rig, &buffer, 9);
    rig.allocator.destroy_stream(stream).unwrap();
    drop(lease);
    let lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 5).unwrap();
    drop(lease);
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn a_lease_whose_end_cannot_be_recorded_keeps_the_buffer_until_it_can() {
    for calls in [
        &[Call::Record][..],
        &[Call::CreateEvent, Call::Record],
        &[Call::Record, Call::SynchronizeStream],
        &[Call::IsCapturing],
    ] {
        let rig = rig();
        let buffer = rig.filled(MIB(64), 1);
        let (lease, _) = late_write(&rig, &buffer, 9);
        let plan = |plan: FaultPlan, &call: &Call| plan.and(FaultPlan::from_nth_of(call, 1));
        rig.sim.set_faults(calls.iter().fold(FaultPlan::none(), plan));
        drop(lease);
        rig.manager.spill(MIB(64));
        rig.sim.set_faults(FaultPlan::none());
        assert!(rig.sim.device_loss().is_none(), "{calls:?}");
        assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(64), "{calls:?}");
        rig.expect(&buffer, 9);
        rig.check();
    }
}

#[test]
fn waiting_for_a_destroyed_stream_waits_for_its_work() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let (lease, stream) = late_write(&rig, &buffer, 9);
    rig.allocator.destroy_stream(stream).unwrap();
    drop(lease);
    let begin = rig.sim.now_ns();
    rig.manager.sync_and_unlock(stream).unwrap();
    assert!(rig.sim.now_ns() > begin + LONG_NS / 2, "the kernel was waited for");
    rig.manager.sync_and_unlock(stream).unwrap();
    rig.check();
}

#[test]
fn buffers_and_managers_end_while_a_destroyed_stream_works() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let (lease, stream) = late_write(&rig, &buffer, 9);
    rig.allocator.destroy_stream(stream).unwrap();
    drop(lease);
    drop(buffer);
    let Rig { sim, allocator, manager, stream, queue, .. } = rig;
    drop(manager);
    let block = allocator.malloc(MIB(64), stream).unwrap();
    let range = AddrRange::new(block.addr(), block.len());
    sim.launch(queue, Kernel::new("next").writing(range)).unwrap();
    allocator.free(block, stream).unwrap();
    sim.synchronize_stream(queue).unwrap();
    assert!(sim.device_loss().is_none(), "{:?}", sim.device_loss());
    assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
}

#[test]
fn streams_that_were_leased_for_and_destroyed_leave_no_events() {
    let rig = rig();
    let buffer = rig.filled(MIB(8), 1);
    let mut most = 0;
    for _ in 0..500 {
        let stream = rig.allocator.create_stream().unwrap();
        let queue = rig.allocator.stream(stream).unwrap();
        let lease = buffer.lease(Access::Exclusive, stream).unwrap();
        rig.sim.fill(queue, lease.address(0), 2).unwrap();
        rig.allocator.destroy_stream(stream).unwrap();
        drop(lease);
        most = most.max(rig.sim.live().events);
    }
    assert!(most < 200, "{most} events");
    rig.expect(&buffer, 2);
    rig.check();
}

/// Returns the parts of one more manager.
fn another(sim: &Arc<Simulator>, allocator: &Arc<Allocator>, pool: &HostPool) -> SpillParts {
    let (driver, allocator): (Arc<dyn Driver>, _) = (sim.clone(), Arc::clone(allocator));
    let mover = Mover::new(driver, pool, MoverConfig::default()).unwrap();
    SpillParts { allocator, mover, disk: None, budget: None, peers: vec![] }
}

#[test]
fn managers_that_end_leave_no_streams_and_no_events() {
    let Rig { sim, allocator, pool, manager, .. } = rig();
    drop(manager);
    let before = sim.live();
    let mut most = 0;
    for _ in 0..200 {
        let parts = another(&sim, &allocator, &pool);
        let manager = SpillManager::new(parts, SpillConfig::default()).unwrap();
        let buffer = manager.buffer(MIB(8)).unwrap();
        buffer.readable_while_spilled().unwrap();
        drop((buffer, manager));
        most = most.max(sim.live().events);
    }
    assert_eq!(sim.live().streams, before.streams);
    // The group queries the ends of destroyed streams once there are 32 of them.
    assert!(most <= before.events + 70, "{most} after {before:?}");
}

#[test]
fn a_manager_whose_second_stream_fails_leaves_no_first() {
    let Rig { sim, allocator, pool, manager, .. } = rig();
    drop(manager);
    let before = sim.live().streams;
    let parts = another(&sim, &allocator, &pool);
    sim.set_faults(FaultPlan::nth_of(Call::CreateStream, 2));
    SpillManager::new(parts, SpillConfig::default()).map(drop).unwrap_err();
    assert_eq!(sim.live().streams, before);
}

#[test]
fn a_manager_that_ends_while_a_stream_captures_leaves_the_capture_as_it_is() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let (lease, _) = late_write(&rig, &buffer, 9);
    drop((lease, buffer));
    let Rig { sim, manager, queue, .. } = rig;
    sim.begin_capture(queue, CaptureMode::Global).unwrap();
    let begin = sim.now_ns();
    drop(manager);
    assert!(sim.now_ns() > begin + LONG_NS / 2, "the kernel was waited for");
    sim.end_capture(queue).unwrap();
    assert_eq!(sim.invalidated_captures(), 0);
    assert!(sim.device_loss().is_none(), "{:?}", sim.device_loss());
    assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
}

#[test]
fn a_record_that_a_capture_took_in_is_made_again() {
    let sim = Arc::new(simulator().build());
    let hooked = Arc::new(Hooked::on(Arc::clone(&sim)));
    let rig = Plan::default().build_behind(hooked.clone(), sim);
    let (first, second) = (rig.filled(MIB(24), 1), rig.filled(MIB(24), 2));
    let lease = first.lease(Access::Exclusive, rig.stream).unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 9).unwrap();
    // Another thread begins a capture after the lease looked whether there is one.
    let (sim, queue) = (Arc::clone(&rig.sim), rig.queue);
    let begun = Arc::new(Mutex::new(false));
    let begins = Arc::clone(&begun);
    hooked.before_record(move || {
        sim.begin_capture(queue, CaptureMode::Relaxed).unwrap();
        *begins.lock().unwrap() = true;
    });
    drop(lease);
    assert!(*begun.lock().unwrap());
    rig.sim.end_capture(rig.queue).unwrap();
    // A lease of another stream is not refused, and the buffer may leave.
    let other = rig.allocator.create_stream().unwrap();
    drop(second.lease(Access::Shared, other).unwrap());
    assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(48));
    rig.expect(&first, 9);
    rig.expect(&second, 2);
    rig.check();
}

#[test]
fn a_query_for_captures_that_fails_is_not_called_a_capture() {
    let mut others = 0;
    for n in 1..=8 {
        let rig = rig();
        let buffer = rig.filled(MIB(32), 1);
        let (lease, _) = late_write(&rig, &buffer, 9);
        rig.sim.set_faults(FaultPlan::from_nth_of(Call::Record, 1));
        drop(lease);
        rig.sim.set_faults(FaultPlan::from_nth_of(Call::IsCapturing, n).with_code(304));
        let leased = buffer.lease(Access::Exclusive, rig.stream).map(drop);
        rig.sim.set_faults(FaultPlan::none());
        if let Err(error) = leased {
            assert!(!error.to_string().contains("captures"), "{n}: {error}");
            others += 1;
        }
        rig.expect(&buffer, 9);
        rig.check();
    }
    assert!(others > 1, "{others} leases failed");
}

#[test]
fn the_last_lease_after_its_manager_waits_for_the_work_under_it() {
    let rig = rig();
    let buffer = rig.filled(MIB(64), 1);
    let (lease, _) = late_write(&rig, &buffer, 9);
    let Rig { sim, allocator, manager, stream, queue, .. } = rig;
    let begin = sim.now_ns();
    drop((manager, buffer));
    assert!(sim.now_ns() < begin + LONG_NS / 2, "neither the manager nor the buffer is the last");
    drop(lease);
    assert!(sim.now_ns() > begin + LONG_NS / 2, "the kernel was waited for");
    let block = allocator.malloc(MIB(64), stream).unwrap();
    sim.fill(queue, AddrRange::new(block.addr(), block.len()), 5).unwrap();
    allocator.free(block, stream).unwrap();
    sim.synchronize_stream(queue).unwrap();
    assert!(sim.device_loss().is_none(), "{:?}", sim.device_loss());
    assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
}

#[test]
fn memory_of_a_lease_that_ended_in_a_capture_stays_after_its_manager() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        let rig = rig();
        let buffer = rig.filled(MIB(32), 1);
        let lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
        let slow = Kernel::new("slow").writing(lease.address(0)).lasting(LONG_NS);
        rig.sim.launch(rig.queue, slow).unwrap();
        rig.sim.begin_capture(rig.queue, CaptureMode::Global).unwrap();
        let Rig { sim, allocator, manager, queue, .. } = rig;
        let mut parts: [Option<Box<dyn Send>>; 3] =
            [Some(Box::new(lease)), Some(Box::new(buffer)), Some(Box::new(manager))];
        order.into_iter().for_each(|part| drop(parts[part].take()));
        sim.end_capture(queue).unwrap();
        assert_eq!(sim.invalidated_captures(), 0, "{order:?}");
        // The rest of the card serves others, and all of it is returned in the end.
        let other = allocator.create_stream().unwrap();
        let raw = allocator.stream(other).unwrap();
        let block = allocator.malloc(MIB(32), other).unwrap();
        sim.fill(raw, AddrRange::new(block.addr(), block.len()), 5).unwrap();
        assert!(allocator.malloc(MIB(32), other).is_err(), "{order:?}: work runs on the memory");
        allocator.free(block, other).unwrap();
        Arc::into_inner(allocator).expect("nothing else holds it").close().unwrap();
        assert!(sim.device_loss().is_none(), "{:?}", sim.device_loss());
        assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
        assert_eq!((sim.live().handles, sim.live().mappings), (0, 0), "{order:?}");
    }
}

#[test]
fn a_pin_keeps_a_buffer_whose_handles_are_gone() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    let range = lease.address(0);
    let pin = lease.pin(0).unwrap();
    drop((lease, buffer));
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(rig.manager.spill(MIB(64)).freed, Bytes::ZERO);
    let first = AddrRange::new(range.start, Bytes::new(1));
    assert_eq!(rig.sim.peek(first).unwrap(), [1]);
    drop(pin);
    assert_eq!(rig.manager.census().buffers, 0);
    let block = rig.allocator.malloc(MIB(64), rig.stream).unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    rig.check();
}

#[test]
fn a_cancelled_lease_leaves_copies_valid_and_holds_nothing() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    assert_eq!(rig.manager.spill(MIB(32)).freed, MIB(32));
    buffer.lease(Access::Exclusive, rig.stream).unwrap().cancel();
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let copied = rig.manager.stats().to_host_bytes;
    assert_eq!(rig.manager.spill(MIB(32)).freed, MIB(32));
    assert_eq!(rig.manager.stats().to_host_bytes, copied, "the copy is as it was");
    rig.expect(&buffer, 1);
    rig.check();
}
