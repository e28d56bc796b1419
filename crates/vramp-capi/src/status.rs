//! Errors: a status code, a message per thread, and a barrier for panics.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use vramp_alloc::error::{Inconsistency, OutOfMemoryReport, StreamError, Unusable, UseError};
use vramp_alloc::graph::{ArenaError, ArenaResetError, CaptureError, LaunchError};
use vramp_alloc::{AllocError, CloseError, CreateError, DriverError, FreeError};
use vramp_driver::ErrorKind;

use crate::abi::vramp_status_t::{self, *};
use crate::device::DeviceError;
use crate::options::OptionError;

/// Why a call failed. One pointer, so that the result of a call that succeeds stays in a register.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}", .0.text)]
pub(crate) struct Failure(Box<Reason>);

#[derive(Clone, Debug)]
pub(crate) struct Reason {
    pub status: vramp_status_t,
    /// One or several lines: what happened and what to do.
    pub text: String,
    /// State of memory when a request was too large.
    pub report: Option<Arc<OutOfMemoryReport>>,
    /// Tag of the region that the failure is about.
    pub region: Option<String>,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    #[cold]
    pub fn new(status: vramp_status_t, text: impl Into<String>) -> Failure {
        Failure(Box::new(Reason { status, text: text.into(), report: None, region: None }))
    }

    /// Returns the failure with another text.
    #[cold]
    pub fn with_text(mut self, text: String) -> Failure {
        self.0.text = text;
        self
    }

    /// Returns a failure of the region `tag`.
    #[cold]
    pub fn of_region(tag: &str, text: impl Into<String>) -> Failure {
        let mut failure = Failure::new(VRAMP_ERROR_REGION, text);
        failure.0.region = Some(tag.to_owned());
        failure
    }
}

impl Deref for Failure {
    type Target = Reason;

    fn deref(&self) -> &Reason {
        &self.0
    }
}

/// Returns an error in a forked child, before any lock that a thread of the parent may hold.
#[inline]
pub(crate) fn check_fork() -> Result<()> {
    Ok(Unusable::check_fork()?)
}

fn status_of_unusable(why: &Unusable) -> vramp_status_t {
    match why {
        Unusable::Forked => VRAMP_ERROR_FORKED,
        _ => VRAMP_ERROR_INCONSISTENT,
    }
}

/// Returns the error for a stream that the allocator does not know, in the words of this interface.
#[cold]
pub(crate) fn unknown_stream() -> Failure {
    let text = "the stream was forgotten, or is unknown to this allocator: create or adopt one";
    Failure::new(VRAMP_ERROR_UNKNOWN_STREAM, text)
}

fn status_of_driver(error: &DriverError) -> vramp_status_t {
    match error.kind {
        ErrorKind::Capturing => VRAMP_ERROR_CAPTURE,
        _ => VRAMP_ERROR_DRIVER,
    }
}

