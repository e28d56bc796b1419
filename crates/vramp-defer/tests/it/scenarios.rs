//! What programs for cuCascade, dask-cuda and cuDF do with their objects, done with buffers.

use vramp_alloc::Driver;
use vramp_defer::report::{PieceState, SpillTier};
use vramp_defer::{LeaseOwner, LeaseRefused, SpillError};
use vramp_driver::DeviceCopy;

use super::*;

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
