//! Calls that are legal during a capture, by mode and thread, and the end of captures.

use vramp_core::{AddrRange, Bytes};
use vramp_host::{HostMemory, PageKind};

use super::rig::{Rig, refused};
use super::{Checked, Failure, ensure, rules};
use vramp_driver::{
    Capabilities, CaptureMode, Driver, DriverResult, ErrorKind, Event, MemoryProperties, Stream,
};

const ANY: fn(&Capabilities) -> bool = |can| can.graphs;
const PINNED: fn(&Capabilities) -> bool = |can| can.graphs && can.pinned_host;
const VIRTUAL: fn(&Capabilities) -> bool = |can| can.graphs && can.virtual_memory;
const WITH_HOST: fn(&Capabilities) -> bool = |can| VIRTUAL(can) && can.pinned_host;

rules! {
    memory_is_built_and_taken_down_during_any_capture: VIRTUAL,
    an_event_is_recorded_and_waited_for_beside_any_capture: ANY,
    an_event_is_queried_beside_any_capture: ANY,
    a_record_outside_of_captures_says_whether_it_was: ANY,
    the_host_waits_beside_any_capture: ANY,
    waiting_for_the_device_is_refused_and_invalidates_any_capture: ANY,
    registered_memory_is_unpinned_beside_any_capture: PINNED,
    allocating_is_refused_as_the_mode_says_and_invalidates_the_capture: ANY,
    a_capturing_stream_is_neither_synchronised_nor_queried: ANY,
    a_stream_works_as_before_after_an_invalidated_capture: WITH_HOST,
    a_stream_begins_one_capture_at_a_time: ANY,
    only_a_capturing_stream_ends_a_capture: ANY,
    a_capture_ends_on_the_stream_it_began_on: ANY,
    a_relaxed_capture_ends_on_any_thread_and_others_on_their_own: ANY,
    an_empty_capture_makes_an_empty_graph: ANY,
    a_fork_that_is_not_joined_makes_no_graph: VIRTUAL,
    a_capture_waits_for_nothing_outside_of_it: VIRTUAL,
    two_captures_do_not_merge: VIRTUAL,
    captures_on_two_streams_have_different_numbers: VIRTUAL,
}

/// Thread that makes a call during a capture.
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

/// Runs `work` during a capture in every mode, from both threads. Passes its result and that of the
/// end of the capture to `check`.
fn in_every_capture<T: Send>(
    rig: &Rig,
    work: impl Fn(&dyn Driver) -> DriverResult<T> + Sync,
    check: impl Fn(CaptureMode, Thread, DriverResult<T>, DriverResult<()>) -> Checked,
) -> Checked {
    let stream = rig.stream()?;
    for mode in CaptureMode::ALL {
        for thread in Thread::BOTH {
            rig.begin_capture(stream, mode)?;
            let device = rig.device;
            let done = thread.runs(|| work(device));
            let ended = rig.end_capture(stream).map(drop);
            check(mode, thread, done, ended)
                .map_err(|failure| Failure(format!("{mode:?}, {thread:?}: {}", failure.0)))?;
            let after = rig.device.is_capturing(stream)?;
            ensure!(!after, "{mode:?}, {thread:?}: the stream is still capturing after the end");
        }
    }
    Ok(())
}

fn legal<T>(_: CaptureMode, _: Thread, done: DriverResult<T>, ended: DriverResult<()>) -> Checked {
    done?;
    ended?;
    Ok(())
}

/// Checks a call that a capture forbids: to every thread in global mode, to its own thread in
/// thread-local mode.
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

fn waiting_for_the_device_is_refused_and_invalidates_any_capture(rig: &Rig) -> Checked {
    in_every_capture(
        rig,
        |device| device.synchronize_device(),
        |_, _, done, ended| {
            refused("the wait", ErrorKind::Capturing, done)?;
            refused("the end of the capture", ErrorKind::Capturing, ended)
        },
    )
}

