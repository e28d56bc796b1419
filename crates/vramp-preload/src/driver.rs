//! Functions of the driver that this library calls itself, and what it asks the driver.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::{gate, lookup};

/// A result of the driver: `CUresult`.
pub type Code = c_int;

pub const SUCCESS: Code = 0;
pub const INVALID_VALUE: Code = 1;
pub const OUT_OF_MEMORY: Code = 2;
pub const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
/// `CUDA_ERROR_UNKNOWN`, for failures of the pool that are not the program's.
pub const UNKNOWN: Code = 999;
/// What a hook returns where the process has no function of the driver to call.
pub const NOT_FOUND: Code = 302;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

/// Most devices of a process.
pub const DEVICES: usize = 64;

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, as the driver takes them.
pub const LEGACY: usize = 1;
pub const PER_THREAD: usize = 2;

/// A function of the driver, found at its first use.
pub struct Function {
    address: AtomicPtr<c_void>,
    name: &'static CStr,
}

impl Function {
    pub const fn new(name: &'static CStr) -> Function {
        Function { address: AtomicPtr::new(std::ptr::null_mut()), name }
    }

    /// Returns its address, or null if the driver lacks it.
    #[inline]
    pub fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Acquire);
        if known.is_null() { self.find() } else { known }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        let found = lookup::driver_function(self.name);
        self.set(found);
        found
    }

    /// Keeps an address that the driver gave the program.
    pub fn set(&self, address: *mut c_void) {
        self.address.store(address, Ordering::Release);
    }

    pub fn name(&self) -> &'static CStr {
        self.name
    }
}

/// Calls a function of the driver by its signature; [`NOT_FOUND`] if the driver lacks it.
macro_rules! call {
    ($function:expr, fn($($type:ty),*), $($argument:expr),* $(,)?) => {{
        let address = $function.address();
        if address.is_null() {
            $crate::driver::NOT_FOUND
        } else {
            // SAFETY: the address is that of the driver's function of this name, whose signature this is.
            let function = unsafe {
                std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($type),*) -> $crate::driver::Code>(
                    address,
                )
            };
            // SAFETY: the arguments are the program's, or valid for the call.
            unsafe { function($($argument),*) }
        }
    }};
}
pub(crate) use call;

static CTX_GET_CURRENT: Function = Function::new(c"cuCtxGetCurrent");
static CTX_GET_DEVICE: Function = Function::new(c"cuCtxGetDevice");
static CTX_PUSH: Function = Function::new(c"cuCtxPushCurrent_v2");
static CTX_POP: Function = Function::new(c"cuCtxPopCurrent_v2");
static CTX_SYNCHRONIZE: Function = Function::new(c"cuCtxSynchronize");
static PRIMARY_RETAIN: Function = Function::new(c"cuDevicePrimaryCtxRetain");
static PRIMARY_RELEASE: Function = Function::new(c"cuDevicePrimaryCtxRelease_v2");
static PRIMARY_STATE: Function = Function::new(c"cuDevicePrimaryCtxGetState");
static STREAM_CONTEXT: Function = Function::new(c"cuStreamGetCtx");
static MEMORY_ALLOCATE: Function = Function::new(c"cuMemAlloc_v2");
static MEMORY_FREE: Function = Function::new(c"cuMemFree_v2");
static STREAM_CREATE: Function = Function::new(c"cuStreamCreate");
static STREAM_DESTROY: Function = Function::new(c"cuStreamDestroy_v2");
static STREAM_SYNCHRONIZE: Function = Function::new(c"cuStreamSynchronize");
static STREAM_IS_CAPTURING: Function = Function::new(c"cuStreamIsCapturing");
static DEVICE_COUNT: Function = Function::new(c"cuDeviceGetCount");
static DEVICE_NAME: Function = Function::new(c"cuDeviceGetName");
static DEVICE_TOTAL: Function = Function::new(c"cuDeviceTotalMem_v2");
static MEMORY_INFO: Function = Function::new(c"cuMemGetInfo_v2");
static DEFAULT_POOL: Function = Function::new(c"cuDeviceGetDefaultMemPool");

