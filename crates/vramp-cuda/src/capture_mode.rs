//! Captures as calls on streams meet them: whether a stream is part of one, and calls beside them.

use std::ptr::null_mut;

use vramp_driver::{Call, CaptureMode, DriverError};

use crate::device::CudaDriver;
use crate::error::EntryError;
use crate::load::entry;
use crate::raw::RawStream;
use crate::sys::{CUresult, CUstreamCaptureMode, CUstreamCaptureStatus};

pub(crate) fn raw_mode(mode: CaptureMode) -> CUstreamCaptureMode {
    match mode {
        CaptureMode::Global => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        CaptureMode::ThreadLocal => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CaptureMode::Relaxed => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
    }
}

/// Whether a stream is part of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CaptureNow {
    /// It is not.
    Outside,
    /// It is part of the valid capture of this number.
    In(u64),
    /// Its capture is invalidated, or the driver does not tell.
    Unknown,
}

/// Returns whether a stream is part of a capture. Reads no array of the driver.
pub(crate) fn capture_now(driver: &CudaDriver, stream: &RawStream) -> CaptureNow {
    // A driver without this call has no captures.
    let Ok(get) = driver.cuda.cuStreamGetCaptureInfo_v3.as_ref() else {
        return CaptureNow::Outside;
    };
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut capture = 0;
    // SAFETY: the stream is held; both outputs outlive the call; null skips the others.
    let code = unsafe {
        get(stream.raw(), &mut status, &mut capture, null_mut(), null_mut(), null_mut(), null_mut())
    };
    match (code, status) {
        (CUresult::CUDA_SUCCESS, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE) => {
            CaptureNow::Outside
        }
        (CUresult::CUDA_SUCCESS, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE) => {
            CaptureNow::In(capture)
        }
        _ => CaptureNow::Unknown,
    }
}

impl CudaDriver {
    /// Runs `calls` with this thread in relaxed capture mode (`cuThreadExchangeStreamCaptureMode`):
    /// captures of other threads then forbid it nothing.
    ///
    /// # Errors
    /// [`EntryError`] if the driver lacks the entry point or refuses the mode.
    pub fn relaxed<R>(&self, calls: impl FnOnce() -> R) -> Result<R, EntryError> {
        const ENTRY: &str = "cuThreadExchangeStreamCaptureMode";
        // A placeholder, because the contract has no such call. The error names the entry point.
        let call = Call::BeginCapture;
        let of_entry = |error: DriverError| EntryError {
            entry: ENTRY,
            code: error.code,
            name: error.name.into_owned(),
        };
        let _entered = self.enter(call).map_err(of_entry)?;
        let exchange = entry!(self.cuda, cuThreadExchangeStreamCaptureMode);
        let mut mode = raw_mode(CaptureMode::Relaxed);
        // SAFETY: `mode` outlives the call.
        let code = unsafe { exchange(&mut mode) };
        self.settle(call, code, String::new).map_err(of_entry)?;
        // Also when the calls panic.
        let _restored = RestoreMode { driver: self, mode };
        Ok(calls())
    }

    /// Runs `call` in relaxed capture mode if the driver supports it. For calls that do not affect
    /// captures, such as pinning memory on a background thread.
    pub(crate) fn beside_captures<R>(&self, call: impl Fn() -> R) -> R {
        self.relaxed(&call).unwrap_or_else(|_| call())
    }
}

/// Restores the capture mode of the thread.
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
