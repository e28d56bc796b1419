//! Costs of leases by the number of holders, buffers, streams and waiters. Comparisons and steps are
//! counted, not timed.

use super::compared::{compared, count};
use super::*;
use crate::planner::uses::FewMap;

use Access::{Exclusive, Shared};

/// A buffer with contents on the card, without an audit of all others.
fn resident(core: &mut Deferrables, len: u64) -> BufferId {
    let buffer = add(core, len);
    let buffers = [(buffer, Exclusive)];
    let request = LeaseRequest { buffers: &buffers, ..LeaseRequest::default() };
    let lease = core.lease(&request, 0).unwrap().lease;
    core.end_lease(lease, &LeaseEnd::default(), 0).unwrap();
    buffer
}

/// Asserts that each of many operations compares little more than each of few.
fn expect_log(what: &str, few: (u64, u64), many: (u64, u64)) {
    let each = |(operations, compared): (u64, u64)| compared as f64 / operations as f64;
    assert!(each(many) <= 3.0 * each(few) + 8.0, "{what}: {} then {}", each(few), each(many));
}

fn shared(
    core: &mut Deferrables,
    buffer: BufferId,
    number: u64,
    stream: StreamKey,
) -> GrantedLease {
    let (buffers, streams, holder) = ([(buffer, Shared)], [stream], HolderKey(number));
    core.lease(
        &LeaseRequest { buffers: &buffers, streams: &streams, holder, ..LeaseRequest::default() },
        number,
    )
    .unwrap()
}

fn end_on(core: &mut Deferrables, lease: BufferLeaseId, buffer: BufferId, token: UseToken) {
    let uses = [BufferUse { buffer, token }];
    let ended = core.end_lease(lease, &LeaseEnd { uses: &uses, writes: Writes::All }, token.number);
    assert_eq!(ended.unwrap(), []);
}

#[test]
fn leases_of_one_buffer_end_in_any_order_without_a_look_at_the_others() {
    let mut costs = [0, 0];
    for (cost, count) in costs.iter_mut().zip([100, 10_000]) {
        let mut core = core();
        let buffer = written(&mut core, 16, 0);
        *cost = compared(|| {
            let leases: Vec<_> =
                (0..count).map(|number| shared(&mut core, buffer, number % 50, S1).lease).collect();
            assert_eq!(core.status(buffer).unwrap().leases as u64, count);
            // Every other one, then the rest backwards; some are cancelled.
            let every = leases.iter().step_by(2);
            for (number, lease) in (1..).zip(every.chain(leases.iter().skip(1).step_by(2).rev())) {
                match number % 3 {
                    0 => drop(core.cancel_lease(*lease).unwrap()),
                    _ => end_on(&mut core, *lease, buffer, token(S1, number)),
                }
            }
        });
        assert_eq!(core.status(buffer).unwrap().leases, 0);
        core.audit().unwrap();
    }
    expect_log("a lease", (100, costs[0]), (10_000, costs[1]));
}

#[test]
fn readers_in_place_end_without_a_look_at_the_others() {
    let mut costs = [0, 0];
    for (cost, count) in costs.iter_mut().zip([100, 10_000]) {
        let mut core = core();
        let buffer = written(&mut core, 16, 0);
        core.set_readable(buffer).unwrap();
        spill(&mut core, 16, 1);
        *cost = compared(|| {
            let read = |number| {
                let (buffers, holder) = ([(buffer, Shared)], HolderKey(number));
                let request = LeaseRequest { buffers: &buffers, holder, ..LeaseRequest::default() };
                let granted = core.lease_in_place(&request, &[buffer], 2).unwrap();
                assert_eq!(granted.in_place, [buffer]);
                granted.lease
            };
            let leases: Vec<_> = (0..count).map(read).collect();
            for lease in leases.iter().rev() {
                core.end_lease(*lease, &LeaseEnd::default(), 3).unwrap();
            }
        });
        core.audit().unwrap();
    }
    expect_log("a reader in place", (100, costs[0]), (10_000, costs[1]));
}

