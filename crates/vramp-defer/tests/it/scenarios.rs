//! What programs for cuCascade, dask-cuda and cuDF do, and the spill tests of these projects, done with buffers.

use std::time::Duration;

use vramp_alloc::device::CaptureMode;
use vramp_alloc::{AllocError, Driver};
use vramp_defer::report::{MoveKind, PieceState, SpillTier};
use vramp_defer::{LeaseOwner, LeaseRefused, SpillError};
use vramp_driver::DeviceCopy;
use vramp_driver::sim::Kernel;

use super::*;

// --- What programs for cuCascade, dask-cuda and cuDF do with their objects, done with buffers ---

/// Returns the tier of each piece: `None` on the card.
fn tiers(buffer: &DeferrableBuffer) -> Vec<Option<SpillTier>> {
    let states = buffer.states().into_iter();
    let tier = |state| match state {
        PieceState::Resident { .. } => None,
        PieceState::Spilled { copies } => copies.best(),
        other => panic!("it is at rest: {other:?}"),
    };
    states.map(tier).collect()
}

/// cuCascade: a batch is converted to each tier and back.
#[test]
fn a_batch_goes_down_tier_by_tier_and_comes_back_from_each() {
    let rig = Plan { disk: Some(MIB(256)), ..Plan::default() }.build();
    let batch = rig.filled(MIB(20), 0);
    let [host, disk] = [SpillTier::Host, SpillTier::Disk].map(Some);
    for byte in 1..=4 {
        rig.fill(&batch, byte);
        assert_eq!(batch.spill_to(SpillTier::Host).unwrap(), MIB(20));
        assert_eq!(tiers(&batch), [host; 3]);
        rig.expect(&batch, byte);
        // Unchanged: it leaves without another copy, and goes on from there.
        let copied = rig.manager.stats().to_host_bytes;
        assert_eq!(batch.spill().unwrap(), MIB(20));
        assert_eq!((tiers(&batch), rig.manager.stats().to_host_bytes), (vec![host; 3], copied));
        assert_eq!(batch.spill_to(SpillTier::Disk).unwrap(), Bytes::ZERO, "the card had nothing");
        assert_eq!(tiers(&batch), [disk; 3]);
        assert_eq!(batch.spill().unwrap(), Bytes::ZERO);
        batch.prefetch().unwrap();
        assert_eq!(tiers(&batch), [None; 3]);
        rig.expect(&batch, byte);
        assert_eq!(batch.spill_to(SpillTier::Disk).unwrap(), MIB(20));
        rig.expect(&batch, byte);
    }
    rig.check();
}

/// cuCascade: `clone` of a batch.
#[test]
fn a_copy_of_a_batch_is_made_under_two_leases_and_changes_on_its_own() {
    let rig = rig();
    let batch = rig.filled(MIB(16), 1);
    let copy = rig.manager.buffer(MIB(16)).unwrap();
    batch.spill().unwrap();
    let both = [(&batch, Access::Shared), (&copy, Access::Overwrite)];
    let lease = rig.manager.lease(&both, rig.stream).unwrap();
    let (from, to) = (lease.address(0).start, lease.address(1).start);
    rig.sim.copy(rig.queue, DeviceCopy { from, to, len: MIB(16) }).unwrap();
    drop(lease);
    assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(32));
    rig.fill(&batch, 2);
    rig.manager.spill(MIB(64));
    rig.expect(&copy, 1);
    drop(copy);
    rig.expect(&batch, 2);
    rig.check();
}

