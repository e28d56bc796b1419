//! Memory that is exported and imported, and memory for network cards.

use std::fs::File;
use std::os::fd::OwnedFd;

use vramp_core::{AddrRange, Bytes};

use super::rig::{Rig, refused};
use super::{Checked, Failure, ensure, rules};
use vramp_driver::{
    Capabilities, ErrorKind, ExportedHandle, Handle, HandleType, MemoryLocation, MemoryProperties,
};

const SHARED: fn(&Capabilities) -> bool = |can| can.virtual_memory && can.posix_fd;
const WITH_BYTES: fn(&Capabilities) -> bool = |can| SHARED(can) && can.pinned_host;
const MEMORY: fn(&Capabilities) -> bool = |can| can.virtual_memory;

rules! {
    an_imported_handle_is_the_exported_memory: WITH_BYTES,
    an_imported_handle_keeps_the_memory: WITH_BYTES,
    a_descriptor_alone_keeps_the_memory_until_it_is_closed: SHARED,
    an_imported_handle_is_mapped_only_with_its_length: SHARED,
    a_descriptor_of_something_else_is_not_imported: SHARED,
    an_imported_handle_can_be_mapped_for_reading: WITH_BYTES,
    memory_of_this_process_only_is_not_exported: MEMORY,
    a_dma_buf_needs_mapped_memory: |can| can.virtual_memory && can.dma_buf && can.rdma,
    a_dma_buf_keeps_the_memory_until_it_is_closed: |can| {
        can.virtual_memory && can.dma_buf && can.rdma
    },
    memory_for_network_cards_is_used_like_any_other: |can| {
        can.virtual_memory && can.rdma && can.pinned_host
    },
}

/// Memory that processes of this machine can import.
pub(super) const POSIX_FD: MemoryProperties = MemoryProperties {
    location: MemoryLocation::Device,
    handle_type: HandleType::PosixFd,
    rdma: false,
};

/// Memory that network cards can access.
const RDMA: MemoryProperties = MemoryProperties { rdma: true, ..MemoryProperties::DEVICE };

/// What the driver may use or free by itself while a case compares free memory.
const TOLERANCE: Bytes = Bytes::mib(16);

fn an_imported_handle_is_the_exported_memory(rig: &Rig) -> Checked {
    let handle = rig.create_with(rig.page, POSIX_FD)?;
    let range = rig.mapped_again(handle, rig.page)?;
    let stream = rig.stream()?;
    rig.device.fill(stream, range, 0x41)?;
    let first = rig.import(&rig.device.export(handle)?, rig.page)?;
    let second = rig.import(&rig.device.export(handle)?, rig.page)?;
    let [first, second] = [rig.mapped_again(first, rig.page)?, rig.mapped_again(second, rig.page)?];
    rig.expect_filled(stream, first, 0x41)?;
    rig.device.fill(stream, second, 0x42)?;
    rig.expect_filled(stream, first, 0x42)?;
    rig.expect_filled(stream, range, 0x42)
}

fn an_imported_handle_can_be_mapped_for_reading(rig: &Rig) -> Checked {
    let handle = rig.create_with(rig.page, POSIX_FD)?;
    let range = rig.mapped_again(handle, rig.page)?;
    let imported = rig.import(&rig.device.export(handle)?, rig.page)?;
    let reader = rig.mapped_again(imported, rig.page)?;
    rig.device.set_read_only(reader)?;
    let stream = rig.stream()?;
    rig.device.fill(stream, range, 0x51)?;
    rig.expect_filled(stream, reader, 0x51)?;
    rig.device.set_access(reader, &[])?;
    rig.device.fill(stream, reader, 0x52)?;
    rig.expect_filled(stream, range, 0x52)
}

fn an_imported_handle_keeps_the_memory(rig: &Rig) -> Checked {
    let handle = rig.create_with(rig.page, POSIX_FD)?;
    let range = rig.mapped_again(handle, rig.page)?;
    let stream = rig.stream()?;
    rig.device.fill(stream, range, 0x43)?;
    let imported = rig.import(&rig.device.export(handle)?, rig.page)?;
    rig.device.synchronize_stream(stream)?;
    rig.unmap(range)?;
    rig.release(handle)?;
    let again = rig.mapped_again(imported, rig.page)?;
    rig.expect_filled(stream, again, 0x43)?;
    rig.release(imported)?;
    rig.expect_filled(stream, again, 0x43)
}