#[test]
fn a_buffer_used_on_many_streams_records_and_forgets_each_without_a_look_at_the_others() {
    let mut costs = [0, 0];
    for (cost, count) in costs.iter_mut().zip([100, 10_000]) {
        let mut core = core();
        let buffer = written(&mut core, 16, 0);
        *cost = compared(|| {
            for number in 1..=count {
                let stream = StreamKey(number);
                let lease = shared(&mut core, buffer, number, stream).lease;
                end_on(&mut core, lease, buffer, token(stream, number));
            }
            for number in (1..=count).rev() {
                let idle = core.complete_use(token(StreamKey(number), number));
                assert_eq!(idle.len(), usize::from(number == 1));
            }
        });
        core.audit().unwrap();
        assert!(core.holds(buffer).unwrap().is_free());
    }
    expect_log("a use", (100, costs[0]), (10_000, costs[1]));
}

#[test]
fn one_lease_over_many_buffers_looks_at_each_use_and_each_written_range_once() {
    for count in [100, 10_000] {
        let mut core = Deferrables::new(DeferConfig { capacity: b(1 << 20), ..config() }).unwrap();
        let buffers: Vec<_> = (0..count).map(|_| resident(&mut core, 32)).collect();
        let named: Vec<_> = buffers.iter().map(|&buffer| (buffer, Exclusive)).collect();
        let streams: Vec<_> = (0..4).map(StreamKey).collect();
        let request =
            LeaseRequest { buffers: &named, streams: &streams, ..LeaseRequest::default() };
        let lease = core.lease(&request, 1).unwrap().lease;
        // In the order of the streams, not of the buffers.
        let uses = streams.iter().flat_map(|&stream| {
            buffers.iter().map(move |&buffer| BufferUse { buffer, token: token(stream, 1) })
        });
        let uses: Vec<BufferUse> = uses.collect();
        let ranges = [(0, 4), (20, 8)].into_iter().flat_map(|(offset, len)| {
            let written = move |&buffer| WrittenRange { buffer, offset: b(offset), len: b(len) };
            buffers.iter().map(written)
        });
        let ranges: Vec<WrittenRange> = ranges.collect();
        let before = core.counters().looked_at;
        let end = LeaseEnd { uses: &uses, writes: Writes::Only(&ranges) };
        core.end_lease(lease, &end, 2).unwrap();
        assert_eq!(core.counters().looked_at - before, (uses.len() + ranges.len()) as u64);
        core.audit().unwrap();
    }
}

#[test]
fn leases_on_streams_that_ended_leave_no_heap_memory() {
    let mut core = core();
    let [one, other] = [0; 2].map(|_| resident(&mut core, 16));
    let mut use_stream = |stream: StreamKey| {
        for number in 1..=5 {
            let lease = shared(&mut core, one, number, stream).lease;
            end_on(&mut core, lease, one, token(stream, number));
            let buffers = [(other, Exclusive)];
            let streams = [stream];
            let request =
                LeaseRequest { buffers: &buffers, streams: &streams, ..LeaseRequest::default() };
            let lease = core.lease(&request, number).unwrap().lease;
            end_on(&mut core, lease, other, token(stream, number));
        }
        core.complete_use(token(stream, 5));
    };
    (0..100).for_each(|stream| use_stream(StreamKey(stream)));
    // Ten leases each: in a long run a million.
    let streams = u64::from(vramp_testing::cases(10_000)).min(100_000);
    let heap = allocation_counter::measure(|| {
        (100..100 + streams).for_each(|stream| use_stream(StreamKey(stream)));
    });
    assert!(heap.count_total > streams, "it was measured: {heap:?}");
    assert!(heap.bytes_current <= 4096, "{heap:?}");
    let kept = core.footprint();
    let busy = kept.iter().filter(|(_, entries)| *entries > 4).collect::<Vec<_>>();
    assert!(busy.is_empty(), "{busy:?}");
    core.audit().unwrap();
}

