//! The policy `vpmm` against its document, on paper: which regions a malloc takes, in which order,
//! what moves and what waits.

use crate::paper::rig::{PAGE, Rig, range};
use vramp_core::{Bytes, Policy, PoolAddr, PoolConfig};

fn vpmm(streams: usize, limit: Option<u64>) -> Rig {
    Rig::with(Policy::Vpmm, streams, limit)
}

#[test]
fn the_own_region_before_the_hole_is_used_before_those_of_other_streams() {
    let mut rig = vpmm(2, None);
    let [first, other, last] = [(2, 0), (2, 1), (2, 0)].map(|(pages, s)| rig.malloc(pages, s));
    rig.free(other, 1);
    rig.free(first, 0);
    rig.free(last, 0);
    let (four, cost) = rig.costly(4, 0);
    assert_eq!(cost, (2, 0, 0), "the first region moves, the last one stays, nothing waits");
    assert_eq!(rig.layout(Some(four)), "[*2][-2][+4]");
}

#[test]
fn the_best_fit_of_the_own_stream_comes_first() {
    let mut rig = vpmm(2, None);
    let sizes = [(5, 0), (1, 0), (3, 0), (1, 0), (2, 1), (1, 0)];
    let [five, _a, three, _b, two, _c] = sizes.map(|(pages, s)| rig.malloc(pages, s));
    rig.free(five, 0);
    rig.free(three, 0);
    rig.free(two, 1);
    rig.finish(1);
    let (again, cost) = rig.costly(2, 0);
    assert_eq!((again.block.at, cost), (three.block.at, (0, 0, 0)));
    assert_eq!(rig.layout(Some(again)), "[-5][1][+2][-1][1][-2][1]");
}

#[test]
fn another_streams_memory_is_taken_over_once_its_work_is_complete_the_smallest_that_fits() {
    let mut rig = vpmm(3, None);
    let sizes = [(5, 1), (1, 0), (3, 1), (1, 0), (2, 1), (1, 0), (4, 2), (1, 0)];
    let [five, _a, three, _b, two, _c, four, _d] = sizes.map(|(pages, s)| rig.malloc(pages, s));
    for (block, stream) in [(five, 1), (three, 1), (two, 1), (four, 2)] {
        rig.free(block, stream);
    }
    rig.finish(2);
    let (third, cost) = rig.costly(3, 0);
    assert_eq!(third.block.at, four.block.at, "only that one's event is complete");
    assert_eq!(cost, (0, 0, 0));
    rig.free(third, 0);
    rig.finish(0);
    rig.finish(1);
    let (third, cost) = rig.costly(3, 2);
    assert_eq!(third.block.at, three.block.at, "the smallest of those that fit");
    assert_eq!(cost, (0, 0, 0));
}

#[test]
fn what_is_not_complete_is_moved_behind_one_wait_a_stream() {
    let mut rig = vpmm(3, None);
    let sizes = [(2, 1), (1, 0), (2, 1), (1, 0), (2, 2), (1, 0)];
    let [a, _x, b, _y, c, _z] = sizes.map(|(pages, s)| rig.malloc(pages, s));
    rig.free(a, 1);
    rig.free(b, 1);
    rig.free(c, 2);
    let (six, cost) = rig.costly(6, 0);
    assert_eq!(cost, (6, 0, 2), "two regions of one stream need the later event only");
    assert_eq!(rig.layout(Some(six)), "[*2][1][*2][1][*2][1][+6]");
    rig.shell.paper.touch(rig.streams[0], 1, range(six));
}

#[test]
fn regions_are_harvested_oldest_first_the_own_stream_before_others() {
    let mut rig = vpmm(2, None);
    let sizes = [(2, 0), (1, 0), (2, 1), (1, 0), (2, 0), (1, 0), (2, 1), (1, 0)];
    let [a, _w, b, _x, c, _y, d, _z] = sizes.map(|(pages, s)| rig.malloc(pages, s));
    // The younger of each stream lies before the older.
    for (block, stream) in [(d, 1), (c, 0), (b, 1), (a, 0)] {
        rig.free(block, stream);
    }
    let (three, cost) = rig.costly(3, 0);
    assert_eq!(cost, (3, 0, 0), "the own regions suffice");
    assert_eq!(rig.layout(Some(three)), "[*1][-1][1][-2][1][*2][1][-2][1][+3]");
    let (four, cost) = rig.costly(4, 0);
    assert_eq!(cost, (4, 0, 1), "the rest of the own, then the older of the other stream");
    assert_eq!(rig.layout(Some(four)), "[*2][1][*1][-1][1][*2][1][*2][1][3][+4]");
}

