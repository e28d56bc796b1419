//! AddressTable, physical memory, and the mappings between them.
//!
//! Memory of several processes and drivers: export, import, dma-buf.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::{
    Call, DriverError, DriverResult, ExportedHandle, Handle, HandleType, MemoryInfo,
    MemoryLocation, MemoryProperties,
};

use crate::addresses::BadRange;
use crate::device::{CudaDriver, refused, symbol};
use crate::error::{OpenError, invalid, unsupported};
use crate::load::{Cuda, entry};
use crate::pinned::size;
use crate::raw::Physical;
use crate::sys::{
    CUdevice, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType, CUmemFabricHandle,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocation_st__bindgen_ty_1, CUmemLocationType,
    CUmemRangeHandleType, CUresult,
};

/// Page of every card measured so far, for drivers without virtual memory management.
pub(crate) const USUAL_PAGE: Bytes = Bytes::mib(2);

/// Returns the minimum and the recommended granularity of physical memory.
pub(crate) fn granules(cuda: &Cuda, device: CUdevice) -> Result<(Bytes, Bytes), OpenError> {
    let ask = entry!(cuda, cuMemGetAllocationGranularity);
    let wanted = raw_properties(device, MemoryProperties::DEVICE);
    let granule = |option| -> Result<Bytes, OpenError> {
        let mut bytes = 0;
        // SAFETY: `bytes` and `wanted` outlive the call.
        let code = unsafe { ask(&mut bytes, &wanted, option) };
        cuda.check_open("cuMemGetAllocationGranularity", code)?;
        Ok(Bytes::new(bytes as u64))
    };
    Ok((
        granule(CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM)?,
        granule(CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)?,
    ))
}

pub(crate) fn reserve(
    driver: &CudaDriver,
    len: Bytes,
    alignment: Bytes,
) -> DriverResult<DeviceAddr> {
    let call = Call::Reserve;
    let _entered = driver.enter(call)?;
    need_virtual_memory(driver, call)?;
    check_pages(driver, call, "the length", len.count())?;
    check_pages(driver, call, "the alignment", alignment.count())?;
    if !alignment.count().is_power_of_two() {
        return Err(invalid(call, format!("the alignment {alignment} is not a power of two")));
    }
    let ask = symbol!(driver, call, cuMemAddressReserve);
    let mut start = 0;
    // SAFETY: `start` outlives the call; no fixed address and no flag is requested.
    let code = unsafe { ask(&mut start, size(len), size(alignment), 0, 0) };
    driver.settle(call, code, || format!("{len} of addresses"))?;
    let at = DeviceAddr::new(start);
    driver.addresses().insert_reservation(AddrRange::new(at, len));
    Ok(at)
}

/// The address is only a wish to the driver, which may return others.
pub(crate) fn reserve_at(driver: &CudaDriver, range: AddrRange) -> DriverResult<bool> {
    let call = Call::Reserve;
    let _entered = driver.enter(call)?;
    need_virtual_memory(driver, call)?;
    check_pages(driver, call, "the address", range.start.number())?;
    check_pages(driver, call, "the length", range.len.count())?;
    let ask = symbol!(driver, call, cuMemAddressReserve);
    let give_back = symbol!(driver, call, cuMemAddressFree);
    let mut start = 0;
    // SAFETY: `start` outlives the call; no flag is requested.
    let code = unsafe { ask(&mut start, size(range.len), 0, range.start.number(), 0) };
    driver.settle(call, code, || format!("{} of addresses", range.len))?;
    if start == range.start.number() {
        driver.addresses().insert_reservation(range);
        return Ok(true);
    }
    // SAFETY: the range was reserved above, and nothing else knows it.
    let code = unsafe { give_back(start, size(range.len)) };
    driver.settle(Call::FreeAddresses, code, || format!("{} of addresses", range.len))?;
    Ok(false)
}

