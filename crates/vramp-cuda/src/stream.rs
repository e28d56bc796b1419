//! Streams and events.

use vramp_driver::{Call, DriverResult, Event, Stream};

use crate::device::{CudaDriver, refused, symbol};
use crate::sys::{
    CUevent, CUevent_flags, CUresult, CUstream, CUstream_flags, CUstream_st, CUstreamCaptureStatus,
};
use crate::table::Opaque;

/// A stream as the driver names it.
pub(crate) struct RawStream {
    pub(crate) raw: Opaque<CUstream_st>,
    /// False for a stream that someone else made and will destroy.
    pub(crate) owned: bool,
}

impl CudaDriver {
    /// Takes in a stream that someone else made, such as PyTorch's current one, so that work can be
    /// queued on it and events recorded. Null is the default stream. No driver call.
    ///
    /// [`vramp_driver::Driver::destroy_stream`] then only forgets it.
    ///
    /// # Safety
    /// - `raw` is a `CUstream` of this card's primary context, or null.
    /// - It stays alive until `destroy_stream` is called with the id, or the device is dropped.
    pub unsafe fn adopt_stream(&self, raw: *mut std::ffi::c_void) -> Stream {
        let raw: CUstream = raw.cast();
        let stream = RawStream { raw: Opaque(raw), owned: false };
        Stream::from_number(self.streams.insert(stream))
    }
}

pub(crate) fn create_stream(driver: &CudaDriver) -> DriverResult<Stream> {
    let call = Call::CreateStream;
    let _entered = driver.enter(call)?;
    let raw = raw_stream(driver, call)?;
    let stream = RawStream { raw: Opaque(raw), owned: true };
    Ok(Stream::from_number(driver.streams.insert(stream)))
}

fn raw_stream(driver: &CudaDriver, call: Call) -> DriverResult<CUstream> {
    let create = symbol!(driver, call, cuStreamCreate);
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` outlives the call.
    let code = unsafe { create(&mut raw, CUstream_flags::CU_STREAM_NON_BLOCKING.0) };
    driver.settle(call, code, String::new)?;
    Ok(raw)
}

pub(crate) fn destroy_stream(driver: &CudaDriver, stream: Stream) -> DriverResult<()> {
    let call = Call::DestroyStream;
    let _entered = driver.enter(call)?;
    let destroy = symbol!(driver, call, cuStreamDestroy_v2);
    let id = stream.number();
    let claim = driver.streams.claim(id).map_err(refused(call, "stream", id))?;
    outlive(driver, call, claim.object())?;
    if claim.object().owned {
        // SAFETY: the claim says that the stream is ours, alive, and in no other call.
        let code = unsafe { destroy(claim.object().raw.0) };
        driver.settle(call, code, || format!("stream {id:#x}"))?;
    }
    claim.destroyed();
    Ok(())
}

/// Lets the device know when the work that `stream` leaves behind is done, after the stream is
/// gone: the last stream of the device waits for it. The host does not.
fn outlive(driver: &CudaDriver, call: Call, stream: &RawStream) -> DriverResult<()> {
    let destroy = symbol!(driver, call, cuEventDestroy_v2);
    let record = symbol!(driver, call, cuEventRecord);
    let wait = symbol!(driver, call, cuStreamWaitEvent);
    if is_capturing(driver, stream) {
        // Nothing of a capture is running, and an event of it would draw the last stream in.
        return Ok(());
    }
    let departed = departed(driver, call)?;
    let event = raw_event(driver, call)?;
    // SAFETY: the stream is claimed, so it is alive; so is the event.
    let mut code = unsafe { record(event, stream.raw.0) };
    if code == CUresult::CUDA_SUCCESS {
        // SAFETY: the device's last stream lives as long as the device.
        code = unsafe { wait(departed, event, 0) };
    }
    // SAFETY: nobody else knows the event, and a wait that is queued does not need it.
    let _ = unsafe { destroy(event) };
    driver.settle(call, code, || "marking the end of the stream's work".into())
}

fn is_capturing(driver: &CudaDriver, stream: &RawStream) -> bool {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    if let Ok(ask) = driver.cuda.cuStreamIsCapturing.as_ref() {
        // SAFETY: the stream is claimed, so it is alive; `status` outlives the call.
        let _ = unsafe { ask(stream.raw.0, &mut status) };
    }
    status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
}

/// The device's last stream, made when the first other one goes.
fn departed(driver: &CudaDriver, call: Call) -> DriverResult<CUstream> {
    if let Some(departed) = driver.departed.get() {
        return Ok(departed.0);
    }
    let created = raw_stream(driver, call)?;
    let kept = driver.departed.get_or_init(|| Opaque(created)).0;
    if kept != created {
        let destroy = symbol!(driver, call, cuStreamDestroy_v2);
        // SAFETY: another thread's stream was kept; nobody else knows this one.
        let _ = unsafe { destroy(created) };
    }
    Ok(kept)
}

pub(crate) fn synchronize_stream(driver: &CudaDriver, stream: Stream) -> DriverResult<()> {
    let call = Call::SynchronizeStream;
    let _entered = driver.enter(call)?;
    let synchronize = symbol!(driver, call, cuStreamSynchronize);
    let id = stream.number();
    let stream = driver.streams.get(id).map_err(refused(call, "stream", id))?;
    // SAFETY: the stream is held, so it is alive.
    let code = unsafe { synchronize(stream.raw.0) };
    driver.settle(call, code, || format!("stream {id:#x}"))
}

pub(crate) fn create_event(driver: &CudaDriver) -> DriverResult<Event> {
    let call = Call::CreateEvent;
    let _entered = driver.enter(call)?;
    let raw = raw_event(driver, call)?;
    Ok(Event::from_number(driver.events.insert(Opaque(raw))))
}

pub(crate) fn asks_capturing(driver: &CudaDriver, stream: Stream) -> DriverResult<bool> {
    let call = Call::IsCapturing;
    let _entered = driver.enter(call)?;
    // A driver without the call has no graphs either.
    let Ok(ask) = driver.cuda.cuStreamIsCapturing.as_ref() else { return Ok(false) };
    let id = stream.number();
    let stream = driver.streams.get(id).map_err(refused(call, "stream", id))?;
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is held; `status` outlives the call.
    match unsafe { ask(stream.raw.0, &mut status) } {
        // The default stream, while another one captures that waits for it.
        CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => Ok(true),
        code => driver
            .settle(call, code, || format!("stream {id:#x}"))
            .map(|()| status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE),
    }
}

fn raw_event(driver: &CudaDriver, call: Call) -> DriverResult<CUevent> {
    let create = symbol!(driver, call, cuEventCreate);
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` outlives the call.
    let code = unsafe { create(&mut raw, CUevent_flags::CU_EVENT_DISABLE_TIMING.0) };
    driver.settle(call, code, String::new)?;
    Ok(raw)
}