/// cuCascade: a read-only handle becomes a mutable one.
#[test]
fn a_reader_that_wants_to_write_ends_its_lease_first() {
    let rig = rig();
    let batch = rig.filled(MIB(16), 1);
    let (read, write) = ([(&batch, Access::Shared)], [(&batch, Access::Exclusive)]);
    let owner = LeaseOwner::new();
    let reads = rig.manager.request(&read).owner(owner).stream(rig.stream).now().unwrap();
    // Its own lease is in the way, as the error says. It is not waited for beyond the deadline.
    let upgrade = || rig.manager.request(&write).owner(owner).stream(rig.stream);
    for refused in [upgrade().now(), upgrade().deadline(Duration::from_millis(5)).wait()] {
        let refused = refused.unwrap_err();
        let busy = matches!(&refused, SpillError::Refused(LeaseRefused::Busy { held_by })
            if held_by.len() == 1);
        assert!(busy, "{refused}");
    }
    assert_eq!(batch.status().leases, 1, "it still reads");
    drop(reads);
    let lease = upgrade().now().unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 2).unwrap();
    drop(lease);
    rig.expect(&batch, 2);
    rig.check();
}

/// cuDF, dask-cuda: a table of many columns, of which each operation uses a few and makes new ones.
#[test]
fn operations_on_tables_of_many_columns_fit_where_all_columns_do_not() {
    let rig = Plan { disk: Some(MIB(512)), host: MIB(128), ..Plan::default() }.build();
    let mut columns: Vec<(DeferrableBuffer, u8)> =
        (0..12).map(|byte| (rig.filled(MIB(12), byte), byte)).collect();
    for step in 0..24_usize {
        let [one, other, old] = [step, step * 5 + 3, step * 7 + 1].map(|index| index % 12);
        let result = rig.manager.buffer(MIB(12)).unwrap();
        let byte = columns[one].1.wrapping_add(columns[other].1);
        let set = [
            (&columns[one].0, Access::Shared),
            (&columns[other].0, Access::Shared),
            (&result, Access::Overwrite),
        ];
        let lease = rig.manager.lease(&set, rig.stream).unwrap();
        rig.sim.fill(rig.queue, lease.address(2), byte).unwrap();
        drop(lease);
        // The old column is dropped, wherever it is.
        columns[old] = (result, byte);
    }
    for (column, byte) in &columns {
        rig.expect(column, *byte);
    }
    let census = rig.manager.census();
    assert_eq!((census.buffers, census.total), (12, MIB(144)));
    assert!(rig.manager.stats().failures == 0 && census.occupied <= MIB(64));
    drop(columns);
    rig.later();
    let totals = [SpaceId::host(0), SpaceId::disk(0)].map(|id| rig.spaces.space(id).unwrap());
    rig.manager.relieve_host(MIB(512));
    assert!(totals.iter().all(|space| space.total().is_zero()));
    rig.check();
}

/// dask-cuda: a mapping of keys that are set, read and deleted at random beyond the card and the host.
#[test]
fn values_that_are_set_read_and_deleted_at_random_are_those_that_were_set() {
    let rig = Plan { disk: Some(MIB(512)), host: MIB(48), ..Plan::default() }.build();
    let mut random = fastrand::Rng::with_seed(5);
    let mut values = std::collections::BTreeMap::new();
    for byte in 0..120_u8 {
        let key = random.u8(..10);
        match random.u8(..4) {
            0 | 1 => drop(values.insert(key, (rig.filled(MIB(random.u64(1..24)), byte), byte))),
            2 => drop(values.remove(&key)),
            _ => {
                let found: Option<&(DeferrableBuffer, u8)> = values.get(&key);
                found.into_iter().for_each(|(value, byte)| rig.expect(value, *byte));
            }
        }
        let census = rig.manager.census();
        assert_eq!(census.buffers, values.len());
        let total: Bytes = values.values().map(|(value, _)| value.len()).sum();
        assert_eq!(census.total, total);
        assert!(census.occupied <= MIB(64), "{census:?}");
    }
    values.values().for_each(|(value, byte)| rig.expect(value, *byte));
    rig.check();
}

// --- Spill tests of other projects, each with one buffer and one thread ---

/// Long enough that neither the cooldown nor the last use decides what leaves.
const LATER_NS: u64 = 1_000_000_000;

