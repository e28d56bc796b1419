//! Buffers that are readable while spilled: what a kernel reads at their addresses, when they are
//! restored, which requests wait for which, and what is left when a driver call fails.

use vramp_alloc::Driver;
use vramp_defer::planner::{LeaseRefused, PinError};
use vramp_defer::{LeaseSet, SpillError};
use vramp_driver::sim::Kernel;
use vramp_driver::{Call, Capabilities};

use super::*;

/// Readable, filled with one byte, and spilled.
pub fn spilled(rig: &Rig, len: Bytes, byte: u8) -> DeferrableBuffer {
    let buffer = rig.manager.buffer(len).unwrap();
    buffer.readable_while_spilled().unwrap();
    rig.fill(&buffer, byte);
    rig.manager.spill(len);
    assert!(!buffer.is_resident());
    buffer
}

/// Reads the buffer in a kernel under the lease; returns the first and the last byte.
pub fn ends(rig: &Rig, lease: &LeaseSet) -> [u8; 2] {
    ends_of(rig, lease, 0)
}

/// Reads the buffer at an index of the lease in the same way.
pub fn ends_of(rig: &Rig, lease: &LeaseSet, index: usize) -> [u8; 2] {
    let range = lease.address(index);
    rig.sim.launch(rig.queue, Kernel::new("read").reading(range)).unwrap();
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let one = |at: Bytes| rig.sim.peek(AddrRange::new(range.start + at, Bytes::new(1))).unwrap()[0];
    [one(Bytes::ZERO), one(range.len - Bytes::new(1))]
}

#[test]
fn what_is_spilled_is_read_at_its_address_and_nothing_comes_back() {
    let rig = rig();
    let buffer = spilled(&rig, MIB(60), 7);
    let block = rig.allocator.malloc(MIB(64), rig.stream).expect("all of the card is free");
    rig.sim.fill(rig.queue, AddrRange::new(block.addr(), MIB(64)), 1).unwrap();
    for _ in 0..2 {
        let lease = buffer.read_in_place(rig.stream).unwrap();
        assert_eq!(lease.address(0), buffer.addresses());
        assert_eq!(ends(&rig, &lease), [7, 7]);
    }
    assert!(!buffer.is_resident());
    assert_eq!(rig.manager.stats().reads_in_place, 2);
    assert_eq!(rig.manager.stats().from_host_bytes, 0);
    rig.allocator.free(block, rig.stream).unwrap();
    rig.expect(&buffer, 7);
    rig.check();
}

#[test]
fn what_is_read_often_comes_back_and_leaves_again_without_a_copy() {
    let rig = rig();
    let buffer = spilled(&rig, MIB(20), 9);
    for _ in 0..3 {
        assert_eq!(ends(&rig, &buffer.read_in_place(rig.stream).unwrap()), [9, 9]);
        assert!(!buffer.is_resident());
    }
    assert_eq!(ends(&rig, &buffer.read_in_place(rig.stream).unwrap()), [9, 9]);
    assert!(buffer.is_resident());
    let stats = rig.manager.stats();
    assert_eq!((stats.reads_in_place, stats.promotions), (3, 1));
    let copies = rig.sim.calls_of(Call::Copy);
    rig.manager.spill(MIB(20));
    assert_eq!(rig.sim.calls_of(Call::Copy), copies, "the copies are good");
    assert_eq!(ends(&rig, &buffer.read_in_place(rig.stream).unwrap()), [9, 9]);
    assert!(!buffer.is_resident(), "it counts from the last return on");
    rig.check();
}

#[test]
fn what_is_hot_and_has_no_room_on_the_card_is_still_read_in_place() {
    let rig = rig();
    let hot = spilled(&rig, MIB(24), 4);
    let other = rig.filled(MIB(60), 5);
    let held = other.lease(Access::Shared, rig.stream).unwrap();
    for _ in 0..6 {
        assert_eq!(ends(&rig, &hot.read_in_place(rig.stream).unwrap()), [4, 4]);
    }
    assert_eq!(rig.manager.stats().promotions, 0);
    drop(held);
    rig.expect(&hot, 4);
    rig.expect(&other, 5);
    rig.check();
}