pub(crate) fn destroy_event(driver: &CudaDriver, event: Event) -> DriverResult<()> {
    let call = Call::DestroyEvent;
    let _entered = driver.enter(call)?;
    let destroy = symbol!(driver, call, cuEventDestroy_v2);
    let id = event.number();
    let claim = driver.events.claim(id).map_err(refused(call, "event", id))?;
    // SAFETY: the claim says that the event is ours, alive, and in no other call.
    let code = unsafe { destroy(claim.object().0) };
    driver.settle(call, code, || format!("event {id:#x}"))?;
    claim.destroyed();
    Ok(())
}

pub(crate) fn record(driver: &CudaDriver, event: Event, stream: Stream) -> DriverResult<()> {
    let call = Call::Record;
    let _entered = driver.enter(call)?;
    let record = symbol!(driver, call, cuEventRecord);
    let (event_id, stream_id) = (event.number(), stream.number());
    let event = driver.events.get(event_id).map_err(refused(call, "event", event_id))?;
    let stream = driver.streams.get(stream_id).map_err(refused(call, "stream", stream_id))?;
    // SAFETY: both are held, so they are alive.
    let code = unsafe { record(event.0, stream.raw.0) };
    driver.settle(call, code, || format!("event {event_id:#x} on stream {stream_id:#x}"))
}

pub(crate) fn query(driver: &CudaDriver, event: Event) -> DriverResult<bool> {
    let call = Call::Query;
    let _entered = driver.enter(call)?;
    let query = symbol!(driver, call, cuEventQuery);
    let id = event.number();
    let event = driver.events.get(id).map_err(refused(call, "event", id))?;
    // SAFETY: the event is held, so it is alive.
    match unsafe { query(event.0) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        code => driver.settle(call, code, || format!("event {id:#x}")).map(|()| true),
    }
}

pub(crate) fn wait(driver: &CudaDriver, stream: Stream, event: Event) -> DriverResult<()> {
    let call = Call::Wait;
    let _entered = driver.enter(call)?;
    let wait = symbol!(driver, call, cuStreamWaitEvent);
    let (event_id, stream_id) = (event.number(), stream.number());
    let stream = driver.streams.get(stream_id).map_err(refused(call, "stream", stream_id))?;
    let event = driver.events.get(event_id).map_err(refused(call, "event", event_id))?;
    // SAFETY: both are held, so they are alive; zero is the default flag.
    let code = unsafe { wait(stream.raw.0, event.0, 0) };
    driver.settle(call, code, || format!("stream {stream_id:#x} for event {event_id:#x}"))
}

pub(crate) fn synchronize_event(driver: &CudaDriver, event: Event) -> DriverResult<()> {
    let call = Call::SynchronizeEvent;
    let _entered = driver.enter(call)?;
    let synchronize = symbol!(driver, call, cuEventSynchronize);
    let id = event.number();
    let event = driver.events.get(id).map_err(refused(call, "event", id))?;
    // SAFETY: the event is held, so it is alive.
    let code = unsafe { synchronize(event.0) };
    driver.settle(call, code, || format!("event {id:#x}"))
}
