//! Compares what is chosen with the cost of every subset.

use proptest::prelude::*;

use super::super::cover::cover;
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

fn cost_of_choice(core: &Deferrables, deficit: u64, now: u64) -> (Vec<Candidate>, Bytes, u128) {
    let short = short(deficit);
    let mut all = core.candidates(&short, &TierOrder::default(), now, &mut Shortfall::default());
    all.sort_by(Candidate::before);
    let picked = cover(&all, short.deficit, short.room, &TierOrder::default()).picked;
    let frees = picked.iter().map(|&index| all[index].frees).sum();
    let cost = picked.iter().map(|&index| u128::from(all[index].cost.cost_ns())).sum();
    (all, frees, cost)
}

#[test]
fn a_small_expensive_piece_is_left_out_when_a_cheap_one_covers_it_all() {
    let core = scenario(&[(16, false, 0), (4, false, 90), (16, true, 0)]);
    let (all, frees, cost) = cost_of_choice(&core, 16, 100);
    assert_eq!(frees, b(16));
    assert_eq!(Some(cost), least(&all, b(16)));
    assert_eq!(cost, 8, "a refill of 16 ns that is needed by one half");
}

fn buffers(lens: impl Strategy<Value = u64>) -> impl Strategy<Value = Vec<(u64, bool, u64)>> {
    prop::collection::vec((lens, any::<bool>(), 0u64..900), 1..10)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn pieces_of_one_length_are_chosen_at_the_least_cost(
        buffers in buffers(Just(16u64)),
        deficit in 1u64..120,
    ) {
        let core = scenario(&buffers);
        let (all, _, cost) = cost_of_choice(&core, deficit, 1000);
        if let Some(least) = least(&all, b(deficit)) {
            prop_assert_eq!(cost, least);
        }
    }

    #[test]
    fn pieces_of_all_lengths_cost_twice_the_least_at_most_and_overshoot_by_less_than_one(
        buffers in buffers(1u64..17),
        deficit in 1u64..120,
    ) {
        let core = scenario(&buffers);
        let (all, frees, cost) = cost_of_choice(&core, deficit, 1000);
        if let Some(least) = least(&all, b(deficit)) {
            prop_assert!(cost <= 2 * least, "{cost} against {least}");
            prop_assert!(frees >= b(deficit) && frees < b(deficit + 16));
        } else {
            prop_assert_eq!(frees, all.iter().map(|one| one.frees).sum());
        }
    }
}
