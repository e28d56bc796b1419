//! What others test of captured graphs, each as a test of ours: PyTorch's private pools, cubecl's
//! captures and CUDA graphs, numr's arena. Replays are compared with the eager run byte by byte.

use crate::common;
use crate::common::graphs::{Stage, range};
use crate::common::random::Random;
use vramp_alloc::graph::{ArenaConfig, CapturedGraph, LaunchError};
use vramp_alloc::{AllocError, Allocation, Bytes, StreamId};

const MIB: Bytes = Bytes::mib(1);

/// Copies and fills on two streams, from an input to an output; the same for the same seed, eager
/// or captured.
fn program(stage: &Stage, seed: u64, input: &Allocation, output: &Allocation) {
    let mut random = Random(seed);
    let (a, b) = (stage.a, stage.b);
    let mut last = stage.malloc(MIB, a);
    stage.copy(a, input, &last);
    for step in 0..30 {
        let next = stage.malloc(MIB, a);
        stage.copy(a, &last, &next);
        if random.below(3) == 0 {
            // A side branch that writes the second half.
            stage.order(a, b);
            let side = stage.malloc(MIB, b);
            stage.fill(b, &side, step + 1);
            let half = Bytes::new(MIB.count() / 2);
            let copy =
                vramp_driver::DeviceCopy { from: side.addr(), to: next.addr() + half, len: half };
            vramp_alloc::Driver::copy(&*stage.rig.sim, stage.raw(b), copy).expect("it takes work");
            stage.free(side, b);
            stage.order(b, a);
        }
        stage.free(std::mem::replace(&mut last, next), a);
    }
    stage.copy(a, &last, output);
    stage.free(last, a);
}

// --- PyTorch ---

#[test]
fn replays_equal_the_eager_run_byte_by_byte() {
    let stage = Stage::new();
    for seed in 0..10 {
        let arena = stage.arena_of(ArenaConfig { replan: false, ..ArenaConfig::default() });
        let [input, eager, output] = [0; 3].map(|_| stage.malloc(MIB, stage.a));
        stage.fill(stage.a, &input, 42);
        program(&stage, seed, &input, &eager);
        let (graph, ()) = stage.capture(stage.a, &arena, || program(&stage, seed, &input, &output));
        for byte in [42, 43, 44] {
            // New input, same addresses.
            stage.fill(stage.a, &input, byte);
            program(&stage, seed, &input, &eager);
            stage.replay(&graph, stage.a);
            assert_eq!(stage.bytes(&eager), stage.bytes(&output), "seed {seed}");
        }
        [input, eager, output].into_iter().for_each(|block| stage.free(block, stage.a));
        drop((graph, arena));
    }
    stage.close();
}

/// Graphs in a row over one arena; each takes what the one before left in the arena.
fn successive(count: u8) {
    let stage = Stage::new();
    let arena = stage.arena();
    let mut graphs: Vec<CapturedGraph> = Vec::new();
    let mut between: Option<Allocation> = None;
    let output = stage.malloc(MIB, stage.a);
    for byte in 1..=count {
        let (graph, next) = stage.capture(stage.a, &arena, || {
            let next = stage.malloc(MIB * 2, stage.a);
            match between.take() {
                Some(before) => {
                    stage.copy(stage.a, &before, &next);
                    stage.free(before, stage.a);
                }
                None => stage.fill(stage.a, &next, byte),
            }
            if byte == count {
                stage.copy(stage.a, &next, &output);
            }
            next
        });
        graphs.push(graph);
        between = Some(next);
    }
    for stream in [stage.a, stage.b, stage.a] {
        stage.fill(stage.a, &output, 0);
        stage.order(stage.a, stage.b);
        graphs.iter().for_each(|graph| stage.replay(graph, stream));
        assert_eq!(stage.byte(&output), 1);
    }
    let last = between.expect("the last one's");
    stage.free(last, stage.a);
    stage.free(output, stage.a);
    drop((graphs, arena));
    stage.close();
}

#[test]
fn two_graphs_in_a_row_share_an_arena() {
    successive(2);
}

#[test]
fn three_graphs_in_a_row_share_an_arena() {
    successive(3);
}

