//! The entry points for PyTorch: functions with the signatures of `CUDAPluggableAllocator` and its
//! hooks.
//!
//! There are two routes. They differ in how an out-of-memory is reported:
//!
//! - *Global*, for `change_current_allocator`: PyTorch does not check the returned address, so
//!   [`vramp_torch_malloc`] throws a C++ exception. Python sees a `RuntimeError` that begins with
//!   "CUDA out of memory".
//! - *MemPool*, for `torch.cuda.MemPool`: PyTorch's own cache calls vramp for segments and accepts
//!   null. [`vramp_torch_pool_malloc`] returns null. PyTorch then frees cached segments, retries,
//!   and raises `torch.OutOfMemoryError`.
//!
//! `pools.rs` serves graphs on the global route, `open.rs` opens devices at their first use.
//!
//! The first malloc on a device opens its allocator, which lives until the process ends, because
//! PyTorch frees memory in destructors of globals. Streams are adopted at their first use.

pub mod dropin;
pub mod open;
pub mod pins;
mod pools;
mod segments;
mod settings;
pub mod sharing;
pub(crate) mod snapshot;
pub mod statistics;
mod unwind;

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use vramp_alloc::DeviceAddr;

use crate::abi::vramp_allocator_t;
use crate::abi::vramp_status_t::{self, *};
use crate::pointers::{Out, write_out};
use crate::print::write_line;
use crate::session::Session;
use crate::session::StreamName;
use crate::status::{Failure, Kind, Result, catch_failure, check_fork, last_error_text, status_of};
use open::DeviceOptions;
use pins::Pins;
use pools::{PoolId, Pools};
use segments::Segments;
use settings::Settings;
use sharing::Shares;
use unwind::throw_last_failure;

/// Maximum number of devices. PyTorch's device index has eight bits.
pub(crate) const DEVICES: usize = 64;
/// Maximum number of failures printed to stderr.
const MAX_PRINTED: u32 = 20;

/// One allocator for each device that PyTorch uses.
struct Torch {
    /// What replaces the environment, in tests.
    settings: OnceLock<Result<Settings>>,
    /// The allocators that are open. A failure is not kept: the next call tries again.
    devices: [OnceLock<Arc<Session>>; DEVICES],
    /// What holds for each device. Locked while a device is opened.
    options: Mutex<[DeviceOptions; DEVICES]>,
    /// Pools that graphs are captured into, by device.
    pools: [Pools; DEVICES],
    /// Memory that PyTorch's own allocator has, by device.
    segments: [Segments; DEVICES],
    /// What graphs pin.
    pins: Pins,
    /// What other processes can open, and what is open of theirs.
    shares: Shares,
    handles: Mutex<[vramp_allocator_t; DEVICES]>,
}

static TORCH: Torch = Torch::new();

impl Torch {
    const fn new() -> Torch {
        Torch {
            settings: OnceLock::new(),
            devices: [const { OnceLock::new() }; DEVICES],
            options: Mutex::new([const { DeviceOptions::NONE }; DEVICES]),
            pools: [const { Pools::new() }; DEVICES],
            segments: [const { Segments::new() }; DEVICES],
            pins: Pins::new(),
            shares: Shares::new(),
            handles: Mutex::new([vramp_allocator_t { id: 0 }; DEVICES]),
        }
    }

    /// Returns the open allocators, by device.
    fn opened(&self) -> impl Iterator<Item = &Arc<Session>> {
        self.devices.iter().filter_map(OnceLock::get)
    }

    /// Returns the open allocators with PyTorch's indices of their devices.
    fn opened_by_device(&self) -> impl Iterator<Item = (c_int, &Arc<Session>)> {
        let numbered = self.devices.iter().enumerate();
        numbered.filter_map(|(device, slot)| Some((device as c_int, slot.get()?)))
    }

    fn segments(&self, device: c_int) -> &Segments {
        &self.segments[device as usize]
    }

    /// # Safety
    /// `raw` is null or a stream of the device that lives as long as the process uses the device.
    #[inline]
    unsafe fn malloc(&self, size: isize, device: c_int, raw: *mut c_void) -> Result<DeviceAddr> {
        let Ok(size) = u64::try_from(size) else {
            let text = format!("{size} bytes cannot be allocated");
            return Err(Failure::new(Kind::Range, text));
        };
        let session = self.session(device)?;
        // SAFETY: this function's contract is the same.
        let stream = unsafe { session.adopt(raw) }?;
        let pools = &self.pools[device as usize];
        let attached = if pools.any_open() { pools.attach(session, stream) } else { Ok(None) };
        let placed = attached.and_then(|home| match home {
            Some(home) => session.place_in(home, size, stream),
            None => session.place(size, stream),
        });
        placed.map(|block| DeviceAddr::new(block.addr)).map_err(|failure| {
            let text = match failure.kind {
                Kind::OutOfMemory => {
                    format!("CUDA out of memory on device {device}. vramp: {}", failure.text)
                }
                _ => format!("vramp on device {device}: {}", failure.text),
            };
            Failure::new(failure.kind, text)
        })
    }