impl Rig {
    /// All work is complete, and has been for long.
    pub fn later(&self) {
        self.sim.synchronize_stream(self.queue).unwrap();
        self.manager.census();
        self.sim.advance(LATER_NS);
    }
}

#[test]
fn what_a_buffer_tells_of_itself_is_the_same_wherever_it_is() {
    let rig = Plan { disk: Some(MIB(512)), ..Plan::default() }.build();
    let buffer = rig.filled(MIB(20), 1);
    let view = buffer.view(MIB(9), MIB(3)).unwrap();
    let told = || {
        let parts = [&buffer, &view].map(|buffer| (buffer.len(), buffer.addresses(), buffer.id()));
        (parts, buffer.states().len(), view.is_empty())
    };
    let on_the_card = told();
    assert_eq!(on_the_card.0[1].1, AddrRange::new(buffer.addresses().start + MIB(9), MIB(3)));
    assert!(buffer.is_resident() && view.is_resident());
    rig.manager.spill(MIB(24));
    assert_eq!(told(), on_the_card);
    assert!(!buffer.is_resident() && !view.is_resident());
    rig.manager.relieve_host(MIB(24));
    assert_eq!(told(), on_the_card);
    rig.expect(&view, 1);
    assert_eq!(told(), on_the_card);
    rig.check();
}

#[test]
fn buffers_keep_within_the_limit_of_the_allocator_and_leases_within_the_capacity() {
    // The limit bounds what is on the card, idle or not.
    let rig = Plan { limit: MIB(48), ..Plan::default() }.build();
    let mut buffers = Vec::new();
    for byte in 1..=5 {
        buffers.push(rig.filled(MIB(24), byte));
        let census = rig.manager.census();
        assert!(census.occupied <= MIB(48), "{census:?}");
        assert_eq!(census.spilled, census.total.saturating_sub(MIB(48)));
    }
    (1..).zip(&buffers).for_each(|(byte, buffer)| rig.expect(buffer, byte));
    rig.check();

    // The capacity bounds what is leased at once. Idle buffers stay while there is memory.
    let mut plan = Plan { limit: MIB(256), ..Plan::default() };
    plan.config.capacity = Some(MIB(48));
    let rig = plan.build();
    let buffers: Vec<_> = (1..=5).map(|byte| rig.filled(MIB(24), byte)).collect();
    assert_eq!(rig.manager.census().occupied, MIB(120));
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
        let two = [(buffer, Access::Shared), (&buffers[0], Access::Shared)];
        drop(rig.manager.lease(&two, rig.stream).unwrap());
    }
    let three: Vec<_> = buffers[..3].iter().map(|buffer| (buffer, Access::Shared)).collect();
    let refused = rig.manager.lease(&three, rig.stream).unwrap_err();
    assert!(matches!(refused, SpillError::Refused(_)), "{refused}");
    rig.check();
}

