//! Captures that go wrong, and programs that other allocators' arenas did not expect: buffers from
//! before, buffers that escape, other threads, panics, spoilt captures, and every order of letting
//! go.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::common::Rig;
use crate::common::graph_rig::{GraphRig, LONG_NS, range};
use vramp_alloc::error::{StreamError, Unusable};
use vramp_alloc::graph::{
    ArenaConfig, ArenaError, ArenaPolicy, CaptureError, CapturedGraph, GraphArena, LaunchError,
    ReplayLease,
};
use vramp_alloc::{AllocError, Allocation, Bytes, Config, Driver, FreeError};
use vramp_driver::sim::{FaultPlan, LiveObjects, Simulator};
use vramp_driver::{Call, CaptureMode};
use vramp_peers::Preset;

const SIZE: Bytes = Bytes::mib(4);

// --- buffers from before the capture ---

#[test]
fn a_buffer_from_before_that_is_freed_inside_stays_with_the_graph() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let before = rig.malloc(SIZE, rig.a);
    rig.fill(rig.a, &before, 7);
    let place = range(&before);
    let (graph, output) = rig.capture(rig.a, &arena, || {
        let output = rig.malloc(SIZE, rig.a);
        rig.copy(rig.a, &before, &output);
        rig.free(before, rig.a);
        output
    });
    assert_eq!(graph.report().kept, SIZE);
    // No request gets it while the graph lives, on either stream.
    let others: Vec<Allocation> =
        [rig.a, rig.b, rig.a, rig.b].map(|stream| rig.malloc(SIZE, stream)).into();
    for other in &others {
        assert_ne!(range(other).start, place.start);
        rig.fill(other.stream(), other, 9);
    }
    rig.order(rig.a, rig.b);
    rig.replay(&graph, rig.b);
    assert_eq!(rig.byte(&output), 7);
    // It comes back with the graph's end.
    drop(graph);
    rig.audit();
    rig.free(output, rig.a);
    others.into_iter().for_each(|other| {
        let stream = other.stream();
        rig.free(other, stream);
    });
    drop(arena);
    rig.close();
}

#[test]
fn a_buffer_that_a_capture_uses_stays_with_the_graph_on_whatever_stream_it_is_freed() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let before = rig.malloc(SIZE, rig.b);
    let place = range(&before);
    let (graph, output) = rig.capture(rig.a, &arena, || {
        let output = rig.malloc(SIZE, rig.a);
        rig.copy(rig.a, &before, &output);
        rig.base.allocator.record_use(&before, rig.a).expect("both are known");
        rig.free(before, rig.b);
        output
    });
    assert_eq!(graph.report().kept, SIZE);
    let other = rig.malloc(SIZE, rig.b);
    assert_ne!(range(&other).start, place.start);
    drop(graph);
    rig.audit();
    rig.free(output, rig.a);
    rig.free(other, rig.b);
    drop(arena);
    rig.close();
}

#[test]
fn what_a_graph_kept_waits_for_its_last_replay() {
    // With the lease held to the end, and ended before.
    for held in [true, false] {
        let rig = GraphRig::limited(SIZE);
        let arena = rig.arena();
        let before = rig.malloc(SIZE, rig.a);
        let (graph, ()) = rig.capture(rig.a, &arena, || {
            rig.read("captured", rig.a, &before, LONG_NS);
            rig.free(before, rig.a);
        });
        let lease = graph.launch(rig.b).expect("no stream uses the arena");
        let lease = held.then_some(lease);
        drop(graph);
        let next = rig.malloc(SIZE, rig.a);
        rig.write("next owner", rig.a, &next, 1);
        rig.audit();
        drop(lease);
        rig.free(next, rig.a);
        drop(arena);
        rig.close();
    }
}