    /// # Safety
    /// As for [`Torch::malloc`].
    #[inline]
    unsafe fn free(&self, addr: u64, device: c_int, raw: *mut c_void) -> Result<()> {
        let session = self.session(device)?;
        // SAFETY: this function's contract is the same.
        let stream = unsafe { session.adopt(raw) }?;
        self.shares.withdraw(device, addr);
        let pools = &self.pools[device as usize];
        if pools.any_open() {
            // An error is reported to allocations in the capture. A free must succeed.
            let _ = pools.attach(session, stream);
            if pools.free_for_capture(session, addr, stream)? {
                return Ok(());
            }
        }
        // SAFETY: this function's contract is the same.
        unsafe { session.free_named(addr, StreamName::Raw(raw as u64)) }
    }

    /// # Safety
    /// As for [`Torch::malloc`].
    unsafe fn record_stream(&self, addr: u64, raw: *mut c_void) -> Result<()> {
        check_fork()?;
        let known =
            |slot: &OnceLock<Arc<Session>>| slot.get().is_some_and(|session| session.has(addr));
        let device = self.devices.iter().position(known).ok_or_else(|| {
            let text = format!("no block of any device begins at {addr:#x}");
            Failure::new(Kind::UnknownPointer, text)
        })?;
        let session = self.session(device as c_int)?;
        // SAFETY: this function's contract is the same.
        let stream = unsafe { session.adopt(raw) }?;
        if self.pools[device].any_open() {
            let _ = self.pools[device].attach(session, stream);
            self.pools[device].note_use(session, addr, stream);
        }
        session.record_use(addr, stream)
    }

    fn pools(&self, device: c_int) -> Result<&Pools> {
        self.slot(device)?;
        Ok(&self.pools[device as usize])
    }

    fn begin_pool(&self, device: c_int, id: PoolId) -> Result<()> {
        let session = self.session(device)?;
        // Adopts the default stream, on which graphs are most often launched, so that frees wait
        // for it. SAFETY: null is a stream of every device.
        unsafe { session.adopt(std::ptr::null_mut()) }?;
        self.pools(device)?.begin(session, id);
        Ok(())
    }

    /// Makes a stream known that is about to capture, so that regions stay awake from the begin of the
    /// capture on.
    ///
    /// # Safety
    /// As for [`Torch::malloc`].
    pub(super) unsafe fn note_capture(&self, device: c_int, raw: *mut c_void) -> Result<()> {
        // SAFETY: this function's contract is the same.
        unsafe { self.session(device)?.adopt(raw) }.map(drop)
    }
}

/// Checks VRAMP_CONF and VRAMP_DEVICE, and opens nothing.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_check_settings() -> vramp_status_t {
    status_of(|| TORCH.read_settings().map(|_| ()))
}

/// Throws the thread's last failure. Prints it if the process has no libstdc++.
///
/// Callers must not own values that need dropping.
fn raise() {
    throw_last_failure();
    let text = last_error_text();
    print_failure(|| Err(Failure::new(Kind::Internal, text)));
}

/// Prints a failure that cannot be returned to the caller.
#[cold]
fn print(failure: &Failure) {
    static SO_FAR: AtomicU32 = AtomicU32::new(0);
    let so_far = SO_FAR.fetch_add(1, Ordering::Relaxed);
    if so_far < MAX_PRINTED {
        write_line(&format!("vramp: {failure}\n"));
    } else if so_far == MAX_PRINTED {
        write_line("vramp: further failures are not printed\n");
    }
}

/// Runs a call that cannot return an error, and prints a failure.
fn print_failure(call: impl FnOnce() -> Result<()>) {
    if let Err(failure) = catch_failure(call) {
        let _ = catch_failure(|| {
            print(&failure);
            Ok(())
        });
    }
}

/// Allocates memory on PyTorch's global route. On failure it throws a C++ `std::runtime_error`; out
/// of memory, its message begins with "CUDA out of memory". In a process without libstdc++ it
/// prints the message and returns null.
///
/// # Safety
/// `stream` is null or a stream of the device that lives as long as the process uses the device,
/// and the caller is C++ that can catch the exception.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vramp_torch_malloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: required by this function's contract.
    if let Ok(addr) = catch_failure(|| unsafe { TORCH.malloc(size, device, stream) }) {
        return addr.number() as *mut c_void;
    }
    raise();
    std::ptr::null_mut()
}