fn a_descriptor_alone_keeps_the_memory_until_it_is_closed(rig: &Rig) -> Checked {
    let len = rig.whole_pages(Bytes::mib(64));
    let before = rig.device.memory_info()?.free;
    let handle = rig.create_with(len, POSIX_FD)?;
    let exported = rig.device.export(handle)?;
    rig.release(handle)?;
    expect_taken(rig, before, len, "while the descriptor is open")?;
    let handle = rig.import(&exported, len)?;
    rig.release(handle)?;
    expect_taken(rig, before, len, "after an imported handle was released")?;
    drop(exported);
    expect_taken(rig, before, Bytes::ZERO, "after the descriptor was closed")
}

/// Fails unless about `taken` bytes are in use since `before` were free.
pub(super) fn expect_taken(rig: &Rig, before: Bytes, taken: Bytes, when: &str) -> Checked {
    let free = rig.device.memory_info()?.free;
    let expected = before.saturating_sub(taken);
    let off = free.count().abs_diff(expected.count());
    ensure!(off < TOLERANCE.count(), "{free} are free {when}, expected about {expected}");
    Ok(())
}

fn an_imported_handle_is_mapped_only_with_its_length(rig: &Rig) -> Checked {
    let handle = rig.create_with(rig.pages(2), POSIX_FD)?;
    let exported = rig.device.export(handle)?;
    for wrong in [1, 4] {
        let imported = rig.import(&exported, rig.pages(wrong))?;
        let range = rig.reserve(rig.pages(4))?;
        let mapped = rig.device.map(range.start, imported);
        refused("map with another length", ErrorKind::NotSupported, mapped)?;
    }
    let imported = rig.import(&exported, rig.pages(2))?;
    rig.mapped_again(imported, rig.pages(2))?;
    Ok(())
}

fn a_descriptor_of_something_else_is_not_imported(rig: &Rig) -> Checked {
    let file = File::open("/dev/null").map_err(|error| Failure(error.to_string()))?;
    let (socket, _other) =
        std::os::unix::net::UnixStream::pair().map_err(|error| Failure(error.to_string()))?;
    for garbage in [OwnedFd::from(file), OwnedFd::from(socket)] {
        let garbage = ExportedHandle::PosixFd(garbage);
        let imported = rig.import(&garbage, rig.page);
        refused("import of something else", ErrorKind::InvalidUse, imported)?;
    }
    Ok(())
}

fn memory_of_this_process_only_is_not_exported(rig: &Rig) -> Checked {
    let handle = rig.create(rig.page)?;
    refused("export", ErrorKind::InvalidUse, rig.device.export(handle))?;
    let foreign = Handle::from_number(u64::MAX - 1);
    refused("export of an unknown handle", ErrorKind::InvalidUse, rig.device.export(foreign))
}

fn a_dma_buf_needs_mapped_memory(rig: &Rig) -> Checked {
    let range = rig.reserve(rig.pages(2))?;
    let half = AddrRange::new(range.start, rig.page);
    refused("dma-buf of nothing", ErrorKind::InvalidUse, rig.device.export_dma_buf(half))?;
    rig.map(half, rig.create_with(rig.page, RDMA)?)?;
    rig.device.set_access(half, &[])?;
    refused("dma-buf over a gap", ErrorKind::InvalidUse, rig.device.export_dma_buf(range))?;
    rig.device.export_dma_buf(half)?;
    Ok(())
}

fn a_dma_buf_keeps_the_memory_until_it_is_closed(rig: &Rig) -> Checked {
    let len = rig.whole_pages(Bytes::mib(64));
    let before = rig.device.memory_info()?.free;
    let handle = rig.create_with(len, RDMA)?;
    let range = rig.mapped_again(handle, len)?;
    let exported = rig.device.export_dma_buf(range)?;
    rig.unmap(range)?;
    rig.release(handle)?;
    expect_taken(rig, before, len, "while the dma-buf is open")?;
    drop(exported);
    expect_taken(rig, before, Bytes::ZERO, "after the dma-buf was closed")
}

fn memory_for_network_cards_is_used_like_any_other(rig: &Rig) -> Checked {
    let handle = rig.create_with(rig.page, RDMA)?;
    let range = rig.mapped_again(handle, rig.page)?;
    let stream = rig.stream()?;
    rig.device.fill(stream, range, 0x44)?;
    rig.expect_filled(stream, range, 0x44)
}
