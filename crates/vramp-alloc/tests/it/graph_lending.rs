//! Leases on graph arenas, and memory that idle arenas lend: who may replay when, and that nothing
//! is lost on the way out and back.

use crate::common::graph_rig::{GraphRig, LONG_NS, card, range};
use vramp_alloc::device::CaptureMode;
use vramp_alloc::graph::{ArenaConfig, CapturedGraph, GraphArena, LaunchError, Overlap};
use vramp_alloc::{Allocation, Bytes, Config, StreamId};
use vramp_core::ArenaBusy;
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Gate, Kernel};

const MIB: Bytes = Bytes::mib(1);

/// A graph whose replay fills `size` bytes of its arena, copies them to a block outside, and runs
/// for a while.
fn worker(
    rig: &GraphRig,
    arena: &GraphArena,
    size: Bytes,
    byte: u8,
    ns: u64,
) -> (CapturedGraph, Allocation) {
    let output = rig.malloc(MIB, rig.a);
    let (graph, ()) = rig.capture(rig.a, arena, || {
        let inner = rig.malloc(size, rig.a);
        rig.fill(rig.a, &inner, byte);
        rig.launch(rig.a, Kernel::new("replay").writing(range(&inner)).lasting(ns));
        rig.copy(rig.a, &inner, &output);
        rig.free(inner, rig.a);
    });
    (graph, output)
}

/// Keeps a stream at work until the gate is opened: no request can wait for it.
fn keep_busy(rig: &GraphRig, stream: StreamId) -> Gate {
    let gate = rig.base.sim.gate();
    rig.launch(stream, Kernel::new("busy").until(gate));
    gate
}

// --- leases ---

#[test]
fn a_replay_beside_another_streams_is_refused() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (graph, output) = worker(&rig, &arena, MIB * 8, 1, LONG_NS);
    let lease = graph.launch(rig.a).expect("no stream uses the arena");
    assert_eq!(lease.stream(), rig.a);
    let refused = graph.launch(rig.b).expect_err("the other stream holds a lease");
    let LaunchError::Busy(ArenaBusy::Held { holder, taker }) = refused else { panic!("{refused}") };
    assert_eq!((holder, taker), (rig.a, rig.b));
    drop(lease);
    let refused = graph.launch(rig.b).expect_err("the work is not over");
    let LaunchError::Busy(ArenaBusy::Unfinished { unfinished, .. }) = refused else {
        panic!("{refused}")
    };
    assert_eq!(unfinished.stream, rig.a);
    rig.sync(rig.a);
    rig.replay(&graph, rig.b);
    assert_eq!(rig.byte(&output), 1);
    rig.free(output, rig.b);
    drop((graph, arena));
    rig.close();
}

#[test]
fn a_replay_beside_another_streams_is_ordered_behind_it_where_the_arena_says_so() {
    let rig = GraphRig::new();
    let arena = rig.arena_of(ArenaConfig { overlap: Overlap::Order, ..ArenaConfig::default() });
    let (first, one) = worker(&rig, &arena, MIB * 8, 1, 1 << 20);
    let (second, two) = worker(&rig, &arena, MIB * 8, 2, 1 << 10);
    for _ in 0..5 {
        rig.replay(&first, rig.a);
        rig.replay(&second, rig.b);
        rig.replay(&second, rig.a);
        rig.replay(&first, rig.b);
    }
    // No stream can wait for a lease that is held.
    let lease = first.launch(rig.a).expect("it is ordered");
    let refused = second.launch(rig.b).expect_err("the end of the lease is unknown");
    assert!(matches!(refused, LaunchError::Busy(ArenaBusy::Held { .. })), "{refused}");
    drop(lease);
    rig.replay(&second, rig.b);
    assert_eq!([rig.byte(&one), rig.byte(&two)], [1, 2]);
    for output in [one, two] {
        rig.base.allocator.record_use(&output, rig.b).expect("it is ours");
        rig.free(output, rig.a);
    }
    drop((first, second, arena));
    rig.close();
}