pub(crate) fn free_addresses(driver: &CudaDriver, range: AddrRange) -> DriverResult<()> {
    let call = Call::FreeAddresses;
    let _entered = driver.enter(call)?;
    let give_back = symbol!(driver, call, cuMemAddressFree);
    driver.addresses().take_reservation(range).map_err(bad(call, range))?;
    // SAFETY: the table shows that the range is a whole reservation without mappings.
    let code = unsafe { give_back(range.start.number(), size(range.len)) };
    driver
        .settle(call, code, || range.to_string())
        .inspect_err(|_| driver.addresses().insert_reservation(range))
}

pub(crate) fn create(
    driver: &CudaDriver,
    len: Bytes,
    properties: MemoryProperties,
) -> DriverResult<Handle> {
    let call = Call::Create;
    let _entered = driver.enter(call)?;
    need_virtual_memory(driver, call)?;
    check_pages(driver, call, "the length", len.count())?;
    check_properties(driver, call, properties)?;
    let make = symbol!(driver, call, cuMemCreate);
    let wanted = raw_properties(driver.device, properties);
    let mut raw = 0;
    // SAFETY: `raw` and `wanted` outlive the call; zero is the only flag there is.
    let code = unsafe { make(&mut raw, size(len), &wanted, 0) };
    driver.settle(call, code, || format!("{len} at {:?}", properties.location))?;
    let handle_type = properties.handle_type;
    Ok(Handle::from_number(driver.handles.insert(Physical { raw, len, handle_type })))
}

pub(crate) fn release(driver: &CudaDriver, handle: Handle) -> DriverResult<()> {
    let call = Call::Release;
    let _entered = driver.enter(call)?;
    let release = symbol!(driver, call, cuMemRelease);
    let id = handle.number();
    let claim = driver.handles.claim(id).map_err(refused(call, "handle", id))?;
    // SAFETY: the claim proves that the handle is live and in no other call.
    let code = unsafe { release(claim.object().raw) };
    driver.settle(call, code, || format!("handle {id:#x} of {}", claim.object().len))?;
    claim.destroyed();
    Ok(())
}

pub(crate) fn map(driver: &CudaDriver, at: DeviceAddr, handle: Handle) -> DriverResult<()> {
    let call = Call::Map;
    let _entered = driver.enter(call)?;
    let map = symbol!(driver, call, cuMemMap);
    let id = handle.number();
    let physical = driver.handles.get(id).map_err(refused(call, "handle", id))?;
    let range = AddrRange::new(at, physical.len);
    check_pages(driver, call, "the address", at.number())?;
    driver.addresses().insert_mapping(range).map_err(bad(call, range))?;
    // SAFETY: the table shows that the range is reserved and vacant; the handle is held, so it
    // is live, and is mapped whole.
    let code = unsafe { map(at.number(), size(physical.len), 0, physical.raw, 0) };
    driver.settle(call, code, || format!("handle {id:#x} at {range}")).inspect_err(|_| {
        // The entry is still there: no caller may unmap a range that is not mapped yet.
        let _ = driver.addresses().take_mappings(range);
    })
}

pub(crate) fn unmap(driver: &CudaDriver, range: AddrRange) -> DriverResult<()> {
    let call = Call::Unmap;
    let _entered = driver.enter(call)?;
    let unmap = symbol!(driver, call, cuMemUnmap);
    let taken = driver.addresses().take_mappings(range).map_err(bad(call, range))?;
    // SAFETY: the table shows that the range consists of whole mappings. Work in flight that
    // accesses it faults on the device; it cannot harm the host.
    let code = unsafe { unmap(range.start.number(), size(range.len)) };
    driver
        .settle(call, code, || range.to_string())
        .inspect_err(|_| driver.addresses().restore_mappings(taken))
}

/// Grants access to the device and to `peers`.
pub(crate) fn set_access(driver: &CudaDriver, range: AddrRange, peers: &[u32]) -> DriverResult<()> {
    let allowed = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let own = access(raw_location(driver.device, MemoryLocation::Device), allowed);
    if peers.is_empty() {
        return change_access(driver, Call::SetAccess, range, &[own]);
    }
    let mut wanted = Vec::with_capacity(1 + peers.len());
    wanted.push(own);
    for &peer in peers {
        check_peer(driver, Call::SetAccess, peer)?;
        wanted.push(access(raw_location(driver.device, MemoryLocation::Peer(peer)), allowed));
    }
    change_access(driver, Call::SetAccess, range, &wanted)
}

