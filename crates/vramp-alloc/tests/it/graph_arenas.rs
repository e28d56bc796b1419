//! What others test of captured graphs, each as a test of ours: PyTorch's private pools, cubecl's
//! captures and CUDA graphs, numr's arena. Replays are compared with the eager run byte by byte.

use vramp_alloc::graph::{ArenaConfig, CapturedGraph, LaunchError};
use vramp_alloc::{AllocError, Allocation, Bytes, Config, StreamId};
use vramp_driver::Call;
use vramp_driver::sim::{Contents, Simulator};

use crate::common;
use crate::common::Random;
use crate::common::graph_rig::{GraphRig, LONG_NS, range};

const MIB: Bytes = Bytes::mib(1);

/// Copies and fills on two streams, from an input to an output; the same for the same seed, eager
/// or captured.
fn program(rig: &GraphRig, seed: u64, input: &Allocation, output: &Allocation) {
    let mut random = Random(seed);
    let (a, b) = (rig.a, rig.b);
    let mut last = rig.malloc(MIB, a);
    rig.copy(a, input, &last);
    for step in 0..30 {
        let next = rig.malloc(MIB, a);
        rig.copy(a, &last, &next);
        if random.below(3) == 0 {
            // A side branch that writes the second half.
            rig.order(a, b);
            let side = rig.malloc(MIB, b);
            rig.fill(b, &side, step + 1);
            let half = Bytes::new(MIB.count() / 2);
            let copy =
                vramp_driver::DeviceCopy { from: side.addr(), to: next.addr() + half, len: half };
            vramp_alloc::Driver::copy(&*rig.base.sim, rig.raw(b), copy).expect("it takes work");
            rig.free(side, b);
            rig.order(b, a);
        }
        rig.free(std::mem::replace(&mut last, next), a);
    }
    rig.copy(a, &last, output);
    rig.free(last, a);
}

// --- PyTorch ---

#[test]
fn replays_equal_the_eager_run_byte_by_byte() {
    let rig = GraphRig::new();
    for seed in vramp_testing::seeds(5) {
        let arena = rig.arena_of(ArenaConfig { replan: false, ..ArenaConfig::default() });
        let [input, eager, output] = [0; 3].map(|_| rig.malloc(MIB, rig.a));
        rig.fill(rig.a, &input, 42);
        program(&rig, seed, &input, &eager);
        let (graph, ()) = rig.capture(rig.a, &arena, || program(&rig, seed, &input, &output));
        for byte in [42, 43, 44] {
            // New input, same addresses.
            rig.fill(rig.a, &input, byte);
            program(&rig, seed, &input, &eager);
            rig.replay(&graph, rig.a);
            assert_eq!(rig.bytes(&eager), rig.bytes(&output), "seed {seed}");
        }
        [input, eager, output].into_iter().for_each(|block| rig.free(block, rig.a));
        drop((graph, arena));
    }
    rig.close();
}

