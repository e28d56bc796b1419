//! Captures that another library begins, ends and replays: served by an arena, kept by a hold.

use crate::common::{Rig, pages, range};
use vramp_alloc::device::CaptureMode;
use vramp_alloc::graph::{ArenaConfig, ArenaPolicy, CaptureError, GraphArena, GraphHold};
use vramp_alloc::{Allocation, Bytes, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Kernel, Simulator};
use vramp_driver::{Call, GraphExec};

fn checked() -> Rig {
    Rig::on(Simulator::builder().checked().logged(100_000), Config::default())
}

fn arena(rig: &Rig) -> GraphArena {
    let config = ArenaConfig { capacity: pages(4096), replan: false, ..ArenaConfig::default() };
    rig.allocator.graph_arena(config).expect("addresses are there")
}

fn write(rig: &Rig, stream: StreamId, block: &Allocation) {
    let kernel = Kernel::new("write").writing(range(block)).lasting(50_000_000);
    rig.sim.launch(rig.raw(stream), kernel).expect("work is queued");
}

/// What another library does: captures `body` into an arena by itself.
fn captured<R>(
    rig: &Rig,
    arena: &GraphArena,
    body: impl FnOnce() -> R,
) -> (GraphExec, GraphHold, R) {
    let queue = rig.raw(rig.stream);
    rig.sim.begin_capture(queue, CaptureMode::ThreadLocal).expect("it does not capture yet");
    let capture = rig.allocator.attach_capture(rig.stream, arena).expect("the arena is free");
    let result = body();
    let graph = rig.sim.end_capture(queue).expect("nothing spoilt it");
    let hold = capture.detach();
    let exec = rig.sim.instantiate(graph).expect("it is there");
    rig.sim.destroy_graph(graph).expect("it is there");
    rig.allocator.audit().expect("the books add up");
    (exec, hold, result)
}

fn is_of(block: &Allocation, others: &[AddrRange]) -> bool {
    let inside = |other: &AddrRange| {
        let distance = block.addr().number().checked_sub(other.start.number());
        distance.is_some_and(|distance| distance < other.len.count())
    };
    others.iter().any(inside)
}

#[test]
fn what_a_attached_capture_asks_for_comes_from_the_arena_and_serves_again() {
    let rig = checked();
    let arena = arena(&rig);
    let (exec, hold, output) = captured(&rig, &arena, || {
        let scratch = rig.malloc(4);
        assert!(scratch.is_in_arena());
        write(&rig, rig.stream, &scratch);
        rig.free(scratch);
        let output = rig.malloc(4);
        write(&rig, rig.stream, &output);
        output
    });
    assert_eq!(
        (hold.report().blocks, hold.report().taken),
        (2, pages(4)),
        "one place serves twice"
    );
    assert!(!rig.malloc_and_free_is_of_arena(), "the capture is over");
    for _ in 0..3 {
        rig.sim.launch_graph(exec, rig.raw(rig.stream)).expect("it is ready");
    }
    rig.sim.advance(1_000_000_000);
    rig.sim.destroy_graph_exec(exec).expect("it is there");
    drop(hold);
    drop(arena);
    rig.free(output);
    assert_eq!(rig.sim.hazards(), []);
    rig.close();
}

impl Rig {
    fn malloc_and_free_is_of_arena(&self) -> bool {
        let block = self.malloc(1);
        let found = block.is_in_arena();
        self.free(block);
        found
    }
}

