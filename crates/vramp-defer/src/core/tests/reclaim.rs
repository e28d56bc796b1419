use super::*;

use Access::Shared;

/// A buffer of 16 bytes below the card, last used at `now_ns`.
fn spilled(core: &mut Deferrables, now_ns: u64) -> BufferId {
    let buffer = written(core, 16, now_ns);
    core.hint(buffer, Hint::WontNeed).unwrap();
    assert_eq!(spill(core, 16, now_ns), [piece(buffer, 0)]);
    buffer
}

fn on_host(host: u64) -> SpillRoom {
    SpillRoom { host: b(host), ..SpillRoom::default() }
}

fn dropped(choice: &Reclaim) -> Vec<BufferId> {
    choice.stale.iter().map(|drop| drop.piece.buffer).collect()
}

fn pushed(choice: &Reclaim) -> Vec<BufferId> {
    choice.pushes.iter().map(|push| push.piece.buffer).collect()
}

#[test]
fn host_pressure_drops_copies_of_what_is_on_the_card_before_it_writes_anything() {
    let mut core = core();
    let [old, recent, gone] = [0, 1, 2].map(|now| spilled(&mut core, now));
    for (buffer, now) in [(old, 10), (recent, 20)] {
        let reader = lease(&mut core, buffer, Shared, now);
        end(&mut core, reader, now);
    }
    let choice = core.reclaim_host(&HostDemand { deficit: b(17), disk_room: b(100) });
    core.audit().unwrap();
    assert_eq!(dropped(&choice), [recent, old], "what leaves first keeps its copy longest");
    assert_eq!((pushed(&choice), choice.missing), (vec![], b(0)));
    let choice = core.reclaim_host(&HostDemand { deficit: b(20), disk_room: b(100) });
    assert_eq!((pushed(&choice), choice.missing), (vec![gone], b(4)));
}

#[test]
fn the_longest_unused_copy_goes_to_the_disk_first() {
    let mut core = core();
    let all = [30, 10, 20].map(|now| spilled(&mut core, now));
    let choice = core.reclaim_host(&HostDemand { deficit: b(32), disk_room: b(100) });
    assert_eq!(pushed(&choice), [all[1], all[2]]);
    assert_eq!(core.states(all[1]).unwrap(), [PieceState::Pushing { copies: HOST }]);
    assert_eq!(
        pushed(&core.reclaim_host(&HostDemand { deficit: b(48), disk_room: b(100) })),
        [all[0]]
    );
    let settled = core.settle(choice.pushes[0].id).unwrap();
    assert_eq!(settled, Settled::Pushed { piece: piece(all[1], 0) });
    assert_eq!(core.states(all[1]).unwrap(), [PieceState::Spilled { copies: DISK }]);
    core.abandon(choice.pushes[1].id).unwrap();
    assert_eq!(
        core.states(all[2]).unwrap(),
        [PieceState::Spilled { copies: HOST }],
        "and is whole"
    );
    core.audit().unwrap();
    let back = try_lease(&mut core, &[(all[1], Shared)], S1, 40).unwrap();
    assert_eq!(back.restores[0].from, SpillTier::Disk);
}

#[test]
fn a_full_disk_leaves_copies_on_the_host() {
    let mut core = core();
    let a = spilled(&mut core, 0);
    let choice = core.reclaim_host(&HostDemand { deficit: b(16), disk_room: b(15) });
    assert_eq!(choice, Reclaim { missing: b(16), ..Reclaim::default() });
    assert_eq!(core.states(a).unwrap(), [PieceState::Spilled { copies: HOST }]);
}

#[test]
fn a_lease_waits_for_a_push_or_gives_it_up() {
    let mut core = core();
    let a = spilled(&mut core, 0);
    let push = core.reclaim_host(&HostDemand { deficit: b(1), disk_room: b(16) }).pushes[0].id;
    let refused = try_lease(&mut core, &[(a, Shared)], S1, 1).unwrap_err();
    assert_eq!(refused, LeaseRefused::Settling { moves: vec![(push, piece(a, 0))] });
    core.abandon(push).unwrap();
    assert_eq!(
        try_lease(&mut core, &[(a, Shared)], S1, 1).unwrap().restores[0].from,
        SpillTier::Host
    );
}

