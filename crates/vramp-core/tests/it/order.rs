//! Which streams a request waits for where the pool cannot grow, on paper: no work ends by itself.

use crate::paper::rig::{PAGE, Rig, range};
use crate::paper::shell::Placed;
use vramp_core::{Bytes, Mixed, Policy};

/// A pool that is full with these blocks, by pages and stream, and then frees those that are not of
/// the first stream, each after a use.
fn full(streams: usize, blocks: &[(u64, usize)]) -> (Rig, Vec<Placed>) {
    let chunks =
        Mixed { chunk_min: PAGE, chunk_usual: PAGE, chunk_max: PAGE * 8, ..Mixed::default() };
    let policy = Policy::Mixed(Mixed { heap_limit: Bytes::ZERO, ..chunks });
    let limit = blocks.iter().map(|(pages, _)| pages).sum();
    let mut rig = Rig::with(policy, streams, Some(limit));
    let placed: Vec<Placed> = blocks.iter().map(|&(pages, s)| rig.malloc(pages, s)).collect();
    for (life, (&block, &(_, stream))) in (1..).zip(placed.iter().zip(blocks)) {
        if stream > 0 {
            rig.shell.paper.touch(rig.streams[stream], life, range(block));
            rig.free(block, stream);
        }
    }
    (rig, placed)
}

/// A malloc of the first stream, which uses it at once: nothing that others queued is still to come.
fn malloc(rig: &mut Rig, pages: u64) -> (Placed, (u64, u64, usize)) {
    let (placed, cost) = rig.costly(pages, 0);
    rig.shell.paper.touch(rig.streams[0], 1000 + placed.block.at.number(), range(placed));
    (placed, cost)
}

#[test]
fn the_stream_with_the_most_free_memory_is_waited_for() {
    let (mut rig, blocks) = full(4, &[(3, 1), (1, 0), (5, 2), (1, 0), (4, 3), (1, 0)]);
    let (four, cost) = malloc(&mut rig, 4);
    assert_eq!((four.block.at, cost), (blocks[2].block.at, (0, 0, 1)));
    // What is left of that stream's is the first one's now.
    let (one, cost) = malloc(&mut rig, 1);
    assert_eq!((one.block.at, cost), (blocks[2].block.at + PAGE * 4, (0, 0, 0)));
}

#[test]
fn more_than_one_stream_has_is_gathered_behind_one_wait_for_each() {
    let (mut rig, _) = full(4, &[(3, 1), (1, 0), (5, 2), (1, 0), (4, 3), (1, 0)]);
    let (_, (_, created, waits)) = malloc(&mut rig, 8);
    assert_eq!((created, waits), (0, 2), "five and four pages are enough");
    let (three, cost) = malloc(&mut rig, 3);
    assert_eq!(cost.2, 1, "the third stream's are left");
    rig.free(three, 0);
}

#[test]
fn scattered_pages_of_one_stream_move_behind_one_wait() {
    let (mut rig, _) = full(3, &[(1, 1), (1, 0), (1, 1), (1, 0), (1, 1), (1, 0), (2, 2)]);
    let (_, cost) = malloc(&mut rig, 3);
    assert_eq!((cost.1, cost.2), (0, 1));
}

#[test]
fn a_stream_that_captures_waits_for_no_other() {
    let (mut rig, _) = full(2, &[(4, 1), (1, 0)]);
    let own = rig.streams[0];
    rig.shell.pool.hold(own, true);
    assert!(rig.try_malloc(4, 0).is_none());
    assert_eq!(rig.waits(), 0);
    rig.shell.pool.hold(own, false);
    assert_eq!(malloc(&mut rig, 4).1, (0, 0, 1));
}

#[test]
fn work_of_a_stream_that_captures_is_out_of_reach_until_an_event_covers_it() {
    let (mut rig, blocks) = full(3, &[(5, 2), (1, 0), (3, 1), (1, 0)]);
    let held = rig.streams[2];
    rig.shell.pool.hold(held, true);
    let (three, cost) = malloc(&mut rig, 3);
    assert_eq!((three.block.at, cost), (blocks[2].block.at, (0, 0, 1)), "the smaller stream's");
    assert!(rig.try_malloc(3, 0).is_none());
    rig.shell.pool.hold(held, false);
    let (three, cost) = malloc(&mut rig, 3);
    assert_eq!((three.block.at, cost), (blocks[0].block.at, (0, 0, 1)));
}