#[test]
fn a_block_of_another_arena_that_is_freed_inside_stays_with_the_graph() {
    let rig = GraphRig::new();
    let (first, second) = (rig.arena(), rig.arena());
    let (producer, block) = rig.capture(rig.a, &first, || {
        let block = rig.malloc(SIZE, rig.a);
        rig.fill(rig.a, &block, 3);
        block
    });
    rig.replay(&producer, rig.a);
    let (consumer, output) = rig.capture(rig.a, &second, || {
        let output = rig.malloc(SIZE, rig.a);
        rig.copy(rig.a, &block, &output);
        rig.free(block, rig.a);
        output
    });
    assert_eq!(consumer.report().kept, SIZE);
    // A later capture into the first arena does not get it.
    let (overwriter, ()) = rig.capture(rig.a, &first, || {
        let other = rig.malloc(SIZE, rig.a);
        rig.fill(rig.a, &other, 4);
        rig.free(other, rig.a);
    });
    rig.replay(&overwriter, rig.a);
    rig.replay(&consumer, rig.a);
    assert_eq!(rig.byte(&output), 3);
    drop((producer, consumer, overwriter));
    rig.audit();
    assert_eq!(first.report().blocks, 0);
    rig.free(output, rig.a);
    drop((first, second));
    rig.close();
}

#[test]
fn a_buffer_from_before_that_is_freed_inside_a_spoilt_capture_is_free() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let before = rig.malloc(SIZE, rig.a);
    let spoilt = rig.base.allocator.capture(rig.a, &arena, || {
        rig.free(before, rig.a);
        rig.base.sim.alloc_memory(SIZE).expect_err("a capture forbids it");
    });
    assert!(matches!(spoilt, Err(CaptureError::Invalidated(_))));
    rig.assert_serves();
    drop(arena);
    rig.close();
}

// --- buffers that escape ---

#[test]
fn a_block_that_escapes_is_freed_after_and_its_memory_is_the_arenas() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (graph, escaped) = rig.capture(rig.a, &arena, || {
        let block = rig.malloc(SIZE, rig.a);
        rig.fill(rig.a, &block, 5);
        block
    });
    assert_eq!((graph.report().escaped, arena.report().blocks), (1, 1));
    rig.replay(&graph, rig.a);
    assert_eq!(rig.byte(&escaped), 5);
    let inside = range(&escaped);
    rig.free(escaped, rig.b);
    rig.audit();
    assert_eq!(arena.report().blocks, 0);
    // The pool hands out nothing inside of the arena, and the graph still runs.
    let blocks = [rig.a, rig.b].map(|stream| rig.malloc(SIZE, stream));
    assert!(blocks.iter().all(|block| range(block).start != inside.start));
    rig.replay(&graph, rig.a);
    rig.sync(rig.a);
    assert_eq!(rig.base.sim.peek(inside).map(|bytes| bytes[0]), Some(5));
    for (block, stream) in blocks.into_iter().zip([rig.a, rig.b]) {
        rig.free(block, stream);
    }
    drop((graph, arena));
    rig.close();
}

#[test]
fn a_block_that_escaped_may_be_written_at_once() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    // Many small steps: the arena grows bit by bit.
    let (graph, (input, output, spare)) = rig.capture(rig.a, &arena, || {
        let input = rig.malloc(SIZE, rig.a);
        let mut spare = Vec::new();
        // Another stream fills it while the capture goes on.
        rig.write("meanwhile", rig.b, &input, LONG_NS);
        let mut output = rig.malloc(SIZE, rig.a);
        for _ in 0..40 {
            let next = rig.malloc(SIZE, rig.a);
            rig.copy(rig.a, &input, &next);
            rig.free(std::mem::replace(&mut output, next), rig.a);
            spare.push(rig.malloc(Bytes::mib(2), rig.a));
        }
        (input, output, spare)
    });
    rig.audit();
    rig.fill(rig.b, &input, 8);
    rig.order(rig.b, rig.a);
    rig.replay(&graph, rig.a);
    assert_eq!(rig.byte(&output), 8);
    for block in spare.into_iter().chain([input, output]) {
        rig.free(block, rig.a);
    }
    drop((graph, arena));
    rig.close();
}