fn memory_is_built_and_taken_down_during_any_capture(rig: &Rig) -> Checked {
    let range = rig.reserve(rig.page)?;
    let build = |device: &dyn Driver| {
        let handle = device.create(range.len, MemoryProperties::DEVICE)?;
        let built = device.map(range.start, handle).and_then(|()| {
            let accessible = device.set_access(range, &[]);
            device.unmap(range).and(accessible)
        });
        device.release(handle).and(built)
    };
    in_every_capture(rig, build, legal)
}

fn an_event_is_recorded_and_waited_for_beside_any_capture(rig: &Rig) -> Checked {
    let (first, second) = (rig.stream()?, rig.stream()?);
    let event = rig.event()?;
    let order = |device: &dyn Driver| {
        device.record(event, first)?;
        device.wait(second, event)
    };
    in_every_capture(rig, order, legal)
}

fn an_event_is_queried_beside_any_capture(rig: &Rig) -> Checked {
    let event = recorded_and_reached(rig)?;
    in_every_capture(rig, |device| device.query(event), legal)
}

fn a_record_outside_of_captures_says_whether_it_was(rig: &Rig) -> Checked {
    let (stream, event) = (rig.stream()?, rig.event()?);
    for mode in CaptureMode::ALL {
        ensure!(rig.device.record_outside(event, stream)?, "{mode:?}: it does not capture");
        rig.begin_capture(stream, mode)?;
        for thread in Thread::BOTH {
            let recorded = thread.runs(|| rig.device.record_outside(event, stream))?;
            ensure!(!recorded, "{mode:?}: recorded, while the stream captures");
        }
        rig.end_capture(stream)?;
        ensure!(rig.device.record_outside(event, stream)?, "{mode:?}: it captures no more");
        rig.device.synchronize_event(event)?;
    }
    Ok(())
}

fn the_host_waits_beside_any_capture(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    let event = rig.event()?;
    let wait = |device: &dyn Driver| {
        device.record(event, stream)?;
        device.synchronize_event(event)?;
        device.synchronize_stream(stream)
    };
    in_every_capture(rig, wait, legal)
}

fn registered_memory_is_unpinned_beside_any_capture(rig: &Rig) -> Checked {
    let memory = HostMemory::new(Bytes::mib(2), None, PageKind::Small);
    let memory = memory.map_err(|error| Failure(error.to_string()))?;
    let pin = |device: &dyn Driver| {
        let buffer = device.register_host(&memory)?;
        device.free_host(buffer)
    };
    in_every_capture(rig, pin, legal)
}

fn recorded_and_reached(rig: &Rig) -> Checked<Event> {
    let event = rig.event()?;
    rig.device.record(event, rig.stream()?)?;
    rig.device.synchronize_event(event)?;
    Ok(event)
}