#[test]
fn one_stream_may_hold_many_leases() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (graph, output) = worker(&rig, &arena, MIB * 4, 1, 1000);
    let leases: Vec<_> =
        (0..10).map(|_| graph.launch(rig.a).expect("its own work is ordered")).collect();
    for (left, lease) in leases.into_iter().enumerate().map(|(n, lease)| (9 - n, lease)) {
        drop(lease);
        rig.sync(rig.a);
        assert_eq!(graph.launch(rig.b).is_err(), left > 0);
    }
    rig.free(output, rig.b);
    drop((graph, arena));
    rig.close();
}

#[test]
fn a_result_that_is_read_on_another_stream_keeps_replays_there_waiting() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (graph, block) = rig.capture(rig.a, &arena, || {
        let block = rig.malloc(MIB * 4, rig.a);
        rig.fill(rig.a, &block, 1);
        block
    });
    rig.replay(&graph, rig.a);
    rig.order(rig.a, rig.b);
    rig.read("reader", rig.b, &block, LONG_NS);
    rig.base.allocator.record_use(&block, rig.b).expect("it is ours");
    let refused = graph.launch(rig.a).expect_err("a lease guards the result");
    assert!(matches!(refused, LaunchError::Busy(ArenaBusy::Unfinished { .. })), "{refused}");
    rig.sync(rig.b);
    rig.replay(&graph, rig.a);
    rig.free(block, rig.a);
    drop((graph, arena));
    rig.close();
}

#[test]
fn a_launch_while_the_stream_captures_is_refused_and_spoils_nothing() {
    for mode in CaptureMode::ALL {
        let rig = GraphRig::new();
        let (arena, other) =
            (rig.arena(), rig.arena_of(ArenaConfig { mode, ..ArenaConfig::default() }));
        let (graph, output) = worker(&rig, &arena, MIB * 4, 1, 1000);
        let (outer, ()) = rig.capture(rig.a, &other, || {
            let refused = graph.launch(rig.a).expect_err("no lease could guard it");
            assert!(matches!(refused, LaunchError::Capturing(stream) if stream == rig.a));
            rig.order(rig.a, rig.b);
            let refused = graph.launch(rig.b).expect_err("it is drawn in");
            assert!(matches!(refused, LaunchError::Capturing(stream) if stream == rig.b));
            rig.order(rig.b, rig.a);
        });
        // On a stream outside it goes on, also of the arena that captures.
        let (again, ()) = rig.capture(rig.a, &arena, || {
            rig.replay(&graph, rig.b);
            let block = rig.malloc(MIB * 30, rig.a);
            rig.fill(rig.a, &block, 5);
            rig.free(block, rig.a);
        });
        rig.sync(rig.b);
        rig.replay(&again, rig.a);
        assert_eq!(rig.byte(&output), 1);
        rig.free(output, rig.a);
        drop((graph, outer, again, arena, other));
        rig.close();
    }
}

#[test]
fn a_lease_of_a_stream_that_ends_is_still_waited_for() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (graph, output) = worker(&rig, &arena, MIB * 8, 1, LONG_NS);
    let stream = rig.base.allocator.create_stream().expect("a stream can be made");
    let lease = graph.launch(stream).expect("no stream uses the arena");
    rig.base.allocator.destroy_stream(stream).expect("it is open");
    drop(lease);
    let refused = graph.launch(rig.a).expect_err("the work of the stream is not over");
    assert!(matches!(refused, LaunchError::Busy(_)), "{refused}");
    rig.base.sim.advance(LONG_NS * 2);
    rig.replay(&graph, rig.a);
    rig.free(output, rig.a);
    drop((graph, arena));
    rig.close();
}

// --- lending ---

