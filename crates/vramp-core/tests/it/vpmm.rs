//! The policy `vpmm` against its document, on paper: which regions a malloc takes, in which order,
//! what moves and what waits.

use std::collections::BTreeMap;

use crate::paper::Paper;
use crate::paper::shell::{Placed, Shell};
use vramp_core::{Bytes, Policy, Pool, PoolConfig, Range, StreamId};

const PAGE: Bytes = Bytes::mib(2);

/// A pool of whole pages with streams on which no work ends by itself.
struct Rig {
    shell: Shell,
    streams: Vec<StreamId>,
}

/// Chunks moved, chunks created, and waits put on streams.
type Cost = (u64, u64, usize);

impl Rig {
    fn new(streams: usize, limit: Option<u64>) -> Rig {
        let span = Bytes::gib(1);
        let limit = limit.map(|pages| PAGE * pages);
        let policy = Policy::Vpmm;
        Rig::on(PoolConfig { page: PAGE, span, first_span: span, limit, policy }, streams)
    }

    fn on(config: PoolConfig, streams: usize) -> Rig {
        let mut shell = Shell {
            pool: Pool::new(config).expect("the configuration is possible"),
            heaps: Vec::new(),
            paper: Paper::new(Bytes::gib(4), false, BTreeMap::new()),
            quarantined: false,
            arenas: Vec::new(),
        };
        let streams = (0..streams).map(|_| shell.add_stream()).collect();
        Rig { shell, streams }
    }

    fn try_malloc(&mut self, pages: u64, stream: usize) -> Option<Placed> {
        let placed = self.shell.malloc(PAGE * pages, self.streams[stream]);
        self.shell.pool.audit().expect("malloc keeps every invariant");
        placed
    }

    fn malloc(&mut self, pages: u64, stream: usize) -> Placed {
        self.try_malloc(pages, stream).expect("there is memory")
    }

    /// A malloc with what it cost.
    fn costly(&mut self, pages: u64, stream: usize) -> (Placed, Cost) {
        let before = self.shell.pool.counters();
        let waits = self.waits();
        let placed = self.malloc(pages, stream);
        let after = self.shell.pool.counters();
        let moved = after.chunks_moved - before.chunks_moved;
        let created = after.chunks_created - before.chunks_created;
        (placed, (moved, created, self.waits() - waits))
    }

    fn free(&mut self, placed: Placed, stream: usize) {
        self.shell.free(placed, self.streams[stream]);
        self.shell.pool.audit().expect("free keeps every invariant");
    }

    /// Lets all work of a stream end.
    fn finish(&mut self, stream: usize) {
        self.shell.paper.queues.advance(self.streams[stream], usize::MAX);
    }

    fn waits(&self) -> usize {
        self.shell.paper.queues.waits()
    }

    fn layout(&self, newest: Option<Placed>) -> String {
        self.shell.pool.layout(newest.map(|placed| placed.block.id))
    }
}

#[test]
fn the_own_region_before_the_hole_is_used_before_those_of_other_streams() {
    let mut rig = Rig::new(2, None);
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
    let mut rig = Rig::new(2, None);
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
    let mut rig = Rig::new(3, None);
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
    let mut rig = Rig::new(3, None);
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
    let mut rig = Rig::new(2, None);
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
    let mut rig = Rig::new(2, None);
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
    let mut rig = Rig::new(1, None);
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
    let mut rig = Rig::new(1, None);
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
    let mut rig = Rig::new(1, None);
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
    let mut rig = Rig::new(2, Some(4));
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
fn another_span_is_reserved_when_no_hole_holds_the_request() {
    let mut rig = Rig::new(1, None);
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

fn range(placed: Placed) -> Range {
    Range { at: placed.block.at, len: placed.block.len }
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
