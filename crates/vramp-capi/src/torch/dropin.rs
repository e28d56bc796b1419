//! Entry points for vramp's implementation of PyTorch's allocator class, which is C++ compiled against
//! the user's PyTorch (`python/vramp/torch/allocator.cpp`).
//!
//! Ordinary tensors are blocks of the device's allocator. PyTorch's own caching allocator goes on to
//! serve graphs and memory pools, and takes its *segments* from here. A segment is handed out after all
//! earlier work on its memory, because PyTorch uses it on any stream and in graphs that run later.
//!
//! A block is freed on the stream that it was allocated for, as PyTorch does. Uses on other streams are
//! recorded before.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vramp_alloc::history::{BlockState, Trace};
use vramp_alloc::{Allocation, Bytes, DeviceAddr, StreamId};

use super::{TORCH, Torch};
use crate::abi::vramp_status_t::{self, *};
use crate::context::Context;
use crate::pointers;
use crate::process::Block;
use crate::status::{Failure, Result, check_fork, status_of};

/// Largest request of PyTorch's small pool, in bytes.
const SMALL_MAX: u64 = 1 << 20;

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
    /// 1 for a block of PyTorch's small pool: up to 1 MiB, or among such blocks.
    pub is_small: c_int,
}

fn described(block: Block, requested: u64, stream: u64, device: c_int) -> vramp_torch_block_t {
    let Block { addr: address, len: size, is_small } = block;
    let is_small = c_int::from(is_small);
    vramp_torch_block_t { address, size, requested, stream, device, is_small }
}

/// What the statistics of PyTorch need besides the blocks, in bytes and counts. Of each pair, the first
/// is of memory for requests up to 1 MiB.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(non_camel_case_types)]
pub struct vramp_torch_memory_t {
    /// Physical memory reserved, segments included.
    pub reserved: u64,
    /// Peak of `reserved` since the last reset.
    pub reserved_peak: u64,
    /// Physical memory created so far, in total.
    pub reserved_total: u64,
    /// Physical memory released so far, in total.
    pub released_total: u64,
    /// Part of `reserved` that serves only requests up to 1 MiB.
    pub reserved_small: u64,
    /// Number of freed blocks that other streams may still use.
    pub waiting: [u64; 2],
    /// Bytes of these.
    pub waiting_bytes: [u64; 2],
    /// Number of physical handles created.
    pub created: u64,
    /// Number of physical handles released.
    pub released: u64,
    /// Number of requests that were retried.
    pub retries: u64,
    /// Limit of `reserved`, or the memory of the device.
    pub limit: u64,
    /// Free memory of the device.
    pub device_free: u64,
    /// Memory of the device.
    pub device_total: u64,
}

/// A part of reserved memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub struct vramp_torch_part_t {
    /// Address of its first byte.
    pub address: u64,
    /// Its bytes.
    pub size: u64,
    /// Requested bytes of a block.
    pub requested: u64,
    /// The stream of the block, or the one that used the memory last.
    pub stream: u64,
    /// 0 for free memory, 1 for a block, 2 for a freed block that other streams may still use, 3 for a
    /// segment that PyTorch's own allocator has.
    pub state: u32,
    /// 1 for memory that serves only requests up to 1 MiB.
    pub is_small: u32,
}

/// Receives one part of memory.
#[allow(non_camel_case_types)]
pub type vramp_torch_visitor_t =
    Option<unsafe extern "C" fn(part: *const vramp_torch_part_t, user: *mut c_void)>;

impl Torch {
    /// # Safety
    /// As for [`Torch::malloc`].
    pub(super) unsafe fn malloc_block(
        &self,
        size: u64,
        device: c_int,
        raw: *mut c_void,
    ) -> Result<vramp_torch_block_t> {
        let context = self.context(device)?;
        // SAFETY: this function's contract is the same.
        let stream = unsafe { context.adopt(raw) }?;
        let block = context.place(size, stream)?;
        Ok(described(block, size, raw as u64, device))
    }

