//! Addresses, physical memory, mappings.

use vramp_core::{AddrRange, Bytes};

use super::bench::{Bench, pattern, refused};
use super::{Checked, ensure, rules};
use crate::{Capabilities, CaptureMode, DeviceCopy, ErrorKind, Handle, MemoryLocation};

const VIRTUAL: fn(&Capabilities) -> bool = |can| can.virtual_memory;
const WITH_HOST: fn(&Capabilities) -> bool = |can| can.virtual_memory && can.pinned_host;

rules! {
    reservations_do_not_overlap_and_come_back: VIRTUAL,
    reservations_are_aligned_as_asked: VIRTUAL,
    sizes_that_are_no_whole_pages_are_refused: VIRTUAL,
    only_a_whole_empty_reservation_is_given_back: VIRTUAL,
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
    created_memory_is_missing_from_what_is_free: VIRTUAL,
    host_memory_is_mapped_like_device_memory: |can| WITH_HOST(can) && can.host_numa,
    host_memory_can_back_an_address_of_device_memory: |can| WITH_HOST(can) && can.host_numa,
    what_the_device_cannot_do_is_not_supported: |_| true,
}

/// How far counts of free memory may be off on a card, where the driver keeps some for itself.
const SLACK: Bytes = Bytes::mib(64);

fn part(of: AddrRange, offset: Bytes, len: Bytes) -> AddrRange {
    AddrRange::new(of.start + offset, len)
}

fn reservations_do_not_overlap_and_come_back(bench: &Bench) -> Checked {
    let len = bench.pages(64);
    let mut ranges = Vec::new();
    for _ in 0..16 {
        ranges.push(bench.reserve(len)?);
    }
    ranges.sort_by_key(|range| range.start);
    for pair in ranges.windows(2) {
        ensure!(pair[0].start + len <= pair[1].start, "{} and {} overlap", pair[0], pair[1]);
    }
    for range in ranges {
        bench.free_addresses(range)?;
    }
    bench.reserve(len)?;
    Ok(())
}

fn reservations_are_aligned_as_asked(bench: &Bench) -> Checked {
    for times in [1, 2, 8, 64] {
        let alignment = bench.pages(times);
        let range = bench.reserve_aligned(bench.page, alignment)?;
        let aligned = range.start.number().is_multiple_of(alignment.count());
        ensure!(aligned, "{range} was asked to be aligned to {alignment}");
    }
    Ok(())
}

fn sizes_that_are_no_whole_pages_are_refused(bench: &Bench) -> Checked {
    let odd = bench.page + Bytes::new(1);
    let half = Bytes::new(bench.page.count() / 2);
    for len in [Bytes::ZERO, half, odd] {
        refused(&format!("create {len}"), ErrorKind::InvalidUse, bench.create(len))?;
        refused(&format!("reserve {len}"), ErrorKind::InvalidUse, bench.reserve(len))?;
    }
    let range = bench.reserve(bench.pages(2))?;
    let handle = bench.create(bench.page)?;
    let between = part(range, half, bench.page);
    refused("map between two pages", ErrorKind::InvalidUse, bench.map(between, handle))
}

fn only_a_whole_empty_reservation_is_given_back(bench: &Bench) -> Checked {
    let range = bench.memory(&[bench.pages(2)])?;
    let half = part(range, Bytes::ZERO, bench.page);
    refused("free a mapped range", ErrorKind::InvalidUse, bench.free_addresses(range))?;
    bench.unmap(range)?;
    refused("free half a range", ErrorKind::InvalidUse, bench.free_addresses(half))?;
    bench.free_addresses(range)?;
    refused("free a range twice", ErrorKind::InvalidUse, bench.free_addresses(range))
}

fn a_handle_maps_only_into_free_reserved_addresses(bench: &Bench) -> Checked {
    let range = bench.reserve(bench.pages(2))?;
    let pair = bench.create(bench.pages(2))?;
    let single = bench.create(bench.page)?;
    let second = part(range, bench.page, bench.page);
    let across = part(range, bench.page, bench.pages(2));
    refused("map beyond the reservation", ErrorKind::InvalidUse, bench.map(across, pair))?;
    bench.map(second, single)?;
    refused("map over a mapping", ErrorKind::InvalidUse, bench.map(range, pair))?;
    refused("map the same again", ErrorKind::InvalidUse, bench.map(second, single))?;
    bench.unmap(second)?;
    bench.map(range, pair)?;
    Ok(())
}

fn a_mapping_is_unmapped_only_whole(bench: &Bench) -> Checked {
    let (one, two) = (bench.page, bench.pages(2));
    let range = bench.memory(&[two, two])?;
    for (what, range) in [
        ("its first half", part(range, Bytes::ZERO, one)),
        ("its second half", part(range, one, one)),
        ("one and a half mappings", part(range, Bytes::ZERO, bench.pages(3))),
        ("the halves of two mappings", part(range, one, two)),
    ] {
        refused(&format!("unmap {what}"), ErrorKind::InvalidUse, bench.unmap(range))?;
    }
    bench.unmap(part(range, two, two))?;
    refused("unmap a range with a gap", ErrorKind::InvalidUse, bench.unmap(range))?;
    bench.unmap(part(range, Bytes::ZERO, two))?;
    Ok(())
}

