//! Raising a C++ exception from Rust.
//!
//! PyTorch's pluggable allocator takes a null address for memory, so the only way to refuse is to
//! throw. libstdc++ exports the helpers that its own headers throw through; one of them makes a
//! `std::runtime_error` of a text. It is looked up in the libstdc++ that the process has loaded:
//! where none is, nobody could catch.

use std::ffi::c_char;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_NOW};

/// Copies the text into a `std::runtime_error` and throws it.
type Throw = unsafe extern "C-unwind" fn(*const c_char) -> !;

/// Throws the calling thread's last failure as a `std::runtime_error`. Returns only if the process
/// has no libstdc++.
///
/// Callers must be `extern "C-unwind"` all the way to C++, and own nothing that needs dropping.
pub(crate) fn throw_last_failure() {
    static HELPER: OnceLock<Option<Throw>> = OnceLock::new();
    let Some(throw) = *HELPER.get_or_init(helper) else { return };
    let text = crate::status::last();
    // SAFETY: the text is the thread's own and ends with a zero; the helper copies it. This is
    // compiled to let foreign exceptions through.
    unsafe { throw(text) }
}

fn helper() -> Option<Throw> {
    // SAFETY: the library is loaded already, so no code of it runs now.
    let loaded = unsafe { Library::open(Some("libstdc++.so.6"), RTLD_NOW | libc::RTLD_NOLOAD) };
    let loaded = loaded.ok()?;
    // SAFETY: `std::__throw_runtime_error(char const*)`, part of libstdc++'s stable interface,
    // has this type.
    let throw = unsafe { loaded.get::<Throw>(b"_ZSt21__throw_runtime_errorPKc\0") };
    let throw = *throw.ok()?;
    // The function is used as long as the process lives, and so must the library be.
    std::mem::forget(loaded);
    Some(throw)
}