#[test]
fn a_copy_on_host_and_disk_leaves_the_host_for_nothing() {
    let mut core = core();
    let a = spilled(&mut core, 0);
    let push = core.reclaim_host(&HostDemand { deficit: b(1), disk_room: b(16) }).pushes[0].id;
    core.settle(push).unwrap();
    let reader = lease(&mut core, a, Shared, 1);
    end(&mut core, reader, 1);
    assert_eq!(core.states(a).unwrap(), [PieceState::Resident { copies: DISK }]);
    spill(&mut core, 16, 100);
    assert_eq!(core.counters().copied_out_bytes, 16, "the disk's copy still counts");
    assert_eq!(dropped(&core.reclaim_host(&HostDemand { deficit: b(1), disk_room: b(0) })), []);
}

#[test]
fn what_is_idle_and_dirty_is_cleaned_ahead_within_the_budget() {
    let mut core = core();
    let [a, c, d, e] = [0, 10, 20, 60].map(|now| written(&mut core, 16, now));
    core.hint(c, Hint::WillNeed).unwrap();
    let held = lease(&mut core, d, Shared, 20);
    let room = SpillRoom { host: b(100), disk: b(0), ..SpillRoom::default() };
    let chosen = core.clean(b(33), &with(room), 100);
    let pieces: Vec<PieceId> = chosen.iter().map(|out| out.piece).collect();
    assert_eq!(pieces, [piece(a, 0)], "one is wanted, one leased, one was used too lately");
    assert_eq!(core.clean(b(33), &with(room), 100), [], "nothing is cleaned twice");
    end(&mut core, held, 20);
    let chosen = core.clean(b(31), &with(room), 200);
    assert_eq!(chosen[0].piece, piece(d, 0), "and the budget is enough for one");
    assert_eq!(chosen.len(), 1);
    assert_eq!(core.clean(b(31), &with(SpillRoom::default()), 200), [], "no room, no copy");
    core.audit().unwrap();
    assert_eq!(core.choose(&short(100), 200).short.unwrap().moving, b(32));
    assert!(core.holds(e).unwrap().moves.len() == 1, "it was chosen as a victim");
}

#[test]
fn a_piece_whose_fill_failed_is_not_pushed_while_the_lease_is_held() {
    let mut core = core();
    let a = spilled(&mut core, 0);
    let granted = try_lease(&mut core, &[(a, Shared)], S1, 1).unwrap();
    core.abandon(granted.restores[0].id).unwrap();
    let pressure = HostDemand { deficit: b(1), disk_room: b(16) };
    assert_eq!(core.reclaim_host(&pressure).missing, b(1));
    core.cancel_lease(granted.lease).unwrap();
    core.audit().unwrap();
    assert_eq!(pushed(&core.reclaim_host(&pressure)), [a]);
}

#[test]
fn contents_are_cleaned_above_a_part_of_the_capacity() {
    let mut core = core();
    written(&mut core, 64, 0);
    for (capacity, above, is_above) in
        [(128, 0.4, true), (128, 0.5, false), (64, 1.0, false), (64, 0.9, true), (0, 1.0, true)]
    {
        assert_eq!(core.is_above(b(capacity), above), is_above, "{above} of {capacity} B");
    }
}

#[test]
fn only_dirty_contents_need_room_on_the_host() {
    let mut core = core();
    written(&mut core, 32, 0);
    assert_eq!(core.host_deficit(b(32), &on_host(10)), b(22));
    assert_eq!(core.host_deficit(b(8), &on_host(10)), b(0));
    let room = SpillRoom { host: b(16), disk: b(0), ..SpillRoom::default() };
    for out in core.clean(b(16), &with(room), 1000) {
        core.settle(out.id).unwrap();
    }
    assert_eq!(core.host_deficit(b(32), &on_host(10)), b(6), "16 B are clean");
}