#[test]
fn where_blocks_take_the_whole_card_leases_are_refused_and_contents_stay() {
    let rig = rig();
    let buffer = rig.filled(MIB(16), 1);
    let block = rig.allocator.malloc(MIB(64), rig.stream).unwrap();
    let refused = buffer.lease(Access::Shared, rig.stream).unwrap_err();
    assert!(refused.to_string().contains("the card has"), "{refused}");
    assert!(!buffer.is_resident());
    rig.check();
    rig.allocator.free(block, rig.stream).unwrap();
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn with_no_room_for_idle_buffers_each_use_brings_its_own_and_sends_it_away() {
    let rig = rig();
    let buffers: Vec<_> = (1..=3).map(|byte| rig.filled(MIB(16), byte)).collect();
    for round in 0..3 {
        for (buffer, byte) in buffers.iter().zip(1..) {
            rig.expect(buffer, byte);
            rig.manager.spill(MIB(64));
            assert_eq!(rig.manager.census().occupied, Bytes::ZERO, "round {round}");
            assert!(buffers.iter().all(|buffer| !buffer.is_resident()));
        }
    }
    rig.check();
}

#[test]
fn a_capacity_of_zero_refuses_leases_and_says_so() {
    let usual = Plan::default().config;
    let config = SpillConfig { capacity: Some(Bytes::ZERO), ..usual };
    let rig = Plan { config, ..Plan::default() }.build();
    let buffer = rig.manager.buffer(MIB(16)).unwrap();
    match buffer.lease(Access::Shared, rig.stream) {
        Err(SpillError::Refused(vramp_defer::LeaseRefused::TooLarge { needed, capacity })) => {
            assert_eq!((needed, capacity), (MIB(16), Bytes::ZERO));
        }
        other => panic!("nothing may be leased: {other:?}"),
    }
    assert_eq!(rig.manager.census().occupied, Bytes::ZERO);
    rig.check();
}

#[test]
fn allocations_and_leases_below_the_limit_evict_nothing() {
    let rig = rig();
    let buffers: Vec<_> = (1..=3).map(|byte| rig.filled(MIB(8), byte)).collect();
    for _ in 0..10 {
        let block = rig.allocator.malloc(MIB(40), rig.stream).unwrap();
        (1..).zip(&buffers).for_each(|(byte, buffer)| rig.expect(buffer, byte));
        rig.allocator.free(block, rig.stream).unwrap();
    }
    assert!(buffers.iter().all(DeferrableBuffer::is_resident));
    assert_eq!(rig.manager.stats(), vramp_defer::SpillStats::default());
    rig.check();
}

#[test]
fn the_least_recently_used_leaves_first_and_each_use_renews() {
    let rig = rig();
    let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(16), byte)).collect();
    for place in [0, 1, 2, 3, 0, 2] {
        rig.later();
        drop(buffers[place].lease(Access::Shared, rig.stream).unwrap());
    }
    let mut left = Vec::new();
    for _ in 0..4 {
        rig.later();
        rig.manager.spill(MIB(16));
        let gone = (0..4).filter(|place| !buffers[*place].is_resident());
        left.extend(gone.filter(|place| !left.contains(place)).collect::<Vec<_>>());
    }
    assert_eq!(left, [1, 3, 0, 2]);
    rig.check();
}

#[test]
fn memory_beside_the_buffers_is_left_alone() {
    let rig = rig();
    let block = rig.allocator.malloc(MIB(40), rig.stream).unwrap();
    let range = AddrRange::new(block.addr(), MIB(40));
    rig.sim.fill(rig.queue, range, 0x77).unwrap();
    let buffers: Vec<_> = (1..=3).map(|byte| rig.filled(MIB(16), byte)).collect();
    let spilled = rig.manager.spill(MIB(64));
    assert_eq!(spilled.freed, MIB(24), "all that is beside the block, and nothing of it");
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert!(vramp_testing::is_filled(&rig.sim.peek(range).unwrap(), 0x77));
    rig.allocator.free(block, rig.stream).unwrap();
    rig.check();
}