/// A pool of 64 MiB whose arena has 48 of them; 2 MiB of results outside.
struct Lender {
    rig: GraphRig,
    arena: GraphArena,
    graph: CapturedGraph,
    output: Allocation,
}

fn lender(config: ArenaConfig, ns: u64) -> Lender {
    let rig = GraphRig::limited(MIB * 64);
    let arena = rig.arena_of(config);
    let (graph, output) = worker(&rig, &arena, MIB * 48, 7, ns);
    assert!(arena.report().backed >= MIB * 48);
    Lender { rig, arena, graph, output }
}

impl Lender {
    fn close(self) {
        let Lender { rig, arena, graph, output } = self;
        rig.free(output, rig.a);
        drop((graph, arena));
        rig.close();
    }
}

#[test]
fn a_malloc_that_needs_an_idle_arenas_memory_gets_it_and_a_replay_brings_it_back() {
    let lender = lender(ArenaConfig::default(), 1000);
    let Lender { rig, arena, graph, output } = &lender;
    for round in 0..5 {
        rig.replay(graph, rig.a);
        assert_eq!(rig.byte(output), 7);
        let stream = [rig.a, rig.b][round % 2];
        let blocks: Vec<Allocation> = (0..7).map(|_| rig.malloc(MIB * 8, stream)).collect();
        blocks.iter().for_each(|block| rig.fill(stream, block, 1));
        rig.audit();
        assert!(arena.report().backed + arena.report().lent < MIB * 48);
        blocks.into_iter().for_each(|block| rig.free(block, stream));
        let calls = rig.base.sim.calls_of(Call::Create);
        rig.replay(graph, [rig.b, rig.a][round % 2]);
        assert_eq!(rig.byte(output), 7);
        assert!(arena.report().backed >= MIB * 48);
        assert_eq!(rig.base.sim.calls_of(Call::Create), calls, "what left comes back");
    }
    lender.close();
}

#[test]
fn an_arena_whose_work_is_not_over_lends_nothing() {
    let lender = lender(ArenaConfig::default(), LONG_NS);
    let Lender { rig, arena, graph, .. } = &lender;
    let gate = keep_busy(rig, rig.a);
    let lease = graph.launch(rig.a).expect("no stream uses the arena");
    for held in [Some(lease), None] {
        let refused = rig.base.allocator.malloc(MIB * 32, rig.b).expect_err("it is in use");
        assert!(refused.is_out_of_memory(), "{refused}");
        assert_eq!(arena.report().lent, Bytes::ZERO);
        rig.audit();
        drop(held);
    }
    rig.base.sim.open(gate);
    // The request waits for the rest.
    let block = rig.malloc(MIB * 32, rig.b);
    rig.fill(rig.b, &block, 1);
    rig.audit();
    rig.free(block, rig.b);
    lender.close();
}

#[test]
fn an_arena_that_captures_lends_nothing() {
    let rig = GraphRig::limited(MIB * 64);
    let arena = rig.arena_of(ArenaConfig { mode: CaptureMode::Relaxed, ..ArenaConfig::default() });
    let (graph, ()) = rig.capture(rig.a, &arena, || {
        let inner = rig.malloc(MIB * 48, rig.a);
        rig.fill(rig.a, &inner, 1);
        rig.free(inner, rig.a);
        let refused = rig.base.allocator.malloc(MIB * 32, rig.b).expect_err("it captures");
        assert!(refused.is_out_of_memory(), "{refused}");
    });
    let block = rig.malloc(MIB * 32, rig.b);
    rig.free(block, rig.b);
    rig.replay(&graph, rig.a);
    drop((graph, arena));
    rig.close();
}

