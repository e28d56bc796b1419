//! Access of other cards.

use std::sync::Arc;

use vramp_alloc::device::Driver;
use vramp_alloc::error::CreateError;
use vramp_alloc::sharing::{AccessError, Peers, SharingConfig, range_of};
use vramp_alloc::{Allocator, Bytes, Config};
use vramp_core::AddrRange;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_driver::{Call, ErrorKind};
use vramp_peers::Preset;

use super::*;

#[test]
fn a_granted_card_reaches_what_is_mapped_and_what_will_be() {
    let machine = Machine::new(2);
    let [owner, _] = &machine.allocators[..] else { unreachable!("there are two") };
    let before = owner.malloc(MIB(64), machine.streams[0]).unwrap();
    let here = machine.allocators[1].malloc(MIB(64), machine.streams[1]).unwrap();
    machine.fill(0, range_of(&before), 7);
    let refused = machine.copy(1, range_of(&before), range_of(&here));
    assert_eq!(refused, Err(ErrorKind::InvalidUse), "as on a card: only set-access counts");

    let sets = machine.calls(0, Call::SetAccess);
    let cost = owner.grant_access(1).unwrap();
    assert_eq!(cost.calls, machine.calls(0, Call::SetAccess) - sets);
    assert!(cost.calls == 1 && cost.bytes >= MIB(64), "{cost:?}");
    machine.copy(1, range_of(&before), range_of(&here)).unwrap();
    machine.holds(1, range_of(&here), 7);

    // Later memory is granted in the call that is made anyway.
    let sets = machine.calls(0, Call::SetAccess);
    let after = owner.malloc(MIB(96), machine.streams[0]).unwrap();
    let alone = machine.calls(1, Call::SetAccess);
    let twin = machine.allocators[1].malloc(MIB(96), machine.streams[1]).unwrap();
    let alone = machine.calls(1, Call::SetAccess) - alone;
    assert_eq!(machine.calls(0, Call::SetAccess) - sets, alone, "as many calls as without a peer");
    machine.fill(0, range_of(&after), 9);
    machine.copy(1, range_of(&after), range_of(&twin)).unwrap();
    machine.holds(1, range_of(&twin), 9);
    assert_eq!(owner.sharing().peers, [1]);
    assert_eq!(owner.grant_access(1).unwrap(), Default::default(), "it has access already");

    owner.revoke_access(1).unwrap();
    assert_eq!(
        machine.copy(1, range_of(&after), range_of(&twin)),
        Err(ErrorKind::InvalidUse),
        "access was taken back"
    );
    assert!(owner.sharing().peers.is_empty());
    machine.copy(0, range_of(&before), AddrRange::new(after.addr(), MIB(64))).unwrap();
    machine.close();
}

#[test]
fn pools_arenas_ranges_and_comm_pools_are_granted_too() {
    let machine = Machine::new(2);
    let [owner, other] = &machine.allocators[..] else { unreachable!("there are two") };
    let stream = machine.streams[0];
    let target = other.malloc(MIB(32), machine.streams[1]).unwrap();
    let target = AddrRange::new(target.addr(), MIB(2));
    let side = owner.create_pool("side").unwrap();
    let comm = vramp_peers::comm_pool(owner, "comm").unwrap();
    let range = owner.stable_range(MIB(32), MIB(32)).unwrap();
    range.back(stream).unwrap();
    let in_side = side.malloc(MIB(4), stream).unwrap();
    let in_comm = comm.malloc(MIB(4), stream).unwrap();
    owner.grant_access(1).unwrap();
    let late = owner.create_pool("late").unwrap();
    let in_late = late.malloc(MIB(4), stream).unwrap();
    let late_comm = vramp_peers::comm_pool(owner, "late comm").unwrap();
    let in_late_comm = late_comm.malloc(MIB(4), stream).unwrap();
    let starts = [&in_side, &in_comm, &in_late, &in_late_comm].map(|block| block.addr());
    for (byte, start) in (1..).zip(starts.into_iter().chain([range.range().start])) {
        let part = AddrRange::new(start, MIB(2));
        machine.fill(0, part, byte);
        machine.copy(1, part, target).unwrap();
        machine.holds(1, target, byte);
    }
    for (pool, block) in
        [(&side, in_side), (&comm, in_comm), (&late, in_late), (&late_comm, in_late_comm)]
    {
        pool.free(block, stream).unwrap();
        pool.audit().unwrap();
    }
    drop(range);
    for pool in [side, comm, late, late_comm] {
        pool.close().unwrap();
    }
    machine.close();
}

