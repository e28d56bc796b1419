//! Costs that must not grow with the number of buffers, and tables that must not keep what has ended.
//! Steps are counted, not timed.

use vramp_driver::Call;
use vramp_driver::sim::{Kernel, LiveObjects};

use super::*;

/// A card that holds `count` buffers of 2 MiB and no more, all written and idle.
fn full_card(count: u64) -> (Rig, Vec<DeferrableBuffer>) {
    let card = Simulator::builder().memory(Bytes::tib(1)).contents(Contents::Discarded);
    let rig = Plan { limit: MIB(2) * count, host: MIB(256), ..Plan::default() }.build_on(card);
    let buffers: Vec<_> = (0..count).map(|_| rig.manager.buffer(MIB(2)).unwrap()).collect();
    for buffer in &buffers {
        drop(buffer.lease(Access::Exclusive, rig.stream).unwrap());
    }
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.manager.spill(MIB(2));
    (rig, buffers)
}

/// Table entries that the planner and the pool look at during `work`.
fn looked_at(rig: &Rig, work: impl FnOnce()) -> u64 {
    let count = || rig.manager.counters().looked_at + rig.allocator.stats().unwrap().looked_at;
    let before = count();
    work();
    count() - before
}

/// Asserts that each operation looks at about as many entries with the most buffers as with the fewest.
fn expect_flat(name: &str, counts: &[(u64, u64)]) {
    let (_, few) = counts[0];
    for (buffers, looked_at) in counts {
        assert!(*looked_at <= 2 * few + 8, "{name} with {buffers} buffers: {counts:?}");
    }
}

/// Numbers of buffers; a long run goes to 100,000.
fn buffer_counts() -> impl Iterator<Item = u64> {
    let most = u64::from(vramp_testing::cases(10_000)).min(100_000);
    [100, 1_000, 10_000, 100_000].into_iter().filter(move |count| *count <= most)
}

#[test]
fn a_lease_that_spills_looks_at_as_many_entries_whatever_the_number_of_buffers() {
    let mut of_lease = Vec::new();
    let mut of_spill = Vec::new();
    let mut of_poll = Vec::new();
    for count in buffer_counts() {
        let (rig, buffers) = full_card(count);
        let more: Vec<_> = (0..4).map(|_| rig.manager.buffer(MIB(2)).unwrap()).collect();
        drop(more[0].lease(Access::Exclusive, rig.stream).unwrap());
        rig.sim.synchronize_stream(rig.queue).unwrap();
        of_lease.push((
            count,
            looked_at(&rig, || {
                for buffer in &more[1..] {
                    drop(buffer.lease(Access::Exclusive, rig.stream).unwrap());
                }
            }),
        ));
        assert_eq!(rig.manager.counters().victims, 4, "{count}");
        rig.sim.synchronize_stream(rig.queue).unwrap();
        rig.manager.census();
        of_spill.push((
            count,
            looked_at(&rig, || {
                assert_eq!(rig.manager.spill(MIB(2)).freed, MIB(2));
            }),
        ));
        // Many buffers with work in flight, of which little completes.
        let [busy, other] = [0, 1].map(|_| rig.allocator.create_stream().unwrap());
        for buffer in &buffers[buffers.len() / 2..] {
            drop(buffer.lease(Access::Shared, busy).unwrap());
        }
        let raw = rig.allocator.stream(busy).unwrap();
        rig.sim.synchronize_stream(raw).unwrap();
        rig.manager.census();
        drop(buffers[50].lease(Access::Shared, other).unwrap());
        of_poll.push((count, looked_at(&rig, || assert!(rig.manager.census().buffers > 0))));
    }
    expect_flat("a lease that spills", &of_lease);
    expect_flat("a spill", &of_spill);
    expect_flat("a poll", &of_poll);
}

#[test]
fn the_first_lease_after_much_work_completed_looks_at_few_of_its_buffers() {
    for count in [100, u64::from(vramp_testing::cases(2_000)).min(100_000)] {
        let (rig, buffers) = full_card(count);
        let [busy, other] = [0, 1].map(|_| rig.allocator.create_stream().unwrap());
        let (raw, gate) = (rig.allocator.stream(busy).unwrap(), rig.sim.gate());
        rig.sim.launch(raw, Kernel::new("busy").until(gate)).unwrap();
        for buffer in &buffers[1..] {
            drop(buffer.lease(Access::Shared, busy).unwrap());
        }
        rig.sim.open(gate);
        rig.sim.synchronize_stream(raw).unwrap();
        let lease = || drop(buffers[0].lease(Access::Shared, other).unwrap());
        let first = looked_at(&rig, lease);
        assert!(first <= 300, "{first} entries with {count} buffers");
        // Each lease records more of it, and what needs to know all of it waits for none.
        let second = looked_at(&rig, lease);
        assert!(second <= 300 && (second > 200 || count < 600), "{second} entries");
        rig.manager.census();
        let third = looked_at(&rig, lease);
        assert!(third <= 16, "{third} entries once all is recorded");
        let kept = rig.manager.footprint();
        assert!(kept.contains(&("streams with completed work", 0)), "{kept:?}");
        rig.check();
    }
}

