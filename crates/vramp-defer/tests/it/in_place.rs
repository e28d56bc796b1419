//! Buffers that are readable while spilled: what a kernel reads at their addresses, when they are
//! restored, which requests wait for which, and what is left when a driver call fails.

use std::sync::mpsc;
use std::time::Duration;

use vramp_alloc::Driver;
use vramp_alloc::device::CaptureMode;
use vramp_defer::planner::{Copies, LeaseRefused, PieceState, PinError};
use vramp_defer::report::MoveKind;
use vramp_defer::{LeaseSet, SpillError};
use vramp_driver::sim::Kernel;
use vramp_driver::{Call, Capabilities};
use vramp_host::Direction;
use vramp_tiers::Deadline;

use super::faulty::{EIO, ENOSPC, Fault, Faulty, Hooked};
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

// --- Mapped copies when the host is short: they go to the disk through the card, and stay where they are
// whatever fails ---

const HOST: Copies = Copies { peer: None, host: true, disk: false };
const DISK: Copies = Copies { peer: None, host: false, disk: true };

fn with_disk() -> Plan {
    Plan { disk: Some(MIB(512)), ..Plan::default() }
}

fn total(rig: &Rig, id: SpaceId) -> Bytes {
    rig.spaces.space(id).unwrap().total()
}

fn are(buffer: &DeferrableBuffer, copies: Copies) -> bool {
    buffer.states().iter().all(|state| *state == PieceState::Spilled { copies })
}

#[test]
fn a_short_host_sends_copies_that_the_device_maps_to_the_disk() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(24), 7);
    assert!(are(&buffer, HOST));
    let before = total(&rig, SpaceId::host(0));
    let registered = rig.sim.calls_of(Call::CopyToHost);
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    assert!(are(&buffer, DISK));
    assert!(rig.sim.calls_of(Call::CopyToHost) > registered, "the card copies them");
    assert!(total(&rig, SpaceId::host(0)) + MIB(24) <= before);
    let pushed = rig.manager.history().iter().filter(|one| one.what == MoveKind::Pushed).count();
    assert_eq!(pushed, 3);
    rig.check();
    // What is on the disk cannot be read in place, so it is restored; it is readable below once it
    // left again.
    let lease = buffer.read_in_place(rig.stream).unwrap();
    assert!(!lease.is_in_place(0) && buffer.is_resident());
    assert_eq!(ends(&rig, &lease), [7, 7]);
    drop(lease);
    rig.manager.spill(MIB(24));
    assert!(are(&buffer, Copies { peer: None, host: true, disk: true }));
    let lease = buffer.read_in_place(rig.stream).unwrap();
    assert!(lease.is_in_place(0));
    assert_eq!(ends(&rig, &lease), [7, 7]);
    drop(lease);
    // What is on the disk by now is dropped from the host at no cost.
    let written = rig.manager.stats().to_disk_bytes;
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    assert_eq!(rig.manager.stats().to_disk_bytes, written);
    assert!(are(&buffer, DISK));
    rig.expect(&buffer, 7);
    rig.check();
    drop(buffer);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.manager.census();
    rig.manager.relieve_host(MIB(512));
    assert_eq!(total(&rig, SpaceId::host(0)), Bytes::ZERO);
    assert_eq!(total(&rig, SpaceId::disk(0)), Bytes::ZERO);
    rig.check();
}