#[test]
fn nobody_moves_or_writes_what_is_being_read_in_place() {
    let rig = rig();
    let buffer = spilled(&rig, MIB(20), 3);
    let reading = buffer.read_in_place(rig.stream).unwrap();
    let again = buffer.read_in_place(rig.stream).unwrap();
    for access in [Access::Shared, Access::Exclusive] {
        let refused = buffer.lease(access, rig.stream).unwrap_err();
        assert!(matches!(refused, SpillError::Refused(LeaseRefused::Busy { .. })), "{refused}");
    }
    assert!(buffer.discard().is_err());
    assert_eq!(rig.manager.spill(MIB(20)).freed, Bytes::ZERO);
    assert_eq!(rig.manager.relieve_host(MIB(20)), Bytes::ZERO, "what is read stays on the host");
    let pin = reading.pin(0).err().expect("nothing is pinned");
    assert!(matches!(pin, SpillError::Pin(PinError::InPlace { .. })), "{pin}");
    assert_eq!(ends(&rig, &reading), [3, 3]);
    rig.check();
    again.cancel();
    // Its work outlasts the lease, and is waited for before anything is unmapped.
    let long = Kernel::new("long").reading(reading.address(0)).lasting(5_000_000);
    rig.sim.launch(rig.queue, long).unwrap();
    drop(reading);
    let other = rig.allocator.create_stream().unwrap();
    let queue = rig.allocator.stream(other).unwrap();
    let lease = buffer.lease(Access::Exclusive, other).unwrap();
    rig.sim.fill(queue, lease.address(0), 8).unwrap();
    drop(lease);
    rig.expect(&buffer, 8);
    rig.check();
}

#[test]
fn a_written_buffer_is_read_in_place_as_it_was_written_last() {
    let rig = rig();
    let buffer = spilled(&rig, MIB(20), 3);
    for byte in 10..16 {
        rig.fill(&buffer, byte);
        rig.manager.spill(MIB(20));
        assert!(!buffer.is_resident());
        assert_eq!(ends(&rig, &buffer.read_in_place(rig.stream).unwrap()), [byte, byte]);
        rig.check();
    }
    buffer.discard().unwrap();
    rig.fill(&buffer, 2);
    rig.expect(&buffer, 2);
    rig.check();
}

#[test]
fn a_buffer_of_which_a_part_is_spilled_is_read_where_its_parts_are() {
    let rig = rig();
    let buffer = rig.manager.buffer(MIB(40)).unwrap();
    buffer.readable_while_spilled().unwrap();
    rig.fill(&buffer, 6);
    rig.manager.spill(MIB(16));
    let occupied = rig.manager.census().occupied;
    assert_eq!(occupied, MIB(24));
    let lease = buffer.read_in_place(rig.stream).unwrap();
    assert_eq!(ends(&rig, &lease), [6, 6]);
    assert_eq!(rig.manager.spill(MIB(40)).freed, Bytes::ZERO, "the rest stays on the card");
    assert_eq!(rig.manager.census().occupied, occupied);
    drop(lease);
    rig.expect(&buffer, 6);
    rig.check();
}

#[test]
fn copies_count_against_the_host_and_go_to_blocks_or_the_disk_where_it_is_full() {
    let rig = Plan { host: MIB(16), disk: Some(MIB(128)), ..Plan::default() }.build();
    let buffer = rig.manager.buffer(MIB(40)).unwrap();
    buffer.readable_while_spilled().unwrap();
    rig.fill(&buffer, 6);
    rig.manager.spill(MIB(40));
    assert!(rig.spaces.space(SpaceId::host(0)).unwrap().total() <= MIB(16));
    // What is on the disk cannot be read in place: the lease restores it.
    assert_eq!(ends(&rig, &buffer.read_in_place(rig.stream).unwrap()), [6, 6]);
    assert!(buffer.is_resident());
    rig.check();
}

#[test]
fn what_cannot_be_readable_while_spilled_is_told_why() {
    let rig = rig();
    let small = rig.manager.group().buffer(MIB(1)).unwrap();
    let refused = small.readable_while_spilled().unwrap_err();
    assert!(matches!(refused, SpillError::NotReadable(_)), "{refused}");
    let can = rig.sim.info().capabilities;
    let less = simulator().capabilities(Capabilities { host_numa: false, ..can });
    let rig = Plan::default().build_on(less);
    let buffer = rig.filled(MIB(8), 1);
    let refused = buffer.readable_while_spilled().unwrap_err();
    assert!(matches!(refused, SpillError::NotReadable(_)), "{refused}");
    rig.manager.spill(MIB(8));
    assert_eq!(ends(&rig, &buffer.read_in_place(rig.stream).unwrap()), [1, 1]);
    assert!(buffer.is_resident(), "a usual lease does as well");
}

pub const CALLS: [Call; 12] = [
    Call::Reserve,
    Call::Create,
    Call::Map,
    Call::SetAccess,
    Call::Unmap,
    Call::Release,
    Call::Copy,
    Call::Record,
    Call::Wait,
    Call::CreateEvent,
    Call::SynchronizeEvent,
    Call::Query,
];

