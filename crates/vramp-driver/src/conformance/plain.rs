//! Plain allocations.

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::bench::{Bench, pattern, refused};
use super::{Checked, ensure, rules};
use crate::{Capabilities, ErrorKind};

const ANY: fn(&Capabilities) -> bool = |_| true;
const WITH_HOST: fn(&Capabilities) -> bool = |can| can.pinned_host;
const VIRTUAL: fn(&Capabilities) -> bool = |can| can.virtual_memory;

rules! {
    allocated_memory_holds_bytes: WITH_HOST,
    an_allocation_is_freed_once_and_by_its_start: ANY,
    an_allocation_cannot_be_taken_apart: VIRTUAL,
    freeing_waits_for_work_in_flight: ANY,
    allocated_memory_is_missing_from_what_is_free_until_freed: ANY,
    nothing_and_more_than_the_card_has_cannot_be_allocated: ANY,
}

const BLOCK: Bytes = Bytes::mib(48);

fn allocated_memory_holds_bytes(bench: &Bench) -> Checked {
    let stream = bench.stream()?;
    // No whole number of pages.
    let len = Bytes::new(5 * 1024 * 1024 + 512);
    let (first, second) = (bench.alloc(len)?, bench.alloc(len)?);
    let (a, b) = (pattern(1, len), pattern(2, len));
    bench.write(stream, first.start, &a)?;
    bench.write(stream, second.start, &b)?;
    bench.expect_bytes(stream, first, &a)?;
    bench.expect_bytes(stream, second, &b)
}

fn an_allocation_is_freed_once_and_by_its_start(bench: &Bench) -> Checked {
    let range = bench.alloc(BLOCK)?;
    let inside = bench.free_alloc(range.start + Bytes::mib(2));
    refused("free an address inside", ErrorKind::InvalidUse, inside)?;
    bench.free_alloc(range.start)?;
    let again = bench.free_alloc(range.start);
    refused("free twice", ErrorKind::InvalidUse, again)?;
    let foreign = bench.free_alloc(DeviceAddr::new(0x1000));
    refused("free a foreign address", ErrorKind::InvalidUse, foreign)
}

fn an_allocation_cannot_be_taken_apart(bench: &Bench) -> Checked {
    let len = bench.pages(4);
    let whole = bench.alloc(len)?;
    let device = bench.device;
    refused("unmap an allocation", ErrorKind::InvalidUse, device.unmap(whole))?;
    let addresses = device.free_addresses(whole);
    refused("give its addresses back", ErrorKind::InvalidUse, addresses)?;
    let handle = bench.create(bench.page)?;
    refused("map over it", ErrorKind::InvalidUse, device.map(whole.start, handle))?;
    let mapped = bench.memory(&[len])?;
    let plain = bench.free_alloc(mapped.start);
    refused("free mapped memory as an allocation", ErrorKind::InvalidUse, plain)
}

fn freeing_waits_for_work_in_flight(bench: &Bench) -> Checked {
    let stream = bench.stream()?;
    let event = bench.event()?;
    let range = bench.alloc(BLOCK)?;
    for byte in 0..64 {
        bench.device.fill(stream, range, byte)?;
    }
    bench.device.record(event, stream)?;
    bench.free_alloc(range.start)?;
    ensure!(bench.device.query(event)?, "work on freed memory is still in flight");
    Ok(())
}

fn allocated_memory_is_missing_from_what_is_free_until_freed(bench: &Bench) -> Checked {
    let free = || bench.device.memory_info().map(|info| info.free);
    let before = free()?;
    let range = AddrRange::new(bench.alloc(BLOCK * 4)?.start, BLOCK * 4);
    let during = free()?;
    ensure!(during + BLOCK * 3 <= before, "{before} free before, {during} during");
    bench.free_alloc(range.start)?;
    let after = free()?;
    ensure!(after >= during + BLOCK * 3, "{during} free during, {after} after");
    Ok(())
}

fn nothing_and_more_than_the_card_has_cannot_be_allocated(bench: &Bench) -> Checked {
    refused("allocate nothing", ErrorKind::InvalidUse, bench.alloc(Bytes::ZERO))?;
    let too_much = bench.device.memory_info()?.total + Bytes::gib(1);
    refused("more than the card has", ErrorKind::OutOfMemory, bench.alloc(too_much))?;
    bench.alloc(BLOCK)?;
    Ok(())
}