/// Returns the steps of a resident lease by a holder of another lease, while `count` others wait for one
/// buffer, each with a lease of its own or none.
fn steps_beside(count: u64, waiters_hold: bool) -> u64 {
    let mut core = Deferrables::new(DeferConfig { capacity: b(1 << 20), ..config() }).unwrap();
    let [wanted, outer, inner] = [0; 3].map(|_| resident(&mut core, 16));
    let lease = |core: &mut Deferrables, buffer, access, number| {
        let (buffers, holder) = ([(buffer, access)], HolderKey(number));
        core.lease(&LeaseRequest { buffers: &buffers, holder, ..LeaseRequest::default() }, 1)
    };
    let held = lease(&mut core, wanted, Exclusive, 1).unwrap().lease;
    for number in 10..10 + count {
        if waiters_hold {
            let own = resident(&mut core, 16);
            let _own = lease(&mut core, own, Exclusive, number).unwrap();
        }
        let (buffers, holder) = ([(wanted, Exclusive)], HolderKey(number));
        let request = LeaseRequest { buffers: &buffers, holder, ..LeaseRequest::default() };
        core.enqueue(&request, &[], None).unwrap();
        while let Some(ticket) = core.next_to_check() {
            assert_eq!(core.recheck(ticket, &[], 1), Ok(None));
        }
    }
    let _outer = lease(&mut core, outer, Shared, 2).unwrap();
    let steps = core.counters().queue_steps;
    for _ in 0..10 {
        let inner = lease(&mut core, inner, Shared, 2).unwrap().lease;
        core.end_lease(inner, &LeaseEnd::default(), 2).unwrap();
        while let Some(ticket) = core.next_to_check() {
            assert_eq!(core.recheck(ticket, &[], 1), Ok(None));
        }
    }
    let steps = core.counters().queue_steps - steps;
    core.audit().unwrap();
    // The queue still serves them in order.
    core.end_lease(held, &LeaseEnd::default(), 2).unwrap();
    if count > 0 {
        let ticket = core.next_to_check().expect("the oldest is marked");
        assert!(core.recheck(ticket, &[], 1).unwrap().is_some());
    }
    steps
}

/// Returns the steps of ten leases of a member of a group with `count` of them, while one request waits for
/// another buffer.
fn steps_in_a_group(count: u64) -> u64 {
    let sizes = DeferConfig { piece: b(1 << 20), page: b(4096), capacity: b(1 << 24), ..config() };
    let mut core = Deferrables::new(sizes).unwrap();
    let group = core.add_group(b(512) * count, None).unwrap();
    let members: Vec<BufferId> =
        (0..count).map(|_| core.add_tenant(group, b(512)).unwrap().buffer).collect();
    let other = resident(&mut core, 16);
    let _held = shared(&mut core, other, 1, StreamKey(1));
    let buffers = [(other, Exclusive)];
    let request = LeaseRequest { buffers: &buffers, ..LeaseRequest::default() };
    core.enqueue(&request, &[], None).unwrap();
    while let Some(ticket) = core.next_to_check() {
        assert_eq!(core.recheck(ticket, &[], 1), Ok(None));
    }
    let before = core.counters().queue_steps;
    for round in 0..10 {
        let member = members[members.len() / 2 + round];
        let lease = shared(&mut core, member, 2, StreamKey(2)).lease;
        core.end_lease(lease, &LeaseEnd::default(), 2).unwrap();
    }
    core.audit().unwrap();
    core.counters().queue_steps - before
}

#[test]
fn a_lease_of_a_small_buffer_looks_at_no_other_of_its_group() {
    for count in [20, 1_000] {
        let steps = steps_in_a_group(count);
        assert!(steps <= 40, "{steps} steps with {count} members");
    }
}