#[test]
fn what_somebody_else_unmaps_while_a_lease_waits_for_its_readers_is_no_failure() {
    let sim = Arc::new(simulator().build());
    let hooked = Arc::new(Hooked::on(Arc::clone(&sim)));
    let rig = with_disk().build_behind(hooked.clone(), sim);
    let buffer = spilled(&rig, MIB(24), 7);
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    rig.expect(&buffer, 7);
    rig.manager.spill(MIB(24));
    assert!(are(&buffer, Copies { peer: None, host: true, disk: true }));
    // The copy is dropped while a kernel reads it, so it stays mapped until that is done.
    let reading = buffer.read_in_place(rig.stream).unwrap();
    let long = Kernel::new("long").reading(reading.address(0)).lasting(50_000_000);
    rig.sim.launch(rig.queue, long).unwrap();
    drop(reading);
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    assert!(are(&buffer, DISK));
    let (ask, asked) = mpsc::channel::<()>();
    let (answer, answered) = mpsc::channel();
    std::thread::scope(|scope| {
        let manager = &rig.manager;
        scope.spawn(move || {
            for () in asked {
                answer.send(manager.census()).unwrap();
            }
        });
        hooked.after_wait(move || {
            ask.send(()).unwrap();
            answered.recv().unwrap();
        });
        let unmapped = rig.sim.calls_of(Call::Unmap);
        drop(buffer.lease(Access::Shared, rig.stream).unwrap());
        assert!(rig.sim.calls_of(Call::Unmap) > unmapped);
    });
    rig.expect(&buffer, 7);
    rig.check();
}

#[test]
fn plain_copies_go_to_the_disk_before_those_that_can_be_read() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(16), 1);
    let plain = rig.filled(MIB(16), 2);
    rig.manager.spill(MIB(16));
    assert_eq!(rig.manager.relieve_host(MIB(16)), MIB(16));
    assert!(are(&plain, DISK) && are(&buffer, HOST));
    assert_eq!(rig.manager.relieve_host(MIB(8)), MIB(8));
    let states = [DISK, HOST].map(|copies| PieceState::Spilled { copies });
    assert_eq!(buffer.states(), states);
    rig.expect(&plain, 2);
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn what_is_read_in_place_is_pushed_once_nobody_reads_it() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(24), 5);
    let reading = buffer.read_in_place(rig.stream).unwrap();
    assert_eq!(rig.manager.relieve_host(MIB(24)), Bytes::ZERO);
    assert!(are(&buffer, HOST));
    // Work outlasts the lease: it is waited for before anything is unmapped.
    let began = rig.sim.now_ns();
    let long = Kernel::new("long").reading(reading.address(0)).lasting(50_000_000);
    rig.sim.launch(rig.queue, long).unwrap();
    drop(reading);
    let unmapped = rig.sim.calls_of(Call::Unmap);
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    assert!(rig.sim.calls_of(Call::Unmap) > unmapped);
    assert!(rig.sim.now_ns() >= began + 50_000_000);
    assert!(are(&buffer, DISK));
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn a_failing_call_of_a_push_leaves_the_copy_where_it_was() {
    for call in CALLS.into_iter().chain([Call::CopyToHost]) {
        for n in vramp_testing::sampled(8, 3) {
            let rig = with_disk().build();
            let buffers = [1, 2].map(|byte| spilled(&rig, MIB(24), byte));
            rig.fail(FaultPlan::nth_of(call, n).with_code(304));
            let made = rig.manager.relieve_host(MIB(48));
            rig.fail(FaultPlan::none());
            rig.check();
            let states = buffers.iter().flat_map(DeferrableBuffer::states);
            let on_host =
                states.filter(|state| *state == PieceState::Spilled { copies: HOST }).count();
            assert_eq!(MIB(48), made + MIB(8) * on_host as u64, "{call} {n}");
            for (buffer, byte) in buffers.iter().zip(1..) {
                let whole = are(buffer, HOST);
                let lease = buffer.read_in_place(rig.stream).unwrap();
                assert_eq!(lease.is_in_place(0), whole, "{call} {n}: what stayed is readable");
                assert_eq!(ends(&rig, &lease), [byte, byte], "{call} {n}");
                drop(lease);
                rig.expect(buffer, byte);
            }
            drop(buffers);
            rig.sim.synchronize_stream(rig.queue).unwrap();
            rig.manager.census();
            rig.manager.relieve_host(MIB(512));
            rig.check();
            assert_eq!(total(&rig, SpaceId::disk(0)), Bytes::ZERO, "{call} {n}");
            assert_eq!(total(&rig, SpaceId::host(0)), Bytes::ZERO, "{call} {n}");
        }
    }
}

