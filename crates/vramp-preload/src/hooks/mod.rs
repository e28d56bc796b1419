//! The functions that stand in front of the driver's, and the table by which programs get them.
//!
//! Each is exported under the name of the driver's. A call that is not the program's, or with nothing to do, goes on to
//! the driver's own function; what else happens is in the files below, by what the functions are about.

mod contexts;
mod memory;
mod queries;
mod sharing;
mod symbols;
mod virtual_memory;
mod work;

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::driver::{Code, Function, PER_THREAD, call};
use crate::process::enter;
use crate::settings;

/// A function in front of one of the driver's.
struct Hook {
    /// The driver's own function.
    driver: &'static Function,
    /// This library's function.
    own: *const c_void,
    /// Its name for `cuGetProcAddress`, without a version.
    name: &'static str,
    /// The first CUDA version whose callers of `cuGetProcAddress` get it.
    since: c_int,
    /// True for the variant in which stream zero is the calling thread's.
    is_per_thread: bool,
}

// SAFETY: the pointer is that of a function.
unsafe impl Sync for Hook {}

/// Exports the hooks and makes the table. The last name of an entry is what does the work: it gets the process, a call
/// of the driver's own function with the same arguments, and the arguments.
macro_rules! hooks {
    ($($symbol:ident, $name:literal since $since:literal $(per $thread:ident)?: ($($argument:ident: $type:ty),*) => $work:path;)*) => {
        /// The driver's own functions.
        #[allow(non_upper_case_globals, reason = "each is named as the function is")]
        mod real {
            use crate::driver::Function;
            $(pub static $symbol: Function = Function::new(
                // SAFETY: the text ends with its only zero.
                unsafe { std::ffi::CStr::from_bytes_with_nul_unchecked(concat!(stringify!($symbol), "\0").as_bytes()) }
            );)*
        }

        $(
            /// As the driver's function of this name.
            ///
            /// # Safety
            /// As of the driver's function.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $symbol($($argument: $type),*) -> Code {
                let driver = || call!(real::$symbol, fn($($type),*), $($argument),*);
                match enter() {
                    // SAFETY: the arguments are the program's, as of the driver's function.
                    Some((process, _inside)) => unsafe { $work(process, &driver, $($argument),*) },
                    None => driver(),
                }
            }
        )*

        static HOOKS: &[Hook] = &[$(Hook {
            driver: &real::$symbol,
            own: $symbol as *const c_void,
            name: $name,
            since: $since,
            is_per_thread: hooks!(@per $($thread)?),
        }),*];
    };
    (@per thread) => { true };
    (@per) => { false };
}

type Size = *mut usize;
type Address = *mut u64;
type Stream = *mut c_void;