#[test]
fn freed_memory_that_another_stream_still_uses_is_taken_behind_a_wait_for_that_use() {
    let (mut rig, _) = full(3, &[(1, 0)]);
    rig.shell.pool.set_limit(Some(PAGE * 6), None);
    let [two, three] = [2, 3].map(|pages| rig.malloc(pages, 0));
    for (block, user) in [(two, 1), (three, 2)] {
        rig.shell.paper.touch(rig.streams[user], 1, range(block));
        rig.shell.record_use(block, rig.streams[user]);
        rig.free(block, 0);
    }
    let (again, cost) = malloc(&mut rig, 2);
    assert_eq!((again.block.at, cost), (two.block.at, (0, 0, 1)), "the older is enough");
    let (again, cost) = malloc(&mut rig, 3);
    assert_eq!((again.block.at, cost), (three.block.at, (0, 0, 1)));
}

#[test]
fn memory_whose_work_is_over_is_found_by_an_event_that_a_miss_records() {
    let (mut rig, blocks) = full(2, &[(2, 1), (1, 0)]);
    rig.shell.pool.set_limit(None, None);
    let (_, cost) = malloc(&mut rig, 2);
    assert_eq!((cost.1 > 0, cost.2), (true, 0), "the work is not over, and growth comes first");
    rig.finish(1);
    let (two, cost) = malloc(&mut rig, 2);
    assert_eq!((two.block.at, cost), (blocks[0].block.at, (0, 0, 0)));
}

#[test]
fn a_part_of_a_chunk_is_waited_for_where_the_request_fits_into_it() {
    // Streams that share a pool begin with chunks of half the length.
    let chunk = PAGE * 16;
    let chunks =
        Mixed { chunk_min: chunk, chunk_usual: chunk, chunk_max: chunk, ..Mixed::default() };
    let policy = Policy::Mixed(Mixed { heap_limit: Bytes::ZERO, ..chunks });
    let mut rig = Rig::with(policy, 2, Some(8));
    let whole = rig.malloc(8, 0);
    rig.free(whole, 0);
    assert!(rig.shell.record_freed());
    rig.finish(0);
    let [_own, other] = [(4, 0), (4, 1)].map(|(pages, s)| rig.malloc(pages, s));
    assert_eq!(rig.shell.pool.counters().chunks_created, 1, "both lie in one chunk");
    rig.shell.paper.touch(rig.streams[1], 1, range(other));
    rig.free(other, 1);
    let (four, cost) = malloc(&mut rig, 4);
    assert_eq!((four.block.at, cost), (other.block.at, (0, 0, 1)), "nothing of it can move");
}

/// A pool of so many pages. A small block of the first stream's heap waits for a use by the second.
fn with_a_waiting_piece(pages: u64) -> Rig {
    let chunks = Mixed { chunk_min: PAGE, chunk_usual: PAGE, chunk_max: PAGE, ..Mixed::default() };
    let policy = Policy::Mixed(Mixed { heap_limit: Bytes::mib(1), ..chunks });
    let mut rig = Rig::with(policy, 3, Some(pages));
    let small = rig.shell.malloc(Bytes::mib(1), rig.streams[0]).expect("there is memory");
    rig.shell.paper.touch(rig.streams[1], 1, range(small));
    rig.shell.record_use(small, rig.streams[1]);
    rig.shell.free(small, rig.streams[0]);
    rig
}

#[test]
fn what_waits_in_heaps_is_waited_for_where_nothing_else_suffices() {
    let mut rig = with_a_waiting_piece(3);
    let (_, cost) = malloc(&mut rig, 3);
    assert_eq!(cost.2, 1, "the slab is a page of the three");
}

#[test]
fn what_waits_in_heaps_is_not_waited_for_where_other_memory_suffices() {
    let mut rig = with_a_waiting_piece(3);
    let two = rig.malloc(2, 2);
    rig.shell.paper.touch(rig.streams[2], 2, range(two));
    rig.free(two, 2);
    let (_, cost) = malloc(&mut rig, 2);
    assert_eq!(cost, (0, 0, 1), "the third stream's two pages are enough");
}

#[test]
fn what_a_stream_took_behind_a_wait_is_over_with_its_own_work() {
    let (mut rig, blocks) = full(3, &[(6, 1), (1, 0)]);
    // Epochs of the second stream are young, those of the first stream are old and over.
    rig.shell.pool.set_limit(None, None);
    for life in 50..60 {
        let one = rig.malloc(1, 0);
        rig.shell.paper.touch(rig.streams[0], life, range(one));
        rig.free(one, 0);
        assert!(rig.shell.record_freed());
        rig.finish(0);
    }
    let reserved = rig.shell.pool.census().reserved;
    rig.shell.pool.set_limit(Some(reserved), None);
    let (four, cost) = malloc(&mut rig, 4);
    assert_eq!((four.block.at, cost), (blocks[0].block.at, (0, 0, 1)));
    let (two, cost) = rig.costly(2, 2);
    assert_eq!((two.block.at, cost), (blocks[0].block.at + PAGE * 4, (0, 0, 1)));
    rig.shell.paper.touch(rig.streams[2], 100, range(two));
}
