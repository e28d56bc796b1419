//! What PyTorch loads: functions by the signatures of `CUDAPluggableAllocator` and its hooks.
//!
//! Two routes, which differ in what happens when memory runs out:
//!
//! - *Global*, for `change_current_allocator`: PyTorch believes any answer, so
//!   [`vramp_torch_malloc`] throws a C++ exception that reaches Python as a `RuntimeError` which
//!   begins with "CUDA out of memory".
//! - *MemPool*, for `torch.cuda.MemPool`: PyTorch's own cache stays in front and takes null for an
//!   answer, so [`vramp_torch_pool_malloc`] returns null and PyTorch raises its own
//!   `torch.OutOfMemoryError`, after freeing what it had cached.
//!
//! Graphs on the global route get their memory as `pools.rs` says.
//!
//! Each device's allocator is made by its first malloc and lives until the process ends: PyTorch
//! frees memory in the destructors of globals. Streams are taken in when they are first named.

mod pools;
mod settings;
mod unwind;

use std::ffi::{c_int, c_void};
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use vramp_alloc::DeviceAddr;

use crate::abi::vramp_allocator_t;
use crate::abi::vramp_status_t::{self, *};
use crate::context::Context;
use crate::handles;
use crate::pointers;
use crate::status::{Failure, Result, contain, last_text, status_of};
use pools::{PoolId, Pools};
use settings::Settings;
use unwind::throw_last_failure;

/// PyTorch numbers devices with eight bits; no machine has more cards than this.
const DEVICES: usize = 64;
/// So many failures that nobody can be told of are printed.
const PRINTED: u32 = 20;

/// One allocator for each device that PyTorch uses.
struct Torch {
    settings: OnceLock<Result<Settings>>,
    devices: [OnceLock<Result<Arc<Context>>>; DEVICES],
    /// What each device's graphs are captured into.
    pools: [Pools; DEVICES],
    /// What part of each device may be used, where PyTorch said so before its first malloc.
    fractions: Mutex<[Option<f64>; DEVICES]>,
    handles: Mutex<[vramp_allocator_t; DEVICES]>,
}

static TORCH: Torch = Torch::new();

impl Torch {
    const fn new() -> Torch {
        Torch {
            settings: OnceLock::new(),
            devices: [const { OnceLock::new() }; DEVICES],
            pools: [const { Pools::new() }; DEVICES],
            fractions: Mutex::new([None; DEVICES]),
            handles: Mutex::new([vramp_allocator_t { id: 0 }; DEVICES]),
        }
    }

    /// The allocator of a device, made now if this is the first call for it.
    #[inline]
    fn context(&self, device: c_int) -> Result<&Arc<Context>> {
        let context = self.slot(device)?.get_or_init(|| self.open(device as usize));
        context.as_ref().map_err(Failure::clone)
    }

    #[inline]
    fn slot(&self, device: c_int) -> Result<&OnceLock<Result<Arc<Context>>>> {
        let slot = usize::try_from(device).ok().and_then(|device| self.devices.get(device));
        slot.ok_or_else(|| {
            Failure::new(VRAMP_ERROR_RANGE, format!("there is no device number {device}"))
        })
    }

    #[cold]
    fn open(&self, device: usize) -> Result<Arc<Context>> {
        let settings = self.settings.get_or_init(Settings::read).as_ref();
        let opened = settings.map_err(Failure::clone).and_then(|settings| {
            let fraction = self.fractions.lock().unwrap_or_else(PoisonError::into_inner)[device];
            Context::open(&settings.device(device), &settings.options, fraction)
        });
        if let Err(failure) = &opened {
            print(failure);
        }
        opened.map(|context| Arc::new(context.kept_open()))
    }

    /// Devices that were opened, in order.
    fn opened(&self) -> impl Iterator<Item = &Arc<Context>> {
        self.devices.iter().filter_map(|slot| slot.get()?.as_ref().ok())
    }

    /// # Safety
    /// `raw` is null or a stream of the device that lives as long as the process uses the device.
    #[inline]
    unsafe fn malloc(&self, size: isize, device: c_int, raw: *mut c_void) -> Result<DeviceAddr> {
        let Ok(size) = u64::try_from(size) else {
            let text = format!("{size} bytes cannot be allocated");
            return Err(Failure::new(VRAMP_ERROR_RANGE, text));
        };
        let context = self.context(device)?;
        // SAFETY: this function's contract is the same.
        let stream = unsafe { context.adopt(raw) }?;
        let pools = &self.pools[device as usize];
        let seen = if pools.any_open() { pools.see(context, stream) } else { Ok(()) };
        seen.and_then(|()| context.malloc(size, stream)).map_err(|failure| Failure {
            status: failure.status,
            text: match failure.status {
                VRAMP_ERROR_OUT_OF_MEMORY => {
                    format!("CUDA out of memory on device {device}. vramp: {}", failure.text)
                }
                _ => format!("vramp on device {device}: {}", failure.text),
            },
        })
    }

