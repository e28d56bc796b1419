//! Pinned host memory, reached from the host only through copies into and out of slices.

use std::sync::{Mutex, PoisonError};

use vramp_core::Bytes;
use vramp_driver::{Call, HostBuffer, Result};

use crate::device::{CudaDriver, refused, symbol};
use crate::error::{invalid, unsupported};
use crate::memory::size;
use crate::sys::CU_MEMHOSTALLOC_PORTABLE;
use crate::table::Opaque;

/// One pinned allocation.
pub(crate) struct HostMemory {
    start: Opaque<u8>,
    len: Bytes,
    /// One host thread at a time copies in or out. What the device does meanwhile is for its
    /// streams to order.
    copying: Mutex<()>,
}

impl HostMemory {
    /// The first byte of a part, which must lie inside.
    pub(crate) fn part(&self, call: Call, offset: Bytes, len: Bytes) -> Result<*mut u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside || len.is_zero() {
            let whole = self.len;
            return Err(invalid(call, format!("{len} from {offset} on, in a buffer of {whole}")));
        }
        // SAFETY: `offset` lies inside the allocation.
        Ok(unsafe { self.start.0.add(size(offset)) })
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.0
    }
}

pub(crate) fn alloc(driver: &CudaDriver, len: Bytes) -> Result<HostBuffer> {
    let call = Call::AllocHost;
    let _entered = driver.enter(call)?;
    let allocate = symbol!(driver, call, cuMemHostAlloc);
    if !driver.info.capabilities.pinned_host {
        return Err(unsupported(call, "this driver cannot free what it would pin"));
    }
    if len.is_zero() {
        return Err(invalid(call, "zero bytes"));
    }
    let mut start = std::ptr::null_mut();
    // SAFETY: `start` outlives the call.
    let code = unsafe { allocate(&mut start, size(len), CU_MEMHOSTALLOC_PORTABLE) };
    driver.settle(call, code, || len.to_string())?;
    // Host memory is readable from the first moment on, so it must not begin as garbage.
    // SAFETY: the driver just gave us `len` bytes from `start` on.
    unsafe { start.cast::<u8>().write_bytes(0, size(len)) };
    let memory = HostMemory { start: Opaque(start.cast()), len, copying: Mutex::new(()) };
    Ok(HostBuffer::from_number(driver.buffers.insert(memory)))
}

pub(crate) fn free(driver: &CudaDriver, buffer: HostBuffer) -> Result<()> {
    let call = Call::FreeHost;
    let _entered = driver.enter(call)?;
    let free = symbol!(driver, call, cuMemFreeHost);
    let id = buffer.number();
    let claim = driver.buffers.claim(id).map_err(refused(call, "host buffer", id))?;
    // SAFETY: the claim says that the buffer is ours, alive, and in no other call; the driver
    // waits for copies in flight.
    let code = unsafe { free(claim.object().start.0.cast()) };
    driver.settle(call, code, || format!("host buffer {id:#x}"))?;
    claim.destroyed();
    Ok(())
}

pub(crate) fn write(
    driver: &CudaDriver,
    buffer: HostBuffer,
    offset: Bytes,
    bytes: &[u8],
) -> Result<()> {
    let call = Call::AccessHost;
    driver.refuse_if_lost(call)?;
    let id = buffer.number();
    let memory = driver.buffers.get(id).map_err(refused(call, "host buffer", id))?;
    let start = memory.part(call, offset, Bytes::new(bytes.len() as u64))?;
    let _alone = memory.copying.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the part lies inside a living buffer that no reference ever points into, and no
    // other host thread touches it now.
    unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    Ok(())
}

pub(crate) fn read(
    driver: &CudaDriver,
    buffer: HostBuffer,
    offset: Bytes,
    bytes: &mut [u8],
) -> Result<()> {
    let call = Call::AccessHost;
    driver.refuse_if_lost(call)?;
    let id = buffer.number();
    let memory = driver.buffers.get(id).map_err(refused(call, "host buffer", id))?;
    let start = memory.part(call, offset, Bytes::new(bytes.len() as u64))?;
    let _alone = memory.copying.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: as in `write`; the buffer was zeroed when it was made, so every byte is initialised.
    unsafe { start.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
    Ok(())
}
