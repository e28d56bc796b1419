use super::*;

use Access::{Exclusive, Shared};

/// A readable buffer of two pieces, of which `spilled` are on the host.
fn readable(core: &mut Deferrables, spilled: u64) -> BufferId {
    let a = written(core, 32, 0);
    core.set_readable(a).unwrap();
    assert_eq!(spill(core, 16 * spilled, 1).len() as u64, spilled);
    a
}

/// Leases a set of which all buffers may be read in place.
fn try_read(
    core: &mut Deferrables,
    buffers: &[(BufferId, Access)],
) -> Result<GrantedLease, LeaseRefused> {
    let in_place_allowed: Vec<BufferId> = buffers.iter().map(|&(id, _)| id).collect();
    let request = LeaseRequest { buffers, streams: &[S1], ..LeaseRequest::default() };
    let granted = core.lease_in_place(&request, &in_place_allowed, 2);
    core.audit().unwrap();
    granted
}

/// Leases one buffer in place; `None`, and no lease, if it would have to be restored.
fn read(core: &mut Deferrables, a: BufferId) -> Option<GrantedLease> {
    let granted = try_read(core, &[(a, Shared)]).ok()?;
    if granted.in_place == [a] {
        return Some(granted);
    }
    for fill in &granted.restores {
        core.abandon(fill.id).unwrap();
    }
    core.cancel_lease(granted.lease).unwrap();
    core.audit().unwrap();
    None
}

fn settle(core: &mut Deferrables, moves: impl Iterator<Item = MoveId>) {
    for id in moves {
        core.settle(id).unwrap();
    }
    core.audit().unwrap();
}

#[test]
fn a_read_in_place_fills_nothing_and_takes_nothing_of_the_capacity() {
    let mut core = core();
    core.set_capacity(b(32));
    let a = readable(&mut core, 2);
    let granted = read(&mut core, a).unwrap();
    assert_eq!((granted.restores, granted.ranges, core.occupied()), (vec![], vec![], b(0)));
    let other = add(&mut core, 32);
    let card = lease(&mut core, other, Exclusive, 3);
    end(&mut core, card, 3);
    end(&mut core, granted.lease, 3);
    let back = lease(&mut core, a, Shared, 4);
    assert_eq!(core.occupied(), b(64), "what is idle leaves for it");
    end(&mut core, back, 4);
}

#[test]
fn a_buffer_is_hot_after_so_many_reads_in_place_until_a_piece_comes_back() {
    let mut core = core();
    let a = readable(&mut core, 2);
    for reads in 1..=2 {
        assert!(!core.is_hot(a));
        let granted = read(&mut core, a).unwrap();
        assert_eq!(core.is_hot(a), reads == 2);
        end(&mut core, granted.lease, 3);
    }
    let given_up = read(&mut core, a).unwrap();
    core.cancel_lease(given_up.lease).unwrap();
    assert!(core.is_hot(a), "a read that did not happen changes nothing");
    let back = lease(&mut core, a, Shared, 4);
    assert!(!core.is_hot(a));
    end(&mut core, back, 4);
    core.audit().unwrap();
}

#[test]
fn what_is_read_in_place_moves_in_no_direction() {
    let mut core = core();
    let a = readable(&mut core, 1);
    let granted = read(&mut core, a).unwrap();
    for access in [Shared, Exclusive] {
        let refused = try_lease(&mut core, &[(a, access)], S2, 3).unwrap_err();
        assert_eq!(refused, LeaseRefused::Busy { held_by: vec![granted.lease] });
    }
    let again = read(&mut core, a).expect("readers share");
    assert_eq!(core.choose(&short(16), 3).victims, []);
    let lower = core.reclaim_host(&HostDemand { deficit: b(32), disk_room: b(100) });
    assert_eq!((lower.stale, lower.pushes), (vec![], vec![]));
    assert!(core.discard(a).is_err() && core.remove(a).is_err());
    assert_eq!(core.pin(again.lease, a), Err(PinError::InPlace { buffer: a }));
    core.cancel_lease(again.lease).unwrap();
    end(&mut core, granted.lease, 3);
    assert_eq!(spill(&mut core, 16, 4).len(), 1);
}

#[test]
fn what_was_chosen_to_leave_stays_for_a_read_in_place() {
    let mut core = core();
    let a = readable(&mut core, 1);
    let choice = core.choose(&short(16), 2);
    let out = choice.victims[0].moves[0].id;
    let granted = read(&mut core, a).unwrap();
    assert!(matches!(core.settle(out), Ok(Settled::Cleaned { .. })));
    end(&mut core, granted.lease, 3);
}