    /// # Safety
    /// As for [`Torch::malloc`].
    #[inline]
    unsafe fn free(&self, addr: u64, device: c_int, raw: *mut c_void) -> Result<()> {
        let context = self.context(device)?;
        // SAFETY: this function's contract is the same.
        let stream = unsafe { context.adopt(raw) }?;
        let pools = &self.pools[device as usize];
        if pools.any_open() {
            // A capture that cannot be served says so to requests; a free comes to its end.
            let _ = pools.see(context, stream);
            if pools.keep(context, addr, stream)? {
                return Ok(());
            }
        }
        context.free(addr, stream)
    }

    /// # Safety
    /// As for [`Torch::malloc`].
    unsafe fn record_stream(&self, addr: u64, raw: *mut c_void) -> Result<()> {
        let known = |slot: &OnceLock<Result<Arc<Context>>>| {
            slot.get()
                .and_then(|opened| opened.as_ref().ok())
                .is_some_and(|context| context.has(addr))
        };
        let device = self.devices.iter().position(known).ok_or_else(|| {
            let text = format!("no block of any device begins at {addr:#x}");
            Failure::new(VRAMP_ERROR_UNKNOWN_POINTER, text)
        })?;
        let context = self.context(device as c_int)?;
        // SAFETY: this function's contract is the same.
        let stream = unsafe { context.adopt(raw) }?;
        if self.pools[device].any_open() {
            let _ = self.pools[device].see(context, stream);
        }
        context.record_use(addr, stream)
    }

    fn set_fraction(&self, fraction: f64, device: c_int) -> Result<()> {
        if let Some(opened) = self.slot(device)?.get() {
            return opened.as_ref().map_err(Failure::clone)?.set_fraction(fraction);
        }
        if !(fraction > 0.0 && fraction <= 1.0) {
            let text = format!("{fraction} is no fraction: use one above 0, up to 1");
            return Err(Failure::new(VRAMP_ERROR_RANGE, text));
        }
        let mut fractions = self.fractions.lock().unwrap_or_else(PoisonError::into_inner);
        fractions[device as usize] = Some(fraction);
        Ok(())
    }

    fn pools(&self, device: c_int) -> Result<&Pools> {
        self.slot(device)?;
        Ok(&self.pools[device as usize])
    }

    fn begin_pool(&self, device: c_int, id: PoolId) -> Result<()> {
        let context = self.context(device)?;
        // The default stream, where graphs are most often launched: their memory waits for it.
        // SAFETY: null is a stream of every device.
        unsafe { context.adopt(std::ptr::null_mut()) }?;
        self.pools(device)?.begin(context, id);
        Ok(())
    }

    /// The number by which the rest of the interface knows a device's allocator.
    fn handle(&self, device: c_int) -> Result<vramp_allocator_t> {
        let context = self.context(device)?;
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = &mut handles[device as usize];
        if handle.id == 0 {
            *handle = handles::insert(Arc::clone(context))?;
        }
        Ok(*handle)
    }
}

/// Throws the thread's last failure, or prints it in a process that has no libstdc++ to throw by.
///
/// Callers own nothing that needs dropping.
fn raise() {
    throw_last_failure();
    let text = last_text();
    tell(|| Err(Failure::new(VRAMP_ERROR_INTERNAL, text)));
}

/// Prints a failure that the caller cannot be told of.
#[cold]
fn print(failure: &Failure) {
    static SO_FAR: AtomicU32 = AtomicU32::new(0);
    let so_far = SO_FAR.fetch_add(1, Ordering::Relaxed);
    if so_far < PRINTED {
        // Where nothing can be printed nothing is lost that could be saved.
        let _ = writeln!(std::io::stderr(), "vramp: {failure}");
    } else if so_far == PRINTED {
        let _ = writeln!(std::io::stderr(), "vramp: further failures are not printed");
    }
}

/// Makes a call whose caller cannot be told of a failure: it is printed.
fn tell(call: impl FnOnce() -> Result<()>) {
    if let Err(failure) = contain(call) {
        let _ = contain(|| {
            print(&failure);
            Ok(())
        });
    }
}

/// Memory for PyTorch's global route. On failure it throws a C++ `std::runtime_error`, whose text
/// begins with "CUDA out of memory" if that is why; in a process without libstdc++ it prints the
/// text and returns null.
///
/// # Safety
/// `stream` is null or a stream of the device that lives as long as the process uses the device,
/// and a C++ caller is ready to catch.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vramp_torch_malloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: this function's contract says so.
    if let Ok(addr) = contain(|| unsafe { TORCH.malloc(size, device, stream) }) {
        return addr.number() as *mut c_void;
    }
    raise();
    std::ptr::null_mut()
}

