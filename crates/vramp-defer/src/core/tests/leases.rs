use Access::{Exclusive, Shared};

use super::*;

#[test]
fn a_new_buffer_has_no_contents_and_no_memory_until_it_is_leased() {
    let mut core = core();
    let added = core.add_buffer(b(37)).unwrap();
    assert_eq!(core.states(added.buffer).unwrap(), [PieceState::Empty; 3]);
    assert_eq!((core.occupied(), core.needed_memory(added.at.range).unwrap()), (b(0), vec![]));
    let granted = try_lease(&mut core, &[(added.buffer, Shared)], S1, 0).unwrap();
    assert!(granted.restores.is_empty(), "there is nothing to restore");
    assert_eq!(granted.ranges, [added.at.range]);
    assert_eq!(
        (core.occupied(), core.needed_memory(added.at.range).unwrap()),
        (b(40), vec![(b(0), b(37))])
    );
    end(&mut core, granted.lease, 1);
    assert_eq!(core.states(added.buffer).unwrap(), [PieceState::Empty; 3], "nothing was written");
}

#[test]
fn lengths_that_make_no_buffer_are_refused() {
    let mut core = core();
    for len in [b(0), Bytes::new(u64::MAX)] {
        assert!(matches!(core.add_buffer(len), Err(AddError::Length { .. })));
    }
    assert!(matches!(core.add_group(b(17), None), Err(AddError::Length { .. })));
    for piece in [0, 6, 1 << 40] {
        let wrong = DeferConfig { piece: b(piece), ..config() };
        assert!(matches!(Deferrables::new(wrong), Err(DeferConfigError::Piece { .. })));
    }
    let wrong = DeferConfig { page: b(0), ..config() };
    assert_eq!(Deferrables::new(wrong).unwrap_err(), DeferConfigError::Page);
}

#[test]
fn several_share_and_one_excludes() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let first = try_lease(&mut core, &[(a, Shared)], S1, 0).unwrap().lease;
    let second = try_lease(&mut core, &[(a, Shared)], S2, 0).unwrap().lease;
    let refused = try_lease(&mut core, &[(a, Exclusive)], S1, 0).unwrap_err();
    assert_eq!(refused, LeaseRefused::Busy { held_by: vec![first, second] });
    end(&mut core, first, 1);
    end(&mut core, second, 1);
    let alone = try_lease(&mut core, &[(a, Exclusive)], S1, 1).unwrap().lease;
    for access in [Shared, Exclusive] {
        let refused = try_lease(&mut core, &[(a, access)], S1, 1).unwrap_err();
        assert_eq!(refused, LeaseRefused::Busy { held_by: vec![alone] });
    }
}

#[test]
fn a_set_is_leased_whole_or_not_at_all() {
    let mut core = core();
    let (a, c) = (written(&mut core, 16, 0), written(&mut core, 16, 0));
    let other = try_lease(&mut core, &[(c, Shared)], S1, 0).unwrap().lease;
    let set = [(a, Exclusive), (c, Exclusive)];
    assert!(matches!(try_lease(&mut core, &set, S1, 0), Err(LeaseRefused::Busy { .. })));
    assert!(core.holds(a).unwrap().is_free(), "a refused lease holds nothing");
    end(&mut core, other, 1);
    let granted = try_lease(&mut core, &set, S1, 1).unwrap();
    assert_eq!(core.holds(a).unwrap().leases, [granted.lease]);
}

#[test]
fn a_buffer_named_twice_is_leased_once_by_the_stronger_access() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let set = [(a, Shared), (a, Exclusive), (a, Shared)];
    let granted = try_lease(&mut core, &set, S1, 0).unwrap();
    assert_eq!(core.holds(a).unwrap().leases, [granted.lease]);
    assert!(matches!(try_lease(&mut core, &[(a, Shared)], S1, 0), Err(LeaseRefused::Busy { .. })));
    end(&mut core, granted.lease, 1);
    assert!(core.holds(a).unwrap().is_free());
}

