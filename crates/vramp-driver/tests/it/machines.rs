//! Several simulated devices of one machine: peers, export and import, in one process and between processes.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::sim::{Contents, Kernel, Simulator, SimulatorBuilder};
use vramp_driver::{
    Capabilities, CaptureMode, DeviceCopy, Driver, DriverResult, ErrorKind, ExportedHandle, Handle,
    HandleType, HostSlice, MemoryLocation, MemoryProperties,
};
use vramp_host::MappedMemory;

// --- Several simulated devices of one machine ---

const PAGE: Bytes = Bytes::mib(2);

fn machine(builder: SimulatorBuilder) -> [Simulator; 2] {
    let devices = builder.contents(Contents::Stored).checked().build_machine(2);
    devices.try_into().expect("two devices")
}

fn mapped(device: &Simulator, len: Bytes, location: MemoryLocation) -> (AddrRange, Handle) {
    let range = AddrRange::new(device.reserve(len, PAGE).unwrap(), len);
    let handle = device.create(len, MemoryProperties::at(location)).unwrap();
    device.map(range.start, handle).unwrap();
    (range, handle)
}

fn memory(device: &Simulator, len: Bytes, peers: &[u32]) -> AddrRange {
    let (range, _) = mapped(device, len, MemoryLocation::Device);
    device.set_access(range, peers).unwrap();
    range
}

fn kind<T: std::fmt::Debug>(result: DriverResult<T>) -> ErrorKind {
    result.expect_err("it is refused").kind
}

fn copy(from: AddrRange, to: AddrRange) -> DeviceCopy {
    DeviceCopy { from: from.start, to: to.start, len: from.len }
}

#[test]
fn a_machine_numbers_its_devices_and_names_their_peers() {
    let devices = Simulator::builder().without_link(0, 2).build_machine(3);
    let peers: Vec<_> = devices.iter().map(|device| device.info().peers.clone()).collect();
    assert_eq!(peers, [vec![1], vec![0, 2], vec![1]]);
    for (device, ordinal) in devices.iter().zip(0..) {
        assert_eq!(device.info().ordinal, ordinal);
        assert_eq!(device.info().id, format!("sim:h200x3:{ordinal}"));
    }
    let alone = Simulator::builder().build();
    assert_eq!((alone.info().id.as_str(), alone.info().peers.len()), ("sim:h200", 0));
}

#[test]
fn what_one_device_made_is_refused_by_another() {
    let [first, second] = machine(Simulator::builder());
    let (range, handle) = mapped(&first, PAGE, MemoryLocation::Device);
    first.set_access(range, &[1]).unwrap();
    let plain = first.alloc_memory(PAGE).unwrap();
    let (stream, event) = (first.create_stream().unwrap(), first.create_event().unwrap());
    let buffer = first.alloc_host(PAGE).unwrap();
    first.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    first.fill(stream, range, 1).unwrap();
    let node = first.capture_info(stream).unwrap().unwrap().dependencies[0];
    let graph = first.end_capture(stream).unwrap();
    let exec = first.instantiate(graph).unwrap();
    let pooled = first.malloc_async(stream, PAGE).unwrap();
    let own = second.create_stream().unwrap();
    let slice = HostSlice { buffer, offset: Bytes::ZERO, len: PAGE };
    let kinds = [
        kind(second.release(handle)),
        kind(second.export(handle)),
        kind(second.map(range.start, handle)),
        kind(second.unmap(range)),
        kind(second.set_access(range, &[0])),
        kind(second.revoke_access(range, &[0])),
        kind(second.export_dma_buf(range)),
        kind(second.free_addresses(range)),
        kind(second.free_memory(plain)),
        kind(second.free_async(own, pooled)),
        kind(second.synchronize_stream(stream)),
        kind(second.destroy_stream(stream)),
        kind(second.fill(stream, range, 1)),
        kind(second.record(event, own)),
        kind(second.wait(own, event)),
        kind(second.query(event)),
        kind(second.destroy_event(event)),
        kind(second.free_host(buffer)),
        kind(second.copy_to_host(own, range.start, slice)),
        kind(second.node_dependencies(node)),
        kind(second.instantiate(graph)),
        kind(second.destroy_graph(graph)),
        kind(second.launch_graph(exec, own)),
        kind(second.destroy_graph_exec(exec)),
    ];
    assert_eq!(kinds, [ErrorKind::InvalidUse; 24]);
    let live = second.live();
    assert_eq!((live.streams, live.handles, live.graphs, live.host_buffers), (1, 0, 0, 0));
    let live = first.live();
    assert_eq!((live.streams, live.handles, live.mappings, live.graphs), (1, 1, 1, 1));
    assert_eq!((live.allocations, live.events, live.host_buffers), (1, 1, 1));
}

