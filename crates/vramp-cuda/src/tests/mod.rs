//! Every call of the device on the fake libcuda: which calls reach the driver, and the state after a
//! failure.

mod adopted;
mod turns;
mod uses;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::{
    Call, CaptureMode, DeviceCopy, Driver, Event, Handle, HostBuffer, HostMemory, HostSlice,
    MemoryProperties, Stream, StreamThread,
};
use vramp_driver::{DriverError, ErrorKind};
use vramp_host::PageKind;

use crate::device::CudaDriver;
use crate::error::OpenError;
use crate::fake::{self, CONTEXT, calls};

const PAGE: Bytes = Bytes::mib(2);

fn open() -> CudaDriver {
    fake::open(|_| ()).unwrap()
}

/// Returns the kind of the error.
fn kind<T: std::fmt::Debug>(result: Result<T, DriverError>) -> ErrorKind {
    result.unwrap_err().kind
}

/// A reservation of four pages with one handle mapped at its start.
fn mapped(driver: &CudaDriver) -> (AddrRange, Handle) {
    let at = driver.reserve(PAGE * 4, PAGE).unwrap();
    let handle = driver.create(PAGE, MemoryProperties::DEVICE).unwrap();
    driver.map(at, handle).unwrap();
    driver.set_access(AddrRange::new(at, PAGE), &[]).unwrap();
    calls();
    (AddrRange::new(at, PAGE * 4), handle)
}

#[test]
fn a_device_reports_what_its_driver_reports() {
    let driver = open();
    let info = driver.info();
    assert_eq!((info.name.as_str(), info.id.as_str()), ("Fake", "cuda:0"));
    assert_eq!(info.driver, "CUDA 13.0");
    assert_eq!(info.limits.page, PAGE);
    assert!(info.capabilities.virtual_memory && info.capabilities.remap_beside_kernels);
}

#[test]
fn a_card_is_named_as_the_kernel_and_nvidias_tools_name_it() {
    let driver = open();
    let info = driver.info();
    assert_eq!(info.pci.as_deref(), Some("0000:3b:00.0"));
    assert_eq!(info.uuid.as_deref(), Some("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"));
    assert_eq!(info.host_numa, Some(9));
}

#[test]
fn a_card_without_pci_address_or_uuid_can_be_opened() {
    let driver = fake::open(|api| api.cuDeviceGetPCIBusId = Err(fake::absent())).unwrap();
    assert_eq!(driver.info().pci, None);
    fake::fail("cuDeviceGetUuid_v2", 801);
    assert_eq!(open().info().uuid, None);
    fake::fail("cuDeviceGetPCIBusId", 1);
    assert_eq!(open().info().pci, None);
    fake::heal();
}

#[test]
fn each_reason_for_having_no_device_is_its_own_error() {
    fake::set_devices(0, 13_000);
    assert_eq!(fake::open(|_| ()).err(), Some(OpenError::NoDevice));
    fake::set_devices(1, 9_000);
    assert!(matches!(
        fake::open(|_| ()).err(),
        Some(OpenError::DriverTooOld { version: 9_000, .. })
    ));
    fake::set_devices(1, 13_000);
    for (code, error) in [(34, OpenError::StubLibrary), (100, OpenError::NoDevice)] {
        fake::fail("cuInit", code);
        assert_eq!(fake::open(|_| ()).err(), Some(error));
    }
    fake::fail("cuInit", 802);
    let Some(OpenError::Failed(error)) = fake::open(|_| ()).err() else { panic!() };
    assert_eq!((error.entry, error.code), ("cuInit", 802));
    // The text contains the cause; a source would repeat it.
    let error = OpenError::Failed(error);
    assert!(error.to_string().contains("cuInit failed"));
    assert!(std::error::Error::source(&error).is_none());
}

