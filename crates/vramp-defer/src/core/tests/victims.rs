use super::*;

use Access::Shared;

fn pieces(choice: &VictimChoice) -> Vec<PieceId> {
    choice.victims.iter().flat_map(|victim| &victim.moves).map(|out| out.piece).collect()
}

#[test]
fn a_spill_stops_within_one_piece_of_the_deficit() {
    let mut core = core();
    written(&mut core, 100, 0);
    let choice = core.choose(&short(33), 1);
    assert!((b(33)..b(33 + 16)).contains(&choice.frees), "{}", choice.frees);
    assert_eq!(choice.short, None);
    settle_all(&mut core, &choice);
    assert!(core.census().resident > b(0), "a buffer may be partly out");
}

#[test]
fn nothing_is_spilled_where_nothing_is_short() {
    let mut core = core();
    written(&mut core, 100, 0);
    assert_eq!(core.choose(&short(0), 1), VictimChoice::default());
}

#[test]
fn room_that_moves_under_way_will_take_is_given_to_nobody_else() {
    let mut core = core();
    for _ in 0..5 {
        written(&mut core, 16, 0);
    }
    let room = SpillRoom { host: b(32), disk: b(16), ..SpillRoom::default() };
    let first = core.choose(&SpillDemand { room, ..short(16) }, 1).victims.remove(0);
    let second = core.choose(&SpillDemand { room, ..short(16) }, 1).victims.remove(0);
    let third = core.choose(&SpillDemand { room, ..short(16) }, 1).victims.remove(0);
    let to: Vec<_> = [&first, &second, &third].iter().map(|one| one.moves[0].to).collect();
    assert_eq!(to, [Some(SpillTier::Host), Some(SpillTier::Host), Some(SpillTier::Disk)]);
    let fourth = core.choose(&SpillDemand { room, ..short(16) }, 1);
    assert_eq!(fourth.victims, [], "all of it is promised");
    assert_eq!(fourth.short.unwrap().no_room, b(32));
    assert_eq!(core.clean(b(16), &with(room), 100), []);
    // Its blocks are taken: they are not free any more, and not promised either.
    core.copy_queued(first.moves[0].id, token(S1, 1)).unwrap();
    core.audit().unwrap();
    let taken = SpillRoom { host: b(16), disk: b(16), ..SpillRoom::default() };
    assert_eq!(core.choose(&SpillDemand { room: taken, ..short(16) }, 1).victims, []);
    // Once given up, it is promised to no move.
    core.abandon(second.moves[0].id).unwrap();
    core.audit().unwrap();
    let again = core.choose(&SpillDemand { room: taken, ..short(16) }, 1).victims.remove(0);
    assert_eq!(again.moves[0].to, Some(SpillTier::Host));
}

#[test]
fn what_was_chosen_is_not_chosen_again() {
    let mut core = core();
    written(&mut core, 32, 0);
    let first = core.choose(&short(16), 1);
    let second = core.choose(&short(32), 1);
    assert_eq!((first.frees, second.frees), (b(16), b(16)));
    assert!(!pieces(&second).contains(&pieces(&first)[0]));
    let short = second.short.unwrap();
    assert_eq!((short.missing, short.moving), (b(16), b(16)));
    assert_eq!(core.choose(&super::short(1), 1).victims, []);
}

#[test]
fn a_retrieve_that_needs_memory_spills_neither_itself_nor_what_it_waits_for() {
    let mut core = core();
    let (a, c) = (written(&mut core, 64, 0), written(&mut core, 64, 0));
    let a_out = core.choose(&short(64), 1);
    assert_eq!(settle_all(&mut core, &a_out).len(), 4);
    let spilled =
        if core.needed_memory(core.slice(a).unwrap().range).unwrap().is_empty() { a } else { c };
    let other = if spilled == a { c } else { a };
    let granted = try_lease(&mut core, &[(spilled, Shared)], S1, 2).unwrap();
    assert_eq!(granted.restores.len(), 4);
    let inside = core.choose(&short(1000), 3);
    assert!(pieces(&inside).iter().all(|piece| piece.buffer == other));
    assert_eq!(inside.short.unwrap().leased, b(64));
    assert_eq!(core.choose(&short(1), 3).victims, [], "and a spill within it finds nothing more");
    core.audit().unwrap();
}

