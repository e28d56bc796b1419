use Access::{Exclusive, Shared};

use super::*;

#[test]
fn contents_leave_and_come_back_and_the_copy_stays_good() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    assert_eq!(core.states(a).unwrap(), [PieceState::Resident { copies: Copies::NONE }]);
    let choice = core.choose(&short(16), 1);
    let out = choice.victims[0].moves[0].clone();
    assert_eq!(out.to, Some(SpillTier::Host));
    let leaving = PieceState::Leaving { copies: Copies::NONE, to: Some(SpillTier::Host) };
    assert_eq!(core.states(a).unwrap(), [leaving]);
    settle_all(&mut core, &choice);
    assert_eq!(core.states(a).unwrap(), [PieceState::Spilled { copies: HOST }]);
    assert_eq!(core.needed_memory(out.at.range).unwrap(), []);
    let granted = try_lease(&mut core, &[(a, Shared)], S1, 2).unwrap();
    let fill = granted.restores[0];
    assert_eq!((fill.at, fill.from), (out.at, SpillTier::Host), "to the address it had");
    let restoring = PieceState::Restoring { copies: HOST, from: SpillTier::Host };
    assert_eq!(core.states(a).unwrap(), [restoring]);
    core.settle(fill.id).unwrap();
    end(&mut core, granted.lease, 3);
    assert_eq!(core.states(a).unwrap(), [PieceState::Resident { copies: HOST }]);
    let again = core.choose(&short(16), 100);
    assert_eq!(again.victims[0].moves[0].to, None, "read-only data is not written twice");
    settle_all(&mut core, &again);
    assert_eq!(core.counters().copied_out_bytes, 16);
    assert_eq!(core.counters().spilled_clean_bytes, 16);
}

#[test]
fn a_write_makes_every_copy_stale() {
    let mut core = core();
    let a = written(&mut core, 32, 0);
    spill(&mut core, 32, 1);
    let push = core.reclaim_host(&HostDemand { deficit: b(16), disk_room: b(16) }).pushes[0];
    core.settle(push.id).unwrap();
    let writer = lease(&mut core, a, Exclusive, 2);
    let stale = end_used(&mut core, writer, a, 3);
    let from: Vec<SpillTier> = stale.iter().map(|drop| drop.from).collect();
    assert_eq!(from, [SpillTier::Disk, SpillTier::Host]);
    assert_eq!(stale[0].after, [token(S1, 3)]);
    assert_eq!(core.census().dirty, b(32));
}

#[test]
fn a_failed_spill_leaves_the_piece_where_it_was() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let out = core.choose(&short(16), 1).victims[0].moves[0].id;
    let abandoned = core.abandon(out).unwrap();
    let state = PieceState::Resident { copies: Copies::NONE };
    assert_eq!(abandoned, Abandoned { piece: piece(a, 0), state, less: None });
    assert!(core.settle(out).is_err(), "a stale move misses");
    core.audit().unwrap();
    assert_eq!(spill(&mut core, 16, 2), [piece(a, 0)]);
}

#[test]
fn a_retrieve_that_fails_half_way_leaves_the_buffer_spilled_and_whole() {
    let mut core = core();
    let a = written(&mut core, 48, 0);
    spill(&mut core, 48, 1);
    let granted = try_lease(&mut core, &[(a, Exclusive)], S1, 2).unwrap();
    core.settle(granted.restores[0].id).unwrap();
    let abandoned = core.abandon(granted.restores[1].id).unwrap();
    assert_eq!(abandoned.state, PieceState::Spilled { copies: HOST });
    assert_eq!(abandoned.less, None, "the lease still needs the memory");
    core.audit().unwrap();
    let early = core.end_lease(granted.lease, &LeaseEnd::default(), 3).unwrap_err();
    assert_eq!(early, LeaseEndError::NotRestored { piece: piece(a, 1) });
    let range = core.slice(a).unwrap().range;
    assert_eq!(core.cancel_lease(granted.lease).unwrap(), [range]);
    core.audit().unwrap();
    assert_eq!(core.needed_memory(range).unwrap(), [(b(0), b(16)), (b(32), b(16))]);
    let last = core.abandon(granted.restores[2].id).unwrap();
    assert_eq!(last.less, Some(range), "no lease needs it any more");
    core.audit().unwrap();
    assert_eq!(core.census().host_copies, b(48), "all of it is still below");
    assert_eq!(core.occupied(), b(16));
}