#[test]
fn a_missing_symbol_turns_a_capability_off_and_its_calls_are_not_supported() {
    let driver = fake::open(|api| {
        api.cuMemMap = Err(fake::absent());
        api.cuMemAllocFromPoolAsync = Err(fake::absent());
        api.cuMemHostAlloc = Err(fake::absent());
    })
    .unwrap();
    let capabilities = driver.info().capabilities;
    assert!(!capabilities.virtual_memory);
    assert!(!capabilities.host_numa);
    assert!(!capabilities.stream_ordered_pool);
    assert!(!capabilities.pinned_host);
    let stream = driver.create_stream().unwrap();
    let error = driver.malloc_async(stream, PAGE).unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotSupported);
    assert!(error.to_string().contains("cuMemAllocFromPoolAsync"), "{error}");
    assert_eq!(kind(driver.alloc_host(PAGE)), ErrorKind::NotSupported);
    assert_eq!(kind(driver.reserve(PAGE, PAGE)), ErrorKind::NotSupported);
    assert_eq!(kind(driver.create(PAGE, MemoryProperties::DEVICE)), ErrorKind::NotSupported);
    assert_eq!(
        kind(driver.map(DeviceAddr::new(0), Handle::from_number(1))),
        ErrorKind::NotSupported
    );
}

#[test]
fn foreign_and_stale_ids_never_reach_the_driver() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    let event = driver.create_event().unwrap();
    driver.destroy_event(event).unwrap();
    let handle = driver.create(PAGE, MemoryProperties::DEVICE).unwrap();
    driver.release(handle).unwrap();
    let (range, _) = mapped(&driver);
    let (no_stream, no_event) = (Stream::from_number(77), Event::from_number(u64::MAX));
    let no_buffer = HostBuffer::from_number(0);
    let slice = HostSlice { buffer: no_buffer, offset: Bytes::ZERO, len: PAGE };
    calls();
    for error in [
        driver.query(event).unwrap_err(),
        driver.query(no_event).unwrap_err(),
        driver.record(event, stream).unwrap_err(),
        driver.wait(no_stream, event).unwrap_err(),
        driver.destroy_event(event).unwrap_err(),
        driver.synchronize_event(event).unwrap_err(),
        driver.synchronize_stream(no_stream).unwrap_err(),
        driver.destroy_stream(no_stream).unwrap_err(),
        driver.release(handle).unwrap_err(),
        driver.map(range.start + PAGE, handle).unwrap_err(),
        driver.fill(no_stream, range, 1).unwrap_err(),
        driver.copy_to_device(stream, slice, range.start).unwrap_err(),
        driver.copy_to_host(stream, range.start, slice).unwrap_err(),
        driver.malloc_async(no_stream, PAGE).unwrap_err(),
        driver.free_host(no_buffer).unwrap_err(),
        driver.read_host(no_buffer, Bytes::ZERO, &mut [0]).unwrap_err(),
    ] {
        assert_eq!(error.kind, ErrorKind::InvalidUse, "{error}");
        assert_eq!(error.code, 400, "{error}");
    }
    assert_eq!(calls(), Vec::<&str>::new());
}

#[test]
fn addresses_of_other_code_never_reach_the_driver() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    let (range, handle) = mapped(&driver);
    let wild = AddrRange::new(DeviceAddr::new(0x7000_0000), PAGE);
    let beyond = AddrRange::new(range.start, PAGE * 5);
    for error in [
        driver.fill(stream, wild, 0).unwrap_err(),
        driver.fill(stream, beyond, 0).unwrap_err(),
        driver
            .copy(stream, DeviceCopy { from: wild.start, to: range.start, len: PAGE })
            .unwrap_err(),
        driver
            .copy(stream, DeviceCopy { from: range.start, to: range.start, len: PAGE })
            .unwrap_err(),
        driver.unmap(wild).unwrap_err(),
        driver.unmap(AddrRange::new(range.start, PAGE * 2)).unwrap_err(),
        driver.set_access(wild, &[]).unwrap_err(),
        driver.map(range.start, handle).unwrap_err(),
        driver.map(wild.start, handle).unwrap_err(),
        driver.map(range.start + Bytes::new(512), handle).unwrap_err(),
        driver.free_addresses(range).unwrap_err(),
        driver.free_addresses(wild).unwrap_err(),
        driver.free_async(stream, range.start).unwrap_err(),
        driver.create(Bytes::new(512), MemoryProperties::DEVICE).unwrap_err(),
        driver.reserve(Bytes::ZERO, PAGE).unwrap_err(),
        driver.reserve(PAGE, PAGE * 3).unwrap_err(),
    ] {
        assert_eq!(error.kind, ErrorKind::InvalidUse, "{error}");
    }
    assert_eq!(calls(), ["cuStreamCreate"][1..].to_vec());
}

