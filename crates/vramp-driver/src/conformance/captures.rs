//! What may be done while a stream captures, by mode and thread, and how captures end.

use vramp_core::{AddrRange, Bytes};

use super::bench::{Bench, refused};
use super::{Checked, Failure, ensure, rules};
use crate::{
    Capabilities, CaptureMode, Driver, DriverResult, ErrorKind, Event, MemoryLocation, Stream,
};

const ANY: fn(&Capabilities) -> bool = |can| can.graphs;
const VIRTUAL: fn(&Capabilities) -> bool = |can| can.graphs && can.virtual_memory;
const WITH_HOST: fn(&Capabilities) -> bool = |can| VIRTUAL(can) && can.pinned_host;

rules! {
    memory_is_built_and_taken_down_during_any_capture: VIRTUAL,
    an_event_is_recorded_and_waited_for_beside_any_capture: ANY,
    a_query_is_refused_as_the_mode_says_and_spoils_the_capture: ANY,
    allocating_is_refused_as_the_mode_says_and_spoils_the_capture: ANY,
    a_capturing_stream_is_neither_synchronised_nor_asked_about: ANY,
    a_stream_works_as_before_after_a_spoilt_capture: WITH_HOST,
    a_stream_begins_one_capture_at_a_time: ANY,
    only_a_capturing_stream_ends_a_capture: ANY,
    a_capture_ends_on_the_stream_it_began_on: ANY,
    a_relaxed_capture_ends_on_any_thread_and_others_on_their_own: ANY,
    a_capture_of_nothing_is_an_empty_graph: ANY,
    a_fork_that_is_not_joined_is_no_graph: VIRTUAL,
    a_capture_waits_for_nothing_outside_of_it: VIRTUAL,
    two_captures_do_not_merge: VIRTUAL,
    captures_on_two_streams_are_told_apart: VIRTUAL,
}

/// Which thread does something while another one captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thread {
    Capturing,
    Other,
}

impl Thread {
    const BOTH: [Thread; 2] = [Thread::Capturing, Thread::Other];

    fn runs<T: Send>(self, work: impl FnOnce() -> T + Send) -> T {
        match self {
            Thread::Capturing => work(),
            Thread::Other => std::thread::scope(|scope| {
                let result = scope.spawn(work).join();
                result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }),
        }
    }
}

/// Does `work` during a capture in every mode, from both threads. Tells `check` what came of it, and
/// of the capture.
fn in_every_capture<T: Send>(
    bench: &Bench,
    work: impl Fn(&dyn Driver) -> DriverResult<T> + Sync,
    check: impl Fn(CaptureMode, Thread, DriverResult<T>, DriverResult<()>) -> Checked,
) -> Checked {
    let stream = bench.stream()?;
    for mode in CaptureMode::ALL {
        for thread in Thread::BOTH {
            bench.begin_capture(stream, mode)?;
            let device = bench.device;
            let done = thread.runs(|| work(device));
            let ended = bench.end_capture(stream).map(drop);
            check(mode, thread, done, ended)
                .map_err(|failure| Failure(format!("{mode:?}, {thread:?}: {}", failure.0)))?;
            let after = bench.device.is_capturing(stream)?;
            ensure!(!after, "{mode:?}, {thread:?}: the stream still captures after the end");
        }
    }
    Ok(())
}

fn legal<T>(_: CaptureMode, _: Thread, done: DriverResult<T>, ended: DriverResult<()>) -> Checked {
    done?;
    ended?;
    Ok(())
}

/// What a capture forbids: to every thread in global mode, to its own in thread-local mode.
fn forbidden_as_the_mode_says<T>(
    mode: CaptureMode,
    thread: Thread,
    done: DriverResult<T>,
    ended: DriverResult<()>,
) -> Checked {
    let forbidden = match mode {
        CaptureMode::Global => true,
        CaptureMode::ThreadLocal => thread == Thread::Capturing,
        CaptureMode::Relaxed => false,
    };
    if !forbidden {
        return legal(mode, thread, done, ended);
    }
    refused("the call", ErrorKind::Capturing, done)?;
    refused("the end of the capture", ErrorKind::Capturing, ended)
}

