//! Layouts: bounds, obstacles, budgets, and mistakes that the check names.

use super::*;

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

/// Blocks of irregular sizes and lives, shared out among streams that do not wait for each other.
fn irregular(arena: &mut Arena, blocks: usize, streams: usize) -> CaptureRecording {
    arena.begin().unwrap();
    let mut lines = vec![Line::default(); streams];
    let mut live = vec![Vec::new(); streams];
    let mut random = 1_u64;
    for (number, stream) in (0..blocks).map(|block| (block as u64, block % streams)) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let pick = random >> 40;
        let (line, live) = (&mut lines[stream], &mut live[stream]);
        live.push(arena.alloc(Bytes::new(1 << (pick % 22)), &line.0).unwrap().id);
        line.work(arena, number, &[]);
        if live.len() > 300 / streams {
            let id = live.swap_remove((pick / 32) as usize % live.len());
            arena.free(id, &line.0).unwrap();
        }
    }
    arena.end().unwrap()
}

#[test]
fn one_go_of_counted_visits_plans_twenty_thousand_blocks_on_any_number_of_streams() {
    for (blocks, streams) in [(4_000, 1), (4_000, 64), (20_000, 1), (20_000, 64)] {
        let mut arena = arena(ArenaPolicy::Reusing, Bytes::tib(1));
        let recording = irregular(&mut arena, blocks, streams);
        let mut packing = Packing::new(recording.clone());
        packing.go_on(Packing::VISITS_PER_GO);
        let (layout, visits) = (packing.layout(), packing.visits());
        layout.check(&recording).unwrap();
        assert!(packing.has_ended(), "{blocks} blocks, {streams} streams: {visits} visits");
        assert!(visits <= Packing::VISITS_PER_GO, "{visits}");
        assert!(layout.high_water() < recording.high_water());
        if streams == 1 {
            let (bound, planned) = (recording.lower_bound().count(), layout.high_water().count());
            assert!(planned * 100 <= bound * 110, "{planned} for {bound}, {visits} visits");
        }
        assert_eq!(layout, pack(&recording), "the same recording gives the same layout");
    }
}

#[test]
fn packing_with_any_number_of_visits_returns_a_sound_layout_no_higher_than_the_capture() {
    let mut arena = arena(ArenaPolicy::Reusing, Bytes::tib(1));
    let recording = irregular(&mut arena, 1_000, 3);
    for visits in [0, 1, 10, 1_000, 5_000, 20_000, 100_000, 400_000, 2_000_000] {
        let mut packing = Packing::new(recording.clone());
        packing.go_on(visits);
        let layout = packing.layout();
        layout.check(&recording).unwrap();
        assert_eq!(layout.high_water(), packing.high_water());
        assert!(layout.high_water() <= recording.high_water());
        // Finding the streams is not interrupted.
        assert!(packing.visits() <= visits + 10 * recording.blocks() as u64);
    }
    assert!(pack(&recording).high_water() < recording.high_water());
}

#[test]
fn packing_whose_visits_are_spent_at_any_point_continues_until_it_is_better_than_the_capture() {
    for (blocks, streams, visits) in [(6_000, 1, 1), (6_000, 1, 50_000), (6_000, 8, 50_000)] {
        let mut arena = arena(ArenaPolicy::Reusing, Bytes::tib(1));
        let recording = irregular(&mut arena, blocks, streams);
        let mut packing = Packing::new(recording.clone());
        // Whatever little it may visit at first.
        packing.go_on(visits);
        assert!(packing.is_spent() && !packing.has_ended());
        let mut goes = 0;
        while !packing.has_ended() {
            goes += 1;
            packing.go_on(50_000);
            packing.layout().check(&recording).unwrap();
            assert!(goes < 1_000, "it ends");
        }
        assert!(goes > 3, "{goes}");
        assert!(packing.high_water() < recording.high_water());
    }
}

#[test]
fn large_recordings_fill_the_gaps_between_blocks_that_were_live_before() {
    let mut arena = arena(ArenaPolicy::Reusing, Bytes::tib(1));
    let recording = irregular(&mut arena, 5_000, 1);
    let bound = recording.lower_bound();
    let layout = pack(&recording);
    // A block in the middle of where it was planned, and one at the end.
    let high = layout.high_water();
    let middle = Bytes::new(high.count() / 2).round_down(kib(1));
    let among = recording.among([(middle, kib(64)), (high - kib(64), kib(64))]);
    let layout = pack(&among);
    layout.check(&among).unwrap();
    let (bound, planned) = (bound.count(), layout.high_water().count());
    assert!(planned * 100 <= bound * 125, "{planned} for {bound}");
}

#[test]
fn a_recording_has_the_shape_of_another_if_order_and_live_memory_are_the_same_too() {
    let asks = [Ask::Take(kib(1)), Ask::Take(kib(2)), Ask::Free(0), Ask::Free(1)];
    let recorded = |asks: &[Ask]| record(&mut arena(ArenaPolicy::Reusing, kib(64)), asks);
    let first = recorded(&asks);
    assert!(first.is_same_shape(&recorded(&asks)));
    let later = [Ask::Take(kib(1)), Ask::Take(kib(2)), Ask::Free(1), Ask::Free(0)];
    assert!(!first.is_same_shape(&recorded(&later)), "the frees are in another order");
    assert!(!first.is_same_shape(&recorded(&asks[..3])), "a block outlives it");
    let longer = [Ask::Take(kib(1)), Ask::Take(kib(3)), Ask::Free(0), Ask::Free(1)];
    assert!(!first.is_same_shape(&recorded(&longer)));
    assert!(!first.is_same_shape(&first.among([(kib(8), kib(1))])));

    // Two streams, joined or not: the same blocks, freed at the same points of the program.
    let two = |joined: bool| {
        let mut arena = capturing(ArenaPolicy::Reusing, kib(64));
        let mut main = Line::default();
        main.work(&mut arena, 1, &[]);
        let mut side = main.clone();
        side.work(&mut arena, 2, &[]);
        let block = arena.alloc(kib(1), &side.0).unwrap();
        side.work(&mut arena, 3, &[]);
        arena.free(block.id, &side.0).unwrap();
        let waits = if joined { side.0.clone() } else { Vec::new() };
        main.work(&mut arena, 4, &waits);
        arena.alloc(kib(1), &main.0).unwrap();
        arena.end().unwrap()
    };
    assert!(two(true).is_same_shape(&two(true)));
    assert!(!two(true).is_same_shape(&two(false)));
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