fn allocating_is_refused_as_the_mode_says_and_invalidates_the_capture(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    for mode in CaptureMode::ALL {
        for thread in Thread::BOTH {
            rig.begin_capture(stream, mode)?;
            let device = rig.device;
            let allocated = thread.runs(|| device.alloc_memory(page_of(device)));
            let ended = rig.end_capture(stream).map(drop);
            // Freed after the capture, because freeing during a capture was not measured.
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

fn a_capturing_stream_is_neither_synchronised_nor_queried(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    let event = rig.event()?;
    for mode in CaptureMode::ALL {
        rig.begin_capture(stream, mode)?;
        let capturing = ErrorKind::Capturing;
        refused("synchronise the stream", capturing, rig.device.synchronize_stream(stream))?;
        refused("destroy the stream", capturing, rig.device.destroy_stream(stream))?;
        rig.end_capture(stream)?;

        rig.begin_capture(stream, mode)?;
        rig.device.record(event, stream)?;
        refused("query a captured event", capturing, rig.device.query(event))?;
        refused("the end of the capture", capturing, rig.end_capture(stream))?;
        // The event is usable again once it is recorded outside.
        rig.device.record(event, stream)?;
        rig.device.synchronize_event(event)?;
    }
    Ok(())
}

fn a_stream_works_as_before_after_an_invalidated_capture(rig: &Rig) -> Checked {
    let range = rig.memory(&[rig.page])?;
    let stream = rig.stream()?;
    rig.device.fill(stream, range, 1)?;
    rig.begin_capture(stream, CaptureMode::Global)?;
    rig.device.fill(stream, range, 2)?;
    refused("allocate", ErrorKind::Capturing, rig.device.alloc_memory(rig.page))?;
    ensure!(rig.device.is_capturing(stream)?, "an invalidated capture ended early");
    refused("capture info", ErrorKind::Capturing, rig.device.capture_info(stream))?;
    refused("more work", ErrorKind::Capturing, rig.device.fill(stream, range, 3))?;
    refused("the end", ErrorKind::Capturing, rig.end_capture(stream))?;
    rig.expect_filled(stream, range, 1)?;
    rig.device.fill(stream, range, 4)?;
    rig.expect_filled(stream, range, 4)?;
    rig.begin_capture(stream, CaptureMode::Global)?;
    rig.device.fill(stream, range, 5)?;
    let exec = rig.instantiate(rig.end_capture(stream)?)?;
    rig.device.launch_graph(exec, stream)?;
    rig.expect_filled(stream, range, 5)
}

/// Fails unless `result` is an error. NVIDIA's manual does not state its code.
fn refused_somehow<T>(what: &str, result: DriverResult<T>) -> Checked {
    ensure!(result.is_err(), "{what} succeeded");
    Ok(())
}

fn a_stream_begins_one_capture_at_a_time(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    for mode in CaptureMode::ALL {
        rig.begin_capture(stream, mode)?;
        refused_somehow("a second beginning", rig.device.begin_capture(stream, mode))?;
        // Whether that invalidates the capture is not stated. The stream leaves it in any case.
        let _ = rig.end_capture(stream);
        ensure!(!rig.device.is_capturing(stream)?, "the stream is still capturing after the end");
    }
    Ok(())
}

fn only_a_capturing_stream_ends_a_capture(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    refused_somehow("an end without a beginning", rig.end_capture(stream))?;
    ensure!(rig.device.capture_info(stream)?.is_none(), "the stream is reported as capturing");
    rig.device.synchronize_stream(stream)?;
    Ok(())
}

/// Makes `other` join the capture of `stream`.
fn fork(rig: &Rig, stream: Stream, other: Stream) -> Checked {
    let event = rig.event()?;
    rig.device.record(event, stream)?;
    rig.device.wait(other, event)?;
    Ok(())
}

fn a_capture_ends_on_the_stream_it_began_on(rig: &Rig) -> Checked {
    let (origin, other) = (rig.stream()?, rig.stream()?);
    rig.begin_capture(origin, CaptureMode::Global)?;
    fork(rig, origin, other)?;
    let ended = rig.device.end_capture(other);
    refused("the end on another stream", ErrorKind::Capturing, ended)?;
    refused("the end after that", ErrorKind::Capturing, rig.end_capture(origin))?;
    for stream in [origin, other] {
        ensure!(!rig.device.is_capturing(stream)?, "a stream is still capturing after the end");
    }
    Ok(())
}

fn a_relaxed_capture_ends_on_any_thread_and_others_on_their_own(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    let device = rig.device;
    for mode in CaptureMode::ALL {
        rig.begin_capture(stream, mode)?;
        let ended = Thread::Other
            .runs(|| device.end_capture(stream).and_then(|graph| device.destroy_graph(graph)));
        if mode == CaptureMode::Relaxed {
            ended?;
            continue;
        }
        refused(&format!("{mode:?}: the end on another thread"), ErrorKind::Capturing, ended)?;
        ensure!(!device.is_capturing(stream)?, "the stream is still capturing after the end");
        refused("a second end", ErrorKind::InvalidUse, device.end_capture(stream))?;
    }
    Ok(())
}

fn an_empty_capture_makes_an_empty_graph(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    rig.begin_capture(stream, CaptureMode::Global)?;
    let info = rig.device.capture_info(stream)?;
    let empty = info.as_ref().is_some_and(|info| info.dependencies.is_empty());
    ensure!(empty, "a new capture has the state {info:?}");
    let graph = rig.end_capture(stream)?;
    let nodes = rig.device.graph_nodes(graph)?;
    ensure!(nodes == 0, "an empty capture made a graph of {nodes} nodes");
    let exec = rig.instantiate(graph)?;
    rig.device.launch_graph(exec, stream)?;
    rig.device.synchronize_stream(stream)?;
    Ok(())
}

fn page(rig: &Rig) -> Checked<AddrRange> {
    Ok(rig.memory(&[rig.page])?)
}

fn a_fork_that_is_not_joined_makes_no_graph(rig: &Rig) -> Checked {
    let (range, beside) = (page(rig)?, page(rig)?);
    let (origin, other) = (rig.stream()?, rig.stream()?);
    rig.begin_capture(origin, CaptureMode::Global)?;
    rig.device.fill(origin, range, 1)?;
    fork(rig, origin, other)?;
    rig.device.fill(other, beside, 2)?;
    fork(rig, other, origin)?;
    // After the event that was waited for.
    rig.device.fill(other, beside, 3)?;
    refused("the end", ErrorKind::Capturing, rig.end_capture(origin))?;
    for stream in [origin, other] {
        ensure!(!rig.device.is_capturing(stream)?, "a stream is still capturing after the end");
        rig.device.synchronize_stream(stream)?;
    }
    Ok(())
}

fn a_capture_waits_for_nothing_outside_of_it(rig: &Rig) -> Checked {
    let (stream, outside) = (rig.stream()?, rig.stream()?);
    let event = rig.event()?;
    rig.device.fill(outside, page(rig)?, 1)?;
    rig.device.record(event, outside)?;
    rig.begin_capture(stream, CaptureMode::Relaxed)?;
    refused("the wait", ErrorKind::Capturing, rig.device.wait(stream, event))?;
    refused("the end", ErrorKind::Capturing, rig.end_capture(stream))
}

fn two_captures_do_not_merge(rig: &Rig) -> Checked {
    let (first, second) = (rig.stream()?, rig.stream()?);
    let event = rig.event()?;
    rig.begin_capture(first, CaptureMode::Relaxed)?;
    rig.begin_capture(second, CaptureMode::Relaxed)?;
    rig.device.fill(first, page(rig)?, 1)?;
    rig.device.record(event, first)?;
    refused("the wait", ErrorKind::Capturing, rig.device.wait(second, event))?;
    refused("the waiting one's end", ErrorKind::Capturing, rig.end_capture(second))?;
    // Whether the other capture goes on is not stated.
    let _ = rig.end_capture(first);
    ensure!(!rig.device.is_capturing(first)?, "a stream is still capturing after the end");
    Ok(())
}

fn captures_on_two_streams_have_different_numbers(rig: &Rig) -> Checked {
    let (first, second) = (rig.stream()?, rig.stream()?);
    let (a, b) = (page(rig)?, page(rig)?);
    rig.begin_capture(first, CaptureMode::Global)?;
    rig.begin_capture(second, CaptureMode::Global)?;
    rig.device.fill(first, a, 1)?;
    rig.device.fill(second, b, 2)?;
    let infos = (rig.device.capture_info(first)?, rig.device.capture_info(second)?);
    let (Some(one), Some(two)) = infos else {
        return Err(Failure("a capturing stream is reported as not capturing".to_owned()));
    };
    ensure!(one.capture != two.capture, "both captures have the number {}", one.capture);
    ensure!(
        one.dependencies != two.dependencies,
        "both captures have the dependencies {:?}",
        one.dependencies
    );
    let (first, second) = (rig.end_capture(first)?, rig.end_capture(second)?);
    ensure!(rig.device.graph_nodes(first)? == 1, "one fill is one node");
    ensure!(rig.device.graph_nodes(second)? == 1, "one fill is one node");
    Ok(())
}
