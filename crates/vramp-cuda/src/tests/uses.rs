//! How long the device keeps host memory that its work uses.

use std::sync::Arc;

use vramp_core::{AddrRange, Bytes};
use vramp_driver::{CaptureMode, Driver, ErrorKind, HostBuffer, HostMemory, HostSlice};
use vramp_host::PageKind;

use super::{PAGE, kind, mapped, open};
use crate::device::CudaDriver;
use crate::fake::{self, calls};

fn all(buffer: HostBuffer) -> HostSlice {
    HostSlice { buffer, offset: Bytes::ZERO, len: PAGE }
}

fn memory() -> Arc<HostMemory> {
    HostMemory::new(PAGE, None, PageKind::Small).unwrap()
}

/// Returns the calls on events and host memory, in order.
fn of_interest() -> Vec<&'static str> {
    let mut calls = calls();
    calls.retain(|name| {
        name.starts_with("cuEvent") || name.starts_with("cuMemHost") || *name == "cuMemFreeHost"
    });
    calls
}

fn rig() -> (CudaDriver, AddrRange) {
    let driver = open();
    let (range, _) = mapped(&driver);
    (driver, range)
}

#[test]
fn freeing_a_buffer_waits_for_its_copies_and_for_no_other_work() {
    let (driver, range) = rig();
    let (first, second) = (driver.create_stream().unwrap(), driver.create_stream().unwrap());
    let (copied, idle) = (driver.alloc_host(PAGE).unwrap(), driver.alloc_host(PAGE).unwrap());
    driver.copy_to_device(first, all(copied), range.start).unwrap();
    driver.copy_to_host(first, range.start, all(copied)).unwrap();
    driver.copy_to_host(second, range.start, all(copied)).unwrap();
    assert_eq!(
        of_interest(),
        [
            &["cuMemHostAlloc"; 2][..],
            &["cuEventCreate", "cuEventRecord", "cuEventRecord"],
            &["cuEventCreate", "cuEventRecord"]
        ]
        .concat()
    );
    driver.free_host(idle).unwrap();
    assert_eq!(of_interest(), ["cuMemFreeHost"]);
    // The streams may be gone by then.
    driver.destroy_stream(first).unwrap();
    calls();
    driver.free_host(copied).unwrap();
    let waited = ["cuEventSynchronize", "cuEventDestroy_v2"];
    assert_eq!(of_interest(), [&waited[..], &waited, &["cuMemFreeHost"]].concat());
}

#[test]
fn a_wait_that_fails_leaves_the_buffer_pinned() {
    let (driver, range) = rig();
    let stream = driver.create_stream().unwrap();
    let memory = memory();
    let buffer = driver.register_host(&memory).unwrap();
    driver.copy_to_host(stream, range.start, all(buffer)).unwrap();
    fake::fail("cuEventSynchronize", 2);
    assert_eq!(kind(driver.free_host(buffer)), ErrorKind::OutOfMemory);
    fake::heal();
    assert_eq!(Arc::strong_count(&memory), 2);
    driver.free_host(buffer).unwrap();
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn each_device_waits_for_its_own_copies_of_shared_memory() {
    let ((first, range), (second, other)) = (rig(), rig());
    let memory = memory();
    let (one, two) =
        (first.register_host(&memory).unwrap(), second.register_host(&memory).unwrap());
    let (near, far) = (first.create_stream().unwrap(), second.create_stream().unwrap());
    first.copy_to_host(near, range.start, all(one)).unwrap();
    second.copy_to_host(far, other.start, all(two)).unwrap();
    calls();
    first.free_host(one).unwrap();
    assert_eq!(of_interest(), ["cuEventSynchronize", "cuEventDestroy_v2"]);
    second.free_host(two).unwrap();
    assert_eq!(of_interest(), ["cuEventSynchronize", "cuEventDestroy_v2", "cuMemHostUnregister"]);
}

#[test]
fn a_copy_without_an_event_is_waited_for_at_once() {
    let (driver, range) = rig();
    let stream = driver.create_stream().unwrap();
    let buffer = driver.alloc_host(PAGE).unwrap();
    fake::fail("cuEventCreate", 2);
    assert_eq!(kind(driver.copy_to_host(stream, range.start, all(buffer))), ErrorKind::OutOfMemory);
    assert!(!calls().contains(&"cuMemcpyDtoHAsync_v2"), "queued without an event");
    fake::fail("cuEventRecord", 2);
    driver.copy_to_host(stream, range.start, all(buffer)).unwrap();
    assert!(calls().contains(&"cuStreamSynchronize"));
    fake::heal();
    driver.free_host(buffer).unwrap();
}

#[test]
fn a_buffer_of_a_graph_is_freed_once_graph_and_launches_are_over() {
    let (driver, range) = rig();
    let stream = driver.create_stream().unwrap();
    let buffer = driver.alloc_host(PAGE).unwrap();
    driver.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    driver.copy_to_host(stream, range.start, all(buffer)).unwrap();
    driver.copy_to_host(stream, range.start, all(buffer)).unwrap();
    let refused = |when: &str| {
        let error = driver.free_host(buffer).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidUse, "{when}");
        assert!(error.detail.contains("graph"), "{when}: {error}");
    };
    refused("during the capture");
    let graph = driver.end_capture(stream).unwrap();
    refused("while the graph lives");
    let exec = driver.instantiate(graph).unwrap();
    driver.destroy_graph(graph).unwrap();
    refused("while the instantiated graph lives");
    calls();
    driver.launch_graph(exec, stream).unwrap();
    driver.destroy_graph_exec(exec).unwrap();
    driver.free_host(buffer).unwrap();
    assert_eq!(
        of_interest(),
        [
            "cuEventCreate",
            "cuEventRecord",
            "cuEventSynchronize",
            "cuEventDestroy_v2",
            "cuMemFreeHost"
        ]
    );
    assert!(driver.captured().is_empty());
}