#[test]
fn what_the_driver_refuses_can_be_tried_again() {
    let driver = open();
    let (range, handle) = mapped(&driver);
    let first = AddrRange::new(range.start, PAGE);
    let stream = driver.create_stream().unwrap();
    let pooled = driver.malloc_async(stream, PAGE).unwrap();
    type Attempt<'a> = (&'static str, Box<dyn Fn() -> Result<(), DriverError> + 'a>);
    let attempts: [Attempt<'_>; 6] = [
        ("cuMemMap", Box::new(|| driver.map(range.start + PAGE, handle))),
        ("cuMemUnmap", Box::new(|| driver.unmap(AddrRange::new(range.start, PAGE * 2)))),
        ("cuMemAddressFree", Box::new(|| driver.free_addresses(range))),
        ("cuMemRelease", Box::new(|| driver.release(handle))),
        ("cuMemFreeAsync", Box::new(|| driver.free_async(stream, pooled))),
        ("cuStreamDestroy_v2", Box::new(|| driver.destroy_stream(stream))),
    ];
    driver.set_access(first, &[]).unwrap();
    for (name, attempt) in attempts {
        fake::fail(name, 2);
        let error = attempt().unwrap_err();
        assert_eq!((error.kind, error.code), (ErrorKind::OutOfMemory, 2), "{name}");
        assert_eq!(error.name, "CUDA_ERROR_OUT_OF_MEMORY");
        fake::heal();
        assert_eq!(attempt(), Ok(()), "{name}");
    }
}

#[test]
fn a_lost_device_stays_lost_and_is_not_called_again() {
    let driver = open();
    let event = driver.create_event().unwrap();
    assert_eq!(driver.query(event), Ok(false));
    fake::fail("cuEventQuery", 700);
    let first = driver.query(event).unwrap_err();
    assert_eq!((first.kind, first.code), (ErrorKind::DeviceLost, 700));
    assert_eq!(first.name, "CUDA_ERROR_ILLEGAL_ADDRESS");
    fake::heal();
    calls();
    let second = driver.query(event).unwrap_err();
    assert_eq!(second, first);
    let third = driver.create(PAGE, MemoryProperties::DEVICE).unwrap_err();
    assert_eq!((third.call, third.code), (Call::Create, 700));
    drop(driver);
    assert_eq!(calls(), Vec::<&str>::new());
}

#[test]
fn a_capture_in_progress_has_its_own_kind_and_loses_nothing() {
    let driver = open();
    let event = driver.create_event().unwrap();
    fake::fail("cuEventQuery", 900);
    assert_eq!(kind(driver.query(event)), ErrorKind::Capturing);
    fake::heal();
    assert_eq!(driver.query(event), Ok(false));
}

#[test]
fn a_thread_with_a_context_of_its_own_gets_it_back() {
    let driver = open();
    fake::set_context(0xbeef);
    driver.memory_info().unwrap();
    assert_eq!(fake::context(), 0xbeef);
    fake::set_context(0);
    driver.memory_info().unwrap();
    assert_eq!(fake::context(), CONTEXT);
}

