//! `dlsym`, as programs see it, and how this library finds the real functions.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::hooks;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The C library's `dlsym`. Null before the first call.
static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// Where the library of the pool is mapped: its calls go to the driver itself.
static POOL_BASE: AtomicUsize = AtomicUsize::new(0);

/// `dlsym` of the C library, but for names that begin with `cu` in a library that the program has opened. All else is a
/// jump, so that the C library sees the program's own address, which `RTLD_NEXT` and `RTLD_DEFAULT` depend on.
///
/// # Safety
/// As `dlsym`.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "cmp byte ptr [rsi], 99",
        "jne 2f",
        "cmp byte ptr [rsi + 1], 117",
        "jne 2f",
        // RTLD_DEFAULT and RTLD_NEXT: the C library goes by the caller, and finds the exported hooks itself.
        "lea rax, [rdi + 1]",
        "cmp rax, 1",
        "jbe 2f",
        "mov rdx, qword ptr [rsp]",
        "jmp {look_up}",
        "2:",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "jnz 3f",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {find}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "3:",
        "jmp rax",
        look_up = sym look_up,
        real = sym REAL,
        find = sym find_real,
    )
}

/// As above.
///
/// # Safety
/// As `dlsym`.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "ldrb w3, [x1]",
        "cmp w3, #99",
        "b.ne 2f",
        "ldrb w3, [x1, #1]",
        "cmp w3, #117",
        "b.ne 2f",
        "add x3, x0, #1",
        "cmp x3, #1",
        "b.ls 2f",
        "mov x2, x30",
        "b {look_up}",
        "2:",
        "adrp x16, {real}",
        "ldr x16, [x16, :lo12:{real}]",
        "cbnz x16, 3f",
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "bl {find}",
        "mov x16, x0",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "3:",
        "br x16",
        look_up = sym look_up,
        real = sym REAL,
        find = sym find_real,
    )
}

/// Finds the C library's `dlsym`, or that of another preloaded library behind this one.
extern "C" fn find_real() -> *mut c_void {
    // The default version since glibc 2.34, and the first ones of both architectures.
    for version in [c"GLIBC_2.34", c"GLIBC_2.2.5", c"GLIBC_2.17"] {
        // SAFETY: both texts end with a zero.
        let found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        if !found.is_null() {
            REAL.store(found, Ordering::Release);
            return found;
        }
    }
    crate::report::write_line("vramp exec: the C library has no dlsym: only glibc is supported");
    std::process::abort()
}

/// Calls the C library's `dlsym`.
fn real_dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    let mut real = REAL.load(Ordering::Acquire);
    if real.is_null() {
        real = find_real();
    }
    // SAFETY: the address is that of `dlsym`.
    let real: Dlsym = unsafe { std::mem::transmute(real) };
    // SAFETY: the name ends with a zero; any handle is allowed that the program may pass.
    unsafe { real(handle, name.as_ptr()) }
}

/// Looks up a name that begins with `cu` for the program: the hook, if the driver has the function.
///
/// # Safety
/// As `dlsym`. `caller` is an address in the library that calls.
unsafe extern "C" fn look_up(
    handle: *mut c_void,
    name: *const c_char,
    caller: *const c_void,
) -> *mut c_void {
    // SAFETY: required by this function's contract.
    let name = unsafe { CStr::from_ptr(name) };
    let mut found = real_dlsym(handle, name);
    // The handle of the program itself, whose scope begins with this library.
    if is_in_this_library(found) {
        found = driver_function(name);
    }
    if found.is_null() || !crate::settings::is_active() || passes(caller) {
        return found;
    }
    hooks::of_symbol(name, found).unwrap_or(found)
}

/// Returns the driver's function of this name, or that of another preloaded library behind this one. Null if the process
/// has neither.
pub fn driver_function(name: &CStr) -> *mut c_void {
    let behind = real_dlsym(libc::RTLD_NEXT, name);
    if !behind.is_null() && !is_in_this_library(behind) {
        return behind;
    }
    // Opened by the program, for itself alone.
    // SAFETY: the text ends with a zero. The library is not loaded by this call.
    let driver =
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_NOW) };
    if driver.is_null() { std::ptr::null_mut() } else { real_dlsym(driver, name) }
}

/// Looks a function up in a library that this one opened.
pub fn function_of(library: *mut c_void, name: &CStr) -> *mut c_void {
    real_dlsym(library, name)
}

/// Returns the path of the first loaded library that a test finds.
pub fn loaded_library(test: fn(&Path) -> bool) -> Option<CString> {
    struct Search {
        test: fn(&Path) -> bool,
        found: Option<CString>,
    }
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: `loaded_library` passes it, and uses nothing of it until the call returns.
        let search = unsafe { &mut *data.cast::<Search>() };
        // SAFETY: the dynamic linker passes a valid entry.
        let name = unsafe { (*info).dlpi_name };
        if name.is_null() {
            return 0;
        }
        // SAFETY: a name of the dynamic linker ends with a zero.
        let name = unsafe { CStr::from_ptr(name) };
        if (search.test)(Path::new(OsStr::from_bytes(name.to_bytes()))) {
            search.found = Some(name.to_owned());
        }
        c_int::from(search.found.is_some())
    }
    let mut search = Search { test, found: None };
    // SAFETY: the callback is called with the search until the call returns.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

/// Lets calls of the library that has `address` go to the driver itself.
pub fn let_pass(address: *const c_void) {
    POOL_BASE.store(base_of(address), Ordering::Release);
}

/// Returns true for callers whose calls are not the program's: this library and that of the pool.
fn passes(caller: *const c_void) -> bool {
    let Some(info) = library_of(caller) else { return false };
    let base = info.dli_fbase as usize;
    if base == own_base() || base == POOL_BASE.load(Ordering::Acquire) {
        return true;
    }
    if info.dli_fname.is_null() {
        return false;
    }
    // SAFETY: the dynamic linker's name of a loaded library ends with a zero.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    // Before the pool is opened, by a program that uses vramp itself.
    crate::settings::settings().pool.as_ref().is_some_and(|pool| pool.is_library(name))
}

/// Returns true for addresses in this library.
pub fn is_in_this_library(address: *const c_void) -> bool {
    !address.is_null() && base_of(address) == own_base()
}

fn own_base() -> usize {
    static OWN: AtomicUsize = AtomicUsize::new(0);
    match OWN.load(Ordering::Relaxed) {
        0 => {
            let base = base_of(find_real as *const c_void);
            OWN.store(base, Ordering::Relaxed);
            base
        }
        base => base,
    }
}

fn base_of(address: *const c_void) -> usize {
    library_of(address).map_or(0, |info| info.dli_fbase as usize)
}

fn library_of(address: *const c_void) -> Option<libc::Dl_info> {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: any address may be asked for, and `info` is valid for writing.
    let found = unsafe { libc::dladdr(address, info.as_mut_ptr()) };
    // SAFETY: a call that finds a library fills it.
    (found != 0).then(|| unsafe { info.assume_init() })
}
