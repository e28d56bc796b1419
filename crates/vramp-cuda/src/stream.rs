//! Streams and events.

use vramp_driver::{
    Call, DriverError, DriverResult, ErrorKind, Event, Stream, StreamThread, ThreadNumber,
};

use crate::capture_mode::{CaptureNow, capture_now};
use crate::device::{CudaDriver, refused, symbol};
use crate::raw::RawStream;
use crate::sys::{
    CUevent, CUevent_flags, CUresult, CUstream, CUstream_flags, CUstreamCaptureStatus,
};
use crate::table::Opaque;

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

impl CudaDriver {
    /// Adopts a stream that other code created, such as PyTorch's current one. Null is the default
    /// stream. `CU_STREAM_PER_THREAD` is that of the calling thread, as `Driver::thread_stream` returns it.
    /// No driver call.
    ///
    /// [`vramp_driver::Driver::destroy_stream`] then only removes the id.
    ///
    /// # Safety
    /// - `raw` is a `CUstream` of this card's primary context, or null.
    /// - It stays valid until `destroy_stream` is called with the id, or the device is dropped.
    /// - While a capture that other code began is under way, one thread at a time uses its streams,
    ///   through this device or otherwise. That includes each stream that joins it by waiting for one
    ///   of its events. A capture that this device began is ended by this device; until then no other
    ///   code uses one of its streams while a call of this device with a stream of it runs.
    pub unsafe fn adopt_stream(&self, raw: *mut std::ffi::c_void) -> Stream {
        let raw: CUstream = raw.cast();
        let thread = (raw as usize == PER_THREAD).then(ThreadNumber::current);
        let stream = RawStream::adopted(Opaque(raw), thread);
        Stream::from_number(self.streams.insert(stream))
    }

    /// Returns the `CUstream` of a stream, for code that queues work of its own on it. `None` if the
    /// stream was destroyed or is another device's. Null is the default stream. No driver call.
    ///
    /// It is valid until the stream is destroyed here, or by the code that created it.
    pub fn raw_stream(&self, stream: Stream) -> Option<*mut std::ffi::c_void> {
        self.streams.get(stream.number()).ok().map(|stream| stream.handle().cast())
    }
}

pub(crate) fn create_stream(driver: &CudaDriver) -> DriverResult<Stream> {
    let call = Call::CreateStream;
    let _entered = driver.enter(call)?;
    let raw = raw_stream(driver, call)?;
    Ok(Stream::from_number(driver.streams.insert(RawStream::created(Opaque(raw)))))
}

/// The driver call makes the thread's stream, so that it ends after what the thread keeps from here on.
pub(crate) fn thread_stream(driver: &CudaDriver) -> DriverResult<Stream> {
    let call = Call::CreateStream;
    let _entered = driver.enter(call)?;
    let raw = Opaque(PER_THREAD as CUstream);
    let stream = RawStream::adopted(raw, Some(ThreadNumber::current()));
    is_capturing(driver, call, PER_THREAD as u64, &stream)?;
    Ok(Stream::from_number(driver.streams.insert(stream)))
}

pub(crate) fn stream_thread(driver: &CudaDriver, stream: Stream) -> StreamThread {
    let known = driver.streams.get(stream.number());
    known.map_or(StreamThread::of(None), |known| known.thread())
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
    // Alone, so that no capture begins on it meanwhile.
    let mut turn = driver.turn_alone();
    refuse_capturing(driver, call, id, claim.object())?;
    track_remaining_work(driver, call, claim.object())?;
    if claim.object().owned {
        // SAFETY: the claim proves that the stream is live and in no other call.
        let code = unsafe { destroy(claim.object().raw()) };
        driver.settle(call, code, || format!("stream {id:#x}"))?;
    }
    if let Some(capture) = turn.ended(id) {
        driver.forget_capture(capture);
    }
    claim.destroyed();
    Ok(())
}

/// Makes the tail stream wait for the work of `stream`, so that its completion can be queried after
/// the stream is destroyed. Does not block the host.
fn track_remaining_work(driver: &CudaDriver, call: Call, stream: &RawStream) -> DriverResult<()> {
    let destroy = symbol!(driver, call, cuEventDestroy_v2);
    let record = symbol!(driver, call, cuEventRecord);
    let wait = symbol!(driver, call, cuStreamWaitEvent);
    let tail = tail(driver, call)?;
    let event = raw_event(driver, call)?;
    // SAFETY: the stream is claimed, so it is live; so is the event.
    let mut code = unsafe { record(event, stream.raw()) };
    if code == CUresult::CUDA_SUCCESS {
        // SAFETY: the tail stream lives as long as the device.
        code = unsafe { wait(tail, event, 0) };
    }
    // SAFETY: no other code has the event, and a queued wait does not need it.
    let _ = unsafe { destroy(event) };
    driver.settle(call, code, || "recording the end of the stream's work".into())
}