#[test]
fn leases_within_leases_hold_until_the_last_has_ended() {
    let rig = rig();
    let buffer = rig.filled(MIB(16), 1);
    let outer = buffer.lease(Access::Shared, rig.stream).unwrap();
    let inner = buffer.view(MIB(4), MIB(1)).unwrap().lease(Access::Shared, rig.stream).unwrap();
    let innermost = buffer.clone().lease(Access::Shared, rig.stream).unwrap();
    for lease in [outer, innermost] {
        drop(lease);
        assert_eq!(rig.manager.spill(MIB(16)).freed, Bytes::ZERO);
        assert!(buffer.is_resident());
    }
    drop(inner);
    assert_eq!(rig.manager.spill(MIB(16)).freed, MIB(16));
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn statistics_tell_what_moved_where_and_how_long_it_took() {
    let rig = Plan { disk: Some(MIB(512)), ..Plan::default() }.build();
    let buffer = rig.filled(MIB(16), 1);
    assert_eq!(rig.manager.stats(), vramp_defer::SpillStats::default());
    rig.manager.spill(MIB(16));
    rig.expect(&buffer, 1);
    rig.manager.spill(MIB(16));
    rig.manager.relieve_host(MIB(16));
    rig.expect(&buffer, 1);
    let (stats, counters) = (rig.manager.stats(), rig.manager.counters());
    let bytes = MIB(16).count();
    assert_eq!((stats.spills, stats.freed_bytes), (2, 2 * bytes));
    assert_eq!((stats.to_host_bytes, stats.to_disk_bytes), (bytes, bytes));
    assert_eq!((stats.from_host_bytes, stats.from_disk_bytes), (bytes, bytes));
    assert!(stats.to_host_ns > 0 && stats.failures == 0 && stats.waits == 0, "{stats:?}");
    assert_eq!((counters.spilled_bytes, counters.spilled_clean_bytes), (2 * bytes, bytes));
    assert_eq!(counters.pushed_bytes, bytes);
    let moves: Vec<_> = rig.manager.history().iter().map(|record| record.what).collect();
    let of = |what: fn(&MoveKind) -> bool| moves.iter().filter(|moved| what(moved)).count();
    assert_eq!(of(|moved| matches!(moved, MoveKind::Spilled(Some(_)))), 2);
    assert_eq!(of(|moved| matches!(moved, MoveKind::Spilled(None))), 2);
    assert_eq!(of(|moved| matches!(moved, MoveKind::Pushed)), 2);
    assert_eq!(of(|moved| matches!(moved, MoveKind::Restored(_))), 4);
    assert!(rig.manager.rates().to_host.is_some_and(|rate| rate > 0));
    rig.check();
}

#[test]
fn a_shortage_tells_what_keeps_the_rest_on_the_card() {
    let rig = rig();
    let (leased, pinned) = (rig.filled(MIB(16), 1), rig.filled(MIB(16), 2));
    let idle = rig.filled(MIB(32), 4);
    let held = leased.lease(Access::Shared, rig.stream).unwrap();
    let lease = pinned.lease(Access::Shared, rig.stream).unwrap();
    let pin = lease.pin(0).unwrap();
    drop(lease);
    let spilled = rig.manager.spill(MIB(64));
    assert_eq!(spilled.freed, MIB(32));
    let short = spilled.short.unwrap();
    assert_eq!((short.leased, short.pinned), (MIB(16), MIB(16)));
    let told = short.to_string();
    assert!(told.contains("leased") && told.contains("pinned"), "{told}");
    drop((held, pin, idle));
    assert_eq!(rig.manager.spill(MIB(32)).short, None);
    rig.check();
}

#[test]
fn with_room_for_one_buffer_each_use_sends_the_other_away() {
    let rig = Plan { limit: MIB(24), ..Plan::default() }.build();
    let (a, b) = (rig.filled(MIB(20), 1), rig.filled(MIB(20), 2));
    for _ in 0..3 {
        rig.expect(&a, 1);
        assert!(a.is_resident() && !b.is_resident());
        rig.expect(&b, 2);
        assert!(b.is_resident() && !a.is_resident());
    }
    rig.check();
}

#[test]
fn with_little_room_on_card_and_host_buffers_go_down_step_by_step_and_come_back() {
    let plan = Plan { limit: MIB(24), host: MIB(40), disk: Some(MIB(512)), ..Plan::default() };
    let rig = plan.build();
    let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(16), byte)).collect();
    // Each buffer has two pieces. The card has room for three of them, and so has the host beside the
    // blocks that the disk needs.
    let census = rig.manager.census();
    assert_eq!(census.resident, MIB(24), "{census:?}");
    assert_eq!((census.spilled_host, census.spilled_disk), (MIB(24), MIB(16)), "{census:?}");
    assert!(buffers[3].is_resident(), "the last one used stays");
    assert!(buffers[..2].iter().all(|buffer| !buffer.is_resident()), "the oldest leave");
    for (buffer, byte) in buffers.iter().rev().zip([4, 3, 2, 1]) {
        rig.expect(buffer, byte);
        assert!(rig.manager.census().resident <= MIB(24));
        rig.check();
    }
    drop(buffers);
    rig.later();
    rig.manager.relieve_host(MIB(512));
    let total = |id| rig.spaces.space(id).unwrap().total();
    assert_eq!((total(SpaceId::host(0)), total(SpaceId::disk(0))), (Bytes::ZERO, Bytes::ZERO));
}

