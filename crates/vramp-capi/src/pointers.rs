//! The caller's pointers: the only place where they are followed.

use std::ffi::{CStr, c_char};

use crate::abi::vramp_status_t::*;
use crate::status::{Failure, Result};

fn null(name: &str) -> Failure {
    Failure::new(VRAMP_ERROR_NULL, format!("{name} is null: give an address to write to"))
}

/// Refuses a null `out`, before anything is done that its result could be lost of.
#[inline]
pub(crate) fn check<T>(out: *mut T, name: &str) -> Result<()> {
    if out.is_null() { Err(null(name)) } else { Ok(()) }
}

/// Writes a result.
///
/// # Safety
/// `out` is null or good for writing a `T`; it need not be aligned.
#[inline]
pub(crate) unsafe fn write<T>(out: *mut T, value: T, name: &str) -> Result<()> {
    check(out, name)?;
    // SAFETY: not null, so good for writing by this function's contract.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Writes a struct whose first field is its size: no more of it than the caller has.
///
/// # Safety
/// `T` begins with a `u64`. `out` is null, or its first eight bytes hold a size that is good for
/// reading and writing; it need not be aligned.
pub(crate) unsafe fn write_sized<T: Copy>(
    out: *mut T,
    find: impl FnOnce() -> Result<T>,
    name: &str,
) -> Result<()> {
    check(out, name)?;
    // SAFETY: the first field is good for reading by this function's contract.
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
    // SAFETY: `len` bytes of ours are read, and so many of the caller's are good for writing by
    // this function's contract.
    unsafe { std::ptr::copy_nonoverlapping(from, out.cast::<u8>(), len) };
    // SAFETY: as above, of the first field.
    unsafe { out.cast::<u64>().write_unaligned(len as u64) };
    Ok(())
}

/// A text of the caller's; empty for null.
///
/// # Safety
/// `text` is null or ends with a zero, and does not change while the result lives.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str> {
    if text.is_null() {
        return Ok("");
    }
    // SAFETY: not null, so it ends with a zero by this function's contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|error| {
        let text = format!("{name} is not UTF-8 ({error}): give it as UTF-8");
        Failure::new(VRAMP_ERROR_TEXT, text)
    })
}