#[test]
fn a_disk_that_fails_or_is_full_leaves_copies_where_they_are_read() {
    for code in [EIO, ENOSPC] {
        let io = Faulty::new();
        let rig = Plan { io: Some(Arc::<Faulty>::clone(&io)), ..with_disk() }.build();
        let buffer = spilled(&rig, MIB(24), 3);
        io.set(move |request| match request.direction {
            Direction::Write => Fault::Fail(code),
            Direction::Read => Fault::None,
        });
        assert_eq!(rig.manager.relieve_host(MIB(24)), Bytes::ZERO);
        assert!(are(&buffer, HOST));
        let told = rig.manager.failures();
        assert!(told.iter().all(|failed| failed.what == MoveKind::Pushed), "{told:?}");
        assert_eq!(told.len() as u64, rig.manager.stats().failures);
        assert!(!told.is_empty());
        let lease = buffer.read_in_place(rig.stream).unwrap();
        assert!(lease.is_in_place(0));
        assert_eq!(ends(&rig, &lease), [3, 3]);
        drop(lease);
        io.heal();
        assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
        rig.expect(&buffer, 3);
        rig.check();
    }
    let rig = Plan { disk: Some(MIB(8)), ..Plan::default() }.build();
    let buffer = spilled(&rig, MIB(24), 3);
    assert!(rig.manager.relieve_host(MIB(24)) <= MIB(8));
    rig.expect(&buffer, 3);
    rig.check();
}

#[test]
fn what_is_on_the_disk_leaves_even_if_no_copy_to_read_can_be_made() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(24), 3);
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    rig.expect(&buffer, 3);
    let no_memory = FaultPlan::from_nth_of(Call::Create, 1);
    rig.fail(no_memory.and(FaultPlan::from_nth_of(Call::CopyToHost, 1)));
    assert_eq!(rig.manager.spill(MIB(24)).freed, MIB(24));
    rig.fail(FaultPlan::none());
    let told = rig.manager.failures();
    assert_eq!((told.len(), rig.manager.stats().failures), (3, 3), "for each piece: {told:?}");
    assert!(are(&buffer, DISK));
    rig.expect(&buffer, 3);
    rig.check();
}

#[test]
fn nothing_is_pushed_through_the_card_while_a_stream_captures() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(24), 3);
    rig.sim.begin_capture(rig.queue, CaptureMode::Global).unwrap();
    assert_eq!(rig.manager.relieve_host(MIB(24)), Bytes::ZERO);
    rig.sim.end_capture(rig.queue).unwrap();
    assert_eq!(rig.sim.invalidated_captures(), 0);
    assert!(are(&buffer, HOST));
    let stats = rig.manager.stats();
    assert_eq!((stats.failures, stats.given_up), (0, 3), "nothing is broken");
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    rig.expect(&buffer, 3);
    rig.check();
}

#[test]
fn memory_that_is_kept_for_later_copies_goes_first() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(24), 3);
    let kept = spilled(&rig, MIB(16), 4);
    // A write makes the copies stale: their memory is kept.
    rig.fill(&buffer, 5);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.manager.census();
    let before = total(&rig, SpaceId::host(0));
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    assert!(total(&rig, SpaceId::host(0)) + MIB(24) <= before);
    assert!(are(&kept, HOST), "nothing had to be pushed");
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn more_readable_contents_than_the_host_holds_are_whole_wherever_they_are() {
    let rig = Plan { host: MIB(80), ..with_disk() }.build();
    let buffers: Vec<_> = (1..=6).map(|byte| spilled(&rig, MIB(24), byte)).collect();
    assert!(total(&rig, SpaceId::host(0)) <= MIB(80));
    for round in 0..2 {
        for (buffer, byte) in buffers.iter().zip(1..) {
            let lease = buffer.read_in_place(rig.stream).unwrap();
            assert_eq!(ends(&rig, &lease), [byte, byte], "round {round}");
        }
    }
    let stats = rig.manager.stats();
    assert!(stats.from_disk_bytes > 0 && stats.to_disk_bytes > 0, "{stats:?}");
    rig.manager.spill(MIB(64));
    rig.check();
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.check();
}

