//! What the program asks about memory.

use std::ffi::{c_int, c_uint, c_void};

use crate::driver::{self, Code, SUCCESS};
use crate::ledger::Block;
use crate::process::Process;

/// Members of `CUpointer_attribute`: the context, and the range that an address lies in.
const CONTEXT: c_int = 1;
const RANGE_START: c_int = 11;
const RANGE_SIZE: c_int = 12;

/// # Safety
/// As of `cuMemGetInfo_v2`.
pub unsafe fn info(
    process: &Process,
    driver: &dyn Fn() -> Code,
    free: *mut usize,
    total: *mut usize,
) -> Code {
    let code = driver();
    let Some(place) = driver::current_place() else { return code };
    if code != SUCCESS || free.is_null() || total.is_null() {
        return code;
    }
    // SAFETY: the driver has written it.
    let free = unsafe { &mut *free };
    // SAFETY: as above.
    let total = unsafe { &mut *total };
    // What is idle in the pool is free for the program.
    if let Some(pool) = process.pool_if_open()
        && let Some(stats) = pool.stats(place.device)
    {
        let idle = stats.reserved.saturating_sub(stats.live) as usize;
        *free = free.saturating_add(idle).min(*total);
        // In a group, what the others hold and give back is free too, and what they are guaranteed is not there.
        if let Some(room) = pool.room(place.device) {
            let rest = if pool.is_sleepable() { room.most } else { room.obtainable };
            *total = (*total).min((room.claimed + room.most) as usize);
            *free = ((room.claimed + rest).saturating_sub(stats.live) as usize).min(*total);
        }
    }
    if let Some(limit) = &process.limit {
        *total = (*total).min(limit.bytes() as usize);
        *free = (*free).min(limit.room(place.device) as usize);
    }
    code
}

/// # Safety
/// As of `cuDeviceTotalMem_v2`.
pub unsafe fn total(
    process: &Process,
    driver: &dyn Fn() -> Code,
    total: *mut usize,
    _: c_int,
) -> Code {
    let code = driver();
    if let (SUCCESS, Some(limit), false) = (code, &process.limit, total.is_null()) {
        // SAFETY: the driver has written it.
        let total = unsafe { &mut *total };
        *total = (*total).min(limit.bytes() as usize);
    }
    code
}

/// Returns the block of the pool that contains an address.
fn pooled(process: &Process, address: u64) -> Option<(u64, Block)> {
    process.ledger.containing(address).filter(|(_, block)| block.is_pooled())
}

/// # Safety
/// As of `cuMemGetAddressRange_v2`.
pub unsafe fn address_range(
    process: &Process,
    driver: &dyn Fn() -> Code,
    base: *mut u64,
    size: *mut usize,
    address: u64,
) -> Code {
    // The driver's range is that of a mapping.
    let Some((start, block)) = pooled(process, address) else { return driver() };
    if !base.is_null() {
        // SAFETY: as of the driver's function.
        unsafe { *base = start };
    }
    if !size.is_null() {
        // SAFETY: as above.
        unsafe { *size = block.size as usize };
    }
    SUCCESS
}

/// Writes an attribute that the driver has of the mapping and not of the block. Returns false for others.
///
/// # Safety
/// `data` is null or valid for the attribute.
unsafe fn of_block(start: u64, block: Block, attribute: c_int, data: *mut c_void) -> bool {
    let value = match attribute {
        CONTEXT => block.context as u64,
        RANGE_START => start,
        RANGE_SIZE => block.size,
        _ => return false,
    };
    if !data.is_null() {
        // SAFETY: required by this function's contract: each is a number of 64 bits.
        unsafe { data.cast::<u64>().write_unaligned(value) };
    }
    true
}

/// # Safety
/// As of `cuPointerGetAttribute`.
pub unsafe fn attribute(
    process: &Process,
    driver: &dyn Fn() -> Code,
    data: *mut c_void,
    attribute: c_int,
    address: u64,
) -> Code {
    if let (CONTEXT | RANGE_START | RANGE_SIZE, false) = (attribute, data.is_null())
        && let Some((start, block)) = pooled(process, address)
    {
        // SAFETY: as of the driver's function.
        unsafe { of_block(start, block, attribute, data) };
        return SUCCESS;
    }
    driver()
}

/// # Safety
/// As of `cuPointerGetAttributes`.
pub unsafe fn attributes(
    process: &Process,
    driver: &dyn Fn() -> Code,
    count: c_uint,
    attributes: *mut c_int,
    data: *mut *mut c_void,
    address: u64,
) -> Code {
    let code = driver();
    let block = pooled(process, address)
        .filter(|_| code == SUCCESS && !attributes.is_null() && !data.is_null());
    let Some((start, block)) = block else { return code };
    // SAFETY: the driver has read this many.
    let attributes = unsafe { std::slice::from_raw_parts(attributes, count as usize) };
    // SAFETY: as above.
    let data = unsafe { std::slice::from_raw_parts(data, count as usize) };
    for (&attribute, &data) in attributes.iter().zip(data) {
        // SAFETY: as of the driver's function.
        unsafe { of_block(start, block, attribute, data) };
    }
    code
}