#[test]
fn concurrent_replays_of_graphs_with_arenas_of_their_own_run_and_of_one_arena_are_refused() {
    let stage = Stage::new();
    let arenas = [stage.arena(), stage.arena()];
    let outputs = [1, 2].map(|_| stage.malloc(MIB, stage.a));
    let graphs: Vec<CapturedGraph> = (arenas.iter().zip(&outputs).zip(1..))
        .map(|((arena, output), byte)| {
            let body = || {
                let block = stage.malloc(MIB, stage.a);
                stage.fill(stage.a, &block, byte);
                stage.write("slow", stage.a, &block, 1 << 20);
                stage.copy(stage.a, &block, output);
                stage.free(block, stage.a);
            };
            stage.capture(stage.a, arena, body).0
        })
        .collect();
    stage.replay(&graphs[0], stage.a);
    stage.replay(&graphs[1], stage.b);
    assert!(matches!(graphs[0].launch(stage.b), Err(LaunchError::Busy(_))));
    assert_eq!(outputs.each_ref().map(|output| stage.byte(output)), [1, 2]);
    outputs.into_iter().for_each(|output| stage.free(output, stage.a));
    drop((graphs, arenas));
    stage.close();
}

#[test]
fn statistics_are_exact_and_a_result_lives_on_after_its_graph() {
    let stage = Stage::new();
    let live = || stage.rig.allocator.stats().expect("no call fails").live;
    assert_eq!(live(), Bytes::ZERO);
    let arena = stage.arena();
    let (graph, result) = stage.capture(stage.a, &arena, || {
        let inner = stage.malloc(MIB * 3, stage.a);
        stage.fill(stage.a, &inner, 9);
        let result = stage.malloc(MIB, stage.a);
        stage.copy(stage.a, &inner, &result);
        stage.free(inner, stage.a);
        result
    });
    assert_eq!(live(), MIB);
    let report = arena.report();
    assert_eq!((report.live, report.blocks, report.high_water), (MIB, 1, MIB * 4));
    assert_eq!((report.backed, report.lent), (stage.rig.census().arenas, Bytes::ZERO));
    stage.replay(&graph, stage.a);
    drop(graph);
    drop(arena);
    assert_eq!(stage.byte(&result), 9);
    assert_eq!(live(), MIB);
    stage.free(result, stage.a);
    assert_eq!(live(), Bytes::ZERO);
    assert_eq!(stage.rig.census().arenas, Bytes::ZERO, "the arena went with its last block");
    stage.close();
}

#[test]
fn a_use_on_a_forked_stream_that_is_noted_keeps_the_block_within_the_capture() {
    let stage = Stage::new();
    let arena = stage.arena();
    let (graph, (at, reused, after)) = stage.capture(stage.a, &arena, || {
        let block = stage.malloc(MIB, stage.a);
        stage.write("producer", stage.a, &block, 10);
        stage.order(stage.a, stage.b);
        stage.read("reader", stage.b, &block, 1 << 20);
        stage.rig.allocator.record_use(&block, stage.b).expect("it is ours");
        let at = range(&block).start;
        stage.free(block, stage.a);
        let next = stage.malloc(MIB, stage.a);
        let reused = range(&next).start;
        stage.write("next", stage.a, &next, 10);
        stage.order(stage.b, stage.a);
        let last = stage.malloc(MIB, stage.a);
        let after = range(&last).start;
        stage.write("last", stage.a, &last, 10);
        stage.free(next, stage.a);
        stage.free(last, stage.a);
        (at, reused, after)
    });
    assert_ne!(reused, at, "the reader is not over");
    assert_eq!(after, at, "it is, behind the join");
    stage.replay(&graph, stage.a);
    drop((graph, arena));
    stage.close();
}

#[test]
fn a_block_of_a_capture_is_its_streams() {
    let stage = Stage::new();
    let arena = stage.arena();
    let (graph, ()) = stage.capture(stage.a, &arena, || {
        stage.order(stage.a, stage.b);
        for stream in [stage.a, stage.b] {
            let block = stage.malloc(MIB, stream);
            assert_eq!(block.stream(), stream);
            stage.free(block, stream);
        }
        stage.order(stage.b, stage.a);
    });
    drop((graph, arena));
    stage.close();
}

