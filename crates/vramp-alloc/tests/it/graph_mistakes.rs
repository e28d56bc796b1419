//! Captures that go wrong, and programs that do what others' arenas did not expect: buffers from
//! before, buffers that escape, other threads, panics, spoilt captures, and every order of letting
//! go.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::common::Rig;
use crate::common::graphs::{LONG_NS, Stage, range};
use vramp_alloc::error::StreamError;
use vramp_alloc::graph::{
    ArenaConfig, ArenaError, ArenaPolicy, CaptureError, CapturedGraph, GraphArena, LaunchError,
    ReplayLease,
};
use vramp_alloc::{AllocError, Allocation, Bytes, Config, Driver, FreeError, Preset};
use vramp_driver::sim::{FaultPlan, LiveObjects, Simulator};
use vramp_driver::{Call, CaptureMode};

const SIZE: Bytes = Bytes::mib(4);

// --- buffers from before the capture ---

#[test]
fn a_buffer_from_before_that_is_freed_inside_stays_with_the_graph() {
    let stage = Stage::new();
    let arena = stage.arena();
    let before = stage.malloc(SIZE, stage.a);
    stage.fill(stage.a, &before, 7);
    let place = range(&before);
    let (graph, output) = stage.capture(stage.a, &arena, || {
        let output = stage.malloc(SIZE, stage.a);
        stage.copy(stage.a, &before, &output);
        stage.free(before, stage.a);
        output
    });
    assert_eq!(graph.report().kept, SIZE);
    // Nobody gets it while the graph lives, from neither stream.
    let others: Vec<Allocation> =
        [stage.a, stage.b, stage.a, stage.b].map(|stream| stage.malloc(SIZE, stream)).into();
    for other in &others {
        assert_ne!(range(other).start, place.start);
        stage.fill(other.stream(), other, 9);
    }
    stage.order(stage.a, stage.b);
    stage.replay(&graph, stage.b);
    assert_eq!(stage.byte(&output), 7);
    // It comes back with the graph's end.
    drop(graph);
    stage.audit();
    stage.free(output, stage.a);
    others.into_iter().for_each(|other| {
        let stream = other.stream();
        stage.free(other, stream);
    });
    drop(arena);
    stage.close();
}

#[test]
fn a_buffer_that_a_capture_uses_stays_with_the_graph_on_whatever_stream_it_is_freed() {
    let stage = Stage::new();
    let arena = stage.arena();
    let before = stage.malloc(SIZE, stage.b);
    let place = range(&before);
    let (graph, output) = stage.capture(stage.a, &arena, || {
        let output = stage.malloc(SIZE, stage.a);
        stage.copy(stage.a, &before, &output);
        stage.rig.allocator.record_use(&before, stage.a).expect("both are known");
        stage.free(before, stage.b);
        output
    });
    assert_eq!(graph.report().kept, SIZE);
    let other = stage.malloc(SIZE, stage.b);
    assert_ne!(range(&other).start, place.start);
    drop(graph);
    stage.audit();
    stage.free(output, stage.a);
    stage.free(other, stage.b);
    drop(arena);
    stage.close();
}

#[test]
fn what_a_graph_kept_waits_for_its_last_replay() {
    // With the lease held to the end, and ended before.
    for held in [true, false] {
        let stage = Stage::limited(SIZE);
        let arena = stage.arena();
        let before = stage.malloc(SIZE, stage.a);
        let (graph, ()) = stage.capture(stage.a, &arena, || {
            stage.read("captured", stage.a, &before, LONG_NS);
            stage.free(before, stage.a);
        });
        let lease = graph.launch(stage.b).expect("nobody uses the arena");
        let lease = held.then_some(lease);
        drop(graph);
        let next = stage.malloc(SIZE, stage.a);
        stage.write("next owner", stage.a, &next, 1);
        stage.audit();
        drop(lease);
        stage.free(next, stage.a);
        drop(arena);
        stage.close();
    }
}

