//! Bytes through pinned host memory.

use std::sync::Arc;

use vramp_core::{AddrRange, Bytes};
use vramp_host::PageKind;

use super::rig::{Rig, pattern, refused};
use super::{Checked, Failure, ensure, rules};
use vramp_driver::{Capabilities, DeviceCopy, ErrorKind, HostBuffer, HostMemory, HostSlice};

const PINNED: fn(&Capabilities) -> bool = |can| can.pinned_host;
const WITH_MEMORY: fn(&Capabilities) -> bool = |can| can.pinned_host && can.virtual_memory;

rules! {
    the_host_reads_what_it_wrote: PINNED,
    host_memory_is_bounded: PINNED,
    host_memory_is_freed_once: PINNED,
    bytes_come_back_across_handles_and_at_odd_offsets: WITH_MEMORY,
    a_copy_moves_its_range_and_nothing_beside: WITH_MEMORY,
    a_fill_writes_its_range_and_nothing_beside: WITH_MEMORY,
    a_copy_beyond_host_memory_is_refused: WITH_MEMORY,
    registered_memory_is_copied_from_and_to: WITH_MEMORY,
    one_memory_is_registered_several_times: PINNED,
}

fn the_host_reads_what_it_wrote(rig: &Rig) -> Checked {
    let len = Bytes::mib(3);
    let buffer = rig.host(len)?;
    let bytes = pattern(1, len);
    rig.device.write_host(buffer, Bytes::ZERO, &bytes)?;
    let mut back = vec![0; 1000];
    rig.device.read_host(buffer, Bytes::new(12_345), &mut back)?;
    ensure!(back == bytes[12_345..13_345], "host memory does not contain what was written");
    Ok(())
}

fn host_memory_is_bounded(rig: &Rig) -> Checked {
    let invalid = ErrorKind::InvalidUse;
    let buffer = rig.host(Bytes::kib(64))?;
    let device = rig.device;
    let mut two = [0; 2];
    for offset in [Bytes::kib(64) - Bytes::new(1), Bytes::kib(65), Bytes::new(u64::MAX)] {
        refused("read beyond the end", invalid, device.read_host(buffer, offset, &mut two))?;
        refused("write beyond the end", invalid, device.write_host(buffer, offset, &two))?;
    }
    device.write_host(buffer, Bytes::kib(64) - Bytes::new(2), &two)?;
    Ok(())
}

fn host_memory_is_freed_once(rig: &Rig) -> Checked {
    let invalid = ErrorKind::InvalidUse;
    let buffer = rig.host(Bytes::kib(64))?;
    rig.free_host(buffer)?;
    refused("free twice", invalid, rig.free_host(buffer))?;
    let read = rig.device.read_host(buffer, Bytes::ZERO, &mut [0]);
    refused("read what was freed", invalid, read)?;
    let foreign = HostBuffer::from_number(u64::MAX - 1);
    refused("free a foreign buffer", invalid, rig.free_host(foreign))
}

fn bytes_come_back_across_handles_and_at_odd_offsets(rig: &Rig) -> Checked {
    let range = rig.memory(&[1, 2, 1].map(|pages| rig.pages(pages)))?;
    let stream = rig.stream()?;
    let inside = rig.page - Bytes::new(777);
    let bytes = pattern(5, rig.pages(2) + Bytes::new(1234));
    rig.write(stream, range.start + inside, &bytes)?;
    let written = AddrRange::new(range.start + inside, Bytes::new(bytes.len() as u64));
    rig.expect_bytes(stream, written, &bytes)
}

fn a_copy_moves_its_range_and_nothing_beside(rig: &Rig) -> Checked {
    let from = rig.memory(&[rig.page, rig.page])?;
    let to = rig.memory(&[rig.pages(2)])?;
    let stream = rig.stream()?;
    let bytes = pattern(7, from.len);
    rig.write(stream, from.start, &bytes)?;
    rig.device.fill(stream, to, 0xEE)?;
    let (source, target, len) = (Bytes::new(1001), Bytes::new(3), rig.page + Bytes::new(5));
    let copy = DeviceCopy { from: from.start + source, to: to.start + target, len };
    rig.device.copy(stream, copy)?;
    let mut expected = vec![0xEE; to.len.count() as usize];
    let (source, target, len) =
        (source.count() as usize, target.count() as usize, len.count() as usize);
    expected[target..target + len].copy_from_slice(&bytes[source..source + len]);
    rig.expect_bytes(stream, to, &expected)
}