#[test]
fn stale_names_miss() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let lease = lease(&mut core, a, Shared, 1);
    end(&mut core, lease, 1);
    assert!(core.end_lease(lease, &LeaseEnd::default(), 1).is_err());
    assert!(core.cancel_lease(lease).is_err());
    core.remove(a).unwrap();
    let refused = try_lease(&mut core, &[(a, Shared)], S1, 1).unwrap_err();
    assert_eq!(refused, LeaseRefused::Unknown(UnknownBuffer { buffer: a }));
    let again = add(&mut core, 16);
    assert_ne!(a, again, "the old name does not come back");
    assert!(core.settle(MoveId(99)).is_err() && core.abandon(MoveId(99)).is_err());
    assert_eq!(BufferId::from_number(again.number()), again);
    assert!(core.states(BufferId::from_number(7)).is_err());
}

#[test]
fn a_reader_waits_for_the_last_write_and_a_writer_for_all() {
    let mut core = core();
    let a = add(&mut core, 16);
    let writer = lease(&mut core, a, Exclusive, 0);
    end_used(&mut core, writer, a, 5);
    let same = try_lease(&mut core, &[(a, Shared)], S1, 1).unwrap();
    assert_eq!(same.after, [], "a stream is ordered with itself");
    end_used(&mut core, same.lease, a, 6);
    let reader = try_lease(&mut core, &[(a, Shared)], S2, 1).unwrap();
    assert_eq!(reader.after, [token(S1, 5)], "the read at 6 is no obstacle");
    let uses = [BufferUse { buffer: a, token: token(S2, 9) }];
    let read = LeaseEnd { uses: &uses, writes: Writes::All };
    core.end_lease(reader.lease, &read, 2).unwrap();
    let both = [S1, S2];
    let request =
        LeaseRequest { buffers: &[(a, Exclusive)], streams: &both, ..LeaseRequest::default() };
    let next = core.lease(&request, 2).unwrap();
    assert_eq!(next.after, [token(S1, 6), token(S2, 9)]);
    core.end_lease(next.lease, &read, 3).unwrap();
    let after = try_lease(&mut core, &[(a, Exclusive)], S1, 3).unwrap().after;
    assert_eq!(after, [token(S2, 9)], "the write waited for all before it");
}

#[test]
fn a_use_that_is_over_is_waited_for_no_more() {
    let mut core = core();
    let a = add(&mut core, 16);
    let writer = lease(&mut core, a, Exclusive, 0);
    end_used(&mut core, writer, a, 5);
    assert_eq!(core.complete_use(token(S1, 4)), []);
    assert_eq!(core.holds(a).unwrap().uses, [token(S1, 5)]);
    assert_eq!(core.complete_use(token(S1, 7)), [a]);
    assert!(core.holds(a).unwrap().is_free());
    assert_eq!(try_lease(&mut core, &[(a, Exclusive)], S2, 1).unwrap().after, []);
}

#[test]
fn a_set_larger_than_the_card_is_refused_and_not_waited_for() {
    let mut core = core();
    let (a, c) = (add(&mut core, 100), add(&mut core, 62));
    let refused = try_lease(&mut core, &[(a, Shared), (c, Shared)], S1, 0).unwrap_err();
    assert_eq!(refused, LeaseRefused::TooLarge { needed: b(164), capacity: b(160) });
    core.set_capacity(b(164));
    let _granted = try_lease(&mut core, &[(a, Shared), (c, Shared)], S1, 0).unwrap();
}

#[test]
fn leases_that_do_not_fit_beside_each_other_wait_and_hold_nothing() {
    let mut core = core();
    let (a, c) = (add(&mut core, 100), add(&mut core, 100));
    let first = lease(&mut core, a, Shared, 0);
    let refused = try_lease(&mut core, &[(c, Shared)], S1, 0).unwrap_err();
    let full = LeaseRefused::Full {
        needed: b(100),
        committed: b(100),
        capacity: b(160),
        held_by: vec![first],
    };
    assert_eq!(refused, full);
    assert_eq!(core.occupied(), b(100));
    let _beside = try_lease(&mut core, &[(a, Shared)], S2, 0).unwrap();
    end(&mut core, first, 1);
}