fn one_unmap_covers_many_mappings(bench: &Bench) -> Checked {
    let sizes = [1, 4, 2, 1].map(|pages| bench.pages(pages));
    let range = bench.memory(&sizes)?;
    bench.unmap(range)?;
    refused("unmap it again", ErrorKind::InvalidUse, bench.unmap(range))?;
    let whole = bench.create(range.len)?;
    bench.map(range, whole)?;
    Ok(())
}

fn access_needs_a_range_without_gaps(bench: &Bench) -> Checked {
    let range = bench.reserve(bench.pages(3))?;
    let first = part(range, Bytes::ZERO, bench.page);
    let third = part(range, bench.pages(2), bench.page);
    refused("access to nothing", ErrorKind::InvalidUse, bench.device.set_access(range))?;
    bench.map(first, bench.create(bench.page)?)?;
    bench.map(third, bench.create(bench.page)?)?;
    refused("access over a gap", ErrorKind::InvalidUse, bench.device.set_access(range))?;
    bench.device.set_access(first)?;
    bench.device.set_access(third)?;
    Ok(())
}

fn one_set_access_covers_many_handles(bench: &Bench) -> Checked {
    let sizes = [1, 3, 2].map(|pages| bench.pages(pages));
    let range = bench.memory(&sizes)?;
    let stream = bench.stream()?;
    bench.device.fill(stream, range, 0x5A)?;
    bench.expect_filled(stream, range, 0x5A)
}

fn two_addresses_of_one_handle_show_the_same_bytes(bench: &Bench) -> Checked {
    let len = bench.pages(2);
    let handle = bench.create(len)?;
    let first = bench.mapped_again(handle, len)?;
    let second = bench.mapped_again(handle, len)?;
    let stream = bench.stream()?;
    bench.device.fill(stream, first, 0x11)?;
    bench.expect_filled(stream, second, 0x11)?;
    let bytes = pattern(3, len);
    bench.write(stream, second.start, &bytes)?;
    bench.expect_bytes(stream, first, &bytes)
}

fn the_backing_of_an_address_can_be_swapped(bench: &Bench) -> Checked {
    let range = bench.reserve(bench.page)?;
    let handles = [bench.create(bench.page)?, bench.create(bench.page)?];
    let stream = bench.stream()?;
    let back = |handle: Handle| -> Checked {
        bench.map(range, handle)?;
        bench.device.set_access(range)?;
        Ok(())
    };
    for (handle, byte) in handles.into_iter().zip([0x21, 0x22]) {
        back(handle)?;
        bench.device.fill(stream, range, byte)?;
        bench.device.synchronize_stream(stream)?;
        bench.unmap(range)?;
    }
    for (handle, byte) in handles.into_iter().zip([0x21, 0x22]) {
        back(handle)?;
        bench.expect_filled(stream, range, byte)?;
        bench.unmap(range)?;
    }
    Ok(())
}

fn bytes_survive_a_move_to_another_address(bench: &Bench) -> Checked {
    let len = bench.pages(4);
    let handle = bench.create(len)?;
    let old = bench.mapped_again(handle, len)?;
    let stream = bench.stream()?;
    let bytes = pattern(9, len);
    bench.write(stream, old.start, &bytes)?;
    let new = bench.mapped_again(handle, len)?;
    bench.unmap(old)?;
    bench.free_addresses(old)?;
    bench.expect_bytes(stream, new, &bytes)
}

fn bytes_survive_remapping_beside_running_work(bench: &Bench) -> Checked {
    let busy = bench.memory(&[bench.whole_pages(Bytes::mib(128))])?;
    let (working, idle) = (bench.stream()?, bench.stream()?);
    let handles = [bench.create(bench.page)?, bench.create(bench.page)?];
    let home = bench.reserve(bench.page)?;
    for round in 0..16 {
        let handle = handles[round % 2];
        let byte = 0x80 + round as u8;
        for _ in 0..4 {
            bench.device.fill(working, busy, byte)?;
        }
        let elsewhere = bench.mapped_again(handle, bench.page)?;
        bench.device.fill(idle, elsewhere, byte)?;
        bench.device.synchronize_stream(idle)?;
        bench.map(home, handle)?;
        bench.device.set_access(home)?;
        bench.unmap(elsewhere)?;
        bench.expect_filled(idle, home, byte)?;
        bench.unmap(home)?;
    }
    bench.expect_filled(working, part(busy, Bytes::ZERO, bench.page), 0x8F)
}

fn released_memory_lives_until_its_last_mapping_goes(bench: &Bench) -> Checked {
    let handle = bench.create(bench.page)?;
    let first = bench.mapped_again(handle, bench.page)?;
    let second = bench.mapped_again(handle, bench.page)?;
    bench.release(handle)?;
    let stream = bench.stream()?;
    bench.device.fill(stream, first, 0x31)?;
    bench.device.synchronize_stream(stream)?;
    bench.unmap(first)?;
    bench.expect_filled(stream, second, 0x31)
}

