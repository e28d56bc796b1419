//! Leases on graph arenas, and memory that idle arenas lend: who may replay when, and that nothing
//! is lost on the way out and back.

use crate::common::graphs::{LONG_NS, Stage, card, range};
use vramp_alloc::device::CaptureMode;
use vramp_alloc::graph::{ArenaConfig, CapturedGraph, GraphArena, LaunchError, Overlap};
use vramp_alloc::{Allocation, Bytes, Config};
use vramp_core::ArenaBusy;
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Kernel};

const MIB: Bytes = Bytes::mib(1);

/// A graph whose replay fills `size` bytes of its arena, copies them to a block outside, and runs
/// for a while.
fn worker(
    stage: &Stage,
    arena: &GraphArena,
    size: Bytes,
    byte: u8,
    ns: u64,
) -> (CapturedGraph, Allocation) {
    let output = stage.malloc(MIB, stage.a);
    let (graph, ()) = stage.capture(stage.a, arena, || {
        let inner = stage.malloc(size, stage.a);
        stage.fill(stage.a, &inner, byte);
        stage.launch(stage.a, Kernel::new("replay").writing(range(&inner)).lasting(ns));
        stage.copy(stage.a, &inner, &output);
        stage.free(inner, stage.a);
    });
    (graph, output)
}

// --- leases ---

#[test]
fn a_replay_beside_another_streams_is_refused() {
    let stage = Stage::new();
    let arena = stage.arena();
    let (graph, output) = worker(&stage, &arena, MIB * 8, 1, LONG_NS);
    let lease = graph.launch(stage.a).expect("nobody uses the arena");
    assert_eq!(lease.stream(), stage.a);
    let refused = graph.launch(stage.b).expect_err("the other stream holds a lease");
    let LaunchError::Busy(ArenaBusy::Held { holder, taker }) = refused else { panic!("{refused}") };
    assert_eq!((holder, taker), (stage.a, stage.b));
    drop(lease);
    let refused = graph.launch(stage.b).expect_err("the work is not over");
    let LaunchError::Busy(ArenaBusy::Unfinished { unfinished, .. }) = refused else {
        panic!("{refused}")
    };
    assert_eq!(unfinished.stream, stage.a);
    stage.sync(stage.a);
    stage.replay(&graph, stage.b);
    assert_eq!(stage.byte(&output), 1);
    stage.free(output, stage.b);
    drop((graph, arena));
    stage.close();
}

#[test]
fn a_replay_beside_another_streams_is_ordered_behind_it_where_the_arena_says_so() {
    let stage = Stage::new();
    let arena = stage.arena_of(ArenaConfig { overlap: Overlap::Order, ..ArenaConfig::default() });
    let (first, one) = worker(&stage, &arena, MIB * 8, 1, 1 << 20);
    let (second, two) = worker(&stage, &arena, MIB * 8, 2, 1 << 10);
    for _ in 0..5 {
        stage.replay(&first, stage.a);
        stage.replay(&second, stage.b);
        stage.replay(&second, stage.a);
        stage.replay(&first, stage.b);
    }
    // A lease that is held is waited for by nobody.
    let lease = first.launch(stage.a).expect("it is ordered");
    let refused = second.launch(stage.b).expect_err("nobody knows how far it has to wait");
    assert!(matches!(refused, LaunchError::Busy(ArenaBusy::Held { .. })), "{refused}");
    drop(lease);
    stage.replay(&second, stage.b);
    assert_eq!([stage.byte(&one), stage.byte(&two)], [1, 2]);
    for output in [one, two] {
        stage.rig.allocator.record_use(&output, stage.b).expect("it is ours");
        stage.free(output, stage.a);
    }
    drop((first, second, arena));
    stage.close();
}

#[test]
fn one_stream_may_hold_many_leases() {
    let stage = Stage::new();
    let arena = stage.arena();
    let (graph, output) = worker(&stage, &arena, MIB * 4, 1, 1000);
    let leases: Vec<_> =
        (0..10).map(|_| graph.launch(stage.a).expect("its own work is ordered")).collect();
    for (left, lease) in leases.into_iter().enumerate().map(|(n, lease)| (9 - n, lease)) {
        drop(lease);
        stage.sync(stage.a);
        assert_eq!(graph.launch(stage.b).is_err(), left > 0);
    }
    stage.free(output, stage.b);
    drop((graph, arena));
    stage.close();
}

