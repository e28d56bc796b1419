//! Which calls on streams reach the driver alone.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes};
use vramp_driver::{CaptureMode, DeviceCopy, Driver, ErrorKind, HostSlice, Stream};

use super::{PAGE, mapped, open};
use crate::device::CudaDriver;
use crate::fake::{self, calls};
use crate::turns::Held;

/// Calls that use a stream. Those of the host that wait are not among them.
const ON_STREAMS: [&str; 14] = [
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamDestroy_v2",
    "cuEventRecord",
    "cuMemsetD8Async",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    "cuGraphLaunch",
];

/// Runs `program` and returns how the turns were held in each call on a stream.
fn held_during(
    driver: &Arc<CudaDriver>,
    program: impl FnOnce(&CudaDriver),
) -> Vec<(&'static str, Held)> {
    let seen = Rc::new(RefCell::new(Vec::new()));
    let (watched, notes) = (Arc::clone(driver), Rc::clone(&seen));
    fake::watch(move |name| {
        let held = watched.turns.held();
        if ON_STREAMS.contains(&name) {
            notes.borrow_mut().push((name, held));
        } else if name == "cuEventSynchronize" || name == "cuMemFreeHost" {
            assert_eq!(held, Held::Free, "{name} waits while it holds up other threads");
        }
    });
    program(driver);
    fake::unwatch();
    calls();
    seen.take()
}

/// Makes every call that uses `stream`.
fn use_stream(driver: &CudaDriver, stream: Stream, range: AddrRange) {
    let event = driver.create_event().unwrap();
    let other = driver.create_stream().unwrap();
    let host = driver.alloc_host(PAGE).unwrap();
    let all = HostSlice { buffer: host, offset: Bytes::ZERO, len: PAGE };
    let first = AddrRange::new(range.start, PAGE);
    driver.record(event, stream).unwrap();
    driver.wait(other, event).unwrap();
    driver.fill(stream, first, 1).unwrap();
    let copy = DeviceCopy { from: range.start, to: range.start + PAGE, len: PAGE };
    driver.copy(stream, copy).unwrap();
    driver.copy_to_device(stream, all, range.start).unwrap();
    driver.copy_to_host(stream, range.start, all).unwrap();
    let at = driver.malloc_async(stream, PAGE).unwrap();
    driver.free_async(stream, at).unwrap();
    driver.is_capturing(stream).unwrap();
    driver.destroy_stream(other).unwrap();
}

#[test]
fn calls_on_streams_run_alone_while_a_capture_is_under_way_and_together_otherwise() {
    let driver = Arc::new(open());
    let (range, _) = mapped(&driver);
    let stream = driver.create_stream().unwrap();
    let outside = held_during(&driver, |driver| use_stream(driver, stream, range));
    for (name, held) in outside {
        // No capture may begin on a stream that is being destroyed, so that is always alone.
        let destroying = matches!(
            name,
            "cuStreamDestroy_v2" | "cuStreamWaitEvent" | "cuEventRecord" | "cuStreamIsCapturing"
        );
        assert!(held == Held::Shared || (destroying && held == Held::Alone), "{name}: {held:?}");
    }
    let captured = held_during(&driver, |driver| {
        driver.begin_capture(stream, CaptureMode::Relaxed).unwrap();
        use_stream(driver, stream, range);
        driver.capture_info(stream).unwrap();
        let graph = driver.end_capture(stream).unwrap();
        assert_eq!(driver.turns.under_way(), 0);
        driver.destroy_graph(graph).unwrap();
    });
    for name in ON_STREAMS.into_iter().filter(|name| *name != "cuGraphLaunch") {
        assert!(captured.iter().any(|(seen, _)| *seen == name), "{name} was not called");
    }
    for (name, held) in captured {
        assert_eq!(held, Held::Alone, "{name}");
    }
}

#[test]
fn the_drivers_array_of_dependencies_is_read_alone_also_in_a_capture_of_other_code() {
    let driver = Arc::new(open());
    let stream = driver.create_stream().unwrap();
    fake::capture_elsewhere();
    let seen = held_during(&driver, |driver| {
        driver.capture_info(stream).unwrap().unwrap();
    });
    assert_eq!(seen, [("cuStreamGetCaptureInfo_v3", Held::Alone)]);
    fake::end_elsewhere();
}

#[test]
fn a_thread_that_waits_for_a_stream_holds_up_no_other_thread() {
    let driver = Arc::new(open());
    let stream = driver.create_stream().unwrap();
    let seen = held_during(&driver, |driver| driver.synchronize_stream(stream).unwrap());
    assert_eq!(
        seen,
        [("cuStreamGetCaptureInfo_v3", Held::Shared), ("cuEventRecord", Held::Shared)]
    );
}

#[test]
fn a_stream_is_waited_for_also_where_no_event_can_be_recorded() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    for failing in ["cuEventCreate", "cuEventRecord"] {
        fake::fail(failing, 2);
        calls();
        driver.synchronize_stream(stream).unwrap();
        fake::heal();
        let calls = calls();
        assert!(calls.contains(&"cuStreamSynchronize"), "{calls:?}");
        let count = |name| calls.iter().filter(|call| **call == name).count();
        let left = usize::from(failing == "cuEventRecord");
        assert_eq!(count("cuEventDestroy_v2"), left, "{calls:?}");
    }
}

#[test]
fn a_stream_that_captures_is_not_destroyed() {
    let driver = open();
    let owned = driver.create_stream().unwrap();
    // SAFETY: the fake library has no streams that could end.
    let adopted = unsafe { driver.adopt_stream(std::ptr::without_provenance_mut(0x50)) };
    for stream in [owned, adopted] {
        driver.begin_capture(stream, CaptureMode::Global).unwrap();
        for invalidated in [false, true] {
            if invalidated {
                fake::invalidate_capture();
            }
            calls();
            let error = driver.destroy_stream(stream).unwrap_err();
            assert_eq!((error.kind, error.code), (ErrorKind::Capturing, 900), "{error}");
            assert_eq!(calls(), ["cuStreamIsCapturing"]);
            assert_eq!(driver.turns.under_way(), 1);
        }
        driver.end_capture(stream).unwrap_err();
        driver.destroy_stream(stream).unwrap();
    }
}

#[test]
fn a_capture_is_over_for_the_turns_when_it_ends_or_its_stream_is_destroyed() {
    let driver = open();
    let (range, _) = mapped(&driver);
    let stream = driver.create_stream().unwrap();
    driver.begin_capture(stream, CaptureMode::Global).unwrap();
    fake::refuse_end(903);
    driver.end_capture(stream).unwrap_err();
    assert_eq!(driver.turns.under_way(), 1);
    fake::refuse_end(908);
    driver.end_capture(stream).unwrap_err();
    assert_eq!(driver.turns.under_way(), 0);
    fake::refuse_end(0);
    driver.begin_capture(stream, CaptureMode::Global).unwrap();
    fake::invalidate_capture();
    driver.end_capture(stream).unwrap_err();
    assert_eq!(driver.turns.under_way(), 0);
    driver.begin_capture(stream, CaptureMode::Global).unwrap();
    let host = driver.alloc_host(PAGE).unwrap();
    let all = HostSlice { buffer: host, offset: Bytes::ZERO, len: PAGE };
    driver.copy_to_host(stream, range.start, all).unwrap();
    fake::end_elsewhere();
    driver.destroy_stream(stream).unwrap();
    assert_eq!(driver.turns.under_way(), 0);
    assert!(driver.captured().is_empty());
    // Other code may launch the graph.
    driver.free_host(host).unwrap_err();
}