#[test]
fn a_block_that_escaped_may_be_freed_inside_the_next_capture() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (first, handed_on) = rig.capture(rig.a, &arena, || {
        let block = rig.malloc(SIZE, rig.a);
        rig.fill(rig.a, &block, 6);
        block
    });
    let output = rig.malloc(SIZE, rig.a);
    let (second, ()) = rig.capture(rig.a, &arena, || {
        rig.copy(rig.a, &handed_on, &output);
        rig.free(handed_on, rig.a);
        let reused = rig.malloc(SIZE, rig.a);
        rig.fill(rig.a, &reused, 1);
        rig.free(reused, rig.a);
    });
    assert_eq!(second.report().kept, Bytes::ZERO, "the arena keeps it itself");
    for _ in 0..3 {
        rig.replay(&first, rig.a);
        rig.replay(&second, rig.a);
        assert_eq!(rig.byte(&output), 6);
    }
    assert!(arena.report().high_water <= SIZE * 2);
    rig.free(output, rig.a);
    drop((first, second, arena));
    rig.close();
}

// --- captures that do not begin, or come to nothing ---

#[test]
fn a_capture_that_fails_to_begin_leaves_nothing_behind() {
    for call in [Call::BeginCapture, Call::CaptureInfo] {
        for mode in CaptureMode::ALL {
            let rig = GraphRig::new();
            let arena = rig.arena_of(ArenaConfig { mode, ..ArenaConfig::default() });
            rig.base.sim.set_faults(FaultPlan::nth_of(call, 1).with_code(1));
            let error = rig.base.allocator.capture(rig.a, &arena, || panic!("it never runs"));
            let error = error.expect_err("the call fails");
            assert!(matches!(error, CaptureError::Begin(_)), "{error}");
            rig.assert_serves();
            let (graph, ()) = rig.capture(rig.a, &arena, || ());
            rig.replay(&graph, rig.a);
            drop((graph, arena));
            rig.close();
        }
    }
}

#[test]
fn a_panic_in_the_closure_restores_the_allocator() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let before = rig.malloc(SIZE, rig.a);
    let mut before = Some(before);
    let died = catch_unwind(AssertUnwindSafe(|| {
        let captured = rig.base.allocator.capture(rig.a, &arena, || {
            let block = rig.malloc(SIZE, rig.a);
            rig.fill(rig.a, &block, 1);
            rig.free(block, rig.a);
            rig.free(before.take().expect("it is taken once"), rig.a);
            rig.order(rig.a, rig.b);
            panic!("a bug of the program");
        });
        drop(captured);
    }));
    assert!(died.is_err());
    rig.assert_serves();
    assert_eq!(arena.report().blocks, 0);
    let (graph, ()) = rig.capture(rig.a, &arena, || ());
    drop((graph, arena));
    rig.close();
}

#[test]
fn a_spoilt_capture_is_an_error_and_the_stream_is_out_of_it() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let mut escaped = None;
    let spoilt = rig.base.allocator.capture(rig.a, &arena, || {
        escaped = Some(rig.malloc(SIZE, rig.a));
        rig.base.sim.alloc_memory(SIZE).expect_err("a capture forbids it");
        // From here on the capture cannot be asked.
        let refused = rig.base.allocator.malloc(SIZE, rig.a).expect_err("it is spoilt");
        assert!(matches!(refused, AllocError::Driver(_)), "{refused}");
        // The other stream is served as ever.
        let other = rig.malloc(SIZE, rig.b);
        rig.free(other, rig.b);
    });
    assert!(matches!(spoilt, Err(CaptureError::Invalidated(_))));
    rig.assert_serves();
    // A block it made is still a block.
    let escaped = escaped.expect("it was made");
    rig.fill(rig.a, &escaped, 1);
    rig.free(escaped, rig.a);
    drop(arena);
    rig.close();
}

