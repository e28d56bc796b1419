//! The stream-ordered pool of the driver: one for this device, so that its statistics are not mixed
//! with those of other libraries.

use std::ffi::c_void;

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::{Call, DriverResult, MemoryLocation, PoolUsage, Stream};

use crate::device::{CudaDriver, refused, symbol};
use crate::error::{OpenError, invalid, unsupported};
use crate::load::{Cuda, entry};
use crate::memory::{bad, raw_location};
use crate::pinned::size;
use crate::sys::{
    CUdevice, CUmemAllocationHandleType, CUmemAllocationType, CUmemPool_attribute,
    CUmemPoolHandle_st, CUmemPoolProps, CUmemoryPool,
};
use crate::table::Opaque;

/// By how much the pool grows, as measured on an H200 with driver 580. The driver does not report it.
pub(crate) const STEP: Bytes = Bytes::mib(32);

/// Creates a pool on the card with a release threshold of zero.
pub(crate) fn create(
    cuda: &Cuda,
    device: CUdevice,
) -> Result<Opaque<CUmemPoolHandle_st>, OpenError> {
    let create = entry!(cuda, cuMemPoolCreate);
    let wanted = CUmemPoolProps {
        allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: raw_location(device, MemoryLocation::Device),
        ..CUmemPoolProps::default()
    };
    let mut pool = std::ptr::null_mut();
    // SAFETY: `pool` and `wanted` outlive the call.
    let code = unsafe { create(&mut pool, &wanted) };
    cuda.check_open("cuMemPoolCreate", code)?;
    Ok(Opaque(pool))
}

pub(crate) fn malloc_async(
    driver: &CudaDriver,
    stream: Stream,
    len: Bytes,
) -> DriverResult<DeviceAddr> {
    let call = Call::MallocAsync;
    let _entered = driver.enter(call)?;
    let allocate = symbol!(driver, call, cuMemAllocFromPoolAsync);
    let pool = pool(driver, call)?;
    let id = stream.number();
    let stream = driver.streams.get(id).map_err(refused(call, "stream", id))?;
    if len.is_zero() {
        return Err(invalid(call, "zero bytes"));
    }
    let mut start = 0;
    let _turn = driver.turn();
    // SAFETY: `start` outlives the call; the stream is held and the pool lives with the device.
    let code = unsafe { allocate(&mut start, size(len), pool, stream.raw()) };
    driver.settle(call, code, || len.to_string())?;
    let at = DeviceAddr::new(start);
    driver.addresses().insert_pooled(at, len);
    Ok(at)
}

pub(crate) fn free_async(driver: &CudaDriver, stream: Stream, at: DeviceAddr) -> DriverResult<()> {
    let call = Call::FreeAsync;
    let _entered = driver.enter(call)?;
    let free = symbol!(driver, call, cuMemFreeAsync);
    let id = stream.number();
    let stream = driver.streams.get(id).map_err(refused(call, "stream", id))?;
    let place = AddrRange::new(at, Bytes::ZERO);
    let len = driver.addresses().take_pooled(at).map_err(bad(call, place))?;
    let _turn = driver.turn();
    // SAFETY: the table shows that the pool returned this address; the stream is held.
    let code = unsafe { free(at.number(), stream.raw()) };
    driver
        .settle(call, code, || at.to_string())
        .inspect_err(|_| driver.addresses().insert_pooled(at, len))
}

pub(crate) fn usage(driver: &CudaDriver) -> DriverResult<PoolUsage> {
    let call = Call::PoolUsage;
    let _entered = driver.enter(call)?;
    let ask = symbol!(driver, call, cuMemPoolGetAttribute);
    let pool = pool(driver, call)?;
    let read = |which: CUmemPool_attribute| -> DriverResult<Bytes> {
        let mut bytes: u64 = 0;
        let value: *mut c_void = (&raw mut bytes).cast();
        // SAFETY: all attributes read are `cuuint64_t`, and `bytes` outlives the call.
        let code = unsafe { ask(pool, which, value) };
        driver.settle(call, code, String::new)?;
        Ok(Bytes::new(bytes))
    };
    Ok(PoolUsage {
        reserved: read(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
        reserved_peak: read(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
        used: read(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
    })
}

pub(crate) fn set_threshold(driver: &CudaDriver, keep: Bytes) -> DriverResult<()> {
    let call = Call::SetPoolThreshold;
    let _entered = driver.enter(call)?;
    let set = symbol!(driver, call, cuMemPoolSetAttribute);
    let pool = pool(driver, call)?;
    let mut bytes: u64 = keep.count();
    let value: *mut c_void = (&raw mut bytes).cast();
    let which = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the threshold is a `cuuint64_t`, and `bytes` outlives the call.
    let code = unsafe { set(pool, which, value) };
    driver.settle(call, code, || keep.to_string())
}

pub(crate) fn trim(driver: &CudaDriver, keep: Bytes) -> DriverResult<()> {
    let call = Call::TrimPool;
    let _entered = driver.enter(call)?;
    let trim = symbol!(driver, call, cuMemPoolTrimTo);
    let pool = pool(driver, call)?;
    // SAFETY: the pool lives with the device.
    let code = unsafe { trim(pool, size(keep)) };
    driver.settle(call, code, || keep.to_string())
}

fn pool(driver: &CudaDriver, call: Call) -> DriverResult<CUmemoryPool> {
    let pool = driver.pool.as_ref().ok_or_else(|| unsupported(call, "no stream-ordered pool"))?;
    Ok(pool.0)
}