fn a_fill_writes_its_range_and_nothing_beside(rig: &Rig) -> Checked {
    let range = rig.memory(&[rig.page, rig.page])?;
    let stream = rig.stream()?;
    rig.device.fill(stream, range, 0x01)?;
    let offset = rig.page - Bytes::new(3);
    let part = AddrRange::new(range.start + offset, Bytes::new(7));
    rig.device.fill(stream, part, 0x02)?;
    let mut expected = vec![0x01; range.len.count() as usize];
    let offset = offset.count() as usize;
    expected[offset..offset + 7].fill(0x02);
    rig.expect_bytes(stream, range, &expected)
}

fn a_copy_beyond_host_memory_is_refused(rig: &Rig) -> Checked {
    let range = rig.memory(&[rig.page])?;
    let buffer = rig.host(Bytes::kib(64))?;
    let stream = rig.stream()?;
    let slice = HostSlice { buffer, offset: Bytes::kib(32), len: Bytes::kib(33) };
    let in_copy = rig.device.copy_to_device(stream, slice, range.start);
    refused("copy from beyond the end", ErrorKind::InvalidUse, in_copy)?;
    let out_copy = rig.device.copy_to_host(stream, range.start, slice);
    refused("copy to beyond the end", ErrorKind::InvalidUse, out_copy)
}

fn registered_memory_is_copied_from_and_to(rig: &Rig) -> Checked {
    let memory = host_memory(rig.page)?;
    let range = rig.memory(&[rig.page])?;
    let stream = rig.stream()?;
    let bytes = pattern(11, rig.page);
    memory.write(Bytes::ZERO, &bytes).expect("the pattern is as long as the memory");
    let buffer = rig.register(&memory)?;
    let whole = HostSlice { buffer, offset: Bytes::ZERO, len: rig.page };
    rig.device.copy_to_device(stream, whole, range.start)?;
    rig.expect_bytes(stream, range, &bytes)?;
    rig.device.fill(stream, range, 0x5A)?;
    let (offset, len) = (Bytes::new(4097), Bytes::new(70_000));
    rig.device.copy_to_host(stream, range.start, HostSlice { buffer, offset, len })?;
    rig.device.synchronize_stream(stream)?;
    let mut expected = bytes;
    expected[4097..74_097].fill(0x5A);
    let mut back = vec![0; expected.len()];
    memory.read(Bytes::ZERO, &mut back).expect("the copy is as long as the memory");
    ensure!(back == expected, "registered memory does not contain what was copied to it");
    let mut seen = vec![0; 70_002];
    rig.device.read_host(buffer, Bytes::new(4096), &mut seen)?;
    ensure!(seen == expected[4096..74_098], "the device's view of pinned memory differs");
    Ok(())
}

fn one_memory_is_registered_several_times(rig: &Rig) -> Checked {
    let memory = host_memory(Bytes::mib(3))?;
    let (first, second) = (rig.register(&memory)?, rig.register(&memory)?);
    ensure!(first != second, "two registrations have the same id");
    rig.device.write_host(first, Bytes::new(5), &[6])?;
    rig.free_host(first)?;
    let mut byte = [0];
    rig.device.read_host(second, Bytes::new(5), &mut byte)?;
    ensure!(byte == [6], "two registrations of one memory differ");
    rig.free_host(second)?;
    let third = rig.register(&memory)?;
    rig.free_host(third)?;
    Ok(())
}

fn host_memory(len: Bytes) -> Checked<Arc<HostMemory>> {
    HostMemory::new(len, None, PageKind::default()).map_err(|error| Failure(error.to_string()))
}
