//! How captures grow: what planning visits, and what captures cost beside many streams, many graphs and
//! many arenas. Counted in driver calls and visited blocks.

use vramp_alloc::graph::{CaptureReport, CapturedGraph, GraphArena};
use vramp_alloc::{Allocation, Bytes, Config, StreamId};
use vramp_driver::sim::{Contents, Simulator};

use crate::common::Random;
use crate::common::graph_rig::GraphRig;

const KIB: Bytes = Bytes::kib(1);

/// What planning may visit, for captures of less than 0.7 s.
const VISITS_MOST: u64 = 2_400_000;

/// A card that stores nothing: nothing is read here.
fn rig() -> GraphRig {
    GraphRig::with(Simulator::builder().contents(Contents::Discarded), Config::default())
}

/// Captures blocks of irregular sizes and lives.
fn irregular(rig: &GraphRig, arena: &GraphArena, blocks: u64, seed: u64) -> CapturedGraph {
    let allocator = &rig.base.allocator;
    let (graph, ()) = allocator
        .capture(rig.a, arena, || {
            let (mut random, mut live) = (Random(seed), Vec::new());
            for _ in 0..blocks {
                live.push(rig.malloc(Bytes::new(1 << (8 + random.below(12))), rig.a));
                if live.len() > 100 {
                    rig.free(live.swap_remove(random.below(100) as usize), rig.a);
                }
            }
            live.into_iter().for_each(|block| rig.free(block, rig.a));
        })
        .expect("the capture is not disturbed");
    graph
}

/// The same on streams that wait for each other at the begin and the end only.
fn spread(
    rig: &GraphRig,
    arena: &GraphArena,
    blocks: usize,
    streams: &[StreamId],
) -> CaptureReport {
    let main = streams[0];
    let captured = rig.base.allocator.capture(main, arena, || {
        let first = rig.malloc(KIB, main);
        rig.fill(main, &first, 1);
        streams[1..].iter().for_each(|&side| rig.order(main, side));
        let mut random = Random(1);
        let mut live: Vec<Vec<Allocation>> = streams.iter().map(|_| Vec::new()).collect();
        for at in (0..blocks).map(|block| block % streams.len()) {
            let (stream, live) = (streams[at], &mut live[at]);
            live.push(rig.malloc(Bytes::new(1 << (8 + random.below(12))), stream));
            rig.fill(stream, &live[live.len() - 1], 1);
            if live.len() > 4 {
                rig.free(live.swap_remove(random.below(4) as usize), stream);
            }
        }
        for (live, &stream) in live.into_iter().zip(streams) {
            live.into_iter().for_each(|block| rig.free(block, stream));
        }
        streams[1..].iter().for_each(|&side| rig.order(side, main));
        rig.free(first, main);
    });
    let (graph, ()) = captured.expect("the capture is not disturbed");
    *graph.report()
}

/// Plans after the first capture, nothing after the second.
fn assert_planned_once(first: &CaptureReport, second: &CaptureReport) {
    assert!(first.plan_visits > 0, "{first:?}");
    assert!(first.planned.is_some_and(|planned| planned < first.taken), "{first:?}");
    assert_eq!((second.plan_visits, second.plan_stopped), (0, false), "{second:?}");
    assert_eq!((second.planned, Some(second.taken)), (first.planned, first.planned));
}

#[test]
fn a_second_identical_capture_plans_nothing_and_one_of_another_shape_does() {
    let rig = rig();
    let arena = rig.arena();
    let captured = |seed| -> CaptureReport { *irregular(&rig, &arena, 500, seed).report() };
    let first = captured(1);
    assert_planned_once(&first, &captured(1));
    let other = captured(2);
    assert!(other.plan_visits > 0);
    assert_ne!(other.planned, first.planned);
    drop(arena);
    rig.close();
}

#[test]
fn captures_of_twenty_thousand_blocks_on_1_and_64_streams_are_planned_once() {
    let rig = rig();
    let made = (0..63).map(|_| rig.base.allocator.create_stream().expect("a stream can be made"));
    let streams: Vec<StreamId> = std::iter::once(rig.a).chain(made).collect();
    for streams in [&streams[..1], &streams] {
        let arena = rig.arena();
        let first = spread(&rig, &arena, 20_000, streams);
        assert_planned_once(&first, &spread(&rig, &arena, 20_000, streams));
        drop(arena);
    }
    rig.close();
}

#[test]
fn planning_visits_a_bounded_number_of_blocks_and_says_when_it_stopped_there() {
    let rig = rig();
    for blocks in [10, 1_000, 10_000] {
        let arena = rig.arena();
        let report = *irregular(&rig, &arena, blocks, 1).report();
        assert!(report.plan_visits <= VISITS_MOST, "{blocks}: {report:?}");
        assert!(report.planned.is_some_and(|planned| planned <= report.taken), "{report:?}");
        // Few blocks are soon close to the bound; single blocks of many can be moved without end.
        match blocks {
            10 => assert!(!report.plan_stopped, "{report:?}"),
            1_000 => assert!(report.plan_stopped, "{report:?}"),
            _ => {}
        }
        drop(arena);
    }
    rig.close();
}