fn memory_is_built_and_taken_down_during_any_capture(bench: &Bench) -> Checked {
    let range = bench.reserve(bench.page)?;
    let build = |device: &dyn Driver| {
        let handle = device.create(range.len, MemoryLocation::Device)?;
        let built = device.map(range.start, handle).and_then(|()| {
            let accessible = device.set_access(range);
            device.unmap(range).and(accessible)
        });
        device.release(handle).and(built)
    };
    in_every_capture(bench, build, legal)
}

fn an_event_is_recorded_and_waited_for_beside_any_capture(bench: &Bench) -> Checked {
    let (first, second) = (bench.stream()?, bench.stream()?);
    let event = bench.event()?;
    let order = |device: &dyn Driver| {
        device.record(event, first)?;
        device.wait(second, event)
    };
    in_every_capture(bench, order, legal)
}

fn a_query_is_refused_as_the_mode_says_and_spoils_the_capture(bench: &Bench) -> Checked {
    let event = recorded_and_reached(bench)?;
    in_every_capture(bench, |device| device.query(event), forbidden_as_the_mode_says)
}

fn recorded_and_reached(bench: &Bench) -> Checked<Event> {
    let event = bench.event()?;
    bench.device.record(event, bench.stream()?)?;
    bench.device.synchronize_event(event)?;
    Ok(event)
}

fn allocating_is_refused_as_the_mode_says_and_spoils_the_capture(bench: &Bench) -> Checked {
    let stream = bench.stream()?;
    for mode in CaptureMode::ALL {
        for thread in Thread::BOTH {
            bench.begin_capture(stream, mode)?;
            let device = bench.device;
            let allocated = thread.runs(|| device.alloc_memory(page_of(device)));
            let ended = bench.end_capture(stream).map(drop);
            // Freed only now: what a capture says to that was not measured.
            let freed = allocated.clone().map_or(Ok(()), |at| device.free_memory(at));
            forbidden_as_the_mode_says(mode, thread, allocated, ended)
                .map_err(|failure| Failure(format!("{mode:?}, {thread:?}: {}", failure.0)))?;
            freed?;
        }
    }
    Ok(())
}

fn page_of(device: &dyn Driver) -> Bytes {
    device.info().limits.page
}

fn a_capturing_stream_is_neither_synchronised_nor_asked_about(bench: &Bench) -> Checked {
    let stream = bench.stream()?;
    let event = bench.event()?;
    for mode in CaptureMode::ALL {
        bench.begin_capture(stream, mode)?;
        let capturing = ErrorKind::Capturing;
        refused("synchronise the stream", capturing, bench.device.synchronize_stream(stream))?;
        refused("the end of the capture", capturing, bench.end_capture(stream))?;

        bench.begin_capture(stream, mode)?;
        bench.device.record(event, stream)?;
        refused("query a captured event", capturing, bench.device.query(event))?;
        refused("the end of the capture", capturing, bench.end_capture(stream))?;
        // The event is good again once it is recorded outside.
        bench.device.record(event, stream)?;
        bench.device.synchronize_event(event)?;
    }
    Ok(())
}