#[test]
fn without_peers_nothing_costs_more() {
    let calls = |peers: Peers| {
        let sharing = SharingConfig { peers, ..SharingConfig::default() };
        let machine = Machine::with(2, Config { sharing, ..Config::default() });
        let (allocator, stream) = (&machine.allocators[0], machine.streams[0]);
        let blocks: Vec<_> =
            (1..64).map(|mib| allocator.malloc(MIB(mib % 13 + 1), stream).unwrap()).collect();
        for block in blocks.into_iter().step_by(2) {
            allocator.free(block, stream).unwrap();
        }
        let _large = allocator.malloc(MIB(100), stream).unwrap();
        allocator.trim(Bytes::ZERO).unwrap();
        (machine.cards[0].calls(), machine.cards[0].now_ns())
    };
    assert_eq!(calls(Peers::None), calls(Peers::OnDemand));
    let (all, with_all) = calls(Peers::All);
    let (none, with_none) = calls(Peers::None);
    assert!(all == none && with_all > with_none, "as many calls, but they take longer");
}

#[test]
fn a_setting_names_the_cards_that_may_have_access() {
    let machine = |peers| {
        let sharing = SharingConfig { peers, ..SharingConfig::default() };
        Machine::with(3, Config { sharing, ..Config::default() })
    };
    let none = machine(Peers::None);
    assert!(matches!(
        none.allocators[0].grant_access(1),
        Err(AccessError::Excluded { ordinal: 1 })
    ));
    let all = machine(Peers::All);
    assert_eq!(all.allocators[1].sharing().peers, [0, 2]);
    let owner = Simulator::builder().build_machine(3).remove(0);
    let these = |list: &[u32]| SharingConfig {
        peers: Peers::These(list.to_vec()),
        ..SharingConfig::default()
    };
    let owner: Arc<dyn Driver> = Arc::new(owner);
    let open =
        |sharing| Allocator::new(Arc::clone(&owner), Config { sharing, ..Config::default() });
    let listed = open(these(&[2, 2])).unwrap();
    assert_eq!(listed.sharing().peers, [2]);
    assert!(matches!(listed.grant_access(1), Err(AccessError::Excluded { ordinal: 1 })));
    assert!(matches!(open(these(&[0])), Err(CreateError::NoPeer { ordinal: 0, .. })));
    let error = all.allocators[0].grant_access(7).unwrap_err();
    assert_eq!(error.to_string(), "device 7 is no peer of sim:h200x3:0: its peers are [1, 2]");
    let plain = Allocator::new(Arc::clone(&owner), Preset::StreamOrdered.config()).unwrap();
    assert!(matches!(plain.grant_access(1), Err(AccessError::NotSupported { .. })));
}

/// A grant makes a driver call for each stretch of mapped addresses, not for each handle.
#[test]
fn a_grant_makes_one_call_for_each_stretch() {
    let calls = |blocks: u64| {
        let machine = Machine::new(2);
        for _ in 0..blocks {
            let _block = machine.allocators[0].malloc(MIB(2), machine.streams[0]).unwrap();
        }
        let handles = machine.allocators[0].stats().unwrap().chunks_created;
        (machine.allocators[0].grant_access(1).unwrap().calls, handles)
    };
    let (few, many) = (calls(8), calls(400));
    assert!(many.1 >= 20 && few.0 == many.0, "{few:?} {many:?}");
}

/// A grant or a revoke of which any driver call fails changes nothing.
#[test]
fn a_failed_change_of_access_changes_nothing() {
    for (call, change) in [(Call::SetAccess, true), (Call::RevokeAccess, false)] {
        let machine = Machine::new(2);
        let [owner, other] = &machine.allocators[..] else { unreachable!("there are two") };
        let (stream, theirs) = (machine.streams[0], machine.streams[1]);
        // Two stretches in each of two pools.
        let side = owner.create_pool("side").unwrap();
        let mut blocks = Vec::new();
        for pool in [owner, &side] {
            blocks.push(pool.malloc(MIB(16), stream).unwrap());
            let range = pool.stable_range(MIB(64), MIB(8)).unwrap();
            range.back_part(Bytes::ZERO, MIB(8), stream).unwrap();
            range.back_part(MIB(32), MIB(8), stream).unwrap();
            std::mem::forget(range);
        }
        let target = range_of(&other.malloc(MIB(16), theirs).unwrap());
        if !change {
            owner.grant_access(1).unwrap();
        }
        let mut nth = 1;
        loop {
            machine.cards[0].set_faults(FaultPlan::nth_of(call, nth).with_code(999));
            machine.cards[0].set_faults(FaultPlan::nth_of(call, nth).with_code(800));
            let changed = if change { owner.grant_access(1) } else { owner.revoke_access(1) };
            machine.cards[0].set_faults(FaultPlan::none());
            owner.audit().unwrap();
            side.audit().unwrap();
            if changed.is_ok() {
                break;
            }
            nth += 1;
            assert_eq!(owner.sharing().peers.is_empty(), change);
            assert_eq!(side.sharing().peers.is_empty(), change);
            for block in &blocks {
                let copied = machine.copy(1, range_of(block), target);
                assert_eq!(copied.is_err(), change, "access is as before");
            }
        }
        assert!(nth > 4, "{call}: there are several calls to fail, not {nth}");
        assert_eq!(owner.sharing().peers.is_empty(), !change);
    }
}
