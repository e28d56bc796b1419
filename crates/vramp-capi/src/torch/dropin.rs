//! Entry points for vramp's implementation of PyTorch's allocator class, which is C++ compiled against
//! the user's PyTorch (`python/vramp/torch/csrc/allocator.h`): tensors as blocks, and what holds for a
//! device.
//!
//! A block is freed on the stream that it was allocated for, as PyTorch does. Uses on other streams are
//! recorded before.
//!
//! `segments.rs` has the memory of PyTorch's own allocator, `statistics.rs` what is read of a device.

use std::ffi::{c_int, c_void};

use vramp_alloc::DeviceAddr;

use super::open::Register;
use super::{TORCH, Torch};
use crate::abi::vramp_observer_t;
use crate::abi::vramp_status_t;
use crate::interface::{User, register_observer};
use crate::pointers::write_out;
use crate::session::Block;
use crate::session::Session;
use crate::status::{Failure, Kind, Result, check_fork, status_of};

/// A block, as PyTorch's statistics need it. Amounts are in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(non_camel_case_types)]
pub struct vramp_torch_block_t {
    /// Address of its first byte.
    pub address: u64,
    /// Usable bytes: those requested, rounded up.
    pub size: u64,
    /// Requested bytes.
    pub requested: u64,
    /// The stream that it was allocated for: a `cudaStream_t`.
    pub stream: u64,
    /// PyTorch's index of the device.
    pub device: c_int,
    /// 1 for a block of PyTorch's small pool: in a slab, which has blocks up to 1 MiB only.
    pub is_small: c_int,
}

fn described(block: Block, requested: u64, stream: u64, device: c_int) -> vramp_torch_block_t {
    let Block { addr: address, len: size, is_small } = block;
    let is_small = c_int::from(is_small);
    vramp_torch_block_t { address, size, requested, stream, device, is_small }
}

impl Torch {
    /// # Safety
    /// As for [`Torch::malloc`].
    pub(super) unsafe fn malloc_block(
        &self,
        size: u64,
        device: c_int,
        raw: *mut c_void,
    ) -> Result<vramp_torch_block_t> {
        let session = self.session(device)?;
        // SAFETY: this function's contract is the same.
        let stream = unsafe { session.adopt(raw) }?;
        let block = session.place(size, stream)?;
        Ok(described(block, size, raw as u64, device))
    }

    fn block(&self, device: c_int, addr: DeviceAddr) -> Result<vramp_torch_block_t> {
        let session = self.session(device)?;
        let found = session.block(addr.number()).map(|(block, requested, stream)| {
            described(block, requested, session.raw(stream), device)
        });
        found.ok_or_else(|| Failure::new(Kind::UnknownPointer, "the block was freed already"))
    }

    /// Frees a block of any device on its own stream.
    pub(super) fn free_block(&self, addr: u64) -> Result<vramp_torch_block_t> {
        check_fork()?;
        for (device, session) in self.opened_by_device() {
            self.shares.withdraw(device, addr);
            if let Some((block, requested, stream)) = session.free_on_own_stream(addr)? {
                return Ok(described(block, requested, session.raw(stream), device));
            }
        }
        let text = format!("no block of any device begins at {addr:#x}");
        Err(Failure::new(Kind::UnknownPointer, text))
    }

    pub(super) fn find(&self, addr: u64) -> Result<vramp_torch_block_t> {
        check_fork()?;
        let mut opened = self.opened_by_device();
        let found = opened.find(|(_, session)| session.has(addr)).map(|(device, _)| device);
        let unknown = || {
            let text = format!("no block of any device begins at {addr:#x}");
            Failure::new(Kind::UnknownPointer, text)
        };
        self.block(found.ok_or_else(unknown)?, DeviceAddr::new(addr))
    }
}

/// Allocates a block of any size, zero included, for work on `stream`. Never throws.
///
/// # Safety
/// `stream` is null or a stream of the device that lives as long as the process uses the device.
/// `block` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_block_malloc(
    device: c_int,
    size: u64,
    stream: *mut c_void,
    block: *mut vramp_torch_block_t,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    let place = || unsafe { TORCH.malloc_block(size, device, stream) };
    // SAFETY: required by this function's contract.
    unsafe { write_out((block, "block"), place) }
}