#[test]
fn every_call_runs_on_the_devices_context_whichever_is_current() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    let seen = Rc::new(RefCell::new(Vec::new()));
    for current in [0xbeef, 0, CONTEXT] {
        fake::set_context(current);
        let sink = Rc::clone(&seen);
        fake::watch(move |name| sink.borrow_mut().push((name, fake::context())));
        mapped(&driver);
        let pooled = driver.malloc_async(stream, PAGE).unwrap();
        let event = driver.create_event().unwrap();
        driver.record(event, stream).unwrap();
        driver.wait(stream, event).unwrap();
        driver.query(event).unwrap();
        driver.free_async(stream, pooled).unwrap();
        driver.destroy_event(event).unwrap();
        driver.memory_info().unwrap();
        fake::unwatch();
        let made = std::mem::take(&mut *seen.borrow_mut());
        let calls = made.iter().filter(|(name, _)| !name.starts_with("cuCtx"));
        let elsewhere: Vec<_> = calls.clone().filter(|(_, context)| *context != CONTEXT).collect();
        assert!(calls.count() >= 12 && elsewhere.is_empty(), "{elsewhere:?}");
    }
}

#[test]
fn a_dropped_device_leaves_a_thread_with_the_context_it_had() {
    let driver = open();
    driver.create(PAGE, MemoryProperties::DEVICE).unwrap();
    fake::set_context(0xbeef);
    drop(driver);
    assert_eq!(fake::context(), 0xbeef);
    let driver = open();
    driver.create(PAGE, MemoryProperties::DEVICE).unwrap();
    fake::set_context(CONTEXT);
    drop(driver);
    assert_eq!(fake::context(), 0);
}

#[test]
fn ids_serve_many_threads_and_an_object_in_use_is_not_destroyed() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let event = driver.create_event().unwrap();
                    driver.record(event, stream).unwrap();
                    assert_eq!(driver.query(event), Ok(false));
                    driver.destroy_event(event).unwrap();
                    assert_eq!(kind(driver.query(event)), ErrorKind::InvalidUse);
                }
            });
        }
    });
    driver.destroy_stream(stream).unwrap();
}

#[test]
fn a_graph_is_captured_launched_and_destroyed_once() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    driver.begin_capture(stream, CaptureMode::Global).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    assert_eq!(driver.graph_nodes(graph), Ok(2));
    let exec = driver.instantiate(graph).unwrap();
    driver.destroy_graph(graph).unwrap();
    driver.launch_graph(exec, stream).unwrap();
    driver.destroy_graph_exec(exec).unwrap();
    assert_eq!(driver.is_capturing(stream), Ok(false));
    calls();
    assert_eq!(kind(driver.launch_graph(exec, stream)), ErrorKind::InvalidUse);
    assert_eq!(kind(driver.destroy_graph_exec(exec)), ErrorKind::InvalidUse);
    assert_eq!(kind(driver.instantiate(graph)), ErrorKind::InvalidUse);
    assert_eq!(kind(driver.graph_nodes(graph)), ErrorKind::InvalidUse);
    assert_eq!(kind(driver.destroy_graph(graph)), ErrorKind::InvalidUse);
    assert_eq!(calls(), Vec::<&str>::new());
}

#[test]
fn nodes_keep_their_ids_until_the_graph_is_destroyed() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    assert_eq!(driver.capture_info(stream), Ok(None));
    driver.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    let info = driver.capture_info(stream).unwrap().unwrap();
    assert_eq!(info.capture, fake::CAPTURE);
    let [last] = info.dependencies[..] else { panic!("{info:?}") };
    let [first] = driver.node_dependencies(last).unwrap()[..] else { panic!() };
    assert_eq!(driver.node_dependencies(first), Ok(vec![]));
    assert_eq!(driver.capture_info(stream), Ok(Some(info)));
    let graph = driver.end_capture(stream).unwrap();
    assert_eq!(driver.capture_info(stream), Ok(None));
    assert_eq!(driver.node_dependencies(last), Ok(vec![first]));
    driver.destroy_graph(graph).unwrap();
    assert_eq!(kind(driver.node_dependencies(last)), ErrorKind::InvalidUse);
    assert_eq!(kind(driver.node_dependencies(first)), ErrorKind::InvalidUse);
}