#[test]
fn an_arena_whose_replays_nobody_tells_never_lends() {
    let rig = checked();
    let arena = arena(&rig);
    let (exec, hold, ()) = captured(&rig, &arena, || {
        let block = rig.malloc(32);
        write(&rig, rig.stream, &block);
        rig.free(block);
    });
    let before = arena.report();
    assert!(before.backed >= pages(32));
    rig.sim.take_log();
    rig.allocator.trim(Bytes::ZERO).expect("nothing fails");
    let all = rig.malloc(64);
    assert_eq!(arena.report(), before, "its memory stays where it is");
    let log = rig.sim.take_log();
    assert!(log.iter().all(|call| call.call != Call::Unmap), "nothing moves under the graph");
    rig.sim.launch_graph(exec, rig.raw(rig.stream)).expect("it is ready");
    rig.sim.advance(1_000_000_000);
    rig.free(all);
    rig.sim.destroy_graph_exec(exec).expect("it is there");
    drop((hold, arena));
    assert_eq!(rig.sim.hazards(), []);
    rig.close();
}

/// The launch is ordered after the work of the attached stream, and of no other.
#[test]
fn memory_for_a_joined_stream_is_ready_when_the_attached_stream_is() {
    let rig = checked();
    let arena = arena(&rig);
    let side = rig.allocator.create_stream().expect("a stream");
    let before = rig.allocator.malloc(pages(4), side).expect("memory is there");
    write(&rig, side, &before);
    rig.allocator.free(before, side).expect("it is live");
    let (exec, hold, ()) = captured(&rig, &arena, || {
        rig.order(rig.stream, side);
        let block = rig.allocator.malloc(pages(4), side).expect("memory is there");
        write(&rig, side, &block);
        rig.allocator.free(block, side).expect("it is live");
        rig.order(side, rig.stream);
    });
    let elsewhere = rig.allocator.create_stream().expect("a stream");
    rig.order(rig.stream, elsewhere);
    rig.sim.launch_graph(exec, rig.raw(elsewhere)).expect("it is ready");
    rig.sim.advance(1_000_000_000);
    assert_eq!(rig.sim.hazards(), []);
    rig.sim.destroy_graph_exec(exec).expect("it is there");
    drop((hold, arena));
    rig.close();
}

#[test]
fn an_arena_that_lent_its_memory_has_it_back_when_it_is_attached() {
    let rig = checked();
    let arena = arena(&rig);
    let guarded = rig.allocator.capture(rig.stream, &arena, || {
        let block = rig.malloc(32);
        write(&rig, rig.stream, &block);
        rig.free(block);
    });
    let (guarded, ()) = guarded.expect("nothing spoilt it");
    drop(guarded.launch(rig.stream).expect("no stream uses the arena"));
    rig.sim.advance(1_000_000_000);
    let taker = rig.malloc(8);
    rig.allocator.trim(Bytes::ZERO).expect("nothing fails");
    assert_eq!(arena.report().backed, Bytes::ZERO, "all of it went");
    let (exec, hold, ()) = captured(&rig, &arena, || {
        let block = rig.malloc(16);
        write(&rig, rig.stream, &block);
        rig.free(block);
    });
    assert!(arena.report().backed >= pages(16));
    rig.sim.launch_graph(exec, rig.raw(rig.stream)).expect("it is ready");
    drop(guarded.launch(rig.stream).expect("no stream uses the arena"));
    rig.allocator.trim(Bytes::ZERO).expect("nothing fails");
    assert!(arena.report().backed >= pages(32), "it lends no more");
    rig.sim.advance(1_000_000_000);
    rig.sim.destroy_graph_exec(exec).expect("it is there");
    rig.free(taker);
    drop((guarded, hold, arena));
    assert_eq!(rig.sim.hazards(), []);
    assert_eq!(rig.sim.device_loss(), None);
    rig.close();
}