#[test]
fn everything_goes_to_the_disk_when_asked() {
    let rig = Plan { disk: Some(MIB(512)), ..Plan::default() }.build();
    let buffers: Vec<_> = (1..=3).map(|byte| rig.filled(MIB(16), byte)).collect();
    assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(48));
    rig.manager.relieve_host(MIB(48));
    let census = rig.manager.census();
    assert_eq!((census.spilled_host, census.spilled_disk), (Bytes::ZERO, MIB(48)));
    assert_eq!(rig.spaces.space(SpaceId::host(0)).unwrap().total(), Bytes::ZERO);
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.check();
}

#[test]
fn contents_are_the_same_read_from_the_card_the_host_and_the_disk() {
    let rig = Plan { disk: Some(MIB(512)), ..Plan::default() }.build();
    let pattern: Vec<u8> = (0..(13 << 20) + 17_u32).map(|i| (i % 253) as u8).collect();
    let len = Bytes::new(pattern.len() as u64);
    let buffer = rig.manager.buffer(len).unwrap();
    buffer.write(Bytes::ZERO, &pattern).unwrap();
    let same = || {
        let mut back = vec![0; pattern.len()];
        buffer.read(Bytes::ZERO, &mut back).unwrap();
        assert!(back == pattern);
        let mut part = [0; 1000];
        let view = buffer.view(MIB(7), MIB(2)).unwrap();
        view.read(Bytes::new(12_345), &mut part).unwrap();
        assert!(part == pattern[(7 << 20) + 12_345..][..1000]);
    };
    same();
    rig.manager.spill(len);
    assert!(!buffer.is_resident());
    same();
    rig.manager.spill(len);
    rig.manager.relieve_host(len);
    assert_eq!(rig.manager.census().spilled_disk, len);
    same();
    rig.check();
}

#[test]
fn a_lease_that_is_leaked_keeps_its_buffer_and_nothing_else() {
    let rig = rig();
    let (leaked, other) = (rig.filled(MIB(16), 1), rig.filled(MIB(32), 2));
    std::mem::forget(leaked.lease(Access::Shared, rig.stream).unwrap());
    rig.later();
    assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(32));
    assert!(leaked.is_resident() && !other.is_resident());
    rig.expect(&leaked, 1);
    rig.expect(&other, 2);
    let refused = leaked.lease(Access::Exclusive, rig.stream).unwrap_err();
    assert!(matches!(refused, SpillError::Refused(_)), "{refused}");
    drop(leaked);
    assert_eq!(rig.manager.census().buffers, 2, "no other handle can end it");
    rig.check();
}

