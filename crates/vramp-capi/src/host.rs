//! Pinned memory of the host in C, from the pool that backs up regions.
//!
//! 1. [`vramp_host_malloc`] takes a part of a block for up to half a block of 1 MiB, and whole blocks in one piece
//!    for more.
//! 2. [`vramp_host_record_use`] notes that work on a stream uses it.
//! 3. [`vramp_host_free`] gives it back: it is allocated again after that work.
//!
//! Deliberately absent: copies, and sizes of blocks of the caller's choice.

pub(crate) mod tables;

use std::ffi::c_void;

use vramp_tiers::HostPool;

use self::tables::HostBlock;
use crate::abi::{vramp_allocator_t, vramp_status_t, vramp_stream_t};
use crate::handles;
use crate::session::Session;
use crate::status::{Failure, Kind, Result, unknown_stream};

impl Session {
    fn host_pool(&self) -> Result<&HostPool> {
        if let Some(pool) = self.host_blocks.pool.get() {
            return Ok(pool);
        }
        let pool = self.own_host_pool()?;
        Ok(self.host_blocks.pool.get_or_init(|| pool))
    }

    fn place_on_host(&self, size: u64) -> Result<*mut c_void> {
        let block = HostBlock::new(self.host_pool()?, size)?;
        let address = block.address()?;
        self.host_blocks.lock().insert(address.addr(), block);
        Ok(address.cast())
    }

    fn record_host_use(&self, address: *mut c_void, stream: vramp_stream_t) -> Result<()> {
        let stream = self.allocator().stream(self.stream(stream)?).ok_or_else(unknown_stream)?;
        let driver = self.allocator().driver();
        let mut blocks = self.host_blocks.lock();
        match blocks.get_mut(&address.addr()).ok_or_else(|| unknown(address))? {
            HostBlock::Small(small) => Ok(small.record_stream(driver, stream)?),
            HostBlock::Whole(whole) => Ok(whole.record_stream(driver, stream)?),
        }
    }

    fn free_on_host(&self, address: *mut c_void) -> Result<()> {
        let block = self.host_blocks.lock().remove(&address.addr());
        block.map(drop).ok_or_else(|| unknown(address))
    }
}

#[cold]
fn unknown(address: *mut c_void) -> Failure {
    let text = format!(
        "no host memory of this allocator begins at {address:p}: it was freed already, belongs to another \
         allocator, or is memory of the device"
    );
    Failure::new(Kind::UnknownPointer, text)
}

/// Allocates pinned memory of the host, which the device reads and writes at the same address. Memory of zero bytes
/// has a unique address too. It is aligned to the power of two that its size is rounded up to, at least 512 bytes
/// and at most 4 KiB. Driver calls only where more memory is pinned, 128 MiB at a time: milliseconds. What is idle
/// is unpinned after some seconds, or with vramp_trim. On failure `*address` is set to null.
///
/// # Safety
/// `address` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_host_malloc(
    allocator: vramp_allocator_t,
    size: usize,
    address: *mut *mut c_void,
) -> vramp_status_t {
    let malloc = |session: &Session| session.place_on_host(size as u64);
    // SAFETY: required by this function's contract.
    unsafe { handles::out_or(allocator, (address, "address"), std::ptr::null_mut(), malloc) }
}

/// Records that work queued on a stream so far uses memory of vramp_host_malloc: once freed, it is allocated again
/// after that work. At most two driver calls.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_host_record_use(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    stream: vramp_stream_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.record_host_use(address, stream))
}

/// Frees memory of vramp_host_malloc. Work that uses it is complete, or recorded with vramp_host_record_use. Never
/// waits. VRAMP_ERROR_UNKNOWN_POINTER for another address, which changes nothing.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_host_free(
    allocator: vramp_allocator_t,
    address: *mut c_void,
) -> vramp_status_t {
    handles::on(allocator, |session| session.free_on_host(address))
}
