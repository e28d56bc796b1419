//! The monotone policy: a pointer that only goes up.

use super::*;

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