hooks! {
    cuGetProcAddress, "cuGetProcAddress" since 11030:
        (name: *const c_char, found: *mut *mut c_void, version: c_int, flags: c_ulonglong) => symbols::get;
    cuGetProcAddress_v2, "cuGetProcAddress" since 12000:
        (name: *const c_char, found: *mut *mut c_void, version: c_int, flags: c_ulonglong, status: *mut c_int)
        => symbols::get_with_status;

    cuMemAlloc_v2, "cuMemAlloc" since 3020: (address: Address, size: usize) => memory::alloc;
    cuMemAllocPitch_v2, "cuMemAllocPitch" since 3020:
        (address: Address, pitch: Size, width: usize, height: usize, element: c_uint) => memory::alloc_pitch;
    cuMemAllocManaged, "cuMemAllocManaged" since 6000:
        (address: Address, size: usize, flags: c_uint) => memory::alloc_managed;
    cuMemFree_v2, "cuMemFree" since 3020: (address: u64) => memory::free;
    cuMemAllocAsync, "cuMemAllocAsync" since 11020:
        (address: Address, size: usize, stream: Stream) => memory::alloc_async::<0>;
    cuMemAllocAsync_ptsz, "cuMemAllocAsync" since 11020 per thread:
        (address: Address, size: usize, stream: Stream) => memory::alloc_async::<PER_THREAD>;
    cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync" since 11020:
        (address: Address, size: usize, pool: *mut c_void, stream: Stream) => memory::alloc_from_pool::<0>;
    cuMemAllocFromPoolAsync_ptsz, "cuMemAllocFromPoolAsync" since 11020 per thread:
        (address: Address, size: usize, pool: *mut c_void, stream: Stream) => memory::alloc_from_pool::<PER_THREAD>;
    cuMemFreeAsync, "cuMemFreeAsync" since 11020: (address: u64, stream: Stream) => memory::free_async::<0>;
    cuMemFreeAsync_ptsz, "cuMemFreeAsync" since 11020 per thread:
        (address: u64, stream: Stream) => memory::free_async::<PER_THREAD>;

    cuMemGetInfo_v2, "cuMemGetInfo" since 3020: (free: Size, total: Size) => queries::info;
    cuDeviceTotalMem_v2, "cuDeviceTotalMem" since 3020: (total: Size, device: c_int) => queries::total;
    cuMemGetAddressRange_v2, "cuMemGetAddressRange" since 3020:
        (base: Address, size: Size, address: u64) => queries::address_range;
    cuPointerGetAttribute, "cuPointerGetAttribute" since 4000:
        (data: *mut c_void, attribute: c_int, address: u64) => queries::attribute;
    cuPointerGetAttributes, "cuPointerGetAttributes" since 7000:
        (count: c_uint, attributes: *mut c_int, data: *mut *mut c_void, address: u64) => queries::attributes;

    cuMemCreate, "cuMemCreate" since 10020:
        (handle: *mut u64, size: usize, properties: *const c_int, flags: c_ulonglong) => virtual_memory::create;
    cuMemRelease, "cuMemRelease" since 10020: (handle: u64) => virtual_memory::release;
    cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle" since 11000:
        (handle: *mut u64, address: *mut c_void) => virtual_memory::retain;
    cuMemMap, "cuMemMap" since 10020:
        (address: u64, size: usize, offset: usize, handle: u64, flags: c_ulonglong) => virtual_memory::map;
    cuMemUnmap, "cuMemUnmap" since 10020: (address: u64, size: usize) => virtual_memory::unmap;

    cuIpcGetMemHandle, "cuIpcGetMemHandle" since 4010:
        (handle: *mut sharing::Handle, address: u64) => sharing::get;
    cuIpcOpenMemHandle, "cuIpcOpenMemHandle" since 4010:
        (address: Address, handle: sharing::Handle, flags: c_uint) => sharing::open;
    cuIpcOpenMemHandle_v2, "cuIpcOpenMemHandle" since 11000:
        (address: Address, handle: sharing::Handle, flags: c_uint) => sharing::open;
    cuIpcCloseMemHandle, "cuIpcCloseMemHandle" since 4010: (address: u64) => sharing::close;

    cuStreamBeginCapture, "cuStreamBeginCapture" since 10000: (stream: Stream) => contexts::begin_old_capture::<0>;
    cuStreamBeginCapture_ptsz, "cuStreamBeginCapture" since 10000 per thread:
        (stream: Stream) => contexts::begin_old_capture::<PER_THREAD>;
    cuStreamBeginCapture_v2, "cuStreamBeginCapture" since 10010:
        (stream: Stream, mode: c_int) => contexts::begin_capture::<0>;
    cuStreamBeginCapture_v2_ptsz, "cuStreamBeginCapture" since 10010 per thread:
        (stream: Stream, mode: c_int) => contexts::begin_capture::<PER_THREAD>;
    cuStreamBeginCaptureToGraph, "cuStreamBeginCaptureToGraph" since 12030:
        (stream: Stream, graph: *mut c_void, nodes: *const c_void, edges: *const c_void, count: usize, mode: c_int)
        => contexts::begin_capture_to_graph::<0>;
    cuStreamBeginCaptureToGraph_ptsz, "cuStreamBeginCaptureToGraph" since 12030 per thread:
        (stream: Stream, graph: *mut c_void, nodes: *const c_void, edges: *const c_void, count: usize, mode: c_int)
        => contexts::begin_capture_to_graph::<PER_THREAD>;
    cuStreamEndCapture, "cuStreamEndCapture" since 10000:
        (stream: Stream, graph: *mut *mut c_void) => contexts::end_capture::<0>;
    cuStreamEndCapture_ptsz, "cuStreamEndCapture" since 10000 per thread:
        (stream: Stream, graph: *mut *mut c_void) => contexts::end_capture::<PER_THREAD>;
    cuStreamDestroy_v2, "cuStreamDestroy" since 4000: (stream: Stream) => contexts::stream_destroy;
    cuCtxDestroy_v2, "cuCtxDestroy" since 4000: (context: *mut c_void) => contexts::destroy;
    cuDevicePrimaryCtxReset, "cuDevicePrimaryCtxReset" since 7000: (device: c_int) => contexts::reset;
    cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset" since 11000: (device: c_int) => contexts::reset;
    cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease" since 7000: (device: c_int) => contexts::release;
    cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease" since 11000: (device: c_int) => contexts::release;
    cuMemPoolSetAccess, "cuMemPoolSetAccess" since 11020:
        (pool: *mut c_void, wanted: *const contexts::Access, count: usize) => contexts::pool_access;
    cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess" since 4000:
        (peer: *mut c_void, flags: c_uint) => contexts::enable_peer;
    cuDeviceSetMemPool, "cuDeviceSetMemPool" since 11020: (device: c_int, pool: *mut c_void) => contexts::set_pool;
}

