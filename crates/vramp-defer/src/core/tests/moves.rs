use super::*;

use Access::{Exclusive, Shared};

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
