//! While a stream captures a graph memory comes and goes, and nothing is done that spoils the capture.
//!
//! Captures that another library begins, ends and replays are served by an arena and kept by a hold.

use vramp_alloc::device::CaptureMode;
use vramp_alloc::graph::{ArenaConfig, ArenaPolicy, CaptureError, GraphArena, GraphHold};
use vramp_alloc::{Allocation, Bytes, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Kernel, Simulator};
use vramp_driver::{Call, GraphExec};
use vramp_peers::Preset;

use crate::common::{Rig, pages, range};

/// A pool that is full but for what is free on the capturing stream or idle elsewhere.
fn crowded() -> Rig {
    let config = Config { limit: Some(pages(64)), ..Config::default() };
    Rig::on(Simulator::builder().checked().logged(100_000), config)
}

#[test]
fn a_stream_that_captures_waits_for_nothing_and_no_event_is_recorded_on_it() {
    let rig = crowded();
    let other = rig.allocator.create_stream().expect("a stream can be made");
    let raw = rig.allocator.stream(rig.stream).expect("it is known");
    // Work of both streams is in flight, and memory of both is free behind it.
    let blocks = [6, 6, 6, 6].map(|count| rig.malloc(count));
    let others = [6, 6, 6].map(|count| rig.malloc_on(count, other));
    let [first, second, third, fourth] = blocks;
    rig.free(first);
    rig.free(third);
    for block in others {
        rig.free_on(block, other);
    }
    rig.sim.begin_capture(raw, CaptureMode::Global).expect("it does not capture yet");
    rig.sim.take_log();
    let mut captured = Vec::new();
    for count in [4, 10, 3, 12] {
        if let Ok(block) = rig.allocator.malloc(pages(count), rig.stream) {
            captured.push(block);
        }
        let small = rig.allocator.malloc(Bytes::kib(40), rig.stream).expect("a page is free");
        rig.allocator.free(small, rig.stream).expect("it is ours");
    }
    assert!(captured.len() >= 3, "the capture is served from what is its own or new");
    rig.free(second);
    for block in captured {
        rig.free(block);
    }
    // Other streams are served, too, and do not wait for the capture.
    if let Ok(block) = rig.allocator.malloc(pages(8), other) {
        rig.free_on(block, other);
    }
    rig.allocator.trim(Bytes::ZERO).expect("nothing fails");
    let log = rig.sim.take_log();
    let on_it = |of: Call| log.iter().filter(|c| c.call == of && c.stream == Some(raw)).count();
    assert_eq!(on_it(Call::Wait), 0, "it would be part of the graph");
    assert!(on_it(Call::Record) <= 1, "an event that was refused is not tried again");
    let queries = log.iter().filter(|logged| logged.call == Call::Query).count();
    assert!(queries > 0, "work of other streams is asked about");
    let graph = rig.sim.end_capture(raw).expect("nothing spoilt the capture");
    rig.sim.destroy_graph(graph).expect("it is there");

    // Afterwards everything is as before: all of it is one block's.
    rig.free(fourth);
    rig.sim.advance(1);
    let all = rig.malloc(64);
    rig.free(all);
    assert_eq!(rig.sim.hazards(), []);
    rig.close();
}

#[test]
fn a_capture_may_grow_and_remap() {
    let rig = Rig::new(Preset::Vramp);
    let raw = rig.allocator.stream(rig.stream).expect("it is known");
    let blocks: Vec<_> = (0..12).map(|_| rig.malloc(8)).collect();
    let mut kept = Vec::new();
    for (n, block) in blocks.into_iter().enumerate() {
        if n % 2 == 0 { rig.free(block) } else { kept.push(block) }
    }
    rig.sim.begin_capture(raw, CaptureMode::Global).expect("it does not capture yet");
    let moved = rig.malloc(48);
    let grown = rig.malloc(200);
    let graph = rig.sim.end_capture(raw).expect("nothing spoilt the capture");
    rig.sim.destroy_graph(graph).expect("it is there");
    assert!(rig.allocator.stats().expect("no call fails").chunks_moved > 0, "it was remapped");
    for block in kept.into_iter().chain([moved, grown]) {
        rig.free(block);
    }
    rig.close();
}

#[test]
fn memory_of_other_streams_serves_one_that_captures_once_their_work_is_over() {
    for preset in [Preset::Vramp, Preset::Vpmm] {
        let rig = Rig::on(
            Simulator::builder().checked().logged(1_000),
            Config { limit: Some(pages(16)), span: Bytes::gib(1), ..preset.config() },
        );
        let other = rig.allocator.create_stream().expect("a stream can be made");
        let raw = rig.raw(rig.stream);
        let gate = rig.sim.gate();
        rig.sim.launch(rig.raw(other), Kernel::new("busy").until(gate)).expect("it is open");
        let block = rig.malloc_on(16, other);
        rig.free_on(block, other);
        // An event stands for the work.
        rig.allocator.trim(Bytes::ZERO).expect("nothing is over");
        rig.sim.begin_capture(raw, CaptureMode::Global).expect("it does not capture yet");
        // It may not wait for the other stream on the device.
        let refused = rig.allocator.malloc(pages(16), rig.stream);
        assert!(refused.is_err_and(|error| error.is_out_of_memory()), "{preset:?}");
        rig.sim.open(gate);
        rig.sim.advance(1);
        let block = rig.malloc(16);
        let graph = rig.sim.end_capture(raw).expect("nothing spoilt the capture");
        rig.sim.destroy_graph(graph).expect("it is there");
        rig.free(block);
        rig.close();
    }
}

#[test]
fn a_miss_learns_of_many_captures_at_once_and_asks_no_other_stream() {
    for idle in [0, 1_000] {
        let rig = crowded();
        let create = || rig.allocator.create_stream().expect("a stream can be made");
        let capturing: Vec<_> = (0..20).map(|_| create()).collect();
        let open = create();
        let _: Vec<_> = (0..idle).map(|_| create()).collect();
        let users = || capturing.iter().chain([&open]);
        let blocks: Vec<_> = users().map(|&stream| rig.malloc_on(3, stream)).collect();
        users().zip(blocks).for_each(|(&stream, block)| rig.free_on(block, stream));
        for &stream in &capturing {
            rig.sim.begin_capture(rig.raw(stream), CaptureMode::Relaxed).expect("it can begin");
        }
        // One page is left. What the open stream freed serves the request; the others keep theirs.
        let before = rig.sim.calls();
        let block = rig.malloc(3);
        let calls = rig.sim.calls() - before;
        assert!(calls < 200, "{idle} idle streams: {calls} calls");
        let (asked, next) =
            rig.calls(Call::IsCapturing, || rig.allocator.malloc(pages(3), rig.stream));
        assert!(next.is_err_and(|error| error.is_out_of_memory()), "all else is held");
        assert!(asked <= 2 * 20, "{idle} idle streams: {asked} were asked");
        for &stream in &capturing {
            let graph = rig.sim.end_capture(rig.raw(stream)).expect("nothing spoilt the capture");
            rig.sim.destroy_graph(graph).expect("it is there");
        }
        rig.free(block);
        let all = rig.malloc(60);
        rig.free(all);
        assert_eq!(rig.sim.hazards(), []);
        rig.close();
    }
}

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
