//! Errors: a status code, a message per thread, and a barrier for panics.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use vramp_alloc::error::{OutOfMemoryReport, Unusable};
pub use vramp_alloc::kind::{Classify, Kind, Room};

use crate::abi::vramp_status_t::{self, *};

/// Why a call failed. One pointer, so that the result of a call that succeeds stays in a register.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}", .0.text)]
pub struct Failure(Box<Reason>);

/// What a [`Failure`] tells.
#[derive(Clone, Debug)]
pub struct Reason {
    /// What it means for the caller.
    pub kind: Kind,
    /// One or several lines: what happened and what to do.
    pub text: String,
    /// State of memory when a request was too large.
    pub report: Option<Arc<OutOfMemoryReport>>,
    /// Tag of the region that the failure is about.
    pub region: Option<String>,
    /// Name of the callback that failed.
    pub callback: Option<String>,
    /// What a full tier lacks.
    pub room: Room,
}

/// Result of a call.
pub type CallResult<T> = std::result::Result<T, Failure>;

pub(crate) type Result<T> = CallResult<T>;

/// Returns the status of a kind of failure in C, and the name of its class of exceptions in Python.
const fn interfaces(kind: Kind) -> (vramp_status_t, &'static str) {
    match kind {
        Kind::Null => (VRAMP_ERROR_NULL, "RangeError"),
        Kind::Text => (VRAMP_ERROR_TEXT, "RangeError"),
        Kind::Option => (VRAMP_ERROR_OPTION, "OptionError"),
        Kind::Device => (VRAMP_ERROR_DEVICE, "DeviceError"),
        Kind::UnknownAllocator | Kind::Closed => (VRAMP_ERROR_UNKNOWN_ALLOCATOR, "ClosedError"),
        Kind::UnknownStream => (VRAMP_ERROR_UNKNOWN_STREAM, "UnknownStreamError"),
        Kind::UnknownPointer => (VRAMP_ERROR_UNKNOWN_POINTER, "UnknownPointerError"),
        Kind::OutOfMemory => (VRAMP_ERROR_OUT_OF_MEMORY, "OutOfMemoryError"),
        Kind::TierFull => (VRAMP_ERROR_OUT_OF_MEMORY, "TierFullError"),
        Kind::Driver => (VRAMP_ERROR_DRIVER, "DriverError"),
        Kind::TooMany => (VRAMP_ERROR_TOO_MANY, "RangeError"),
        Kind::StructSize => (VRAMP_ERROR_STRUCT_SIZE, "VrampError"),
        Kind::InUse => (VRAMP_ERROR_IN_USE, "InUseError"),
        Kind::Range => (VRAMP_ERROR_RANGE, "RangeError"),
        Kind::Inconsistent => (VRAMP_ERROR_INCONSISTENT, "InternalError"),
        Kind::Internal => (VRAMP_ERROR_INTERNAL, "InternalError"),
        Kind::File => (VRAMP_ERROR_FILE, "FileError"),
        Kind::UnknownArena => (VRAMP_ERROR_UNKNOWN_ARENA, "ClosedError"),
        Kind::UnknownGraph => (VRAMP_ERROR_UNKNOWN_GRAPH, "ClosedError"),
        Kind::UnknownLease => (VRAMP_ERROR_UNKNOWN_LEASE, "ClosedError"),
        Kind::Busy => (VRAMP_ERROR_BUSY, "InUseError"),
        Kind::Capture => (VRAMP_ERROR_CAPTURE, "CaptureError"),
        Kind::Unsupported => (VRAMP_ERROR_UNSUPPORTED, "UnsupportedError"),
        Kind::Forked => (VRAMP_ERROR_FORKED, "ForkedError"),
        Kind::Version => (VRAMP_ERROR_VERSION, "VrampError"),
        Kind::UnknownExport => (VRAMP_ERROR_UNKNOWN_EXPORT, "ClosedError"),
        Kind::UnknownPin => (VRAMP_ERROR_UNKNOWN_PIN, "ClosedError"),
        Kind::Ticket => (VRAMP_ERROR_TICKET, "TicketError"),
        Kind::ExportEnded => (VRAMP_ERROR_EXPORT_ENDED, "ExportEndedError"),
        Kind::Exchange => (VRAMP_ERROR_EXCHANGE, "ExchangeError"),
        Kind::NoTiers => (VRAMP_ERROR_NO_TIERS, "ClosedError"),
        Kind::UnknownSpace => (VRAMP_ERROR_UNKNOWN_SPACE, "RangeError"),
        Kind::UnknownReservation => (VRAMP_ERROR_UNKNOWN_RESERVATION, "ClosedError"),
        Kind::UnknownBuffer => (VRAMP_ERROR_UNKNOWN_BUFFER, "ClosedError"),
        Kind::Timeout => (VRAMP_ERROR_TIMEOUT, "LeaseTimeoutError"),
        // In C a request that does not wait has a deadline that is over.
        Kind::NotNow => (VRAMP_ERROR_TIMEOUT, "TierFullError"),
        Kind::Cancelled => (VRAMP_ERROR_CANCELLED, "CancelledError"),
        Kind::Deadlock => (VRAMP_ERROR_DEADLOCK, "DeadlockError"),
        Kind::Contents => (VRAMP_ERROR_CONTENTS, "ContentsError"),
        // Only regions sleep.
        Kind::Region | Kind::Asleep => (VRAMP_ERROR_REGION, "RegionError"),
        Kind::OverReservation => (VRAMP_ERROR_OVER_RESERVATION, "OutOfMemoryError"),
        Kind::Callback => (VRAMP_ERROR_CALLBACK, "CallbackError"),
        Kind::NotKept => (VRAMP_ERROR_NOT_KEPT, "NotKeptError"),
        Kind::KeptBusy => (VRAMP_ERROR_KEPT_BUSY, "KeepTimeoutError"),
        Kind::Torn => (VRAMP_ERROR_TORN, "TornError"),
        Kind::Keeper => (VRAMP_ERROR_KEEPER, "KeepError"),
        Kind::UnknownKept => (VRAMP_ERROR_UNKNOWN_KEPT, "ClosedError"),
    }
}