#[test]
fn a_block_of_a_spoilt_capture_may_be_freed_inside_it() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let spoilt = rig.base.allocator.capture(rig.a, &arena, || {
        let block = rig.malloc(SIZE, rig.a);
        rig.base.sim.alloc_memory(SIZE).expect_err("a capture forbids it");
        rig.free(block, rig.a);
    });
    assert!(spoilt.is_err());
    assert_eq!(arena.report().blocks, 0);
    rig.assert_serves();
    drop(arena);
    rig.close();
}

#[test]
fn a_fork_that_was_not_joined_is_an_error() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let spoilt = rig.base.allocator.capture(rig.a, &arena, || {
        rig.order(rig.a, rig.b);
        let block = rig.malloc(SIZE, rig.b);
        rig.fill(rig.b, &block, 1);
        rig.free(block, rig.b);
    });
    let error = spoilt.expect_err("no stream joined");
    assert!(matches!(error, CaptureError::Invalidated(_)), "{error}");
    assert!(error.to_string().contains("join every stream"), "{error}");
    rig.assert_serves();
    drop(arena);
    rig.close();
}

#[test]
fn a_capture_that_is_begun_twice_is_refused_and_the_first_goes_on() {
    let rig = GraphRig::new();
    let (arena, other) = (rig.arena(), rig.arena());
    let (graph, ()) = rig.capture(rig.a, &arena, || {
        let refused = rig.base.allocator.capture(rig.a, &arena, || ());
        assert!(matches!(refused, Err(CaptureError::ArenaBusy)));
        let refused = rig.base.allocator.capture(rig.b, &arena, || ());
        assert!(matches!(refused, Err(CaptureError::ArenaBusy)));
        let refused = rig.base.allocator.capture(rig.a, &other, || ());
        assert!(matches!(refused, Err(CaptureError::Begin(_))));
        let block = rig.malloc(SIZE, rig.a);
        rig.fill(rig.a, &block, 1);
        rig.free(block, rig.a);
    });
    assert_eq!(graph.report().blocks, 1);
    rig.replay(&graph, rig.a);
    let (more, ()) = rig.capture(rig.b, &other, || ());
    drop((graph, more, arena, other));
    rig.close();
}

#[test]
fn a_capture_that_is_ended_twice_is_refused_and_the_graph_lives() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let mut capture = rig.base.allocator.begin_capture(rig.a, &arena).expect("nothing runs");
    let graph = capture.end().expect("nothing spoilt it");
    for _ in 0..2 {
        let refused = capture.end().expect_err("it is over");
        assert!(matches!(refused, CaptureError::Over), "{refused}");
    }
    drop(capture);
    rig.replay(&graph, rig.a);
    rig.assert_serves();
    let (again, ()) = rig.capture(rig.a, &arena, || ());
    drop((graph, again, arena));
    rig.close();
}

#[test]
fn a_capture_that_another_thread_tries_to_end_goes_on() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let mut capture = rig.base.allocator.begin_capture(rig.a, &arena).expect("nothing runs");
    let block = rig.malloc(SIZE, rig.a);
    rig.fill(rig.a, &block, 4);
    let refused = std::thread::scope(|scope| {
        scope.spawn(|| capture.end().expect_err("it began elsewhere")).join()
    });
    let refused = refused.expect("the thread does not panic");
    assert!(matches!(refused, CaptureError::OtherThread), "{refused}");
    assert!(rig.is_capturing(rig.a));
    let more = rig.malloc(SIZE, rig.a);
    rig.copy(rig.a, &block, &more);
    let graph = capture.end().expect("here it began");
    drop(capture);
    assert_eq!(graph.report().blocks, 2);
    rig.replay(&graph, rig.a);
    assert_eq!(rig.byte(&more), 4);
    rig.free(block, rig.a);
    rig.free(more, rig.a);
    drop((graph, arena));
    rig.close();
}