/// Frees a block on the stream that it was allocated for. `*block` describes it.
/// VRAMP_ERROR_UNKNOWN_POINTER if no block of any device begins at the address.
///
/// # Safety
/// `block` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_block_free(
    address: *mut c_void,
    block: *mut vramp_torch_block_t,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    unsafe { write_out((block, "block"), || TORCH.free_block(address as u64)) }
}

/// Describes the live block that begins at an address. VRAMP_ERROR_UNKNOWN_POINTER if there is none.
///
/// # Safety
/// `block` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_block_find(
    address: *mut c_void,
    block: *mut vramp_torch_block_t,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    unsafe { write_out((block, "block"), || TORCH.find(address as u64)) }
}

/// Records that work queued on `stream` so far uses a block. No driver call.
///
/// # Safety
/// `stream` is null or a stream of the device that lives as long as the process uses the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_block_record(
    address: *mut c_void,
    stream: *mut c_void,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    status_of(|| unsafe { TORCH.record_stream(address as u64, stream) })
}

/// Describes the live block that contains an address. VRAMP_ERROR_UNKNOWN_POINTER if there is none.
/// O(n) in the blocks if the address lies more than 64 KiB behind the start.
///
/// # Safety
/// `block` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_containing(
    address: *mut c_void,
    block: *mut vramp_torch_block_t,
) -> vramp_status_t {
    let find = || {
        check_fork()?;
        let start = TORCH.opened().find_map(|session| session.containing(address as u64));
        TORCH.find(start.map_or(address as u64, |(start, _)| start.number()))
    };
    // SAFETY: required by this function's contract.
    unsafe { write_out((block, "block"), find) }
}

/// Forgets a stream of another library, which may be destroyed afterwards: memory that its work uses waits
/// for an event. Nothing if the device's allocator does not know the stream. VRAMP_ERROR_CAPTURE while it
/// captures a graph.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_stream_forget(device: c_int, stream: *mut c_void) -> vramp_status_t {
    status_of(|| {
        let Some(session) = TORCH.opened_on(device)? else { return Ok(()) };
        session.adopted(stream as usize).map_or(Ok(()), |stream| session.forget(stream))
    })
}

/// Releases idle memory of all open devices to the driver. Waits on the host for queued work that uses
/// freed memory, as PyTorch does.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_trim() -> vramp_status_t {
    status_of(|| {
        check_fork()?;
        TORCH.opened().try_for_each(|session| {
            session.allocator().wait_for_freed_memory()?;
            session.trim(0)
        })
    })
}

/// Limits the allocator of a device to this fraction of the device's memory, from 0 to 1.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_set_fraction(device: c_int, fraction: f64) -> vramp_status_t {
    status_of(|| TORCH.set_fraction(fraction, device))
}

/// Makes `observer` the one observer that PyTorch's class has of a device's allocator: it is called with
/// `user` for every event, from the first one of the device on. Opens no device. Null removes the observer
/// and waits for its calls in progress.
///
/// # Safety
/// `observer` may be called from any thread with `user` until a call with another observer or null has
/// returned. It does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_observe(
    device: c_int,
    observer: vramp_observer_t,
    user: *mut c_void,
) -> vramp_status_t {
    status_of(|| {
        let user = User(user);
        let register = observer.map(|observer| -> Register {
            Box::new(move |session: &Session| {
                // SAFETY: allowed by this function's contract.
                unsafe { register_observer(session, observer, user) }
            })
        });
        TORCH.observe(device, register)
    })
}

/// Returns 1 if the allocator of a device is open, and 0 if no memory of the device was used yet. Opens no
/// device.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_is_open(device: c_int) -> c_int {
    c_int::from(matches!(TORCH.opened_on(device), Ok(Some(_))))
}

/// Opens the allocator of a device with the options of VRAMP_CONF, if it is not open. After a failure
/// the call may be repeated with corrected options.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_open(device: c_int) -> vramp_status_t {
    status_of(|| TORCH.session(device).map(|_| ()))
}