/// Makes a range readable for the device and not writable.
pub(crate) fn set_read_only(driver: &CudaDriver, range: AddrRange) -> DriverResult<()> {
    let allowed = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ;
    let own = access(raw_location(driver.device, MemoryLocation::Device), allowed);
    change_access(driver, Call::SetAccess, range, &[own])
}

/// Takes the access of `peers`.
pub(crate) fn revoke_access(
    driver: &CudaDriver,
    range: AddrRange,
    peers: &[u32],
) -> DriverResult<()> {
    let none = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE;
    let mut wanted = Vec::with_capacity(peers.len());
    for &peer in peers {
        check_peer(driver, Call::RevokeAccess, peer)?;
        wanted.push(access(raw_location(driver.device, MemoryLocation::Peer(peer)), none));
    }
    change_access(driver, Call::RevokeAccess, range, &wanted)
}

fn access(location: CUmemLocation, flags: CUmemAccess_flags) -> CUmemAccessDesc {
    CUmemAccessDesc { location, flags }
}

fn change_access(
    driver: &CudaDriver,
    call: Call,
    range: AddrRange,
    wanted: &[CUmemAccessDesc],
) -> DriverResult<()> {
    let _entered = driver.enter(call)?;
    let set = symbol!(driver, call, cuMemSetAccess);
    driver.addresses().check_mapped(range).map_err(bad(call, range))?;
    // SAFETY: the count is that of the descriptions, which outlive the call.
    let code = unsafe { set(range.start.number(), size(range.len), wanted.as_ptr(), wanted.len()) };
    driver.settle(call, code, || range.to_string())
}

pub(crate) fn alloc(driver: &CudaDriver, len: Bytes) -> DriverResult<DeviceAddr> {
    let call = Call::AllocMemory;
    let _entered = driver.enter(call)?;
    let allocate = symbol!(driver, call, cuMemAlloc_v2);
    if len.is_zero() {
        return Err(invalid(call, "zero bytes"));
    }
    let mut start = 0;
    // SAFETY: `start` outlives the call.
    let code = unsafe { allocate(&mut start, size(len)) };
    driver.settle(call, code, || len.to_string())?;
    let at = DeviceAddr::new(start);
    driver.addresses().insert_plain(at, len);
    Ok(at)
}

pub(crate) fn free(driver: &CudaDriver, at: DeviceAddr) -> DriverResult<()> {
    let call = Call::FreeMemory;
    let _entered = driver.enter(call)?;
    let free = symbol!(driver, call, cuMemFree_v2);
    let place = AddrRange::new(at, Bytes::ZERO);
    let len = driver.addresses().take_plain(at).map_err(bad(call, place))?;
    // SAFETY: the table shows that the driver returned this address. The call waits for work that
    // accesses the memory.
    let code = unsafe { free(at.number()) };
    driver
        .settle(call, code, || at.to_string())
        .inspect_err(|_| driver.addresses().insert_plain(at, len))
}

pub(crate) fn memory_info(driver: &CudaDriver) -> DriverResult<MemoryInfo> {
    let call = Call::MemoryInfo;
    let _entered = driver.enter(call)?;
    let ask = symbol!(driver, call, cuMemGetInfo_v2);
    let (mut free, mut total) = (0, 0);
    // SAFETY: both outlive the call.
    let code = unsafe { ask(&mut free, &mut total) };
    driver.settle(call, code, String::new)?;
    Ok(MemoryInfo { free: Bytes::new(free as u64), total: Bytes::new(total as u64) })
}