#[test]
fn a_view_of_nothing_is_leased_and_moves_nothing() {
    let rig = rig();
    let buffer = rig.filled(MIB(16), 1);
    let nothing = buffer.view(MIB(16), Bytes::ZERO).unwrap();
    assert!(nothing.is_empty());
    nothing.read(Bytes::ZERO, &mut []).unwrap();
    nothing.write(Bytes::ZERO, &[]).unwrap();
    nothing.write(Bytes::ZERO, &[1]).unwrap_err();
    let lease = nothing.lease(Access::Exclusive, rig.stream).unwrap();
    assert!(lease.address(0).len.is_zero());
    drop(lease);
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn a_malloc_that_spilling_cannot_serve_is_a_shortage_and_the_next_is_served() {
    let rig = rig();
    let buffer = rig.filled(MIB(48), 1);
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    for _ in 0..3 {
        let before = rig.manager.stats().spills;
        let error = rig.allocator.malloc(MIB(32), rig.stream).unwrap_err();
        assert!(matches!(error, AllocError::OutOfMemory(_)), "{error}");
        assert!(rig.manager.stats().spills - before <= 4, "it is not tried for ever");
    }
    drop(lease);
    for _ in 0..3 {
        let block = rig.allocator.malloc(MIB(32), rig.stream).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
        rig.expect(&buffer, 1);
    }
    rig.check();
}

#[test]
fn scattered_buffers_make_room_for_one_large_block() {
    let rig = rig();
    let mut blocks = Vec::new();
    let mut buffers = Vec::new();
    for byte in 1..=8 {
        buffers.push(rig.filled(MIB(4), byte));
        blocks.push(rig.allocator.malloc(MIB(4), rig.stream).unwrap());
    }
    // Between any two of them lies a block that stays.
    let large = rig.allocator.malloc(MIB(32), rig.stream).unwrap();
    rig.sim.fill(rig.queue, AddrRange::new(large.addr(), MIB(32)), 0xCC).unwrap();
    assert!(buffers.iter().all(|buffer| !buffer.is_resident()));
    rig.allocator.free(large, rig.stream).unwrap();
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    for block in blocks {
        rig.allocator.free(block, rig.stream).unwrap();
    }
    rig.check();
}

#[test]
fn a_graph_replays_at_the_addresses_of_buffers_that_left_and_came_back() {
    let rig = rig();
    let (input, output) = (rig.filled(MIB(16), 1), rig.filled(MIB(16), 2));
    let set = [(&input, Access::Shared), (&output, Access::Exclusive)];
    let lease = rig.manager.lease(&set, rig.stream).unwrap();
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.sim.begin_capture(rig.queue, CaptureMode::ThreadLocal).unwrap();
    let kernel = Kernel::new("step").reading(lease.address(0)).writing(lease.address(1));
    rig.sim.launch(rig.queue, kernel).unwrap();
    rig.sim.fill(rig.queue, lease.address(1), 9).unwrap();
    let graph = rig.sim.end_capture(rig.queue).unwrap();
    let exec = rig.sim.instantiate(graph).unwrap();
    lease.cancel();
    for round in 3..6 {
        rig.fill(&output, round);
        assert_eq!(rig.manager.spill(MIB(32)).freed, MIB(32));
        let block = rig.allocator.malloc(MIB(64), rig.stream).unwrap();
        rig.sim.fill(rig.queue, AddrRange::new(block.addr(), MIB(64)), 0xFF).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
        rig.manager
            .lock_and_launch_async(&set, rig.stream, |_| rig.sim.launch_graph(exec, rig.queue))
            .unwrap()
            .unwrap();
        rig.expect(&output, 9);
        rig.expect(&input, 1);
        rig.check();
    }
    rig.sim.destroy_graph_exec(exec).unwrap();
    rig.sim.destroy_graph(graph).unwrap();
}

#[test]
fn a_lease_that_waits_in_vain_gives_up_at_its_deadline() {
    let rig = rig();
    let buffer = rig.filled(MIB(16), 1);
    let held = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    for wait in [Duration::ZERO, Duration::from_millis(30)] {
        let begin = std::time::Instant::now();
        let wanted = [(&buffer, Access::Shared)];
        let refused = rig.manager.lease_on(&wanted, &[rig.stream], wait).unwrap_err();
        assert!(refused.to_string().contains("try again"), "{refused}");
        assert!(begin.elapsed() >= wait);
    }
    drop(held);
    rig.expect(&buffer, 1);
    assert!(buffer.states().iter().all(|state| matches!(state, PieceState::Resident { .. })));
    rig.check();
}