fn stale_handles_are_refused(bench: &Bench) -> Checked {
    let range = bench.reserve(bench.page)?;
    let handle = bench.create(bench.page)?;
    bench.release(handle)?;
    refused("release twice", ErrorKind::InvalidUse, bench.release(handle))?;
    refused("map what was released", ErrorKind::InvalidUse, bench.map(range, handle))?;
    let foreign = Handle::from_number(u64::MAX - 1);
    refused("release a foreign handle", ErrorKind::InvalidUse, bench.release(foreign))
}

fn more_than_the_card_has_is_out_of_memory(bench: &Bench) -> Checked {
    let before = bench.device.memory_info()?;
    let too_much = before.total.round_down(bench.page) + bench.page;
    refused("create more than the card has", ErrorKind::OutOfMemory, bench.create(too_much))?;
    let half = Bytes::new(before.free.count() / 2).round_down(bench.page);
    let held = [bench.create(half)?];
    let rest = half + bench.whole_pages(SLACK);
    refused("create more than is free", ErrorKind::OutOfMemory, bench.create(rest))?;
    for handle in held {
        bench.release(handle)?;
    }
    let after = bench.device.memory_info()?;
    ensure!(
        after.free + SLACK >= before.free,
        "{} were free before and {} after creating failed",
        before.free,
        after.free
    );
    bench.create(bench.page)?;
    Ok(())
}

fn created_memory_is_missing_from_what_is_free(bench: &Bench) -> Checked {
    let created = bench.whole_pages(Bytes::mib(256));
    let before = bench.device.memory_info()?.free;
    let handle = bench.create(created)?;
    let during = bench.device.memory_info()?.free;
    let missing = before.saturating_sub(during);
    ensure!(
        missing + SLACK >= created && missing <= created + SLACK,
        "{created} were created and {missing} are missing"
    );
    bench.release(handle)?;
    let after = bench.device.memory_info()?.free;
    ensure!(after + SLACK >= before, "{before} were free before, {after} after");
    Ok(())
}

fn host_memory_is_mapped_like_device_memory(bench: &Bench) -> Checked {
    let len = bench.whole_pages(Bytes::mib(4));
    let host = bench.create_at(len, MemoryLocation::HostNuma(0))?;
    let range = bench.mapped_again(host, len)?;
    let device = bench.memory(&[len])?;
    let stream = bench.stream()?;
    let bytes = pattern(17, len);
    bench.write(stream, device.start, &bytes)?;
    bench.device.copy(stream, DeviceCopy { from: device.start, to: range.start, len })?;
    bench.expect_bytes(stream, range, &bytes)?;
    bench.device.fill(stream, range, 0x41)?;
    bench.expect_filled(stream, range, 0x41)
}

fn host_memory_can_back_an_address_of_device_memory(bench: &Bench) -> Checked {
    let len = bench.whole_pages(Bytes::mib(2));
    let device = bench.create(len)?;
    let host = bench.create_at(len, MemoryLocation::HostNuma(0))?;
    let range = bench.mapped_again(device, len)?;
    let spill = bench.mapped_again(host, len)?;
    let stream = bench.stream()?;
    let bytes = pattern(23, len);
    bench.write(stream, range.start, &bytes)?;
    bench.device.copy(stream, DeviceCopy { from: range.start, to: spill.start, len })?;
    bench.device.synchronize_stream(stream)?;
    bench.unmap(range)?;
    bench.map(range, host)?;
    bench.device.set_access(range)?;
    bench.expect_bytes(stream, range, &bytes)
}

fn what_the_device_cannot_do_is_not_supported(bench: &Bench) -> Checked {
    let can = bench.device.info().capabilities;
    let unsupported = ErrorKind::NotSupported;
    if !can.virtual_memory {
        refused("reserve", unsupported, bench.reserve(bench.page))?;
        refused("create", unsupported, bench.create(bench.page))?;
    }
    if can.virtual_memory && !can.host_numa {
        let created = bench.create_at(bench.page, MemoryLocation::HostNuma(0));
        refused("create on the host", unsupported, created)?;
    }
    if !can.stream_ordered_pool {
        let stream = bench.stream()?;
        refused("malloc-async", unsupported, bench.malloc_async(stream, Bytes::mib(1)))?;
        refused("pool-usage", unsupported, bench.device.pool_usage())?;
    }
    if !can.pinned_host {
        refused("alloc-host", unsupported, bench.host(Bytes::mib(1)))?;
    }
    if !can.graphs {
        let stream = bench.stream()?;
        let begun = bench.begin_capture(stream, CaptureMode::Global);
        refused("begin-capture", unsupported, begun)?;
        ensure!(!bench.device.is_capturing(stream)?, "a stream captures where none can");
    }
    Ok(())
}