fn a_stream_works_as_before_after_a_spoilt_capture(bench: &Bench) -> Checked {
    let range = bench.memory(&[bench.page])?;
    let stream = bench.stream()?;
    let event = recorded_and_reached(bench)?;
    bench.device.fill(stream, range, 1)?;
    bench.begin_capture(stream, CaptureMode::Global)?;
    bench.device.fill(stream, range, 2)?;
    refused("query", ErrorKind::Capturing, bench.device.query(event))?;
    ensure!(bench.device.is_capturing(stream)?, "a spoilt capture is over before its end");
    refused("where it is", ErrorKind::Capturing, bench.device.capture_info(stream))?;
    refused("more work", ErrorKind::Capturing, bench.device.fill(stream, range, 3))?;
    refused("the end", ErrorKind::Capturing, bench.end_capture(stream))?;
    bench.expect_filled(stream, range, 1)?;
    bench.device.fill(stream, range, 4)?;
    bench.expect_filled(stream, range, 4)?;
    bench.begin_capture(stream, CaptureMode::Global)?;
    bench.device.fill(stream, range, 5)?;
    let exec = bench.instantiate(bench.end_capture(stream)?)?;
    bench.device.launch_graph(exec, stream)?;
    bench.expect_filled(stream, range, 5)
}

/// A refusal of any kind: which one it is, no manual says.
fn refused_somehow<T>(what: &str, result: DriverResult<T>) -> Checked {
    ensure!(result.is_err(), "{what} succeeded");
    Ok(())
}

fn a_stream_begins_one_capture_at_a_time(bench: &Bench) -> Checked {
    let stream = bench.stream()?;
    for mode in CaptureMode::ALL {
        bench.begin_capture(stream, mode)?;
        refused_somehow("a second beginning", bench.device.begin_capture(stream, mode))?;
        // Whether that spoilt the capture is not stated; the stream is out of it in any case.
        let _ = bench.end_capture(stream);
        ensure!(!bench.device.is_capturing(stream)?, "the stream still captures after the end");
    }
    Ok(())
}

fn only_a_capturing_stream_ends_a_capture(bench: &Bench) -> Checked {
    let stream = bench.stream()?;
    refused_somehow("an end without a beginning", bench.end_capture(stream))?;
    ensure!(bench.device.capture_info(stream)?.is_none(), "the stream is said to capture");
    bench.device.synchronize_stream(stream)?;
    Ok(())
}

/// Draws `other` into the capture of `stream`.
fn fork(bench: &Bench, stream: Stream, other: Stream) -> Checked {
    let event = bench.event()?;
    bench.device.record(event, stream)?;
    bench.device.wait(other, event)?;
    Ok(())
}

fn a_capture_ends_on_the_stream_it_began_on(bench: &Bench) -> Checked {
    let (origin, other) = (bench.stream()?, bench.stream()?);
    bench.begin_capture(origin, CaptureMode::Global)?;
    fork(bench, origin, other)?;
    let ended = bench.device.end_capture(other);
    refused("the end on another stream", ErrorKind::Capturing, ended)?;
    // Whether that spoilt the capture is not stated.
    let _ = bench.end_capture(origin);
    for stream in [origin, other] {
        ensure!(!bench.device.is_capturing(stream)?, "a stream still captures after the end");
    }
    Ok(())
}

fn a_relaxed_capture_ends_on_any_thread_and_others_on_their_own(bench: &Bench) -> Checked {
    let stream = bench.stream()?;
    let device = bench.device;
    for mode in CaptureMode::ALL {
        bench.begin_capture(stream, mode)?;
        let ended = Thread::Other
            .runs(|| device.end_capture(stream).and_then(|graph| device.destroy_graph(graph)));
        if mode == CaptureMode::Relaxed {
            ended?;
            continue;
        }
        refused(&format!("{mode:?}: the end on another thread"), ErrorKind::Capturing, ended)?;
        // Whether that spoilt the capture is not stated.
        let _ = bench.end_capture(stream);
        ensure!(!device.is_capturing(stream)?, "the stream still captures after the end");
    }
    Ok(())
}