// --- Sets of which some buffers are read in place and others come to the card ---

/// Another stream of the rig.
fn other_stream(rig: &Rig) -> (StreamId, Stream) {
    let stream = rig.allocator.create_stream().unwrap();
    (stream, rig.allocator.stream(stream).unwrap())
}

#[test]
fn a_set_larger_than_the_card_is_read_where_it_is_beside_what_is_written_there() {
    let rig = rig();
    let columns: Vec<_> = (1..=3).map(|byte| spilled(&rig, MIB(40), byte)).collect();
    let table = rig.manager.buffer(MIB(48)).unwrap();
    let mut set: Vec<_> = columns.iter().map(|column| (column, Access::Shared)).collect();
    set.push((&table, Access::Exclusive));
    let refused = rig.manager.lease(&set, rig.stream).unwrap_err();
    assert!(matches!(refused, SpillError::Refused(LeaseRefused::TooLarge { .. })), "{refused}");
    let lease = rig.manager.lease_in_place(&set, rig.stream).unwrap();
    let in_place: Vec<bool> = (0..5).map(|index| lease.is_in_place(index)).collect();
    assert_eq!(in_place, [true, true, true, false, false]);
    assert!(lease.addresses().eq(set.iter().map(|(buffer, _)| buffer.addresses())));
    for (index, byte) in (0..3).zip(1..) {
        assert_eq!(ends_of(&rig, &lease, index), [byte, byte]);
    }
    rig.sim.fill(rig.queue, lease.address(3), 9).unwrap();
    drop(lease);
    rig.check();
    let stats = rig.manager.stats();
    assert_eq!((stats.reads_in_place, stats.from_host_bytes), (3, 0));
    assert!(!columns.iter().any(DeferrableBuffer::is_resident));
    rig.expect(&table, 9);
    for (column, byte) in columns.iter().zip(1..) {
        rig.expect(column, byte);
    }
    rig.check();
}

#[test]
fn of_a_set_what_cannot_be_read_below_comes_to_the_card() {
    let rig = Plan { disk: Some(MIB(256)), ..Plan::default() }.build();
    let pushed = spilled(&rig, MIB(8), 4);
    assert_eq!(rig.manager.relieve_host(MIB(8)), MIB(8));
    let below = spilled(&rig, MIB(24), 1);
    let plain = rig.filled(MIB(16), 2);
    rig.manager.spill(MIB(16));
    let there = rig.manager.buffer(MIB(8)).unwrap();
    there.readable_while_spilled().unwrap();
    rig.fill(&there, 3);
    let set = [&below, &plain, &there, &pushed].map(|buffer| (buffer, Access::Shared));
    let lease = rig.manager.lease_in_place(&set, rig.stream).unwrap();
    let in_place: Vec<bool> = (0..4).map(|index| lease.is_in_place(index)).collect();
    assert_eq!(in_place, [true, false, false, false], "one is plain, one there, one on the disk");
    for (index, byte) in (0..4).zip(1..) {
        assert_eq!(ends_of(&rig, &lease, index), [byte, byte]);
    }
    drop(lease);
    assert!(!below.is_resident() && plain.is_resident() && pushed.is_resident());
    rig.check();
}

#[test]
fn a_set_that_is_refused_holds_and_counts_nothing() {
    let rig = rig();
    let below = spilled(&rig, MIB(24), 1);
    let table = rig.manager.buffer(MIB(16)).unwrap();
    let held = table.lease(Access::Exclusive, rig.stream).unwrap();
    let set = [(&below, Access::Shared), (&table, Access::Shared)];
    let refused = rig.manager.lease_in_place(&set, rig.stream).unwrap_err();
    assert!(matches!(refused, SpillError::Refused(LeaseRefused::Busy { .. })), "{refused}");
    assert_eq!(rig.manager.stats().reads_in_place, 0);
    assert_eq!(rig.manager.census().leases, 1);
    drop(below.lease(Access::Exclusive, rig.stream).unwrap());
    drop(held);
    rig.check();
    let elsewhere = super::rig();
    let foreign = elsewhere.filled(MIB(8), 1);
    let set = [(&below, Access::Shared), (&foreign, Access::Shared)];
    let refused = rig.manager.lease_in_place(&set, rig.stream).unwrap_err();
    assert!(matches!(refused, SpillError::OtherManager), "{refused}");
}

