//! What PyTorch's statistics and snapshots need of a device. Reading opens no device: one that was not
//! used has none.

use std::ffi::{c_int, c_void};

use vramp_alloc::StreamId;
use vramp_alloc::history::{BlockState, Trace};

use super::{TORCH, Torch};
use crate::abi::vramp_status_t;
use crate::pointers;
use crate::pointers::write_out;
use crate::session::{SMALL_MAX, Session};
use crate::status::{Result, status_of};

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
    /// 1 for memory of the small pool: of slabs, which serve only requests up to 1 MiB.
    pub is_small: u32,
}

/// Receives one part of memory.
#[allow(non_camel_case_types)]
pub type vramp_torch_visitor_t =
    Option<unsafe extern "C" fn(part: *const vramp_torch_part_t, user: *mut c_void)>;

impl Torch {
    /// Returns statistics of a device: zeros if it was not used. One driver call with the preset vramp; O(n)
    /// in the freed blocks that wait and in the streams.
    pub(super) fn memory(&self, device: c_int) -> Result<vramp_torch_memory_t> {
        let Some(session) = self.opened_on(device)? else {
            return Ok(vramp_torch_memory_t::default());
        };
        let memory = session.reserved_memory()?;
        let card = session.allocator().driver().memory_info()?;
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
            limit: session.allocator().limit().unwrap_or(card.total).count(),
            device_free: card.free.count(),
            device_total: card.total.count(),
        })
    }

    /// Returns all memory of a device by address, that of its regions included, also of those that sleep.
    pub(super) fn parts(&self, device: c_int) -> Result<Vec<vramp_torch_part_t>> {
        let Some(session) = self.opened_on(device)? else { return Ok(Vec::new()) };
        let segments = self.segments(device);
        let mut parts = Vec::new();
        session.in_all_pools(|pool| {
            let trace = pool.snapshot(None);
            parts.extend(parts_of(session, &trace, |addr| segments.has(addr)));
        });
        parts.sort_unstable_by_key(|part| part.address);
        Ok(parts)
    }
}

/// Converts a snapshot. Blocks that only threads' caches hold are free.
fn parts_of(
    session: &Session,
    trace: &Trace,
    is_segment: impl Fn(u64) -> bool,
) -> Vec<vramp_torch_part_t> {
    let mut parts = Vec::new();
    let has_slabs = session.allocator().has_heaps();
    for segment in &trace.segments {
        let index = trace.streams.get(segment.stream.0 as usize).copied().unwrap_or(0);
        let stream = session.raw(StreamId::new(index as u32));
        let is_small_segment = segment.segment_type == "small";
        for block in &segment.blocks {
            let address = block.address.number();
            let size = block.size.count();
            let state = match block.state {
                BlockState::Active if is_segment(address) => 3,
                BlockState::Active if session.has(address) => 1,
                BlockState::PendingFree => 2,
                _ => 0,
            };
            // A thread's cache may have served the block to a request of another size.
            let live = (state == 1).then(|| session.block(address)).flatten();
            let requested = live.map_or(0, |(_, requested, _)| requested);
            let is_small_block = !has_slabs && (1..=2).contains(&state) && size <= SMALL_MAX;
            let is_small = u32::from(is_small_block || is_small_segment);
            parts.push(vramp_torch_part_t { address, size, requested, stream, state, is_small });
        }
    }
    parts
}

/// Returns what PyTorch's statistics need of a device: zeros if it was not used.
///
/// # Safety
/// `memory` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_memory(
    device: c_int,
    memory: *mut vramp_torch_memory_t,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    unsafe { write_out((memory, "memory"), || TORCH.memory(device)) }
}

/// Returns the physical memory that a device's allocator and its regions have reserved, in bytes: zero if it
/// was not used. Memory of a region that sleeps is not reserved. At most one driver call.
///
/// # Safety
/// `reserved` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_reserved(device: c_int, reserved: *mut u64) -> vramp_status_t {
    let find = || match TORCH.opened_on(device)? {
        Some(session) => Ok(session.total_stats()?.reserved.count()),
        None => Ok(0),
    };
    // SAFETY: required by this function's contract.
    unsafe { write_out((reserved, "reserved"), find) }
}

/// Calls `visitor` for each part of a device's reserved memory, by address. There is none if it was not
/// used. No lock is held.
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
        let visitor = pointers::function(visitor, "visitor")?;
        for part in TORCH.parts(device)? {
            // SAFETY: required by this function's contract.
            unsafe { visitor(&part, user) };
        }
        Ok(())
    })
}

/// Resets the peaks of a device, if it was used.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_reset_peaks(device: c_int) -> vramp_status_t {
    status_of(|| {
        if let Some(session) = TORCH.opened_on(device)? {
            session.reset_peaks();
        }
        Ok(())
    })
}