#[test]
fn a_result_that_is_read_on_another_stream_keeps_replays_there_waiting() {
    let stage = Stage::new();
    let arena = stage.arena();
    let (graph, block) = stage.capture(stage.a, &arena, || {
        let block = stage.malloc(MIB * 4, stage.a);
        stage.fill(stage.a, &block, 1);
        block
    });
    stage.replay(&graph, stage.a);
    stage.order(stage.a, stage.b);
    stage.read("reader", stage.b, &block, LONG_NS);
    stage.rig.allocator.record_use(&block, stage.b).expect("it is ours");
    let refused = graph.launch(stage.a).expect_err("somebody reads the result");
    assert!(matches!(refused, LaunchError::Busy(ArenaBusy::Unfinished { .. })), "{refused}");
    stage.sync(stage.b);
    stage.replay(&graph, stage.a);
    stage.free(block, stage.a);
    drop((graph, arena));
    stage.close();
}

#[test]
fn a_launch_while_the_stream_captures_is_refused_and_spoils_nothing() {
    for mode in CaptureMode::ALL {
        let stage = Stage::new();
        let (arena, other) =
            (stage.arena(), stage.arena_of(ArenaConfig { mode, ..ArenaConfig::default() }));
        let (graph, output) = worker(&stage, &arena, MIB * 4, 1, 1000);
        let (outer, ()) = stage.capture(stage.a, &other, || {
            let refused = graph.launch(stage.a).expect_err("no lease could guard it");
            assert!(matches!(refused, LaunchError::Capturing(stream) if stream == stage.a));
            stage.order(stage.a, stage.b);
            let refused = graph.launch(stage.b).expect_err("it is drawn in");
            assert!(matches!(refused, LaunchError::Capturing(stream) if stream == stage.b));
            stage.order(stage.b, stage.a);
        });
        // On a stream outside it goes on, also of the arena that captures.
        let (again, ()) = stage.capture(stage.a, &arena, || {
            stage.replay(&graph, stage.b);
            let block = stage.malloc(MIB * 30, stage.a);
            stage.fill(stage.a, &block, 5);
            stage.free(block, stage.a);
        });
        stage.sync(stage.b);
        stage.replay(&again, stage.a);
        assert_eq!(stage.byte(&output), 1);
        stage.free(output, stage.a);
        drop((graph, outer, again, arena, other));
        stage.close();
    }
}

#[test]
fn a_lease_of_a_stream_that_ends_is_still_waited_for() {
    let stage = Stage::new();
    let arena = stage.arena();
    let (graph, output) = worker(&stage, &arena, MIB * 8, 1, LONG_NS);
    let stream = stage.rig.allocator.create_stream().expect("a stream can be made");
    let lease = graph.launch(stream).expect("nobody uses the arena");
    stage.rig.allocator.destroy_stream(stream).expect("it is open");
    drop(lease);
    let refused = graph.launch(stage.a).expect_err("the work of the stream is not over");
    assert!(matches!(refused, LaunchError::Busy(_)), "{refused}");
    stage.rig.sim.advance(LONG_NS * 2);
    stage.replay(&graph, stage.a);
    stage.free(output, stage.a);
    drop((graph, arena));
    stage.close();
}

// --- lending ---

/// A pool of 64 MiB whose arena has 48 of them; 2 MiB of results outside.
struct Lender {
    stage: Stage,
    arena: GraphArena,
    graph: CapturedGraph,
    output: Allocation,
}

fn lender(config: ArenaConfig, ns: u64) -> Lender {
    let stage = Stage::limited(MIB * 64);
    let arena = stage.arena_of(config);
    let (graph, output) = worker(&stage, &arena, MIB * 48, 7, ns);
    assert!(arena.report().backed >= MIB * 48);
    Lender { stage, arena, graph, output }
}

impl Lender {
    fn close(self) {
        let Lender { stage, arena, graph, output } = self;
        stage.free(output, stage.a);
        drop((graph, arena));
        stage.close();
    }
}

#[test]
fn a_malloc_that_needs_an_idle_arenas_memory_gets_it_and_a_replay_brings_it_back() {
    let lender = lender(ArenaConfig::default(), 1000);
    let Lender { stage, arena, graph, output } = &lender;
    for round in 0..5 {
        stage.replay(graph, stage.a);
        assert_eq!(stage.byte(output), 7);
        let stream = [stage.a, stage.b][round % 2];
        let blocks: Vec<Allocation> = (0..7).map(|_| stage.malloc(MIB * 8, stream)).collect();
        blocks.iter().for_each(|block| stage.fill(stream, block, 1));
        stage.audit();
        assert!(arena.report().backed + arena.report().lent < MIB * 48);
        blocks.into_iter().for_each(|block| stage.free(block, stream));
        let calls = stage.rig.sim.calls_of(Call::Create);
        stage.replay(graph, [stage.b, stage.a][round % 2]);
        assert_eq!(stage.byte(output), 7);
        assert!(arena.report().backed >= MIB * 48);
        assert_eq!(stage.rig.sim.calls_of(Call::Create), calls, "what left comes back");
    }
    lender.close();
}

