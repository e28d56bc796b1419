//! The only place that dereferences pointers of the caller.

use std::ffi::{CStr, c_char};

use crate::abi::vramp_status_t::*;
use crate::status::{Failure, Result};

fn null(name: &str) -> Failure {
    Failure::new(VRAMP_ERROR_NULL, format!("{name} is null: pass the address of a variable"))
}

/// Returns an error if `out` is null. Called before any work whose result could not be returned.
#[inline]
pub(crate) fn check<T>(out: *mut T, name: &str) -> Result<()> {
    if out.is_null() { Err(null(name)) } else { Ok(()) }
}

/// Writes a result.
///
/// # Safety
/// `out` is null or valid for writing a `T`. It need not be aligned.
#[inline]
pub(crate) unsafe fn write<T>(out: *mut T, value: T, name: &str) -> Result<()> {
    check(out, name)?;
    // SAFETY: not null, so valid for writing by this function's contract.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Reads a struct that the caller passes.
///
/// # Safety
/// `from` is null or valid for reading a `T`, for which any bytes are valid. It need not be aligned.
pub(crate) unsafe fn read<T: Copy>(from: *const T, name: &str) -> Result<T> {
    check(from.cast_mut(), name)?;
    // SAFETY: not null, so valid for reading by this function's contract.
    Ok(unsafe { from.read_unaligned() })
}

/// Writes a result that the caller may not want.
///
/// # Safety
/// As of [`write()`].
pub(crate) unsafe fn write_optional<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: not null, so valid for writing by this function's contract.
        unsafe { out.write_unaligned(value) };
    }
}

/// Writes a struct whose first field is its size, at most as many bytes as the caller's struct has.
///
/// # Safety
/// `T` begins with a `u64`. `out` is null, or its first eight bytes are a size, and that many bytes
/// are valid for reading and writing. It need not be aligned.
pub(crate) unsafe fn write_sized<T: Copy>(
    out: *mut T,
    find: impl FnOnce() -> Result<T>,
    name: &str,
) -> Result<()> {
    check(out, name)?;
    // SAFETY: the first field is valid for reading by this function's contract.
    let size = unsafe { out.cast::<u64>().read_unaligned() };
    if size < 2 * size_of::<u64>() as u64 {
        let kind = std::any::type_name::<T>().rsplit("::").next().unwrap_or_default();
        let text =
            format!("{name}->struct_size is {size}: set it to sizeof({kind}) before the call");
        return Err(Failure::new(VRAMP_ERROR_STRUCT_SIZE, text));
    }
    let found = find()?;
    let len = (size as usize).min(size_of::<T>());
    let from = (&raw const found).cast::<u8>();
    // SAFETY: `found` has at least `len` bytes, and `len` bytes of `out` are valid for writing by
    // this function's contract.
    unsafe { std::ptr::copy_nonoverlapping(from, out.cast::<u8>(), len) };
    // SAFETY: as above, of the first field.
    unsafe { out.cast::<u64>().write_unaligned(len as u64) };
    Ok(())
}

/// Returns a string of the caller; empty for null.
///
/// # Safety
/// `text` is null or zero-terminated, and does not change while the result lives.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str> {
    if text.is_null() {
        return Ok("");
    }
    // SAFETY: not null, so zero-terminated by this function's contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|error| {
        let text = format!("{name} is not UTF-8 ({error}): pass it as UTF-8");
        Failure::new(VRAMP_ERROR_TEXT, text)
    })
}