#[test]
fn each_range_belongs_to_one_device() {
    let [first, second] = machine(Simulator::builder());
    let range = memory(&first, PAGE, &[1]);
    let plain = AddrRange::new(first.alloc_memory(PAGE).unwrap(), PAGE);
    let stream = first.create_stream().unwrap();
    let pooled = AddrRange::new(first.malloc_async(stream, PAGE).unwrap(), PAGE);
    for range in [range, plain, pooled] {
        assert!(first.owns(range) && !second.owns(range), "{range}");
        assert!(!first.owns(AddrRange::new(range.start, PAGE * 1000)), "{range}");
    }
    let before = first.calls();
    assert!(!first.owns(AddrRange::new(DeviceAddr::new(u64::MAX), PAGE)));
    assert_eq!(first.calls(), before);
}

#[test]
fn memory_is_counted_on_the_card_that_it_is_on() {
    let [first, second] = machine(Simulator::builder().memory(PAGE * 3));
    let theirs = MemoryProperties::at(MemoryLocation::Peer(1));
    let handle = first.create(PAGE * 2, theirs).unwrap();
    assert_eq!(second.live().device_bytes, PAGE * 2);
    assert_eq!((first.live().device_bytes, first.live().handles), (Bytes::ZERO, 1));
    assert_eq!(second.memory_info().unwrap().free, PAGE);
    assert_eq!(kind(second.create(PAGE * 2, MemoryProperties::DEVICE)), ErrorKind::OutOfMemory);
    first.create(PAGE * 3, MemoryProperties::DEVICE).unwrap();
    first.release(handle).unwrap();
    assert_eq!(second.live().device_bytes, Bytes::ZERO);
    for wrong in [0, 2, 64, u32::MAX] {
        let properties = MemoryProperties::at(MemoryLocation::Peer(wrong));
        assert_eq!(kind(first.create(PAGE, properties)), ErrorKind::InvalidUse, "{wrong}");
        let range = AddrRange::new(first.reserve(PAGE, PAGE).unwrap(), PAGE);
        assert_eq!(kind(first.set_access(range, &[wrong])), ErrorKind::InvalidUse, "{wrong}");
    }
}

#[test]
fn a_peer_copy_needs_two_linked_devices_and_their_own_memory() {
    let devices = Simulator::builder().without_link(0, 2).build_machine(3);
    let [first, second, third] = <[Simulator; 3]>::try_from(devices).unwrap();
    let ranges = [&first, &second, &third].map(|device| memory(device, PAGE, &[]));
    let stream = first.create_stream().unwrap();
    first.copy_peer(stream, copy(ranges[1], ranges[0]), &second).unwrap();
    let (unmapped, _) = mapped(&second, PAGE, MemoryLocation::Device);
    for (sides, other) in [
        (copy(ranges[0], ranges[2]), &third),
        (copy(ranges[0], ranges[2]), &second),
        (copy(ranges[0], ranges[1]), &first),
        (copy(ranges[1], unmapped), &second),
        (copy(ranges[1], ranges[1]), &second),
    ] {
        let refused = first.copy_peer(stream, sides, other);
        assert_eq!(kind(refused), ErrorKind::InvalidUse, "{sides:?}");
    }
    // Another machine's memory has the same addresses and is not this one's.
    let stranger = Simulator::builder().build_machine(2).pop().unwrap();
    let refused = first.copy_peer(stream, copy(ranges[1], ranges[0]), &stranger);
    assert_eq!(kind(refused), ErrorKind::InvalidUse);
}