/// Returns the hooks that the settings ask for.
fn hooks() -> impl Iterator<Item = &'static Hook> + Clone {
    let gated = if settings::settings().is_sleepable { work::GATED } else { &[] };
    HOOKS.iter().chain(gated)
}

/// Returns the hook of an exported name, whose function of the driver is `found`.
pub fn of_symbol(name: &CStr, found: *mut c_void) -> Option<*mut c_void> {
    let hook = hooks().find(|hook| hook.driver.name() == name)?;
    hook.driver.set(found);
    Some(hook.own.cast_mut())
}

/// Returns the hook for a caller of `cuGetProcAddress`, which got `found` from the driver.
fn of_version(
    name: &CStr,
    version: c_int,
    is_per_thread: bool,
    found: *mut c_void,
) -> Option<*mut c_void> {
    let hook = fitting(hooks(), name, version, is_per_thread)?;
    hook.driver.set(found);
    Some(hook.own.cast_mut())
}

/// Returns the newest version that a caller knows.
fn fitting(
    hooks: impl Iterator<Item = &'static Hook> + Clone,
    name: &CStr,
    version: c_int,
    is_per_thread: bool,
) -> Option<&'static Hook> {
    let known =
        hooks.filter(|hook| hook.name.as_bytes() == name.to_bytes() && hook.since <= version);
    let newest = |wanted| {
        let variant = known.clone().filter(move |hook| hook.is_per_thread == wanted);
        variant.max_by_key(|hook| hook.since)
    };
    // Most functions have no variant for threads.
    newest(is_per_thread).filter(|_| is_per_thread).or_else(|| newest(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(symbol: &CStr) -> *mut c_void {
        let hook = HOOKS
            .iter()
            .chain(work::GATED)
            .find(|hook| hook.driver.name() == symbol)
            .expect("a hook");
        hook.own.cast_mut()
    }

    #[test]
    fn callers_get_the_version_that_they_ask_for() {
        let all = || HOOKS.iter().chain(work::GATED);
        let of = |name: &CStr, version, is_per_thread| {
            fitting(all(), name, version, is_per_thread).map(|hook| hook.own.cast_mut())
        };
        assert_eq!(of(c"cuMemAlloc", 13000, false), Some(own(c"cuMemAlloc_v2")));
        assert_eq!(of(c"cuMemAlloc", 13000, true), Some(own(c"cuMemAlloc_v2")));
        assert_eq!(of(c"cuMemAlloc", 2000, false), None);
        assert_eq!(of(c"cuMemFreeAsync", 12000, false), Some(own(c"cuMemFreeAsync")));
        assert_eq!(of(c"cuMemFreeAsync", 12000, true), Some(own(c"cuMemFreeAsync_ptsz")));
        assert_eq!(of(c"cuGetProcAddress", 11030, false), Some(own(c"cuGetProcAddress")));
        assert_eq!(of(c"cuGetProcAddress", 12000, false), Some(own(c"cuGetProcAddress_v2")));
        assert_eq!(of(c"cuMemcpyHtoD", 13000, true), Some(own(c"cuMemcpyHtoD_v2_ptds")));
        assert_eq!(of(c"cuMemcpyBatchAsync", 12090, false), Some(own(c"cuMemcpyBatchAsync")));
        assert_eq!(
            of(c"cuMemcpyBatchAsync", 13000, true),
            Some(own(c"cuMemcpyBatchAsync_v2_ptsz"))
        );
        // The CUDA runtime asks for these of the first versions, to this day.
        assert_eq!(
            of(c"cuDevicePrimaryCtxReset", 7000, false),
            Some(own(c"cuDevicePrimaryCtxReset"))
        );
        assert_eq!(
            of(c"cuStreamBeginCapture", 10000, true),
            Some(own(c"cuStreamBeginCapture_ptsz"))
        );
        assert_eq!(of(c"cuIpcOpenMemHandle", 4010, false), Some(own(c"cuIpcOpenMemHandle")));
        assert_eq!(of(c"cuInit", 13000, false), None);
    }

    #[test]
    fn names_are_in_the_table_once() {
        let mut names = std::collections::HashSet::new();
        for hook in HOOKS.iter().chain(work::GATED) {
            let symbol = hook.driver.name();
            assert!(names.insert(symbol), "{symbol:?}");
            assert!(symbol.to_str().expect("ASCII").starts_with(hook.name));
        }
    }
}