#[test]
fn a_block_of_another_arena_that_is_freed_inside_stays_with_the_graph() {
    let stage = Stage::new();
    let (first, second) = (stage.arena(), stage.arena());
    let (producer, block) = stage.capture(stage.a, &first, || {
        let block = stage.malloc(SIZE, stage.a);
        stage.fill(stage.a, &block, 3);
        block
    });
    stage.replay(&producer, stage.a);
    let (consumer, output) = stage.capture(stage.a, &second, || {
        let output = stage.malloc(SIZE, stage.a);
        stage.copy(stage.a, &block, &output);
        stage.free(block, stage.a);
        output
    });
    assert_eq!(consumer.report().kept, SIZE);
    // A later capture into the first arena does not get it.
    let (overwriter, ()) = stage.capture(stage.a, &first, || {
        let other = stage.malloc(SIZE, stage.a);
        stage.fill(stage.a, &other, 4);
        stage.free(other, stage.a);
    });
    stage.replay(&overwriter, stage.a);
    stage.replay(&consumer, stage.a);
    assert_eq!(stage.byte(&output), 3);
    drop((producer, consumer, overwriter));
    stage.audit();
    assert_eq!(first.report().blocks, 0);
    stage.free(output, stage.a);
    drop((first, second));
    stage.close();
}

#[test]
fn a_buffer_from_before_that_is_freed_inside_a_spoilt_capture_is_free() {
    let stage = Stage::new();
    let arena = stage.arena();
    let before = stage.malloc(SIZE, stage.a);
    let spoilt = stage.rig.allocator.capture(stage.a, &arena, || {
        stage.free(before, stage.a);
        let event = stage.rig.sim.create_event().expect("an event can be made");
        stage.rig.sim.record(event, stage.raw(stage.b)).expect("the stream takes work");
        stage.rig.sim.query(event).expect_err("a capture forbids it");
        stage.rig.sim.destroy_event(event).expect("it is there");
    });
    assert!(matches!(spoilt, Err(CaptureError::Invalidated(_))));
    stage.assert_serves();
    drop(arena);
    stage.close();
}

// --- buffers that escape ---

#[test]
fn a_block_that_escapes_is_freed_after_and_its_memory_is_the_arenas() {
    let stage = Stage::new();
    let arena = stage.arena();
    let (graph, escaped) = stage.capture(stage.a, &arena, || {
        let block = stage.malloc(SIZE, stage.a);
        stage.fill(stage.a, &block, 5);
        block
    });
    assert_eq!((graph.report().escaped, arena.report().blocks), (1, 1));
    stage.replay(&graph, stage.a);
    assert_eq!(stage.byte(&escaped), 5);
    let inside = range(&escaped);
    stage.free(escaped, stage.b);
    stage.audit();
    assert_eq!(arena.report().blocks, 0);
    // The pool hands out nothing inside of the arena, and the graph still runs.
    let blocks = [stage.a, stage.b].map(|stream| stage.malloc(SIZE, stream));
    assert!(blocks.iter().all(|block| range(block).start != inside.start));
    stage.replay(&graph, stage.a);
    stage.sync(stage.a);
    assert_eq!(stage.rig.sim.peek(inside).map(|bytes| bytes[0]), Some(5));
    for (block, stream) in blocks.into_iter().zip([stage.a, stage.b]) {
        stage.free(block, stream);
    }
    drop((graph, arena));
    stage.close();
}

#[test]
fn a_block_that_escaped_may_be_written_at_once() {
    let stage = Stage::new();
    let arena = stage.arena();
    // Many small steps: the arena grows bit by bit.
    let (graph, (input, output, spare)) = stage.capture(stage.a, &arena, || {
        let input = stage.malloc(SIZE, stage.a);
        let mut spare = Vec::new();
        // Another stream fills it while the capture goes on.
        stage.write("meanwhile", stage.b, &input, LONG_NS);
        let mut output = stage.malloc(SIZE, stage.a);
        for _ in 0..40 {
            let next = stage.malloc(SIZE, stage.a);
            stage.copy(stage.a, &input, &next);
            stage.free(std::mem::replace(&mut output, next), stage.a);
            spare.push(stage.malloc(Bytes::mib(2), stage.a));
        }
        (input, output, spare)
    });
    stage.audit();
    stage.fill(stage.b, &input, 8);
    stage.order(stage.b, stage.a);
    stage.replay(&graph, stage.a);
    assert_eq!(stage.byte(&output), 8);
    for block in spare.into_iter().chain([input, output]) {
        stage.free(block, stage.a);
    }
    drop((graph, arena));
    stage.close();
}

