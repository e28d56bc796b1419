//! Which chunks a trim releases, on paper.
//!
//! What a request that finds no memory looks at, by the number of arenas that have some.

use std::collections::BTreeMap;

use vramp_core::{Bytes, Mixed, Policy};

use crate::paper::Paper;
use crate::paper::rig::{PAGE, Rig, range};

/// A pool with a free chunk for each length in pages, and nothing else. Their work is not over.
fn chunks(streams: usize, lengths: &[u64]) -> Rig {
    let chunks =
        Mixed { chunk_min: PAGE, chunk_usual: PAGE, chunk_max: PAGE * 8, ..Mixed::default() };
    let whole = Mixed { chunks_per_request: 1, slack_per_mille: 0, ..chunks };
    let policy = Policy::Mixed(Mixed { heap_limit: Bytes::ZERO, ..whole });
    let mut rig = Rig::with(policy, streams, None);
    let blocks: Vec<_> = lengths.iter().map(|&pages| rig.malloc(pages, 0)).collect();
    for (life, block) in (1..).zip(blocks) {
        rig.shell.paper.touch(rig.streams[0], life, range(block));
        rig.free(block, 0);
    }
    rig
}

/// What is left, in pages, after a trim to so many.
fn trimmed(rig: &mut Rig, to: u64) -> u64 {
    rig.shell.trim(PAGE * to);
    rig.shell.pool.audit().expect("a trim keeps every invariant");
    let reserved = rig.shell.pool.census().reserved;
    assert_eq!(reserved.count(), rig.shell.paper.chunk_bytes());
    reserved.count() / PAGE.count()
}

/// Records an event behind all work, and lets that end.
fn finish(rig: &mut Rig) {
    assert!(rig.shell.record_freed());
    (0..rig.streams.len()).for_each(|stream| rig.finish(stream));
}

#[test]
fn the_longest_chunks_that_are_not_longer_than_the_excess_go() {
    for to in 0..=16 {
        let mut rig = chunks(1, &[8, 4, 2, 1]);
        finish(&mut rig);
        let before = rig.shell.pool.counters().chunks_released;
        assert_eq!(trimmed(&mut rig, to), to.min(15), "to {to}");
        let released = rig.shell.pool.counters().chunks_released - before;
        assert_eq!(released, u64::from(15_u64.saturating_sub(to).count_ones()), "to {to}");
    }
}

#[test]
fn where_every_chunk_is_longer_the_shortest_goes() {
    for lengths in [[8, 4], [4, 8]] {
        let mut rig = chunks(1, &lengths);
        finish(&mut rig);
        assert_eq!(trimmed(&mut rig, 11), 8, "{lengths:?}");
    }
    let mut rig = chunks(1, &[4, 4, 8]);
    finish(&mut rig);
    assert_eq!(trimmed(&mut rig, 13), 12);
}

#[test]
fn chunks_whose_work_is_not_over_stay() {
    let mut rig = chunks(1, &[8, 4, 2]);
    assert_eq!(trimmed(&mut rig, 0), 14);
    finish(&mut rig);
    let four = rig.malloc(4, 0);
    rig.shell.paper.touch(rig.streams[0], 9, range(four));
    rig.free(four, 0);
    assert_eq!(trimmed(&mut rig, 0), 8, "four pages of that chunk are in use again");
    finish(&mut rig);
    assert_eq!(trimmed(&mut rig, 0), 0);
}

#[test]
fn memory_that_waits_for_another_stream_goes_once_that_is_over() {
    let mut rig = chunks(2, &[]);
    let block = rig.malloc(2, 0);
    rig.shell.paper.touch(rig.streams[1], 1, range(block));
    rig.shell.record_use(block, rig.streams[1]);
    rig.free(block, 0);
    assert_eq!(trimmed(&mut rig, 0), 2);
    rig.finish(0);
    assert_eq!(trimmed(&mut rig, 0), 2, "the other stream is not over");
    rig.finish(1);
    assert_eq!(trimmed(&mut rig, 0), 0);
}

