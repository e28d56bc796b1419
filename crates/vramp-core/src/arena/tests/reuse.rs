//! Reuse inside a capture, where the order proves it.
//!
//! The monotone policy: a pointer that only goes up.

use super::*;

fn taken(arena: &mut Arena, line: &Line) -> Bytes {
    let block = arena.alloc(kib(1), &line.0).unwrap();
    arena.audit().unwrap();
    block.offset
}

#[test]
fn one_stream_uses_freed_memory_at_once() {
    let mut arena = capturing(ArenaPolicy::Reusing, kib(8));
    let mut main = Line::default();
    let block = arena.alloc(kib(1), &main.0).unwrap();
    main.work(&mut arena, 1, &[]);
    arena.free(block.id, &main.0).unwrap();
    assert_eq!(taken(&mut arena, &main), Bytes::ZERO);
}

#[test]
fn two_branches_share_nothing_until_they_join() {
    let mut arena = capturing(ArenaPolicy::Reusing, kib(8));
    let mut main = Line::default();
    main.work(&mut arena, 1, &[]);
    let mut side = main.clone();
    let block = arena.alloc(kib(1), &side.0).unwrap();
    side.work(&mut arena, 2, &[]);
    arena.free(block.id, &side.0).unwrap();
    main.work(&mut arena, 3, &[]);
    assert_eq!(taken(&mut arena, &main), kib(1), "no dependency orders the branches");
    let wait = side.0.clone();
    // A wait alone, before any node is captured behind it, orders the next block too.
    let joined = Line([main.0.clone(), wait.clone()].concat());
    assert_eq!(taken(&mut arena, &joined), Bytes::ZERO);
    main.work(&mut arena, 4, &wait);
    assert!(arena.has_node(NodeId(4)));
    assert_eq!(taken(&mut arena, &main), kib(2));
}

#[test]
fn a_use_on_another_stream_holds_the_memory_until_it_is_ordered() {
    let mut arena = capturing(ArenaPolicy::Reusing, kib(8));
    let mut main = Line::default();
    let block = arena.alloc(kib(1), &main.0).unwrap();
    main.work(&mut arena, 1, &[]);
    let mut side = main.clone();
    side.work(&mut arena, 2, &[]);
    arena.record_use(block.id, &side.0).unwrap();
    arena.free(block.id, &main.0).unwrap();
    assert_eq!(taken(&mut arena, &main), kib(1));
    side.work(&mut arena, 3, &[]);
    main.work(&mut arena, 4, &side.0);
    assert_eq!(taken(&mut arena, &main), Bytes::ZERO);
}

#[test]
fn pieces_of_several_frontiers_serve_one_block_where_all_are_covered() {
    let mut arena = capturing(ArenaPolicy::Reusing, kib(2));
    let mut main = Line::default();
    main.work(&mut arena, 1, &[]);
    let mut side = main.clone();
    let [left, right] = [&main, &side].map(|line| arena.alloc(kib(1), &line.0).unwrap().id);
    main.work(&mut arena, 2, &[]);
    side.work(&mut arena, 3, &[]);
    arena.free(left, &main.0).unwrap();
    arena.free(right, &side.0).unwrap();
    assert!(arena.alloc(kib(2), &main.0).is_err());
    main.work(&mut arena, 4, &side.0);
    assert_eq!(arena.alloc(kib(2), &main.0).unwrap().offset, Bytes::ZERO);
}

#[test]
fn a_planned_capture_goes_where_the_plan_says() {
    let asks = [
        Ask::Take(kib(1)),
        Ask::Take(kib(2)),
        Ask::Free(0),
        Ask::Take(kib(3)),
        Ask::Free(2),
        Ask::Free(1),
    ];
    let mut arena = arena(ArenaPolicy::Reusing, kib(64));
    let recording = record(&mut arena, &asks);
    assert_eq!((recording.lower_bound(), recording.high_water()), (kib(5), kib(6)));
    assert_eq!(recording.monotone(), kib(6));
    let layout = pack(&recording);
    layout.check(&recording).unwrap();
    assert_eq!(layout.high_water(), kib(5));
    arena.set_plan(Some(layout));
    assert_eq!(record(&mut arena, &asks).high_water(), kib(5));
}

#[test]
fn a_capture_of_another_shape_leaves_the_plan_and_stays_safe() {
    let asks = [Ask::Take(kib(1)), Ask::Take(kib(2)), Ask::Free(0), Ask::Take(kib(3))];
    let mut arena = arena(ArenaPolicy::Reusing, kib(64));
    let layout = pack(&record(&mut arena, &asks));
    for held in arena.live_ranges().collect::<Vec<_>>() {
        assert!(held.1 >= kib(2));
    }
    arena.set_plan(Some(layout));
    arena.begin().unwrap();
    assert!(arena.follows_plan());
    arena.alloc(kib(1), &[]).unwrap();
    arena.alloc(kib(1), &[]).unwrap();
    assert!(!arena.follows_plan());
    arena.alloc(kib(3), &[]).unwrap();
    arena.audit().unwrap();
}

