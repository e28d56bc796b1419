use super::*;

/// A host of 16 bytes, taken by a copy last used at 0, and buffers on the card last used at `used_ns`.
fn full_host(used_ns: [u64; 2]) -> (Deferrables, BufferId, [BufferId; 2]) {
    let mut core = core();
    let old = written(&mut core, 16, 0);
    assert_eq!(spill(&mut core, 16, 1), [piece(old, 0)]);
    let buffers = used_ns.map(|now| written(&mut core, 16, now));
    (core, old, buffers)
}

/// The disk is ten times slower than the host.
fn demand(deficit: u64, host: u64, disk: u64) -> SpillDemand {
    let [fast, slow] = [Some(10_000_000_000), Some(1_000_000_000)];
    let rates = Rates {
        to_host: fast,
        from_host: fast,
        to_disk: slow,
        from_disk: slow,
        ..Rates::default()
    };
    let room = SpillRoom { host: b(host), disk: b(disk), ..SpillRoom::default() };
    SpillDemand { deficit: b(deficit), rates, room }
}

fn pushed(pushes: &[Push]) -> Vec<BufferId> {
    pushes.iter().map(|push| push.piece.buffer).collect()
}

#[test]
fn an_old_copy_makes_room_for_a_victim_that_is_more_likely_needed() {
    let (mut core, old, [victim, _]) = full_host([900, 950]);
    let pushes = core.demote(&demand(16, 0, 100), 1000);
    core.audit().unwrap();
    assert_eq!(pushed(&pushes), [old]);
    assert_eq!(core.demote(&demand(16, 0, 100), 1000), [], "it moves already");
    core.settle(pushes[0].id).unwrap();
    let choice = core.choose(&demand(16, 16, 84), 1000);
    let moves: Vec<_> = choice.victims[0].moves.iter().map(|out| (out.piece, out.to)).collect();
    assert_eq!(moves, [(piece(victim, 0), Some(SpillTier::Host))]);
    core.audit().unwrap();
}

#[test]
fn the_oldest_copies_leave_first_however_little_older_they_are() {
    for (used_ns, now) in [([1, 2], 3), ([1000, 1001], 1_000_000)] {
        let (mut core, old, _) = full_host(used_ns);
        let pushes = core.demote(&demand(16, 0, 100), now);
        assert_eq!(pushed(&pushes), [old], "{used_ns:?} {now}");
        core.audit().unwrap();
    }
}

#[test]
fn a_copy_stays_where_moving_it_saves_nothing() {
    // It was used as late as the victim, the disk is as fast, the host has room, or the disk has none.
    let mut fast = demand(16, 0, 100);
    (fast.rates.to_disk, fast.rates.from_disk) = (fast.rates.to_host, fast.rates.from_host);
    for (used_ns, now, demand) in [
        ([0, 0], 3, demand(16, 0, 100)),
        ([900, 950], 1000, fast),
        ([900, 950], 1000, demand(16, 16, 100)),
        ([900, 950], 1000, demand(16, 0, 15)),
        ([900, 950], 1000, demand(16, 0, 0)),
    ] {
        let (mut core, ..) = full_host(used_ns);
        assert_eq!(core.demote(&demand, now), [], "{used_ns:?} {now} {demand:?}");
        core.audit().unwrap();
    }
}

#[test]
fn a_leased_copy_makes_no_room_and_of_the_others_those_that_are_not_needed_do() {
    let (mut core, old, _) = full_host([900, 901]);
    let other = written(&mut core, 16, 905);
    core.hint(other, Hint::WontNeed).unwrap();
    assert_eq!(spill(&mut core, 16, 905), [piece(other, 0)]);
    core.hint(other, Hint::None).unwrap();
    let granted = try_lease(&mut core, &[(old, Access::Shared)], S1, 960).unwrap();
    core.abandon(granted.restores[0].id).unwrap();
    assert_eq!(core.demote(&demand(32, 0, 100), 1000), [], "the other one is younger than both");
    core.hint(other, Hint::WontNeed).unwrap();
    let pushes = core.demote(&demand(32, 0, 100), 1000);
    assert_eq!(pushed(&pushes), [other], "one of the two victims finds room");
    core.cancel_lease(granted.lease).unwrap();
    core.audit().unwrap();
}

#[test]
fn as_many_copies_move_as_the_victims_take() {
    let (mut core, old, _) = full_host([900, 901]);
    let older = written(&mut core, 4, 2);
    core.hint(older, Hint::WontNeed).unwrap();
    assert_eq!(spill(&mut core, 4, 3), [piece(older, 0)]);
    let pushes = core.demote(&demand(17, 0, 100), 1000);
    assert_eq!(pushed(&pushes), [old], "the second victim would need both");
    let pushes = core.demote(&demand(17, 12, 100), 1000);
    assert_eq!(pushed(&pushes), [], "{pushes:?}");
    core.audit().unwrap();
}