#[test]
fn a_hundred_captures_of_one_shape_take_no_more_than_one() {
    let stage = Stage::new();
    let arena = stage.arena();
    let mut reserved = None;
    for _ in 0..100 {
        let (graph, ()) = stage.capture(stage.a, &arena, || {
            for _ in 0..4 {
                let [x, y] = [2, 3].map(|size| stage.malloc(MIB * size, stage.a));
                stage.fill(stage.a, &x, 1);
                stage.free(x, stage.a);
                stage.free(y, stage.a);
            }
        });
        stage.replay(&graph, stage.a);
        let now = stage.rig.census().reserved;
        assert_eq!(*reserved.get_or_insert(now), now);
    }
    drop(arena);
    stage.close();
}

/// Memory freed on forked streams is not used again before they are joined, and is after.
fn reclaimed_after_the_join(forks: usize) {
    let stage = Stage::new();
    let arena = stage.arena();
    let side: Vec<StreamId> = (0..forks)
        .map(|_| stage.rig.allocator.create_stream().expect("a stream can be made"))
        .collect();
    let (graph, ()) = stage.capture(stage.a, &arena, || {
        let mut freed = Vec::new();
        for &stream in &side {
            stage.order(stage.a, stream);
            let block = stage.malloc(MIB, stream);
            stage.write("side", stream, &block, 1 << 16);
            freed.push(range(&block).start);
            stage.free(block, stream);
        }
        let early = stage.malloc(MIB, stage.a);
        stage.write("early", stage.a, &early, 10);
        assert!(!freed.contains(&range(&early).start), "nobody joined yet");
        side.iter().for_each(|&stream| stage.order(stream, stage.a));
        let late: Vec<Allocation> = side.iter().map(|_| stage.malloc(MIB, stage.a)).collect();
        for block in &late {
            assert!(freed.contains(&range(block).start), "all are joined");
            stage.write("late", stage.a, block, 10);
        }
        late.into_iter().chain([early]).for_each(|block| stage.free(block, stage.a));
    });
    stage.replay(&graph, stage.a);
    stage.replay(&graph, stage.a);
    drop((graph, arena));
    stage.close();
}

#[test]
fn memory_of_two_forked_streams_is_reclaimed_behind_their_join() {
    reclaimed_after_the_join(2);
}

#[test]
fn memory_of_four_forked_streams_is_reclaimed_behind_their_join() {
    reclaimed_after_the_join(4);
}

// --- cubecl ---

#[test]
fn a_capture_holds_the_memory_it_touched_until_the_graph_and_arena_are_gone() {
    let stage = Stage::limited(MIB * 32);
    let arena = stage.arena();
    let untouched = stage.malloc(MIB * 8, stage.a);
    let touched = stage.malloc(MIB * 8, stage.a);
    stage.fill(stage.a, &touched, 3);
    let output = stage.malloc(MIB, stage.a);
    let (graph, ()) = stage.capture(stage.a, &arena, || {
        stage.copy(stage.a, &touched, &output);
        stage.free(touched, stage.a);
    });
    // Not what it did not touch.
    stage.free(untouched, stage.a);
    assert_eq!(graph.report().kept, MIB * 8);
    // Cleaning up leaves it alone.
    stage.sync(stage.a);
    stage.rig.allocator.trim(Bytes::ZERO).expect("no call fails");
    let pressure = stage.malloc(MIB * 20, stage.b);
    stage.fill(stage.b, &pressure, 4);
    stage.replay(&graph, stage.a);
    assert_eq!(stage.byte(&output), 3);
    let refused = stage.rig.allocator.malloc(MIB * 8, stage.b).expect_err("the graph has it");
    assert!(refused.is_out_of_memory());
    drop(graph);
    let freed = stage.malloc(MIB * 8, stage.b);
    stage.fill(stage.b, &freed, 1);
    stage.free(freed, stage.b);
    stage.free(pressure, stage.b);
    stage.free(output, stage.a);
    drop(arena);
    stage.close();
}

#[test]
fn an_arena_captures_again_and_again_and_beside_another() {
    let stage = Stage::new();
    let (arena, other) = (stage.arena(), stage.arena());
    for _ in 0..3 {
        let (outer, inner) = stage.capture(stage.a, &arena, || {
            let block = stage.malloc(MIB, stage.a);
            // Another stream captures into another arena meanwhile.
            let (inner, ()) = stage.capture(stage.b, &other, || {
                let block = stage.malloc(MIB, stage.b);
                stage.fill(stage.b, &block, 2);
                stage.free(block, stage.b);
            });
            stage.fill(stage.a, &block, 1);
            stage.free(block, stage.a);
            inner
        });
        assert_eq!((outer.report().blocks, inner.report().blocks), (1, 1));
        stage.replay(&outer, stage.a);
        stage.replay(&inner, stage.b);
    }
    drop((arena, other));
    stage.close();
}

