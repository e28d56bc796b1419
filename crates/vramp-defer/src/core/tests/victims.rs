//! Which units are evicted: named cases, and a comparison with the cost of every subset.

use Access::Shared;
use proptest::prelude::*;

use super::super::spill_room::TierOrder;
use super::super::victims::Candidate;
use super::*;

// --- victims ---

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

// --- Compares what is chosen with the cost of every subset ---

/// Returns the least cost of a subset that covers the deficit.
fn least(candidates: &[Candidate], deficit: Bytes) -> Option<u128> {
    let sums = (0u32..1 << candidates.len()).filter_map(|subset| {
        let mut freed = Bytes::ZERO;
        let mut cost = 0;
        for (index, candidate) in candidates.iter().enumerate() {
            if subset & 1 << index != 0 {
                freed += candidate.frees;
                cost += u128::from(candidate.cost.cost_ns());
            }
        }
        (freed >= deficit).then_some(cost)
    });
    sums.min()
}

/// Buffers of these lengths, some clean, each last used at its own time.
fn scenario(buffers: &[(u64, bool, u64)]) -> Deferrables {
    let wide = DeferConfig { capacity: b(1000), ..config() };
    let mut core = Deferrables::new(wide).unwrap();
    for &(len, clean, last_use) in buffers {
        let buffer = written(&mut core, len, last_use);
        if clean {
            core.hint(buffer, Hint::WontNeed).unwrap();
            let room = SpillRoom { host: b(1000), disk: b(0), ..SpillRoom::default() };
            for out in core.clean(b(1000), &with(room), last_use + 50) {
                match out.piece.buffer == buffer {
                    true => assert!(core.settle(out.id).is_ok()),
                    false => assert!(core.abandon(out.id).is_ok()),
                }
            }
            core.hint(buffer, Hint::None).unwrap();
        }
    }
    core
}

fn cost_of_choice(core: &mut Deferrables, deficit: u64, now: u64) -> (Vec<Candidate>, Bytes, u128) {
    let short = short(deficit);
    let order = TierOrder::default();
    core.end_cooldowns(now);
    core.relist();
    let model = core.cost_model(&short, &order, now);
    let all = full_scan::candidates(core, &model);
    let picked = core.cover(short.deficit, &model).picked;
    let frees = picked.iter().map(|candidate| candidate.frees).sum();
    let cost = picked.iter().map(|candidate| u128::from(candidate.cost.cost_ns())).sum();
    (all, frees, cost)
}

#[test]
fn a_small_expensive_piece_is_left_out_when_a_cheap_one_covers_it_all() {
    let mut core = scenario(&[(16, false, 0), (4, false, 90), (16, true, 0)]);
    let (all, frees, cost) = cost_of_choice(&mut core, 16, 100);
    assert_eq!(frees, b(16));
    assert_eq!(Some(cost), least(&all, b(16)));
    assert_eq!(cost, 8, "a refill of 16 ns that is needed by one half");
}

fn buffers(lens: impl Strategy<Value = u64>) -> impl Strategy<Value = Vec<(u64, bool, u64)>> {
    prop::collection::vec((lens, any::<bool>(), 0u64..900), 1..10)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(60)))]

    #[test]
    fn pieces_of_one_length_are_chosen_at_the_least_cost(
        buffers in buffers(Just(16u64)),
        deficit in 1u64..120,
    ) {
        let mut core = scenario(&buffers);
        let (all, _, cost) = cost_of_choice(&mut core, deficit, 1000);
        if let Some(least) = least(&all, b(deficit)) {
            prop_assert_eq!(cost, least);
        }
    }

    #[test]
    fn pieces_of_all_lengths_cost_twice_the_least_at_most_and_overshoot_by_less_than_one(
        buffers in buffers(1u64..17),
        deficit in 1u64..120,
    ) {
        let mut core = scenario(&buffers);
        let (all, frees, cost) = cost_of_choice(&mut core, deficit, 1000);
        if let Some(least) = least(&all, b(deficit)) {
            prop_assert!(cost <= 2 * least, "{cost} against {least}");
            prop_assert!(frees >= b(deficit) && frees < b(deficit + 16));
        } else {
            prop_assert_eq!(frees, all.iter().map(|one| one.frees).sum());
        }
    }
}

/// A buffer of a crowd: its length, last use, hint, priority, and what else was done with it.
type Member = (u64, u64, u8, i32, u8);