#[test]
fn live_blocks_of_an_idle_arena_keep_their_contents_while_the_rest_is_lent() {
    let rig = GraphRig::limited(MIB * 96);
    let arena = rig.arena();
    let (graph, live) = rig.capture(rig.a, &arena, || {
        let mut live = Vec::new();
        for byte in 1..=8u8 {
            let block = rig.malloc(MIB * 2, rig.a);
            rig.fill(rig.a, &block, byte);
            live.push(block);
            let between = rig.malloc(MIB * 8, rig.a);
            rig.fill(rig.a, &between, 99);
            live.push(between);
        }
        let (live, between): (Vec<_>, Vec<_>) =
            live.into_iter().partition(|block| block.len() == MIB * 2);
        between.into_iter().for_each(|block| rig.free(block, rig.a));
        live
    });
    rig.replay(&graph, rig.a);
    let places: Vec<_> = live.iter().map(range).collect();
    for _ in 0..3 {
        let pressure: Vec<Allocation> =
            (0..32).map_while(|_| rig.base.allocator.malloc(MIB * 4, rig.b).ok()).collect();
        assert!(pressure.len() * 4 > 96 - 80, "the arena lent something");
        pressure.iter().for_each(|block| rig.fill(rig.b, block, 200));
        for (byte, block) in (1..).zip(&live) {
            assert_eq!(rig.byte(block), byte);
        }
        pressure.into_iter().for_each(|block| rig.free(block, rig.b));
        rig.replay(&graph, rig.a);
        for (byte, block) in (1..).zip(&live) {
            assert_eq!(rig.byte(block), byte);
        }
        assert_eq!(live.iter().map(range).collect::<Vec<_>>(), places);
    }
    live.into_iter().for_each(|block| rig.free(block, rig.a));
    drop((graph, arena));
    rig.close();
}

#[test]
fn memory_that_cannot_be_brought_back_is_an_error_and_nothing_is_lost() {
    let lender = lender(ArenaConfig::default(), 1000);
    let Lender { rig, arena, graph, output } = &lender;
    let live = rig.malloc(MIB * 56, rig.b);
    rig.fill(rig.b, &live, 3);
    for stream in [rig.a, rig.b, rig.a] {
        let refused = graph.launch(stream).expect_err("others have the memory");
        let LaunchError::Alloc(error) = &refused else { panic!("{refused}") };
        assert!(error.is_out_of_memory(), "{error}");
        rig.audit();
    }
    assert_eq!(rig.byte(&live), 3);
    // Chunks restored before the failure are lent again.
    rig.free(live, rig.b);
    let all = rig.malloc(MIB * 60, rig.b);
    rig.free(all, rig.b);
    rig.replay(graph, rig.a);
    assert_eq!(rig.byte(output), 7);
    assert!(arena.report().backed >= MIB * 48);
    lender.close();
}

#[test]
fn a_replay_that_is_refused_forgets_no_work() {
    // The small graph runs; the large one of the same stream finds no memory. The arena is in use
    // all the same.
    let rig = GraphRig::limited(MIB * 64);
    let arena = rig.arena();
    let (small, small_output) = worker(&rig, &arena, MIB * 16, 1, LONG_NS);
    let (large, large_output) = worker(&rig, &arena, MIB * 48, 2, 1);
    let pressure = rig.malloc(MIB * 40, rig.b);
    rig.write("pressure", rig.b, &pressure, 1);
    let gate = keep_busy(&rig, rig.a);
    let lease = small.launch(rig.a).expect("16 MiB are left");
    drop(lease);
    let refused = large.launch(rig.a).expect_err("48 MiB are not");
    assert!(matches!(refused, LaunchError::Alloc(_)), "{refused}");
    let more = rig.base.allocator.malloc(MIB * 16, rig.b);
    if let Ok(more) = more {
        rig.write("thief", rig.b, &more, 1);
        rig.audit();
        rig.free(more, rig.b);
    }
    rig.audit();
    let refused = large.launch(rig.b).expect_err("the small graph runs");
    assert!(matches!(refused, LaunchError::Busy(_)), "{refused}");
    rig.base.sim.open(gate);
    rig.sync(rig.a);
    rig.free(pressure, rig.b);
    rig.replay(&large, rig.a);
    rig.replay(&small, rig.a);
    assert_eq!([rig.byte(&small_output), rig.byte(&large_output)], [1, 2]);
    rig.free(small_output, rig.a);
    rig.free(large_output, rig.a);
    drop((small, large, arena));
    rig.close();
}