#[test]
fn a_capture_that_another_thread_drops_is_over() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let capture = rig.base.allocator.begin_capture(rig.a, &arena).expect("nothing runs");
    let block = rig.malloc(SIZE, rig.a);
    rig.free(block, rig.a);
    std::thread::scope(|scope| scope.spawn(|| drop(capture)).join()).expect("no panic");
    assert!(!rig.is_capturing(rig.a));
    let (again, ()) = rig.capture(rig.a, &arena, || ());
    drop((again, arena));
    rig.close();
}

#[test]
fn an_arena_of_another_allocator_is_refused() {
    let (rig, elsewhere) = (GraphRig::new(), GraphRig::new());
    let arena = elsewhere.arena();
    let refused = rig.base.allocator.capture(rig.a, &arena, || ());
    assert!(matches!(refused, Err(CaptureError::ForeignArena)));
    let (graph, block) = elsewhere.capture(elsewhere.a, &arena, || {
        let block = elsewhere.malloc(SIZE, elsewhere.a);
        elsewhere.fill(elsewhere.a, &block, 1);
        block
    });
    let refused = rig.base.allocator.free(block, rig.a).expect_err("it is not ours");
    let FreeError::Foreign(block) = refused else { panic!("{refused}") };
    elsewhere.free(block, elsewhere.a);
    drop((graph, arena));
    rig.close();
    elsewhere.close();
}

#[test]
fn streams_that_are_gone_and_arenas_that_cannot_be_are_refused() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (graph, ()) = rig.capture(rig.a, &arena, || ());
    let gone = rig.base.allocator.create_stream().expect("a stream can be made");
    rig.base.allocator.destroy_stream(gone).expect("it is open");
    let refused = rig.base.allocator.capture(gone, &arena, || ());
    assert!(matches!(refused, Err(CaptureError::UnknownStream(stream)) if stream == gone));
    let refused = graph.launch(gone).expect_err("it is gone");
    assert!(matches!(refused, LaunchError::UnknownStream(stream) if stream == gone));
    for capacity in [Bytes::ZERO, Bytes::new(u64::MAX)] {
        let refused =
            rig.base.allocator.graph_arena(ArenaConfig { capacity, ..ArenaConfig::default() });
        assert!(matches!(refused, Err(ArenaError::Capacity { .. })), "{capacity}");
    }
    let refused = rig.base.allocator.capture(rig.a, &arena, || {
        rig.base.allocator.malloc(Bytes::new(u64::MAX), rig.a).expect_err("there is no such size")
    });
    let (more, error) = refused.expect("the capture goes on");
    assert!(error.is_out_of_memory(), "{error}");
    for preset in Preset::ALL.into_iter().filter(|&preset| preset != Preset::Vramp) {
        let rig = Rig::new(preset);
        let refused = rig.allocator.graph_arena(ArenaConfig::default());
        assert!(matches!(refused, Err(ArenaError::NotSupported)), "{}", preset.name());
    }
    drop((graph, more, arena));
    rig.close();
}

#[test]
fn a_stream_that_captures_is_not_destroyed() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let stream = rig.base.allocator.create_stream().expect("a stream can be made");
    let (graph, block) = rig.capture(stream, &arena, || {
        let block = rig.malloc(SIZE, stream);
        rig.fill(stream, &block, 1);
        let refused = rig.base.allocator.destroy_stream(stream).expect_err("it captures");
        assert!(matches!(refused, StreamError::Capturing(which) if which == stream), "{refused}");
        block
    });
    rig.base.allocator.destroy_stream(stream).expect("it captures no more");
    rig.replay(&graph, rig.a);
    assert_eq!(rig.byte(&block), 1);
    rig.free(block, rig.a);
    drop((graph, arena));
    rig.close();
}

// --- other threads ---