#[test]
fn memory_is_not_taken_from_under_work_on_any_stream() {
    let mut core = core();
    let a = add(&mut core, 16);
    let writer = lease(&mut core, a, Exclusive, 0);
    end_used(&mut core, writer, a, 5);
    let reader = try_lease(&mut core, &[(a, Shared)], S2, 0).unwrap().lease;
    let uses = [BufferUse { buffer: a, token: token(S2, 8) }];
    core.end_lease(reader, &LeaseEnd { uses: &uses, writes: Writes::All }, 1).unwrap();
    let victim = core.choose(&short(16), 2).victims.remove(0);
    let out = &victim.moves[0];
    assert_eq!(out.copy_after, [token(S1, 5)], "the copy reads: readers are no obstacle");
    assert_eq!(out.lend_after, [token(S1, 5), token(S2, 8)]);
    core.complete_use(token(S1, 5));
    let refused = core.settle(out.id).unwrap_err();
    let uses = vec![token(S2, 8)];
    assert_eq!(refused, SettleError::StillUsed { piece: piece(a, 0), uses });
    core.complete_use(token(S2, 8));
    assert!(matches!(core.settle(out.id), Ok(Settled::Spilled { .. })));
}

#[test]
fn a_victim_that_is_leased_before_it_left_stays_and_its_copy_counts() {
    let mut core = core();
    let a = written(&mut core, 32, 0);
    let choice = core.choose(&short(32), 1);
    assert_eq!(choice.victims.len(), 2);
    let first = choice.victims[0].moves[0].clone();
    core.settle(first.id).unwrap();
    let granted = try_lease(&mut core, &[(a, Shared)], S1, 2).unwrap();
    assert_eq!(granted.restores.len(), 1, "only what left has to come back");
    let second = &choice.victims[1].moves[0];
    let cleaning = PieceState::Cleaning { copies: Copies::NONE, to: SpillTier::Host };
    assert_eq!(core.states(a).unwrap()[second.piece.index as usize], cleaning);
    let settled = core.settle(second.id).unwrap();
    assert_eq!(settled, Settled::Cleaned { piece: second.piece, to: SpillTier::Host });
    assert_eq!(core.counters().evictions_cancelled, 1);
}

#[test]
fn a_clean_victim_that_is_leased_before_it_left_simply_stays() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    spill(&mut core, 16, 1);
    let reader = lease(&mut core, a, Shared, 2);
    end(&mut core, reader, 2);
    let out = core.choose(&short(16), 50).victims[0].moves[0].clone();
    assert_eq!(out.to, None);
    let again = try_lease(&mut core, &[(a, Exclusive)], S1, 51).unwrap();
    end(&mut core, again.lease, 52);
    let settled = core.settle(out.id).unwrap();
    assert_eq!(settled, Settled::Stays { piece: piece(a, 0), stale: None });
    core.audit().unwrap();
    assert_eq!(core.census().dirty, b(16));
}

#[test]
fn a_writer_waits_for_a_copy_only_until_it_is_queued() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let out = core.choose(&short(16), 1).victims[0].moves[0].clone();
    let refused = try_lease(&mut core, &[(a, Exclusive)], S1, 2).unwrap_err();
    assert_eq!(refused, LeaseRefused::Settling { moves: vec![(out.id, out.piece)] });
    let reader = try_lease(&mut core, &[(a, Shared)], S1, 2).unwrap();
    assert_eq!(reader.after, [], "a copy only reads");
    end(&mut core, reader.lease, 3);
    core.copy_queued(out.id, token(S2, 4)).unwrap();
    core.audit().unwrap();
    let writer = try_lease(&mut core, &[(a, Exclusive)], S1, 5).unwrap();
    assert_eq!((writer.after, writer.restores), (vec![token(S2, 4)], vec![]), "it did not leave");
    let settled = core.settle(out.id).unwrap();
    assert_eq!(settled, Settled::Cleaned { piece: out.piece, to: SpillTier::Host }, "it was whole");
    let stale = end(&mut core, writer.lease, 6);
    assert_eq!(stale.len(), 1, "and is stale when the write counts");
    let fill = MoveId(77);
    assert!(core.copy_queued(fill, token(S2, 5)).is_err());
}

#[test]
fn a_copy_that_a_writer_overtook_is_worth_nothing() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let room = SpillRoom { host: b(100), disk: b(0), ..SpillRoom::default() };
    let out = core.clean(b(100), &with(room), 100).remove(0);
    core.copy_queued(out.id, token(S2, 1)).unwrap();
    let writer = try_lease(&mut core, &[(a, Exclusive)], S1, 101).unwrap();
    assert_eq!(writer.after, [token(S2, 1)], "no copy mixes what was with what is written");
    assert_eq!(end(&mut core, writer.lease, 102), [], "no copy counts yet");
    let settled = core.settle(out.id).unwrap();
    assert_eq!(settled, Settled::Stays { piece: piece(a, 0), stale: Some(SpillTier::Host) });
    core.audit().unwrap();
    assert_eq!(core.census().dirty, b(16));
}