#[test]
fn work_on_memory_without_access_loses_only_the_device_that_runs_it() {
    let [first, second] = machine(Simulator::builder());
    let theirs = memory(&second, PAGE, &[]);
    let stream = first.create_stream().unwrap();
    let other = second.create_stream().unwrap();
    let gate = second.gate();
    second.launch(other, Kernel::new("long").writing(theirs).until(gate)).unwrap();
    first.launch(stream, Kernel::new("wild").reading(theirs)).unwrap();
    let lost = first.synchronize_stream(stream).expect_err("the access is illegal");
    assert_eq!((lost.code, lost.kind), (700, ErrorKind::DeviceLost));
    let loss = first.device_loss().unwrap();
    assert!(loss.explanation.contains("`wild` on stream 1"), "{}", loss.explanation);
    assert_eq!(second.device_loss(), None);
    second.open(gate);
    second.synchronize_stream(other).unwrap();
    second.fill(other, theirs, 1).unwrap();
    second.synchronize_stream(other).unwrap();
    assert_eq!(kind(first.create_stream()), ErrorKind::DeviceLost);
}

#[test]
fn unmapping_under_a_peers_work_loses_the_peer() {
    for revoke in [false, true] {
        let [first, second] = machine(Simulator::builder());
        let ours = memory(&first, PAGE, &[1]);
        let stream = second.create_stream().unwrap();
        let gate = second.gate();
        second.launch(stream, Kernel::new("late").reading(ours).until(gate)).unwrap();
        second.advance(10);
        let own = first.create_stream().unwrap();
        first.launch(own, Kernel::new("own").reading(ours).lasting(10)).unwrap();
        first.synchronize_stream(own).unwrap();
        if revoke {
            first.revoke_access(ours, &[1]).unwrap();
        } else {
            first.unmap(ours).unwrap();
        }
        let loss = second.device_loss().unwrap();
        assert!(loss.explanation.contains("`late` on stream 1"), "{}", loss.explanation);
        assert_eq!(first.device_loss(), None);
        assert_eq!(first.hazards_found(), 1, "{:?}", first.hazards());
        assert_eq!(first.hazards()[0].later.label, if revoke { "revoke-access" } else { "unmap" });
    }
}

#[test]
fn two_devices_without_order_on_shared_memory_are_a_hazard() {
    let [first, second] = machine(Simulator::builder());
    let ours = memory(&first, PAGE, &[1]);
    let (one, two) = (first.create_stream().unwrap(), second.create_stream().unwrap());
    first.launch(one, Kernel::new("write").writing(ours)).unwrap();
    second.launch(two, Kernel::new("read").reading(ours)).unwrap();
    assert_eq!(second.hazards_found(), 1);
    first.synchronize_stream(one).unwrap();
    second.launch(two, Kernel::new("again").reading(ours)).unwrap();
    assert_eq!(first.hazards_found(), 1);
}

#[test]
fn a_mapping_at_an_address_where_a_peer_had_access_has_none() {
    let [first, second] = machine(Simulator::builder());
    let (range, handle) = mapped(&first, PAGE, MemoryLocation::Device);
    first.set_access(range, &[1]).unwrap();
    assert!(second.peek(range).is_some());
    first.unmap(range).unwrap();
    first.map(range.start, handle).unwrap();
    first.set_access(range, &[]).unwrap();
    assert_eq!((first.peek(range).is_some(), second.peek(range)), (true, None));
}

/// Returns how long a copy took.
fn took(device: &Simulator, queue: impl FnOnce(vramp_driver::Stream)) -> u64 {
    let stream = device.create_stream().unwrap();
    device.synchronize_stream(stream).unwrap();
    let before = device.now_ns();
    queue(stream);
    device.synchronize_stream(stream).unwrap();
    device.now_ns() - before
}

