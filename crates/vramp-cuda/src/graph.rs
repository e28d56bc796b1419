//! Capturing a stream's work as a graph and launching it again.
//!
//! Only what proving the rules of capture needs: no nodes, no updates, no edges by hand.

use std::sync::Arc;

use vramp_driver::{Call, DriverError, Stream};

use crate::device::{CudaDriver, Entered};
use crate::error::EntryError;
use crate::load::entry;
use crate::stream::RawStream;
use crate::sys::{CUresult, CUstreamCaptureMode, CUstreamCaptureStatus};
use crate::table::{Opaque, Refusal};

/// Stands for the calls of this file, which the contract of a device does not know. Never shown:
/// their errors name the entry point.
const CALL: Call = Call::Record;

/// A captured graph, ready to launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Graph(u64);

/// Which calls a capture forbids to whom (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureMode {
    /// Unsafe calls are refused to every thread.
    Global,
    /// Unsafe calls are refused to the thread that began the capture.
    ThreadLocal,
    /// Nothing is refused.
    Relaxed,
}

impl CaptureMode {
    /// Every mode.
    pub const ALL: [CaptureMode; 3] =
        [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

    fn raw(self) -> CUstreamCaptureMode {
        match self {
            CaptureMode::Global => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        }
    }
}

impl CudaDriver {
    /// From now on, work queued on `stream` becomes a graph instead of running.
    pub fn begin_capture(&self, stream: Stream, mode: CaptureMode) -> Result<(), EntryError> {
        let _entered = self.enter_for("cuStreamBeginCapture_v2")?;
        let begin = entry!(self.cuda, cuStreamBeginCapture_v2);
        let stream = self.held_stream("cuStreamBeginCapture_v2", stream)?;
        // SAFETY: the stream is held, so it is alive.
        let code = unsafe { begin(stream.raw.0, mode.raw()) };
        self.check_entry("cuStreamBeginCapture_v2", code)
    }

    /// Ends a capture and makes what was queued ready to launch.
    ///
    /// # Errors
    /// Of kind [`vramp_driver::ErrorKind::Capturing`] if a forbidden call spoilt the capture; the
    /// stream is then out of capture too.
    pub fn end_capture(&self, stream: Stream) -> Result<Graph, EntryError> {
        let _entered = self.enter_for("cuStreamEndCapture")?;
        let end = entry!(self.cuda, cuStreamEndCapture);
        let instantiate = entry!(self.cuda, cuGraphInstantiateWithFlags);
        let destroy = entry!(self.cuda, cuGraphDestroy);
        let stream = self.held_stream("cuStreamEndCapture", stream)?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is held; `graph` outlives the call.
        let code = unsafe { end(stream.raw.0, &mut graph) };
        self.check_entry("cuStreamEndCapture", code)?;
        let mut ready = std::ptr::null_mut();
        // SAFETY: the driver just made `graph`; `ready` outlives the call.
        let code = unsafe { instantiate(&mut ready, graph, 0) };
        // SAFETY: nobody else knows `graph`, and an instantiated graph does not need it.
        let _ = unsafe { destroy(graph) };
        self.check_entry("cuGraphInstantiateWithFlags", code)?;
        Ok(Graph(self.graphs.insert(Opaque(ready))))
    }

    /// True while work queued on `stream` becomes a graph, even one that is spoilt already.
    pub fn is_capturing(&self, stream: Stream) -> Result<bool, EntryError> {
        let _entered = self.enter_for("cuStreamIsCapturing")?;
        let ask = entry!(self.cuda, cuStreamIsCapturing);
        let stream = self.held_stream("cuStreamIsCapturing", stream)?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is held; `status` outlives the call.
        let code = unsafe { ask(stream.raw.0, &mut status) };
        self.check_entry("cuStreamIsCapturing", code)?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Queues the work of `graph` on `stream`.
    pub fn launch(&self, graph: Graph, stream: Stream) -> Result<(), EntryError> {
        let _entered = self.enter_for("cuGraphLaunch")?;
        let launch = entry!(self.cuda, cuGraphLaunch);
        let stream = self.held_stream("cuGraphLaunch", stream)?;
        let graph = self.graphs.get(graph.0).map_err(unknown("cuGraphLaunch"))?;
        // SAFETY: both are held, so they are alive.
        let code = unsafe { launch(graph.0, stream.raw.0) };
        self.check_entry("cuGraphLaunch", code)
    }

    /// Destroys a graph. A launch in flight still completes.
    pub fn destroy_graph(&self, graph: Graph) -> Result<(), EntryError> {
        let _entered = self.enter_for("cuGraphExecDestroy")?;
        let destroy = entry!(self.cuda, cuGraphExecDestroy);
        let claim = self.graphs.claim(graph.0).map_err(unknown("cuGraphExecDestroy"))?;
        // SAFETY: the claim says that the graph is ours, alive, and in no other call.
        let code = unsafe { destroy(claim.object().0) };
        self.check_entry("cuGraphExecDestroy", code)?;
        claim.destroyed();
        Ok(())
    }

    /// Runs `calls` with this thread exempt from the rules of captures on other streams
    /// (`cuThreadExchangeStreamCaptureMode`).
    pub fn relaxed<R>(&self, calls: impl FnOnce() -> R) -> Result<R, EntryError> {
        let _entered = self.enter_for("cuThreadExchangeStreamCaptureMode")?;
        let exchange = entry!(self.cuda, cuThreadExchangeStreamCaptureMode);
        let mut mode = CaptureMode::Relaxed.raw();
        // SAFETY: `mode` outlives the call.
        let code = unsafe { exchange(&mut mode) };
        self.check_entry("cuThreadExchangeStreamCaptureMode", code)?;
        // Also when the calls panic.
        let _restored = RestoreMode { driver: self, mode };
        Ok(calls())
    }

    fn enter_for(&self, entry: &'static str) -> Result<Entered<'_>, EntryError> {
        self.enter(CALL).map_err(of_entry(entry))
    }

    fn held_stream(
        &self,
        entry: &'static str,
        stream: Stream,
    ) -> Result<Arc<RawStream>, EntryError> {
        self.streams.get(stream.number()).map_err(unknown(entry))
    }

    fn check_entry(&self, entry: &'static str, code: CUresult) -> Result<(), EntryError> {
        self.settle(CALL, code, String::new).map_err(of_entry(entry))
    }
}

/// Gives the thread its own mode back.
struct RestoreMode<'a> {
    driver: &'a CudaDriver,
    mode: CUstreamCaptureMode,
}

impl Drop for RestoreMode<'_> {
    fn drop(&mut self) {
        if let Ok(exchange) = self.driver.cuda.cuThreadExchangeStreamCaptureMode.as_ref() {
            // SAFETY: `mode` outlives the call.
            let _ = unsafe { exchange(&mut self.mode) };
        }
    }
}

fn of_entry(entry: &'static str) -> impl Fn(DriverError) -> EntryError {
    move |error| EntryError { entry, code: error.code, name: error.name.into_owned() }
}

fn unknown(entry: &'static str) -> impl Fn(Refusal) -> EntryError {
    move |refusal| EntryError {
        entry,
        code: CUresult::CUDA_ERROR_INVALID_HANDLE.0.cast_signed(),
        name: refusal.to_string(),
    }
}