/// Graphs in a row over one arena; each takes what the one before left in the arena.
fn successive(count: u8) {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let mut graphs: Vec<CapturedGraph> = Vec::new();
    let mut between: Option<Allocation> = None;
    let output = rig.malloc(MIB, rig.a);
    for byte in 1..=count {
        let (graph, next) = rig.capture(rig.a, &arena, || {
            let next = rig.malloc(MIB * 2, rig.a);
            match between.take() {
                Some(before) => {
                    rig.copy(rig.a, &before, &next);
                    rig.free(before, rig.a);
                }
                None => rig.fill(rig.a, &next, byte),
            }
            if byte == count {
                rig.copy(rig.a, &next, &output);
            }
            next
        });
        graphs.push(graph);
        between = Some(next);
    }
    for stream in [rig.a, rig.b, rig.a] {
        rig.fill(rig.a, &output, 0);
        rig.order(rig.a, rig.b);
        graphs.iter().for_each(|graph| rig.replay(graph, stream));
        assert_eq!(rig.byte(&output), 1);
    }
    let last = between.expect("the last one's");
    rig.free(last, rig.a);
    rig.free(output, rig.a);
    drop((graphs, arena));
    rig.close();
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
fn a_replay_is_refused_for_what_the_last_replay_uses_and_not_for_what_its_stream_got_since() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let body = || {
        let block = rig.malloc(MIB, rig.a);
        rig.fill(rig.a, &block, 1);
        rig.free(block, rig.a);
    };
    let (graph, ()) = rig.capture(rig.a, &arena, body);
    rig.replay(&graph, rig.a);
    rig.sync(rig.a);
    // The program waited for the replay, and goes on with other work on its stream.
    let other = rig.malloc(MIB, rig.a);
    rig.write("other", rig.a, &other, LONG_NS);
    rig.replay(&graph, rig.b);
    rig.sync(rig.b);
    rig.replay(&graph, rig.a);
    let refused = graph.launch(rig.b).expect_err("it comes after the long write");
    assert!(matches!(refused, LaunchError::Busy(_)), "{refused}");
    rig.free(other, rig.a);
    drop((graph, arena));
    rig.close();
}

#[test]
fn the_events_of_replays_are_used_again() {
    for graphs_in_flight in [1, 100] {
        let rig =
            GraphRig::with(Simulator::builder().contents(Contents::Discarded), Config::default());
        let arena = rig.arena();
        let (graph, ()) = rig.capture(rig.a, &arena, || {
            let block = rig.malloc(MIB, rig.a);
            rig.write("step", rig.a, &block, 1000);
            rig.free(block, rig.a);
        });
        let calls = |call| rig.base.sim.calls_of(call);
        let replays = |count: u64| {
            for number in 0..count {
                drop(graph.launch(rig.a).expect("no other stream has the arena"));
                if number % graphs_in_flight == 0 {
                    rig.sync(rig.a);
                }
            }
        };
        replays(1_000);
        let made = calls(Call::CreateEvent);
        let (recorded, queried) = (calls(Call::Record), calls(Call::Query));
        replays(10_000);
        assert_eq!(calls(Call::CreateEvent), made, "{graphs_in_flight} in flight");
        assert_eq!(calls(Call::Record) - recorded, 10_000);
        let queries = calls(Call::Query) - queried;
        assert!(queries <= 2_500, "{queries} with {graphs_in_flight} in flight");
        drop((graph, arena));
        rig.close();
    }
}

#[test]
fn concurrent_replays_of_graphs_with_arenas_of_their_own_run_and_of_one_arena_are_refused() {
    let rig = GraphRig::new();
    let arenas = [rig.arena(), rig.arena()];
    let outputs = [1, 2].map(|_| rig.malloc(MIB, rig.a));
    let graphs: Vec<CapturedGraph> = (arenas.iter().zip(&outputs).zip(1..))
        .map(|((arena, output), byte)| {
            let body = || {
                let block = rig.malloc(MIB, rig.a);
                rig.fill(rig.a, &block, byte);
                rig.write("slow", rig.a, &block, 1 << 20);
                rig.copy(rig.a, &block, output);
                rig.free(block, rig.a);
            };
            rig.capture(rig.a, arena, body).0
        })
        .collect();
    rig.replay(&graphs[0], rig.a);
    rig.replay(&graphs[1], rig.b);
    assert!(matches!(graphs[0].launch(rig.b), Err(LaunchError::Busy(_))));
    assert_eq!(outputs.each_ref().map(|output| rig.byte(output)), [1, 2]);
    outputs.into_iter().for_each(|output| rig.free(output, rig.a));
    drop((graphs, arenas));
    rig.close();
}

