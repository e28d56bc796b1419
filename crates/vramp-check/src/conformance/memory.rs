//! Addresses, physical memory, mappings.

use vramp_core::{AddrRange, Bytes};

use super::rig::{Rig, pattern, refused};
use super::{Checked, ensure, rules};
use vramp_driver::{Capabilities, CaptureMode, DeviceCopy, ErrorKind, Handle, MemoryLocation};

const VIRTUAL: fn(&Capabilities) -> bool = |can| can.virtual_memory;
const WITH_HOST: fn(&Capabilities) -> bool = |can| can.virtual_memory && can.pinned_host;

rules! {
    reservations_do_not_overlap_and_are_freed: VIRTUAL,
    reservations_are_aligned_as_asked: VIRTUAL,
    addresses_that_are_taken_are_not_reserved_again: VIRTUAL,
    sizes_that_are_no_whole_pages_are_refused: VIRTUAL,
    only_a_whole_empty_reservation_is_freed: VIRTUAL,
    a_handle_maps_only_into_free_reserved_addresses: VIRTUAL,
    a_mapping_is_unmapped_only_whole: VIRTUAL,
    one_unmap_covers_many_mappings: VIRTUAL,
    access_needs_a_range_without_gaps: VIRTUAL,
    one_set_access_covers_many_handles: WITH_HOST,
    two_addresses_of_one_handle_show_the_same_bytes: WITH_HOST,
    the_backing_of_an_address_can_be_swapped: WITH_HOST,
    bytes_survive_a_move_to_another_address: WITH_HOST,
    bytes_survive_remapping_beside_running_work: |can| WITH_HOST(can) && can.remap_beside_kernels,
    released_memory_lives_until_its_last_mapping_goes: WITH_HOST,
    stale_handles_are_refused: VIRTUAL,
    more_than_the_card_has_is_out_of_memory: VIRTUAL,
    created_memory_is_subtracted_from_free_memory: VIRTUAL,
    host_memory_is_mapped_like_device_memory: |can| WITH_HOST(can) && can.host_numa,
    host_memory_can_back_an_address_of_device_memory: |can| WITH_HOST(can) && can.host_numa,
    what_the_device_cannot_do_is_not_supported: |_| true,
}

/// Tolerance for free memory on a card, because the driver allocates some for itself.
const SLACK: Bytes = Bytes::mib(64);

fn part(of: AddrRange, offset: Bytes, len: Bytes) -> AddrRange {
    AddrRange::new(of.start + offset, len)
}

fn reservations_do_not_overlap_and_are_freed(rig: &Rig) -> Checked {
    let len = rig.pages(64);
    let mut ranges = Vec::new();
    for _ in 0..16 {
        ranges.push(rig.reserve(len)?);
    }
    ranges.sort_by_key(|range| range.start);
    for pair in ranges.windows(2) {
        ensure!(pair[0].start + len <= pair[1].start, "{} and {} overlap", pair[0], pair[1]);
    }
    for range in ranges {
        rig.free_addresses(range)?;
    }
    rig.reserve(len)?;
    Ok(())
}

fn reservations_are_aligned_as_asked(rig: &Rig) -> Checked {
    for times in [1, 2, 8, 64] {
        let alignment = rig.pages(times);
        let range = rig.reserve_aligned(rig.page, alignment)?;
        let aligned = range.start.number().is_multiple_of(alignment.count());
        ensure!(aligned, "{range} is not aligned to {alignment}");
    }
    Ok(())
}

fn addresses_that_are_taken_are_not_reserved_again(rig: &Rig) -> Checked {
    let range = rig.reserve(rig.pages(4))?;
    ensure!(!rig.reserve_at(range)?, "{range} was reserved twice");
    rig.free_addresses(range)?;
    let inner = AddrRange::new(range.start + rig.page, rig.pages(2));
    ensure!(rig.reserve_at(inner)?, "{inner} is free and was not reserved");
    ensure!(!rig.reserve_at(range)?, "{range} was reserved around {inner}");
    rig.map(inner, rig.create(inner.len)?)?;
    rig.device.set_access(inner, &[])?;
    let odd = AddrRange::new(inner.start + Bytes::new(1), rig.page);
    refused(&format!("reserve {odd}"), ErrorKind::InvalidUse, rig.reserve_at(odd))
}