#[test]
fn an_arena_whose_work_is_not_over_lends_nothing() {
    let lender = lender(ArenaConfig::default(), LONG_NS);
    let Lender { stage, arena, graph, .. } = &lender;
    let lease = graph.launch(stage.a).expect("nobody uses the arena");
    for held in [Some(lease), None] {
        let refused = stage.rig.allocator.malloc(MIB * 32, stage.b).expect_err("it is in use");
        assert!(refused.is_out_of_memory(), "{refused}");
        assert_eq!(arena.report().lent, Bytes::ZERO);
        stage.audit();
        drop(held);
    }
    stage.sync(stage.a);
    let block = stage.malloc(MIB * 32, stage.b);
    stage.fill(stage.b, &block, 1);
    stage.audit();
    stage.free(block, stage.b);
    lender.close();
}

#[test]
fn an_arena_that_captures_lends_nothing() {
    let stage = Stage::limited(MIB * 64);
    let arena =
        stage.arena_of(ArenaConfig { mode: CaptureMode::Relaxed, ..ArenaConfig::default() });
    let (graph, ()) = stage.capture(stage.a, &arena, || {
        let inner = stage.malloc(MIB * 48, stage.a);
        stage.fill(stage.a, &inner, 1);
        stage.free(inner, stage.a);
        let refused = stage.rig.allocator.malloc(MIB * 32, stage.b).expect_err("it captures");
        assert!(refused.is_out_of_memory(), "{refused}");
    });
    let block = stage.malloc(MIB * 32, stage.b);
    stage.free(block, stage.b);
    stage.replay(&graph, stage.a);
    drop((graph, arena));
    stage.close();
}

#[test]
fn live_blocks_of_an_idle_arena_keep_their_contents_while_the_rest_is_lent() {
    let stage = Stage::limited(MIB * 96);
    let arena = stage.arena();
    let (graph, live) = stage.capture(stage.a, &arena, || {
        let mut live = Vec::new();
        for byte in 1..=8u8 {
            let block = stage.malloc(MIB * 2, stage.a);
            stage.fill(stage.a, &block, byte);
            live.push(block);
            let between = stage.malloc(MIB * 8, stage.a);
            stage.fill(stage.a, &between, 99);
            live.push(between);
        }
        let (live, between): (Vec<_>, Vec<_>) =
            live.into_iter().partition(|block| block.len() == MIB * 2);
        between.into_iter().for_each(|block| stage.free(block, stage.a));
        live
    });
    stage.replay(&graph, stage.a);
    let places: Vec<_> = live.iter().map(range).collect();
    for _ in 0..3 {
        let pressure: Vec<Allocation> =
            (0..32).map_while(|_| stage.rig.allocator.malloc(MIB * 4, stage.b).ok()).collect();
        assert!(pressure.len() * 4 > 96 - 80, "the arena lent something");
        pressure.iter().for_each(|block| stage.fill(stage.b, block, 200));
        for (byte, block) in (1..).zip(&live) {
            assert_eq!(stage.byte(block), byte);
        }
        pressure.into_iter().for_each(|block| stage.free(block, stage.b));
        stage.replay(&graph, stage.a);
        for (byte, block) in (1..).zip(&live) {
            assert_eq!(stage.byte(block), byte);
        }
        assert_eq!(live.iter().map(range).collect::<Vec<_>>(), places);
    }
    live.into_iter().for_each(|block| stage.free(block, stage.a));
    drop((graph, arena));
    stage.close();
}

#[test]
fn memory_that_cannot_be_brought_back_is_an_error_and_nothing_is_lost() {
    let lender = lender(ArenaConfig::default(), 1000);
    let Lender { stage, arena, graph, output } = &lender;
    let live = stage.malloc(MIB * 56, stage.b);
    stage.fill(stage.b, &live, 3);
    for stream in [stage.a, stage.b, stage.a] {
        let refused = graph.launch(stream).expect_err("others have the memory");
        let LaunchError::Alloc(error) = &refused else { panic!("{refused}") };
        assert!(error.is_out_of_memory(), "{error}");
        stage.audit();
    }
    assert_eq!(stage.byte(&live), 3);
    // What did come back before it failed is lent again where somebody needs it.
    stage.free(live, stage.b);
    let all = stage.malloc(MIB * 60, stage.b);
    stage.free(all, stage.b);
    stage.replay(graph, stage.a);
    assert_eq!(stage.byte(output), 7);
    assert!(arena.report().backed >= MIB * 48);
    lender.close();
}

