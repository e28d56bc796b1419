//! Threads that are inside of the library when the interpreter ends.
//!
//! Python before 3.14 ends a thread that needs the interpreter once it finalizes with `pthread_exit`,
//! which unwinds the thread's stack. Frames of Rust are on it below all Python code that a call of the
//! library ran: a handler, but also a destructor or a callback of a weak reference that ran when an object
//! was dropped, or in a collection that an allocation began. To unwind them is undefined: in practice the
//! process aborts.
//!
//! 1. For each frame the unwinder calls a personality routine. All frames of Rust in a library name
//!    theirs by one pointer of that library, which [`sleep_instead_of_unwinding`] replaces.
//! 2. The new routine lets panics and exceptions pass as before. A thread that `pthread_exit` unwinds
//!    sleeps in it until the process has ended, as in Python 3.14. Nothing on its stack was dropped.
//!
//! Deliberately absent: frames of other libraries. Those above the library's are unwound first.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The bit of `actions` that is set while a thread ends, and in no panic or exception.
const FORCE_UNWIND: c_int = 8;

unsafe extern "C" {
    /// LLVM's name for what the unwind tables refer to, in writable data and hidden from other libraries.
    #[link_name = "DW.ref.rust_eh_personality"]
    static PERSONALITY: AtomicPtr<c_void>;

    fn rust_eh_personality(
        version: c_int,
        actions: c_int,
        class: u64,
        exception: *mut c_void,
        context: *mut c_void,
    ) -> c_int;
}

unsafe extern "C" fn personality(
    version: c_int,
    actions: c_int,
    class: u64,
    exception: *mut c_void,
    context: *mut c_void,
) -> c_int {
    if actions & FORCE_UNWIND != 0 {
        loop {
            std::thread::park();
        }
    }
    // SAFETY: the arguments are those of the unwinder.
    unsafe { rust_eh_personality(version, actions, class, exception, context) }
}

/// Makes threads sleep that would be unwound.
pub fn sleep_instead_of_unwinding() {
    // SAFETY: the pointer lives as long as the library, and the unwinder only reads it.
    let pointer = unsafe { &PERSONALITY };
    pointer.store(personality as *mut c_void, Ordering::Release);
}