#[test]
fn a_planned_place_that_is_not_free_is_left_for_one_block_only() {
    let asks = [Ask::Take(kib(1)), Ask::Free(0), Ask::Take(kib(1)), Ask::Take(kib(2))];
    let mut arena = arena(ArenaPolicy::Reusing, kib(64));
    let recording = record(&mut arena, &asks);
    let layout = pack(&recording);
    let mut fresh = Arena::new(ArenaId::new(1), ArenaPolicy::Reusing, kib(64));
    fresh.set_plan(Some(layout));
    fresh.begin().unwrap();
    // The first block is not freed this time, so the second cannot have its place.
    let mut line = Line::default();
    let places = [1, 1, 2].map(|len| {
        let offset = fresh.alloc(kib(len), &line.0).unwrap().offset;
        line.work(&mut fresh, len + offset.count(), &[]);
        offset
    });
    fresh.audit().unwrap();
    assert!(fresh.follows_plan(), "{places:?}");
    assert_eq!(fresh.high_water(), kib(4));
}

fn monotone(capacity: u64) -> Arena {
    capturing(ArenaPolicy::Monotone, Bytes::new(capacity))
}

fn take(arena: &mut Arena, len: u64) -> ArenaBlock {
    let block = arena.alloc(Bytes::new(len), &[]).unwrap();
    arena.audit().unwrap();
    block
}

#[test]
fn blocks_lie_one_behind_the_other_in_steps_of_256_bytes() {
    let mut arena = monotone(4096);
    let lens = [100, 512, 1, 0, 257].map(|len| take(&mut arena, len));
    let starts = lens.map(|block| block.offset.count());
    assert_eq!(starts, [0, 256, 768, 1024, 1280]);
    assert_eq!(lens[4].len, Bytes::new(512));
    assert_eq!(arena.high_water(), Bytes::new(1792));
    assert_eq!(arena.live(), Bytes::new(870));
}

#[test]
fn a_free_never_moves_the_pointer_back_whether_of_the_last_block_or_an_older_one() {
    let mut arena = monotone(4096);
    let (older, last) = (take(&mut arena, 100), take(&mut arena, 512));
    arena.free(last.id, &[]).unwrap();
    assert_eq!(arena.high_water(), Bytes::new(768));
    let third = take(&mut arena, 256);
    assert_eq!(third.offset, Bytes::new(768));
    arena.free(older.id, &[]).unwrap();
    arena.free(third.id, &[]).unwrap();
    arena.audit().unwrap();
    assert_eq!(arena.high_water(), Bytes::new(1024));
    assert_eq!((arena.census().blocks, arena.live()), (0, Bytes::ZERO));
}

#[test]
fn a_full_arena_says_how_much_of_what() {
    let mut arena = monotone(4096);
    let first = take(&mut arena, 1000);
    let _rest = take(&mut arena, 3072);
    arena.free(first.id, &[]).unwrap();
    let full = ArenaFull {
        arena: ArenaId::new(7),
        requested: Bytes::new(1),
        capacity: kib(4),
        high_water: kib(4),
        live: kib(3),
        largest_free: Bytes::ZERO,
    };
    assert_eq!(arena.alloc(Bytes::new(1), &[]), Err(ArenaAllocError::Full(full)));
    let huge = arena.alloc(Bytes::new(u64::MAX), &[]);
    assert!(matches!(huge, Err(ArenaAllocError::Full(_))), "{huge:?}");
    arena.audit().unwrap();
}

#[test]
fn the_pointer_goes_on_across_captures_until_a_reset() {
    let mut arena = monotone(4096);
    let first = take(&mut arena, 256);
    arena.free(first.id, &[]).unwrap();
    arena.end().unwrap();
    arena.begin().unwrap();
    let second = take(&mut arena, 256);
    assert_eq!(second.offset, Bytes::new(256));
    assert_eq!(arena.reset(), Err(ArenaResetError::Capturing(ArenaId::new(7))));
    arena.end().unwrap();
    let live = ArenaResetError::Live { arena: ArenaId::new(7), blocks: 1, live: Bytes::new(256) };
    assert_eq!(arena.reset(), Err(live));
    arena.free_outside(second.id).unwrap();
    arena.reset().unwrap();
    assert_eq!(arena.high_water(), Bytes::ZERO);
    arena.begin().unwrap();
    assert_eq!(take(&mut arena, 256).offset, Bytes::ZERO);
}

#[test]
fn a_capacity_is_rounded_down_to_256_bytes() {
    let mut arena = monotone(600);
    assert_eq!(arena.capacity(), Bytes::new(512));
    take(&mut arena, 512);
    assert!(arena.alloc(Bytes::new(1), &[]).is_err());
}