/// Where a call works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The device's number, below [`DEVICES`].
    pub device: usize,
    /// The context, as a number.
    pub context: usize,
    /// True if the context is the device's primary one, which the pool uses.
    pub is_primary: bool,
}

/// The primary contexts that were seen, by device.
static PRIMARY: [AtomicUsize; DEVICES] = [const { AtomicUsize::new(0) }; DEVICES];

/// Returns where the calling thread works. `None` without a current context.
pub fn current_place() -> Option<Place> {
    let mut context = std::ptr::null_mut::<c_void>();
    let code = call!(CTX_GET_CURRENT, fn(*mut *mut c_void), &mut context);
    if code != SUCCESS || context.is_null() {
        return None;
    }
    if let Some(place) = primary_place(context) {
        return Some(place);
    }
    let device = current_device()?;
    let is_primary = is_primary(device, context);
    Some(Place { device, context: context as usize, is_primary })
}

/// Returns the place of a primary context that was seen. No driver call.
fn primary_place(context: *mut c_void) -> Option<Place> {
    let context = context as usize;
    let device = PRIMARY.iter().position(|seen| seen.load(Ordering::Relaxed) == context)?;
    Some(Place { device, context, is_primary: true })
}

/// Counts streams and contexts that have ended: their handles may be those of others.
static ENDED: AtomicUsize = AtomicUsize::new(0);

/// A stream or a context ends.
pub fn note_end() {
    ENDED.fetch_add(1, Ordering::AcqRel);
}

thread_local! {
    /// The stream that this thread used last, the count of ends then, and its place.
    static LAST: Cell<Option<(usize, usize, Place)>> = const { Cell::new(None) };
}

/// Returns where the work of a stream is done. `None` without a current context.
pub fn place_of(stream: usize) -> Option<Place> {
    if stream <= PER_THREAD {
        return current_place();
    }
    let ended = ENDED.load(Ordering::Acquire);
    if let Some((last, at, place)) = LAST.get()
        && (last, at) == (stream, ended)
    {
        return Some(place);
    }
    let mut context = std::ptr::null_mut::<c_void>();
    let code = call!(
        STREAM_CONTEXT,
        fn(*mut c_void, *mut *mut c_void),
        stream as *mut c_void,
        &mut context
    );
    if code != SUCCESS {
        // A driver from before the function, or not a stream, which the driver will say.
        return current_place();
    }
    let place = primary_place(context).or_else(|| place_in(context))?;
    LAST.set(Some((stream, ended, place)));
    Some(place)
}

/// Returns where a context is.
pub fn place_in(context: *mut c_void) -> Option<Place> {
    within(context, current_place)?
}

/// Calls `work` with another current context. `None` if the driver refuses the context.
fn within<T>(context: *mut c_void, work: impl FnOnce() -> T) -> Option<T> {
    if call!(CTX_PUSH, fn(*mut c_void), context) != SUCCESS {
        return None;
    }
    let answer = work();
    let mut popped = std::ptr::null_mut::<c_void>();
    let _ = call!(CTX_POP, fn(*mut *mut c_void), &mut popped);
    Some(answer)
}

fn current_device() -> Option<usize> {
    let mut device: c_int = 0;
    let code = call!(CTX_GET_DEVICE, fn(*mut c_int), &mut device);
    let device = usize::try_from(device).ok()?;
    (code == SUCCESS && device < DEVICES).then_some(device)
}

fn is_primary(device: usize, context: *mut c_void) -> bool {
    let seen = PRIMARY[device].load(Ordering::Relaxed);
    if seen != 0 {
        return seen == context as usize;
    }
    if !has_primary(device) {
        return false;
    }
    let mut primary = std::ptr::null_mut::<c_void>();
    let code = call!(PRIMARY_RETAIN, fn(*mut *mut c_void, c_int), &mut primary, device as c_int);
    if code != SUCCESS {
        return false;
    }
    let _ = call!(PRIMARY_RELEASE, fn(c_int), device as c_int);
    PRIMARY[device].store(primary as usize, Ordering::Relaxed);
    primary == context
}

