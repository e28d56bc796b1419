//! Memory of other code of the process: refused to fills and copies unless it is adopted.

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::sim::{Contents, FaultPlan, Simulator};
use vramp_driver::{Call, DeviceCopy, Driver, DriverError, ErrorKind, HostSlice};

const PAGE: Bytes = Bytes::mib(2);

fn elsewhere(device: &Simulator, len: Bytes) -> AddrRange {
    AddrRange::new(device.alloc_elsewhere(len).unwrap(), len)
}

fn refused<T: std::fmt::Debug>(result: Result<T, DriverError>) {
    assert_eq!(result.unwrap_err().kind, ErrorKind::InvalidUse);
}

#[test]
fn fills_and_copies_refuse_memory_of_other_code_until_it_is_adopted() {
    let device = Simulator::builder().contents(Contents::Stored).build();
    let stream = device.create_stream().unwrap();
    let theirs = elsewhere(&device, PAGE);
    let own = device.alloc_memory(PAGE).unwrap();
    let buffer = device.alloc_host(PAGE).unwrap();
    let host = HostSlice { buffer, offset: Bytes::ZERO, len: PAGE };
    let work = || {
        [
            device.fill(stream, theirs, 7),
            device.copy(stream, DeviceCopy { from: theirs.start, to: own, len: PAGE }),
            device.copy(stream, DeviceCopy { from: own, to: theirs.start, len: PAGE }),
            device.copy_to_host(stream, theirs.start, host),
            device.copy_to_device(stream, host, theirs.start),
        ]
    };
    work().into_iter().for_each(refused);
    assert!(!device.owns(theirs));
    device.adopt_memory(theirs).unwrap();
    assert!(device.owns(theirs));
    for accepted in work() {
        accepted.unwrap();
    }
    device.synchronize_stream(stream).unwrap();
    assert_eq!(device.peek(theirs).unwrap()[..3], [7; 3]);
    refused(device.free_memory(theirs.start));
    assert!(device.forget_memory(theirs) && !device.forget_memory(theirs));
    work().into_iter().for_each(refused);
    device.free_elsewhere(theirs.start).unwrap();
    assert_eq!(device.device_loss(), None);
}

#[test]
fn memory_is_adopted_once_and_by_the_device_that_it_is_on() {
    let machine = Simulator::builder().build_machine(2);
    let (device, other) = (&machine[0], &machine[1]);
    let theirs = elsewhere(device, PAGE * 2);
    refused(other.adopt_memory(theirs));
    refused(device.adopt_memory(AddrRange::new(theirs.start, Bytes::ZERO)));
    refused(device.adopt_memory(AddrRange::new(theirs.start + PAGE, PAGE * 2)));
    refused(device.adopt_memory(AddrRange::new(DeviceAddr::new(64), PAGE)));
    let first = AddrRange::new(theirs.start, PAGE);
    device.adopt_memory(first).unwrap();
    refused(device.adopt_memory(theirs));
    device.adopt_memory(AddrRange::new(theirs.start + PAGE, PAGE)).unwrap();
    assert_eq!((device.live().adoptions, other.live().adoptions), (2, 0));
    assert!(!other.forget_memory(first) && !device.forget_memory(theirs));
    assert!(!device.owns(theirs), "work is checked in each adopted range alone");
}

#[test]
fn own_memory_is_adopted_as_a_whole_and_stays_own() {
    let device = Simulator::builder().build();
    let own = AddrRange::new(device.reserve(PAGE * 2, PAGE).unwrap(), PAGE * 2);
    refused(device.adopt_memory(AddrRange::new(own.start + PAGE, PAGE * 2)));
    device.adopt_memory(own).unwrap();
    refused(device.adopt_memory(AddrRange::new(own.start + PAGE, PAGE)));
    assert!(device.forget_memory(own) && device.owns(own));
}

#[test]
fn a_failed_adoption_leaves_nothing_and_an_ended_one_leaves_nothing() {
    let device = Simulator::builder().build();
    let theirs = elsewhere(&device, PAGE);
    device.set_faults(FaultPlan::nth_of(Call::AdoptMemory, 1).with_code(1));
    refused(device.adopt_memory(theirs));
    assert!(!device.owns(theirs));
    for step in 0..100_000 {
        let part = AddrRange::new(theirs.start + Bytes::new(step % 512 * 4096), Bytes::kib(4));
        device.adopt_memory(part).unwrap();
        assert!(device.forget_memory(part));
    }
    assert_eq!(device.live().adoptions, 0);
}