#[test]
fn statistics_are_exact_and_a_result_lives_on_after_its_graph() {
    let rig = GraphRig::new();
    let live = || rig.base.allocator.stats().expect("no call fails").live;
    assert_eq!(live(), Bytes::ZERO);
    let arena = rig.arena();
    let (graph, result) = rig.capture(rig.a, &arena, || {
        let inner = rig.malloc(MIB * 3, rig.a);
        rig.fill(rig.a, &inner, 9);
        let result = rig.malloc(MIB, rig.a);
        rig.copy(rig.a, &inner, &result);
        rig.free(inner, rig.a);
        result
    });
    assert_eq!(live(), MIB);
    let report = arena.report();
    assert_eq!((report.live, report.blocks, report.high_water), (MIB, 1, MIB * 4));
    assert_eq!((report.backed, report.lent), (rig.base.census().arenas, Bytes::ZERO));
    rig.replay(&graph, rig.a);
    drop(graph);
    drop(arena);
    assert_eq!(rig.byte(&result), 9);
    assert_eq!(live(), MIB);
    rig.free(result, rig.a);
    assert_eq!(live(), Bytes::ZERO);
    assert_eq!(rig.base.census().arenas, Bytes::ZERO, "the arena went with its last block");
    rig.close();
}

#[test]
fn a_use_on_a_forked_stream_that_is_noted_keeps_the_block_within_the_capture() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (graph, (at, reused, after)) = rig.capture(rig.a, &arena, || {
        let block = rig.malloc(MIB, rig.a);
        rig.write("producer", rig.a, &block, 10);
        rig.order(rig.a, rig.b);
        rig.read("reader", rig.b, &block, 1 << 20);
        rig.base.allocator.record_use(&block, rig.b).expect("it is ours");
        let at = range(&block).start;
        rig.free(block, rig.a);
        let next = rig.malloc(MIB, rig.a);
        let reused = range(&next).start;
        rig.write("next", rig.a, &next, 10);
        rig.order(rig.b, rig.a);
        let last = rig.malloc(MIB, rig.a);
        let after = range(&last).start;
        rig.write("last", rig.a, &last, 10);
        rig.free(next, rig.a);
        rig.free(last, rig.a);
        (at, reused, after)
    });
    assert_ne!(reused, at, "the reader is not over");
    assert_eq!(after, at, "it is, behind the join");
    rig.replay(&graph, rig.a);
    drop((graph, arena));
    rig.close();
}

#[test]
fn a_block_of_a_capture_is_its_streams() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (graph, ()) = rig.capture(rig.a, &arena, || {
        rig.order(rig.a, rig.b);
        for stream in [rig.a, rig.b] {
            let block = rig.malloc(MIB, stream);
            assert_eq!(block.stream(), stream);
            rig.free(block, stream);
        }
        rig.order(rig.b, rig.a);
    });
    drop((graph, arena));
    rig.close();
}

#[test]
fn a_hundred_captures_of_one_shape_take_no_more_than_one() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let mut reserved = None;
    for _ in 0..100 {
        let (graph, ()) = rig.capture(rig.a, &arena, || {
            for _ in 0..4 {
                let [x, y] = [2, 3].map(|size| rig.malloc(MIB * size, rig.a));
                rig.fill(rig.a, &x, 1);
                rig.free(x, rig.a);
                rig.free(y, rig.a);
            }
        });
        rig.replay(&graph, rig.a);
        let now = rig.base.census().reserved;
        assert_eq!(*reserved.get_or_insert(now), now);
    }
    drop(arena);
    rig.close();
}