#[test]
fn a_buffer_that_is_dropped_while_many_are_held_looks_at_none_of_them() {
    let mut counts = Vec::new();
    for count in buffer_counts() {
        let rig = Plan { limit: MIB(64), ..Plan::default() }.build();
        let buffers: Vec<_> = (0..count).map(|_| rig.manager.buffer(MIB(2)).unwrap()).collect();
        drop(buffers[0].lease(Access::Exclusive, rig.stream).unwrap());
        let other = rig.manager.buffer(MIB(2)).unwrap();
        counts.push((count, looked_at(&rig, || drop(other))));
    }
    expect_flat("a drop", &counts);
}

#[test]
fn a_lease_queries_few_of_many_streams_and_in_turn_all() {
    for count in [10_u64, 1_000] {
        let rig = Plan { limit: MIB(256), ..Plan::default() }.build();
        let buffer = rig.filled(MIB(2), 1);
        let other = rig.filled(MIB(2), 2);
        rig.sim.synchronize_stream(rig.queue).unwrap();
        rig.manager.census();
        let gate = rig.sim.gate();
        for _ in 0..count {
            let stream = rig.allocator.create_stream().unwrap();
            let lease = buffer.lease(Access::Shared, stream).unwrap();
            let busy = Kernel::new("busy").reading(lease.address(0)).until(gate);
            rig.sim.launch(rig.allocator.stream(stream).unwrap(), busy).unwrap();
        }
        let queries = |work: &dyn Fn()| {
            let before = rig.sim.calls_of(Call::Query);
            work();
            rig.sim.calls_of(Call::Query) - before
        };
        let lease = || drop(other.lease(Access::Shared, rig.stream).unwrap());
        // For each stream one for its last use, and one for its first, which is the same here.
        let of_lease = queries(&lease);
        assert!(of_lease <= 2 * (64 + 1), "{of_lease} queries with {count} streams");
        assert!(of_lease >= count.min(64), "{of_lease} queries with {count} streams");
        // What completes is found after a few more leases, and at once by an eviction.
        let busy = || {
            let tables = rig.manager.footprint();
            tables.iter().find(|(name, _)| *name == "streams with work").unwrap().1
        };
        assert!(busy() as u64 >= count);
        rig.sim.open(gate);
        rig.sim.advance(1_000_000);
        (0..=count / 64 + 1).for_each(|_| lease());
        let uses = buffer.clone();
        drop(uses.lease(Access::Exclusive, rig.stream).unwrap());
        rig.sim.synchronize_stream(rig.queue).unwrap();
        assert_eq!(rig.manager.spill(MIB(4)).freed, MIB(4));
        assert_eq!(busy(), 0);
        rig.expect(&buffer, 1);
        rig.check();
    }
}

/// The tables that are not empty.
fn left(rig: &Rig) -> Vec<(&'static str, usize)> {
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.manager.footprint().into_iter().filter(|(_, entries)| *entries > 0).collect()
}

#[test]
fn buffers_leases_and_groups_leave_nothing() {
    let rig = rig();
    assert_eq!(left(&rig), []);
    for round in 0..vramp_testing::cases(10) {
        let group = rig.manager.group();
        for _ in 0..1_000 {
            let [own, member] = [rig.manager.buffer(MIB(2)), group.buffer(Bytes::kib(64))];
            let (own, member) = (own.unwrap(), member.unwrap());
            let set = [(&own, Access::Exclusive), (&member, Access::Exclusive)];
            let lease = rig.manager.lease(&set, rig.stream).unwrap();
            drop(lease.pin(0).unwrap());
            drop(lease);
        }
        if round % 10 == 0 {
            let spilled: Vec<_> = (1..20).map(|byte| rig.filled(MIB(8), byte)).collect();
            rig.manager.spill(MIB(64));
            (1..).zip(&spilled).for_each(|(byte, buffer)| rig.expect(buffer, byte));
        }
    }
    assert_eq!(left(&rig), []);
    rig.check();
}

#[test]
fn streams_that_were_used_leave_nothing() {
    let rig = rig();
    let [buffer, other] = [1, 2].map(|byte| rig.filled(MIB(2), byte));
    let use_stream = || {
        let stream = rig.allocator.create_stream().unwrap();
        for _ in 0..5 {
            drop(buffer.lease(Access::Shared, stream).unwrap());
            drop(other.lease(Access::Exclusive, stream).unwrap());
        }
        rig.allocator.destroy_stream(stream).unwrap();
    };
    (0..100).for_each(|_| use_stream());
    // Events are kept for the next streams, a bounded number of them.
    let live = || LiveObjects { events: 0, ..rig.sim.live() };
    let before = (left(&rig), live());
    let streams = vramp_testing::cases(5_000);
    // Ten leases each. The simulator keeps a record of each stream, so heap memory is measured by the
    // planner's own test.
    (0..streams).for_each(|_| use_stream());
    assert_eq!((left(&rig), live()), before);
    assert!(rig.sim.live().events <= 64, "{:?}", rig.sim.live());
    assert!(rig.manager.counters().leases >= u64::from(streams) * 10);
    rig.check();
}
