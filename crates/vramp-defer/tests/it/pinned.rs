//! Memory that a network card or another process holds physically stays where it is.

use vramp_alloc::sharing::{PinError, PinnedRange};
use vramp_driver::sim::Kernel;

use super::hooked::Hooked;
use super::*;

/// Leases a buffer and pins it meanwhile, as a registration does.
fn pinned(rig: &Rig, buffer: &DeferrableBuffer) -> PinnedRange {
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    rig.allocator.pin_range(lease.address(0)).unwrap()
}

#[test]
fn a_buffer_with_pinned_memory_stays_and_others_are_spilled() {
    let rig = rig();
    let [kept, other] = [1, 2].map(|byte| rig.filled(MIB(24), byte));
    let pin = pinned(&rig, &kept);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let spilled = rig.manager.spill(MIB(48));
    assert_eq!(spilled.freed, MIB(24));
    assert_eq!(spilled.short.unwrap().pinned, MIB(24));
    assert!(kept.is_resident() && !other.is_resident());
    assert_eq!(rig.manager.clean(MIB(64)), Bytes::ZERO, "it may be written from outside");
    let block = rig.allocator.malloc(MIB(40), rig.stream).unwrap();
    assert!(kept.is_resident());
    rig.allocator.free(block, rig.stream).unwrap();
    rig.check();
    drop(pin);
    rig.expect(&other, 2);
    assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(48));
    assert!(!kept.is_resident());
    rig.expect(&kept, 1);
    rig.check();
}

#[test]
fn a_lease_waits_for_the_room_of_a_pinned_buffer_until_it_is_unpinned() {
    let rig = rig();
    let [kept, other] = [1, 2].map(|byte| rig.filled(MIB(40), byte));
    let pin = pinned(&rig, &kept);
    let refused = other.lease(Access::Shared, rig.stream).map(drop);
    assert!(refused.is_err(), "{refused:?}");
    drop(pin);
    rig.expect(&other, 2);
    rig.expect(&kept, 1);
    rig.check();
}

#[test]
fn a_group_with_a_pinned_buffer_stays_as_a_whole() {
    let rig = rig();
    let group = rig.manager.group();
    let buffers: Vec<_> = (1..=2)
        .map(|byte| {
            let buffer = group.buffer(MIB(2)).unwrap();
            rig.fill(&buffer, byte);
            buffer
        })
        .collect();
    let pin = pinned(&rig, &buffers[0]);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(rig.manager.spill(MIB(8)).freed, Bytes::ZERO);
    assert!(buffers.iter().all(DeferrableBuffer::is_resident));
    drop(pin);
    assert_eq!(rig.manager.spill(MIB(8)).freed, MIB(4), "the memory of both");
    assert!(!buffers.iter().any(DeferrableBuffer::is_resident));
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.check();
}

/// The pin comes while copies of the buffer are under way: it is refused, and nothing is left half.
#[test]
fn a_pin_during_a_spill_is_refused_and_one_under_the_next_lease_is_not() {
    for after_wait in [false, true] {
        let sim = Arc::new(simulator().build());
        let hooked = Arc::new(Hooked::on(Arc::clone(&sim)));
        let rig = Plan::default().build_behind(hooked.clone(), sim);
        let buffer = rig.filled(MIB(32), 1);
        rig.sim.synchronize_stream(rig.queue).unwrap();
        rig.manager.census();
        let (allocator, range) = (Arc::downgrade(&rig.allocator), buffer.addresses());
        let (sender, refused) = std::sync::mpsc::channel();
        let pin = move || {
            let allocator = allocator.upgrade().unwrap();
            let pin = std::thread::spawn(move || allocator.pin_range(range).map(drop));
            sender.send(pin.join().unwrap()).unwrap();
        };
        match after_wait {
            true => hooked.after_wait(pin),
            false => hooked.before_record(pin),
        }
        assert_eq!(rig.manager.spill(MIB(32)).freed, MIB(32), "{after_wait}");
        assert!(matches!(refused.recv().unwrap(), Err(PinError::Spilled { .. })));
        assert!(rig.allocator.pin_range(range).is_err(), "its contents are elsewhere");
        let pin = pinned(&rig, &buffer);
        assert_eq!(rig.manager.spill(MIB(32)).freed, Bytes::ZERO);
        drop(pin);
        rig.expect(&buffer, 1);
        rig.check();
    }
}

/// Pins come and go while kernels, leases and spills run. What is pinned is at its address, with its
/// contents.
#[test]
fn pins_leases_and_spills_at_random_move_nothing_that_is_pinned() {
    for seed in vramp_testing::seeds(6) {
        let mut random = fastrand::Rng::with_seed(seed);
        let rig = Plan {
            config: SpillConfig { patience: Duration::ZERO, ..Plan::default().config },
            ..Plan::default()
        }
        .build();
        let buffers: Vec<_> = (0..5).map(|_| rig.manager.buffer(MIB(16)).unwrap()).collect();
        let mut bytes = [None; 5];
        let mut pins: Vec<(usize, PinnedRange)> = Vec::new();
        for step in 1..=100_u8 {
            let at = random.usize(..5);
            match random.u32(..8) {
                0 | 1 => {
                    let Ok(lease) = buffers[at].lease(Access::Exclusive, rig.stream) else {
                        continue;
                    };
                    let busy = Kernel::new("busy").writing(lease.address(0)).lasting(50_000);
                    rig.sim.launch(rig.queue, busy).unwrap();
                    rig.sim.fill(rig.queue, lease.address(0), step).unwrap();
                    bytes[at] = Some(step);
                }
                2 => {
                    let Ok(lease) = buffers[at].lease(Access::Shared, rig.stream) else { continue };
                    pins.push((at, rig.allocator.pin_range(lease.address(0)).unwrap()));
                }
                // Without a lease: it is refused, or the contents are there.
                3 => {
                    if let Ok(pin) = rig.allocator.pin_range(buffers[at].addresses()) {
                        pins.push((at, pin));
                    }
                }
                4 if !pins.is_empty() => drop(pins.swap_remove(random.usize(..pins.len()))),
                5 => drop(rig.manager.clean(MIB(16))),
                6 => drop(
                    rig.allocator
                        .malloc(MIB(8), rig.stream)
                        .map(|block| rig.allocator.free(block, rig.stream)),
                ),
                _ => drop(rig.manager.spill(MIB(random.u64(1..64)))),
            }
            rig.check();
            rig.sim.synchronize_stream(rig.queue).unwrap();
            for (at, pin) in &pins {
                assert!(buffers[*at].is_resident(), "a pinned buffer left");
                if let Some(byte) = bytes[*at] {
                    let one = AddrRange::new(pin.range().start, Bytes::new(1));
                    assert_eq!(rig.sim.peek(one).unwrap(), [byte]);
                }
            }
        }
        drop(pins);
        for (buffer, byte) in buffers.iter().zip(bytes) {
            byte.into_iter().for_each(|byte| rig.expect(buffer, byte));
        }
        rig.check();
    }
}