#[test]
fn a_copy_that_readers_meet_is_good() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let room = SpillRoom { host: b(100), disk: b(0), ..SpillRoom::default() };
    let out = core.clean(b(100), &with(room), 100).remove(0);
    let reader = try_lease(&mut core, &[(a, Shared)], S1, 101).unwrap();
    end_used(&mut core, reader.lease, a, 102);
    let settled = core.settle(out.id).unwrap();
    assert_eq!(settled, Settled::Cleaned { piece: piece(a, 0), to: SpillTier::Host });
    let cancelled = try_lease(&mut core, &[(a, Exclusive)], S1, 103).unwrap();
    core.cancel_lease(cancelled.lease).unwrap();
    assert_eq!(core.states(a).unwrap(), [PieceState::Resident { copies: HOST }]);
}

#[test]
fn only_a_fill_is_as_good_as_done_when_it_is_queued() {
    let mut core = core();
    written(&mut core, 16, 0);
    let out = core.choose(&short(16), 1).victims[0].moves[0].id;
    assert_eq!(core.restore_queued(out, token(S1, 1)), Err(SettleError::NotARestore { id: out }));
}

#[test]
fn discarded_contents_are_neither_copied_out_nor_in() {
    let mut core = core();
    let a = written(&mut core, 32, 0);
    spill(&mut core, 16, 1);
    let stale = core.discard(a).unwrap();
    core.audit().unwrap();
    assert_eq!(stale.len(), 1, "the copy of the spilled piece");
    let choice = core.choose(&short(32), 2);
    assert_eq!(choice.frees, b(16));
    assert_eq!(choice.victims[0].moves[0].to, None);
    assert_eq!(choice.victims[0].cost.cost_ns(), 0);
    settle_all(&mut core, &choice);
    assert_eq!(core.states(a).unwrap(), [PieceState::Empty; 2]);
    assert_eq!(try_lease(&mut core, &[(a, Shared)], S1, 3).unwrap().restores, []);
}

#[test]
fn removing_a_spilled_buffer_drops_its_copies_on_host_and_disk() {
    let mut core = core();
    let a = written(&mut core, 32, 0);
    spill(&mut core, 32, 1);
    let push = core.reclaim_host(&HostDemand { deficit: b(1), disk_room: b(100) }).pushes[0];
    assert!(matches!(core.remove(a), Err(HeldError::Held { .. })), "a push is on its way");
    core.settle(push.id).unwrap();
    let mut from: Vec<SpillTier> = core.remove(a).unwrap().iter().map(|drop| drop.from).collect();
    from.sort();
    assert_eq!(from, [SpillTier::Host, SpillTier::Disk]);
    core.audit().unwrap();
    assert_eq!(core.census(), DeferCensus::default());
}

#[test]
fn a_buffer_that_somebody_needs_is_not_removed_and_says_by_whom() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let reader = lease(&mut core, a, Shared, 1);
    let error = core.remove(a).unwrap_err();
    assert!(error.to_string().contains("1 leases to end"), "{error}");
    end_used(&mut core, reader, a, 4);
    assert!(core.remove(a).unwrap_err().to_string().contains("1 uses to be over"));
    core.discard(a).unwrap();
    core.complete_use(token(S1, 4));
    let reader = lease(&mut core, a, Shared, 1);
    core.pin(reader, a).unwrap();
    end(&mut core, reader, 5);
    assert!(core.discard(a).is_err());
    core.unpin(a).unwrap();
    assert_eq!(core.remove(a).unwrap(), []);
    assert_eq!(core.occupied(), b(0));
}

#[test]
fn what_is_kept_on_the_card_stays_without_a_lease() {
    let mut core = core();
    let buffer = written(&mut core, 16, 0);
    let out = core.choose(&short(16), 1).victims[0].moves[0].clone();
    let buffers = [(buffer, Access::Shared)];
    core.keep(&LeaseRequest { buffers: &buffers, ..LeaseRequest::default() }, 2).unwrap();
    core.audit().unwrap();
    assert!(matches!(core.settle(out.id), Ok(Settled::Cleaned { .. })));
    let held = lease(&mut core, buffer, Access::Exclusive, 3);
    let refused = core.keep(&LeaseRequest { buffers: &buffers, ..LeaseRequest::default() }, 4);
    assert!(matches!(refused, Err(LeaseRefused::Busy { .. })), "{refused:?}");
    end(&mut core, held, 5);
}