#[test]
fn a_chunk_with_an_old_mapping_goes_with_it() {
    let mut rig = Rig::with(Policy::Vpmm, 1, None);
    let [two, one] = [2, 1].map(|pages| rig.malloc(pages, 0));
    rig.shell.paper.touch(rig.streams[0], 1, range(two));
    rig.free(two, 0);
    let three = rig.malloc(3, 0);
    rig.free(three, 0);
    assert_eq!(rig.shell.pool.census().retired, PAGE * 2);
    assert_eq!(trimmed(&mut rig, 0), 4, "work may use the old mappings");
    finish(&mut rig);
    assert_eq!(trimmed(&mut rig, 0), 1);
    assert_eq!(rig.shell.pool.census().retired, Bytes::ZERO);
    rig.free(one, 0);
}

/// Idle arenas of these lengths in pages. Each is made of eight chunks, and lends them.
fn lenders(lengths: &[u64]) -> Rig {
    let mut rig = chunks(1, &[]);
    for (which, &pages) in lengths.iter().enumerate() {
        rig.shell.add_arena(PAGE * pages);
        assert!(rig.shell.back(which, PAGE * pages, rig.streams[0]));
    }
    finish(&mut rig);
    rig.shell.lend();
    assert_eq!(rig.shell.pool.census().lent, PAGE * lengths.iter().sum::<u64>());
    rig
}

#[test]
fn chunks_that_idle_arenas_lend_go_too() {
    for to in 0..=32 {
        let mut rig = lenders(&[32]);
        assert_eq!(trimmed(&mut rig, to), to / 4 * 4, "chunks of four pages, to {to}");
    }
    for lengths in [[16, 32], [32, 16]] {
        let mut rig = lenders(&lengths);
        assert_eq!(trimmed(&mut rig, 47), 46, "the shortest has two pages: {lengths:?}");
    }
}

#[test]
fn one_lent_chunk_is_released_at_a_time() {
    let rig = lenders(&[16]);
    let plan = rig.shell.pool.release_lent(rig.shell.arenas[0].id).expect("all are idle");
    assert_eq!(plan.ops.len(), 2, "an unmap and a release: {:?}", plan.ops);
}

#[test]
fn an_idle_chunk_that_fits_no_arena_is_made_anew() {
    let mut rig = chunks(1, &[8]);
    rig.shell.pool.set_limit(Some(PAGE * 8), None);
    finish(&mut rig);
    rig.shell.add_arena(PAGE * 4);
    assert!(rig.shell.back(0, PAGE * 4, rig.streams[0]));
    assert_eq!(rig.shell.pool.census().reserved, PAGE * 4);
}

/// What is looked at for an arena that is not served, for events of freed memory, and for the same arena
/// once another one lends its memory: with so many arenas backed and the pool at its limit.
fn looked_at(count: usize) -> [u64; 3] {
    let chunks =
        Mixed { chunk_min: PAGE, chunk_usual: PAGE, chunk_max: PAGE * 8, ..Mixed::default() };
    let policy = Policy::Mixed(Mixed { heap_limit: Bytes::ZERO, ..chunks });
    let mut rig = Rig::with(policy, 1, Some(count as u64));
    rig.shell.paper = Paper::new(Bytes::tib(1), false, BTreeMap::new());
    let stream = rig.streams[0];
    for which in 0..=count {
        rig.shell.add_arena(PAGE);
        rig.shell.arenas[which].live = PAGE;
        assert_eq!(rig.shell.back(which, PAGE, stream), which < count, "{which} of {count}");
    }
    let mut last = rig.shell.pool.counters().looked_at;
    let mut since = |rig: &Rig| {
        let now = rig.shell.pool.counters().looked_at;
        now - std::mem::replace(&mut last, now)
    };
    assert!(!rig.shell.back(count, PAGE, stream));
    let short = since(&rig);
    assert!(rig.shell.record_freed());
    let events = since(&rig);
    rig.shell.arenas[count / 2].live = Bytes::ZERO;
    assert!(rig.shell.back(count, PAGE, stream));
    let served = since(&rig);
    rig.shell.pool.audit().unwrap();
    [short, events, served]
}

#[test]
fn a_request_that_finds_no_memory_looks_at_as_much_with_10_000_arenas_as_with_100() {
    let few = looked_at(100);
    for count in [1_000, 10_000] {
        assert_eq!(looked_at(count), few, "{count} arenas");
    }
}