    fn block(&self, device: c_int, addr: DeviceAddr) -> Result<vramp_torch_block_t> {
        let context = self.context(device)?;
        let found = context.block(addr.number()).map(|(block, requested, stream)| {
            described(block, requested, context.raw(stream), device)
        });
        found
            .ok_or_else(|| Failure::new(VRAMP_ERROR_UNKNOWN_POINTER, "the block was freed already"))
    }

    /// Frees a block of any device on its own stream.
    pub(super) fn free_block(&self, addr: u64) -> Result<vramp_torch_block_t> {
        check_fork()?;
        for (device, context) in self.opened_by_device() {
            if let Some((block, requested, stream)) = context.free_on_own_stream(addr)? {
                return Ok(described(block, requested, context.raw(stream), device));
            }
        }
        let text = format!("no block of any device begins at {addr:#x}");
        Err(Failure::new(VRAMP_ERROR_UNKNOWN_POINTER, text))
    }

    pub(super) fn find(&self, addr: u64) -> Result<vramp_torch_block_t> {
        check_fork()?;
        let mut opened = self.opened_by_device();
        let found = opened.find(|(_, context)| context.has(addr)).map(|(device, _)| device);
        let unknown = || {
            let text = format!("no block of any device begins at {addr:#x}");
            Failure::new(VRAMP_ERROR_UNKNOWN_POINTER, text)
        };
        self.block(found.ok_or_else(unknown)?, DeviceAddr::new(addr))
    }

    pub(super) fn segment_malloc(&self, device: c_int, size: u64) -> Result<DeviceAddr> {
        let context = self.context(device)?;
        let allocator = context.allocator();
        let stream = self.segments(device).stream(|| context.create_stream())?;
        let segment = allocator.malloc(Bytes::new(size), stream)?;
        // The pool may have made this stream wait for other streams. Streams that use the segment do not
        // wait for this stream, so the work has to be over.
        let waited = match allocator.stream(stream) {
            Some(raw) => allocator.driver().synchronize_stream(raw),
            None => Ok(()),
        };
        if let Err(error) = waited {
            allocator.free(segment, stream)?;
            return Err(error.into());
        }
        let addr = segment.addr();
        self.segments(device).lock().live.insert(addr.number(), segment);
        Ok(addr)
    }

    /// Frees a segment of any device and returns its size.
    pub(super) fn segment_free(&self, addr: u64, may_be_in_use: bool) -> Result<u64> {
        check_fork()?;
        for (device, context) in self.opened_by_device() {
            let removed = self.segments(device).lock().live.remove(&addr);
            let Some(segment) = removed else { continue };
            let allocator = context.allocator();
            let (size, stream) = (segment.requested().count(), segment.stream());
            if may_be_in_use {
                for user in context.adopted_streams() {
                    allocator.record_use(&segment, user)?;
                }
            }
            allocator.free(segment, stream)?;
            return Ok(size);
        }
        let text = format!("no segment of any device begins at {addr:#x}");
        Err(Failure::new(VRAMP_ERROR_UNKNOWN_POINTER, text))
    }

    /// Returns the device of a segment.
    pub(super) fn segment_device(&self, addr: u64) -> Option<c_int> {
        let mut opened = self.opened_by_device().map(|(device, _)| device);
        opened.find(|&device| self.segments(device).lock().live.contains_key(&addr))
    }

    /// Returns statistics of a device. One driver call with the preset vramp; O(n) in the freed blocks that
    /// wait and in the streams.
    pub(super) fn memory(&self, device: c_int) -> Result<vramp_torch_memory_t> {
        let context = self.context(device)?;
        let memory = context.allocator().reserved_memory()?;
        let card = context.allocator().driver().memory_info()?;
        Ok(vramp_torch_memory_t {
            reserved: memory.reserved.current,
            reserved_peak: memory.reserved.peak,
            reserved_total: memory.reserved.allocated,
            released_total: memory.reserved.freed,
            reserved_small: memory.small,
            waiting: memory.waiting,
            waiting_bytes: memory.waiting_bytes,
            created: memory.created,
            released: memory.released,
            retries: memory.retries,
            limit: context.allocator().limit().unwrap_or(card.total).count(),
            device_free: card.free.count(),
            device_total: card.total.count(),
        })
    }