#[test]
fn leased_and_pinned_buffers_are_no_victims_and_the_shortfall_names_them() {
    let mut core = core();
    let [a, c] = [0, 1].map(|now| written(&mut core, 16, now));
    let _held = try_lease(&mut core, &[(a, Shared)], S1, 3).unwrap();
    let pinning = lease(&mut core, c, Shared, 3);
    core.pin(pinning, c).unwrap();
    end(&mut core, pinning, 3);
    let choice = core.choose(&short(16), 100);
    assert_eq!(choice.victims, []);
    let short = choice.short.unwrap();
    assert_eq!((short.leased, short.pinned), (b(16), b(16)));
    assert!(short.to_string().contains("16 B are leased, 16 B pinned"), "{short}");
    core.audit().unwrap();
}

#[test]
fn a_clean_piece_leaves_before_a_dirty_one() {
    let mut core = core();
    let clean = written(&mut core, 16, 0);
    spill(&mut core, 16, 0);
    let reader = lease(&mut core, clean, Shared, 0);
    end(&mut core, reader, 0);
    let dirty = written(&mut core, 16, 0);
    let choice = core.choose(&short(16), 100);
    assert_eq!(pieces(&choice), [piece(clean, 0)]);
    assert!(choice.victims[0].cost.to_string().starts_with("clean, nothing to write;"));
    let next = core.choose(&short(16), 100);
    assert_eq!(pieces(&next), [piece(dirty, 0)]);
    let cost = next.victims[0].cost.to_string();
    assert!(cost.starts_with("16 B to write in"), "{cost}");
}

#[test]
fn the_longest_unused_leaves_first() {
    let mut core = core();
    let all = [30, 10, 20].map(|now| written(&mut core, 16, now));
    assert_eq!(spill(&mut core, 16, 40), [piece(all[1], 0)]);
    assert_eq!(spill(&mut core, 16, 40), [piece(all[2], 0)]);
}

#[test]
fn lower_priorities_leave_first_whatever_they_cost() {
    let mut core = core();
    let old = written(&mut core, 16, 0);
    let recent = written(&mut core, 16, 90);
    core.set_priority(recent, -1).unwrap();
    let choice = core.choose(&short(32), 100);
    assert_eq!(pieces(&choice), [piece(recent, 0), piece(old, 0)]);
    assert!(choice.victims[0].cost.to_string().contains("priority -1"));
}

#[test]
fn hints_decide_until_the_next_lease() {
    let mut core = core();
    let [a, c, d] = [0, 0, 99].map(|now| written(&mut core, 16, now));
    core.hint(a, Hint::WillNeed).unwrap();
    core.hint(d, Hint::WontNeed).unwrap();
    let choice = core.choose(&short(48), 100);
    assert_eq!(pieces(&choice), [piece(d, 0), piece(c, 0), piece(a, 0)]);
    assert!(choice.victims[2].cost.to_string().ends_with("wanted soon, nothing else was left"));
    settle_all(&mut core, &choice);
    let again = lease(&mut core, d, Shared, 200);
    end(&mut core, again, 200);
    let cost = core.choose(&short(16), 250).victims[0].cost;
    assert_eq!(cost.need_per_mille, 666, "half as likely at 100 ns, this is 50 ns later");
}