#[test]
fn a_usual_lease_is_taken_where_nothing_is_below_or_something_is_nowhere_or_moving() {
    let mut core = core();
    let card = readable(&mut core, 0);
    assert_eq!(read(&mut core, card), None, "all is on the card");
    let empty = add(&mut core, 16);
    core.set_readable(empty).unwrap();
    assert_eq!(read(&mut core, empty), None, "nothing was written");
    let plain = written(&mut core, 16, 0);
    let card = lease(&mut core, card, Shared, 1);
    assert_eq!(spill(&mut core, 16, 1), [piece(plain, 0)]);
    assert_eq!(read(&mut core, plain), None, "it was not made readable");
    core.set_readable(plain).unwrap();
    let granted = try_lease(&mut core, &[(plain, Shared)], S2, 3).unwrap();
    assert_eq!(read(&mut core, plain), None, "it is being restored");
    core.settle(granted.restores[0].id).unwrap();
    end(&mut core, granted.lease, 3);
    end(&mut core, card, 3);
}

#[test]
fn of_a_set_what_is_readable_stays_and_the_rest_comes() {
    let mut core = core();
    core.set_capacity(b(48));
    let [a, plain] = [readable(&mut core, 2), written(&mut core, 32, 0)];
    assert_eq!(spill(&mut core, 32, 1).len(), 2);
    let out = add(&mut core, 16);
    let set = [(a, Shared), (plain, Shared), (out, Exclusive)];
    let granted = try_read(&mut core, &set).expect("what stays takes nothing of the card");
    assert_eq!(granted.in_place, [a]);
    assert_eq!((granted.restores.len(), granted.ranges.len()), (2, 2));
    assert!(matches!(
        core.end_lease(granted.lease, &LeaseEnd::default(), 3),
        Err(LeaseEndError::NotRestored { .. })
    ));
    settle(&mut core, granted.restores.iter().map(|fill| fill.id));
    assert_eq!(core.pin(granted.lease, a), Err(PinError::InPlace { buffer: a }));
    core.pin(granted.lease, plain).unwrap();
    let uses = [
        BufferUse { buffer: a, token: token(S1, 1) },
        BufferUse { buffer: out, token: token(S1, 1) },
    ];
    let end = LeaseEnd { uses: &uses, writes: Writes::All };
    core.end_lease(granted.lease, &end, 3).unwrap();
    core.audit().unwrap();
    assert_eq!(core.states(a).unwrap(), [PieceState::Spilled { copies: HOST }; 2]);
    assert_eq!(core.states(out).unwrap(), [PieceState::Resident { copies: Copies::NONE }]);
    assert_eq!(core.holds(a).unwrap().uses, [token(S1, 1)], "the reading goes on");
}

#[test]
fn a_set_is_read_in_place_all_or_nothing() {
    let mut core = core();
    let a = readable(&mut core, 2);
    let other = written(&mut core, 16, 0);
    let held = lease(&mut core, other, Exclusive, 1);
    let refused = try_read(&mut core, &[(a, Shared), (other, Shared)]).unwrap_err();
    assert_eq!(refused, LeaseRefused::Busy { held_by: vec![held] });
    assert!(core.holds(a).unwrap().is_free(), "a waiter holds nothing");
    core.set_capacity(b(31));
    let refused = try_read(&mut core, &[(a, Exclusive)]).unwrap_err();
    assert!(matches!(refused, LeaseRefused::TooLarge { .. }), "who writes needs it on the card");
}

#[test]
fn a_buffer_named_twice_and_written_once_comes() {
    let mut core = core();
    let a = readable(&mut core, 1);
    let granted = try_read(&mut core, &[(a, Shared), (a, Exclusive)]).unwrap();
    assert_eq!((granted.in_place.len(), granted.restores.len()), (0, 1));
    settle(&mut core, granted.restores.iter().map(|fill| fill.id));
    end(&mut core, granted.lease, 3);
}

#[test]
fn copies_that_are_read_below_leave_the_host_after_all_others_and_not_while_they_are_read() {
    let mut core = core();
    let a = readable(&mut core, 2);
    let plain = written(&mut core, 16, 50);
    assert_eq!(spill(&mut core, 16, 51), [piece(plain, 0)]);
    let lower = |core: &mut Deferrables, deficit| {
        let choice = core.reclaim_host(&HostDemand { deficit: b(deficit), disk_room: b(100) });
        core.audit().unwrap();
        choice.pushes
    };
    let reading = read(&mut core, a).unwrap();
    let pushes = lower(&mut core, 48);
    assert_eq!(pushes.iter().map(|push| push.piece).collect::<Vec<_>>(), [piece(plain, 0)]);
    core.abandon(pushes[0].id).unwrap();
    end(&mut core, reading.lease, 60);
    let pushes = lower(&mut core, 20);
    let order: Vec<PieceId> = pushes.iter().map(|push| push.piece).collect();
    assert_eq!(order, [piece(plain, 0), piece(a, 0)], "the younger goes first all the same");
    let refused = try_read(&mut core, &[(a, Shared)]).unwrap_err();
    assert!(matches!(refused, LeaseRefused::Settling { .. }), "not while it is in flight");
    core.abandon(pushes[1].id).unwrap();
    let reading = read(&mut core, a).expect("a push that failed changes nothing");
    end(&mut core, reading.lease, 61);
}