impl Failure {
    /// Adds what an interface offers against it.
    #[must_use]
    pub fn hint(mut self, hint: &str) -> Failure {
        self.0.text.push_str(hint);
        self
    }

    /// Returns a failure of this kind.
    #[cold]
    pub fn new(kind: Kind, text: impl Into<String>) -> Failure {
        let (report, region, callback, room) = (None, None, None, Room::default());
        Failure(Box::new(Reason { kind, text: text.into(), report, region, callback, room }))
    }

    /// Returns the failure of an error, in the words of this interface.
    #[cold]
    pub fn of(error: &impl Classify) -> Failure {
        let kind = error.kind();
        let region = error.region().map(str::to_owned);
        let text = match (kind, &region) {
            (Kind::UnknownStream, _) => return unknown_stream(),
            (Kind::Asleep, Some(tag)) => format!("the region {tag:?} sleeps: resume it first"),
            _ => error.to_string(),
        };
        let report = error.report().map(|report| Arc::new(report.clone()));
        let callback = error.callback().map(str::to_owned);
        Failure(Box::new(Reason { kind, text, report, region, callback, room: error.room() }))
    }

    /// Returns a failure of the region `tag`.
    #[cold]
    pub(crate) fn of_region(tag: &str, text: impl Into<String>) -> Failure {
        let mut failure = Failure::new(Kind::Region, text);
        failure.0.region = Some(tag.to_owned());
        failure
    }

    /// Returns the status in C.
    pub fn status(&self) -> vramp_status_t {
        interfaces(self.kind).0
    }

    /// Returns the name of the class of exceptions in Python.
    pub fn class(&self) -> &'static str {
        interfaces(self.kind).1
    }
}

impl<E: Classify> From<E> for Failure {
    #[cold]
    fn from(error: E) -> Failure {
        Failure::of(&error)
    }
}

impl Deref for Failure {
    type Target = Reason;

    fn deref(&self) -> &Reason {
        &self.0
    }
}

/// Returns an error in a forked child, before any lock that a thread of the parent may hold.
///
/// # Errors
/// The process is a forked child.
#[inline]
pub fn check_fork() -> Result<()> {
    Ok(Unusable::check_fork()?)
}

/// Returns the error for a stream that the allocator does not know, in the words of this interface.
#[cold]
pub(crate) fn unknown_stream() -> Failure {
    let text = "the stream was forgotten, or is unknown to this allocator: create or adopt one";
    Failure::new(Kind::UnknownStream, text)
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
        Err(failure) => failure.status(),
    }
}

#[cold]
fn internal(panic: &(dyn std::any::Any + Send)) -> Failure {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
    Failure::new(Kind::Internal, format!("internal error, please report it: {text}"))
}