/// A graph with a block that it frees and, if it `escapes`, one that stays.
fn small(rig: &GraphRig, arena: &GraphArena, escapes: bool) -> (CapturedGraph, Option<Allocation>) {
    let captured = rig.base.allocator.capture(rig.a, arena, || {
        let scratch = rig.malloc(KIB * 3, rig.a);
        rig.fill(rig.a, &scratch, 1);
        let output = escapes.then(|| rig.malloc(KIB, rig.a));
        rig.free(scratch, rig.a);
        output
    });
    captured.expect("the capture is not disturbed")
}

#[test]
fn the_last_of_many_captures_into_an_arena_makes_as_many_driver_calls_as_an_early_one() {
    for escapes in [false, true] {
        let rig = rig();
        let arena = rig.arena();
        let calls = || {
            let before = rig.base.sim.calls();
            let captured = small(&rig, &arena, escapes);
            (rig.base.sim.calls() - before, captured)
        };
        let mut graphs = Vec::new();
        let mut counts = Vec::new();
        for _ in 0..1_000 {
            let (count, captured) = calls();
            counts.push(count);
            graphs.push(captured);
        }
        // Now and then one of them backs more of the arena.
        counts[1..].sort_unstable();
        assert_eq!(counts[100], counts[900], "{counts:?}");
        assert_eq!(arena.report().blocks, if escapes { graphs.len() } else { 0 });
        // In any order.
        let mut random = Random(1);
        while !graphs.is_empty() {
            let (graph, output) = graphs.swap_remove(random.below(graphs.len() as u64) as usize);
            drop(graph);
            if let Some(output) = output {
                rig.free(output, rig.a);
            }
        }
        let (count, (graph, output)) = calls();
        assert_eq!(count, counts[100]);
        drop(graph);
        if let Some(output) = output {
            rig.free(output, rig.a);
        }
        rig.audit();
        drop(arena);
        rig.close();
    }
}

#[test]
fn a_capture_makes_no_driver_call_for_streams_that_are_not_part_of_it() {
    let counts = [0, 64].map(|others| {
        let rig = rig();
        let arena = rig.arena();
        for _ in 0..others {
            rig.base.allocator.create_stream().expect("a stream can be made");
        }
        drop(small(&rig, &arena, false));
        let before = rig.base.sim.calls();
        drop(small(&rig, &arena, false));
        let count = rig.base.sim.calls() - before;
        drop(arena);
        rig.close();
        count
    });
    assert_eq!(counts[0], counts[1]);
}

#[test]
fn memory_whose_use_was_recorded_in_a_capture_is_kept_once_for_the_graph() {
    let rig = rig();
    let arena = rig.arena();
    let blocks: Vec<Allocation> = (0..2_000).map(|_| rig.malloc(KIB, rig.b)).collect();
    let (graph, ()) = rig.capture(rig.a, &arena, || {
        for block in blocks.iter().chain(&blocks) {
            rig.base.allocator.record_use(block, rig.a).expect("the block is live");
        }
        // On a stream that is not part of the capture.
        blocks.into_iter().for_each(|block| rig.free(block, rig.b));
    });
    assert_eq!(graph.report().kept, KIB * 2_000);
    drop((graph, arena));
    rig.close();
}

#[test]
fn default_arenas_share_the_addresses_of_a_device_however_many_there_are() {
    // Seven of the default capacity fit.
    let card = Simulator::builder().contents(Contents::Discarded).address_space(Bytes::tib(4));
    let rig = GraphRig::with(card, Config::default());
    let mut held = Vec::new();
    for number in 0..300 {
        let arena = rig.arena();
        assert!(arena.report().capacity >= Bytes::gib(4), "{number}: {:?}", arena.report());
        let captured = small(&rig, &arena, true);
        held.push((arena, captured));
    }
    rig.audit();
    for (_, (graph, _)) in &held {
        drop(graph.launch(rig.a).expect("the arena is free"));
    }
    // What an arena has left is enough to capture again.
    for (arena, _) in &held {
        assert!(arena.report().capacity >= Bytes::gib(1));
        drop(irregular(&rig, arena, 200, 1));
    }
    rig.audit();
    for (arena, (graph, output)) in held {
        drop(graph);
        rig.free(output.expect("it escapes"), rig.a);
        drop(arena);
    }
    rig.base.allocator.trim(Bytes::ZERO).expect("nothing is in use");
    let arena = rig.arena();
    assert_eq!(arena.report().capacity, Bytes::gib(512));
    drop(arena);
    rig.close();
}
