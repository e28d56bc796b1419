//! Layouts: bounds, obstacles, budgets, and mistakes that the check names.

use super::*;
use crate::arena::pack::Packer;

#[test]
fn stacked_lives_pack_to_the_bound() {
    let mut arena = arena(ArenaPolicy::Reusing, Bytes::gib(1));
    let mut asks: Vec<Ask> = Vec::new();
    let depth = 40;
    // Forward: each layer keeps one block and needs a larger one for a while.
    for layer in 0..depth {
        asks.extend([Ask::Take(kib(10 + layer % 7)), Ask::Take(kib(30 + layer % 11))]);
        asks.push(Ask::Free(2 * layer as usize + 1));
    }
    // Backward: the reverse.
    for layer in (0..depth as usize).rev() {
        asks.extend([Ask::Take(kib(25)), Ask::Free(2 * layer)]);
    }
    let recording = record(&mut arena, &asks);
    let layout = pack(&recording);
    layout.check(&recording).unwrap();
    let (bound, planned) = (recording.lower_bound().count(), layout.high_water().count());
    assert!(planned * 100 <= bound * 102, "{planned} for {bound}");
    assert!(layout.high_water() <= recording.high_water());
    assert!(recording.high_water() <= recording.monotone());
}

#[test]
fn twenty_thousand_blocks_of_one_stream_are_packed_within_the_budget() {
    let mut arena = arena(ArenaPolicy::Reusing, Bytes::tib(1));
    let (mut asks, mut live) = (Vec::new(), Vec::new());
    let mut random = 1_u64;
    for block in 0..20_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let pick = random >> 40;
        asks.push(Ask::Take(Bytes::new(1 << (pick % 22))));
        live.push(block);
        if live.len() > 300 {
            asks.push(Ask::Free(live.swap_remove((pick / 32) as usize % live.len())));
        }
    }
    let recording = record(&mut arena, &asks);
    assert_eq!(recording.blocks(), 20_000);
    let mut packer = Packer::new(&recording);
    let offsets = packer.run();
    let used = pack::BUDGET - packer.visits_left();
    assert!(used < pack::BUDGET, "the budget ran out");
    let layout = Layout::of(&recording, &offsets);
    layout.check(&recording).unwrap();
    let (bound, planned) = (recording.lower_bound().count(), layout.high_water().count());
    assert!(planned * 100 <= bound * 102, "{planned} for {bound}, {used} visits");
    assert_eq!(layout, pack(&recording), "the same recording gives the same layout");
}

#[test]
fn blocks_that_were_live_before_are_packed_around() {
    let mut arena = arena(ArenaPolicy::Reusing, kib(64));
    record(&mut arena, &[Ask::Take(kib(2)), Ask::Take(kib(4)), Ask::Free(0)]);
    let recording = record(&mut arena, &[Ask::Take(kib(1)), Ask::Take(kib(3)), Ask::Take(kib(1))]);
    let layout = pack(&recording);
    layout.check(&recording).unwrap();
    assert_eq!((layout.high_water(), recording.lower_bound()), (kib(9), kib(9)));
    let [large, small] = [kib(4), kib(20)];
    let moved = recording.among([(large, kib(4)), (small, kib(1))]);
    let layout = pack(&moved);
    layout.check(&moved).unwrap();
    assert_eq!((layout.high_water(), moved.lower_bound()), (kib(21), kib(21)));
}

#[test]
fn the_check_names_what_is_wrong() {
    let mut arena = arena(ArenaPolicy::Reusing, kib(64));
    let asks = [Ask::Take(kib(1)), Ask::Take(kib(1)), Ask::Free(0), Ask::Take(kib(1))];
    let recording = record(&mut arena, &asks);
    let at = |offsets: [u64; 3]| Layout::of(&recording, &offsets.map(|offset| offset * 1024));
    assert_eq!(at([0, 1, 0]).check(&recording), Ok(()));
    let overlap = |earlier, later| Err(LayoutError::Overlap { earlier, later });
    assert_eq!(at([0, 0, 1]).check(&recording), overlap(0, 1));
    assert_eq!(at([0, 1, 1]).check(&recording), overlap(1, 2));
    let other = Layout::of(&recording, &[0]);
    let shape = LayoutError::OtherShape { planned: 1, recorded: 3 };
    assert_eq!(other.check(&recording), Err(shape));
    let blocked = recording.among([(kib(1), kib(1))]);
    let blocked_at = Layout::of(&blocked, &[0, 1024, 0]).check(&blocked);
    assert_eq!(blocked_at, Err(LayoutError::Blocked { block: 1 }));
}

#[test]
fn an_empty_recording_has_an_empty_layout() {
    let recording = record(&mut arena(ArenaPolicy::Reusing, kib(1)), &[]);
    let layout = pack(&recording);
    layout.check(&recording).unwrap();
    assert_eq!((layout.blocks(), layout.high_water()), (0, Bytes::ZERO));
}