/// Returns free and total memory of a peer, in its primary context. A peer that is lost is refused: this
/// device is not.
pub(crate) fn peer_memory_info(driver: &CudaDriver, peer: u32) -> DriverResult<MemoryInfo> {
    let call = Call::MemoryInfo;
    check_peer(driver, call, peer)?;
    let _entered = driver.enter(call)?;
    let context = driver.peer_context(call, peer)?;
    let set = symbol!(driver, call, cuCtxSetCurrent);
    // SAFETY: the context is retained until this device is dropped.
    let mut code = unsafe { set(context) };
    let (mut free, mut total) = (0, 0);
    if code == CUresult::CUDA_SUCCESS {
        let ask = symbol!(driver, call, cuMemGetInfo_v2);
        // SAFETY: both outlive the call.
        code = unsafe { ask(&mut free, &mut total) };
    }
    // SAFETY: the own context is retained for as long as this device lives.
    let own = unsafe { set(driver.context.0) };
    driver.settle(call, own, || "cuCtxSetCurrent".into())?;
    match code {
        CUresult::CUDA_SUCCESS => {
            Ok(MemoryInfo { free: Bytes::new(free as u64), total: Bytes::new(total as u64) })
        }
        failed => {
            Err(invalid(call, format!("device {peer} answers {}", driver.cuda.name_of(failed))))
        }
    }
}

/// Returns a location in the driver's terms. The driver refuses an invalid node number.
pub(crate) fn raw_location(device: CUdevice, location: MemoryLocation) -> CUmemLocation {
    let (type_, id) = match location {
        MemoryLocation::Device => (CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, device),
        MemoryLocation::HostNuma(node) => {
            (CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, node.cast_signed())
        }
        // A `CUdevice` is the ordinal.
        MemoryLocation::Peer(ordinal) => {
            (CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, ordinal.cast_signed())
        }
    };
    CUmemLocation { type_, __bindgen_anon_1: CUmemLocation_st__bindgen_ty_1 { id } }
}

/// Returns the properties in the driver's terms.
fn raw_properties(device: CUdevice, properties: MemoryProperties) -> CUmemAllocationProp {
    let mut raw = CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: match properties.handle_type {
            HandleType::None => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            HandleType::PosixFd => {
                CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            }
            HandleType::Fabric => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC,
        },
        location: raw_location(device, properties.location),
        ..CUmemAllocationProp::default()
    };
    raw.allocFlags.gpuDirectRDMACapable = u8::from(properties.rdma);
    raw
}

/// Refuses properties that the card does not support.
fn check_properties(
    driver: &CudaDriver,
    call: Call,
    properties: MemoryProperties,
) -> DriverResult<()> {
    let can = driver.info.capabilities;
    match properties.location {
        MemoryLocation::Device => {}
        MemoryLocation::HostNuma(_) if !can.host_numa => {
            return Err(unsupported(call, "no mapping of host memory"));
        }
        MemoryLocation::HostNuma(_) if properties.handle_type != HandleType::None => {
            return Err(unsupported(call, "no export of host memory"));
        }
        MemoryLocation::HostNuma(_) => {}
        MemoryLocation::Peer(ordinal) => check_peer(driver, call, ordinal)?,
    }
    match properties.handle_type {
        HandleType::PosixFd if !can.posix_fd => {
            Err(unsupported(call, "no memory exported as a file descriptor"))
        }
        HandleType::Fabric if !can.fabric => {
            Err(unsupported(call, "no memory exported as a fabric handle"))
        }
        _ if properties.rdma && !can.rdma => {
            Err(unsupported(call, "no memory that network cards can access"))
        }
        _ => Ok(()),
    }
}

/// Refuses a device that is not a peer.
pub(crate) fn check_peer(driver: &CudaDriver, call: Call, ordinal: u32) -> DriverResult<()> {
    match driver.info.peers.binary_search(&ordinal) {
        Ok(_) => Ok(()),
        Err(_) => {
            Err(invalid(call, format!("device {ordinal} is not a peer of {}", driver.info.id)))
        }
    }
}

/// Returns the error for a range that the table refused.
pub(crate) fn bad(call: Call, range: AddrRange) -> impl Fn(BadRange) -> DriverError {
    move |reason| invalid(call, format!("{range}: {reason}"))
}

/// Refuses reserve and create, which every other call needs, without virtual memory management.
fn need_virtual_memory(driver: &CudaDriver, call: Call) -> DriverResult<()> {
    match driver.info.capabilities.virtual_memory {
        true => Ok(()),
        false => Err(unsupported(call, "no virtual memory management")),
    }
}