#[cfg(test)]
mod tests {
    use vramp_alloc::error::{Call, DriverError, ErrorKind, FreeError, HostShortage, StreamError};
    use vramp_alloc::graph::{ArenaError, CaptureError, LaunchError};
    use vramp_alloc::sharing::Refusal::WrongSecret;
    use vramp_alloc::sharing::{FetchError, ImportError, OpenError, OpenMemoryError, ServeError};
    use vramp_alloc::{AllocError, Bytes, CreateError, StreamId};
    use vramp_defer::{LeaseRefused, SpillError, TiersError};
    use vramp_tiers::ReserveError;
    use vramp_tiers::disk::DiskTierError;
    use vramp_tiers::host::HostPoolError;
    use vramp_tiers::movers::MoveError;
    use vramp_tiers::regions::RegionError;
    use vramp_tiers::reserve::Refusal;

    use super::*;

    #[test]
    fn a_panic_becomes_an_error_with_its_text() {
        let status = status_of(|| panic!("block {} is twice free", 7));
        assert_eq!(status, VRAMP_ERROR_INTERNAL);
        assert_eq!(last_error_text(), "internal error, please report it: block 7 is twice free");
        assert_eq!(status_of(|| panic!("plain")), VRAMP_ERROR_INTERNAL);
        assert_eq!(last_error_text(), "internal error, please report it: plain");
    }

    fn driver(kind: ErrorKind) -> DriverError {
        let text = std::borrow::Cow::Borrowed("");
        DriverError { call: Call::Record, code: 900, name: text.clone(), kind, detail: text }
    }

