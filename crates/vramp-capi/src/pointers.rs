//! The only place that dereferences pointers of the caller.

use std::ffi::{CStr, c_char, c_void};

use crate::abi::vramp_status_t;
use crate::status::{Failure, Kind, Result, status_of};

fn null(name: &str) -> Failure {
    Failure::new(Kind::Null, format!("{name} is null: pass the address of a variable"))
}

/// Returns an error if `out` is null. Called before any work whose result could not be returned.
#[inline]
pub(crate) fn check<T>(out: *mut T, name: &str) -> Result<()> {
    if out.is_null() { Err(null(name)) } else { Ok(()) }
}

/// Where a call writes its results. They are a `*mut T` with its name, which must not be null, a `*mut T`
/// that may be null, a [`WithSize`] struct, or two or three of these.
pub(crate) trait Out {
    /// What is written.
    type Value;

    /// Returns an error if the result could not be written. Called before the work.
    ///
    /// # Safety
    /// Each pointer is null or valid for writing its value, and that of a [`WithSize`] as it says. None needs to be
    /// aligned.
    unsafe fn check(&self) -> Result<()>;

    /// Writes the result.
    ///
    /// # Safety
    /// As of [`Out::check`], which returned no error.
    unsafe fn write(self, value: Self::Value);
}

impl<T> Out for (*mut T, &str) {
    type Value = T;

    #[inline]
    unsafe fn check(&self) -> Result<()> {
        check(self.0, self.1)
    }

    #[inline]
    unsafe fn write(self, value: T) {
        // SAFETY: not null, so valid for writing by this function's contract.
        unsafe { self.0.write_unaligned(value) };
    }
}

impl<T> Out for *mut T {
    type Value = T;

    unsafe fn check(&self) -> Result<()> {
        Ok(())
    }

    unsafe fn write(self, value: T) {
        if !self.is_null() {
            // SAFETY: not null, so valid for writing by this function's contract.
            unsafe { self.write_unaligned(value) };
        }
    }
}

impl<A: Out, B: Out> Out for (A, B) {
    type Value = (A::Value, B::Value);

    unsafe fn check(&self) -> Result<()> {
        // SAFETY: this function's contract is the same.
        unsafe { self.0.check() }?;
        // SAFETY: as above.
        unsafe { self.1.check() }
    }

    unsafe fn write(self, value: Self::Value) {
        // SAFETY: this function's contract is the same.
        unsafe { self.0.write(value.0) };
        // SAFETY: as above.
        unsafe { self.1.write(value.1) };
    }
}

/// A struct whose first field is its size, with its name. At most as many bytes are written as the caller's
/// struct has: `T` begins with a `u64`, and the pointer is null, or its first eight bytes are a size, and that
/// many bytes are valid for reading and writing.
pub(crate) struct WithSize<'a, T>(pub *mut T, pub &'a str);

impl<T: Copy> Out for WithSize<'_, T> {
    type Value = T;

    unsafe fn check(&self) -> Result<()> {
        check(self.0, self.1)?;
        // SAFETY: the first field is valid for reading by this function's contract.
        let size = unsafe { self.0.cast::<u64>().read_unaligned() };
        check_size::<T>(size, self.1)
    }

    unsafe fn write(self, value: T) {
        // SAFETY: the first field is valid for reading by this function's contract.
        let size = unsafe { self.0.cast::<u64>().read_unaligned() };
        let len = (size as usize).min(size_of::<T>());
        let from = (&raw const value).cast::<u8>();
        // SAFETY: `value` has at least `len` bytes, and `len` bytes are valid for writing by this function's
        // contract.
        unsafe { std::ptr::copy_nonoverlapping(from, self.0.cast::<u8>(), len) };
        // SAFETY: as above, of the first field.
        unsafe { self.0.cast::<u64>().write_unaligned(len as u64) };
    }
}

/// Runs `call`, writes what it returns and returns the status. On failure nothing is written.
///
/// # Safety
/// As of [`Out::check`].
#[inline]
pub(crate) unsafe fn write_out<O: Out>(
    out: O,
    call: impl FnOnce() -> Result<O::Value>,
) -> vramp_status_t {
    status_of(|| {
        // SAFETY: this function's contract is the same.
        unsafe { out.check() }?;
        let value = call()?;
        // SAFETY: it was checked.
        unsafe { out.write(value) };
        Ok(())
    })
}