#[test]
fn a_block_that_escaped_may_be_freed_inside_the_next_capture() {
    let stage = Stage::new();
    let arena = stage.arena();
    let (first, handed_on) = stage.capture(stage.a, &arena, || {
        let block = stage.malloc(SIZE, stage.a);
        stage.fill(stage.a, &block, 6);
        block
    });
    let output = stage.malloc(SIZE, stage.a);
    let (second, ()) = stage.capture(stage.a, &arena, || {
        stage.copy(stage.a, &handed_on, &output);
        stage.free(handed_on, stage.a);
        let reused = stage.malloc(SIZE, stage.a);
        stage.fill(stage.a, &reused, 1);
        stage.free(reused, stage.a);
    });
    assert_eq!(second.report().kept, Bytes::ZERO, "the arena keeps it itself");
    for _ in 0..3 {
        stage.replay(&first, stage.a);
        stage.replay(&second, stage.a);
        assert_eq!(stage.byte(&output), 6);
    }
    assert!(arena.report().high_water <= SIZE * 2);
    stage.free(output, stage.a);
    drop((first, second, arena));
    stage.close();
}

// --- captures that do not begin, or come to nothing ---

#[test]
fn a_capture_that_fails_to_begin_leaves_nothing_behind() {
    for call in [Call::BeginCapture, Call::CaptureInfo] {
        for mode in CaptureMode::ALL {
            let stage = Stage::new();
            let arena = stage.arena_of(ArenaConfig { mode, ..ArenaConfig::default() });
            stage.rig.sim.set_faults(FaultPlan::nth_of(call, 1).with_code(1));
            let error = stage.rig.allocator.capture(stage.a, &arena, || panic!("it never runs"));
            let error = error.expect_err("the call fails");
            assert!(matches!(error, CaptureError::Begin(_)), "{error}");
            stage.assert_serves();
            let (graph, ()) = stage.capture(stage.a, &arena, || ());
            stage.replay(&graph, stage.a);
            drop((graph, arena));
            stage.close();
        }
    }
}

#[test]
fn a_panic_in_the_closure_restores_the_allocator() {
    let stage = Stage::new();
    let arena = stage.arena();
    let before = stage.malloc(SIZE, stage.a);
    let mut before = Some(before);
    let died = catch_unwind(AssertUnwindSafe(|| {
        let captured = stage.rig.allocator.capture(stage.a, &arena, || {
            let block = stage.malloc(SIZE, stage.a);
            stage.fill(stage.a, &block, 1);
            stage.free(block, stage.a);
            stage.free(before.take().expect("it is taken once"), stage.a);
            stage.order(stage.a, stage.b);
            panic!("a bug of the program");
        });
        drop(captured);
    }));
    assert!(died.is_err());
    stage.assert_serves();
    assert_eq!(arena.report().blocks, 0);
    let (graph, ()) = stage.capture(stage.a, &arena, || ());
    drop((graph, arena));
    stage.close();
}

#[test]
fn a_spoilt_capture_is_an_error_and_the_stream_is_out_of_it() {
    let stage = Stage::new();
    let arena = stage.arena();
    let mut escaped = None;
    let spoilt = stage.rig.allocator.capture(stage.a, &arena, || {
        escaped = Some(stage.malloc(SIZE, stage.a));
        stage.rig.sim.synchronize_stream(stage.raw(stage.a)).expect_err("it captures");
        // From here on the capture cannot be asked.
        let refused = stage.rig.allocator.malloc(SIZE, stage.a).expect_err("it is spoilt");
        assert!(matches!(refused, AllocError::Driver(_)), "{refused}");
        // The other stream is served as ever.
        let other = stage.malloc(SIZE, stage.b);
        stage.free(other, stage.b);
    });
    assert!(matches!(spoilt, Err(CaptureError::Invalidated(_))));
    stage.assert_serves();
    // A block it made is still a block.
    let escaped = escaped.expect("it was made");
    stage.fill(stage.a, &escaped, 1);
    stage.free(escaped, stage.a);
    drop(arena);
    stage.close();
}

