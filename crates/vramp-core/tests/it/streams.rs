//! Streams that end, blocks that wait for streams on which nothing happens, and which streams a request waits for
//! where the pool cannot grow, on paper: no work ends by itself.
//!
//! Memory whose work is over is memory of no stream and serves each.
//!
//! How much a pool grows at a time.

use vramp_core::{Bytes, Mixed, Policy, StreamId};

use crate::paper::rig::{PAGE, Rig, range};
use crate::paper::shell::Placed;

fn mixed() -> Policy {
    Policy::Mixed(Mixed { heap_limit: Bytes::ZERO, ..Mixed::default() })
}

fn known(rig: &Rig) -> Vec<StreamId> {
    rig.shell.pool.streams().collect()
}

#[test]
fn a_stream_that_ended_leaves_once_its_work_is_over_and_its_memory_serves_others() {
    for policy in [mixed(), Policy::Vpmm] {
        let mut rig = Rig::with(policy, 2, None);
        let [open, ended] = [rig.streams[0], rig.streams[1]];
        let (first, late) = (rig.malloc(2, 1), rig.malloc(3, 1));
        rig.shell.paper.touch(ended, 1, range(first));
        rig.free(first, 1);
        assert!(rig.shell.end_stream(ended));
        assert_eq!(known(&rig), [open, ended], "its work may run");
        rig.finish(1);
        rig.shell.poll();
        // VPMM's regions keep their owners until other streams take them.
        let (again, (_, created, _)) = rig.costly(2, 0);
        assert_eq!((again.block.at, created), (first.block.at, 0), "{policy:?}");
        assert_eq!(known(&rig), [open], "{policy:?}");
        // A block outlives its stream, and its memory serves at once.
        rig.free(late, 1);
        let (again, cost) = rig.costly(3, 0);
        assert_eq!((again.block.at, cost), (late.block.at, (0, 0, 0)), "{policy:?}");
        assert_eq!(known(&rig), [open], "{policy:?}");
        assert!(rig.shell.pool.has_stream(ended) && !rig.shell.pool.is_open(ended));
    }
}

#[test]
fn the_only_stream_may_end_and_its_memory_serves_the_next_one() {
    let mut rig = Rig::with(mixed(), 1, None);
    let (first, late) = (rig.malloc(2, 0), rig.malloc(2, 0));
    rig.free(first, 0);
    assert!(rig.shell.end_stream(rig.streams[0]));
    rig.finish(0);
    rig.shell.poll();
    rig.free(late, 0);
    assert_eq!(known(&rig), []);
    let next = rig.shell.add_stream();
    rig.streams.push(next);
    let (_, cost) = rig.costly(4, 1);
    assert_eq!(cost, (0, 0, 0));
}

#[test]
fn a_stream_may_have_an_id_far_above_those_that_the_pool_knows() {
    let mut rig = Rig::with(mixed(), 1, None);
    let (before, after) = (StreamId::new(700), StreamId::new(1_000));
    rig.shell.pool.skip_streams(500);
    rig.shell.pool.add_stream_as(before);
    assert_eq!(known(&rig), [rig.streams[0], before]);
    let gone = rig.shell.pool.now(StreamId::new(123));
    assert!(rig.shell.pool.is_over(gone), "it ended before the pool heard of it");
    assert!(!rig.shell.pool.has_stream(after));
    rig.shell.pool.audit().expect("every invariant holds");
}

#[test]
fn blocks_that_wait_for_a_quiet_stream_serve_again() {
    for policy in [mixed(), Policy::Vpmm] {
        let mut rig = Rig::with(policy, 2, None);
        for round in 0..200 {
            let block = rig.malloc(4, 0);
            rig.shell.record_use(block, rig.streams[1]);
            rig.free(block, 0);
            rig.finish(0);
            rig.finish(1);
            let reserved = rig.shell.pool.counters().reserved;
            // One in use, and those that wait for an event and for its record.
            assert!(reserved <= PAGE * 12, "{policy:?}, round {round}: {reserved}");
        }
    }
}