#[test]
fn the_first_capture_leaves_the_memory_that_the_next_one_needs() {
    let stage = Stage::new();
    let arena = stage.arena();
    let body = || {
        let blocks = [5, 1, 7, 3].map(|size| stage.malloc(MIB * size, stage.a));
        blocks.iter().for_each(|block| stage.fill(stage.a, block, 1));
        blocks.into_iter().for_each(|block| stage.free(block, stage.a));
    };
    let (first, ()) = stage.capture(stage.a, &arena, body);
    let creates = stage.rig.sim.calls_of(vramp_driver::Call::Create);
    let (second, ()) = stage.capture(stage.a, &arena, body);
    assert_eq!(stage.rig.sim.calls_of(vramp_driver::Call::Create), creates, "nothing grows");
    assert_eq!(first.report().planned, Some(second.report().taken), "it follows the plan");
    drop((first, second, arena));
    stage.close();
}

#[test]
fn a_capture_that_outgrows_its_arena_is_told_the_sizes() {
    let stage = Stage::new();
    let arena = stage.monotone(MIB * 4);
    let (graph, refused) = stage.capture(stage.a, &arena, || {
        let block = stage.malloc(MIB * 3, stage.a);
        stage.free(block, stage.a);
        stage.rig.allocator.malloc(MIB * 2, stage.a).expect_err("3 and 2 are more than 4")
    });
    assert!(matches!(refused, AllocError::Arena(_)) && refused.is_out_of_memory(), "{refused}");
    let text = refused.to_string();
    assert!(text.contains("2.00 MiB") && text.contains("4.00 MiB"), "{text}");
    stage.replay(&graph, stage.a);
    drop((graph, arena));
    stage.close();
}

#[test]
fn many_launches_see_each_new_input() {
    let stage = Stage::new();
    let arena = stage.arena();
    let [input, output] = [0; 2].map(|_| stage.malloc(MIB, stage.a));
    let (graph, ()) = stage.capture(stage.a, &arena, || {
        let inner = stage.malloc(MIB, stage.a);
        stage.copy(stage.a, &input, &inner);
        stage.copy(stage.a, &inner, &output);
        stage.free(inner, stage.a);
    });
    for byte in 0..100 {
        stage.fill(stage.a, &input, byte);
        stage.replay(&graph, stage.a);
        assert_eq!(stage.byte(&output), byte);
    }
    stage.free(input, stage.a);
    stage.free(output, stage.a);
    drop((graph, arena));
    stage.close();
}

#[test]
fn intermediates_are_used_again_within_a_capture() {
    let stage = Stage::new();
    let arena = stage.arena();
    let (graph, ()) = stage.capture(stage.a, &arena, || {
        for _ in 0..50 {
            let block = stage.malloc(MIB, stage.a);
            stage.fill(stage.a, &block, 1);
            stage.free(block, stage.a);
        }
    });
    let report = graph.report();
    assert_eq!((report.taken, report.monotone, report.lower_bound), (MIB, MIB * 50, MIB));
    stage.replay(&graph, stage.a);
    drop((graph, arena));
    stage.close();
}

// --- numr ---

#[test]
fn a_monotone_arena_bumps_aligns_never_goes_back_and_ends() {
    let stage = Stage::new();
    let page = common::PAGE;
    let arena = stage.monotone(page);
    let (graph, ()) = stage.capture(stage.a, &arena, || {
        let p0 = stage.malloc(Bytes::new(100), stage.a);
        let p1 = stage.malloc(Bytes::new(512), stage.a);
        let base = range(&p0).start.number();
        assert_eq!((base % 256, range(&p1).start.number()), (0, base + 256));
        assert_eq!((arena.report().high_water, arena.report().blocks), (Bytes::new(768), 2));
        stage.free(p1, stage.a);
        assert_eq!((arena.report().high_water, arena.report().blocks), (Bytes::new(768), 1));
        let p2 = stage.malloc(Bytes::new(256), stage.a);
        assert_eq!(range(&p2).start.number(), base + 768);
        stage.free(p0, stage.a);
        stage.free(p2, stage.a);
        assert_eq!((arena.report().high_water, arena.report().blocks), (Bytes::kib(1), 0));
        let rest = stage.malloc(page - Bytes::kib(1), stage.a);
        let full = stage.rig.allocator.malloc(Bytes::new(1), stage.a).expect_err("it is full");
        assert!(full.is_out_of_memory(), "{full}");
        arena.reset().expect_err("a capture runs");
        stage.free(rest, stage.a);
    });
    drop(graph);
    arena.reset().expect("nobody holds a block");
    assert_eq!(arena.report().high_water, Bytes::ZERO);
    drop(arena);
    stage.close();
}