#[test]
fn a_block_of_a_spoilt_capture_may_be_freed_inside_it() {
    let stage = Stage::new();
    let arena = stage.arena();
    let spoilt = stage.rig.allocator.capture(stage.a, &arena, || {
        let block = stage.malloc(SIZE, stage.a);
        stage.rig.sim.synchronize_stream(stage.raw(stage.a)).expect_err("it captures");
        stage.free(block, stage.a);
    });
    assert!(spoilt.is_err());
    assert_eq!(arena.report().blocks, 0);
    stage.assert_serves();
    drop(arena);
    stage.close();
}

#[test]
fn a_fork_that_was_not_joined_is_an_error() {
    let stage = Stage::new();
    let arena = stage.arena();
    let spoilt = stage.rig.allocator.capture(stage.a, &arena, || {
        stage.order(stage.a, stage.b);
        let block = stage.malloc(SIZE, stage.b);
        stage.fill(stage.b, &block, 1);
        stage.free(block, stage.b);
    });
    let error = spoilt.expect_err("nobody joined");
    assert!(matches!(error, CaptureError::Invalidated(_)), "{error}");
    assert!(error.to_string().contains("join every stream"), "{error}");
    stage.assert_serves();
    drop(arena);
    stage.close();
}

#[test]
fn a_capture_that_is_begun_twice_is_refused_and_the_first_goes_on() {
    let stage = Stage::new();
    let (arena, other) = (stage.arena(), stage.arena());
    let (graph, ()) = stage.capture(stage.a, &arena, || {
        let refused = stage.rig.allocator.capture(stage.a, &arena, || ());
        assert!(matches!(refused, Err(CaptureError::ArenaBusy)));
        let refused = stage.rig.allocator.capture(stage.b, &arena, || ());
        assert!(matches!(refused, Err(CaptureError::ArenaBusy)));
        let refused = stage.rig.allocator.capture(stage.a, &other, || ());
        assert!(matches!(refused, Err(CaptureError::Begin(_))));
        let block = stage.malloc(SIZE, stage.a);
        stage.fill(stage.a, &block, 1);
        stage.free(block, stage.a);
    });
    assert_eq!(graph.report().blocks, 1);
    stage.replay(&graph, stage.a);
    let (more, ()) = stage.capture(stage.b, &other, || ());
    drop((graph, more, arena, other));
    stage.close();
}

#[test]
fn a_capture_that_is_ended_twice_is_refused_and_the_graph_lives() {
    let stage = Stage::new();
    let arena = stage.arena();
    let mut capture = stage.rig.allocator.begin_capture(stage.a, &arena).expect("nothing runs");
    let graph = capture.end().expect("nothing spoilt it");
    for _ in 0..2 {
        let refused = capture.end().expect_err("it is over");
        assert!(matches!(refused, CaptureError::Over), "{refused}");
    }
    drop(capture);
    stage.replay(&graph, stage.a);
    stage.assert_serves();
    let (again, ()) = stage.capture(stage.a, &arena, || ());
    drop((graph, again, arena));
    stage.close();
}