/// Returns a function of the caller, or an error for null.
pub(crate) fn function<F>(function: Option<F>, name: &str) -> Result<F> {
    function.ok_or_else(|| Failure::new(Kind::Null, format!("{name} is null: pass a function")))
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

/// Reads a struct whose first field is its size, as many bytes as the caller's struct has. The rest is
/// zero.
///
/// # Safety
/// `T` begins with a `u64`, and any bytes are a `T`. `from` is null, or its first eight bytes are a
/// size, and that many bytes are valid for reading. It need not be aligned.
pub(crate) unsafe fn read_sized<T: Copy>(from: *const T, name: &str) -> Result<T> {
    check(from.cast_mut(), name)?;
    // SAFETY: the first field is valid for reading by this function's contract.
    let size = unsafe { from.cast::<u64>().read_unaligned() };
    check_size::<T>(size, name)?;
    let mut read = std::mem::MaybeUninit::<T>::zeroed();
    let len = (size as usize).min(size_of::<T>());
    // SAFETY: `read` has at least `len` bytes, and `len` bytes of `from` are valid for reading by this
    // function's contract.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), read.as_mut_ptr().cast(), len) };
    // SAFETY: any bytes are a `T` by this function's contract.
    Ok(unsafe { read.assume_init() })
}

fn check_size<T>(size: u64, name: &str) -> Result<()> {
    if size >= 2 * size_of::<u64>() as u64 {
        return Ok(());
    }
    let kind = std::any::type_name::<T>().rsplit("::").next().unwrap_or_default();
    let text = format!("{name}->struct_size is {size}: set it to sizeof({kind}) before the call");
    Err(Failure::new(Kind::StructSize, text))
}

/// Writes the first `capacity` of some results.
///
/// # Safety
/// `out` is null or valid for writing `capacity` values. It need not be aligned.
pub(crate) unsafe fn write_array<T: Copy>(
    out: *mut T,
    capacity: usize,
    values: &[T],
    name: &str,
) -> Result<()> {
    let written = capacity.min(values.len());
    if written == 0 {
        return Ok(());
    }
    check(out, name)?;
    let bytes = written * size_of::<T>();
    // SAFETY: `values` has as many values, and `out` is valid for writing them by this function's
    // contract. Bytes need no alignment.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), out.cast::<u8>(), bytes) };
    Ok(())
}

/// Writes the first `capacity` of some structs whose first field is their size. The caller has set it in the
/// first of them: it is the distance from one to the next. Returns how many structs there are.
///
/// # Safety
/// `T` begins with a `u64`. `out` is null, or its first eight bytes are a size, and `capacity` times that
/// many bytes are valid for reading and writing. It need not be aligned.
pub(crate) unsafe fn write_array_sized<T: Copy>(
    out: *mut T,
    capacity: usize,
    find: impl FnOnce() -> Result<Vec<T>>,
    name: &str,
) -> Result<usize> {
    if capacity == 0 {
        return Ok(find()?.len());
    }
    check(out, name)?;
    // SAFETY: the first field is valid for reading by this function's contract.
    let size = unsafe { out.cast::<u64>().read_unaligned() };
    check_size::<T>(size, name)?;
    let found = find()?;
    let len = (size as usize).min(size_of::<T>());
    let mut to = out.cast::<u8>();
    for one in found.iter().take(capacity) {
        // SAFETY: `one` has at least `len` bytes, and as many are valid for writing at each multiple of the
        // size by this function's contract.
        unsafe { std::ptr::copy_nonoverlapping(std::ptr::from_ref(one).cast(), to, len) };
        // SAFETY: as above, of the first field.
        unsafe { to.cast::<u64>().write_unaligned(size) };
        to = to.wrapping_add(size as usize);
    }
    Ok(found.len())
}

/// Reads `count` values that the caller passes.
///
/// # Safety
/// `from` is null or valid for reading `count` values, for which any bytes are valid. It need not be
/// aligned.
pub(crate) unsafe fn read_array<T: Copy>(
    from: *const T,
    count: usize,
    name: &str,
) -> Result<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    check(from.cast_mut(), name)?;
    // SAFETY: not null, so valid for reading each of them by this function's contract.
    Ok((0..count).map(|index| unsafe { from.wrapping_add(index).read_unaligned() }).collect())
}

/// Returns memory of the caller to read from.
///
/// # Safety
/// `from` is null or valid for reading `len` bytes, which do not change while the result lives.
pub(crate) unsafe fn bytes<'a>(from: *const c_void, len: usize, name: &str) -> Result<&'a [u8]> {
    if len == 0 {
        return Ok(&[]);
    }
    check(from.cast_mut(), name)?;
    check_len(len, name)?;
    // SAFETY: not null, so valid for reading by this function's contract, and no longer than memory is.
    Ok(unsafe { std::slice::from_raw_parts(from.cast(), len) })
}

/// Returns memory of the caller to write to.
///
/// # Safety
/// `to` is null or valid for writing `len` bytes, which nothing else reads or writes while the result
/// lives.
pub(crate) unsafe fn bytes_mut<'a>(
    to: *mut c_void,
    len: usize,
    name: &str,
) -> Result<&'a mut [u8]> {
    if len == 0 {
        return Ok(&mut []);
    }
    check(to, name)?;
    check_len(len, name)?;
    // SAFETY: not null, so valid for writing by this function's contract, and no longer than memory is.
    Ok(unsafe { std::slice::from_raw_parts_mut(to.cast(), len) })
}

fn check_len(len: usize, name: &str) -> Result<()> {
    if isize::try_from(len).is_ok() {
        return Ok(());
    }
    let text = format!("{name} has {len} bytes, more than memory can have");
    Err(Failure::new(Kind::Range, text))
}

/// Returns a string of the caller, or an error for null.
///
/// # Safety
/// As of [`text()`].
pub(crate) unsafe fn given_text<'a>(given: *const c_char, name: &str) -> Result<&'a str> {
    check(given.cast_mut(), name)?;
    // SAFETY: this function's contract is the same.
    unsafe { text(given, name) }
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
        Failure::new(Kind::Text, text)
    })
}