#[test]
fn copies_between_cards_take_as_long_as_measured() {
    let [first, second] =
        <[Simulator; 2]>::try_from(Simulator::builder().build_machine(2)).unwrap();
    let len = Bytes::mib(256);
    let [ours, theirs] = [&first, &second].map(|device| memory(device, len, &[]));
    let near = |ns: u64, gb_per_s: f64| {
        let wanted = len.count() as f64 / gb_per_s;
        assert!((ns as f64 - wanted).abs() < wanted * 0.01, "{ns} ns instead of {wanted}");
    };
    let peer = |stream| first.copy_peer(stream, copy(ours, theirs), &second).unwrap();
    near(took(&first, peer), 37.5);
    second.set_access(theirs, &[0]).unwrap();
    near(took(&first, peer), 37.5);
    near(took(&first, |stream| first.copy(stream, copy(ours, theirs)).unwrap()), 395.0);
    first.set_access(ours, &[1]).unwrap();
    near(took(&first, peer), 390.0);
    near(took(&second, |stream| second.copy(stream, copy(ours, theirs)).unwrap()), 395.0);
    let (remote, _) = mapped(&first, len, MemoryLocation::Peer(1));
    first.set_access(remote, &[]).unwrap();
    near(took(&first, |stream| first.copy(stream, copy(remote, ours)).unwrap()), 395.0);
    near(took(&first, |stream| first.fill(stream, remote, 1).unwrap()), 395.0);
    // Two copies in one direction share the link, one in each direction do not.
    let twice = |device: &Simulator, sides: [DeviceCopy; 2]| {
        let streams = sides.map(|sides| {
            let stream = device.create_stream().unwrap();
            device.copy(stream, sides).unwrap();
            stream
        });
        let before = device.now_ns();
        streams.iter().for_each(|stream| device.synchronize_stream(*stream).unwrap());
        device.now_ns() - before
    };
    near(twice(&first, [copy(ours, theirs), copy(ours, remote)]), 395.0 / 2.0);
    let (spare, _) = mapped(&first, len, MemoryLocation::Device);
    first.set_access(spare, &[]).unwrap();
    near(twice(&first, [copy(ours, theirs), copy(remote, spare)]), 395.0);
}

#[test]
fn work_of_two_devices_runs_concurrently() {
    let [first, second] = machine(Simulator::builder());
    let streams = [&first, &second].map(|device| {
        let stream = device.create_stream().unwrap();
        device.launch(stream, Kernel::new("kernel").lasting(1_000_000)).unwrap();
        stream
    });
    first.synchronize_stream(streams[0]).unwrap();
    second.synchronize_stream(streams[1]).unwrap();
    assert!(first.now_ns() < 1_100_000, "{} ns", first.now_ns());
    assert_eq!(first.now_ns(), second.now_ns());
}

#[test]
fn peers_and_network_cards_cost_what_was_measured() {
    let [first, _second] =
        <[Simulator; 2]>::try_from(Simulator::builder().build_machine(2)).unwrap();
    let spent = |call: &dyn Fn()| {
        let before = first.now_ns();
        call();
        first.now_ns() - before
    };
    let count = 64;
    let build = |rdma: bool| {
        let range = AddrRange::new(first.reserve(PAGE * count, PAGE).unwrap(), PAGE * count);
        let handles: Vec<_> = (0..count)
            .map(|_| {
                let properties = MemoryProperties { rdma, ..MemoryProperties::DEVICE };
                first.create(PAGE, properties).unwrap()
            })
            .collect();
        let map = spent(&|| {
            for (handle, at) in handles.iter().zip(0..) {
                first.map(range.start + PAGE * at, *handle).unwrap();
            }
        });
        (range, map)
    };
    let (alone, map) = build(false);
    let (shared, _) = build(false);
    let (rdma, rdma_map) = build(true);
    assert_eq!(rdma_map - map, count * 8_000);
    let base = spent(&|| first.set_access(alone, &[]).unwrap());
    let both = spent(&|| first.set_access(shared, &[1]).unwrap());
    assert_eq!(both - base, count * 45_000);
    assert_eq!(spent(&|| first.set_access(rdma, &[]).unwrap()), base);
    let base = spent(&|| first.unmap(alone).unwrap());
    assert_eq!(spent(&|| first.unmap(shared).unwrap()) - base, count * 19_000);
    assert_eq!(spent(&|| first.unmap(rdma).unwrap()) - base, count * 8_000);
}

// --- Export and import, in one process and between processes ---

const SHARED: MemoryProperties = MemoryProperties {
    location: MemoryLocation::Device,
    handle_type: HandleType::PosixFd,
    rdma: false,
};

fn mapped_to_host() -> Simulator {
    Simulator::builder().mapped_to(Arc::new(MappedMemory::new().unwrap())).checked().build()
}

fn in_tables() -> Simulator {
    Simulator::builder().contents(Contents::Stored).checked().build()
}

fn map(device: &Simulator, handle: Handle, len: Bytes) -> AddrRange {
    let range = AddrRange::new(device.reserve(len, PAGE).unwrap(), len);
    device.map(range.start, handle).unwrap();
    device.set_access(range, &[]).unwrap();
    range
}

