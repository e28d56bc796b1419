//! Memory of several processes and drivers: export, import, dma-buf.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use vramp_core::{AddrRange, Bytes};
use vramp_driver::{Call, DriverError, DriverResult, ExportedHandle, Handle, HandleType};

use crate::device::{CudaDriver, refused, symbol};
use crate::error::{invalid, unsupported};
use crate::memory::bad;
use crate::pinned::size;
use crate::raw::Physical;
use crate::sys::{
    CUmemAllocationHandleType, CUmemFabricHandle, CUmemGenericAllocationHandle,
    CUmemRangeHandleType, CUresult,
};

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