/// Forgets the primary context of a device, which has ended, and returns it if it was seen.
pub fn forget_primary(device: usize) -> Option<usize> {
    let seen = PRIMARY.get(device)?.swap(0, Ordering::Relaxed);
    (seen != 0).then_some(seen)
}

/// Returns the primary context of a device, if it was seen.
pub fn seen_primary(device: usize) -> Option<usize> {
    let seen = PRIMARY.get(device)?.load(Ordering::Relaxed);
    (seen != 0).then_some(seen)
}

/// Returns true if the primary context of a device is there.
pub fn has_primary(device: usize) -> bool {
    let (mut flags, mut active) = (0_u32, 0);
    let code = call!(
        PRIMARY_STATE,
        fn(c_int, *mut u32, *mut c_int),
        device as c_int,
        &mut flags,
        &mut active
    );
    code == SUCCESS && active != 0
}

/// Waits for all work of a device's primary context.
pub fn synchronize(device: usize) -> Code {
    let wait = || call!(CTX_SYNCHRONIZE, fn(),);
    let place = current_place();
    if place.is_some_and(|place| place.is_primary && place.device == device) {
        return wait();
    }
    let primary = PRIMARY[device].load(Ordering::Relaxed) as *mut c_void;
    within(primary, wait).unwrap_or(INVALID_VALUE)
}

/// True once the program has begun a capture. Before, no stream has to be asked.
static HAS_CAPTURED: AtomicBool = AtomicBool::new(false);
/// The streams in which a capture was begun and not ended: those that it forked to are not here. With the thread, for the
/// stream that is another one in each.
static CAPTURES: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());
/// Their number.
static CAPTURE_COUNT: AtomicUsize = AtomicUsize::new(0);

fn change_captures<T>(change: impl FnOnce(&mut Vec<(usize, usize)>) -> T) -> T {
    let mut captures = CAPTURES.lock().unwrap_or_else(PoisonError::into_inner);
    let answer = change(&mut captures);
    CAPTURE_COUNT.store(captures.len(), Ordering::Release);
    answer
}

/// Returns what tells a stream from others of the same handle.
fn origin(stream: usize) -> (usize, usize) {
    thread_local! {
        static OWN: Cell<u8> = const { Cell::new(0) };
    }
    (stream, if stream == PER_THREAD { OWN.with(|own| own as *const _ as usize) } else { 0 })
}

/// Begins a capture in a stream by `begin`.
pub fn begin_capture(stream: usize, begin: impl FnOnce() -> Code) -> Code {
    // The program may need another capture to end the first.
    gate::give_way(|| !has_captures());
    HAS_CAPTURED.store(true, Ordering::Release);
    let origin = origin(stream);
    let is_new = change_captures(|all| {
        let is_new = !all.contains(&origin);
        if is_new {
            all.push(origin);
        }
        is_new
    });
    let code = begin();
    if code != SUCCESS && is_new {
        change_captures(|all| all.retain(|known| *known != origin));
    }
    code
}

/// Ends the capture of a stream by `end`, or the stream itself.
pub fn end_capture(stream: usize, end: impl FnOnce() -> Code) -> Code {
    let code = end();
    // An invalid capture ends too. One that has to be ended by another thread does not.
    if HAS_CAPTURED.load(Ordering::Acquire) && (code == SUCCESS || !is_capturing(stream)) {
        let origin = origin(stream);
        change_captures(|all| all.retain(|known| *known != origin));
    }
    code
}

/// Returns true while a stream captures: then no device may be waited for.
pub fn has_captures() -> bool {
    CAPTURE_COUNT.load(Ordering::Acquire) != 0
}