    /// Returns all memory of a device by address.
    pub(super) fn parts(&self, device: c_int) -> Result<Vec<vramp_torch_part_t>> {
        let context = self.context(device)?;
        let trace = context.allocator().snapshot(None);
        let segments = self.segments(device).lock();
        Ok(parts_of(context, &trace, |addr| segments.live.contains_key(&addr)))
    }
}

/// Converts a snapshot. Blocks that only threads' caches hold are free.
fn parts_of(
    context: &Context,
    trace: &Trace,
    is_segment: impl Fn(u64) -> bool,
) -> Vec<vramp_torch_part_t> {
    let mut parts = Vec::new();
    for segment in &trace.segments {
        let index = trace.streams.get(segment.stream.0 as usize).copied().unwrap_or(0);
        let stream = context.raw(StreamId::new(index as u32));
        let is_small_segment = segment.segment_type == "small";
        for block in &segment.blocks {
            let address = block.address.number();
            let size = block.size.count();
            let state = match block.state {
                BlockState::Active if is_segment(address) => 3,
                BlockState::Active if context.has(address) => 1,
                BlockState::PendingFree => 2,
                _ => 0,
            };
            // A thread's cache may have served the block to a request of another size.
            let live = (state == 1).then(|| context.block(address)).flatten();
            let requested = live.map_or(0, |(_, requested, _)| requested);
            let is_small_block = (1..=2).contains(&state) && size <= SMALL_MAX;
            let is_small = u32::from(is_small_block || is_small_segment);
            parts.push(vramp_torch_part_t { address, size, requested, stream, state, is_small });
        }
    }
    parts
}

/// The segments of a device that PyTorch's own allocator has.
#[derive(Debug)]
pub(super) struct Segments(Mutex<SegmentTable>);

#[derive(Debug)]
struct SegmentTable {
    stream: Option<StreamId>,
    /// By address.
    live: BTreeMap<u64, Allocation>,
}

impl Segments {
    pub(super) const fn new() -> Segments {
        Segments(Mutex::new(SegmentTable { stream: None, live: BTreeMap::new() }))
    }

    /// Returns the number of segments.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.lock().live.len()
    }

    fn lock(&self) -> MutexGuard<'_, SegmentTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stream(&self, create: impl FnOnce() -> Result<StreamId>) -> Result<StreamId> {
        let mut table = self.lock();
        if let Some(stream) = table.stream {
            return Ok(stream);
        }
        let stream = create()?;
        table.stream = Some(stream);
        Ok(stream)
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
    status_of(|| {
        pointers::check(block, "block")?;
        // SAFETY: required by this function's contract.
        let placed = unsafe { TORCH.malloc_block(size, device, stream) }?;
        // SAFETY: required by this function's contract.
        unsafe { pointers::write(block, placed, "block") }
    })
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
    status_of(|| {
        pointers::check(block, "block")?;
        let freed = TORCH.free_block(address as u64)?;
        // SAFETY: required by this function's contract.
        unsafe { pointers::write(block, freed, "block") }
    })
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
    status_of(|| {
        pointers::check(block, "block")?;
        let found = TORCH.find(address as u64)?;
        // SAFETY: required by this function's contract.
        unsafe { pointers::write(block, found, "block") }
    })
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

/// Allocates a segment for PyTorch's own allocator. Waits on the host for earlier work on its memory.
///
/// # Safety
/// `address` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_segment_malloc(
    device: c_int,
    size: u64,
    address: *mut *mut c_void,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(address, "address")?;
        let placed = TORCH.segment_malloc(device, size)?;
        // SAFETY: required by this function's contract.
        unsafe { pointers::write(address, placed.number() as *mut c_void, "address") }
    })
}

/// Returns the device of a segment. VRAMP_ERROR_UNKNOWN_POINTER if none begins at the address.
///
/// # Safety
/// `device` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_segment_device(
    address: *mut c_void,
    device: *mut c_int,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(device, "device")?;
        check_fork()?;
        let text = format!("no segment of any device begins at {address:p}");
        let unknown = || Failure::new(VRAMP_ERROR_UNKNOWN_POINTER, text);
        let found = TORCH.segment_device(address as u64).ok_or_else(unknown)?;
        // SAFETY: required by this function's contract.
        unsafe { pointers::write(device, found, "device") }
    })
}