// --- demote ---

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

// --- peers ---

const PEER: fn(u32) -> SpillTier = |ordinal| SpillTier::Peer(peer(ordinal));

/// Room on two cards, the host and the disk.
fn room(peers: [u64; 2], host: u64, disk: u64) -> SpillRoom {
    let mut room = SpillRoom { host: b(host), disk: b(disk), ..SpillRoom::default() };
    (1..).zip(peers).for_each(|(ordinal, free)| room.peers[peer(ordinal)] = b(free));
    room
}

/// A piece on a card, last used at `now_ns`.
fn on_card(core: &mut Deferrables, ordinal: u32, now_ns: u64) -> BufferId {
    let buffer = written(core, 16, now_ns);
    core.hint(buffer, Hint::WontNeed).unwrap();
    let peers = if ordinal == 1 { [100, 0] } else { [0, 100] };
    let demand = SpillDemand { room: room(peers, 0, 0), ..short(16) };
    let choice = core.choose(&demand, now_ns);
    assert_eq!(settle_all(core, &choice), [piece(buffer, 0)]);
    buffer
}

fn peers_demand(deficit: u64, host: u64, disk: u64) -> PeerDemand {
    PeerDemand { peer: peer(1), deficit: b(deficit), room: room([0; 2], host, disk) }
}

#[test]
fn contents_go_to_the_card_with_the_fastest_link_then_to_the_next_tier() {
    let mut core = core();
    let buffer = written(&mut core, 80, 0);
    let mut demand = SpillDemand { room: room([16, 16], 16, 16), ..short(80) };
    demand.rates.to_peer[peer(1)] = Some(2_000_000_000);
    demand.rates.to_peer[peer(2)] = Some(3_000_000_000);
    let choice = core.choose(&demand, 10);
    let to: Vec<_> = choice.victims.iter().map(|one| one.moves[0].to.unwrap()).collect();
    assert_eq!(to, [PEER(2), PEER(1), SpillTier::Host, SpillTier::Disk]);
    assert_eq!(choice.short.unwrap().no_room, b(16));
    settle_all(&mut core, &choice);
    let census = core.census();
    assert_eq!(
        (census.spilled_peer, census.spilled_host, census.spilled_disk),
        (b(32), b(16), b(16))
    );
    let back = try_lease(&mut core, &[(buffer, Shared)], S1, 20).unwrap();
    let from: Vec<_> = back.restores.iter().map(|restore| restore.from).collect();
    assert_eq!(from.len(), 4);
    assert!(from.contains(&PEER(1)) && from.contains(&PEER(2)));
}

#[test]
fn a_card_behind_a_slow_link_comes_after_the_host() {
    let mut core = core();
    written(&mut core, 32, 0);
    let mut demand = SpillDemand { room: room([16, 0], 16, 16), ..short(32) };
    demand.rates.to_peer[peer(1)] = Some(900_000_000);
    let choice = core.choose(&demand, 10);
    let to: Vec<_> = choice.victims.iter().map(|one| one.moves[0].to.unwrap()).collect();
    assert_eq!(to, [SpillTier::Host, PEER(1)]);
}

#[test]
fn what_moves_on_from_a_card_is_first_what_is_not_needed_then_the_least_recently_used() {
    let mut core = core();
    let [old, young, used] = [10, 20, 0].map(|now| on_card(&mut core, 1, now));
    let reader = lease(&mut core, used, Shared, 30);
    end(&mut core, reader, 30);
    let other = on_card(&mut core, 2, 5);
    let choice = core.reclaim_peer(&peers_demand(17, 100, 0));
    core.audit().unwrap();
    assert_eq!(choice.stale.len(), 1, "contents on their card need no copy");
    assert_eq!((choice.stale[0].piece, choice.stale[0].from), (piece(used, 0), PEER(1)));
    let pushes: Vec<_> = choice.pushes.iter().map(|push| (push.piece, push.to)).collect();
    assert_eq!(pushes, [(piece(old, 0), SpillTier::Host)]);
    assert!(matches!(core.states(old).unwrap()[0], PieceState::Pushing { .. }));
    core.settle(choice.pushes[0].id).unwrap();
    core.audit().unwrap();
    assert_eq!(core.states(old).unwrap(), [PieceState::Spilled { copies: HOST }]);
    let choice = core.reclaim_peer(&peers_demand(100, 8, 16));
    let pushes: Vec<_> = choice.pushes.iter().map(|push| (push.piece, push.to)).collect();
    assert_eq!(pushes, [(piece(young, 0), SpillTier::Disk)], "the host is full");
    assert_eq!(choice.missing, b(84));
    core.abandon(choice.pushes[0].id).unwrap();
    core.audit().unwrap();
    assert_eq!((core.copies_on(peer(1)), core.copies_on(peer(2))), (1, 1));
    assert_eq!(try_lease(&mut core, &[(other, Shared)], S1, 40).unwrap().restores[0].from, PEER(2));
}