impl From<OptionError> for Failure {
    fn from(error: OptionError) -> Failure {
        Failure::new(VRAMP_ERROR_OPTION, error.to_string())
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Failure {
        Failure::new(VRAMP_ERROR_DEVICE, error.to_string())
    }
}

impl From<CreateError> for Failure {
    fn from(error: CreateError) -> Failure {
        let status = match &error {
            CreateError::Driver(_) => VRAMP_ERROR_DRIVER,
            CreateError::Unusable(why) => status_of_unusable(why),
            _ => VRAMP_ERROR_OPTION,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Failure {
        Failure::new(status_of_driver(&error), error.to_string())
    }
}

impl From<Inconsistency> for Failure {
    fn from(error: Inconsistency) -> Failure {
        Failure::new(VRAMP_ERROR_INCONSISTENT, error.to_string())
    }
}

impl From<Unusable> for Failure {
    fn from(why: Unusable) -> Failure {
        match &why {
            // Only regions sleep, and their pools have their tags.
            Unusable::Asleep { pool: tag } => {
                Failure::of_region(tag, format!("the region {tag:?} sleeps: resume it first"))
            }
            _ => Failure::new(status_of_unusable(&why), why.to_string()),
        }
    }
}

impl From<AllocError> for Failure {
    fn from(error: AllocError) -> Failure {
        let text = error.to_string();
        let status = match error {
            AllocError::OutOfMemory(report) => {
                let report = Some(Arc::from(report));
                return Failure(Box::new(Reason {
                    status: VRAMP_ERROR_OUT_OF_MEMORY,
                    text,
                    report,
                    region: None,
                }));
            }
            AllocError::HostMemory(_) => VRAMP_ERROR_OUT_OF_MEMORY,
            AllocError::UnknownStream(_) => return unknown_stream(),
            AllocError::Driver(error) => return error.into(),
            AllocError::Unusable(why) => return why.into(),
            AllocError::Fraction(_) => VRAMP_ERROR_RANGE,
            AllocError::Arena(_) if error.is_out_of_memory() => VRAMP_ERROR_OUT_OF_MEMORY,
            AllocError::Arena(_) => VRAMP_ERROR_CAPTURE,
            _ => VRAMP_ERROR_DRIVER,
        };
        Failure::new(status, text)
    }
}

impl From<FreeError> for Failure {
    fn from(error: FreeError) -> Failure {
        let status = match error {
            FreeError::Foreign(_) => VRAMP_ERROR_UNKNOWN_POINTER,
            FreeError::UnknownStream { .. } => return unknown_stream(),
            FreeError::Driver(error) => return error.into(),
            FreeError::Unusable(ref why) => status_of_unusable(why),
            _ => VRAMP_ERROR_DRIVER,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<StreamError> for Failure {
    fn from(error: StreamError) -> Failure {
        let status = match error {
            StreamError::Unknown(_) => return unknown_stream(),
            StreamError::Capturing(_) => VRAMP_ERROR_CAPTURE,
            StreamError::Driver(error) => return error.into(),
            StreamError::Unusable(ref why) => status_of_unusable(why),
            _ => VRAMP_ERROR_DRIVER,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<&CloseError> for Failure {
    fn from(error: &CloseError) -> Failure {
        let status = match error {
            CloseError::Capturing { .. } => VRAMP_ERROR_CAPTURE,
            _ => VRAMP_ERROR_DRIVER,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<UseError> for Failure {
    fn from(error: UseError) -> Failure {
        let status = match error {
            UseError::Foreign(_) => VRAMP_ERROR_UNKNOWN_POINTER,
            UseError::UnknownStream(_) => return unknown_stream(),
            UseError::HostMemory(_) => VRAMP_ERROR_OUT_OF_MEMORY,
            _ => VRAMP_ERROR_INCONSISTENT,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<ArenaError> for Failure {
    fn from(error: ArenaError) -> Failure {
        let status = match error {
            ArenaError::NotSupported => VRAMP_ERROR_UNSUPPORTED,
            ArenaError::Capacity { .. } => VRAMP_ERROR_RANGE,
            ArenaError::Unusable(ref why) => status_of_unusable(why),
            ArenaError::HostMemory(_) => VRAMP_ERROR_OUT_OF_MEMORY,
            _ => VRAMP_ERROR_DRIVER,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<ArenaResetError> for Failure {
    fn from(error: ArenaResetError) -> Failure {
        Failure::new(VRAMP_ERROR_BUSY, error.to_string())
    }
}

impl From<CaptureError> for Failure {
    fn from(error: CaptureError) -> Failure {
        let status = match error {
            CaptureError::Alloc(error) => return error.into(),
            CaptureError::ForeignArena => VRAMP_ERROR_UNKNOWN_ARENA,
            CaptureError::ArenaBusy => VRAMP_ERROR_BUSY,
            CaptureError::UnknownStream(_) => return unknown_stream(),
            CaptureError::Unusable(ref why) => status_of_unusable(why),
            _ => VRAMP_ERROR_CAPTURE,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Failure {
        let status = match error {
            LaunchError::Alloc(error) => return error.into(),
            LaunchError::Busy(_) => VRAMP_ERROR_BUSY,
            LaunchError::UnknownStream(_) => return unknown_stream(),
            LaunchError::Capturing(_) => VRAMP_ERROR_CAPTURE,
            LaunchError::Driver(error) => return error.into(),
            LaunchError::Unusable(ref why) => status_of_unusable(why),
            _ => VRAMP_ERROR_DRIVER,
        };
        Failure::new(status, error.to_string())
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Stores the message of a failure as the calling thread's last error.
pub(crate) fn set_last_error(failure: &Failure) {
    let text: String = failure.text.replace('\0', "\\0");
    let text = CString::new(text).unwrap_or_default();
    // An ending thread has no thread-local storage.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// Returns the message of the thread's last failure; empty before the first. Valid until the next.
pub(crate) fn last_error() -> *const c_char {
    const ENDING: &CStr =
        c"the thread is ending, and its messages are gone: vramp_status_name has the status's name";
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(ENDING.as_ptr())
}

/// Returns a copy of the message of the thread's last failure.
pub(crate) fn last_error_text() -> String {
    let copy = LAST.try_with(|last| last.borrow().to_string_lossy().into_owned());
    copy.unwrap_or_default()
}

/// Runs `work` and converts a panic to a failure. Stores a failure as the last error.
#[inline]
pub(crate) fn catch_failure<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    let outcome = outcome.unwrap_or_else(|panic| Err(internal(&*panic)));
    if let Err(failure) = &outcome {
        set_last_error(failure);
    }
    outcome
}

/// Runs `work` as `catch_failure` and returns its status.
#[inline]
pub(crate) fn status_of(work: impl FnOnce() -> Result<()>) -> vramp_status_t {
    match catch_failure(work) {
        Ok(()) => VRAMP_OK,
        Err(failure) => failure.status,
    }
}

#[cold]
fn internal(panic: &(dyn std::any::Any + Send)) -> Failure {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
    Failure::new(VRAMP_ERROR_INTERNAL, format!("internal error, please report it: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_with_its_text() {
        let status = status_of(|| panic!("block {} is twice free", 7));
        assert_eq!(status, VRAMP_ERROR_INTERNAL);
        assert_eq!(last_error_text(), "internal error, please report it: block 7 is twice free");
        assert_eq!(status_of(|| panic!("plain")), VRAMP_ERROR_INTERNAL);
        assert_eq!(last_error_text(), "internal error, please report it: plain");
    }

    #[test]
    fn a_driver_call_that_a_capture_forbids_has_the_status_of_captures() {
        let failed = |kind| {
            let text = std::borrow::Cow::Borrowed("");
            let call = vramp_driver::Call::Record;
            DriverError { call, code: 900, name: text.clone(), kind, detail: text }
        };
        let statuses = |kind| {
            [
                Failure::from(AllocError::Driver(failed(kind))).status,
                Failure::from(FreeError::Driver(failed(kind))).status,
                Failure::from(LaunchError::Driver(failed(kind))).status,
                Failure::from(StreamError::Driver(failed(kind))).status,
                Failure::from(failed(kind)).status,
            ]
        };
        assert_eq!(statuses(ErrorKind::Capturing), [VRAMP_ERROR_CAPTURE; 5]);
        assert_eq!(statuses(ErrorKind::Other), [VRAMP_ERROR_DRIVER; 5]);
    }

    #[test]
    fn each_thread_has_its_own_last_error() {
        assert_eq!(last_error_text(), "");
        let _ = status_of(|| Err(Failure::new(VRAMP_ERROR_RANGE, "one\0two")));
        assert_eq!(last_error_text(), "one\\0two");
        std::thread::spawn(|| assert_eq!(last_error_text(), "")).join().unwrap();
        assert_eq!(status_of(|| Ok(())), VRAMP_OK);
        assert_eq!(last_error_text(), "one\\0two");
    }
}