#[test]
fn what_is_written_comes_even_if_it_could_be_read_below() {
    let rig = rig();
    let buffer = spilled(&rig, MIB(24), 1);
    let set = [(&buffer, Access::Shared), (&buffer, Access::Exclusive)];
    let lease = rig.manager.lease_in_place(&set, rig.stream).unwrap();
    assert!(!lease.is_in_place(0) && !lease.is_in_place(1) && buffer.is_resident());
    rig.sim.fill(rig.queue, lease.address(1), 6).unwrap();
    drop(lease);
    rig.manager.spill(MIB(24));
    assert_eq!(ends(&rig, &buffer.read_in_place(rig.stream).unwrap()), [6, 6]);
    rig.check();
}

#[test]
fn each_buffer_of_a_set_is_promoted_by_its_own_reads() {
    let rig = rig();
    let [often, seldom] = [1, 2].map(|byte| spilled(&rig, MIB(16), byte));
    for _ in 0..2 {
        drop(often.read_in_place(rig.stream).unwrap());
    }
    let set = [(&often, Access::Shared), (&seldom, Access::Shared)];
    let lease = rig.manager.lease_in_place(&set, rig.stream).unwrap();
    assert!(lease.is_in_place(0) && lease.is_in_place(1));
    drop(lease);
    let lease = rig.manager.lease_in_place(&set, rig.stream).unwrap();
    assert!(!lease.is_in_place(0) && lease.is_in_place(1), "three reads of one, one of the other");
    assert_eq!([ends_of(&rig, &lease, 0), ends_of(&rig, &lease, 1)], [[1, 1], [2, 2]]);
    drop(lease);
    assert!(often.is_resident() && !seldom.is_resident());
    let stats = rig.manager.stats();
    assert_eq!((stats.reads_in_place, stats.promotions), (5, 1));
    rig.check();
}

#[test]
fn hot_buffers_of_a_set_stay_below_where_the_set_has_no_room_for_them() {
    let rig = rig();
    let [hot, cold] = [1, 2].map(|byte| spilled(&rig, MIB(32), byte));
    for _ in 0..3 {
        drop(hot.read_in_place(rig.stream).unwrap());
    }
    let table = rig.manager.buffer(MIB(40)).unwrap();
    let shared = [&hot, &cold].map(|buffer| (buffer, Access::Shared));
    let set = [shared[0], shared[1], (&table, Access::Exclusive)];
    let lease = rig.manager.lease_in_place(&set, rig.stream).unwrap();
    assert!(lease.is_in_place(0) && lease.is_in_place(1) && !lease.is_in_place(2));
    assert_eq!(rig.manager.stats().promotions, 0);
    drop(lease);
    drop(hot.lease(Access::Shared, rig.stream).unwrap());
    let lease = rig.manager.lease_in_place(&shared, rig.stream).unwrap();
    assert_eq!(rig.manager.stats().promotions, 0, "what was there is no promotion");
    drop(lease);
    rig.check();
}