fn check_pages(driver: &CudaDriver, call: Call, what: &str, number: u64) -> DriverResult<()> {
    let page = driver.info.limits.page;
    if number == 0 || !number.is_multiple_of(page.count()) {
        return Err(invalid(
            call,
            format!("{what} {number:#x} is not a positive multiple of the page of {page}"),
        ));
    }
    Ok(())
}

pub(crate) fn export(driver: &CudaDriver, handle: Handle) -> DriverResult<ExportedHandle> {
    let call = Call::Export;
    let _entered = driver.enter(call)?;
    let export = symbol!(driver, call, cuMemExportToShareableHandle);
    let id = handle.number();
    let physical = driver.handles.get(id).map_err(refused(call, "handle", id))?;
    let detail = || format!("handle {id:#x} of {}", physical.len);
    match physical.handle_type {
        HandleType::None => Err(invalid(
            call,
            format!("handle {id:#x} was created for this process only: create it as posix-fd"),
        )),
        HandleType::PosixFd => {
            let mut fd: RawFd = -1;
            let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            // SAFETY: for this type the driver writes one `int` to the address; zero is the only flag
            // there is.
            let code = unsafe { export((&raw mut fd).cast(), physical.raw, kind, 0) };
            driver.settle(call, code, detail)?;
            // SAFETY: the driver made the descriptor for the caller, who owns it.
            Ok(ExportedHandle::PosixFd(unsafe { OwnedFd::from_raw_fd(fd) }))
        }
        HandleType::Fabric => {
            let mut fabric = CUmemFabricHandle::default();
            let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
            // SAFETY: for this type the driver writes a `CUmemFabricHandle`; zero is the only flag.
            let code = unsafe { export((&raw mut fabric).cast(), physical.raw, kind, 0) };
            driver.settle(call, code, detail)?;
            Ok(ExportedHandle::Fabric(fabric.data))
        }
    }
}

pub(crate) fn import(
    driver: &CudaDriver,
    exported: &ExportedHandle,
    len: Bytes,
) -> DriverResult<Handle> {
    let call = Call::Import;
    let _entered = driver.enter(call)?;
    let import = symbol!(driver, call, cuMemImportFromShareableHandle);
    let mut raw: CUmemGenericAllocationHandle = 0;
    let (code, handle_type) = match exported {
        ExportedHandle::PosixFd(fd) => {
            let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            // The driver takes a descriptor by value, in a pointer. It stays the caller's.
            let value = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
            // SAFETY: `raw` outlives the call, and the descriptor is open.
            (unsafe { import(&mut raw, value, kind) }, HandleType::PosixFd)
        }
        ExportedHandle::Fabric(bytes) => {
            let mut fabric = CUmemFabricHandle { data: *bytes };
            let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
            // SAFETY: `raw` and `fabric` outlive the call.
            let code = unsafe { import(&mut raw, (&raw mut fabric).cast(), kind) };
            (code, HandleType::Fabric)
        }
    };
    if code == CUresult::CUDA_ERROR_UNKNOWN {
        // The answer to a descriptor of something else. It does not lose the device.
        let what = "the descriptor is not one of a device's memory";
        return Err(DriverError { code: code.0.cast_signed(), ..invalid(call, what.to_owned()) });
    }
    driver.settle(call, code, || format!("{len}"))?;
    Ok(Handle::from_number(driver.handles.insert(Physical { raw, len, handle_type })))
}

pub(crate) fn export_dma_buf(driver: &CudaDriver, range: AddrRange) -> DriverResult<OwnedFd> {
    let call = Call::ExportDmaBuf;
    let _entered = driver.enter(call)?;
    if !driver.info.capabilities.dma_buf {
        return Err(unsupported(call, "no dma-buf"));
    }
    let export = symbol!(driver, call, cuMemGetHandleForAddressRange);
    driver.addresses().check_owned(range).map_err(bad(call, range))?;
    let mut fd: RawFd = -1;
    let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    // SAFETY: for this type the driver writes one `int` to the address. It refuses a range that is not
    // mapped.
    let code =
        unsafe { export((&raw mut fd).cast(), range.start.number(), size(range.len), kind, 0) };
    driver.settle(call, code, || range.to_string())?;
    // SAFETY: the driver made the descriptor for the caller, who owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