fn fill(device: &Simulator, range: AddrRange, byte: u8) {
    let stream = device.create_stream().unwrap();
    device.fill(stream, range, byte).unwrap();
    device.synchronize_stream(stream).unwrap();
}

fn first_byte(device: &Simulator, range: AddrRange) -> u8 {
    device.peek(AddrRange::new(range.start, Bytes::new(1))).unwrap()[0]
}

fn fd(exported: ExportedHandle) -> OwnedFd {
    match exported {
        ExportedHandle::PosixFd(fd) => fd,
        ExportedHandle::Fabric(_) => panic!("it is a descriptor"),
    }
}

#[test]
fn a_dma_buf_keeps_all_memory_that_it_covers() {
    for device in [mapped_to_host(), in_tables()] {
        let range = AddrRange::new(device.reserve(PAGE * 3, PAGE).unwrap(), PAGE * 3);
        for at in 0..2 {
            let handle = device.create(PAGE, MemoryProperties::DEVICE).unwrap();
            device.map(range.start + PAGE * at, handle).unwrap();
            device.release(handle).unwrap();
        }
        assert_eq!(kind(device.export_dma_buf(range)), ErrorKind::InvalidUse);
        let both = AddrRange::new(range.start, PAGE * 2);
        let buffer = device.export_dma_buf(both).unwrap();
        assert_eq!(
            kind(device.import(&ExportedHandle::PosixFd(buffer.try_clone().unwrap()), PAGE)),
            ErrorKind::InvalidUse
        );
        device.unmap(both).unwrap();
        assert_eq!(device.live().device_bytes, PAGE * 2);
        drop(buffer);
        assert_eq!(device.live().device_bytes, Bytes::ZERO);
    }
    let none = Capabilities { dma_buf: false, ..in_tables().info().capabilities };
    let device = Simulator::builder().capabilities(none).build();
    let at = device.alloc_memory(PAGE).unwrap();
    let refused = device.export_dma_buf(AddrRange::new(at, PAGE));
    assert_eq!(kind(refused), ErrorKind::NotSupported);
}

#[test]
fn what_cannot_be_exported_or_imported_is_refused() {
    let device = mapped_to_host();
    let private = device.create(PAGE, MemoryProperties::DEVICE).unwrap();
    let refused = device.export(private).unwrap_err();
    assert_eq!((refused.code, refused.kind), (1, ErrorKind::InvalidUse));
    assert!(refused.to_string().contains("posix-fd"), "{refused}");
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let file = File::open("/proc/self/exe").unwrap();
    for garbage in [OwnedFd::from(socket), OwnedFd::from(file)] {
        let garbage = ExportedHandle::PosixFd(garbage);
        assert_eq!(kind(device.import(&garbage, PAGE)), ErrorKind::InvalidUse);
    }
    assert_eq!(kind(device.import(&ExportedHandle::Fabric([1; 64]), PAGE)), ErrorKind::InvalidUse);
    let on_host = MemoryProperties { location: MemoryLocation::HostNuma(0), ..SHARED };
    assert_eq!(kind(device.create(PAGE, on_host)), ErrorKind::NotSupported);
    let shared = device.create(PAGE, SHARED).unwrap();
    let exported = device.export(shared).unwrap();
    assert_eq!(kind(device.import(&exported, Bytes::new(1))), ErrorKind::InvalidUse);
    let short = device.import(&exported, PAGE * 2).unwrap();
    let at = device.reserve(PAGE * 2, PAGE).unwrap();
    assert_eq!(kind(device.map(at, short)), ErrorKind::NotSupported);
    device.release(short).unwrap();
    assert_eq!(kind(device.release(short)), ErrorKind::InvalidUse);
    // Without the host's memory the bytes of another simulator are out of reach.
    let tables = in_tables();
    for (importer, exporter) in [(&tables, &device), (&device, &tables), (&tables, &in_tables())] {
        let handle = exporter.create(PAGE, SHARED).unwrap();
        let exported = exporter.export(handle).unwrap();
        let refused = importer.import(&exported, PAGE).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::NotSupported);
        assert!(refused.to_string().contains("mapped_to"), "{refused}");
    }
}