fn sizes_that_are_no_whole_pages_are_refused(rig: &Rig) -> Checked {
    let odd = rig.page + Bytes::new(1);
    let half = Bytes::new(rig.page.count() / 2);
    for len in [Bytes::ZERO, half, odd] {
        refused(&format!("create {len}"), ErrorKind::InvalidUse, rig.create(len))?;
        refused(&format!("reserve {len}"), ErrorKind::InvalidUse, rig.reserve(len))?;
    }
    let range = rig.reserve(rig.pages(2))?;
    let handle = rig.create(rig.page)?;
    let between = part(range, half, rig.page);
    refused("map between two pages", ErrorKind::InvalidUse, rig.map(between, handle))
}

fn only_a_whole_empty_reservation_is_freed(rig: &Rig) -> Checked {
    let range = rig.memory(&[rig.pages(2)])?;
    let half = part(range, Bytes::ZERO, rig.page);
    refused("free a mapped range", ErrorKind::InvalidUse, rig.free_addresses(range))?;
    rig.unmap(range)?;
    refused("free half a range", ErrorKind::InvalidUse, rig.free_addresses(half))?;
    rig.free_addresses(range)?;
    refused("free a range twice", ErrorKind::InvalidUse, rig.free_addresses(range))
}

fn a_handle_maps_only_into_free_reserved_addresses(rig: &Rig) -> Checked {
    let range = rig.reserve(rig.pages(2))?;
    let pair = rig.create(rig.pages(2))?;
    let single = rig.create(rig.page)?;
    let second = part(range, rig.page, rig.page);
    let across = part(range, rig.page, rig.pages(2));
    refused("map beyond the reservation", ErrorKind::InvalidUse, rig.map(across, pair))?;
    rig.map(second, single)?;
    refused("map over a mapping", ErrorKind::InvalidUse, rig.map(range, pair))?;
    refused("map the same again", ErrorKind::InvalidUse, rig.map(second, single))?;
    rig.unmap(second)?;
    rig.map(range, pair)?;
    Ok(())
}

fn a_mapping_is_unmapped_only_whole(rig: &Rig) -> Checked {
    let (one, two) = (rig.page, rig.pages(2));
    let range = rig.memory(&[two, two])?;
    for (what, range) in [
        ("its first half", part(range, Bytes::ZERO, one)),
        ("its second half", part(range, one, one)),
        ("one and a half mappings", part(range, Bytes::ZERO, rig.pages(3))),
        ("the halves of two mappings", part(range, one, two)),
    ] {
        refused(&format!("unmap {what}"), ErrorKind::InvalidUse, rig.unmap(range))?;
    }
    rig.unmap(part(range, two, two))?;
    refused("unmap a range with a gap", ErrorKind::InvalidUse, rig.unmap(range))?;
    rig.unmap(part(range, Bytes::ZERO, two))?;
    Ok(())
}

fn one_unmap_covers_many_mappings(rig: &Rig) -> Checked {
    let sizes = [1, 4, 2, 1].map(|pages| rig.pages(pages));
    let range = rig.memory(&sizes)?;
    rig.unmap(range)?;
    refused("unmap it again", ErrorKind::InvalidUse, rig.unmap(range))?;
    let whole = rig.create(range.len)?;
    rig.map(range, whole)?;
    Ok(())
}

fn access_needs_a_range_without_gaps(rig: &Rig) -> Checked {
    let range = rig.reserve(rig.pages(3))?;
    let first = part(range, Bytes::ZERO, rig.page);
    let third = part(range, rig.pages(2), rig.page);
    refused("access to nothing", ErrorKind::InvalidUse, rig.device.set_access(range, &[]))?;
    rig.map(first, rig.create(rig.page)?)?;
    rig.map(third, rig.create(rig.page)?)?;
    refused("access over a gap", ErrorKind::InvalidUse, rig.device.set_access(range, &[]))?;
    rig.device.set_access(first, &[])?;
    rig.device.set_access(third, &[])?;
    Ok(())
}

fn one_set_access_covers_many_handles(rig: &Rig) -> Checked {
    let sizes = [1, 3, 2].map(|pages| rig.pages(pages));
    let range = rig.memory(&sizes)?;
    let stream = rig.stream()?;
    rig.device.fill(stream, range, 0x5A)?;
    rig.expect_filled(stream, range, 0x5A)
}