#[test]
fn exceptions_between_lease_and_launch_leave_nothing_held_and_nothing_written() {
    let mut core = core();
    let a = written(&mut core, 32, 0);
    spill(&mut core, 32, 1);
    let granted = try_lease(&mut core, &[(a, Exclusive)], S1, 2).unwrap();
    core.settle(granted.restores[0].id).unwrap();
    let range = core.slice(a).unwrap().range;
    assert_eq!(core.cancel_lease(granted.lease).unwrap(), [], "the second restore is in flight");
    core.audit().unwrap();
    let settled = core.settle(granted.restores[1].id).unwrap();
    assert_eq!(settled, Settled::Restored { piece: piece(a, 1) });
    core.audit().unwrap();
    assert_eq!(core.states(a).unwrap(), [PieceState::Resident { copies: HOST }; 2], "still clean");
    assert_eq!(core.needed_memory(range).unwrap(), [(b(0), b(32))]);
    assert!(core.holds(a).unwrap().is_free());
}

#[test]
fn a_cancelled_lease_of_an_empty_buffer_gives_its_memory_back() {
    let mut core = core();
    let a = add(&mut core, 32);
    let granted = try_lease(&mut core, &[(a, Exclusive)], S1, 0).unwrap();
    let range = core.slice(a).unwrap().range;
    assert_eq!(core.cancel_lease(granted.lease).unwrap(), [range]);
    core.audit().unwrap();
    assert_eq!((core.occupied(), core.needed_memory(range).unwrap()), (b(0), vec![]));
}

#[test]
fn only_the_streams_and_buffers_of_a_lease_end_it() {
    let mut core = core();
    let (a, c) = (written(&mut core, 32, 0), written(&mut core, 32, 0));
    let lease = lease(&mut core, a, Shared, 1);
    let other = [BufferUse { buffer: c, token: token(S1, 1) }];
    let foreign = [BufferUse { buffer: a, token: token(S2, 1) }];
    let wrong_uses = [
        (&other, LeaseEndError::OtherBuffer { buffer: c }),
        (&foreign, LeaseEndError::OtherStream { stream: S2 }),
    ];
    for (uses, error) in wrong_uses {
        let end = LeaseEnd { uses, writes: Writes::All };
        assert_eq!(core.end_lease(lease, &end, 2), Err(error));
    }
    let range = [WrittenRange { buffer: a, offset: b(0), len: b(1) }];
    let wrote = LeaseEnd { uses: &[], writes: Writes::Only(&range) };
    let refused = core.end_lease(lease, &wrote, 2).unwrap_err();
    assert!(refused.to_string().contains("does not allow writing"), "{refused}");
    assert_eq!(core.holds(a).unwrap().leases, [lease]);
}

#[test]
fn writing_part_of_a_buffer_leaves_the_copies_of_the_rest() {
    let mut core = core();
    let a = written(&mut core, 64, 0);
    spill(&mut core, 64, 1);
    let writer = lease(&mut core, a, Exclusive, 2);
    let stretches = [
        WrittenRange { buffer: a, offset: b(17), len: b(2) },
        WrittenRange { buffer: a, offset: b(64), len: b(0) },
        WrittenRange { buffer: a, offset: b(31), len: b(2) },
    ];
    let wrote = LeaseEnd { uses: &[], writes: Writes::Only(&stretches) };
    let stale = core.end_lease(writer, &wrote, 3).unwrap();
    let dropped: Vec<(PieceId, SpillTier)> =
        stale.iter().map(|drop| (drop.piece, drop.from)).collect();
    assert_eq!(dropped, [(piece(a, 1), SpillTier::Host), (piece(a, 2), SpillTier::Host)]);
    let census = core.census();
    assert_eq!((census.clean, census.dirty), (b(32), b(32)));
    core.audit().unwrap();
}

#[test]
fn two_threads_that_retrieve_one_buffer_fill_it_once() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    spill(&mut core, 16, 1);
    let first = try_lease(&mut core, &[(a, Shared)], S1, 2).unwrap();
    let refused = try_lease(&mut core, &[(a, Shared)], S2, 2).unwrap_err();
    assert_eq!(
        refused,
        LeaseRefused::Settling { moves: vec![(first.restores[0].id, piece(a, 0))] }
    );
    core.settle(first.restores[0].id).unwrap();
    assert_eq!(try_lease(&mut core, &[(a, Shared)], S2, 2).unwrap().restores, []);
}