/// Memory for PyTorch's MemPool route: null on failure, which PyTorch turns into
/// `torch.OutOfMemoryError`. vramp_last_error has the text; what is not a lack of memory is printed.
///
/// # Safety
/// `stream` is null or a stream of the device that lives as long as the process uses the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_pool_malloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: this function's contract says so.
    match contain(|| unsafe { TORCH.malloc(size, device, stream) }) {
        Ok(addr) => addr.number() as *mut c_void,
        Err(failure) => {
            if failure.status != VRAMP_ERROR_OUT_OF_MEMORY {
                tell(|| Err(failure));
            }
            std::ptr::null_mut()
        }
    }
}

/// Takes memory of either route back. An address that is null, unknown or free already is printed
/// and changes nothing. The size does not matter.
///
/// # Safety
/// `stream` is null or a stream of the device that lives as long as the process uses the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_free(
    address: *mut c_void,
    size: usize,
    device: c_int,
    stream: *mut c_void,
) {
    // The allocator knows it.
    let _ = size;
    // SAFETY: this function's contract says so.
    tell(|| unsafe { TORCH.free(address as u64, device, stream) });
}

/// For `set_record_stream_fn`: work queued on `stream` so far uses the block.
///
/// # Safety
/// `stream` is null or a stream of the device that lives as long as the process uses the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_record_stream(address: *mut c_void, stream: *mut c_void) {
    // SAFETY: this function's contract says so.
    tell(|| unsafe { TORCH.record_stream(address as u64, stream) });
}

/// For `set_init_fn`. Devices open when they are first used, so there is nothing to do.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_init(device_count: c_int) {
    let _ = device_count;
}

/// For `set_reset_fn`, which `torch.cuda.empty_cache` calls: idle memory goes back to the cards.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_reset() {
    TORCH.opened().for_each(|context| tell(|| context.trim(0)));
}

/// For `set_memory_fraction_fn`: the device's allocator may hold this part of the card, from now on.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_memory_fraction(fraction: f64, device: c_int) {
    tell(|| TORCH.set_fraction(fraction, device));
}

/// For `set_base_alloc_fn`: the start and size of the block that an address lies in. An unknown
/// address is printed and comes back as it is, with size 0.
///
/// # Safety
/// `size` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_base_alloc(
    address: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    let found = contain(|| Ok(TORCH.opened().find_map(|context| context.around(address as u64))));
    let found = found.ok().flatten();
    tell(|| {
        let known = found.map(|(_, len)| len as usize);
        if !size.is_null() {
            // SAFETY: this function's contract says so.
            unsafe { pointers::write(size, known.unwrap_or(0), "size") }?;
        }
        let text = format!("{address:p} lies in no block of any device");
        known.map(|_| ()).ok_or_else(|| Failure::new(VRAMP_ERROR_UNKNOWN_POINTER, text))
    });
    found.map_or(address, |(start, _)| start.number() as *mut c_void)
}

/// For `set_begin_allocate_to_pool`, which PyTorch calls before it begins to capture a graph: what
/// the capture asks for comes from an arena of the pool's. Where there can be none, requests within
/// the capture fail with the reason. The filter is neither called nor kept.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_begin_pool(
    device: c_int,
    pool_first: u64,
    pool_second: u64,
    filter: *const c_void,
) {
    let _ = filter;
    tell(|| TORCH.begin_pool(device, (pool_first, pool_second)));
}

/// For `set_end_allocate_to_pool_fn`, which PyTorch calls after a capture ended well.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_end_pool(device: c_int, pool_first: u64, pool_second: u64) {
    tell(|| TORCH.pools(device)?.end((pool_first, pool_second)));
}

/// For `set_release_pool`, which PyTorch calls for each graph of a pool before it destroys it. The
/// pool's memory comes back with the last one, and with the last block of it that is still held,
/// behind all work queued by then on streams that vramp knows.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_release_pool(device: c_int, pool_first: u64, pool_second: u64) {
    tell(|| TORCH.pools(device)?.release((pool_first, pool_second)));
}

/// The allocator that serves PyTorch's device, for vramp_stats, vramp_audit and vramp_trim. It is
/// made if this is the device's first use, and cannot be closed.
///
/// # Safety
/// `allocator` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_allocator(
    device: c_int,
    allocator: *mut vramp_allocator_t,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(allocator, "allocator")?;
        let handle = TORCH.handle(device)?;
        // SAFETY: this function's contract says so.
        unsafe { pointers::write(allocator, handle, "allocator") }
    })
}

#[cfg(test)]
mod tests;
