//! Compares what is chosen with the cost of every subset.

use proptest::prelude::*;

use super::super::spill_room::TierOrder;
use super::super::victims::Candidate;
use super::*;

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