#[test]
fn a_replay_that_is_refused_forgets_no_work() {
    // The small graph runs; the large one of the same stream finds no memory. The arena is in use
    // all the same.
    let stage = Stage::limited(MIB * 64);
    let arena = stage.arena();
    let (small, small_output) = worker(&stage, &arena, MIB * 16, 1, LONG_NS);
    let (large, large_output) = worker(&stage, &arena, MIB * 48, 2, 1);
    let pressure = stage.malloc(MIB * 40, stage.b);
    stage.write("pressure", stage.b, &pressure, 1);
    let lease = small.launch(stage.a).expect("16 MiB are left");
    drop(lease);
    let refused = large.launch(stage.a).expect_err("48 MiB are not");
    assert!(matches!(refused, LaunchError::Alloc(_)), "{refused}");
    let more = stage.rig.allocator.malloc(MIB * 16, stage.b);
    if let Ok(more) = more {
        stage.write("thief", stage.b, &more, 1);
        stage.audit();
        stage.free(more, stage.b);
    }
    stage.audit();
    let refused = large.launch(stage.b).expect_err("the small graph runs");
    assert!(matches!(refused, LaunchError::Busy(_)), "{refused}");
    stage.sync(stage.a);
    stage.free(pressure, stage.b);
    stage.replay(&large, stage.a);
    stage.replay(&small, stage.a);
    assert_eq!([stage.byte(&small_output), stage.byte(&large_output)], [1, 2]);
    stage.free(small_output, stage.a);
    stage.free(large_output, stage.a);
    drop((small, large, arena));
    stage.close();
}

#[test]
fn a_replay_whose_order_failed_forgets_no_work() {
    for call in [Call::Wait, Call::Record, Call::Query, Call::LaunchGraph, Call::IsCapturing] {
        let stage = Stage::limited(MIB * 64);
        let arena =
            stage.arena_of(ArenaConfig { overlap: Overlap::Order, ..ArenaConfig::default() });
        let (graph, output) = worker(&stage, &arena, MIB * 48, 1, LONG_NS);
        stage.replay(&graph, stage.a);
        for stream in [stage.b, stage.a, stage.b] {
            stage.rig.sim.set_faults(FaultPlan::nth_of(call, 1).with_code(1));
            let failed = graph.launch(stream);
            stage.rig.sim.set_faults(FaultPlan::none());
            if let Err(failed) = failed {
                assert!(matches!(failed, LaunchError::Driver(_)), "{failed}");
            }
            let refused = stage.rig.allocator.malloc(MIB * 32, stage.b);
            assert!(refused.is_err(), "the first replay runs: {call:?}");
            stage.audit();
        }
        stage.sync(stage.a);
        stage.sync(stage.b);
        stage.rig.allocator.record_use(&output, stage.b).expect("it is ours");
        stage.free(output, stage.a);
        drop((graph, arena));
        stage.close();
    }
}

#[test]
fn what_a_capture_stands_on_is_not_lent_while_it_gets_its_memory() {
    // The arena lost a part of its memory; another one has some to lend. Bringing the part back
    // for a capture must not cost the rest.
    let stage = Stage::limited(MIB * 96);
    let (arena, other) = (stage.arena(), stage.arena());
    let (graph, output) = worker(&stage, &arena, MIB * 48, 1, 1);
    let pressure = stage.malloc(MIB * 64, stage.b);
    let (donor, donated) = worker(&stage, &other, MIB * 8, 2, 1);
    stage.free(pressure, stage.b);
    let held = stage.malloc(MIB * 30, stage.b);
    let (again, block) = stage.capture(stage.a, &arena, || {
        assert_eq!(arena.report().lent, Bytes::ZERO, "{:?}", arena.report());
        assert!(arena.report().backed >= MIB * 48);
        let block = stage.malloc(MIB * 48, stage.a);
        stage.fill(stage.a, &block, 4);
        block
    });
    stage.replay(&again, stage.a);
    assert_eq!(stage.byte(&block), 4);
    stage.free(block, stage.a);
    stage.free(held, stage.b);
    stage.replay(&graph, stage.a);
    stage.replay(&donor, stage.a);
    assert_eq!([stage.byte(&output), stage.byte(&donated)], [1, 2]);
    stage.free(output, stage.a);
    stage.free(donated, stage.a);
    drop((graph, again, donor, arena, other));
    stage.close();
}

#[test]
fn trimming_takes_an_idle_arenas_memory_and_a_replay_takes_it_anew() {
    let stage = Stage::with(card(), Config::default());
    let arena = stage.arena();
    let (graph, output) = worker(&stage, &arena, MIB * 48, 7, 1000);
    stage.replay(&graph, stage.a);
    let before = stage.rig.census().reserved;
    stage.sync(stage.a);
    stage.rig.allocator.trim(Bytes::ZERO).expect("no call fails");
    assert!(stage.rig.census().reserved + MIB * 40 <= before, "{}", stage.rig.census());
    stage.audit();
    stage.replay(&graph, stage.b);
    assert_eq!(stage.byte(&output), 7);
    stage.free(output, stage.a);
    drop((graph, arena));
    stage.close();
}