/// Memory freed on forked streams is not used again before they are joined, and is after.
fn reclaimed_after_the_join(forks: usize) {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let side: Vec<StreamId> = (0..forks)
        .map(|_| rig.base.allocator.create_stream().expect("a stream can be made"))
        .collect();
    let (graph, ()) = rig.capture(rig.a, &arena, || {
        let mut freed = Vec::new();
        for &stream in &side {
            rig.order(rig.a, stream);
            let block = rig.malloc(MIB, stream);
            rig.write("side", stream, &block, 1 << 16);
            freed.push(range(&block).start);
            rig.free(block, stream);
        }
        let early = rig.malloc(MIB, rig.a);
        rig.write("early", rig.a, &early, 10);
        assert!(!freed.contains(&range(&early).start), "no stream joined yet");
        side.iter().for_each(|&stream| rig.order(stream, rig.a));
        let late: Vec<Allocation> = side.iter().map(|_| rig.malloc(MIB, rig.a)).collect();
        for block in &late {
            assert!(freed.contains(&range(block).start), "all are joined");
            rig.write("late", rig.a, block, 10);
        }
        late.into_iter().chain([early]).for_each(|block| rig.free(block, rig.a));
    });
    rig.replay(&graph, rig.a);
    rig.replay(&graph, rig.a);
    drop((graph, arena));
    rig.close();
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
    let rig = GraphRig::limited(MIB * 32);
    let arena = rig.arena();
    let untouched = rig.malloc(MIB * 8, rig.a);
    let touched = rig.malloc(MIB * 8, rig.a);
    rig.fill(rig.a, &touched, 3);
    let output = rig.malloc(MIB, rig.a);
    let (graph, ()) = rig.capture(rig.a, &arena, || {
        rig.copy(rig.a, &touched, &output);
        rig.free(touched, rig.a);
    });
    // Not what it did not touch.
    rig.free(untouched, rig.a);
    assert_eq!(graph.report().kept, MIB * 8);
    // Cleaning up leaves it alone.
    rig.sync(rig.a);
    rig.base.allocator.trim(Bytes::ZERO).expect("no call fails");
    let pressure = rig.malloc(MIB * 20, rig.b);
    rig.fill(rig.b, &pressure, 4);
    rig.replay(&graph, rig.a);
    assert_eq!(rig.byte(&output), 3);
    let refused = rig.base.allocator.malloc(MIB * 8, rig.b).expect_err("the graph has it");
    assert!(refused.is_out_of_memory());
    drop(graph);
    let freed = rig.malloc(MIB * 8, rig.b);
    rig.fill(rig.b, &freed, 1);
    rig.free(freed, rig.b);
    rig.free(pressure, rig.b);
    rig.free(output, rig.a);
    drop(arena);
    rig.close();
}

#[test]
fn an_arena_captures_again_and_again_and_beside_another() {
    let rig = GraphRig::new();
    let (arena, other) = (rig.arena(), rig.arena());
    for _ in 0..3 {
        let (outer, inner) = rig.capture(rig.a, &arena, || {
            let block = rig.malloc(MIB, rig.a);
            // Another stream captures into another arena meanwhile.
            let (inner, ()) = rig.capture(rig.b, &other, || {
                let block = rig.malloc(MIB, rig.b);
                rig.fill(rig.b, &block, 2);
                rig.free(block, rig.b);
            });
            rig.fill(rig.a, &block, 1);
            rig.free(block, rig.a);
            inner
        });
        assert_eq!((outer.report().blocks, inner.report().blocks), (1, 1));
        rig.replay(&outer, rig.a);
        rig.replay(&inner, rig.b);
    }
    drop((arena, other));
    rig.close();
}

#[test]
fn the_first_capture_leaves_the_memory_that_the_next_one_needs() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let body = || {
        let blocks = [5, 1, 7, 3].map(|size| rig.malloc(MIB * size, rig.a));
        blocks.iter().for_each(|block| rig.fill(rig.a, block, 1));
        blocks.into_iter().for_each(|block| rig.free(block, rig.a));
    };
    let (first, ()) = rig.capture(rig.a, &arena, body);
    let creates = rig.base.sim.calls_of(vramp_driver::Call::Create);
    let (second, ()) = rig.capture(rig.a, &arena, body);
    assert_eq!(rig.base.sim.calls_of(vramp_driver::Call::Create), creates, "nothing grows");
    assert_eq!(first.report().planned, Some(second.report().taken), "it follows the plan");
    drop((first, second, arena));
    rig.close();
}