#[test]
fn memory_from_before_that_is_freed_inside_is_kept_until_the_hold_goes() {
    let rig = checked();
    let arena = arena(&rig);
    let other = rig.allocator.create_stream().expect("a stream can be made");
    let (on_stream, elsewhere) = (rig.malloc(8), rig.malloc_on(8, other));
    let kept = [range(&on_stream), range(&elsewhere)];
    let queue = rig.raw(rig.stream);
    rig.sim.begin_capture(queue, CaptureMode::ThreadLocal).expect("it does not capture yet");
    let capture = rig.allocator.attach_capture(rig.stream, &arena).expect("the arena is free");
    assert!(capture.is_under_way().expect("a stream can be asked"));
    write(&rig, rig.stream, &on_stream);
    rig.free(on_stream);
    let freed = rig.allocator.free_for_capture(elsewhere, other, &capture);
    freed.expect("it is ours");
    let graph = rig.sim.end_capture(queue).expect("nothing spoilt it");
    assert!(!capture.is_under_way().expect("a stream can be asked"));
    let hold = capture.detach();
    assert_eq!(hold.report().kept, pages(16));
    let again = [rig.malloc(8), rig.malloc_on(8, other)];
    assert!(again.iter().all(|block| !is_of(block, &kept)), "the graph may use it");
    drop(hold);
    rig.sim.advance(1);
    let after = [rig.malloc(8), rig.malloc_on(8, other)];
    assert!(after.iter().all(|block| is_of(block, &kept)), "it came back");
    for block in again.into_iter().chain(after) {
        rig.free(block);
    }
    rig.sim.destroy_graph(graph).expect("it is there");
    drop(arena);
    rig.close();
}

#[test]
fn memory_of_another_pool_that_is_freed_inside_is_kept_until_the_hold_goes() {
    let rig = checked();
    let arena = arena(&rig);
    let side = rig.allocator.create_pool("side").expect("a pool can be made");
    let launched_on = rig.allocator.create_stream().expect("a stream can be made");
    let malloc = |len| side.malloc(len, rig.stream).expect("there is memory");
    let blocks = [malloc(pages(8)), malloc(Bytes::kib(1))];
    let kept = blocks.each_ref().map(range);
    let queue = rig.raw(rig.stream);
    rig.sim.begin_capture(queue, CaptureMode::ThreadLocal).expect("it does not capture yet");
    let capture = rig.allocator.attach_capture(rig.stream, &arena).expect("the arena is free");
    for block in blocks {
        write(&rig, rig.stream, &block);
        side.free_for_capture(block, rig.stream, &capture).expect("it is ours");
    }
    let graph = rig.sim.end_capture(queue).expect("nothing spoilt it");
    let hold = capture.detach();
    assert_eq!(hold.report().kept, pages(8) + Bytes::kib(1));
    let again = [malloc(pages(8)), malloc(Bytes::kib(1))];
    assert!(again.iter().all(|block| !is_of(block, &kept)), "the graph may use it");
    let exec = rig.sim.instantiate(graph).expect("it is there");
    rig.sim.launch_graph(exec, rig.raw(launched_on)).expect("it is ready");
    drop(hold);
    let after = [malloc(pages(8)), malloc(Bytes::kib(1))];
    after.iter().for_each(|block| write(&rig, rig.stream, block));
    rig.sim.advance(1_000_000_000);
    assert_eq!(rig.sim.hazards(), [], "the launch was in flight");
    for block in again.into_iter().chain(after) {
        side.free(block, rig.stream).expect("it is ours");
    }
    assert_eq!(side.stats().expect("it is open").live, Bytes::ZERO, "the graph keeps nothing");
    side.audit().expect("the books add up");
    rig.sim.destroy_graph_exec(exec).expect("it is there");
    rig.sim.destroy_graph(graph).expect("it is there");
    drop(arena);
    side.close().expect("nothing fails");
    rig.close();
}