fn a_capture_of_nothing_is_an_empty_graph(bench: &Bench) -> Checked {
    let stream = bench.stream()?;
    bench.begin_capture(stream, CaptureMode::Global)?;
    let info = bench.device.capture_info(stream)?;
    let empty = info.as_ref().is_some_and(|info| info.dependencies.is_empty());
    ensure!(empty, "a capture that just began is at {info:?}");
    let graph = bench.end_capture(stream)?;
    let nodes = bench.device.graph_nodes(graph)?;
    ensure!(nodes == 0, "nothing captured, and the graph has {nodes} nodes");
    let exec = bench.instantiate(graph)?;
    bench.device.launch_graph(exec, stream)?;
    bench.device.synchronize_stream(stream)?;
    Ok(())
}

fn page(bench: &Bench) -> Checked<AddrRange> {
    Ok(bench.memory(&[bench.page])?)
}

fn a_fork_that_is_not_joined_is_no_graph(bench: &Bench) -> Checked {
    let (range, beside) = (page(bench)?, page(bench)?);
    let (origin, other) = (bench.stream()?, bench.stream()?);
    bench.begin_capture(origin, CaptureMode::Global)?;
    bench.device.fill(origin, range, 1)?;
    fork(bench, origin, other)?;
    bench.device.fill(other, beside, 2)?;
    fork(bench, other, origin)?;
    // Behind the event that was waited for.
    bench.device.fill(other, beside, 3)?;
    refused("the end", ErrorKind::Capturing, bench.end_capture(origin))?;
    for stream in [origin, other] {
        ensure!(!bench.device.is_capturing(stream)?, "a stream still captures after the end");
        bench.device.synchronize_stream(stream)?;
    }
    Ok(())
}

fn a_capture_waits_for_nothing_outside_of_it(bench: &Bench) -> Checked {
    let (stream, outside) = (bench.stream()?, bench.stream()?);
    let event = bench.event()?;
    bench.device.fill(outside, page(bench)?, 1)?;
    bench.device.record(event, outside)?;
    bench.begin_capture(stream, CaptureMode::Relaxed)?;
    refused("the wait", ErrorKind::Capturing, bench.device.wait(stream, event))?;
    refused("the end", ErrorKind::Capturing, bench.end_capture(stream))
}

fn two_captures_do_not_merge(bench: &Bench) -> Checked {
    let (first, second) = (bench.stream()?, bench.stream()?);
    let event = bench.event()?;
    bench.begin_capture(first, CaptureMode::Relaxed)?;
    bench.begin_capture(second, CaptureMode::Relaxed)?;
    bench.device.fill(first, page(bench)?, 1)?;
    bench.device.record(event, first)?;
    refused("the wait", ErrorKind::Capturing, bench.device.wait(second, event))?;
    refused("the waiting one's end", ErrorKind::Capturing, bench.end_capture(second))?;
    // Whether the other one goes on is not stated.
    let _ = bench.end_capture(first);
    ensure!(!bench.device.is_capturing(first)?, "a stream still captures after the end");
    Ok(())
}

fn captures_on_two_streams_are_told_apart(bench: &Bench) -> Checked {
    let (first, second) = (bench.stream()?, bench.stream()?);
    let (a, b) = (page(bench)?, page(bench)?);
    bench.begin_capture(first, CaptureMode::Global)?;
    bench.begin_capture(second, CaptureMode::Global)?;
    bench.device.fill(first, a, 1)?;
    bench.device.fill(second, b, 2)?;
    let infos = (bench.device.capture_info(first)?, bench.device.capture_info(second)?);
    let (Some(one), Some(two)) = infos else {
        return Err(Failure("a capturing stream is said not to capture".to_owned()));
    };
    ensure!(one.capture != two.capture, "both captures are number {}", one.capture);
    ensure!(one.dependencies != two.dependencies, "both captures are at {:?}", one.dependencies);
    let (first, second) = (bench.end_capture(first)?, bench.end_capture(second)?);
    ensure!(bench.device.graph_nodes(first)? == 1, "one fill is one node");
    ensure!(bench.device.graph_nodes(second)? == 1, "one fill is one node");
    Ok(())
}