/// Returns the steps of `count` requests that wait for room, each of a holder with a lease of its own.
fn steps_of_waiters_for_room(count: u64) -> u64 {
    let capacity = b(16 * (count + 1));
    let mut core = Deferrables::new(DeferConfig { capacity, ..config() }).unwrap();
    let lease = |core: &mut Deferrables, buffer, number| {
        let (buffers, holder) = ([(buffer, Exclusive)], HolderKey(number));
        core.lease(&LeaseRequest { buffers: &buffers, holder, ..LeaseRequest::default() }, 1)
    };
    for number in 1..=count + 1 {
        let own = core.add_buffer(b(16)).unwrap().buffer;
        let _own = lease(&mut core, own, number).unwrap();
    }
    let before = core.counters().queue_steps;
    let mut checks = 0;
    for number in 1..=count {
        let wanted = core.add_buffer(b(16)).unwrap().buffer;
        let (buffers, holder) = ([(wanted, Exclusive)], HolderKey(number));
        let request = LeaseRequest { buffers: &buffers, holder, ..LeaseRequest::default() };
        core.enqueue(&request, &[], None).unwrap();
        while let Some(ticket) = core.next_to_check() {
            checks += 1;
            assert_eq!(core.recheck(ticket, &[], 1), Ok(None));
        }
    }
    core.audit().unwrap();
    core.counters().queue_steps - before + checks
}

#[test]
fn requests_that_wait_for_room_check_none_of_the_others_again() {
    let costs = [50, 400].map(|count| (count, steps_of_waiters_for_room(count)));
    for (count, steps) in costs {
        assert!(steps <= 16 * count, "{costs:?}");
    }
}

#[test]
fn a_resident_lease_looks_at_no_waiter_for_another_buffer() {
    let many = u64::from(vramp_testing::cases(300)).min(5_000);
    for count in [0, 64, many] {
        assert_eq!(steps_beside(count, false), 0, "{count} waiters");
    }
    for count in [16, 64] {
        assert_eq!(steps_beside(count, true), 0, "{count} waiters that hold leases");
    }
}

/// A key whose comparisons are counted.
#[derive(Clone, Copy, Debug)]
struct Counted(u64);

impl PartialEq for Counted {
    fn eq(&self, other: &Counted) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Counted {}

impl PartialOrd for Counted {
    fn partial_cmp(&self, other: &Counted) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Counted {
    fn cmp(&self, other: &Counted) -> std::cmp::Ordering {
        count();
        self.0.cmp(&other.0)
    }
}

#[test]
fn a_map_of_few_finds_what_a_plain_map_finds_at_every_size() {
    let mut few = FewMap::default();
    let mut plain = std::collections::BTreeMap::new();
    // Grows to 30 entries and shrinks again, several times.
    let mut seed = 1_u64;
    for round in 0..4_000_u64 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let key = (seed >> 33) % 40;
        if (round / 200) % 2 == 0 && seed >> 63 == 0 {
            few.insert(key, round);
            plain.insert(key, round);
        } else {
            assert_eq!(few.remove(key), plain.remove(&key));
        }
        assert_eq!((few.len(), few.is_empty()), (plain.len(), plain.is_empty()));
        assert_eq!(few.get(key), plain.get(&key).copied());
        let from = plain.range(key..).next().map(|(&key, &value)| (key, value));
        assert_eq!(few.first_from(key), from);
        assert!(few.iter().eq(plain.iter().map(|(&key, &value)| (key, value))));
    }
}

#[test]
fn a_map_of_many_is_searched_in_logarithmic_time() {
    let cost = |count: u64| {
        compared(|| {
            let mut map = FewMap::default();
            (0..count).for_each(|key| map.insert(Counted(key * 7919 % count), ()));
            (0..count).for_each(|key| assert!(map.first_from(Counted(key)).is_some()));
            (0..count).for_each(|key| assert_eq!(map.remove(Counted(key)), Some(())));
        })
    };
    expect_log("a map", (100, cost(100)), (10_000, cost(10_000)));
}
