//! `cuGetProcAddress`, by which the CUDA runtime gets all functions.

use std::ffi::{CStr, c_char, c_int, c_ulonglong, c_void};

use super::of_version;
use crate::driver::{Code, SUCCESS};
use crate::process::Process;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: c_ulonglong = 2;

/// # Safety
/// As of `cuGetProcAddress`.
pub unsafe fn get(
    _: &Process,
    driver: &dyn Fn() -> Code,
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    flags: c_ulonglong,
) -> Code {
    let code = driver();
    if code == SUCCESS && !name.is_null() && !found.is_null() {
        // SAFETY: the driver has read the name, which ends with a zero.
        let name = unsafe { CStr::from_ptr(name) };
        // SAFETY: the driver has written it.
        let driver = unsafe { *found };
        let hook =
            (!driver.is_null()).then(|| of_version(name, version, flags & PER_THREAD != 0, driver));
        if let Some(Some(hook)) = hook {
            // SAFETY: as above.
            unsafe { *found = hook };
        }
    }
    code
}

/// # Safety
/// As of `cuGetProcAddress_v2`.
pub unsafe fn get_with_status(
    process: &Process,
    driver: &dyn Fn() -> Code,
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    flags: c_ulonglong,
    _: *mut c_int,
) -> Code {
    // SAFETY: as of the driver's function.
    unsafe { get(process, driver, name, found, version, flags) }
}
