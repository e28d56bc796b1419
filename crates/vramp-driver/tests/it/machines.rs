//! Several simulated devices of one machine.

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::sim::{Contents, Kernel, Simulator, SimulatorBuilder};
use vramp_driver::{
    CaptureMode, DeviceCopy, Driver, DriverResult, ErrorKind, Handle, HostSlice, MemoryLocation,
    MemoryProperties,
};

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
fn a_copy_across_needs_access_to_both_sides_and_a_peer_copy_does_not() {
    let [first, second] = machine(Simulator::builder());
    let [ours, theirs] = [&first, &second].map(|device| memory(device, PAGE, &[]));
    let stream = first.create_stream().unwrap();
    first.fill(stream, ours, 5).unwrap();
    let refused = first.copy(stream, copy(ours, theirs)).expect_err("there is no access");
    assert_eq!((refused.code, refused.kind), (1, ErrorKind::InvalidUse));
    assert_eq!(kind(first.copy(stream, copy(theirs, ours))), ErrorKind::InvalidUse);
    first.copy_peer(stream, copy(ours, theirs), &second).unwrap();
    first.synchronize_stream(stream).unwrap();
    assert_eq!(second.peek(theirs).unwrap(), [5; PAGE.count() as usize]);
    assert_eq!(first.peek(theirs), None);
    second.set_access(theirs, &[0]).unwrap();
    first.fill(stream, theirs, 6).unwrap();
    first.copy(stream, copy(theirs, ours)).unwrap();
    first.synchronize_stream(stream).unwrap();
    assert_eq!(first.peek(ours).unwrap()[..3], [6; 3]);
    second.revoke_access(theirs, &[0]).unwrap();
    assert_eq!(kind(first.copy(stream, copy(theirs, ours))), ErrorKind::InvalidUse);
    second.set_access(theirs, &[]).unwrap();
    assert_eq!(kind(first.copy(stream, copy(theirs, ours))), ErrorKind::InvalidUse);
    assert_eq!(first.device_loss(), None);
    assert_eq!(first.hazards(), []);
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
