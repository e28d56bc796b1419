use vramp_alloc::Driver;
use vramp_defer::SpillError;
use vramp_driver::sim::Kernel;

use super::below::until;
use super::*;

#[test]
fn what_is_leased_does_not_leave() {
    let rig = rig();
    let (held, idle) = (rig.filled(MIB(32), 1), rig.filled(MIB(32), 2));
    let lease = held.lease(Access::Shared, rig.stream).unwrap();
    let spilled = rig.manager.spill(MIB(64));
    assert_eq!(spilled.freed, MIB(32));
    assert!(held.is_resident() && !idle.is_resident());
    assert_eq!(spilled.short.unwrap().leased, MIB(32));
    assert!(rig.allocator.malloc(MIB(40), rig.stream).is_err());
    drop(lease);
    let block = rig.allocator.malloc(MIB(40), rig.stream).unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    rig.check();
}

#[test]
fn work_in_flight_keeps_a_buffer_until_its_event() {
    let rig = rig();
    let buffer = rig.filled(MIB(64), 1);
    let lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    let begin = rig.sim.now_ns();
    let slow = Kernel::new("slow").writing(lease.address(0)).lasting(50_000_000);
    rig.sim.launch(rig.queue, slow).unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 9).unwrap();
    drop(lease);
    assert!(rig.sim.now_ns() < begin + 50_000_000, "the end of a lease waits for nothing");
    assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(64));
    assert!(rig.sim.now_ns() > begin + 50_000_000, "the kernel was waited for");
    rig.expect(&buffer, 9);
    rig.check();
}

#[test]
fn readers_share_and_a_writer_is_alone() {
    let rig = rig();
    let buffer = rig.filled(PIECE, 1);
    let one = buffer.lease(Access::Shared, rig.stream).unwrap();
    let two = buffer.lease(Access::Shared, rig.stream).unwrap();
    let refused = buffer.lease(Access::Exclusive, rig.stream).unwrap_err();
    assert!(matches!(refused, SpillError::Refused(_)), "{refused}");
    drop((one, two));
    let alone = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    assert!(buffer.lease(Access::Shared, rig.stream).is_err());
    drop(alone);
    drop(buffer.lease(Access::Shared, rig.stream).unwrap());
    rig.check();
}

#[test]
fn one_who_waits_is_served_when_the_other_ends() {
    let rig = rig();
    let buffer = rig.filled(PIECE, 1);
    let held = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| buffer.lease(Access::Shared, rig.stream).map(drop));
        until(|| rig.manager.census().waiting == 1);
        drop(held);
        waits.join().unwrap().unwrap();
    });
    assert_eq!(rig.manager.stats().waits, 1);
}

#[test]
fn streams_come_behind_each_others_writes() {
    let rig = rig();
    let other = rig.allocator.create_stream().unwrap();
    let queue = rig.allocator.stream(other).unwrap();
    let buffer = rig.filled(MIB(16), 1);
    for round in 2..10 {
        let (stream, raw) = if round % 2 == 0 { (other, queue) } else { (rig.stream, rig.queue) };
        let lease = buffer.lease(Access::Exclusive, stream).unwrap();
        let slow = Kernel::new("slow").writing(lease.address(0)).lasting(1_000_000);
        rig.sim.launch(raw, slow).unwrap();
        rig.sim.fill(raw, lease.address(0), round).unwrap();
        drop(lease);
        if round % 3 == 0 {
            rig.manager.spill(MIB(16));
        }
    }
    rig.expect(&buffer, 9);
    rig.check();
}

#[test]
fn a_lease_for_two_streams_orders_both() {
    let rig = rig();
    let other = rig.allocator.create_stream().unwrap();
    let queue = rig.allocator.stream(other).unwrap();
    let buffer = rig.filled(MIB(32), 4);
    rig.manager.spill(MIB(32));
    let now = std::time::Duration::from_secs(1);
    let both = [rig.stream, other];
    let lease = rig.manager.lease_on(&[(&buffer, Access::Shared)], &both, now).unwrap();
    let read = Kernel::new("read").reading(lease.address(0));
    rig.sim.launch(rig.queue, read.clone()).unwrap();
    rig.sim.launch(queue, read).unwrap();
    drop(lease);
    rig.manager.spill(MIB(32));
    rig.expect(&buffer, 4);
    rig.check();
}