fn rig(streams: usize) -> Rig {
    let chunks =
        Mixed { chunk_min: PAGE, chunk_usual: PAGE, chunk_max: PAGE * 8, ..Mixed::default() };
    Rig::with(Policy::Mixed(Mixed { heap_limit: Bytes::ZERO, ..chunks }), streams, None)
}

#[test]
fn new_memory_serves_every_stream_whichever_it_was_made_for() {
    let mut rig = rig(2);
    rig.shell.prefill(PAGE * 4, rig.streams[0]);
    let (four, cost) = rig.costly(4, 1);
    assert_eq!((cost, rig.shell.pool.counters().misses), ((0, 0, 0), 0), "a hit");
    rig.shell.paper.touch(rig.streams[1], 1, range(four));
}

#[test]
fn what_was_freed_before_there_was_a_second_stream_serves_that_once_its_work_is_over() {
    for over in [true, false] {
        let mut rig = rig(1);
        let two = rig.malloc(2, 0);
        rig.shell.paper.touch(rig.streams[0], 1, range(two));
        rig.free(two, 0);
        assert!(rig.shell.record_freed());
        if over {
            rig.finish(0);
        }
        let second = rig.shell.add_stream();
        rig.streams.push(second);
        let (again, cost) = rig.costly(2, 1);
        assert_eq!((again.block.at == two.block.at, cost.1 == 0), (over, over), "{cost:?}");
        rig.shell.paper.touch(second, 2, range(again));
    }
}

#[test]
fn of_neighbours_those_whose_work_is_over_serve_others_and_the_rest_does_not() {
    // The blocks are freed in this order, an event behind each; the work before two of them is over.
    for order in [[0, 1, 2], [2, 1, 0], [0, 2, 1]] {
        let mut rig = rig(2);
        let blocks = [0; 3].map(|_| rig.malloc(2, 0));
        rig.malloc(1, 0);
        for (life, which) in (1..).zip(order) {
            rig.shell.paper.touch(rig.streams[0], life, range(blocks[which]));
            rig.free(blocks[which], 0);
            assert!(rig.shell.record_freed());
        }
        let reserved = rig.shell.pool.census().reserved;
        rig.shell.pool.set_limit(Some(reserved), None);
        rig.shell.paper.queues.advance(rig.streams[0], 4);
        rig.shell.poll();
        for (number, pending) in [false, false, true].into_iter().enumerate() {
            let (two, cost) = rig.costly(2, 1);
            assert_eq!(cost, (0, 0, usize::from(pending)), "{order:?}: {number}");
            assert_eq!(two.block.at == blocks[order[2]].block.at, pending, "{order:?}: {number}");
            rig.shell.paper.touch(rig.streams[1], 9, range(two));
        }
    }
}

/// Requests of a page each.
const REQUESTS: u64 = 1024;

fn grown(growth_min: Bytes, slack_per_mille: u64, limit: Option<u64>) -> (u64, Bytes) {
    let mixed = Mixed { growth_min, slack_per_mille, ..Mixed::default() };
    let mut rig = Rig::with(Policy::Mixed(mixed), 1, limit);
    for request in 0..REQUESTS {
        rig.malloc(1, 0);
        let reserved = rig.shell.pool.census().reserved;
        let most = PAGE * (request + 1) * (1000 + slack_per_mille);
        assert!(reserved * 1000 <= most, "{reserved} for {} pages", request + 1);
    }
    rig.shell.pool.audit().expect("growth keeps every invariant");
    (rig.shell.pool.counters().chunks_created, rig.shell.pool.census().reserved)
}

#[test]
fn requests_of_a_page_share_chunks_where_growth_has_a_least_amount() {
    assert_eq!(grown(Bytes::ZERO, 40, None).0, REQUESTS);
    // One for each slack until that is as long as the least growth.
    let (chunks, _) = grown(PAGE * 16, 40, None);
    assert!(chunks < 256, "{chunks} chunks");
    // Without slack it grows by what is needed.
    assert_eq!(grown(PAGE * 16, 0, None).0, REQUESTS);
}

#[test]
fn growth_ahead_of_need_stays_below_the_limit() {
    let (_, reserved) = grown(PAGE * 16, 300, Some(REQUESTS));
    assert_eq!(reserved, PAGE * REQUESTS);
}

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
