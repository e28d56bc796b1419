//! Streams that end, and blocks that wait for streams on which nothing happens, on paper.
//!
//! Memory whose work is over is memory of no stream and serves each, on paper.
//!
//! How much a pool grows at a time, on paper.

use vramp_core::{Bytes, Mixed, Policy, StreamId};

use crate::paper::rig::{PAGE, Rig, range};

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
