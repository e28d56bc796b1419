//! Pinned memory keeps its addresses and serves blocks there, on paper.

use std::collections::BTreeMap;

use crate::paper::Paper;
use crate::paper::rig::{PAGE, Rig, range};
use vramp_core::{Bytes, Mixed, NotPoolMemory, Policy, Range};

/// A pool that makes one chunk for each request up to 8 pages, and takes nothing beyond.
fn rig(limit: Option<u64>) -> Rig {
    let chunks =
        Mixed { chunk_min: PAGE, chunk_usual: PAGE, chunk_max: PAGE * 8, ..Mixed::default() };
    let whole = Mixed { chunks_per_request: 1, slack_per_mille: 0, ..chunks };
    Rig::with(Policy::Mixed(Mixed { heap_limit: Bytes::ZERO, ..whole }), 1, limit)
}

fn finish(rig: &mut Rig) {
    rig.shell.record_freed();
    rig.finish(0);
}

#[test]
fn freed_memory_that_is_pinned_serves_the_next_block_and_survives_a_trim() {
    let mut rig = rig(None);
    let block = rig.malloc(4, 0);
    let pinned = rig.shell.pool.pin(range(block)).unwrap();
    assert_eq!(rig.shell.pool.pinned(), (1, PAGE * 4));
    rig.free(block, 0);
    finish(&mut rig);
    rig.shell.trim(Bytes::ZERO);
    assert_eq!(rig.shell.paper.chunk_bytes(), PAGE.count() * 4, "it is not released");

    let (again, cost) = rig.costly(4, 0);
    assert_eq!((again.block.at, cost), (block.block.at, (0, 0, 0)));
    rig.free(again, 0);
    rig.shell.pool.unpin(&pinned);
    finish(&mut rig);
    rig.shell.trim(Bytes::ZERO);
    assert_eq!((rig.shell.paper.chunk_bytes(), rig.shell.pool.pinned()), (0, (0, Bytes::ZERO)));
}

#[test]
fn a_pinned_chunk_is_not_moved_to_where_a_larger_block_needs_it() {
    let mut rig = rig(Some(10));
    let blocks = [4, 1, 4, 1].map(|pages| rig.malloc(pages, 0));
    let pins = [0, 2].map(|n| rig.shell.pool.pin(range(blocks[n])).unwrap());
    let there = [0, 2].map(|n| rig.shell.paper.pieces(range(blocks[n])));
    rig.free(blocks[0], 0);
    rig.free(blocks[2], 0);
    finish(&mut rig);
    assert!(rig.try_malloc(8, 0).is_none(), "the eight free pages stay where they are");
    assert_eq!([0, 2].map(|n| rig.shell.paper.pieces(range(blocks[n]))), there);

    // One half moves to the other, which stays.
    rig.shell.pool.unpin(&pins[1]);
    rig.malloc(8, 0);
    assert_eq!(rig.shell.paper.pieces(range(blocks[0])), there[0]);
}

#[test]
fn pins_are_counted() {
    let mut rig = rig(None);
    let block = rig.malloc(4, 0);
    let pins = [(); 3].map(|()| rig.shell.pool.pin(range(block)).unwrap());
    rig.free(block, 0);
    finish(&mut rig);
    for (left, pin) in [2, 1, 0].into_iter().zip(&pins) {
        rig.shell.pool.unpin(pin);
        rig.shell.trim(Bytes::ZERO);
        assert_eq!(rig.shell.paper.chunk_bytes() == 0, left == 0, "{left} pins left");
    }
}

#[test]
fn only_memory_of_the_pool_is_pinned() {
    let mut rig = rig(None);
    let block = range(rig.malloc(4, 0));
    let beyond = Range { at: block.at, len: PAGE * 5 };
    assert_eq!(rig.shell.pool.pin(beyond), Err(NotPoolMemory));
    assert_eq!(
        rig.shell.pool.pin(Range { at: block.at + PAGE * 4, len: PAGE }),
        Err(NotPoolMemory)
    );
    assert_eq!(rig.shell.pool.pinned(), (0, Bytes::ZERO));
}

/// A request looks at as much, and a pin costs as much, with 20,000 pinned chunks as with 10.
#[test]
fn pinned_chunks_cost_other_requests_nothing() {
    let looked_at = |count: usize| {
        let mut rig = rig(None);
        rig.shell.paper = Paper::new(Bytes::tib(1), false, BTreeMap::new());
        let stream = rig.streams[0];
        let malloc = |rig: &mut Rig, pages| rig.shell.malloc(PAGE * pages, stream).unwrap();
        let blocks: Vec<_> = (0..count).map(|_| malloc(&mut rig, 1)).collect();
        let pins: Vec<_> =
            blocks.iter().map(|&block| rig.shell.pool.pin(range(block)).unwrap()).collect();
        // Every second one, so that the free regions do not merge.
        for &block in blocks.iter().step_by(2) {
            rig.shell.free(block, stream);
        }
        malloc(&mut rig, 2);
        let before = rig.shell.pool.counters().looked_at;
        for pages in 2..=8 {
            let block = malloc(&mut rig, pages);
            rig.shell.free(block, stream);
        }
        let counted = rig.shell.pool.counters().looked_at - before;
        pins.iter().for_each(|pin| rig.shell.pool.unpin(pin));
        counted
    };
    let (few, many) = (looked_at(10), looked_at(20_000));
    assert!(many <= few + 16, "{few} with ten pinned chunks, {many} with 20,000");
}

/// The owner of an arena moves its contents elsewhere: a pin would find none.
#[test]
fn an_arena_refuses_pins_while_its_owner_says_so_and_unless_it_has_some() {
    let mut rig = rig(None);
    rig.shell.add_arena(PAGE * 4);
    assert!(rig.shell.back(0, PAGE * 4, rig.streams[0]));
    let arena = rig.shell.arenas[0].id;
    let pool = &mut rig.shell.pool;
    let range = pool.arena_range(arena);
    let last = Range { at: range.at + PAGE * 3, len: PAGE };
    assert!(!pool.has_pins(arena) && !pool.refuses_pins(range));
    assert!(pool.refuse_pins(arena));
    assert!(pool.refuses_pins(range) && pool.refuses_pins(last));
    assert_eq!(pool.pin(last).unwrap_err(), NotPoolMemory);
    assert_eq!(pool.pinned().0, 0);
    pool.allow_pins(arena);
    let pinned = pool.pin(last).unwrap();
    assert!(pool.has_pins(arena) && !pool.refuse_pins(arena));
    assert!(pool.pin(range).is_ok(), "nothing is refused after that");
    pool.unpin(&pinned);
}