fn member() -> impl Strategy<Value = Member> {
    (1u64..40, 0u64..900, 0u8..3, -1i32..2, 0u8..6)
}

fn add_member(core: &mut Deferrables, (len, last_use, hint, priority, state): Member, number: u64) {
    let buffer = written(core, len, last_use);
    let hint = [Hint::None, Hint::WillNeed, Hint::WontNeed][usize::from(hint)];
    match state {
        // Clean on the host, or restored just now.
        0 | 1 => {
            core.set_priority(buffer, -9).unwrap();
            spill(core, len, last_use + state_delay(state));
            let reader = lease(core, buffer, Access::Shared, last_use + state_delay(state));
            end(core, reader, last_use + state_delay(state));
        }
        2 => {
            let reader = lease(core, buffer, Access::Shared, last_use);
            end_used(core, reader, buffer, 1000 + number);
        }
        3 => {
            let reader = lease(core, buffer, Access::Shared, last_use);
            core.pin(reader, buffer).unwrap();
            end(core, reader, last_use);
        }
        _ => {}
    }
    core.set_priority(buffer, priority).unwrap();
    core.hint(buffer, hint).unwrap();
}

/// Restored at the time of its last use, or within the cooldown before the choice.
fn state_delay(state: u8) -> u64 {
    u64::from(state) * 95
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(30)))]

    #[test]
    fn buckets_choose_what_a_full_scan_chooses_however_many_are_alike(
        members in prop::collection::vec(member(), 1..60),
        rounds in prop::collection::vec((1u64..300, 0u64..400, 0u64..200), 1..6),
    ) {
        let wide = DeferConfig { capacity: b(10_000), ..config() };
        let mut core = Deferrables::new(wide).unwrap();
        (0..).zip(members).for_each(|(number, one)| add_member(&mut core, one, number));
        for (now, (deficit, host, disk)) in (995..).zip(rounds) {
            let room = SpillRoom { host: b(host + 39), disk: b(disk + 39), ..SpillRoom::default() };
            let demand = SpillDemand { room, ..short(deficit) };
            let expected = full_scan::choice(&core, &demand, now);
            let choice = core.choose(&demand, now);
            core.audit().unwrap();
            let moves = choice.victims.iter().flat_map(|victim| &victim.moves);
            prop_assert_eq!(moves.clone().map(|out| out.piece).collect::<Vec<_>>(), expected);
            for out in moves {
                core.abandon(out.id).unwrap();
            }
        }
    }

    #[test]
    fn rounded_lengths_cost_a_sixteenth_of_a_page_each_way_at_most(
        lens in prop::collection::vec((1u64..1600, 0u64..900), 1..9),
        deficit in 1u64..12_000,
    ) {
        // Pages of 1600, so that lengths are rounded to a hundred.
        let wide = DeferConfig {
            piece: b(1600), page: b(1600), capacity: b(100_000), ..config()
        };
        let mut core = Deferrables::new(wide).unwrap();
        let buffers: Vec<_> =
            lens.iter().map(|&(len, last_use)| (written(&mut core, len, last_use), len)).collect();
        let exact_ns = |buffer: BufferId, idle_ns: u64| {
            let &(_, len) = buffers.iter().find(|(id, _)| *id == buffer).unwrap();
            u128::from(len) + u128::from(len) * (1000 * 100 / (100 + u128::from(idle_ns))) / 1000
        };
        let order = TierOrder::default();
        core.relist();
        let short = short(deficit);
        let model = core.cost_model(&short, &order, 1000);
        let picked = core.cover(short.deficit, &model).picked;
        // All free the same, so the cheapest are the best, and each costs a sixteenth of a page more
        // than an unrounded one at most, twice: written back, and restored.
        let mut all: Vec<u128> = full_scan::candidates(&core, &model)
            .iter()
            .map(|one| exact_ns(one.pieces[0].buffer, one.cost.idle_ns))
            .collect();
        all.sort_unstable();
        let least: u128 = all.iter().take(picked.len()).sum();
        let cost = |one: &Candidate| exact_ns(one.pieces[0].buffer, one.cost.idle_ns);
        let cost: u128 = picked.iter().map(cost).sum();
        prop_assert!(cost <= least + 200 * picked.len() as u128, "{cost} against {least}");
    }
}

// --- reclaim ---

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