#[test]
fn a_fill_that_is_only_queued_is_waited_for_by_other_streams() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    spill(&mut core, 16, 1);
    let first = try_lease(&mut core, &[(a, Shared)], S1, 2).unwrap();
    let copies = StreamKey(7);
    core.restore_queued(first.restores[0].id, token(copies, 3)).unwrap();
    let second = try_lease(&mut core, &[(a, Shared)], S2, 2).unwrap();
    assert_eq!((second.after, second.restores), (vec![token(copies, 3)], vec![]));
    end(&mut core, first.lease, 3);
    end(&mut core, second.lease, 3);
    let host = core.reclaim_host(&HostDemand { deficit: b(1), disk_room: b(0) });
    assert_eq!(host.stale[0].after, [token(copies, 3)], "the copy may still be read");
}

#[test]
fn copies_whose_end_is_unknown_outlive_the_lease_that_they_served() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let lease = try_lease(&mut core, &[(a, Exclusive)], S1, 1).unwrap().lease;
    core.note_copies(a, &[token(S2, 1)]).unwrap();
    core.note_copies(a, &[token(S2, 4)]).unwrap();
    end_used(&mut core, lease, a, 2);
    assert_eq!(core.holds(a).unwrap().uses, [token(S1, 2), token(S2, 4)]);
    core.complete_use(token(S1, 2));
    let choice = core.choose(&short(16), 1000);
    let out = choice.victims[0].moves[0].id;
    assert!(matches!(core.settle(out), Err(SettleError::StillUsed { .. })));
    core.complete_use(token(S2, 3));
    assert!(matches!(core.settle(out), Err(SettleError::StillUsed { .. })));
    core.complete_use(token(S2, 4));
    core.settle(out).unwrap();
    core.audit().unwrap();
}

// --- pins ---

#[test]
fn pins_are_counted_and_outlive_the_lease() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let reader = lease(&mut core, a, Shared, 1);
    core.pin(reader, a).unwrap();
    core.pin(reader, a).unwrap();
    end(&mut core, reader, 1);
    assert_eq!(core.unpin(a), Ok(1));
    assert_eq!(core.choose(&short(16), 2).victims, []);
    assert_eq!(core.holds(a).unwrap().to_string(), "1 pins to remove");
    assert_eq!(core.unpin(a), Ok(0));
    assert_eq!(core.unpin(a), Err(PinError::NotPinned { buffer: a }));
    assert_eq!(core.holds(a).unwrap().to_string(), "nothing holds it");
    assert_eq!(spill(&mut core, 16, 3), [piece(a, 0)]);
    let refused = core.pin(reader, a);
    assert_eq!(refused, Err(PinError::Lease(UnknownBufferLease { lease: reader })));
}

#[test]
fn what_is_pinned_leaves_less_for_leases() {
    let mut core = core();
    let (a, c) = (written(&mut core, 100, 0), add(&mut core, 100));
    let reader = lease(&mut core, a, Shared, 1);
    core.pin(reader, a).unwrap();
    end(&mut core, reader, 1);
    let refused = try_lease(&mut core, &[(c, Shared)], S1, 2).unwrap_err();
    assert!(matches!(&refused, LeaseRefused::Full { held_by, .. } if held_by.is_empty()));
    assert!(refused.to_string().contains("a pin has ended"), "{refused}");
    core.unpin(a).unwrap();
    let _granted = try_lease(&mut core, &[(c, Shared)], S1, 2).unwrap();
}

#[test]
fn a_buffer_is_pinned_under_a_lease_only() {
    let mut core = core();
    let (a, c) = (written(&mut core, 16, 0), written(&mut core, 16, 0));
    let reader = lease(&mut core, a, Shared, 0);
    let refused = core.pin(reader, c);
    assert_eq!(refused, Err(PinError::NotLeased { buffer: c }));
    end(&mut core, reader, 0);
    let refused = core.pin(reader, a);
    assert_eq!(refused, Err(PinError::Lease(UnknownBufferLease { lease: reader })));
}