#[test]
fn a_buffer_in_use_leaves_after_the_others() {
    let mut core = core();
    let used = written(&mut core, 16, 0);
    let reader = lease(&mut core, used, Shared, 0);
    end_used(&mut core, reader, used, 0);
    let idle = written(&mut core, 16, 99);
    core.set_priority(idle, 5).unwrap();
    let choice = core.choose(&short(32), 100);
    assert_eq!(pieces(&choice), [piece(idle, 0), piece(used, 0)]);
    assert!(choice.victims[1].cost.to_string().ends_with("in use, nothing idle was left"));
}

#[test]
fn what_was_retrieved_a_moment_ago_is_not_spilled_before_the_others() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    spill(&mut core, 16, 1);
    let reader = lease(&mut core, a, Shared, 50);
    end(&mut core, reader, 50);
    let dirty = written(&mut core, 16, 55);
    let choice = core.choose(&short(16), 59);
    assert_eq!(pieces(&choice), [piece(dirty, 0)], "the other is clean, but cools down");
    core.abandon(choice.victims[0].moves[0].id).unwrap();
    assert_eq!(pieces(&core.choose(&short(16), 60)), [piece(a, 0)]);
}

#[test]
fn a_full_host_sends_contents_to_the_disk_and_a_full_disk_keeps_them() {
    let mut core = core();
    let a = written(&mut core, 48, 0);
    let room = SpillRoom { host: b(16), disk: b(31), ..SpillRoom::default() };
    let choice = core.choose(&SpillDemand { room, ..short(48) }, 1);
    let to: Vec<Option<SpillTier>> =
        choice.victims.iter().map(|victim| victim.moves[0].to).collect();
    assert_eq!(to, [Some(SpillTier::Host), Some(SpillTier::Disk)]);
    let shortfall = choice.short.unwrap();
    assert_eq!((shortfall.missing, shortfall.no_room), (b(16), b(16)));
    settle_all(&mut core, &choice);
    let none = SpillDemand { room: SpillRoom::default(), ..short(16) };
    assert_eq!(core.choose(&none, 2).victims, []);
    let resident = PieceState::Resident { copies: Copies::NONE };
    assert_eq!(core.states(a).unwrap().iter().filter(|&&state| state == resident).count(), 1);
}

#[test]
fn contents_on_a_slow_disk_cost_more_than_on_the_host() {
    let mut core = core();
    let [on_host, on_disk] = [0, 0].map(|now| written(&mut core, 16, now));
    let all = core.choose(&short(32), 1);
    settle_all(&mut core, &all);
    core.hint(on_disk, Hint::None).unwrap();
    let pushes = core.reclaim_host(&HostDemand { deficit: b(32), disk_room: b(32) }).pushes;
    for push in pushes {
        match push.piece.buffer == on_disk {
            true => assert!(core.settle(push.id).is_ok()),
            false => assert!(core.abandon(push.id).is_ok()),
        }
    }
    for buffer in [on_disk, on_host] {
        let reader = lease(&mut core, buffer, Shared, 2);
        end(&mut core, reader, 2);
    }
    let unknown = SpillDemand { rates: Rates::default(), ..short(16) };
    assert_eq!(pieces(&core.choose(&unknown, 100)), [piece(on_host, 0)]);
}

#[test]
fn memory_without_contents_leaves_for_nothing() {
    let mut core = core();
    written(&mut core, 16, 0);
    let empty = add(&mut core, 16);
    let looked = lease(&mut core, empty, Shared, 90);
    end(&mut core, looked, 90);
    let choice = core.choose(&SpillDemand { room: SpillRoom::default(), ..short(16) }, 91);
    assert_eq!(pieces(&choice), [piece(empty, 0)]);
    settle_all(&mut core, &choice);
    assert_eq!(core.states(empty).unwrap(), [PieceState::Empty]);
}

#[test]
fn pieces_of_any_buffers_cover_a_deficit_together() {
    let mut core = core();
    for now in 0..5 {
        written(&mut core, 16, now);
    }
    let choice = core.choose(&short(80), 10);
    assert_eq!((choice.frees, choice.victims.len()), (b(80), 5), "no hole has to be that long");
}
