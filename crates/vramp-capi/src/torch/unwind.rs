//! Throws a C++ exception from Rust.
//!
//! PyTorch's pluggable allocator does not check for a null address, so an allocation can fail only
//! by an exception. libstdc++ exports the helpers by which its own headers throw. One of them
//! throws a `std::runtime_error` with a message. It is looked up in the libstdc++ that the process
//! has loaded. Without libstdc++ no code could catch.

use std::ffi::c_char;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_NOW};

use crate::status::check_fork;

/// Throws a `std::runtime_error` with a copy of the message.
type Throw = unsafe extern "C-unwind" fn(*const c_char) -> !;

/// Throws the calling thread's last failure as a `std::runtime_error`. Returns only if the process
/// has no libstdc++.
///
/// All callers up to C++ must be `extern "C-unwind"` and must not own values that need dropping.
pub(crate) fn throw_last_failure() {
    static HELPER: OnceLock<Option<Throw>> = OnceLock::new();
    // In a forked child a thread of the parent may have begun to look it up, and never ends.
    let helper = if check_fork().is_ok() { *HELPER.get_or_init(helper) } else { known(&HELPER) };
    let Some(throw) = helper else { return };
    let text = crate::status::last_error();
    // SAFETY: the message is thread-local and zero-terminated, and the helper copies it. Its ABI
    // is `C-unwind`, so the exception may pass through Rust frames.
    unsafe { throw(text) }
}

fn known(helper: &OnceLock<Option<Throw>>) -> Option<Throw> {
    helper.get().copied().flatten()
}

fn helper() -> Option<Throw> {
    // SAFETY: the library is loaded already, so none of its initializers run.
    let loaded = unsafe { Library::open(Some("libstdc++.so.6"), RTLD_NOW | libc::RTLD_NOLOAD) };
    let loaded = loaded.ok()?;
    // SAFETY: `std::__throw_runtime_error(char const*)`, part of libstdc++'s stable interface,
    // has this type.
    let throw = unsafe { loaded.get::<Throw>(b"_ZSt21__throw_runtime_errorPKc\0") };
    let throw = *throw.ok()?;
    // Never unloaded, because the function is used until the process ends.
    std::mem::forget(loaded);
    Some(throw)
}