#[test]
fn a_set_is_leased_as_a_whole_and_one_too_large_is_refused_at_once() {
    let rig = rig();
    let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(24), byte)).collect();
    let set = |all: &'static [usize]| -> Vec<(&DeferrableBuffer, Access)> {
        all.iter().map(|&index| (&buffers[index], Access::Shared)).collect()
    };
    let begin = std::time::Instant::now();
    let refused = rig.manager.lease(&set(&[0, 1, 2]), rig.stream).unwrap_err();
    assert!(refused.to_string().contains("lease fewer"), "{refused}");
    assert!(begin.elapsed() < std::time::Duration::from_millis(250), "it does not wait");
    for pair in [[0, 1], [2, 3], [1, 2], [3, 3]] {
        let pair: Vec<_> =
            pair.iter().map(|&index: &usize| (&buffers[index], Access::Shared)).collect();
        let lease = rig.manager.lease(&pair, rig.stream).unwrap();
        assert_eq!(lease.addresses().len(), 2);
    }
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.check();
}

#[test]
fn a_panic_or_an_error_between_lease_and_launch_releases_it() {
    let rig = rig();
    let buffer = rig.filled(PIECE, 1);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let launch = |_: &vramp_defer::LeaseSet| panic!("before the launch");
        rig.manager.lock_and_launch_async(&[(&buffer, Access::Exclusive)], rig.stream, launch)
    }));
    assert!(panicked.is_err());
    rig.manager.spill(MIB(64));
    assert!(!buffer.is_resident(), "no lease holds it");
    let sum = rig
        .manager
        .lock_and_launch_async(&[(&buffer, Access::Exclusive)], rig.stream, |lease| {
            rig.sim.fill(rig.queue, lease.address(0), 5).unwrap();
            lease.addresses().len()
        })
        .unwrap();
    assert_eq!(sum, 1);
    rig.manager.lock_and_launch_async(&[(&buffer, Access::Shared)], rig.stream, |_| ()).unwrap();
    rig.manager.sync_and_unlock(rig.stream).unwrap();
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn a_view_is_the_same_buffer() {
    let rig = rig();
    let buffer = rig.filled(MIB(24), 1);
    let view = buffer.view(MIB(10), MIB(4)).unwrap();
    assert_eq!(view.addresses().start, buffer.addresses().start + MIB(10));
    rig.manager.spill(MIB(64));
    rig.fill(&view, 8);
    let lease = view.lease(Access::Shared, rig.stream).unwrap();
    assert_eq!(rig.manager.spill(MIB(64)).freed, Bytes::ZERO, "a view holds the whole");
    drop(lease);
    drop(buffer);
    rig.manager.spill(MIB(64));
    rig.expect(&view, 8);
    let inner = view.view(MIB(3), MIB(1)).unwrap();
    assert!(view.view(MIB(3), MIB(2)).is_err());
    drop(view);
    rig.expect(&inner, 8);
    drop(inner);
    assert_eq!(rig.manager.census().buffers, 0);
    rig.check();
}

#[test]
fn a_pin_keeps_a_buffer_on_the_card_after_its_lease() {
    let rig = rig();
    let stays = |buffer: &DeferrableBuffer| {
        rig.manager.spill(MIB(64));
        buffer.is_resident()
    };
    let buffer = rig.filled(PIECE, 1);
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    let pin = lease.pin(0).unwrap();
    drop(lease);
    assert!(stays(&buffer));
    drop(pin);
    assert!(!stays(&buffer));
    rig.check();
}

#[test]
fn wrong_uses_are_errors_that_say_what_to_do() {
    let (rig, other) = (rig(), rig());
    let buffer = rig.filled(PIECE, 1);
    let foreign = other.manager.lease(&[(&buffer, Access::Shared)], other.stream).unwrap_err();
    assert!(matches!(foreign, SpillError::OtherManager));
    assert!(rig.manager.buffer(Bytes::ZERO).is_err());
    assert!(rig.manager.buffer(Bytes::tib(100)).is_err());
    assert!(rig.manager.group().buffer(PIECE + Bytes::new(1)).is_err());
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    assert!(matches!(lease.pin(1), Err(SpillError::NotNamed { index: 1 })));
    lease.cancel();
    let ended = rig.allocator.create_stream().unwrap();
    rig.allocator.destroy_stream(ended).unwrap();
    assert!(buffer.lease(Access::Shared, ended).is_err());
    rig.sim.begin_capture(rig.queue, vramp_alloc::device::CaptureMode::ThreadLocal).unwrap();
    let captured = buffer.lease(Access::Shared, rig.stream).unwrap_err();
    assert!(matches!(captured, SpillError::Capturing(_)), "{captured}");
    rig.sim.end_capture(rig.queue).unwrap();
    let small = SpillConfig { piece: MIB(1), ..SpillConfig::default() };
    let driver = Arc::clone(rig.allocator.driver());
    let mover = Mover::new(driver, &rig.pool, MoverConfig::default()).unwrap();
    let parts = SpillParts {
        allocator: rig.allocator.clone(),
        mover,
        disk: None,
        budget: None,
        peers: vec![],
    };
    assert!(SpillManager::new(parts, small).is_err());
}
