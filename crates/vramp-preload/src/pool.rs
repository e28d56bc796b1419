//! vramp's pool, through the C interface of a library that is opened by path.
//!
//! It is the allocator that `vramp.torch` and C share in a process (the functions `vramp_torch_*`), one for each device, with the
//! options of `VRAMP_CONF`. Two kinds of blocks:
//!
//! - a segment, for `cuMemAlloc`: usable on any stream at once, because the pool waits on the host for earlier work on
//!   its memory;
//! - a block, for `cuMemAllocAsync`: in the order of its stream.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::driver::{self, Code, DEVICES, OUT_OF_MEMORY, SUCCESS};
use crate::ledger::Source;
use crate::lookup;
use crate::settings::PoolSettings;

/// `VRAMP_ERROR_OUT_OF_MEMORY`.
const STATUS_OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_UNKNOWN`, for failures of the pool that are not the program's.
const UNKNOWN: Code = 999;

/// `vramp_torch_block_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct BlockRecord {
    address: u64,
    size: u64,
    requested: u64,
    stream: u64,
    device: c_int,
    is_small: c_int,
}

/// The first members of `vramp_stats_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    struct_size: u64,
    pub live: u64,
    pub live_peak: u64,
    pub reserved: u64,
    pub reserved_peak: u64,
}

/// Declares the functions that are called, by the signatures of `vramp.h`.
macro_rules! functions {
    ($($name:ident: $symbol:literal, fn($($type:ty),*) $(-> $result:ty)?;)*) => {
        #[derive(Debug)]
        struct Functions { $($name: unsafe extern "C" fn($($type),*) $(-> $result)?,)* }

        impl Functions {
            /// Finds them in a library. The name of a missing one is the error.
            fn find(library: *mut c_void) -> Result<Functions, &'static CStr> {
                Ok(Functions { $($name: {
                    let found = lookup::function_of(library, $symbol);
                    if found.is_null() {
                        return Err($symbol);
                    }
                    // SAFETY: the symbol is that of the C interface, whose signature this is.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) $(-> $result)?>(found) }
                },)* })
            }
        }
    };
}

functions! {
    last_error: c"vramp_last_error", fn() -> *const c_char;
    open: c"vramp_torch_open", fn(c_int) -> c_int;
    is_open: c"vramp_torch_is_open", fn(c_int) -> c_int;
    allocator: c"vramp_torch_allocator", fn(c_int, *mut u64) -> c_int;
    stats: c"vramp_stats", fn(u64, *mut Stats) -> c_int;
    segment_malloc: c"vramp_torch_segment_malloc", fn(c_int, u64, *mut *mut c_void) -> c_int;
    segment_free: c"vramp_torch_segment_free", fn(*mut c_void, c_int, *mut u64) -> c_int;
    block_malloc: c"vramp_torch_block_malloc", fn(c_int, u64, *mut c_void, *mut BlockRecord) -> c_int;
    block_free: c"vramp_torch_block_free", fn(*mut c_void, *mut BlockRecord) -> c_int;
    free: c"vramp_torch_free", fn(*mut c_void, usize, c_int, *mut c_void);
    stream_forget: c"vramp_torch_stream_forget", fn(c_int, *mut c_void) -> c_int;
    enable_peer: c"vramp_torch_enable_peer", fn(c_int, c_int) -> c_int;
}

/// The pool of a process.
#[derive(Debug)]
pub struct Pool {
    functions: Functions,
    /// Devices that are reset or cannot be opened: their requests go to the driver.
    retired: [AtomicBool; DEVICES],
    served: AtomicU64,
    failed: AtomicU64,
}