#[test]
fn an_invalidated_capture_is_an_error_and_leaves_no_graph_and_no_nodes() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    driver.begin_capture(stream, CaptureMode::Global).unwrap();
    let last = driver.capture_info(stream).unwrap().unwrap().dependencies[0];
    let before = driver.node_dependencies(last).unwrap();
    fake::invalidate_capture();
    let error = driver.capture_info(stream).unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Capturing, 901));
    assert_eq!(driver.node_dependencies(last), Ok(before));
    let error = driver.end_capture(stream).unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Capturing, 901));
    assert_eq!(kind(driver.node_dependencies(last)), ErrorKind::InvalidUse);
    assert_eq!(driver.capture_info(stream), Ok(None));
}

#[test]
fn an_end_refused_for_its_stream_removes_no_node_and_one_for_its_thread_removes_all() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    driver.begin_capture(stream, CaptureMode::Global).unwrap();
    let last = driver.capture_info(stream).unwrap().unwrap().dependencies[0];
    fake::refuse_end(903);
    assert_eq!(driver.end_capture(stream).unwrap_err().code, 903);
    driver.node_dependencies(last).unwrap();
    fake::refuse_end(908);
    assert_eq!(driver.end_capture(stream).unwrap_err().code, 908);
    assert_eq!(kind(driver.node_dependencies(last)), ErrorKind::InvalidUse);
}

#[test]
fn a_graph_that_cannot_be_instantiated_still_exists() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    driver.begin_capture(stream, CaptureMode::Global).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    fake::fail("cuGraphInstantiateWithFlags", 2);
    assert_eq!(kind(driver.instantiate(graph)), ErrorKind::OutOfMemory);
    fake::heal();
    driver.instantiate(graph).unwrap();
}

#[test]
fn a_driver_without_capture_calls_has_no_graphs() {
    let driver = fake::open(|api| api.cuStreamGetCaptureInfo_v3 = Err(fake::absent())).unwrap();
    assert!(!driver.info().capabilities.graphs);
    let stream = driver.create_stream().unwrap();
    assert_eq!(kind(driver.capture_info(stream)), ErrorKind::NotSupported);
}

#[test]
fn host_bytes_are_zero_at_first_and_read_back_as_written() {
    let driver = open();
    let buffer = driver.alloc_host(Bytes::new(64)).unwrap();
    let mut bytes = [1; 4];
    driver.read_host(buffer, Bytes::new(60), &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4]);
    driver.write_host(buffer, Bytes::new(61), &[7, 8]).unwrap();
    driver.read_host(buffer, Bytes::new(60), &mut bytes).unwrap();
    assert_eq!(bytes, [0, 7, 8, 0]);
    assert_eq!(kind(driver.write_host(buffer, Bytes::new(61), &[0; 4])), ErrorKind::InvalidUse);
    let past = Bytes::new(u64::MAX);
    assert_eq!(kind(driver.read_host(buffer, past, &mut bytes)), ErrorKind::InvalidUse);
}

