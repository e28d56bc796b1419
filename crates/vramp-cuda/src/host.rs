//! Pinned host memory, allocated or registered. The host accesses it only through copies.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vramp_core::Bytes;
use vramp_driver::{Call, DriverResult, HostBuffer, HostMemory};

use crate::device::{CudaDriver, refused, symbol};
use crate::error::{invalid, invalid_id, unsupported};
use crate::pinned::{Pinned, Source, Uses, size};
use crate::sys::{CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE};
use crate::table::{Opaque, Refusal};

/// Number of devices of this process that use each registered memory, by its first address. The
/// driver refuses a second registration, and memory registered as portable serves every context.
static REGISTERED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn registered() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    // Nothing panics while holding the lock, so the content is consistent.
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pinned {
    /// Waits for the work that uses the buffer, then frees or unregisters it. No other call, graph
    /// or capture may hold it.
    ///
    /// Memory that several devices registered is unregistered by the last one, in its context. The
    /// others have waited for their copies before, each here.
    pub(crate) fn free(&self, driver: &CudaDriver, call: Call) -> DriverResult<()> {
        self.uses.finish(driver, call)?;
        let what = || format!("host memory of {}", self.len);
        match &self.bytes {
            Source::Allocated { start, .. } => {
                let free = symbol!(driver, call, cuMemFreeHost);
                // SAFETY: the driver returned this address, as the caller ensures no call uses it, and
                // the work that used it is over.
                let code = unsafe { free(start.0.cast()) };
                driver.settle(call, code, what)
            }
            Source::Registered(memory) => {
                let unpin = symbol!(driver, call, cuMemHostUnregister);
                let mut registered = registered();
                let address = memory.as_ptr().addr();
                let users = registered.get_mut(&address);
                let users = users.expect("memory that a device uses is registered");
                if *users > 1 {
                    *users -= 1;
                    return Ok(());
                }
                let code = driver.beside_captures(|| {
                    // SAFETY: it is registered, no other device uses it, and the work that used it is
                    // over.
                    unsafe { unpin(memory.as_ptr().cast()) }
                });
                driver.settle(call, code, what)?;
                registered.remove(&address);
                Ok(())
            }
        }
    }
}

pub(crate) fn alloc(driver: &CudaDriver, len: Bytes) -> DriverResult<HostBuffer> {
    let call = Call::AllocHost;
    let _entered = driver.enter(call)?;
    let allocate = symbol!(driver, call, cuMemHostAlloc);
    if !driver.info.capabilities.pinned_host {
        return Err(unsupported(call, "no pinned host memory"));
    }
    if len.is_zero() {
        return Err(invalid(call, "zero bytes"));
    }
    let mut start = std::ptr::null_mut();
    // SAFETY: `start` outlives the call.
    let code = unsafe { allocate(&mut start, size(len), CU_MEMHOSTALLOC_PORTABLE) };
    driver.settle(call, code, || len.to_string())?;
    // The host may read it at once, so it must be initialised.
    // SAFETY: the driver returned `len` bytes from `start` on.
    unsafe { start.cast::<u8>().write_bytes(0, size(len)) };
    let bytes = Source::Allocated { start: Opaque(start.cast()), copying: Mutex::new(()) };
    Ok(HostBuffer::from_number(driver.buffers.insert(Pinned { bytes, len, uses: Uses::default() })))
}

pub(crate) fn register(driver: &CudaDriver, memory: &Arc<HostMemory>) -> DriverResult<HostBuffer> {
    let call = Call::RegisterHost;
    let _entered = driver.enter(call)?;
    let pin = symbol!(driver, call, cuMemHostRegister_v2);
    if !driver.info.capabilities.pinned_host {
        return Err(unsupported(call, "no pinned host memory"));
    }
    let len = memory.len();
    let mut registered = registered();
    let address = memory.as_ptr().addr();
    if !registered.contains_key(&address) {
        let code = driver.beside_captures(|| {
            // SAFETY: the memory is whole pages of this process, and lives until it is unregistered.
            unsafe { pin(memory.as_ptr().cast(), size(len), CU_MEMHOSTREGISTER_PORTABLE) }
        });
        driver.settle(call, code, || len.to_string())?;
    }
    *registered.entry(address).or_insert(0) += 1;
    let bytes = Source::Registered(Arc::clone(memory));
    Ok(HostBuffer::from_number(driver.buffers.insert(Pinned { bytes, len, uses: Uses::default() })))
}

pub(crate) fn free(driver: &CudaDriver, buffer: HostBuffer) -> DriverResult<()> {
    let call = Call::FreeHost;
    let _entered = driver.enter(call)?;
    let id = buffer.number();
    let claim = driver.buffers.claim(id).map_err(|refusal| match refusal {
        Refusal::Unknown => refused(call, "host buffer", id)(refusal),
        Refusal::InUse => invalid_id(
            call,
            format!(
                "host buffer {id:#x}: in use by a concurrent call, or by a capture or graph that \
                 copies from or to it; destroy the graph and what is instantiated from it first"
            ),
        ),
    })?;
    claim.object().free(driver, call)?;
    claim.destroyed();
    Ok(())
}

const INSIDE: &str = "the part was checked to lie inside";

pub(crate) fn write(
    driver: &CudaDriver,
    buffer: HostBuffer,
    offset: Bytes,
    bytes: &[u8],
) -> DriverResult<()> {
    let call = Call::AccessHost;
    driver.refuse_if_lost(call)?;
    let id = buffer.number();
    let memory = driver.buffers.get(id).map_err(refused(call, "host buffer", id))?;
    let start = memory.part(call, offset, Bytes::new(bytes.len() as u64))?;
    match &memory.bytes {
        Source::Allocated { copying, .. } => {
            let _alone = copying.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: the part lies inside a live buffer that no reference points into, and no other
            // host thread accesses it now.
            unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        Source::Registered(memory) => memory.write(offset, bytes).expect(INSIDE),
    }
    Ok(())
}

pub(crate) fn read(
    driver: &CudaDriver,
    buffer: HostBuffer,
    offset: Bytes,
    bytes: &mut [u8],
) -> DriverResult<()> {
    let call = Call::AccessHost;
    driver.refuse_if_lost(call)?;
    let id = buffer.number();
    let memory = driver.buffers.get(id).map_err(refused(call, "host buffer", id))?;
    let start = memory.part(call, offset, Bytes::new(bytes.len() as u64))?;
    match &memory.bytes {
        Source::Allocated { copying, .. } => {
            let _alone = copying.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: as in `write`; the buffer was zeroed when allocated, so every byte is
            // initialised.
            unsafe { start.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        }
        Source::Registered(memory) => memory.read(offset, bytes).expect(INSIDE),
    }
    Ok(())
}