#[test]
fn a_replay_whose_order_failed_forgets_no_work() {
    for call in [Call::Wait, Call::Record, Call::Query, Call::LaunchGraph, Call::IsCapturing] {
        let rig = GraphRig::limited(MIB * 64);
        let arena = rig.arena_of(ArenaConfig { overlap: Overlap::Order, ..ArenaConfig::default() });
        let (graph, output) = worker(&rig, &arena, MIB * 48, 1, LONG_NS);
        let gate = keep_busy(&rig, rig.a);
        rig.replay(&graph, rig.a);
        for stream in [rig.b, rig.a, rig.b] {
            rig.base.sim.set_faults(FaultPlan::nth_of(call, 1).with_code(1));
            let failed = graph.launch(stream);
            rig.base.sim.set_faults(FaultPlan::none());
            if let Err(failed) = failed {
                assert!(matches!(failed, LaunchError::Driver(_)), "{failed}");
            }
            let refused = rig.base.allocator.malloc(MIB * 32, rig.b);
            assert!(refused.is_err(), "the first replay runs: {call:?}");
            rig.audit();
        }
        rig.base.sim.open(gate);
        rig.sync(rig.a);
        rig.sync(rig.b);
        rig.base.allocator.record_use(&output, rig.b).expect("it is ours");
        rig.free(output, rig.a);
        drop((graph, arena));
        rig.close();
    }
}

#[test]
fn what_a_capture_stands_on_is_not_lent_while_it_gets_its_memory() {
    // The arena lost a part of its memory; another one has some to lend. Bringing the part back
    // for a capture must not cost the rest.
    let rig = GraphRig::limited(MIB * 96);
    let (arena, other) = (rig.arena(), rig.arena());
    let (graph, output) = worker(&rig, &arena, MIB * 48, 1, 1);
    let pressure = rig.malloc(MIB * 64, rig.b);
    let (donor, donated) = worker(&rig, &other, MIB * 8, 2, 1);
    rig.free(pressure, rig.b);
    let held = rig.malloc(MIB * 30, rig.b);
    let (again, block) = rig.capture(rig.a, &arena, || {
        assert_eq!(arena.report().lent, Bytes::ZERO, "{:?}", arena.report());
        assert!(arena.report().backed >= MIB * 48);
        let block = rig.malloc(MIB * 48, rig.a);
        rig.fill(rig.a, &block, 4);
        block
    });
    rig.replay(&again, rig.a);
    assert_eq!(rig.byte(&block), 4);
    rig.free(block, rig.a);
    rig.free(held, rig.b);
    rig.replay(&graph, rig.a);
    rig.replay(&donor, rig.a);
    assert_eq!([rig.byte(&output), rig.byte(&donated)], [1, 2]);
    rig.free(output, rig.a);
    rig.free(donated, rig.a);
    drop((graph, again, donor, arena, other));
    rig.close();
}

#[test]
fn trimming_takes_an_idle_arenas_memory_and_a_replay_takes_it_anew() {
    let rig = GraphRig::with(card(), Config::default());
    let arena = rig.arena();
    let (graph, output) = worker(&rig, &arena, MIB * 48, 7, 1000);
    rig.replay(&graph, rig.a);
    let before = rig.base.census().reserved;
    rig.sync(rig.a);
    rig.base.allocator.trim(Bytes::ZERO).expect("no call fails");
    assert!(rig.base.census().reserved + MIB * 40 <= before, "{}", rig.base.census());
    rig.audit();
    rig.replay(&graph, rig.b);
    assert_eq!(rig.byte(&output), 7);
    rig.free(output, rig.a);
    drop((graph, arena));
    rig.close();
}