/// A graph that writes to what `body` says is launched, and its hold goes in flight. Then all
/// memory is asked for, and written to.
fn dropped_in_flight(body: impl Fn(&Rig, Allocation) -> Option<Allocation>) {
    for (launched_on, asked_on) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let config = Config { limit: Some(pages(20)), ..Config::default() };
        let rig = Rig::on(Simulator::builder().checked(), config);
        let arena = arena(&rig);
        let streams = [rig.stream, rig.allocator.create_stream().expect("a stream can be made")];
        let input = rig.malloc(1);
        let (exec, hold, left) = captured(&rig, &arena, || body(&rig, input));
        if let Some(left) = left {
            rig.free(left);
        }
        rig.sim.launch_graph(exec, rig.raw(streams[launched_on])).expect("it is ready");
        rig.sim.destroy_graph_exec(exec).expect("it is there");
        drop((hold, arena));
        let all = rig.malloc_on(20, streams[asked_on]);
        write(&rig, streams[asked_on], &all);
        rig.free_on(all, streams[asked_on]);
        rig.sim.advance(1_000_000_000);
        assert_eq!(rig.sim.hazards(), [], "launched on {launched_on}, asked on {asked_on}");
        rig.close();
    }
}

#[test]
fn an_arena_that_goes_in_flight_gives_nothing_away_that_replays_still_use() {
    dropped_in_flight(|rig, input| {
        let block = rig.malloc(16);
        write(rig, rig.stream, &block);
        rig.free(block);
        Some(input)
    });
}

#[test]
fn memory_kept_for_a_graph_in_flight_is_given_to_nobody() {
    dropped_in_flight(|rig, input| {
        write(rig, rig.stream, &input);
        rig.free(input);
        None
    });
}

#[test]
fn blocks_that_outlive_their_graph_keep_their_memory() {
    let rig = checked();
    let arena = arena(&rig);
    let (exec, hold, output) = captured(&rig, &arena, || rig.malloc(8));
    rig.sim.destroy_graph_exec(exec).expect("it is there");
    drop((hold, arena));
    let held = [range(&output)];
    let more: Vec<_> = (0..8).map(|_| rig.malloc(8)).collect();
    assert!(more.iter().all(|block| !is_of(block, &held)));
    let reserved = rig.held();
    rig.free(output);
    rig.sim.advance(1);
    let again = rig.malloc(8);
    assert_eq!(rig.held(), reserved, "what the last block gave back serves");
    for block in more.into_iter().chain([again]) {
        rig.free(block);
    }
    rig.close();
}

#[test]
fn captures_of_one_arena_share_its_memory() {
    let rig = checked();
    let arena = arena(&rig);
    let mut made = Vec::new();
    for count in [32, 8, 16] {
        let (exec, hold, ()) = captured(&rig, &arena, || {
            let block = rig.malloc(count);
            write(&rig, rig.stream, &block);
            rig.free(block);
        });
        made.push((exec, hold));
    }
    assert_eq!(arena.report().high_water, pages(32), "as much as the largest");
    for (exec, _) in &made {
        rig.sim.launch_graph(*exec, rig.raw(rig.stream)).expect("it is ready");
    }
    rig.sim.advance(1_000_000_000);
    for (exec, hold) in made {
        rig.sim.destroy_graph_exec(exec).expect("it is there");
        drop(hold);
    }
    drop(arena);
    assert_eq!(rig.sim.hazards(), []);
    rig.close();
}

#[test]
fn a_monotone_arena_serves_a_attached_capture_and_nothing_twice() {
    let rig = checked();
    let config = ArenaConfig {
        policy: ArenaPolicy::Monotone,
        capacity: pages(16),
        ..ArenaConfig::default()
    };
    let arena = rig.allocator.graph_arena(config).expect("addresses are there");
    let (exec, hold, ()) = captured(&rig, &arena, || {
        let first = rig.malloc(4);
        let start = first.addr();
        rig.free(first);
        let second = rig.malloc(4);
        assert_ne!(second.addr(), start);
        rig.free(second);
    });
    assert_eq!(hold.report().taken, pages(8));
    rig.sim.destroy_graph_exec(exec).expect("it is there");
    drop((hold, arena));
    rig.close();
}