/// Frees a segment; `*size` is its size. With `may_be_in_use`, its memory is reused after all work that
/// is queued now on the streams of the device's allocator; otherwise no work uses it any more.
///
/// # Safety
/// `size` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_segment_free(
    address: *mut c_void,
    may_be_in_use: c_int,
    size: *mut u64,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(size, "size")?;
        let freed = TORCH.segment_free(address as u64, may_be_in_use != 0)?;
        // SAFETY: required by this function's contract.
        unsafe { pointers::write(size, freed, "size") }
    })
}

/// Returns what PyTorch's statistics need of a device. Opens it.
///
/// # Safety
/// `memory` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_memory(
    device: c_int,
    memory: *mut vramp_torch_memory_t,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(memory, "memory")?;
        let found = TORCH.memory(device)?;
        // SAFETY: required by this function's contract.
        unsafe { pointers::write(memory, found, "memory") }
    })
}

/// Returns the physical memory that a device's allocator has reserved, in bytes. At most one driver call.
///
/// # Safety
/// `reserved` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_reserved(device: c_int, reserved: *mut u64) -> vramp_status_t {
    status_of(|| {
        pointers::check(reserved, "reserved")?;
        let bytes = TORCH.context(device)?.allocator().stats()?.reserved.count();
        // SAFETY: required by this function's contract.
        unsafe { pointers::write(reserved, bytes, "reserved") }
    })
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
    status_of(|| {
        pointers::check(block, "block")?;
        check_fork()?;
        let start = TORCH.opened().find_map(|context| context.containing(address as u64));
        let start = start.map_or(address as u64, |(start, _)| start.number());
        let found = TORCH.find(start)?;
        // SAFETY: required by this function's contract.
        unsafe { pointers::write(block, found, "block") }
    })
}

/// Calls `visitor` for each part of a device's reserved memory, by address. No lock is held.
///
/// # Safety
/// `visitor` may be called with `user` on this thread until the call returns, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_visit(
    device: c_int,
    visitor: vramp_torch_visitor_t,
    user: *mut c_void,
) -> vramp_status_t {
    status_of(|| {
        let visitor = visitor
            .ok_or_else(|| Failure::new(VRAMP_ERROR_NULL, "visitor is null: pass a function"))?;
        for part in TORCH.parts(device)? {
            // SAFETY: required by this function's contract.
            unsafe { visitor(&part, user) };
        }
        Ok(())
    })
}

/// Forgets a stream of another library, which may be destroyed afterwards: memory that its work uses waits
/// for an event. Nothing if the device's allocator does not know the stream. VRAMP_ERROR_CAPTURE while it
/// captures a graph.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_stream_forget(device: c_int, stream: *mut c_void) -> vramp_status_t {
    status_of(|| {
        let context = TORCH.context(device)?;
        context.adopted(stream as usize).map_or(Ok(()), |stream| context.forget(stream))
    })
}

/// Resets the peaks of a device.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_reset_peaks(device: c_int) -> vramp_status_t {
    status_of(|| {
        TORCH.context(device)?.allocator().reset_peak_stats();
        Ok(())
    })
}

/// Releases idle memory of all open devices to the driver. Waits on the host for queued work that uses
/// freed memory, as PyTorch does.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_trim() -> vramp_status_t {
    status_of(|| {
        check_fork()?;
        TORCH.opened().try_for_each(|context| {
            context.allocator().wait_for_freed_memory()?;
            context.trim(0)
        })
    })
}

/// Limits the allocator of a device to this fraction of the device's memory, from 0 to 1.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_set_fraction(device: c_int, fraction: f64) -> vramp_status_t {
    status_of(|| TORCH.set_fraction(fraction, device))
}

/// Opens the allocator of a device with the options of VRAMP_CONF, if it is not open. After a failure
/// the call may be repeated with corrected options.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_open(device: c_int) -> vramp_status_t {
    status_of(|| TORCH.context(device).map(|_| ()))
}