#[test]
fn another_simulator_imports_the_bytes_and_keeps_them_when_the_exporter_is_gone() {
    let (exporter, importer) = (mapped_to_host(), mapped_to_host());
    let handle = exporter.create(PAGE * 2, SHARED).unwrap();
    let range = map(&exporter, handle, PAGE * 2);
    fill(&exporter, range, 31);
    let exported = exporter.export(handle).unwrap();
    let wrong = importer.import(&exported, PAGE).unwrap();
    let at = importer.reserve(PAGE, PAGE).unwrap();
    assert_eq!(kind(importer.map(at, wrong)), ErrorKind::NotSupported);
    importer.release(wrong).unwrap();
    let imported = importer.import(&exported, PAGE * 2).unwrap();
    drop(exported);
    assert_eq!((importer.live().handles, importer.live().device_bytes), (1, Bytes::ZERO));
    let theirs = map(&importer, imported, PAGE * 2);
    assert_eq!(first_byte(&importer, theirs), 31);
    fill(&importer, theirs, 32);
    assert_eq!(first_byte(&exporter, range), 32);
    // What was imported can be exported again, and a dma-buf of it is the exporter's business.
    let again = exporter.import(&importer.export(imported).unwrap(), PAGE * 2).unwrap();
    assert_eq!(exporter.live().device_bytes, PAGE * 2);
    exporter.release(again).unwrap();
    assert_eq!(kind(importer.export_dma_buf(theirs)), ErrorKind::NotSupported);
    exporter.unmap(range).unwrap();
    exporter.release(handle).unwrap();
    assert_eq!(exporter.live().device_bytes, PAGE * 2);
    drop(exporter);
    assert_eq!(first_byte(&importer, theirs), 32);
    importer.release(imported).unwrap();
    assert_eq!(first_byte(&importer, theirs), 32);
    importer.unmap(theirs).unwrap();
    assert_eq!(importer.live().handles_released_but_mapped, 0);
}

#[test]
fn a_mapping_alone_keeps_the_exporters_memory() {
    let (exporter, importer) = (mapped_to_host(), mapped_to_host());
    let handle = exporter.create(PAGE, SHARED).unwrap();
    let imported = importer.import(&exporter.export(handle).unwrap(), PAGE).unwrap();
    let range = map(&importer, imported, PAGE);
    exporter.release(handle).unwrap();
    importer.release(imported).unwrap();
    assert_eq!(exporter.live().device_bytes, PAGE);
    importer.unmap(range).unwrap();
    assert_eq!(exporter.live().device_bytes, Bytes::ZERO);
}

#[test]
fn fabric_handles_need_permission() {
    let fabric = MemoryProperties { handle_type: HandleType::Fabric, ..SHARED };
    let device = in_tables();
    assert!(device.info().capabilities.fabric);
    let refused = device.create(PAGE, fabric).unwrap_err();
    assert_eq!((refused.code, refused.name.as_ref()), (800, "CUDA_ERROR_NOT_PERMITTED"));
    let [first, second] = <[Simulator; 2]>::try_from(
        Simulator::builder().contents(Contents::Stored).with_fabric().build_machine(2),
    )
    .unwrap();
    let handle = first.create(PAGE, fabric).unwrap();
    let range = map(&first, handle, PAGE);
    fill(&first, range, 4);
    let exported = first.export(handle).unwrap();
    let imported = second.import(&exported, PAGE).unwrap();
    let theirs = map(&second, imported, PAGE);
    assert_eq!(first_byte(&second, theirs), 4);
    assert_eq!(kind(device.import(&exported, PAGE)), ErrorKind::NotSupported);
    second.unmap(theirs).unwrap();
    second.release(imported).unwrap();
    first.unmap(range).unwrap();
    first.release(handle).unwrap();
    // The bytes keep nothing alive.
    assert_eq!(first.live().device_bytes, Bytes::ZERO);
    assert_eq!(kind(second.import(&exported, PAGE)), ErrorKind::InvalidUse);
}