fn two_addresses_of_one_handle_show_the_same_bytes(rig: &Rig) -> Checked {
    let len = rig.pages(2);
    let handle = rig.create(len)?;
    let first = rig.mapped_again(handle, len)?;
    let second = rig.mapped_again(handle, len)?;
    let stream = rig.stream()?;
    rig.device.fill(stream, first, 0x11)?;
    rig.expect_filled(stream, second, 0x11)?;
    let bytes = pattern(3, len);
    rig.write(stream, second.start, &bytes)?;
    rig.expect_bytes(stream, first, &bytes)
}

fn the_backing_of_an_address_can_be_swapped(rig: &Rig) -> Checked {
    let range = rig.reserve(rig.page)?;
    let handles = [rig.create(rig.page)?, rig.create(rig.page)?];
    let stream = rig.stream()?;
    let back = |handle: Handle| -> Checked {
        rig.map(range, handle)?;
        rig.device.set_access(range, &[])?;
        Ok(())
    };
    for (handle, byte) in handles.into_iter().zip([0x21, 0x22]) {
        back(handle)?;
        rig.device.fill(stream, range, byte)?;
        rig.device.synchronize_stream(stream)?;
        rig.unmap(range)?;
    }
    for (handle, byte) in handles.into_iter().zip([0x21, 0x22]) {
        back(handle)?;
        rig.expect_filled(stream, range, byte)?;
        rig.unmap(range)?;
    }
    Ok(())
}

fn bytes_survive_a_move_to_another_address(rig: &Rig) -> Checked {
    let len = rig.pages(4);
    let handle = rig.create(len)?;
    let old = rig.mapped_again(handle, len)?;
    let stream = rig.stream()?;
    let bytes = pattern(9, len);
    rig.write(stream, old.start, &bytes)?;
    let new = rig.mapped_again(handle, len)?;
    rig.unmap(old)?;
    rig.free_addresses(old)?;
    rig.expect_bytes(stream, new, &bytes)
}

fn bytes_survive_remapping_beside_running_work(rig: &Rig) -> Checked {
    let busy = rig.memory(&[rig.whole_pages(Bytes::mib(128))])?;
    let (working, idle) = (rig.stream()?, rig.stream()?);
    let handles = [rig.create(rig.page)?, rig.create(rig.page)?];
    let home = rig.reserve(rig.page)?;
    for round in 0..16 {
        let handle = handles[round % 2];
        let byte = 0x80 + round as u8;
        for _ in 0..4 {
            rig.device.fill(working, busy, byte)?;
        }
        let elsewhere = rig.mapped_again(handle, rig.page)?;
        rig.device.fill(idle, elsewhere, byte)?;
        rig.device.synchronize_stream(idle)?;
        rig.map(home, handle)?;
        rig.device.set_access(home, &[])?;
        rig.unmap(elsewhere)?;
        rig.expect_filled(idle, home, byte)?;
        rig.unmap(home)?;
    }
    rig.expect_filled(working, part(busy, Bytes::ZERO, rig.page), 0x8F)
}

fn released_memory_lives_until_its_last_mapping_goes(rig: &Rig) -> Checked {
    let handle = rig.create(rig.page)?;
    let first = rig.mapped_again(handle, rig.page)?;
    let second = rig.mapped_again(handle, rig.page)?;
    rig.release(handle)?;
    let stream = rig.stream()?;
    rig.device.fill(stream, first, 0x31)?;
    rig.device.synchronize_stream(stream)?;
    rig.unmap(first)?;
    rig.expect_filled(stream, second, 0x31)
}

fn stale_handles_are_refused(rig: &Rig) -> Checked {
    let range = rig.reserve(rig.page)?;
    let handle = rig.create(rig.page)?;
    rig.release(handle)?;
    refused("release twice", ErrorKind::InvalidUse, rig.release(handle))?;
    refused("map what was released", ErrorKind::InvalidUse, rig.map(range, handle))?;
    let foreign = Handle::from_number(u64::MAX - 1);
    refused("release a foreign handle", ErrorKind::InvalidUse, rig.release(foreign))
}