#[test]
fn what_is_written_through_a_pin_is_never_clean() {
    let mut core = core();
    let a = written(&mut core, 32, 0);
    spill(&mut core, 32, 1);
    let writer = lease(&mut core, a, Exclusive, 2);
    core.pin(writer, a).unwrap();
    let nothing = LeaseEnd { uses: &[], writes: Writes::Only(&[]) };
    assert_eq!(core.end_lease(writer, &nothing, 3).unwrap().len(), 2, "who knows what it writes");
    let room = SpillRoom { host: b(100), disk: b(0), ..SpillRoom::default() };
    assert_eq!(core.clean(b(100), &with(room), 1000), [], "and it goes on writing");
    core.unpin(a).unwrap();
    let choice = core.choose(&short(32), 1000);
    assert!(choice.victims.iter().all(|victim| victim.moves[0].to == Some(SpillTier::Host)));
}

// --- groups ---

/// Pieces of 4 KiB in pages of 1 KiB, so that tenants of 512 bytes fit.
fn grouped(tenants: &[u64]) -> (Deferrables, RangeId, Vec<BufferId>) {
    let sizes = DeferConfig { piece: b(4096), page: b(1024), capacity: b(16384), ..config() };
    let mut core = Deferrables::new(sizes).unwrap();
    let group = core.add_group(b(4000), None).unwrap();
    let add = |&len: &u64| core.add_tenant(group, b(len)).unwrap().buffer;
    let all = tenants.iter().map(add).collect();
    (core, group, all)
}

fn write(core: &mut Deferrables, buffer: BufferId, now_ns: u64) {
    let lease = lease(core, buffer, Exclusive, now_ns);
    end(core, lease, now_ns);
}

#[test]
fn tenants_take_the_lowest_place_and_a_full_group_says_so() {
    let (mut core, group, all) = grouped(&[700, 100, 512]);
    let offsets: Vec<u64> =
        all.iter().map(|&buffer| core.slice(buffer).unwrap().offset.count()).collect();
    assert_eq!(offsets, [0, 1024, 1536]);
    core.remove(all[0]).unwrap();
    core.audit().unwrap();
    assert_eq!(core.add_tenant(group, b(900)).unwrap().at.offset, b(0));
    let full = core.add_tenant(group, b(3000)).unwrap_err();
    assert_eq!(full, AddError::Full { group, len: b(3000), longest: b(2048) });
    assert!(!core.remove_group(group));
    let own = core.add_buffer(b(10)).unwrap().at.range;
    assert!(matches!(core.add_tenant(own, b(1)), Err(AddError::Unknown(_))));
}

#[test]
fn tenants_leave_together_or_not_at_all() {
    let (mut core, group, all) = grouped(&[512, 512, 512]);
    all.iter().for_each(|&buffer| write(&mut core, buffer, 0));
    assert_eq!(core.occupied(), b(4096));
    let held = lease(&mut core, all[1], Shared, 1);
    let wide = SpillDemand {
        room: SpillRoom { host: b(4096), disk: b(0), ..SpillRoom::default() },
        ..short(1)
    };
    let refused = core.choose(&wide, 2);
    assert_eq!((refused.victims.len(), refused.short.unwrap().leased), (0, b(4096)));
    end(&mut core, held, 2);
    let choice = core.choose(&wide, 200);
    assert_eq!((choice.victims.len(), choice.frees), (1, b(4096)));
    assert_eq!(choice.victims[0].moves.len(), 3);
    assert_eq!(choice.victims[0].cost.dirty, b(1536));
    let outs = choice.victims[0].moves.clone();
    core.settle(outs[0].id).unwrap();
    assert_eq!(core.occupied(), b(4096), "the others are still there");
    assert_eq!(core.needed_memory(group).unwrap(), [(b(0), b(2048))]);
    core.settle(outs[1].id).unwrap();
    let last = core.settle(outs[2].id).unwrap();
    assert_eq!(last, Settled::Spilled { piece: outs[2].piece, range: group, frees: b(4096) });
    core.audit().unwrap();
}