#[test]
fn a_graph_without_host_memory_is_launched_without_an_event() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    driver.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    let exec = driver.instantiate(graph).unwrap();
    calls();
    driver.launch_graph(exec, stream).unwrap();
    assert_eq!(calls(), ["cuGraphLaunch"]);
}

#[test]
fn a_buffer_of_a_lost_capture_is_freed() {
    let (driver, range) = rig();
    let stream = driver.create_stream().unwrap();
    let buffer = driver.alloc_host(PAGE).unwrap();
    driver.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    driver.copy_to_host(stream, range.start, all(buffer)).unwrap();
    fake::invalidate_capture();
    driver.end_capture(stream).unwrap_err();
    driver.free_host(buffer).unwrap();
}

#[test]
fn memory_in_a_capture_of_other_code_is_never_freed() {
    let (driver, range) = rig();
    let stream = driver.create_stream().unwrap();
    let memory = memory();
    let buffer = driver.register_host(&memory).unwrap();
    fake::capture_elsewhere();
    driver.copy_to_host(stream, range.start, all(buffer)).unwrap();
    fake::end_elsewhere();
    assert_eq!(kind(driver.free_host(buffer)), ErrorKind::InvalidUse);
    calls();
    drop(driver);
    assert!(!calls().contains(&"cuMemHostUnregister"));
    assert_eq!(Arc::strong_count(&memory), 2, "its graph may be launched at any time");
}

#[test]
fn streams_that_are_gone_leave_no_events_behind() {
    let (driver, range) = rig();
    let buffer = driver.alloc_host(PAGE).unwrap();
    let events = || {
        let calls = calls();
        let count = |name| calls.iter().filter(|call| **call == name).count();
        (count("cuEventCreate"), count("cuEventDestroy_v2"), count("cuEventQuery"))
    };
    fake::set_complete(true);
    let (mut live, mut queries) = (0, 0);
    for _ in 0..10_000 {
        let stream = driver.create_stream().unwrap();
        driver.copy_to_host(stream, range.start, all(buffer)).unwrap();
        driver.destroy_stream(stream).unwrap();
        let (made, destroyed, queried) = events();
        live = live + made - destroyed;
        queries += queried;
        assert!(live <= 9, "{live} events");
    }
    assert!(queries <= 20_000, "{queries} queries for 10,000 copies");
    fake::set_complete(false);
    for _ in 0..1_000 {
        let stream = driver.create_stream().unwrap();
        driver.copy_to_host(stream, range.start, all(buffer)).unwrap();
    }
    let (_, _, queried) = events();
    assert!(queried <= 3_000, "{queried} queries while nothing completes");
}