#[test]
fn another_device_of_the_machine_imports_memory_of_the_first() {
    let [first, second] = <[Simulator; 2]>::try_from(
        Simulator::builder().contents(Contents::Stored).checked().build_machine(2),
    )
    .unwrap();
    let handle = first.create(PAGE, SHARED).unwrap();
    let ours = map(&first, handle, PAGE);
    let imported = second.import(&first.export(handle).unwrap(), PAGE).unwrap();
    let theirs = map(&second, imported, PAGE);
    fill(&second, theirs, 9);
    assert_eq!(first_byte(&first, ours), 9);
    assert_eq!(second.live().device_bytes, Bytes::ZERO);
    assert_eq!(first.live().device_bytes, PAGE);
    // One memory by two addresses on two devices: the race detector sees it.
    let (one, two) = (first.create_stream().unwrap(), second.create_stream().unwrap());
    first.fill(one, ours, 1).unwrap();
    second.fill(two, theirs, 2).unwrap();
    assert_eq!(first.hazards_found(), 1);
}

#[test]
fn ten_thousand_exports_that_were_closed_leave_nothing() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let device = mapped_to_host();
    let (before, descriptors) = (device.live(), open());
    for _ in 0..10_000 {
        let handle = device.create(PAGE, SHARED).unwrap();
        let exported = device.export(handle).unwrap();
        let imported = device.import(&exported, PAGE).unwrap();
        device.release(handle).unwrap();
        device.release(imported).unwrap();
        assert_eq!(device.live().handles_released_but_exported, 1);
        drop(exported);
        assert_eq!(device.live(), before);
    }
    // Other tests of this program open descriptors at the same time.
    assert!(open() < descriptors + 200);
}

// --- two processes ---

/// Variable by which the test program is the other process of a test.
const ROLE: &str = "VRAMP_TEST_IMPORTER";

/// Starts this program as the importer of `exported`, which it gets as its standard input. It prints a
/// line when it has imported, and ends when its standard output is read and its input is closed.
fn importer(exported: &ExportedHandle, keeps: &str) -> Child {
    let ExportedHandle::PosixFd(fd) = exported else { panic!("it is a descriptor") };
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "machines::the_importing_process", "--nocapture"])
        .env(ROLE, keeps)
        .stdin(Stdio::from(fd.try_clone().unwrap()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Reads lines of the importer up to one with `wanted`.
fn wait_for(child: &mut Child, wanted: &str) {
    use std::io::{BufRead, BufReader};
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let found = lines.map_while(Result::ok).any(|line| line.contains(wanted));
    assert!(found, "the importer ended without '{wanted}'");
}

/// What the importing process does. Nothing unless a test of this file started it.
#[test]
fn the_importing_process() {
    let Ok(keeps) = std::env::var(ROLE) else { return };
    let device = mapped_to_host();
    let received = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let handle = device.import(&ExportedHandle::PosixFd(received), PAGE).unwrap();
    assert_eq!(device.live().device_bytes, Bytes::ZERO);
    let range = map(&device, handle, PAGE);
    assert_eq!(first_byte(&device, range), 21);
    fill(&device, range, 22);
    if keeps == "ends" {
        return;
    }
    println!("imported");
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

#[test]
fn another_process_imports_what_this_one_exported() {
    let host = Arc::new(MappedMemory::new().unwrap());
    let device = Simulator::builder().mapped_to(Arc::clone(&host)).build();
    let handle = device.create(PAGE, SHARED).unwrap();
    let range = map(&device, handle, PAGE);
    fill(&device, range, 21);
    let exported = device.export(handle).unwrap();
    let output = importer(&exported, "ends").wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(first_byte(&device, range), 22);
    drop(exported);
    device.unmap(range).unwrap();
    device.release(handle).unwrap();
    assert_eq!((device.live().device_bytes, host.pages()), (Bytes::ZERO, 0));
}

#[test]
fn a_killed_importer_gives_the_memory_back() {
    let host = Arc::new(MappedMemory::new().unwrap());
    let device = Simulator::builder().mapped_to(Arc::clone(&host)).build();
    let handle = device.create(PAGE, SHARED).unwrap();
    let range = map(&device, handle, PAGE);
    fill(&device, range, 21);
    let exported = device.export(handle).unwrap();
    let mut child = importer(&exported, "stays");
    drop(fd(exported));
    wait_for(&mut child, "imported");
    device.unmap(range).unwrap();
    device.release(handle).unwrap();
    // Only the other process keeps it, by a descriptor and a mapping.
    assert_eq!(device.live().device_bytes, PAGE);
    assert_eq!(host.pages() * 4096, PAGE.count());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((device.live().device_bytes, host.pages()), (Bytes::ZERO, 0));
}