#[test]
fn a_second_thread_that_allocates_meanwhile_is_served_outside_of_the_arena() {
    let capacity = ArenaConfig::default().capacity.count();
    for mode in [CaptureMode::ThreadLocal, CaptureMode::Global, CaptureMode::Relaxed] {
        let rig = GraphRig::new();
        let arena = rig.arena_of(ArenaConfig { mode, ..ArenaConfig::default() });
        let (graph, output) = rig.capture(rig.a, &arena, || {
            let first = rig.malloc(SIZE, rig.a);
            let start = range(&first).start;
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        for size in [1 << 10, 1 << 20, 5 << 20, 33 << 20] {
                            let block = rig.malloc(Bytes::new(size), rig.b);
                            let at = range(&block).start;
                            assert!(at < start || at.number() >= start.number() + capacity);
                            rig.free(block, rig.b);
                        }
                    });
                }
            });
            rig.fill(rig.a, &first, 2);
            first
        });
        assert_eq!(graph.report().blocks, 1, "{mode:?}");
        rig.replay(&graph, rig.a);
        assert_eq!(rig.byte(&output), 2);
        rig.free(output, rig.a);
        drop((graph, arena));
        rig.close();
    }
}

#[test]
fn two_threads_capture_at_once_each_into_its_own_arena() {
    let rig = GraphRig::new();
    let outputs = std::thread::scope(|scope| {
        let threads = [(rig.a, 1), (rig.b, 2)].map(|(stream, byte)| {
            let rig = &rig;
            scope.spawn(move || {
                let arena = rig.arena();
                let captured = rig.base.allocator.capture(stream, &arena, || {
                    let mut last = rig.malloc(SIZE, stream);
                    rig.fill(stream, &last, byte);
                    for _ in 0..50 {
                        let next = rig.malloc(SIZE, stream);
                        rig.copy(stream, &last, &next);
                        rig.free(std::mem::replace(&mut last, next), stream);
                    }
                    last
                });
                let (graph, output) = captured.expect("nothing disturbs it");
                drop(graph.launch(stream).expect("the arena is its own"));
                (graph, arena, output, stream, byte)
            })
        });
        threads.map(|thread| thread.join().expect("it does not panic"))
    });
    rig.audit();
    for (graph, arena, output, stream, byte) in outputs {
        assert_eq!(rig.byte(&output), byte);
        rig.free(output, stream);
        drop((graph, arena));
    }
    rig.close();
}

// --- letting go, in every order ---

/// What a user holds of a graph.
#[derive(Default)]
struct Holdings {
    graph: Option<CapturedGraph>,
    arena: Option<GraphArena>,
    block: Option<Allocation>,
    lease: Option<ReplayLease>,
}

fn orders(of: &[usize]) -> Vec<Vec<usize>> {
    if of.is_empty() {
        return vec![Vec::new()];
    }
    of.iter()
        .flat_map(|&first| {
            let rest: Vec<usize> = of.iter().copied().filter(|&other| other != first).collect();
            orders(&rest).into_iter().map(move |mut order| {
                order.insert(0, first);
                order
            })
        })
        .collect()
}