#[test]
fn a_capture_that_another_thread_tries_to_end_goes_on() {
    let stage = Stage::new();
    let arena = stage.arena();
    let mut capture = stage.rig.allocator.begin_capture(stage.a, &arena).expect("nothing runs");
    let block = stage.malloc(SIZE, stage.a);
    stage.fill(stage.a, &block, 4);
    let refused = std::thread::scope(|scope| {
        scope.spawn(|| capture.end().expect_err("it began elsewhere")).join()
    });
    let refused = refused.expect("the thread does not panic");
    assert!(matches!(refused, CaptureError::OtherThread(_)), "{refused}");
    assert!(stage.is_capturing(stage.a));
    let more = stage.malloc(SIZE, stage.a);
    stage.copy(stage.a, &block, &more);
    let graph = capture.end().expect("here it began");
    drop(capture);
    assert_eq!(graph.report().blocks, 2);
    stage.replay(&graph, stage.a);
    assert_eq!(stage.byte(&more), 4);
    stage.free(block, stage.a);
    stage.free(more, stage.a);
    drop((graph, arena));
    stage.close();
}

#[test]
fn an_arena_of_another_allocator_is_refused() {
    let (stage, elsewhere) = (Stage::new(), Stage::new());
    let arena = elsewhere.arena();
    let refused = stage.rig.allocator.capture(stage.a, &arena, || ());
    assert!(matches!(refused, Err(CaptureError::ForeignArena)));
    let (graph, block) = elsewhere.capture(elsewhere.a, &arena, || {
        let block = elsewhere.malloc(SIZE, elsewhere.a);
        elsewhere.fill(elsewhere.a, &block, 1);
        block
    });
    let refused = stage.rig.allocator.free(block, stage.a).expect_err("it is not ours");
    let FreeError::Foreign(block) = refused else { panic!("{refused}") };
    elsewhere.free(block, elsewhere.a);
    drop((graph, arena));
    stage.close();
    elsewhere.close();
}

#[test]
fn streams_that_are_gone_and_arenas_that_cannot_be_are_refused() {
    let stage = Stage::new();
    let arena = stage.arena();
    let (graph, ()) = stage.capture(stage.a, &arena, || ());
    let gone = stage.rig.allocator.create_stream().expect("a stream can be made");
    stage.rig.allocator.destroy_stream(gone).expect("it is open");
    let refused = stage.rig.allocator.capture(gone, &arena, || ());
    assert!(matches!(refused, Err(CaptureError::UnknownStream(stream)) if stream == gone));
    let refused = graph.launch(gone).expect_err("it is gone");
    assert!(matches!(refused, LaunchError::UnknownStream(stream) if stream == gone));
    for capacity in [Bytes::ZERO, Bytes::new(u64::MAX)] {
        let refused =
            stage.rig.allocator.graph_arena(ArenaConfig { capacity, ..ArenaConfig::default() });
        assert!(matches!(refused, Err(ArenaError::Capacity { .. })), "{capacity}");
    }
    let refused = stage.rig.allocator.capture(stage.a, &arena, || {
        stage
            .rig
            .allocator
            .malloc(Bytes::new(u64::MAX), stage.a)
            .expect_err("there is no such size")
    });
    let (more, error) = refused.expect("the capture goes on");
    assert!(error.is_out_of_memory(), "{error}");
    for preset in Preset::ALL.into_iter().filter(|&preset| preset != Preset::Vramp) {
        let rig = Rig::new(preset);
        let refused = rig.allocator.graph_arena(ArenaConfig::default());
        assert!(matches!(refused, Err(ArenaError::NotSupported)), "{}", preset.name());
    }
    drop((graph, more, arena));
    stage.close();
}

#[test]
fn a_stream_that_captures_is_not_destroyed() {
    let stage = Stage::new();
    let arena = stage.arena();
    let stream = stage.rig.allocator.create_stream().expect("a stream can be made");
    let (graph, block) = stage.capture(stream, &arena, || {
        let block = stage.malloc(SIZE, stream);
        stage.fill(stream, &block, 1);
        let refused = stage.rig.allocator.destroy_stream(stream).expect_err("it captures");
        assert!(matches!(refused, StreamError::Capturing(which) if which == stream), "{refused}");
        block
    });
    stage.rig.allocator.destroy_stream(stream).expect("it captures no more");
    stage.replay(&graph, stage.a);
    assert_eq!(stage.byte(&block), 1);
    stage.free(block, stage.a);
    drop((graph, arena));
    stage.close();
}

// --- other threads ---