#[test]
fn what_a_harvest_leaves_keeps_its_stream_and_becomes_the_youngest() {
    let mut rig = vpmm(2, None);
    let sizes = [(3, 1), (1, 0), (3, 1), (1, 0), (2, 1), (1, 0)];
    let [a, _x, b, _y, c, _z] = sizes.map(|(pages, s)| rig.malloc(pages, s));
    for block in [a, b, c] {
        rig.free(block, 1);
    }
    let (four, cost) = rig.costly(4, 0);
    assert_eq!(cost, (4, 0, 1));
    assert_eq!(rig.layout(Some(four)), "[*3][1][*1][-2][1][-2][1][+4]");
    let (two, cost) = rig.costly(2, 0);
    assert_eq!(cost, (2, 0, 1), "the third region is the oldest now");
    assert_eq!(rig.layout(Some(two)), "[*3][1][*1][-2][1][*2][1][4][+2]");
    let (rest, cost) = rig.costly(2, 1);
    assert_eq!(cost, (0, 0, 0), "what is left is still the second stream's own");
    assert_eq!(rig.layout(Some(rest)), "[*3][1][*1][+2][1][*2][1][4][2]");
}

#[test]
fn the_shortfall_is_created_at_the_start_of_the_hole_and_joins_what_lies_before() {
    let mut rig = vpmm(1, None);
    let [two, _one, three] = [2, 1, 3].map(|pages| rig.malloc(pages, 0));
    rig.free(two, 0);
    rig.free(three, 0);
    let (seven, cost) = rig.costly(7, 0);
    assert_eq!(cost, (2, 2, 0), "the three pages before the hole stay");
    assert_eq!(rig.layout(Some(seven)), "[*2][1][+7]");
    assert_eq!(seven.block.at, three.block.at);
}

#[test]
fn the_smallest_hole_that_holds_the_request_is_filled() {
    let mut rig = vpmm(1, None);
    let sizes = [3, 1, 2, 1, 4, 1];
    let [three, _a, two, _b, four, _c] = sizes.map(|pages| rig.malloc(pages, 0));
    for block in [three, two, four] {
        rig.free(block, 0);
    }
    // Everything free moves away, and its old addresses become holes.
    let nine = rig.malloc(9, 0);
    rig.finish(0);
    let (pair, cost) = rig.costly(2, 0);
    assert_eq!((pair.block.at, cost), (two.block.at, (0, 2, 0)));
    let (pair, _) = rig.costly(2, 0);
    assert_eq!(pair.block.at, three.block.at, "the next larger hole");
    assert_eq!(rig.layout(Some(nine)), "[2][*1][1][2][1][*4][1][+9]");
}

#[test]
fn old_mappings_are_unmapped_by_a_malloc_after_their_work_is_complete() {
    let mut rig = vpmm(1, None);
    let [two, _one] = [2, 1].map(|pages| rig.malloc(pages, 0));
    rig.shell.paper.touch(rig.streams[0], 1, range(two));
    rig.free(two, 0);
    let three = rig.malloc(3, 0);
    assert_eq!(rig.shell.pool.census().retired, PAGE * 2);
    rig.free(three, 0);
    let three = rig.malloc(3, 0);
    assert_eq!(rig.shell.pool.census().retired, PAGE * 2, "work may still use them");
    rig.free(three, 0);
    rig.finish(0);
    rig.malloc(3, 0);
    assert_eq!(rig.shell.pool.census().retired, Bytes::ZERO);
}

#[test]
fn a_malloc_beyond_the_limit_is_a_shortage_and_one_that_reaches_it_is_not() {
    let mut rig = vpmm(2, Some(4));
    let [two, other] = [(2, 0), (2, 1)].map(|(pages, s)| rig.malloc(pages, s));
    assert!(rig.try_malloc(1, 0).is_none());
    rig.free(other, 1);
    rig.free(two, 0);
    let (four, cost) = rig.costly(4, 0);
    assert_eq!((cost.1, cost.2), (0, 1), "all that is free, one stream's behind a wait");
    rig.free(four, 0);
    assert!(rig.try_malloc(5, 0).is_none());
    assert!(rig.try_malloc(u64::MAX >> 21, 0).is_none(), "more than any span holds");
    assert_eq!(rig.shell.pool.census().reserved, PAGE * 4);
}

#[test]
fn memory_that_another_stream_used_comes_back_under_a_limit_behind_one_wait() {
    let mut rig = vpmm(2, Some(6));
    let [four, _two] = [4, 2].map(|pages| rig.malloc(pages, 0));
    rig.shell.paper.touch(rig.streams[1], 1, range(four));
    rig.shell.record_use(four, rig.streams[1]);
    rig.free(four, 0);
    let (again, cost) = rig.costly(4, 0);
    assert_eq!((again.block.at, cost), (four.block.at, (0, 0, 1)));
    rig.shell.paper.touch(rig.streams[0], 2, range(again));
}