/// Lets go of graph, arena, block, lease and, as the fifth, the allocator, in this order, while a
/// replay runs.
fn let_go(policy: ArenaPolicy, order: &[usize]) {
    let rig = GraphRig::new();
    let capacity = Bytes::mib(64);
    let arena = rig.arena_of(ArenaConfig { policy, capacity, ..ArenaConfig::default() });
    let kept = rig.malloc(SIZE, rig.a);
    let (graph, block) = rig.capture(rig.a, &arena, || {
        let block = rig.malloc(SIZE, rig.a);
        rig.write("replay", rig.a, &block, 1 << 20);
        rig.read("replay", rig.a, &kept, 1 << 20);
        rig.free(kept, rig.a);
        block
    });
    let lease = graph.launch(rig.b).expect("no stream uses the arena");
    rig.base.allocator.record_use(&block, rig.b).expect("it is ours");
    let mut held =
        Holdings { graph: Some(graph), arena: Some(arena), block: Some(block), lease: Some(lease) };
    let GraphRig { base, a, .. } = rig;
    let Rig { sim, allocator, .. } = base;
    let mut allocator = Some(allocator);
    for step in order {
        match step {
            0 => drop(held.graph.take()),
            1 => drop(held.arena.take()),
            2 => {
                let block = held.block.take().expect("it is freed once");
                if let Some(allocator) = &allocator {
                    allocator.free(block, a).expect("it is ours");
                }
            }
            3 => drop(held.lease.take()),
            _ => {
                let open = allocator.take().expect("it is closed once");
                open.close().expect("nothing is in the way");
                if let Some(graph) = &held.graph {
                    let refused = graph.launch(a).expect_err("its memory is gone");
                    assert!(
                        matches!(refused, LaunchError::Unusable(Unusable::Closed)),
                        "{refused}"
                    );
                }
                if let Some(arena) = &held.arena {
                    assert_eq!(arena.report().backed, Bytes::ZERO);
                    let _ = arena.reset();
                }
            }
        }
        if let Some(allocator) = &allocator {
            allocator.audit().expect("every step keeps every invariant");
            // Whatever became free may be had at once.
            let block = allocator.malloc(SIZE, a).expect("there is memory");
            let raw = allocator.stream(a).expect("it is open");
            sim.fill(raw, range(&block), 1).expect("the stream takes work");
            allocator.free(block, a).expect("it is ours");
        }
        assert_eq!(sim.hazards(), [], "{order:?}");
        assert_eq!(sim.device_loss(), None, "{order:?}");
    }
    assert_eq!(sim.live(), LiveObjects::default(), "{order:?}");
}

#[test]
fn graph_arena_block_lease_and_allocator_go_in_any_order() {
    for policy in [ArenaPolicy::Reusing, ArenaPolicy::Monotone] {
        for order in orders(&[0, 1, 2, 3, 4]) {
            let_go(policy, &order);
        }
    }
}

#[test]
fn an_arena_that_is_gone_gives_its_memory_to_all() {
    let rig = GraphRig::limited(Bytes::mib(64));
    let arena = rig.arena();
    let (graph, block) = rig.capture(rig.a, &arena, || rig.malloc(Bytes::mib(60), rig.a));
    let lease = graph.launch(rig.a).expect("no stream uses the arena");
    let refused = rig.base.allocator.malloc(Bytes::mib(60), rig.b).expect_err("it is full");
    assert!(refused.is_out_of_memory());
    drop((graph, arena));
    rig.free(block, rig.a);
    drop(lease);
    let all = rig.malloc(Bytes::mib(60), rig.b);
    rig.fill(rig.b, &all, 1);
    rig.free(all, rig.b);
    rig.close();
}

#[test]
fn an_allocator_that_is_closed_during_a_capture_breaks_nothing() {
    let sim = std::sync::Arc::new(Simulator::builder().checked().build());
    let driver: std::sync::Arc<dyn Driver> = std::sync::Arc::clone(&sim) as _;
    let allocator = vramp_alloc::Allocator::new(driver, Config::default()).expect("it can be made");
    let stream = allocator.create_stream().expect("a stream can be made");
    let arena = allocator.graph_arena(ArenaConfig::default()).expect("there are addresses");
    let mut capture = allocator.begin_capture(stream, &arena).expect("nothing runs");
    let block = allocator.malloc(SIZE, stream).expect("there is memory");
    // It cannot wait for a stream that captures, and says so.
    let _ = allocator.close();
    let refused = capture.end().expect_err("its memory is gone");
    assert!(!refused.to_string().is_empty());
    drop((capture, arena, block));
    assert_eq!(sim.live().captures, 0);
    assert_eq!(sim.live().device_bytes, Bytes::ZERO);
}
