//! Memory that other code of the process allocated on the card.
//!
//! 1. [`adopt`] asks the driver what the memory is, and refuses what a copy could not be made of.
//! 2. Until [`forget`] the table of addresses has the range, so fills and copies accept it.
//!
//! Deliberately absent: how long the memory lives, which is the caller's promise.

use vramp_core::{AddrRange, Bytes};
use vramp_driver::{Call, DriverResult};

use crate::addresses::MemoryOf;
use crate::device::{CudaDriver, symbol};
use crate::error::invalid;
use crate::memory::bad;
use crate::sys::{CUmemorytype, CUpointer_attribute, CUresult};

pub(crate) fn adopt(driver: &CudaDriver, range: AddrRange) -> DriverResult<()> {
    let call = Call::AdoptMemory;
    let _entered = driver.enter(call)?;
    let checked = driver.addresses().check_adoptable(range);
    if checked.map_err(bad(call, range))? == MemoryOf::Other {
        check_memory(driver, call, range)?;
        check_mapped(driver, call, range)?;
    }
    // Another thread may have adopted it meanwhile, so this checks it again.
    driver.addresses().insert_adopted(range).map_err(bad(call, range))
}

pub(crate) fn forget(driver: &CudaDriver, range: AddrRange) -> bool {
    driver.addresses().take_adopted(range)
}

/// What the driver says of an address. All zero for one that it does not know.
#[derive(Default)]
struct Pointer {
    kind: u32,
    ordinal: i32,
    is_managed: u32,
    /// The allocation, or the whole reservation of mapped memory.
    start: u64,
    len: u64,
}

/// Refuses what is not device memory of this card in one allocation or reservation.
fn check_memory(driver: &CudaDriver, call: Call, range: AddrRange) -> DriverResult<()> {
    let ask = symbol!(driver, call, cuPointerGetAttributes);
    let mut pointer = Pointer::default();
    let mut wanted = [
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ];
    let mut values = [
        (&raw mut pointer.kind).cast(),
        (&raw mut pointer.ordinal).cast(),
        (&raw mut pointer.is_managed).cast(),
        (&raw mut pointer.start).cast(),
        (&raw mut pointer.len).cast(),
    ];
    let count = wanted.len() as u32;
    // SAFETY: the count is that of both arrays, each value is as wide as its attribute, and all outlive
    // the call.
    let code =
        unsafe { ask(count, wanted.as_mut_ptr(), values.as_mut_ptr(), range.start.number()) };
    driver.settle(call, code, || range.to_string())?;
    let refuse = |why: String| Err(invalid(call, format!("{range}: {why}")));
    match CUmemorytype(pointer.kind) {
        CUmemorytype::CU_MEMORYTYPE_DEVICE => {}
        CUmemorytype::CU_MEMORYTYPE_HOST => {
            return refuse("the memory is the host's: copy it to a buffer".into());
        }
        _ => {
            return refuse("no memory is allocated there: it was freed, or never allocated".into());
        }
    }
    if pointer.is_managed != 0 {
        return refuse("the memory is managed, so the driver moves it: copy it to a buffer".into());
    }
    if u32::try_from(pointer.ordinal) != Ok(driver.info.ordinal) {
        return refuse(format!("the memory is of device {}: adopt it there", pointer.ordinal));
    }
    // The driver's numbers: an overflow would be its error, and refuses the range.
    let end = pointer.start.checked_add(pointer.len);
    match range.checked_end().is_some_and(|own| end.is_some_and(|end| own.number() <= end)) {
        true => Ok(()),
        false => refuse(format!(
            "the allocation there has {} from {:#x} on: adopt a part of one allocation",
            Bytes::new(pointer.len),
            pointer.start
        )),
    }
}

/// Refuses a range with a gap. A plain allocation is found whole by one call, mapped memory by one for
/// each mapping.
fn check_mapped(driver: &CudaDriver, call: Call, range: AddrRange) -> DriverResult<()> {
    let ask = symbol!(driver, call, cuMemGetAddressRange_v2);
    let end = (range.start + range.len).number();
    let mut at = range.start.number();
    while at < end {
        let (mut start, mut len) = (0, 0);
        // SAFETY: both results outlive the call.
        let code = unsafe { ask(&mut start, &mut len, at) };
        if code == CUresult::CUDA_ERROR_NOT_FOUND {
            let detail = format!("{range}: no accessible memory at {at:#x}");
            return Err(invalid(call, detail));
        }
        driver.settle(call, code, || range.to_string())?;
        let next = start.saturating_add(len as u64);
        if next <= at {
            return Err(invalid(call, format!("{range}: the driver finds no memory at {at:#x}")));
        }
        at = next;
    }
    Ok(())
}