    #[test]
    fn each_error_has_one_kind_which_is_a_status_in_c_and_a_class_in_python() {
        let (stream, bytes) = (StreamId::new(1), Bytes::mib(1));
        let captured = || driver(ErrorKind::Capturing);
        let asleep = || Unusable::Asleep { pool: "weights".to_owned() };
        let refusal = || Box::new(Refusal { requested: bytes, spaces: Vec::new(), waiting: 0 });
        let fetched = |error| {
            let error = FetchError::Open(error);
            OpenMemoryError::Import(ImportError::Fetch { index: 1, error })
        };
        let wrong_secret = OpenError::Refused { pid: 7, reason: WrongSecret };
        let undecodable =
            || DiskTierError::Undecodable { len: bytes, compressed: bytes, why: String::new() };
        let no_memory =
            |error| SpillError::NoMemory { error: Box::new(error), failed: None, stuck: false };
        let no_budget =
            |error| SpillError::NoBudget { error: Box::new(error), failed: None, stuck: false };
        let tag = || "weights".to_owned();
        let table: Vec<(Failure, vramp_status_t, &str)> = vec![
            (captured().into(), VRAMP_ERROR_CAPTURE, "CaptureError"),
            (driver(ErrorKind::Other).into(), VRAMP_ERROR_DRIVER, "DriverError"),
            (AllocError::Driver(captured()).into(), VRAMP_ERROR_CAPTURE, "CaptureError"),
            (
                AllocError::HostMemory(HostShortage).into(),
                VRAMP_ERROR_OUT_OF_MEMORY,
                "OutOfMemoryError",
            ),
            (
                AllocError::UnknownStream(stream).into(),
                VRAMP_ERROR_UNKNOWN_STREAM,
                "UnknownStreamError",
            ),
            (AllocError::Fraction(2.0).into(), VRAMP_ERROR_RANGE, "RangeError"),
            (AllocError::Unusable(asleep()).into(), VRAMP_ERROR_REGION, "RegionError"),
            (
                AllocError::Unusable(Unusable::Closed).into(),
                VRAMP_ERROR_UNKNOWN_ALLOCATOR,
                "ClosedError",
            ),
            (FreeError::Driver(captured()).into(), VRAMP_ERROR_CAPTURE, "CaptureError"),
            (FreeError::Unusable(asleep()).into(), VRAMP_ERROR_REGION, "RegionError"),
            (StreamError::Capturing(stream).into(), VRAMP_ERROR_CAPTURE, "CaptureError"),
            (LaunchError::Driver(captured()).into(), VRAMP_ERROR_CAPTURE, "CaptureError"),
            (LaunchError::Unusable(Unusable::Forked).into(), VRAMP_ERROR_FORKED, "ForkedError"),
            (CaptureError::ArenaBusy.into(), VRAMP_ERROR_BUSY, "InUseError"),
            (ArenaError::NotSupported.into(), VRAMP_ERROR_UNSUPPORTED, "UnsupportedError"),
            (CreateError::Rdma.into(), VRAMP_ERROR_OPTION, "OptionError"),
            (
                OpenMemoryError::Open(OpenError::ExporterGone { pid: 7 }).into(),
                VRAMP_ERROR_EXPORT_ENDED,
                "ExportEndedError",
            ),
            (
                fetched(OpenError::Withdrawn { pid: 7 }).into(),
                VRAMP_ERROR_EXPORT_ENDED,
                "ExportEndedError",
            ),
            (wrong_secret.into(), VRAMP_ERROR_TICKET, "TicketError"),
            (
                OpenError::TooManyOpens { pid: 7, limit: 4 }.into(),
                VRAMP_ERROR_EXCHANGE,
                "ExchangeError",
            ),
            (ServeError::Withdrawn.into(), VRAMP_ERROR_UNKNOWN_EXPORT, "ClosedError"),
            (ReserveError::NotNow(refusal()).into(), VRAMP_ERROR_TIMEOUT, "TierFullError"),
            (ReserveError::NeverFits(refusal()).into(), VRAMP_ERROR_OUT_OF_MEMORY, "TierFullError"),
            (ReserveError::TimedOut(refusal()).into(), VRAMP_ERROR_TIMEOUT, "LeaseTimeoutError"),
            (ReserveError::InSpiller(refusal()).into(), VRAMP_ERROR_DEADLOCK, "DeadlockError"),
            (ReserveError::ShutDown(refusal()).into(), VRAMP_ERROR_CANCELLED, "CancelledError"),
            (undecodable().into(), VRAMP_ERROR_CONTENTS, "ContentsError"),
            (DiskTierError::OtherStore.into(), VRAMP_ERROR_FILE, "FileError"),
            (HostPoolError::Config("").into(), VRAMP_ERROR_OPTION, "OptionError"),
            (
                MoveError::Unsettled(Box::new(MoveError::Capturing)).into(),
                VRAMP_ERROR_CAPTURE,
                "CaptureError",
            ),
            (
                MoveError::Cancelled { moved: bytes, of: bytes }.into(),
                VRAMP_ERROR_CANCELLED,
                "CancelledError",
            ),
            (RegionError::Awake { tag: tag() }.into(), VRAMP_ERROR_REGION, "RegionError"),
            (RegionError::InCallback.into(), VRAMP_ERROR_BUSY, "InUseError"),
            (RegionError::After { failed: vec![] }.into(), VRAMP_ERROR_CALLBACK, "CallbackError"),
            (SpillError::Cancelled.into(), VRAMP_ERROR_CANCELLED, "CancelledError"),
            (SpillError::OtherManager.into(), VRAMP_ERROR_UNKNOWN_BUFFER, "ClosedError"),
            (
                SpillError::Refused(LeaseRefused::NoMemory).into(),
                VRAMP_ERROR_TIMEOUT,
                "LeaseTimeoutError",
            ),
            (
                no_memory(AllocError::HostMemory(HostShortage)).into(),
                VRAMP_ERROR_OUT_OF_MEMORY,
                "OutOfMemoryError",
            ),
            (
                no_budget(ReserveError::TimedOut(refusal())).into(),
                VRAMP_ERROR_TIMEOUT,
                "LeaseTimeoutError",
            ),
            (SpillError::Move(MoveError::Capturing).into(), VRAMP_ERROR_CAPTURE, "CaptureError"),
            (TiersError::NoHost.into(), VRAMP_ERROR_OPTION, "OptionError"),
        ];
        for (failure, status, class) in table {
            assert_eq!((failure.status(), failure.class()), (status, class), "{failure:?}");
        }
        let failure = Failure::from(no_budget(ReserveError::NotNow(refusal())));
        assert_eq!(failure.room.needed, Some(bytes));
        assert_eq!(Failure::from(FreeError::Unusable(asleep())).region.as_deref(), Some("weights"));
    }

    #[test]
    fn each_thread_has_its_own_last_error() {
        assert_eq!(last_error_text(), "");
        let _ = status_of(|| Err(Failure::new(Kind::Range, "one\0two")));
        assert_eq!(last_error_text(), "one\\0two");
        std::thread::spawn(|| assert_eq!(last_error_text(), "")).join().unwrap();
        assert_eq!(status_of(|| Ok(())), VRAMP_OK);
        assert_eq!(last_error_text(), "one\\0two");
    }
}