#[test]
fn several_streams_read_below_and_a_writer_comes_behind_all_of_them() {
    let rig = rig();
    let buffer = rig.manager.buffer(MIB(40)).unwrap();
    buffer.readable_while_spilled().unwrap();
    rig.fill(&buffer, 7);
    // A part stays on the card.
    rig.manager.spill(MIB(24));
    let streams = [other_stream(&rig), other_stream(&rig), other_stream(&rig)];
    let ids = streams.map(|(id, _)| id);
    let now = Deadline::from(std::time::Instant::now());
    let set = [(&buffer, Access::Shared)];
    let lease = rig.manager.lease_in_place_on(&set, &ids, now).unwrap();
    assert!(lease.is_in_place(0));
    for (_, queue) in streams {
        let long = Kernel::new("long").reading(lease.address(0)).lasting(5_000_000);
        rig.sim.launch(queue, long).unwrap();
    }
    drop(lease);
    rig.fill(&buffer, 8);
    rig.check();
    rig.manager.spill(MIB(40));
    // For the host itself, which waits for no stream.
    let lease = rig.manager.lease_in_place_on(&set, &[], now).unwrap();
    assert!(lease.is_in_place(0));
    let one = AddrRange::new(lease.address(0).start, Bytes::new(1));
    assert_eq!(rig.sim.peek(one).unwrap(), [8]);
    drop(lease);
    rig.check();
}

#[test]
fn a_failing_call_leaves_the_buffers_of_a_set_whole_and_held_by_nobody() {
    for call in CALLS {
        for n in vramp_testing::sampled(5, 3) {
            let rig = rig();
            let columns: Vec<_> = (1..=3).map(|byte| spilled(&rig, MIB(24), byte)).collect();
            let plain = rig.filled(MIB(24), 4);
            rig.manager.spill(MIB(24));
            let table = rig.manager.buffer(MIB(16)).unwrap();
            let mut set: Vec<_> = columns.iter().map(|column| (column, Access::Shared)).collect();
            set.extend([(&plain, Access::Shared), (&table, Access::Exclusive)]);
            rig.fail(FaultPlan::nth_of(call, n).with_code(304));
            for _ in 0..4 {
                // It may fail. What was read often is promoted, and leaves for the others.
                if let Ok(lease) = rig.manager.lease_in_place(&set, rig.stream) {
                    let reads = lease.addresses().take(4);
                    let kernel = reads.fold(Kernel::new("join"), Kernel::reading);
                    drop(rig.sim.launch(rig.queue, kernel.writing(lease.address(4))));
                }
                rig.manager.spill(MIB(16));
            }
            rig.fail(FaultPlan::none());
            rig.check();
            assert_eq!(rig.manager.census().leases, 0, "{call} {n}");
            let spoilt = !rig.allocator.census().quarantined_addresses.is_zero();
            for (buffer, byte) in columns.iter().chain([&plain]).zip(1..) {
                if !spoilt {
                    rig.expect(buffer, byte);
                }
            }
            drop((columns, plain, table));
            rig.sim.synchronize_stream(rig.queue).unwrap();
            assert_eq!(rig.manager.census().buffers, 0, "{call} {n}");
            rig.check();
        }
    }
}

#[test]
fn copies_are_mapped_with_the_lock_free() {
    let sim = Arc::new(simulator().build());
    let hooked = Arc::new(Hooked::on(Arc::clone(&sim)));
    let rig = Plan::default().build_behind(hooked.clone(), sim);
    let buffer = rig.manager.buffer(MIB(24)).unwrap();
    buffer.readable_while_spilled().unwrap();
    rig.fill(&buffer, 7);
    let addresses = buffer.addresses();
    let (ask, asked) = mpsc::channel();
    let (answer, answered) = mpsc::channel();
    let times = std::thread::scope(|scope| {
        let manager = &rig.manager;
        scope.spawn(move || {
            for () in asked {
                answer.send(manager.stats()).unwrap();
            }
        });
        let (count, counts) = mpsc::channel();
        hooked.set(Some(Box::new(move |range: AddrRange| {
            let end = addresses.start + addresses.len;
            if addresses.start <= range.start && range.start < end {
                ask.send(()).unwrap();
                // If the calling thread held the lock there would be no answer.
                count.send(answered.recv_timeout(Duration::from_secs(20)).is_ok()).unwrap();
            }
        })));
        rig.manager.spill(MIB(24));
        hooked.set(None);
        counts.iter().collect::<Vec<bool>>()
    });
    assert_eq!(times, [true; 3], "each piece is mapped, and the manager answers meanwhile");
    assert_eq!(ends(&rig, &buffer.read_in_place(rig.stream).unwrap()), [7, 7]);
    rig.check();
}