/// Allocates memory on PyTorch's MemPool route. Returns null on failure, which PyTorch converts to
/// `torch.OutOfMemoryError`. vramp_last_error() has the message. Failures other than out of memory
/// are printed.
///
/// # Safety
/// `stream` is null or a stream of the device that lives as long as the process uses the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_pool_malloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: required by this function's contract.
    match catch_failure(|| unsafe { TORCH.malloc(size, device, stream) }) {
        Ok(addr) => addr.number() as *mut c_void,
        Err(failure) => {
            if failure.status() != VRAMP_ERROR_OUT_OF_MEMORY {
                print_failure(|| Err(failure));
            }
            std::ptr::null_mut()
        }
    }
}

/// Frees memory of either route. An address that is null, unknown or free already is reported on
/// stderr and changes nothing. The size is ignored.
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
    // The allocator records the size itself.
    let _ = size;
    // SAFETY: required by this function's contract.
    print_failure(|| unsafe { TORCH.free(address as u64, device, stream) });
}

/// For `set_record_stream_fn`: records that work queued on `stream` so far uses the block.
///
/// # Safety
/// `stream` is null or a stream of the device that lives as long as the process uses the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_record_stream(address: *mut c_void, stream: *mut c_void) {
    // SAFETY: required by this function's contract.
    print_failure(|| unsafe { TORCH.record_stream(address as u64, stream) });
}

/// For `set_init_fn`. Does nothing: devices are opened at their first use.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_init(device_count: c_int) {
    let _ = device_count;
}

/// For `set_reset_fn`, which `torch.cuda.empty_cache` calls: releases idle memory of all devices.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_reset() {
    TORCH.opened().for_each(|session| print_failure(|| session.trim(0)));
}

/// For `set_memory_fraction_fn`: limits the allocator to this fraction of the device's memory.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_memory_fraction(fraction: f64, device: c_int) {
    print_failure(|| TORCH.set_fraction(fraction, device));
}

/// For `set_base_alloc_fn`: returns the start and size of the block that contains an address. An
/// unknown address is reported on stderr and returned unchanged, with size 0.
///
/// # Safety
/// `size` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_base_alloc(
    address: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    let found = catch_failure(|| {
        check_fork()?;
        Ok(TORCH.opened().find_map(|session| session.containing(address as u64)))
    });
    let found = found.ok().flatten();
    print_failure(|| {
        let known = found.map(|(_, len)| len as usize);
        // SAFETY: required by this function's contract.
        unsafe { Out::write(size, known.unwrap_or(0)) };
        let text = format!("no block of any device contains {address:p}");
        known.map(|_| ()).ok_or_else(|| Failure::new(Kind::UnknownPointer, text))
    });
    found.map_or(address, |(start, _)| start.number() as *mut c_void)
}

/// For `set_begin_allocate_to_pool`, which PyTorch calls before it begins the capture of a graph:
/// allocations of the capture come from the pool's arena. If the arena cannot be created, they fail
/// with its error. The filter is neither called nor stored. The stream of the capture is known with its first
/// allocation or free: regions do not sleep from then on until its end. A caller that knows the stream calls
/// [`vramp_torch_capture_begins`] before.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_begin_pool(
    device: c_int,
    pool_first: u64,
    pool_second: u64,
    filter: *const c_void,
) {
    let _ = filter;
    print_failure(|| TORCH.begin_pool(device, (pool_first, pool_second)));
}

/// Notes that a capture is about to begin on a stream. From its begin to its end regions of the device do not
/// sleep: a pause is VRAMP_ERROR_REGION and names the stream. No driver call.
///
/// # Safety
/// `stream` is null or a stream of the device that lives as long as the process uses the device, or until
/// vramp_torch_stream_forget.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_capture_begins(
    device: c_int,
    stream: *mut c_void,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    status_of(|| unsafe { TORCH.note_capture(device, stream) })
}

/// For `set_end_allocate_to_pool_fn`, which PyTorch calls after a successful capture.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_end_pool(device: c_int, pool_first: u64, pool_second: u64) {
    print_failure(|| TORCH.pools(device)?.end((pool_first, pool_second)));
}

/// For `set_release_pool`, which PyTorch calls before it destroys a graph of a pool. With the last
/// graph, and the last live block of the pool, its memory is reused after all work queued by then
/// on the streams that vramp has adopted.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_release_pool(device: c_int, pool_first: u64, pool_second: u64) {
    print_failure(|| TORCH.pools(device)?.release((pool_first, pool_second)));
}

/// Returns the allocator of a PyTorch device, for vramp_stats, vramp_audit and vramp_trim. Opens it
/// at the device's first use. It cannot be closed.
///
/// # Safety
/// `allocator` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_allocator(
    device: c_int,
    allocator: *mut vramp_allocator_t,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    unsafe { write_out((allocator, "allocator"), || TORCH.handle(device)) }
}

#[cfg(test)]
mod tests;
