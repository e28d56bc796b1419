//! Plain allocations.

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::rig::{Rig, pattern, refused};
use super::{Checked, ensure, rules};
use vramp_driver::{Capabilities, ErrorKind};

const ANY: fn(&Capabilities) -> bool = |_| true;
const WITH_HOST: fn(&Capabilities) -> bool = |can| can.pinned_host;
const VIRTUAL: fn(&Capabilities) -> bool = |can| can.virtual_memory;

rules! {
    allocated_memory_holds_bytes: WITH_HOST,
    an_allocation_is_freed_once_and_by_its_start: ANY,
    an_allocation_cannot_be_taken_apart: VIRTUAL,
    freeing_waits_for_work_in_flight: ANY,
    allocated_memory_is_subtracted_from_free_memory_until_freed: ANY,
    zero_bytes_and_more_than_the_card_has_cannot_be_allocated: ANY,
}

const BLOCK: Bytes = Bytes::mib(48);

fn allocated_memory_holds_bytes(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    // Not a multiple of the page.
    let len = Bytes::new(5 * 1024 * 1024 + 512);
    let (first, second) = (rig.alloc(len)?, rig.alloc(len)?);
    let (a, b) = (pattern(1, len), pattern(2, len));
    rig.write(stream, first.start, &a)?;
    rig.write(stream, second.start, &b)?;
    rig.expect_bytes(stream, first, &a)?;
    rig.expect_bytes(stream, second, &b)
}

fn an_allocation_is_freed_once_and_by_its_start(rig: &Rig) -> Checked {
    let range = rig.alloc(BLOCK)?;
    let inside = rig.free_alloc(range.start + Bytes::mib(2));
    refused("free an address inside", ErrorKind::InvalidUse, inside)?;
    rig.free_alloc(range.start)?;
    let again = rig.free_alloc(range.start);
    refused("free twice", ErrorKind::InvalidUse, again)?;
    let foreign = rig.free_alloc(DeviceAddr::new(0x1000));
    refused("free a foreign address", ErrorKind::InvalidUse, foreign)
}

fn an_allocation_cannot_be_taken_apart(rig: &Rig) -> Checked {
    let len = rig.pages(4);
    let whole = rig.alloc(len)?;
    let device = rig.device;
    refused("unmap an allocation", ErrorKind::InvalidUse, device.unmap(whole))?;
    let addresses = device.free_addresses(whole);
    refused("give its addresses back", ErrorKind::InvalidUse, addresses)?;
    let handle = rig.create(rig.page)?;
    refused("map over it", ErrorKind::InvalidUse, device.map(whole.start, handle))?;
    let mapped = rig.memory(&[len])?;
    let plain = rig.free_alloc(mapped.start);
    refused("free mapped memory as an allocation", ErrorKind::InvalidUse, plain)
}

fn freeing_waits_for_work_in_flight(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    let event = rig.event()?;
    let range = rig.alloc(BLOCK)?;
    for byte in 0..64 {
        rig.device.fill(stream, range, byte)?;
    }
    rig.device.record(event, stream)?;
    rig.free_alloc(range.start)?;
    ensure!(rig.device.query(event)?, "work on freed memory is still in flight");
    Ok(())
}

fn allocated_memory_is_subtracted_from_free_memory_until_freed(rig: &Rig) -> Checked {
    let free = || rig.device.memory_info().map(|info| info.free);
    let before = free()?;
    let range = AddrRange::new(rig.alloc(BLOCK * 4)?.start, BLOCK * 4);
    let during = free()?;
    ensure!(during + BLOCK * 3 <= before, "{before} free before, {during} during");
    rig.free_alloc(range.start)?;
    let after = free()?;
    ensure!(after >= during + BLOCK * 3, "{during} free during, {after} after");
    Ok(())
}

fn zero_bytes_and_more_than_the_card_has_cannot_be_allocated(rig: &Rig) -> Checked {
    refused("allocate nothing", ErrorKind::InvalidUse, rig.alloc(Bytes::ZERO))?;
    let too_much = rig.device.memory_info()?.total + Bytes::gib(1);
    refused("more than the card has", ErrorKind::OutOfMemory, rig.alloc(too_much))?;
    rig.alloc(BLOCK)?;
    Ok(())
}