/// Returns what the driver says of a request that it refuses in captures but for relaxed ones. A refusal ends them.
pub fn may_allocate() -> Code {
    let mut address = 0;
    match call!(MEMORY_ALLOCATE, fn(*mut u64, usize), &mut address, 1) {
        SUCCESS => free(address),
        code => code,
    }
}

/// Returns true if the stream captures a graph, or if the driver does not say.
pub fn is_capturing(stream: usize) -> bool {
    if !HAS_CAPTURED.load(Ordering::Acquire) {
        return false;
    }
    let mut status: c_int = 0;
    let code =
        call!(STREAM_IS_CAPTURING, fn(*mut c_void, *mut c_int), stream as *mut c_void, &mut status);
    (code != SUCCESS && code != NOT_FOUND) || status != 0
}

/// Waits for the work of a stream.
pub fn synchronize_stream(stream: usize) -> Code {
    call!(STREAM_SYNCHRONIZE, fn(*mut c_void), stream as *mut c_void)
}

/// Creates a stream of the current context that waits for no other, as a number.
pub fn create_stream() -> Result<usize, Code> {
    let mut stream = std::ptr::null_mut::<c_void>();
    match call!(STREAM_CREATE, fn(*mut *mut c_void, c_uint), &mut stream, NON_BLOCKING) {
        SUCCESS => Ok(stream as usize),
        code => Err(code),
    }
}

/// Ends a stream of [`create_stream`].
pub fn destroy_stream(stream: usize) {
    let _ = call!(STREAM_DESTROY, fn(*mut c_void), stream as *mut c_void);
}

/// Frees memory of the driver's.
pub fn free(address: u64) -> Code {
    call!(MEMORY_FREE, fn(u64), address)
}

/// Returns the name of a device and its memory in bytes.
pub fn describe(device: usize) -> (String, u64) {
    let mut name = [0_u8; 256];
    let code = call!(
        DEVICE_NAME,
        fn(*mut c_char, c_int, c_int),
        name.as_mut_ptr().cast(),
        255,
        device as c_int
    );
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(0);
    let name = if code == SUCCESS {
        String::from_utf8_lossy(&name[..end]).into_owned()
    } else {
        String::new()
    };
    let mut total = 0_usize;
    let _ = call!(DEVICE_TOTAL, fn(*mut usize, c_int), &mut total, device as c_int);
    (name, total as u64)
}

/// Returns free and total bytes of the current device.
pub fn memory_info() -> Option<(u64, u64)> {
    let (mut free, mut total) = (0_usize, 0_usize);
    let code = call!(MEMORY_INFO, fn(*mut usize, *mut usize), &mut free, &mut total);
    (code == SUCCESS).then_some((free as u64, total as u64))
}

/// Returns the number of devices.
pub fn device_count() -> usize {
    let mut count: c_int = 0;
    let _ = call!(DEVICE_COUNT, fn(*mut c_int), &mut count);
    usize::try_from(count).unwrap_or(0).min(DEVICES)
}

/// True for devices whose stream-ordered requests use a pool that the program made.
static HAS_OWN_POOL: [AtomicBool; DEVICES] = [const { AtomicBool::new(false) }; DEVICES];

/// The stream-ordered requests of a device use a pool from now on.
pub fn note_pool(device: usize, pool: usize) {
    if let Some(has_own) = HAS_OWN_POOL.get(device) {
        has_own.store(default_pool(device) != Some(pool), Ordering::Release);
    }
}

/// Returns true if the stream-ordered requests of a device use a pool that the program made.
pub fn has_own_pool(device: usize) -> bool {
    HAS_OWN_POOL[device].load(Ordering::Acquire)
}

/// Returns the default pool of a device, as a number. `None` if the driver has none.
pub fn default_pool(device: usize) -> Option<usize> {
    let mut pool = std::ptr::null_mut::<c_void>();
    let code = call!(DEFAULT_POOL, fn(*mut *mut c_void, c_int), &mut pool, device as c_int);
    (code == SUCCESS).then_some(pool as usize)
}