#[test]
fn a_buffer_that_becomes_readable_late_is_so_once_it_was_back() {
    let rig = rig();
    let [there, gone] = [1, 2].map(|byte| rig.filled(MIB(16), byte));
    rig.manager.spill(MIB(32));
    rig.expect(&there, 1);
    for (buffer, byte) in [(&there, 1), (&gone, 2)] {
        buffer.readable_while_spilled().unwrap();
        rig.expect(buffer, byte);
    }
    rig.manager.spill(MIB(32));
    let lease = rig
        .manager
        .lease_in_place(&[&there, &gone].map(|buffer| (buffer, Access::Shared)), rig.stream);
    let lease = lease.unwrap();
    assert!(lease.is_in_place(0) && lease.is_in_place(1));
    assert_eq!([ends_of(&rig, &lease, 0), ends_of(&rig, &lease, 1)], [[1, 1], [2, 2]]);
    drop(lease);
    rig.check();
}

/// Copies are mapped with the lock released: other threads lease, write, push and drop meanwhile.
#[test]
fn threads_that_read_in_place_and_move_everything_at_random_corrupt_nothing() {
    for seed in 0..4 {
        let rig = Plan { host: MIB(96), disk: Some(MIB(512)), ..Plan::default() }.build();
        let shared = spilled(&rig, MIB(20), 0xAB);
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let (rig, shared) = (&rig, &shared);
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed * 100 + u64::from(thread));
                    let (stream, queue) = other_stream(rig);
                    let mut own = rig.manager.buffer(MIB(16)).unwrap();
                    let mut mark = None;
                    for round in 0..60_u8 {
                        match random.u32(..8) {
                            0 => {
                                own = rig.manager.buffer(MIB(16)).unwrap();
                                own.readable_while_spilled().unwrap();
                                mark = None;
                            }
                            1 | 2 => {
                                let Ok(lease) = own.lease(Access::Exclusive, stream) else {
                                    continue;
                                };
                                let byte = round ^ (thread << 6);
                                rig.sim.fill(queue, lease.address(0), byte).unwrap();
                                mark = Some(byte);
                            }
                            3 => drop(rig.manager.spill(MIB(random.u64(1..64)))),
                            4 => drop(rig.manager.relieve_host(MIB(random.u64(1..32)))),
                            _ => {
                                let set = [(&own, Access::Shared), (shared, Access::Shared)];
                                let lease = rig.manager.lease_in_place(&set, stream);
                                let Ok(lease) = lease else { continue };
                                let reads = lease.addresses();
                                let kernel = reads.fold(Kernel::new("read"), Kernel::reading);
                                rig.sim.launch(queue, kernel).unwrap();
                                rig.sim.synchronize_stream(queue).unwrap();
                                for (range, byte) in lease.addresses().zip([mark, Some(0xAB)]) {
                                    let at = Bytes::new(random.u64(..range.len.count()));
                                    let one = AddrRange::new(range.start + at, Bytes::new(1));
                                    let Some(byte) = byte else { continue };
                                    assert_eq!(rig.sim.peek(one).unwrap(), [byte], "seed {seed}");
                                }
                            }
                        }
                    }
                    // A buffer without handles ends once the work on it is complete.
                    rig.sim.synchronize_stream(queue).unwrap();
                });
            }
        });
        rig.check();
        rig.expect(&shared, 0xAB);
        drop(shared);
        rig.check();
        rig.sim.synchronize_stream(rig.queue).unwrap();
        assert_eq!(rig.manager.census().buffers, 0, "seed {seed}");
        rig.manager.relieve_host(MIB(4096));
        assert_eq!(rig.spaces.space(SpaceId::host(0)).unwrap().total(), Bytes::ZERO, "seed {seed}");
        assert_eq!(rig.spaces.space(SpaceId::disk(0)).unwrap().total(), Bytes::ZERO, "seed {seed}");
    }
}