#[test]
fn host_memory_is_registered_once_for_all_devices() {
    let memory = HostMemory::new(Bytes::mib(1), None, PageKind::Small).unwrap();
    let (first, second) = (open(), open());
    calls();
    let one = first.register_host(&memory).unwrap();
    let other = second.register_host(&memory).unwrap();
    first.write_host(one, Bytes::new(9), &[1, 2]).unwrap();
    let mut byte = [0];
    second.read_host(other, Bytes::new(10), &mut byte).unwrap();
    assert_eq!(byte, [2]);
    first.free_host(one).unwrap();
    assert_eq!(kind(first.free_host(one)), ErrorKind::InvalidUse);
    second.free_host(other).unwrap();
    let pins = calls().into_iter().filter(|call| call.starts_with("cuMemHost"));
    assert_eq!(pins.collect::<Vec<_>>(), ["cuMemHostRegister_v2", "cuMemHostUnregister"]);
    let third = first.register_host(&memory).unwrap();
    drop(first);
    assert!(calls().contains(&"cuMemHostUnregister"), "a device unpins what is left");
    let _ = third;
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn a_dropped_device_releases_what_is_left_in_order() {
    let driver = open();
    let (_, _) = mapped(&driver);
    driver.create_event().unwrap();
    let stream = driver.create_stream().unwrap();
    driver.malloc_async(stream, PAGE).unwrap();
    calls();
    drop(driver);
    assert_eq!(
        calls(),
        [
            "cuStreamQuery",
            "cuStreamDestroy_v2",
            "cuEventDestroy_v2",
            "cuMemFreeAsync",
            "cuMemUnmap",
            "cuMemAddressFree",
            "cuMemRelease",
            "cuMemPoolDestroy",
            "cuDevicePrimaryCtxRelease_v2"
        ]
    );
}

#[test]
fn a_device_dropped_under_work_in_flight_unmaps_nothing() {
    let driver = open();
    let stream = driver.create_stream().unwrap();
    mapped(&driver);
    driver.destroy_stream(stream).unwrap();
    fake::fail("cuStreamQuery", 600);
    calls();
    drop(driver);
    assert_eq!(calls(), ["cuStreamQuery", "cuStreamDestroy_v2"]);
}

#[test]
fn a_stream_has_its_raw_handle_until_it_is_destroyed() {
    let driver = open();
    let created = driver.create_stream().unwrap();
    let raw = std::ptr::without_provenance_mut(0x50);
    // SAFETY: the fake dereferences no stream.
    let adopted = unsafe { driver.adopt_stream(raw) };
    calls();
    assert!(driver.raw_stream(created).is_some_and(|created| !created.is_null() && created != raw));
    assert_eq!(driver.raw_stream(adopted), Some(raw));
    assert!(calls().is_empty());
    for stream in [created, adopted] {
        driver.destroy_stream(stream).unwrap();
        assert_eq!(driver.raw_stream(stream), None);
    }
}

#[test]
fn a_thread_names_its_own_default_stream_and_reaches_others_through_the_legacy_one() {
    const LEGACY: usize = 1;
    const PER_THREAD: usize = 2;
    let driver = open();
    // SAFETY: the fake dereferences no stream.
    let adopted = unsafe { driver.adopt_stream(std::ptr::without_provenance_mut(PER_THREAD)) };
    let event = driver.create_event().unwrap();
    for own in [driver.thread_stream().unwrap(), adopted] {
        assert_eq!(driver.stream_thread(own), StreamThread::This);
        fake::ordered();
        driver.record(event, own).unwrap();
        driver.wait(own, event).unwrap();
        assert_eq!(fake::ordered(), [PER_THREAD, PER_THREAD]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(driver.stream_thread(own), StreamThread::Other);
                driver.record(event, own).unwrap();
                assert!(driver.record_outside(event, own).unwrap());
                driver.wait(own, event).unwrap();
                assert_eq!(fake::ordered(), [LEGACY; 3]);
                // What its own handle would mean here is this thread's stream.
                let mine = driver.thread_stream().unwrap();
                driver.record(event, mine).unwrap();
                assert_eq!(fake::ordered(), [PER_THREAD]);
                driver.destroy_stream(mine).unwrap();
            });
        });
        calls();
        driver.destroy_stream(own).unwrap();
        assert!(!calls().contains(&"cuStreamDestroy_v2"));
        assert_eq!(driver.stream_thread(own), StreamThread::Any);
    }
    fake::fail("cuStreamIsCapturing", 304);
    assert_eq!(kind(driver.thread_stream()), ErrorKind::Other);
}

#[test]
fn an_adopted_stream_is_never_destroyed() {
    let driver = open();
    // SAFETY: the fake dereferences no stream.
    let stream = unsafe { driver.adopt_stream(std::ptr::null_mut()) };
    let event = driver.create_event().unwrap();
    driver.record(event, stream).unwrap();
    driver.destroy_stream(stream).unwrap();
    assert!(!calls().contains(&"cuStreamDestroy_v2"));
    assert_eq!(kind(driver.record(event, stream)), ErrorKind::InvalidUse);
}
