//! Memory of other code: what the driver is asked about it, and what copies accept it.

use super::*;
use crate::fake::OtherMemory;
use crate::sys::{Api, CUmemorytype};

const START: u64 = 0x7f00_0000_0000;

fn range(offset: u64, len: u64) -> AddrRange {
    AddrRange::new(DeviceAddr::new(START + offset), Bytes::new(len))
}

#[test]
fn copies_accept_memory_of_other_code_while_it_is_adopted() {
    let driver = open();
    fake::allocate_elsewhere(START, OtherMemory::plain(4096));
    let stream = driver.create_stream().unwrap();
    let buffer = driver.alloc_host(Bytes::new(4096)).unwrap();
    let host = HostSlice { buffer, offset: Bytes::ZERO, len: Bytes::new(1024) };
    let (whole, part) = (range(512, 2048), range(1000, 1024));
    let work = || {
        [
            driver.fill(stream, part, 0),
            driver.copy_to_host(stream, part.start, host),
            driver.copy_to_device(stream, host, part.start),
        ]
    };
    for refused in work() {
        assert_eq!(kind(refused), ErrorKind::InvalidUse);
    }
    calls();
    driver.adopt_memory(whole).unwrap();
    assert_eq!(calls(), ["cuPointerGetAttributes", "cuMemGetAddressRange_v2"]);
    assert!(driver.owns(part) && !driver.owns(range(0, 1024)));
    for accepted in work() {
        accepted.unwrap();
    }
    assert_eq!(kind(driver.fill(stream, range(0, 1024), 0)), ErrorKind::InvalidUse);
    assert_eq!(kind(driver.free_memory(whole.start)), ErrorKind::InvalidUse);
    assert!(!driver.forget_memory(part) && driver.forget_memory(whole));
    assert!(!driver.forget_memory(whole));
    for refused in work() {
        assert_eq!(kind(refused), ErrorKind::InvalidUse);
    }
}

#[test]
fn only_accessible_memory_of_the_card_in_one_allocation_is_adopted() {
    let driver = open();
    let plain = OtherMemory::plain(4096);
    let cases = [
        (OtherMemory { kind: CUmemorytype::CU_MEMORYTYPE_HOST, ..plain }, 4096, "host"),
        (OtherMemory { is_managed: true, ..plain }, 4096, "managed"),
        (OtherMemory { ordinal: 1, ..plain }, 4096, "device 1"),
        (OtherMemory { reserved: 8192, ..plain }, 4097, "no accessible memory"),
        (plain, 4097, "part of one allocation"),
    ];
    for (case, (memory, len, why)) in cases.into_iter().enumerate() {
        let offset = case as u64 * 65_536;
        fake::allocate_elsewhere(START + offset, memory);
        // The next allocation begins where this one ends, and a card copies no range of both.
        fake::allocate_elsewhere(START + offset + memory.reserved, plain);
        let error = driver.adopt_memory(range(offset, len)).unwrap_err();
        assert_eq!((error.kind, error.call), (ErrorKind::InvalidUse, Call::AdoptMemory));
        assert!(error.detail.contains(why), "{error}");
    }
    for nothing in [range(1 << 30, 1), range(0, 0)] {
        assert_eq!(kind(driver.adopt_memory(nothing)), ErrorKind::InvalidUse, "{nothing}");
    }
    assert!(!driver.owns(range(0, 1)), "a refused adoption leaves nothing");
}

#[test]
fn mapped_memory_of_other_code_is_looked_at_mapping_by_mapping() {
    let driver = open();
    fake::allocate_elsewhere(
        START,
        OtherMemory { step: 1024, reserved: 8192, ..OtherMemory::plain(4096) },
    );
    calls();
    driver.adopt_memory(range(1000, 2000)).unwrap();
    let asked = calls().into_iter().filter(|call| *call == "cuMemGetAddressRange_v2").count();
    assert_eq!(asked, 3);
    assert_eq!(kind(driver.adopt_memory(range(3072, 1025))), ErrorKind::InvalidUse);
}

#[test]
fn memory_of_the_device_is_adopted_without_a_driver_call_and_not_in_part() {
    let driver = open();
    let own = AddrRange::new(driver.alloc_memory(PAGE).unwrap(), PAGE);
    fake::allocate_elsewhere(own.start.number() + PAGE.count(), OtherMemory::plain(PAGE.count()));
    calls();
    let both = AddrRange::new(own.start, PAGE * 2);
    assert_eq!(kind(driver.adopt_memory(both)), ErrorKind::InvalidUse);
    driver.adopt_memory(own).unwrap();
    assert_eq!(kind(driver.adopt_memory(own)), ErrorKind::InvalidUse);
    assert_eq!(calls(), Vec::<&str>::new());
    assert!(driver.forget_memory(own) && driver.owns(own));
}

#[test]
fn a_hundred_thousand_adoptions_that_ended_leave_nothing() {
    let driver = open();
    fake::allocate_elsewhere(START, OtherMemory::plain(1 << 30));
    for step in 0..100_000 {
        let range = range(step % 1000 * 4096, 4096);
        driver.adopt_memory(range).unwrap();
        assert!(driver.forget_memory(range));
        calls();
    }
    driver.adopt_memory(range(0, 1 << 30)).unwrap();
}

#[test]
fn a_driver_that_cannot_tell_what_memory_is_adopts_none_of_other_code() {
    for remove in [
        (|api: &mut Api| api.cuPointerGetAttributes = Err(fake::absent())) as fn(&mut Api),
        |api| api.cuMemGetAddressRange_v2 = Err(fake::absent()),
    ] {
        let driver = fake::open(remove).unwrap();
        fake::allocate_elsewhere(START, OtherMemory::plain(4096));
        assert_eq!(kind(driver.adopt_memory(range(0, 64))), ErrorKind::NotSupported);
        assert!(!driver.owns(range(0, 64)));
    }
}

#[test]
fn memory_is_forgotten_on_a_lost_device() {
    let driver = open();
    fake::allocate_elsewhere(START, OtherMemory::plain(4096));
    driver.adopt_memory(range(0, 64)).unwrap();
    fake::fail("cuStreamCreate", 700);
    assert!(driver.create_stream().unwrap_err().is_device_lost());
    assert!(driver.adopt_memory(range(64, 64)).unwrap_err().is_device_lost());
    assert!(driver.forget_memory(range(0, 64)));
}