#[test]
fn what_was_pushed_to_the_disk_is_readable_below_once_it_came_back_and_left() {
    let mut core = core();
    let a = readable(&mut core, 2);
    let choice = core.reclaim_host(&HostDemand { deficit: b(1), disk_room: b(100) });
    core.settle(choice.pushes[0].id).unwrap();
    assert_eq!(read(&mut core, a), None, "the disk cannot be read in place");
    let back = lease(&mut core, a, Shared, 4);
    end(&mut core, back, 4);
    let copied = core.counters().copied_out_bytes;
    assert_eq!(spill(&mut core, 32, 100).len(), 2);
    assert_eq!(core.counters().copied_out_bytes, copied + 16, "only what the host had lost");
    assert_eq!(
        core.states(a).unwrap(),
        [Copies { peer: None, host: true, disk: true }, HOST]
            .map(|copies| PieceState::Spilled { copies })
    );
    let reading = read(&mut core, a).unwrap();
    end(&mut core, reading.lease, 101);
    let choice = core.reclaim_host(&HostDemand { deficit: b(1), disk_room: b(0) });
    assert_eq!(choice.stale[0].piece, piece(a, 0), "it is on the disk already");
}

#[test]
fn a_copy_only_to_read_takes_no_room_from_what_has_to_be_copied() {
    let mut core = core();
    let a = readable(&mut core, 2);
    let choice = core.reclaim_host(&HostDemand { deficit: b(32), disk_room: b(100) });
    settle(&mut core, choice.pushes.iter().map(|push| push.id));
    let back = lease(&mut core, a, Shared, 4);
    end(&mut core, back, 4);
    let dirty = written(&mut core, 16, 4);
    let room = SpillRoom { host: b(20), disk: b(0), ..SpillRoom::default() };
    let choice = core.choose(&SpillDemand { room, ..short(48) }, 100);
    core.audit().unwrap();
    let moves = choice.victims.iter().flat_map(|victim| &victim.moves);
    let copied: Vec<_> = moves.filter(|out| out.to.is_some()).map(|out| out.piece).collect();
    assert_eq!((choice.frees, copied), (b(48), vec![piece(dirty, 0)]));
}

#[test]
fn a_copy_that_cannot_be_read_below_is_forgotten_while_its_piece_is_on_the_card() {
    let mut core = core();
    let a = readable(&mut core, 1);
    let [below, there] = [piece(a, 0), piece(a, 1)];
    assert_eq!(core.forget_host_copy(below), None, "it is the only one");
    assert_eq!(core.forget_host_copy(there), None, "there is none");
    let back = lease(&mut core, a, Shared, 3);
    end(&mut core, back, 3);
    let gone = core.forget_host_copy(below).unwrap();
    assert_eq!((gone.piece, gone.from), (below, SpillTier::Host));
    core.audit().unwrap();
    let copied = core.counters().copied_out_bytes;
    assert_eq!(spill(&mut core, 32, 100).len(), 2);
    assert_eq!(core.counters().copied_out_bytes, copied + 32, "another is made");
}

#[test]
fn what_has_a_copy_leaves_without_the_one_that_could_not_be_made() {
    let mut core = core();
    let a = readable(&mut core, 2);
    let choice = core.reclaim_host(&HostDemand { deficit: b(16), disk_room: b(100) });
    settle(&mut core, choice.pushes.iter().map(|push| push.id));
    let back = lease(&mut core, a, Shared, 4);
    end(&mut core, back, 4);
    let gone = core.forget_host_copy(piece(a, 1)).unwrap();
    assert_eq!(gone.piece, piece(a, 1));
    let choice = core.choose(&short(32), 100);
    let outs: Vec<&CopyOut> = choice.victims.iter().flat_map(|victim| &victim.moves).collect();
    for out in &outs {
        let has_another = out.piece == piece(a, 0);
        assert_eq!(core.leave_without_copy(out.id), has_another, "{}", out.piece);
        core.audit().unwrap();
    }
    settle(&mut core, outs.iter().map(|out| out.id));
    assert_eq!(core.states(a).unwrap(), [DISK, HOST].map(|copies| PieceState::Spilled { copies }));
    assert!(!core.leave_without_copy(outs[0].id), "it left");
}