#[test]
fn events_are_queried_for_old_mappings_and_for_memory_of_other_streams_and_never_else() {
    let mut rig = vpmm(1, None);
    let two = rig.malloc(2, 0);
    let one = rig.malloc(1, 0);
    rig.free(two, 0);
    let two = rig.malloc(2, 0);
    assert_eq!(rig.shell.polls, 0, "a hit");
    rig.free(two, 0);
    rig.malloc(3, 0);
    assert_eq!(rig.shell.polls, 0, "there is no other stream");
    rig.free(one, 0);
    rig.malloc(1, 0);
    assert_eq!(rig.shell.polls, 1, "a hit, before which an old mapping might be unmapped");
    let mut rig = vpmm(2, None);
    let two = rig.malloc(2, 1);
    rig.malloc(1, 0);
    assert_eq!(rig.shell.polls, 0, "nothing is pending");
    rig.free(two, 1);
    rig.malloc(1, 0);
    assert_eq!(rig.shell.polls, 1, "the other stream's may be over");
}

#[test]
fn no_memory_is_taken_behind_a_wait_that_a_capture_forbids() {
    // A stream that captures may not wait.
    let mut rig = vpmm(2, None);
    let two = rig.malloc(2, 1);
    rig.free(two, 1);
    let (own, other) = (rig.streams[0], rig.streams[1]);
    rig.shell.pool.hold(own, true);
    let (_, cost) = rig.costly(2, 0);
    assert_eq!(cost, (0, 2, 0), "new pages instead");
    rig.shell.pool.hold(own, false);
    let (four, cost) = rig.costly(2, 0);
    assert_eq!(cost, (2, 0, 1));
    // Nor can an event be recorded on one.
    rig.shell.pool.free(four.block.id, own).expect("it is held");
    rig.shell.pool.hold(own, true);
    let (_, cost) = rig.costly(2, 1);
    assert_eq!(cost, (0, 2, 0), "new pages instead");
    rig.shell.pool.hold(own, false);
    let (two, cost) = rig.costly(2, 1);
    assert_eq!(cost, (2, 0, 1));
    rig.shell.paper.touch(other, 1, range(two));
}

#[test]
fn a_request_that_no_span_holds_is_refused_without_a_call() {
    let mut rig = vpmm(1, None);
    let longest = PoolAddr::SPAN_LIMIT.count() / PAGE.count();
    assert!(rig.try_malloc(longest + 1, 0).is_none());
    assert!(rig.try_malloc(u64::MAX >> 21, 0).is_none());
    assert_eq!(rig.shell.paper.calls, 0);
    assert!(rig.try_malloc(longest, 0).is_none(), "the device has no such addresses");
    assert!(rig.shell.paper.calls > 0);
}

#[test]
fn the_rest_of_a_region_keeps_its_stream_though_its_work_is_over() {
    let mut rig = vpmm(1, None);
    let four = rig.malloc(4, 0);
    rig.free(four, 0);
    rig.finish(0);
    rig.shell.poll();
    rig.malloc(1, 0);
    assert_eq!(rig.shell.pool.shares()[0].free, PAGE * 3);
}

#[test]
fn another_span_is_reserved_when_no_hole_holds_the_request() {
    let mut rig = vpmm(1, None);
    let first = rig.malloc(512, 0);
    assert_eq!(rig.shell.pool.census().addresses, Bytes::gib(1));
    let second = rig.malloc(1, 0);
    assert_eq!(rig.shell.pool.census().addresses, Bytes::gib(2));
    assert_ne!(first.block.at.span(), second.block.at.span());
    rig.free(second, 0);
    let (larger, cost) = rig.costly(600, 0);
    assert_eq!(cost, (1, 599, 0), "the page moves to a span of that length");
    assert_eq!(rig.shell.pool.census().addresses, Bytes::gib(2) + PAGE * 600);
    rig.free(larger, 0);
}

#[test]
fn each_further_span_is_as_long_as_all_before_up_to_the_longest() {
    let config = PoolConfig {
        page: PAGE,
        span: PAGE * 256,
        first_span: PAGE * 32,
        limit: None,
        policy: Policy::Vpmm,
    };
    let mut rig = Rig::on(config, 1);
    let mut spans = Vec::new();
    while rig.shell.pool.census().addresses < Bytes::gib(2) {
        let before = rig.shell.pool.census().addresses;
        rig.malloc(16, 0);
        let more = rig.shell.pool.census().addresses - before;
        spans.extend((!more.is_zero()).then_some(more.count() / PAGE.count()));
    }
    assert_eq!(spans, [32, 32, 64, 128, 256, 256, 256]);
    rig.malloc(300, 0);
    assert_eq!(rig.shell.pool.census().addresses, Bytes::gib(2) + PAGE * 300, "what it needs");
}
