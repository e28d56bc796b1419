//! Memory that the program maps itself. It passes through: its mappings are recorded, and its handles are limited.

use std::ffi::{c_int, c_ulonglong, c_void};
use std::sync::{MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use vramp_trace::spool::{Api, Change};

use crate::driver::{self, Code, DEVICES, OUT_OF_MEMORY, SUCCESS};
use crate::process::Process;
use crate::record::Changed;

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_int = 1;
/// Where `CUmemAllocationProp` has its location, in numbers of 32 bits: a type and an id.
const LOCATION: usize = 2;

/// Returns the device that memory is asked of. `None` for memory elsewhere.
///
/// # Safety
/// As of `cuMemCreate`.
unsafe fn device_of(properties: *const c_int) -> Option<usize> {
    if properties.is_null() {
        return None;
    }
    // SAFETY: required by this function's contract: both are members of the structure.
    let properties = unsafe { std::slice::from_raw_parts(properties, LOCATION + 2) };
    let (kind, id) = (properties[LOCATION], properties[LOCATION + 1]);
    usize::try_from(id).ok().filter(|&device| kind == ON_DEVICE && device < DEVICES)
}

fn handles(process: &Process) -> MutexGuard<'_, FxHashMap<u64, Option<usize>>> {
    process.handles.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// As of `cuMemCreate`.
pub unsafe fn create(
    process: &Process,
    driver: &dyn Fn() -> Code,
    handle: *mut u64,
    size: usize,
    properties: *const c_int,
    _: c_ulonglong,
) -> Code {
    // SAFETY: as of the driver's function.
    let Some(device) = (unsafe { device_of(properties) }) else {
        let code = driver();
        if code == SUCCESS {
            // SAFETY: the driver has written it.
            handles(process).insert(unsafe { *handle }, None);
        }
        return code;
    };
    let size = size as u64;
    let limit = process.limit.as_ref();
    let refused = limit.is_some_and(|limit| !limit.charge(device, size));
    let code = if refused { OUT_OF_MEMORY } else { driver() };
    if code == SUCCESS {
        // SAFETY: the driver has written it.
        handles(process).insert(unsafe { *handle }, Some(device));
    }
    match (code, limit) {
        // SAFETY: as above.
        (SUCCESS, Some(limit)) => limit.created(unsafe { *handle }, device, size),
        (_, Some(limit)) if !refused && code != SUCCESS => limit.credit(device, size),
        _ => {}
    }
    if code == OUT_OF_MEMORY {
        let (change, api) = (Change::OutOfMemory, Api::MemCreate);
        let address = driver::memory_info().map_or(u64::MAX, |(free, _)| free);
        process.record(Changed { change, api, device, address, size, stream: 0 });
    }
    code
}

/// # Safety
/// As of `cuMemRelease`.
pub unsafe fn release(process: &Process, driver: &dyn Fn() -> Code, handle: u64) -> Code {
    // Before another thread can get the same number for other memory. A program that has retained it, and maps it once
    // more, is taken to do so on its current device.
    handles(process).remove(&handle);
    if let Some(limit) = &process.limit {
        limit.released(handle);
    }
    driver()
}

/// # Safety
/// As of `cuMemRetainAllocationHandle`.
pub unsafe fn retain(
    process: &Process,
    driver: &dyn Fn() -> Code,
    handle: *mut u64,
    _: *mut c_void,
) -> Code {
    let code = driver();
    if let (SUCCESS, Some(limit)) = (code, &process.limit) {
        // SAFETY: the driver has written it.
        limit.retained(unsafe { *handle });
    }
    code
}

/// # Safety
/// As of `cuMemMap`.
pub unsafe fn map(
    process: &Process,
    driver: &dyn Fn() -> Code,
    address: u64,
    size: usize,
    _: usize,
    handle: u64,
    _: c_ulonglong,
) -> Code {
    let code = driver();
    if code == SUCCESS {
        let size = size as u64;
        if let Some(limit) = &process.limit {
            limit.mapped(address, size, handle);
        }
        let known = handles(process).get(&handle).copied();
        let current = || Some(driver::current_place().map_or(0, |place| place.device));
        // Memory of the host is not the card's.
        if let Some(device) = known.unwrap_or_else(current) {
            let (change, api) = (Change::Map, Api::MemMap);
            process.record(Changed { change, api, device, address, size, stream: 0 });
        }
    }
    code
}

/// # Safety
/// As of `cuMemUnmap`.
pub unsafe fn unmap(
    process: &Process,
    driver: &dyn Fn() -> Code,
    address: u64,
    size: usize,
) -> Code {
    let size = size as u64;
    let device = driver::current_place().map_or(0, |place| place.device);
    let code = driver();
    if code == SUCCESS {
        // No other thread can map anything here before the program knows that the call is over.
        let (change, api) = (Change::Unmap, Api::MemUnmap);
        process.record(Changed { change, api, device, address, size, stream: 0 });
        if let Some(limit) = &process.limit {
            limit.unmapped(address, size);
        }
    }
    code
}