#[test]
fn a_copy_that_a_card_refuses_goes_to_the_host_with_its_promise() {
    let mut core = core();
    written(&mut core, 32, 0);
    let wide = SpillDemand { room: room([32, 0], 0, 0), ..short(32) };
    let choice = core.choose(&wide, 10);
    let ids: Vec<_> = choice.victims.iter().map(|one| one.moves[0].id).collect();
    assert_eq!(core.redirect(ids[0], room([0; 2], 16, 0)), Some(SpillTier::Host));
    core.audit().unwrap();
    assert_eq!(core.redirect(ids[1], room([0; 2], 16, 0)), None, "the host's room is promised");
    assert_eq!(core.redirect(ids[0], room([0; 2], 64, 0)), None, "it goes to no card any more");
    core.copy_queued(ids[1], token(S2, 1)).unwrap();
    assert_eq!(core.redirect(ids[1], room([0; 2], 64, 0)), None, "the copy is queued");
    core.audit().unwrap();
}

#[test]
fn a_buffer_with_pinned_memory_stays_and_its_eviction_is_cancelled() {
    let mut core = core();
    let [pinned, other] = [0, 1].map(|now| written(&mut core, 16, now));
    let range = core.slice(pinned).unwrap().range;
    let choice = core.choose(&short(32), 10);
    core.set_pinned_memory(range, true);
    core.audit().unwrap();
    for out in choice.victims.iter().flat_map(|victim| &victim.moves) {
        let settled = core.settle(out.id).unwrap();
        let stays = matches!(settled, Settled::Cleaned { .. });
        assert_eq!(stays, out.piece.buffer == pinned, "{settled:?}");
    }
    let short = core.choose(&short(16), 20).short.unwrap();
    assert_eq!((short.pinned, short.missing), (b(16), b(16)));
    assert_eq!(core.census().held, b(16));
    core.set_pinned_memory(range, false);
    assert_eq!(spill(&mut core, 16, 30), [piece(pinned, 0)]);
    assert!(matches!(core.states(other).unwrap()[0], PieceState::Spilled { .. }));
}

#[test]
fn a_removed_buffer_with_pinned_memory_commits_nothing() {
    let mut core = core();
    let buffer = written(&mut core, 16, 0);
    core.set_pinned_memory(core.slice(buffer).unwrap().range, true);
    assert_eq!(core.census().committed, b(16));
    core.remove(buffer).unwrap();
    core.audit().unwrap();
    assert_eq!(core.census().committed, b(0));
}

/// The copies looked at to move one on do not grow with those on the card.
#[test]
fn moving_one_copy_on_looks_at_few_of_many() {
    for count in [10, 1000, u64::from(vramp_testing::cases(20_000))] {
        let mut core =
            Deferrables::new(DeferConfig { capacity: b(u64::MAX >> 1), ..config() }).unwrap();
        let buffers: Vec<BufferId> =
            (0..count).map(|_| core.add_buffer(b(16)).unwrap().buffer).collect();
        for (&buffer, now) in buffers.iter().zip(0..) {
            let write = [(buffer, Access::Exclusive)];
            let request = LeaseRequest { buffers: &write, ..LeaseRequest::default() };
            let granted = core.lease(&request, now).unwrap();
            core.end_lease(granted.lease, &LeaseEnd::default(), now).unwrap();
        }
        let all = SpillDemand { room: room([16 * count, 0], 0, 0), ..short(16 * count) };
        let choice = core.choose(&all, count);
        for out in choice.victims.iter().flat_map(|victim| &victim.moves) {
            core.settle(out.id).unwrap();
        }
        assert_eq!(core.copies_on(peer(1)) as u64, count);
        let choice = core.reclaim_peer(&peers_demand(16 * 4, 1 << 40, 0));
        let moved: Vec<BufferId> = choice.pushes.iter().map(|push| push.piece.buffer).collect();
        assert_eq!(moved, buffers[..4], "the least recently used");
        assert_eq!(core.counters().peer_copies_looked_at, 4);
        core.audit().unwrap();
    }
}