/// Fails if the stream is part of a capture: destroying it would end the capture, and its earlier
/// work could not be tracked.
fn refuse_capturing(
    driver: &CudaDriver,
    call: Call,
    id: u64,
    stream: &RawStream,
) -> DriverResult<()> {
    let code = match is_capturing(driver, call, id, stream)? {
        true => CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        false => CUresult::CUDA_SUCCESS,
    };
    driver.settle(call, code, || format!("stream {id:#x} captures: end the capture first"))
}

/// Returns true if the stream is part of a capture, also of an invalidated one.
fn is_capturing(
    driver: &CudaDriver,
    call: Call,
    id: u64,
    stream: &RawStream,
) -> DriverResult<bool> {
    // A driver without this call has no graphs.
    let Ok(ask) = driver.cuda.cuStreamIsCapturing.as_ref() else { return Ok(false) };
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the caller holds the stream, so it is live; `status` outlives the call.
    match unsafe { ask(stream.raw(), &mut status) } {
        // The default stream, while a stream that synchronises with it is capturing.
        CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => Ok(true),
        code => driver
            .settle(call, code, || format!("stream {id:#x}"))
            .map(|()| status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE),
    }
}

/// Returns the tail stream, created when the first stream is destroyed.
fn tail(driver: &CudaDriver, call: Call) -> DriverResult<CUstream> {
    if let Some(tail) = driver.tail.get() {
        return Ok(tail.0);
    }
    let created = raw_stream(driver, call)?;
    let kept = driver.tail.get_or_init(|| Opaque(created)).0;
    if kept != created {
        let destroy = symbol!(driver, call, cuStreamDestroy_v2);
        // SAFETY: another thread's stream was kept; no other code has this one.
        let _ = unsafe { destroy(created) };
    }
    Ok(kept)
}

pub(crate) fn synchronize_stream(driver: &CudaDriver, stream: Stream) -> DriverResult<()> {
    let call = Call::SynchronizeStream;
    let _entered = driver.enter(call)?;
    let record = symbol!(driver, call, cuEventRecord);
    let destroy = symbol!(driver, call, cuEventDestroy_v2);
    let id = stream.number();
    let stream = driver.streams.get(id).map_err(refused(call, "stream", id))?;
    let turn = driver.turn();
    if !matches!(capture_now(driver, &stream), CaptureNow::Outside) {
        // The driver would refuse it too, and invalidate the capture.
        let detail = format!("stream {id:#x} captures");
        return Err(DriverError::from_code(call, 900, detail));
    }
    // Waits for an event and not for the stream, which another thread may begin to capture meanwhile.
    // Callers wait for the stream where they could not record an event, so this needs none: without
    // one the stream is waited for, and no capture can begin on it meanwhile.
    let wait_for_stream = || driver.beside_captures(|| synchronize(driver, call, &stream));
    let Ok(event) = raw_event(driver, call) else { return wait_for_stream() };
    // SAFETY: the stream is held, so it is live; so is the event.
    let code = unsafe { record(event, stream.raw()) };
    let waited = if code == CUresult::CUDA_SUCCESS {
        drop(turn);
        // While other streams capture, waiting is refused to a thread that is not relaxed.
        let what = || format!("stream {id:#x}");
        driver.beside_captures(|| wait_for(driver, call, event, what))
    } else {
        wait_for_stream()
    };
    // SAFETY: no other code has the event.
    let _ = unsafe { destroy(event) };
    waited
}

/// Blocks the host until the stream is idle. The caller has a turn, so this is for failures.
pub(crate) fn synchronize(driver: &CudaDriver, call: Call, stream: &RawStream) -> DriverResult<()> {
    let synchronize = symbol!(driver, call, cuStreamSynchronize);
    // SAFETY: the stream is held, so it is live.
    let code = unsafe { synchronize(stream.raw()) };
    driver.settle(call, code, String::new)
}