#[test]
fn a_failing_call_leaves_a_readable_buffer_whole() {
    for call in CALLS {
        for n in vramp_testing::sampled(6, 3) {
            let rig = rig();
            let buffers: Vec<_> = (1..=4).map(|_| rig.manager.buffer(MIB(24)).unwrap()).collect();
            buffers.iter().for_each(|buffer| buffer.readable_while_spilled().unwrap());
            let first = rig.allocator.malloc(MIB(1), rig.stream).unwrap();
            rig.allocator.free(first, rig.stream).unwrap();
            for (buffer, byte) in buffers.iter().zip(1..) {
                rig.fill(buffer, byte);
            }
            rig.sim.synchronize_stream(rig.queue).unwrap();
            rig.fail(FaultPlan::nth_of(call, n).with_code(304));
            for buffer in buffers.iter().chain(&buffers) {
                // It may fail.
                drop(buffer.read_in_place(rig.stream));
                rig.manager.spill(MIB(8));
            }
            drop(buffers[0].lease(Access::Shared, rig.stream));
            rig.fail(FaultPlan::none());
            rig.check();
            let spoilt = !rig.allocator.census().quarantined_addresses.is_zero();
            for (buffer, byte) in buffers.iter().zip(1..) {
                if !spoilt {
                    let lease = buffer.read_in_place(rig.stream).unwrap();
                    assert_eq!(ends(&rig, &lease), [byte, byte], "{call} {n}");
                    drop(lease);
                    rig.expect(buffer, byte);
                }
            }
            drop(buffers);
            rig.sim.synchronize_stream(rig.queue).unwrap();
            rig.check();
            assert_eq!(rig.manager.census().buffers, 0, "{call} {n}");
        }
    }
}

#[test]
fn reads_in_place_leases_and_spills_at_random_corrupt_nothing_and_leak_nothing() {
    for seed in vramp_testing::seeds(6) {
        let mut random = fastrand::Rng::with_seed(seed);
        let disk = random.bool().then_some(MIB(512));
        let rig = Plan { host: MIB(160), disk, ..Plan::default() }.build();
        let mut streams = vec![(rig.stream, rig.queue)];
        for _ in 0..3 {
            let stream = rig.allocator.create_stream().unwrap();
            streams.push((stream, rig.allocator.stream(stream).unwrap()));
        }
        let mut buffers: Vec<(DeferrableBuffer, u8)> = Vec::new();
        for step in 0..150_u8 {
            let (stream, queue) = streams[random.usize(..streams.len())];
            let at = random.usize(..buffers.len().max(1));
            match random.u32(..10) {
                0 if buffers.len() < 6 => {
                    let buffer = rig.manager.buffer(Bytes::new(random.u64(1..(20 << 20)))).unwrap();
                    if random.u32(..4) > 0 {
                        buffer.readable_while_spilled().unwrap();
                    }
                    let lease = buffer.lease(Access::Exclusive, stream).unwrap();
                    rig.sim.fill(queue, lease.address(0), step).unwrap();
                    drop(lease);
                    buffers.push((buffer, step));
                }
                1 if buffers.len() > 3 => drop(buffers.swap_remove(at)),
                2 | 3 => drop(rig.manager.spill(MIB(random.u64(1..40)))),
                4 => {
                    if let Ok(block) = rig.allocator.malloc(MIB(random.u64(1..30)), stream) {
                        let range = AddrRange::new(block.addr(), block.len());
                        rig.sim.fill(queue, range, 0xEE).unwrap();
                        rig.allocator.free(block, stream).unwrap();
                    }
                }
                5 if !buffers.is_empty() => {
                    let (buffer, byte) = &mut buffers[at];
                    let lease = buffer.lease(Access::Exclusive, stream).unwrap();
                    let busy = Kernel::new("busy").writing(lease.address(0)).lasting(50_000);
                    rig.sim.launch(queue, busy).unwrap();
                    rig.sim.fill(queue, lease.address(0), step).unwrap();
                    *byte = step;
                }
                6 => match random.bool() {
                    true => drop(rig.manager.clean(MIB(16))),
                    false => drop(rig.manager.relieve_host(MIB(random.u64(1..40)))),
                },
                _ if !buffers.is_empty() => {
                    let (buffer, byte) = &buffers[at];
                    let lease = buffer.read_in_place(stream).unwrap();
                    let range = lease.address(0);
                    let read = Kernel::new("read").reading(range).lasting(30_000);
                    rig.sim.launch(queue, read).unwrap();
                    if random.bool() {
                        rig.sim.synchronize_stream(queue).unwrap();
                        let offset = Bytes::new(random.u64(..range.len.count()));
                        let one = AddrRange::new(range.start + offset, Bytes::new(1));
                        assert_eq!(rig.sim.peek(one).unwrap(), [*byte], "{buffer:?}, seed {seed}");
                    }
                }
                _ => {}
            }
            rig.manager.audit().unwrap();
        }
        rig.check();
        assert!(rig.manager.stats().reads_in_place > 0, "seed {seed}");
        for (buffer, byte) in &buffers {
            rig.expect(buffer, *byte);
        }
        drop(buffers);
        rig.check();
        let Rig { sim, allocator, pool, store, spaces, manager, .. } = rig;
        drop((manager, store, pool));
        let host = spaces.space(SpaceId::host(0)).unwrap();
        assert_eq!(host.total(), Bytes::ZERO, "seed {seed}");
        drop(allocator);
        let live = sim.live();
        assert_eq!((live.handles, live.mappings), (0, 0), "seed {seed}");
    }
}