impl Pool {
    /// Opens the library. The error says what to do.
    pub fn open(settings: &PoolSettings) -> Result<Pool, String> {
        let path = CString::new(settings.library.as_os_str().as_bytes())
            .map_err(|error| error.to_string())?;
        // SAFETY: libvramp has no initialisers, and the Python package's module none that need Python.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: no precondition.
            let why = unsafe { libc::dlerror() };
            // SAFETY: after a failed call there is a message, which ends with a zero.
            let why = unsafe { CStr::from_ptr(why) };
            return Err(why.to_string_lossy().into_owned());
        }
        let functions = Functions::find(library).map_err(|missing| {
            format!(
                "{} has no {}: it is of another version than libvramp_preload.so",
                settings.library.display(),
                missing.to_string_lossy()
            )
        })?;
        lookup::let_pass(functions.open as *const c_void);
        let retired = [const { AtomicBool::new(false) }; DEVICES];
        Ok(Pool { functions, retired, served: AtomicU64::new(0), failed: AtomicU64::new(0) })
    }

    /// Returns true if the pool serves requests of a device. The first opens the device.
    pub fn serves(&self, device: usize) -> bool {
        if self.retired[device].load(Ordering::Acquire) {
            return false;
        }
        // SAFETY: any number is allowed.
        if unsafe { (self.functions.is_open)(device as c_int) } != 0 {
            return true;
        }
        // SAFETY: as above.
        let status = unsafe { (self.functions.open)(device as c_int) };
        if status != 0 && !self.retired[device].swap(true, Ordering::AcqRel) {
            crate::report::write_line(&format!(
                "vramp exec: device {device} is not pooled, its memory comes from the driver: {}",
                self.why()
            ));
        }
        status == 0
    }

    /// Allocates memory that any stream may use at once.
    pub fn allocate(&self, device: usize, size: u64) -> Result<u64, Code> {
        let mut address = std::ptr::null_mut();
        // SAFETY: `address` is valid for writing.
        let status =
            unsafe { (self.functions.segment_malloc)(device as c_int, size, &mut address) };
        self.answer(status).map(|()| address as u64)
    }

    /// Allocates memory in the order of a stream.
    pub fn allocate_on(&self, device: usize, size: u64, stream: usize) -> Result<u64, Code> {
        let mut block = BlockRecord::default();
        // SAFETY: the stream is one of the device, which `cuStreamDestroy` makes the pool forget.
        let status = unsafe {
            (self.functions.block_malloc)(device as c_int, size, as_stream(stream), &mut block)
        };
        self.answer(status).map(|()| block.address)
    }

    /// Frees memory that no work uses.
    pub fn free(&self, address: u64, source: Source) -> Code {
        let address = address as *mut c_void;
        let status = match source {
            Source::Driver | Source::Managed => return driver::INVALID_VALUE,
            Source::Segment => {
                let mut size = 0;
                // SAFETY: `size` is valid for writing. Any address is allowed.
                unsafe { (self.functions.segment_free)(address, 0, &mut size) }
            }
            Source::Block => {
                let mut block = BlockRecord::default();
                // SAFETY: as above.
                unsafe { (self.functions.block_free)(address, &mut block) }
            }
        };
        if status == 0 { SUCCESS } else { UNKNOWN }
    }

    /// Frees a block in the order of a stream.
    pub fn free_on(&self, device: usize, address: u64, size: u64, stream: usize) {
        let (address, stream) = (address as *mut c_void, as_stream(stream));
        // SAFETY: as for `allocate_on`.
        unsafe { (self.functions.free)(address, size as usize, device as c_int, stream) };
    }

    /// Forgets a stream that is about to be destroyed.
    pub fn forget(&self, stream: usize) {
        for device in (0..DEVICES).filter(|&device| self.is_open(device)) {
            // SAFETY: any value is allowed.
            let status =
                unsafe { (self.functions.stream_forget)(device as c_int, stream as *mut c_void) };
            if status != 0 {
                crate::report::write_line(&format!(
                    "vramp exec: a stream is destroyed that the pool still uses: {}",
                    self.why()
                ));
            }
        }
    }

    /// Lets a device use the memory of another.
    pub fn enable_peer(&self, device: usize, owner: usize) {
        // SAFETY: any numbers are allowed.
        let status = unsafe { (self.functions.enable_peer)(device as c_int, owner as c_int) };
        if status != 0 {
            crate::report::write_line(&format!(
                "vramp exec: device {device} cannot use the pool's memory on device {owner}: {}",
                self.why()
            ));
        }
    }

    /// Lets the driver serve a device from now on: the program resets it.
    pub fn retire(&self, device: usize) {
        if let Some(retired) = self.retired.get(device) {
            retired.store(true, Ordering::Release);
        }
    }

    /// Returns what the pool of a device has. `None` if it is not open.
    pub fn stats(&self, device: usize) -> Option<Stats> {
        if !self.is_open(device) {
            return None;
        }
        let mut allocator = 0;
        // SAFETY: valid for writing.
        if unsafe { (self.functions.allocator)(device as c_int, &mut allocator) } != 0 {
            return None;
        }
        let mut stats = Stats { struct_size: size_of::<Stats>() as u64, ..Stats::default() };
        // SAFETY: at most the bytes that `struct_size` says are written.
        (unsafe { (self.functions.stats)(allocator, &mut stats) } == 0).then_some(stats)
    }

    /// Returns how many requests the pool served, and how many it could not.
    pub fn requests(&self) -> (u64, u64) {
        (self.served.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }

    fn is_open(&self, device: usize) -> bool {
        // SAFETY: any number is allowed.
        !self.retired[device].load(Ordering::Acquire)
            && unsafe { (self.functions.is_open)(device as c_int) } != 0
    }

    fn answer(&self, status: c_int) -> Result<(), Code> {
        if status == 0 {
            self.served.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        let earlier = self.failed.fetch_add(1, Ordering::Relaxed);
        if earlier < LINES {
            crate::report::write_line(&format!("vramp exec: {}", self.why()));
        }
        Err(if status == STATUS_OUT_OF_MEMORY { OUT_OF_MEMORY } else { UNKNOWN })
    }

    fn why(&self) -> String {
        // SAFETY: the function has no precondition, and returns a text that ends with a zero.
        let text = unsafe { (self.functions.last_error)() };
        // SAFETY: as above. It is valid until the thread's next failure.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// Failures that are printed.
const LINES: u64 = 5;

/// The legacy default stream is null for the pool.
fn as_stream(stream: usize) -> *mut c_void {
    if stream == driver::LEGACY { std::ptr::null_mut() } else { stream as *mut c_void }
}