fn more_than_the_card_has_is_out_of_memory(rig: &Rig) -> Checked {
    let before = rig.device.memory_info()?;
    let too_much = before.total.round_down(rig.page) + rig.page;
    refused("create more than the card has", ErrorKind::OutOfMemory, rig.create(too_much))?;
    let half = Bytes::new(before.free.count() / 2).round_down(rig.page);
    let held = [rig.create(half)?];
    let rest = half + rig.whole_pages(SLACK);
    refused("create more than is free", ErrorKind::OutOfMemory, rig.create(rest))?;
    for handle in held {
        rig.release(handle)?;
    }
    let after = rig.device.memory_info()?;
    ensure!(
        after.free + SLACK >= before.free,
        "{} were free before and {} after creating failed",
        before.free,
        after.free
    );
    rig.create(rig.page)?;
    Ok(())
}

fn created_memory_is_subtracted_from_free_memory(rig: &Rig) -> Checked {
    let created = rig.whole_pages(Bytes::mib(256));
    let before = rig.device.memory_info()?.free;
    let handle = rig.create(created)?;
    let during = rig.device.memory_info()?.free;
    let missing = before.saturating_sub(during);
    ensure!(
        missing + SLACK >= created && missing <= created + SLACK,
        "{created} were created, and free memory fell by {missing}"
    );
    rig.release(handle)?;
    let after = rig.device.memory_info()?.free;
    ensure!(after + SLACK >= before, "{before} were free before, {after} after");
    Ok(())
}

fn host_memory_is_mapped_like_device_memory(rig: &Rig) -> Checked {
    let len = rig.whole_pages(Bytes::mib(4));
    let host = rig.create_at(len, MemoryLocation::HostNuma(0))?;
    let range = rig.mapped_again(host, len)?;
    let device = rig.memory(&[len])?;
    let stream = rig.stream()?;
    let bytes = pattern(17, len);
    rig.write(stream, device.start, &bytes)?;
    rig.device.copy(stream, DeviceCopy { from: device.start, to: range.start, len })?;
    rig.expect_bytes(stream, range, &bytes)?;
    rig.device.fill(stream, range, 0x41)?;
    rig.expect_filled(stream, range, 0x41)
}

fn host_memory_can_back_an_address_of_device_memory(rig: &Rig) -> Checked {
    let len = rig.whole_pages(Bytes::mib(2));
    let device = rig.create(len)?;
    let host = rig.create_at(len, MemoryLocation::HostNuma(0))?;
    let range = rig.mapped_again(device, len)?;
    let spill = rig.mapped_again(host, len)?;
    let stream = rig.stream()?;
    let bytes = pattern(23, len);
    rig.write(stream, range.start, &bytes)?;
    rig.device.copy(stream, DeviceCopy { from: range.start, to: spill.start, len })?;
    rig.device.synchronize_stream(stream)?;
    rig.unmap(range)?;
    rig.map(range, host)?;
    rig.device.set_access(range, &[])?;
    rig.expect_bytes(stream, range, &bytes)
}

fn what_the_device_cannot_do_is_not_supported(rig: &Rig) -> Checked {
    let can = rig.device.info().capabilities;
    let unsupported = ErrorKind::NotSupported;
    if !can.virtual_memory {
        refused("reserve", unsupported, rig.reserve(rig.page))?;
        refused("create", unsupported, rig.create(rig.page))?;
    }
    if can.virtual_memory && !can.host_numa {
        let created = rig.create_at(rig.page, MemoryLocation::HostNuma(0));
        refused("create on the host", unsupported, created)?;
    }
    if !can.stream_ordered_pool {
        let stream = rig.stream()?;
        refused("malloc-async", unsupported, rig.malloc_async(stream, Bytes::mib(1)))?;
        refused("pool-usage", unsupported, rig.device.pool_usage())?;
    }
    if !can.pinned_host {
        refused("alloc-host", unsupported, rig.host(Bytes::mib(1)))?;
    }
    if !can.graphs {
        let stream = rig.stream()?;
        let begun = rig.begin_capture(stream, CaptureMode::Global);
        refused("begin-capture", unsupported, begun)?;
        ensure!(!rig.device.is_capturing(stream)?, "a stream captures without the capability");
    }
    Ok(())
}