#[test]
fn a_second_thread_that_allocates_meanwhile_is_served_outside_of_the_arena() {
    for mode in [CaptureMode::ThreadLocal, CaptureMode::Global, CaptureMode::Relaxed] {
        let stage = Stage::new();
        let arena = stage.arena_of(ArenaConfig { mode, ..ArenaConfig::default() });
        let (graph, output) = stage.capture(stage.a, &arena, || {
            let first = stage.malloc(SIZE, stage.a);
            let start = range(&first).start;
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        for size in [1 << 10, 1 << 20, 5 << 20, 33 << 20] {
                            let block = stage.malloc(Bytes::new(size), stage.b);
                            let at = range(&block).start;
                            assert!(at < start || at.number() >= start.number() + (1 << 40));
                            stage.free(block, stage.b);
                        }
                    });
                }
            });
            stage.fill(stage.a, &first, 2);
            first
        });
        assert_eq!(graph.report().blocks, 1, "{mode:?}");
        stage.replay(&graph, stage.a);
        assert_eq!(stage.byte(&output), 2);
        stage.free(output, stage.a);
        drop((graph, arena));
        stage.close();
    }
}

#[test]
fn two_threads_capture_at_once_each_into_its_own_arena() {
    let stage = Stage::new();
    let outputs = std::thread::scope(|scope| {
        let threads = [(stage.a, 1), (stage.b, 2)].map(|(stream, byte)| {
            let stage = &stage;
            scope.spawn(move || {
                let arena = stage.arena();
                let captured = stage.rig.allocator.capture(stream, &arena, || {
                    let mut last = stage.malloc(SIZE, stream);
                    stage.fill(stream, &last, byte);
                    for _ in 0..50 {
                        let next = stage.malloc(SIZE, stream);
                        stage.copy(stream, &last, &next);
                        stage.free(std::mem::replace(&mut last, next), stream);
                    }
                    last
                });
                let (graph, output) = captured.expect("nobody disturbs it");
                drop(graph.launch(stream).expect("the arena is its own"));
                (graph, arena, output, stream, byte)
            })
        });
        threads.map(|thread| thread.join().expect("it does not panic"))
    });
    stage.audit();
    for (graph, arena, output, stream, byte) in outputs {
        assert_eq!(stage.byte(&output), byte);
        stage.free(output, stream);
        drop((graph, arena));
    }
    stage.close();
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
    let stage = Stage::new();
    let capacity = Bytes::mib(64);
    let arena = stage.arena_of(ArenaConfig { policy, capacity, ..ArenaConfig::default() });
    let kept = stage.malloc(SIZE, stage.a);
    let (graph, block) = stage.capture(stage.a, &arena, || {
        let block = stage.malloc(SIZE, stage.a);
        stage.write("replay", stage.a, &block, 1 << 20);
        stage.read("replay", stage.a, &kept, 1 << 20);
        stage.free(kept, stage.a);
        block
    });
    let lease = graph.launch(stage.b).expect("nobody uses the arena");
    stage.rig.allocator.record_use(&block, stage.b).expect("it is ours");
    let mut held =
        Holdings { graph: Some(graph), arena: Some(arena), block: Some(block), lease: Some(lease) };
    let Stage { rig, a, .. } = stage;
    let Rig { sim, allocator, .. } = rig;
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
                    assert!(matches!(refused, LaunchError::Closed), "{refused}");
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
    let stage = Stage::limited(Bytes::mib(64));
    let arena = stage.arena();
    let (graph, block) = stage.capture(stage.a, &arena, || stage.malloc(Bytes::mib(60), stage.a));
    let lease = graph.launch(stage.a).expect("nobody uses the arena");
    let refused = stage.rig.allocator.malloc(Bytes::mib(60), stage.b).expect_err("it is full");
    assert!(refused.is_out_of_memory());
    drop((graph, arena));
    stage.free(block, stage.a);
    drop(lease);
    let all = stage.malloc(Bytes::mib(60), stage.b);
    stage.fill(stage.b, &all, 1);
    stage.free(all, stage.b);
    stage.close();
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