#[test]
fn a_lease_on_one_tenant_keeps_those_that_have_not_left() {
    let (mut core, group, all) = grouped(&[512, 512, 512]);
    all.iter().for_each(|&buffer| write(&mut core, buffer, 0));
    let room = SpillRoom { host: b(4096), disk: b(0), ..SpillRoom::default() };
    let outs = core.choose(&SpillDemand { room, ..short(1) }, 1).victims[0].moves.clone();
    core.settle(outs[0].id).unwrap();
    let back = lease(&mut core, all[0], Shared, 2);
    for out in &outs[1..] {
        assert!(matches!(core.settle(out.id), Ok(Settled::Cleaned { .. })), "it frees nothing");
    }
    end(&mut core, back, 2);
    assert_eq!(core.needed_memory(group).unwrap(), [(b(0), b(2048))]);
    assert_eq!(core.census().clean, b(1536));
}

#[test]
fn one_tenant_comes_back_alone() {
    let (mut core, group, all) = grouped(&[512, 512]);
    all.iter().for_each(|&buffer| write(&mut core, buffer, 0));
    let room = SpillRoom { host: b(4096), disk: b(0), ..SpillRoom::default() };
    let choice = core.choose(&SpillDemand { room, ..short(1) }, 1);
    settle_all(&mut core, &choice);
    let granted = try_lease(&mut core, &[(all[1], Shared)], S1, 2).unwrap();
    assert_eq!(granted.restores.len(), 1);
    assert_eq!(granted.restores[0].at, RangeSlice { range: group, offset: b(512), len: b(512) });
    assert_eq!(core.needed_memory(group).unwrap(), [(b(0), b(1024))]);
    assert_eq!(core.census().committed, b(4096));
}

#[test]
fn what_a_group_needs_is_known_by_pages_whatever_the_number_of_its_buffers() {
    let piece = b(64 * 4096);
    let config = DeferConfig { piece, page: b(4096), capacity: b(1 << 30), ..config() };
    let mut core = Deferrables::new(config).unwrap();
    let group = core.add_group(piece, None).unwrap();
    let all: Vec<BufferId> =
        (0..512).map(|_| core.add_tenant(group, b(512)).unwrap().buffer).collect();
    // Every second one gets memory, then only those of the first and the fourth page keep it.
    let odd = all.iter().skip(1).step_by(2);
    odd.clone().for_each(|&buffer| write(&mut core, buffer, 0));
    assert_eq!(core.needed_memory(group).unwrap(), [(b(0), piece)]);
    for (index, &buffer) in all.iter().enumerate().filter(|(index, _)| index % 2 == 1) {
        if ![0, 3].contains(&(index / 8)) {
            core.remove(buffer).unwrap();
        }
    }
    core.audit().unwrap();
    assert_eq!(core.needed_memory(group).unwrap(), [(b(0), b(4096)), (b(3 * 4096), b(4096))]);
}

#[test]
fn a_group_counts_once_towards_what_fits() {
    let (mut core, _, all) = grouped(&[512, 512, 512]);
    core.set_capacity(b(4096));
    let set: Vec<(BufferId, Access)> = all.iter().map(|&buffer| (buffer, Exclusive)).collect();
    let granted = try_lease(&mut core, &set, S1, 0).unwrap();
    end(&mut core, granted.lease, 0);
}

#[test]
fn what_is_kept_is_sorted_and_merged() {
    let mut core = core();
    let a = written(&mut core, 90, 0);
    let range = core.slice(a).unwrap().range;
    assert_eq!(core.needed_memory(range).unwrap(), [(b(0), b(90))]);
    let choice = core.choose(&short(90), 1);
    for out in choice.victims.iter().map(|victim| &victim.moves[0]) {
        match [1, 4].contains(&out.piece.index) {
            true => assert!(core.settle(out.id).is_ok()),
            false => assert!(core.abandon(out.id).is_ok()),
        }
    }
    core.audit().unwrap();
    assert_eq!(core.needed_memory(range).unwrap(), [(b(0), b(16)), (b(32), b(32)), (b(80), b(10))]);
}