/// Blocks the host until all work of the context is complete.
pub(crate) fn synchronize_device(driver: &CudaDriver) -> DriverResult<()> {
    let call = Call::SynchronizeStream;
    let _entered = driver.enter(call)?;
    let synchronize = symbol!(driver, call, cuCtxSynchronize);
    // SAFETY: the context was made current.
    let code = driver.beside_captures(|| unsafe { synchronize() });
    driver.settle(call, code, || {
        let why = "a stream that vramp does not know captures a graph, which is invalid now";
        let captures = code == CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        if captures { why.into() } else { "all work of the device".into() }
    })
}

/// Blocks the host until the work before the event's last record is complete.
pub(crate) fn wait_for(
    driver: &CudaDriver,
    call: Call,
    event: CUevent,
    what: impl FnOnce() -> String,
) -> DriverResult<()> {
    let synchronize = symbol!(driver, call, cuEventSynchronize);
    // SAFETY: the caller holds the event, so it is live.
    let code = unsafe { synchronize(event) };
    driver.settle(call, code, what)
}

pub(crate) fn create_event(driver: &CudaDriver) -> DriverResult<Event> {
    let call = Call::CreateEvent;
    let _entered = driver.enter(call)?;
    let raw = raw_event(driver, call)?;
    Ok(Event::from_number(driver.events.insert(Opaque(raw))))
}

pub(crate) fn stream_is_capturing(driver: &CudaDriver, stream: Stream) -> DriverResult<bool> {
    let call = Call::IsCapturing;
    let _entered = driver.enter(call)?;
    let id = stream.number();
    let stream = driver.streams.get(id).map_err(refused(call, "stream", id))?;
    let _turn = driver.turn();
    is_capturing(driver, call, id, &stream)
}

pub(crate) fn raw_event(driver: &CudaDriver, call: Call) -> DriverResult<CUevent> {
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
    // A capture that took in a record of it does not end meanwhile: the driver reads the event then.
    let _turn = driver.turn();
    // SAFETY: the claim proves that the event is live and in no other call.
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
    let _turn = driver.turn();
    // SAFETY: both are held, so they are live.
    let code = unsafe { record(event.0, stream.raw()) };
    driver.settle(call, code, || format!("event {event_id:#x} on stream {stream_id:#x}"))
}

pub(crate) fn record_outside(
    driver: &CudaDriver,
    event: Event,
    stream: Stream,
) -> DriverResult<bool> {
    let call = Call::Record;
    let _entered = driver.enter(call)?;
    let record = symbol!(driver, call, cuEventRecord);
    let (event_id, stream_id) = (event.number(), stream.number());
    let event = driver.events.get(event_id).map_err(refused(call, "event", event_id))?;
    let stream = driver.streams.get(stream_id).map_err(refused(call, "stream", stream_id))?;
    // Meanwhile no capture begins or ends through this device. Only one of other code can take in the
    // record.
    let _turn = driver.turn();
    if is_capturing(driver, call, stream_id, &stream)? {
        return Ok(false);
    }
    // SAFETY: both are held, so they are live.
    let code = unsafe { record(event.0, stream.raw()) };
    let what = || format!("event {event_id:#x} on stream {stream_id:#x}");
    match driver.settle(call, code, what) {
        // The stream's capture is invalidated.
        Err(error) if error.kind == ErrorKind::Capturing => Ok(false),
        recorded => recorded.and_then(|()| Ok(!is_capturing(driver, call, stream_id, &stream)?)),
    }
}

pub(crate) fn query(driver: &CudaDriver, event: Event) -> DriverResult<bool> {
    let call = Call::Query;
    let _entered = driver.enter(call)?;
    let query = symbol!(driver, call, cuEventQuery);
    let id = event.number();
    let event = driver.events.get(id).map_err(refused(call, "event", id))?;
    // SAFETY: the event is held, so it is live.
    match driver.beside_captures(|| unsafe { query(event.0) }) {
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
    let _turn = driver.turn();
    // SAFETY: both are held, so they are live; zero is the default flag.
    let code = unsafe { wait(stream.raw(), event.0, 0) };
    driver.settle(call, code, || format!("stream {stream_id:#x} for event {event_id:#x}"))
}

pub(crate) fn synchronize_event(driver: &CudaDriver, event: Event) -> DriverResult<()> {
    let call = Call::SynchronizeEvent;
    let _entered = driver.enter(call)?;
    let id = event.number();
    let event = driver.events.get(id).map_err(refused(call, "event", id))?;
    // While other streams capture, waiting is refused to a thread that is not relaxed.
    driver.beside_captures(|| wait_for(driver, call, event.0, || format!("event {id:#x}")))
}