#[test]
fn a_capture_that_outgrows_its_arena_is_told_the_sizes() {
    let rig = GraphRig::new();
    let arena = rig.monotone(MIB * 4);
    let (graph, refused) = rig.capture(rig.a, &arena, || {
        let block = rig.malloc(MIB * 3, rig.a);
        rig.free(block, rig.a);
        rig.base.allocator.malloc(MIB * 2, rig.a).expect_err("3 and 2 are more than 4")
    });
    assert!(matches!(refused, AllocError::Arena(_)) && refused.is_out_of_memory(), "{refused}");
    let text = refused.to_string();
    assert!(text.contains("2.00 MiB") && text.contains("4.00 MiB"), "{text}");
    rig.replay(&graph, rig.a);
    drop((graph, arena));
    rig.close();
}

#[test]
fn many_launches_see_each_new_input() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let [input, output] = [0; 2].map(|_| rig.malloc(MIB, rig.a));
    let (graph, ()) = rig.capture(rig.a, &arena, || {
        let inner = rig.malloc(MIB, rig.a);
        rig.copy(rig.a, &input, &inner);
        rig.copy(rig.a, &inner, &output);
        rig.free(inner, rig.a);
    });
    for byte in 0..100 {
        rig.fill(rig.a, &input, byte);
        rig.replay(&graph, rig.a);
        assert_eq!(rig.byte(&output), byte);
    }
    rig.free(input, rig.a);
    rig.free(output, rig.a);
    drop((graph, arena));
    rig.close();
}

#[test]
fn intermediates_are_used_again_within_a_capture() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (graph, ()) = rig.capture(rig.a, &arena, || {
        for _ in 0..50 {
            let block = rig.malloc(MIB, rig.a);
            rig.fill(rig.a, &block, 1);
            rig.free(block, rig.a);
        }
    });
    let report = graph.report();
    assert_eq!((report.taken, report.monotone, report.lower_bound), (MIB, MIB * 50, MIB));
    rig.replay(&graph, rig.a);
    drop((graph, arena));
    rig.close();
}

// --- numr ---

#[test]
fn a_monotone_arena_bumps_aligns_never_goes_back_and_ends() {
    let rig = GraphRig::new();
    let page = common::PAGE;
    let arena = rig.monotone(page);
    let (graph, ()) = rig.capture(rig.a, &arena, || {
        let p0 = rig.malloc(Bytes::new(100), rig.a);
        let p1 = rig.malloc(Bytes::new(512), rig.a);
        let base = range(&p0).start.number();
        assert_eq!((base % 256, range(&p1).start.number()), (0, base + 256));
        assert_eq!((arena.report().high_water, arena.report().blocks), (Bytes::new(768), 2));
        rig.free(p1, rig.a);
        assert_eq!((arena.report().high_water, arena.report().blocks), (Bytes::new(768), 1));
        let p2 = rig.malloc(Bytes::new(256), rig.a);
        assert_eq!(range(&p2).start.number(), base + 768);
        rig.free(p0, rig.a);
        rig.free(p2, rig.a);
        assert_eq!((arena.report().high_water, arena.report().blocks), (Bytes::kib(1), 0));
        let rest = rig.malloc(page - Bytes::kib(1), rig.a);
        let full = rig.base.allocator.malloc(Bytes::new(1), rig.a).expect_err("it is full");
        assert!(full.is_out_of_memory(), "{full}");
        arena.reset().expect_err("a capture runs");
        rig.free(rest, rig.a);
    });
    drop(graph);
    arena.reset().expect("no block is live");
    assert_eq!(arena.report().high_water, Bytes::ZERO);
    drop(arena);
    rig.close();
}

