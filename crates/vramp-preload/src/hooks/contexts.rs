//! Ends of streams, contexts and devices, and access between devices.

use std::ffi::{c_int, c_uint, c_void};

use vramp_trace::spool::Api;

use crate::driver::{self, Code, SUCCESS};
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
    driver()
}

/// # Safety
/// As of `cuCtxDestroy_v2`.
pub unsafe fn destroy(process: &Process, driver: &dyn Fn() -> Code, context: *mut c_void) -> Code {
    let code = driver();
    if code == SUCCESS {
        // The pool has memory in primary contexts alone, which this call refuses.
        process
            .lose(Api::CtxDestroy, |block| block.context == context as usize && !block.is_pooled());
    }
    code
}

/// # Safety
/// As of `cuDevicePrimaryCtxReset_v2`.
pub unsafe fn reset(process: &Process, driver: &dyn Fn() -> Code, device: c_int) -> Code {
    let number = usize::try_from(device).unwrap_or(usize::MAX);
    if let Some(pool) = process.pool_if_open() {
        // The streams and events of the pool end with the context.
        pool.retire(number);
    }
    let code = driver();
    if code == SUCCESS {
        process.lose(Api::DevicePrimaryCtxReset, |block| block.device == number);
        driver::forget_primary(number);
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
