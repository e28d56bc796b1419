//! Captures, ends of streams, contexts and devices, and access between devices.
//!
//! `ZERO` is the stream that zero means to the caller.

use std::ffi::{c_int, c_uint, c_void};

use vramp_trace::spool::Api;

use super::memory::named;
use crate::driver::{self, Code, SUCCESS};
use crate::ledger::Block;
use crate::process::Process;

/// # Safety
/// As of `cuStreamDestroy_v2`.
pub unsafe fn stream_destroy(
    process: &Process,
    driver: &dyn Fn() -> Code,
    stream: *mut c_void,
) -> Code {
    if let Some(pool) = process.pool_if_open() {
        pool.forget(stream as usize);
    }
    driver::note_end();
    driver::end_capture(stream as usize, driver)
}

/// # Safety
/// As of `cuStreamBeginCapture` of the first version.
pub unsafe fn begin_old_capture<const ZERO: usize>(
    _: &Process,
    driver: &dyn Fn() -> Code,
    stream: *mut c_void,
) -> Code {
    driver::begin_capture(named(stream, ZERO), driver)
}

/// # Safety
/// As of `cuStreamBeginCapture_v2`.
pub unsafe fn begin_capture<const ZERO: usize>(
    _: &Process,
    driver: &dyn Fn() -> Code,
    stream: *mut c_void,
    _: c_int,
) -> Code {
    driver::begin_capture(named(stream, ZERO), driver)
}

/// # Safety
/// As of `cuStreamBeginCaptureToGraph`.
#[allow(clippy::too_many_arguments, reason = "they are the driver's")]
pub unsafe fn begin_capture_to_graph<const ZERO: usize>(
    _: &Process,
    driver: &dyn Fn() -> Code,
    stream: *mut c_void,
    _: *mut c_void,
    _: *const c_void,
    _: *const c_void,
    _: usize,
    _: c_int,
) -> Code {
    driver::begin_capture(named(stream, ZERO), driver)
}

/// # Safety
/// As of `cuStreamEndCapture`.
pub unsafe fn end_capture<const ZERO: usize>(
    _: &Process,
    driver: &dyn Fn() -> Code,
    stream: *mut c_void,
    _: *mut *mut c_void,
) -> Code {
    driver::end_capture(named(stream, ZERO), driver)
}

/// # Safety
/// As of `cuCtxDestroy_v2`.
pub unsafe fn destroy(process: &Process, driver: &dyn Fn() -> Code, context: *mut c_void) -> Code {
    driver::note_end();
    let code = driver();
    if code == SUCCESS {
        // The pool has memory in primary contexts alone, which this call refuses.
        let is_gone = |block: &Block| block.context == context as usize && !block.is_pooled();
        process.lose(Api::CtxDestroy, is_gone, |_, _| ());
    }
    code
}

/// # Safety
/// As of `cuDevicePrimaryCtxReset_v2`.
pub unsafe fn reset(process: &Process, driver: &dyn Fn() -> Code, device: c_int) -> Code {
    let number = usize::try_from(device).unwrap_or(usize::MAX);
    // Other contexts of the device stay.
    let primary = driver::seen_primary(number);
    let is_gone = |block: &Block| Some(block.context) == primary;
    let pool = process.pool_if_open().filter(|pool| pool.is_open(number));
    if let Some(pool) = pool {
        // The pool's streams and events would end with the context. So it stays, without what the program allocated.
        if driver::synchronize(number) == SUCCESS {
            process.lose(Api::DevicePrimaryCtxReset, is_gone, |address, block| {
                if block.is_pooled() {
                    pool.free(address)
                } else {
                    driver::free(address)
                };
            });
            return SUCCESS;
        }
        // A fault has ended it.
        pool.retire(number);
    }
    driver::note_end();
    let code = driver();
    if code == SUCCESS {
        process.lose(Api::DevicePrimaryCtxReset, is_gone, |_, _| ());
        driver::forget_primary(number);
    }
    code
}

/// # Safety
/// As of `cuDevicePrimaryCtxRelease_v2`.
pub unsafe fn release(process: &Process, driver: &dyn Fn() -> Code, device: c_int) -> Code {
    let code = driver();
    let number = usize::try_from(device).unwrap_or(usize::MAX);
    // The last holder ends it. The pool is one.
    if code == SUCCESS && !driver::has_primary(number) {
        driver::note_end();
        if let Some(context) = driver::forget_primary(number) {
            let is_gone = |block: &Block| block.context == context;
            process.lose(Api::DevicePrimaryCtxRelease, is_gone, |_, _| ());
        }
    }
    code
}

/// # Safety
/// As of `cuCtxEnablePeerAccess`.
pub unsafe fn enable_peer(
    process: &Process,
    driver: &dyn Fn() -> Code,
    peer: *mut c_void,
    _: c_uint,
) -> Code {
    let code = driver();
    // A program may enable it again to be sure.
    if let (SUCCESS | driver::PEER_ACCESS_ALREADY_ENABLED, Some(pool)) = (code, process.pool())
        && let (Some(user), Some(owner)) = (driver::current_place(), driver::place_in(peer))
        && user.is_primary
        && owner.is_primary
    {
        pool.enable_peer(user.device, owner.device);
    }
    code
}

/// # Safety
/// As of `cuDeviceSetMemPool`.
pub unsafe fn set_pool(
    _: &Process,
    driver: &dyn Fn() -> Code,
    device: c_int,
    pool: *mut c_void,
) -> Code {
    let code = driver();
    if let (SUCCESS, Ok(device)) = (code, usize::try_from(device)) {
        driver::note_pool(device, pool as usize);
    }
    code
}

/// A `CUmemAccessDesc`: where the access is from, and of what kind.
#[repr(C)]
pub struct Access {
    kind: c_int,
    id: c_int,
    flags: c_uint,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE` and `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const DEVICE: c_int = 1;
const READ_WRITE: c_uint = 3;

/// # Safety
/// As of `cuMemPoolSetAccess`.
pub unsafe fn pool_access(
    process: &Process,
    driver: &dyn Fn() -> Code,
    pool_handle: *mut c_void,
    wanted: *const Access,
    count: usize,
) -> Code {
    let code = driver();
    let Some(pool) = process.pool().filter(|_| code == SUCCESS && !wanted.is_null()) else {
        return code;
    };
    // The memory of this device's default pool is the pool's.
    let is_of = |&device: &usize| driver::default_pool(device) == Some(pool_handle as usize);
    let Some(owner) = (0..driver::device_count()).find(is_of) else { return code };
    // SAFETY: the driver has read this many.
    let wanted = unsafe { std::slice::from_raw_parts(wanted, count) };
    for access in wanted.iter().filter(|access| access.kind == DEVICE && access.flags == READ_WRITE)
    {
        if let Ok(user) = usize::try_from(access.id)
            && user != owner
        {
            pool.enable_peer(user, owner);
        }
    }
    code
}
