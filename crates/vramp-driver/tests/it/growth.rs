//! How a machine grows: counts of objects, and what is left when they are gone.

use vramp_core::{AddrRange, Bytes};
use vramp_driver::sim::{Kernel, Simulator};
use vramp_driver::{Driver, MemoryProperties};

const PAGE: Bytes = Bytes::mib(2);

#[test]
fn eight_devices_run_ten_thousand_streams_each() {
    const DEVICES: usize = 8;
    const STREAMS: usize = 10_000;
    let devices = Simulator::builder().build_machine(DEVICES);
    let streams: Vec<Vec<_>> = devices
        .iter()
        .map(|device| (0..STREAMS).map(|_| device.create_stream().unwrap()).collect())
        .collect();
    // All streams of all devices have work at the same time, and every second one waits for its
    // neighbour.
    let gate = devices[0].gate();
    for (device, streams) in devices.iter().zip(&streams) {
        for pair in streams.chunks(2) {
            let event = device.create_event().unwrap();
            device.launch(pair[0], Kernel::new("first").until(gate)).unwrap();
            device.record(event, pair[0]).unwrap();
            device.wait(pair[1], event).unwrap();
            device.launch(pair[1], Kernel::new("second").lasting(10)).unwrap();
            device.destroy_event(event).unwrap();
        }
        assert_eq!(device.live().streams, STREAMS);
    }
    devices[0].open(gate);
    devices[0].advance(100);
    for (device, streams) in devices.iter().zip(&streams) {
        let before = device.now_ns();
        for stream in streams {
            device.synchronize_stream(*stream).unwrap();
            device.destroy_stream(*stream).unwrap();
        }
        // The work was done when the host's clock had passed it: synchronising only costs the call.
        let costs = vramp_driver::sim::CostTable::h200();
        let calls = [vramp_driver::Call::SynchronizeStream, vramp_driver::Call::DestroyStream];
        let each: u64 = calls.into_iter().map(|call| costs.fixed_ns(call)).sum();
        assert_eq!(device.now_ns() - before, each * STREAMS as u64);
        assert_eq!(device.live(), Default::default());
    }
}

#[test]
fn ten_thousand_mappings_with_access_of_all_peers_leave_nothing() {
    const PAGES: u64 = 10_000;
    let devices = Simulator::builder().build_machine(8);
    let [first, rest @ ..] = devices.as_slice() else { panic!("there are eight") };
    let before: Vec<_> = devices.iter().map(Simulator::live).collect();
    let range = AddrRange::new(first.reserve(PAGE * PAGES, PAGE).unwrap(), PAGE * PAGES);
    let handles: Vec<_> = (0..PAGES)
        .map(|at| {
            let handle = first.create(PAGE, MemoryProperties::DEVICE).unwrap();
            first.map(range.start + PAGE * at, handle).unwrap();
            handle
        })
        .collect();
    first.set_access(range, &first.info().peers).unwrap();
    for peer in rest {
        let stream = peer.create_stream().unwrap();
        peer.fill(stream, range, 1).unwrap();
        peer.synchronize_stream(stream).unwrap();
        peer.destroy_stream(stream).unwrap();
    }
    first.revoke_access(range, &[3]).unwrap();
    first.unmap(range).unwrap();
    handles.into_iter().for_each(|handle| first.release(handle).unwrap());
    first.free_addresses(range).unwrap();
    assert_eq!(devices.iter().map(Simulator::live).collect::<Vec<_>>(), before);
}