#[test]
fn what_cannot_be_joined_is_an_error_and_the_capture_goes_on() {
    let (rig, elsewhere) = (checked(), checked());
    let (one, two, foreign) = (arena(&rig), arena(&rig), arena(&elsewhere));
    let queue = rig.raw(rig.stream);
    let attach = |arena: &GraphArena| rig.allocator.attach_capture(rig.stream, arena);
    assert!(
        matches!(attach(&one), Err(CaptureError::NotCapturing(stream)) if stream == rig.stream)
    );
    assert_eq!(rig.allocator.capture_number(rig.stream).expect("it can be asked"), None);
    rig.sim.begin_capture(queue, CaptureMode::ThreadLocal).expect("it does not capture yet");
    assert!(matches!(attach(&foreign), Err(CaptureError::ForeignArena)));
    let capture = attach(&one).expect("the arena is free");
    let number = rig.allocator.capture_number(rig.stream).expect("it can be asked");
    assert_eq!(number, Some(capture.number()));
    assert!(matches!(attach(&one), Err(CaptureError::ArenaBusy)));
    assert!(matches!(attach(&two), Err(CaptureError::Served(stream)) if stream == rig.stream));
    let unknown = StreamId::new(99);
    let attached = rig.allocator.attach_capture(unknown, &two);
    assert!(matches!(attached, Err(CaptureError::UnknownStream(stream)) if stream == unknown));
    let graph = rig.sim.end_capture(queue).expect("nothing spoilt it");
    drop(capture);
    rig.sim.destroy_graph(graph).expect("it is there");
    drop((one, two, foreign));
    rig.close();
    elsewhere.close();
}

#[test]
fn a_capture_that_came_to_nothing_leaves_everything_as_it_was() {
    let rig = checked();
    let arena = arena(&rig);
    let queue = rig.raw(rig.stream);
    let before = rig.malloc(4);
    let place = [range(&before)];
    rig.sim.begin_capture(queue, CaptureMode::ThreadLocal).expect("it does not capture yet");
    let capture = rig.allocator.attach_capture(rig.stream, &arena).expect("the arena is free");
    let escaped = rig.malloc(4);
    rig.free(before);
    rig.sim.alloc_memory(pages(1)).expect_err("that spoils it");
    assert!(capture.is_under_way().expect("a stream can be asked"));
    rig.sim.end_capture(queue).expect_err("it is spoilt");
    assert!(!capture.is_under_way().expect("a stream can be asked"));
    drop(capture);
    rig.sim.advance(1);
    let after = rig.malloc(4);
    assert!(is_of(&after, &place), "no graph will use it");
    rig.free(escaped);
    rig.free(after);
    let (exec, hold, ()) = captured(&rig, &arena, || {
        let block = rig.malloc(2);
        rig.free(block);
    });
    rig.sim.destroy_graph_exec(exec).expect("it is there");
    drop((hold, arena));
    rig.close();
}

#[test]
fn an_arena_that_was_made_of_memory_of_another_stream_is_attached_behind_its_work() {
    let rig = checked();
    let arena = arena(&rig);
    let other = rig.allocator.create_stream().expect("a stream can be made");
    // The arena gets what this stream freed and still writes.
    let freed = rig.allocator.malloc(pages(4), other).expect("there is memory");
    write(&rig, other, &freed);
    rig.allocator.free(freed, other).expect("it is the allocator's");
    let capture = rig.allocator.begin_capture(other, &arena);
    let mut capture = capture.expect("the arena is free");
    let block = rig.allocator.malloc(pages(1), other).expect("the arena has room");
    rig.allocator.free(block, other).expect("it is the arena's");
    drop(capture.end().expect("nothing spoilt it"));
    drop(capture);

    let (exec, hold, block) = captured(&rig, &arena, || {
        let block = rig.malloc(1);
        write(&rig, rig.stream, &block);
        block
    });
    rig.sim.launch_graph(exec, rig.raw(rig.stream)).expect("it is ready");
    assert_eq!(rig.sim.hazards(), []);
    rig.sim.destroy_graph_exec(exec).expect("it is there");
    drop(hold);
    rig.free(block);
}