#[test]
fn a_captured_sum_has_the_eager_result_and_its_addresses_stay() {
    let rig = GraphRig::new();
    let arena = rig.monotone(MIB * 16);
    let [input, output, eager] = [0; 3].map(|_| rig.malloc(MIB, rig.a));
    rig.fill(rig.a, &input, 11);
    let (graph, inner) = rig.capture(rig.a, &arena, || {
        let [freed, inner] = [6, 1].map(|size| rig.malloc(MIB * size, rig.a));
        rig.copy(rig.a, &input, &freed);
        rig.copy(rig.a, &freed, &inner);
        rig.copy(rig.a, &inner, &output);
        rig.free(freed, rig.a);
        inner
    });
    let addresses = range(&inner);
    // Memory that a launch gives back is missing at the next one.
    for byte in [11, 12, 13] {
        rig.fill(rig.a, &input, byte);
        rig.copy(rig.a, &input, &eager);
        rig.fill(rig.a, &output, 0);
        rig.replay(&graph, rig.a);
        assert_eq!(rig.bytes(&output), rig.bytes(&eager), "the sum of {byte}");
        assert_eq!(rig.bytes(&inner), rig.bytes(&eager));
        assert_eq!(range(&inner), addresses);
        // Blocks allocated after the capture lie elsewhere, and others write them between replays.
        let others = [rig.a, rig.b].map(|stream| rig.malloc(MIB, stream));
        assert!(others.iter().all(|other| !common::overlap(range(other), addresses)));
        for (other, stream) in others.into_iter().zip([rig.a, rig.b]) {
            rig.fill(stream, &other, 0xEE);
            rig.free(other, stream);
        }
        rig.base.allocator.trim(Bytes::ZERO).expect("idle memory is returned");
        assert!(arena.report().backed < MIB * 6, "what the graph freed leaves the arena");
        rig.audit();
    }
    [input, output, eager, inner].into_iter().for_each(|block| rig.free(block, rig.a));
    drop((graph, arena));
    rig.close();
}

// --- abandoned arenas ---

#[test]
fn two_hundred_graphs_over_one_arena_need_what_the_largest_needs() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let graphs: Vec<CapturedGraph> = (0..200)
        .map(|number: u64| {
            let size = MIB * (1 + number * 7 % 64);
            let body = || {
                let block = rig.malloc(size, rig.a);
                rig.write("graph", rig.a, &block, 10);
                rig.free(block, rig.a);
            };
            rig.capture(rig.a, &arena, body).0
        })
        .collect();
    assert!(
        arena.report().backed.count() * 100 <= (MIB * 64).count() * 105,
        "{:?}",
        arena.report()
    );
    graphs.iter().for_each(|graph| rig.replay(graph, rig.a));
    assert!(rig.base.census().reserved.count() * 100 <= (MIB * 64).count() * 105);
    drop((graphs, arena));
    rig.close();
}

#[test]
fn the_second_capture_of_a_shape_follows_the_plan_of_the_first() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    // Long-lived blocks that come late leave holes where first fit puts them.
    let body = || {
        let a = rig.malloc(MIB * 2, rig.a);
        let b = rig.malloc(MIB * 4, rig.a);
        rig.fill(rig.a, &a, 1);
        rig.fill(rig.a, &b, 1);
        rig.free(a, rig.a);
        let c = rig.malloc(MIB, rig.a);
        rig.fill(rig.a, &c, 1);
        rig.free(b, rig.a);
        let d = rig.malloc(MIB * 6, rig.a);
        rig.fill(rig.a, &d, 1);
        rig.free(c, rig.a);
        rig.free(d, rig.a);
    };
    let (first, ()) = rig.capture(rig.a, &arena, body);
    let (second, ()) = rig.capture(rig.a, &arena, body);
    let report = second.report();
    assert_eq!(Some(report.taken), first.report().planned);
    assert!(report.lower_bound <= report.taken && report.taken <= first.report().taken);
    assert!(first.report().taken <= report.monotone);
    for graph in [&first, &second, &first] {
        rig.replay(graph, rig.a);
    }
    drop((first, second, arena));
    rig.close();
}
