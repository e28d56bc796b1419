//! Fills and copies, only of memory of this device and of those that the caller names.

use std::sync::Arc;

use vramp_core::{AddrRange, DeviceAddr};
use vramp_driver::{Call, DeviceCopy, Driver, DriverResult, HostSlice, Stream};

use crate::device::{CudaDriver, refused, symbol};
use crate::error::invalid;
use crate::memory::{bad, check_peer};
use crate::pinned::{Pinned, size};
use crate::raw::RawStream;
use crate::uses;

pub(crate) fn fill(
    driver: &CudaDriver,
    stream: Stream,
    range: AddrRange,
    byte: u8,
) -> DriverResult<()> {
    let call = Call::Fill;
    let _entered = driver.enter(call)?;
    let fill = symbol!(driver, call, cuMemsetD8Async);
    let stream = held(driver, call, stream)?;
    check_owned(driver, call, range)?;
    let _turn = driver.turn();
    // SAFETY: the stream is held, so it is alive; the range belongs to the device, so no
    // memory of other code is written. Unmapped parts fault on the device and cannot harm the host.
    let code = unsafe { fill(range.start.number(), byte, size(range.len), stream.raw()) };
    driver.settle(call, code, || range.to_string())
}

pub(crate) fn copy(driver: &CudaDriver, stream: Stream, copy: DeviceCopy) -> DriverResult<()> {
    let call = Call::Copy;
    let _entered = driver.enter(call)?;
    let run = symbol!(driver, call, cuMemcpyDtoDAsync_v2);
    let stream = held(driver, call, stream)?;
    let (from, to) = (AddrRange::new(copy.from, copy.len), AddrRange::new(copy.to, copy.len));
    check_owned(driver, call, from)?;
    check_owned(driver, call, to)?;
    if copy.from.number().abs_diff(copy.to.number()) < copy.len.count() {
        return Err(invalid(call, format!("{from} and {to} overlap")));
    }
    let _turn = driver.turn();
    // SAFETY: as in `fill`, for both ranges.
    let code = unsafe { run(copy.to.number(), copy.from.number(), size(copy.len), stream.raw()) };
    driver.settle(call, code, || format!("{from} to {to}"))
}

pub(crate) fn copy_peer(
    driver: &CudaDriver,
    stream: Stream,
    copy: DeviceCopy,
    other: &dyn Driver,
) -> DriverResult<()> {
    let call = Call::CopyPeer;
    check_peer(driver, call, other.info().ordinal)?;
    let their = driver.peer_context(call, other.info().ordinal)?;
    let _entered = driver.enter(call)?;
    let run = symbol!(driver, call, cuMemcpyPeerAsync);
    let stream = held(driver, call, stream)?;
    let (from, to) = (AddrRange::new(copy.from, copy.len), AddrRange::new(copy.to, copy.len));
    let context_of = |range: AddrRange| match other.owns(range) {
        true => Ok(their),
        false => check_owned(driver, call, range).map(|()| driver.context.0),
    };
    let (source, target) = (context_of(from)?, context_of(to)?);
    let _turn = driver.turn();
    // SAFETY: as in `fill`, for both ranges, each of which belongs to the device of its context. Both
    // contexts are retained for as long as this device lives.
    let code = unsafe {
        run(to.start.number(), target, from.start.number(), source, size(copy.len), stream.raw())
    };
    driver.settle(call, code, || format!("{from} to {to}"))
}

pub(crate) fn copy_to_device(
    driver: &CudaDriver,
    stream: Stream,
    from: HostSlice,
    to: DeviceAddr,
) -> DriverResult<()> {
    let call = Call::CopyToDevice;
    let _entered = driver.enter(call)?;
    let run = symbol!(driver, call, cuMemcpyHtoDAsync_v2);
    let id = stream.number();
    let stream = held(driver, call, stream)?;
    let buffer = pinned(driver, call, from)?;
    let start = buffer.part(call, from.offset, from.len)?;
    let range = AddrRange::new(to, from.len);
    check_owned(driver, call, range)?;
    uses::queue_using(driver, call, (id, &stream), &[buffer], || {
        // SAFETY: the device side as in `fill`; the host side lies inside a live buffer, which
        // `queue_using` keeps until the copy is over.
        let code = unsafe { run(to.number(), start.cast(), size(from.len), stream.raw()) };
        driver.settle(call, code, || range.to_string())
    })
}

pub(crate) fn copy_to_host(
    driver: &CudaDriver,
    stream: Stream,
    from: DeviceAddr,
    to: HostSlice,
) -> DriverResult<()> {
    let call = Call::CopyToHost;
    let _entered = driver.enter(call)?;
    let run = symbol!(driver, call, cuMemcpyDtoHAsync_v2);
    let id = stream.number();
    let stream = held(driver, call, stream)?;
    let buffer = pinned(driver, call, to)?;
    let start = buffer.part(call, to.offset, to.len)?;
    let range = AddrRange::new(from, to.len);
    check_owned(driver, call, range)?;
    uses::queue_using(driver, call, (id, &stream), &[buffer], || {
        // SAFETY: as in `copy_to_device`.
        let code = unsafe { run(start.cast(), from.number(), size(to.len), stream.raw()) };
        driver.settle(call, code, || range.to_string())
    })
}

fn held(driver: &CudaDriver, call: Call, stream: Stream) -> DriverResult<Arc<RawStream>> {
    let id = stream.number();
    driver.streams.get(id).map_err(refused(call, "stream", id))
}

fn pinned(driver: &CudaDriver, call: Call, slice: HostSlice) -> DriverResult<Arc<Pinned>> {
    let id = slice.buffer.number();
    driver.buffers.get(id).map_err(refused(call, "host buffer", id))
}

fn check_owned(driver: &CudaDriver, call: Call, range: AddrRange) -> DriverResult<()> {
    driver.addresses().check_owned(range).map_err(bad(call, range))
}
