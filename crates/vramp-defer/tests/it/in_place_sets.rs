//! Sets of which some buffers are read in place and others come to the card.

use std::sync::mpsc;
use std::time::Duration;

use vramp_alloc::Driver;
use vramp_defer::LeaseRefused;
use vramp_defer::SpillError;
use vramp_driver::sim::Kernel;
use vramp_tiers::Deadline;

use super::hooked::Hooked;
use super::in_place::{CALLS, ends, ends_of, spilled};
use super::*;

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