#[test]
fn a_captured_sum_has_the_eager_result_and_its_addresses_stay() {
    let stage = Stage::new();
    let arena = stage.monotone(MIB * 16);
    let [input, output, eager] = [0; 3].map(|_| stage.malloc(MIB, stage.a));
    stage.fill(stage.a, &input, 11);
    let (graph, inner) = stage.capture(stage.a, &arena, || {
        let inner = stage.malloc(MIB, stage.a);
        stage.copy(stage.a, &input, &inner);
        stage.copy(stage.a, &inner, &output);
        inner
    });
    stage.copy(stage.a, &input, &eager);
    let addresses = range(&inner);
    stage.replay(&graph, stage.a);
    assert_eq!(stage.bytes(&output), stage.bytes(&eager));
    assert_eq!(stage.bytes(&inner), stage.bytes(&eager));
    // Whatever is asked for after the capture lies elsewhere.
    let others = [stage.a, stage.b].map(|stream| stage.malloc(MIB, stream));
    assert!(others.iter().all(|other| range(other).start != addresses.start));
    for (other, stream) in others.into_iter().zip([stage.a, stage.b]) {
        stage.free(other, stream);
    }
    [input, output, eager, inner].into_iter().for_each(|block| stage.free(block, stage.a));
    drop((graph, arena));
    stage.close();
}

// --- nobody's ---

#[test]
fn two_hundred_graphs_over_one_arena_need_what_the_largest_needs() {
    let stage = Stage::new();
    let arena = stage.arena();
    let graphs: Vec<CapturedGraph> = (0..200)
        .map(|number: u64| {
            let size = MIB * (1 + number * 7 % 64);
            let body = || {
                let block = stage.malloc(size, stage.a);
                stage.write("graph", stage.a, &block, 10);
                stage.free(block, stage.a);
            };
            stage.capture(stage.a, &arena, body).0
        })
        .collect();
    assert!(
        arena.report().backed.count() * 100 <= (MIB * 64).count() * 105,
        "{:?}",
        arena.report()
    );
    graphs.iter().for_each(|graph| stage.replay(graph, stage.a));
    assert!(stage.rig.census().reserved.count() * 100 <= (MIB * 64).count() * 105);
    drop((graphs, arena));
    stage.close();
}

#[test]
fn the_second_capture_of_a_shape_follows_the_plan_of_the_first() {
    let stage = Stage::new();
    let arena = stage.arena();
    // Long-lived blocks that come late leave holes where first fit puts them.
    let body = || {
        let a = stage.malloc(MIB * 2, stage.a);
        let b = stage.malloc(MIB * 4, stage.a);
        stage.fill(stage.a, &a, 1);
        stage.fill(stage.a, &b, 1);
        stage.free(a, stage.a);
        let c = stage.malloc(MIB, stage.a);
        stage.fill(stage.a, &c, 1);
        stage.free(b, stage.a);
        let d = stage.malloc(MIB * 6, stage.a);
        stage.fill(stage.a, &d, 1);
        stage.free(c, stage.a);
        stage.free(d, stage.a);
    };
    let (first, ()) = stage.capture(stage.a, &arena, body);
    let (second, ()) = stage.capture(stage.a, &arena, body);
    let report = second.report();
    assert_eq!(Some(report.taken), first.report().planned);
    assert!(report.lower_bound <= report.taken && report.taken <= first.report().taken);
    assert!(first.report().taken <= report.monotone);
    for graph in [&first, &second, &first] {
        stage.replay(graph, stage.a);
    }
    drop((first, second, arena));
    stage.close();
}
