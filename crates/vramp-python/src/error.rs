//! Converts failures to exceptions. The classes are in `vramp._errors`, in Python.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::process::Error;

use crate::python;

/// Returns the name of the exception's class.
fn class_of(status: vramp_status_t) -> &'static str {
    match status {
        VRAMP_ERROR_OUT_OF_MEMORY | VRAMP_ERROR_OVER_RESERVATION => "OutOfMemoryError",
        VRAMP_ERROR_OPTION => "OptionError",
        VRAMP_ERROR_DEVICE => "DeviceError",
        VRAMP_ERROR_UNKNOWN_ALLOCATOR
        | VRAMP_ERROR_UNKNOWN_EXPORT
        | VRAMP_ERROR_UNKNOWN_PIN
        | VRAMP_ERROR_UNKNOWN_ARENA
        | VRAMP_ERROR_UNKNOWN_GRAPH
        | VRAMP_ERROR_UNKNOWN_LEASE
        | VRAMP_ERROR_UNKNOWN_RESERVATION
        | VRAMP_ERROR_UNKNOWN_BUFFER
        | VRAMP_ERROR_NO_TIERS => "ClosedError",
        VRAMP_ERROR_TICKET => "TicketError",
        VRAMP_ERROR_EXPORT_ENDED => "ExportEndedError",
        VRAMP_ERROR_EXCHANGE => "ExchangeError",
        VRAMP_ERROR_UNKNOWN_STREAM => "UnknownStreamError",
        VRAMP_ERROR_UNKNOWN_POINTER => "UnknownPointerError",
        VRAMP_ERROR_DRIVER => "DriverError",
        VRAMP_ERROR_IN_USE | VRAMP_ERROR_BUSY => "InUseError",
        VRAMP_ERROR_RANGE
        | VRAMP_ERROR_TOO_MANY
        | VRAMP_ERROR_NULL
        | VRAMP_ERROR_TEXT
        | VRAMP_ERROR_UNKNOWN_SPACE => "RangeError",
        VRAMP_ERROR_INCONSISTENT | VRAMP_ERROR_INTERNAL => "InternalError",
        VRAMP_ERROR_FILE => "FileError",
        VRAMP_ERROR_CAPTURE => "CaptureError",
        VRAMP_ERROR_UNSUPPORTED => "UnsupportedError",
        VRAMP_ERROR_FORKED => "ForkedError",
        VRAMP_ERROR_REGION => "RegionError",
        VRAMP_ERROR_TIMEOUT => "LeaseTimeoutError",
        VRAMP_ERROR_DEADLOCK => "DeadlockError",
        VRAMP_ERROR_CANCELLED => "CancelledError",
        VRAMP_ERROR_CONTENTS => "ContentsError",
        VRAMP_OK | VRAMP_ERROR_STRUCT_SIZE | VRAMP_ERROR_VERSION => "VrampError",
    }
}

/// Returns the exception of a failure.
#[cold]
pub fn raise(py: Python<'_>, error: Error) -> PyErr {
    let text = match error.status {
        // The text of the C interface has numbers and functions that Python's has not.
        VRAMP_ERROR_UNKNOWN_ALLOCATOR => "the pool is closed: open another one",
        _ => &error.text,
    };
    let exception = exception(py, class_of(error.status), text);
    let with_numbers = exception.and_then(|exception| {
        if let Some(report) = &error.report {
            let short = &report.shortage;
            let set = |name: &str, value: u64| exception.setattr(name, value);
            set("requested", short.requested.count())?;
            set("reserved", short.reserved.count())?;
            set("allocated", short.used.count())?;
            set("free", short.free.count())?;
            set("largest", short.largest.count())?;
            set("waiting", short.waiting.count())?;
            exception.setattr("limit", short.limit.map(|limit| limit.count()))?;
            exception.setattr("device_free", report.card.map(|card| card.free.count()))?;
            exception.setattr("device_total", report.card.map(|card| card.total.count()))?;
        }
        if let Some(tag) = &error.region {
            exception.setattr("tag", tag)?;
        }
        Ok(exception)
    });
    with_numbers.map_or_else(|error| error, PyErr::from_value)
}

/// Returns an exception of the package's class `class`.
#[cold]
pub fn refuse(py: Python<'_>, class: &str, text: &str) -> PyErr {
    exception(py, class, text).map_or_else(|error| error, PyErr::from_value)
}

fn exception<'py>(py: Python<'py>, class: &str, text: &str) -> PyResult<Bound<'py, PyAny>> {
    python::member(py, "vramp._errors", class)?.call1((text,))
}

/// Returns an instance of a class of results in `vramp._types`.
pub fn result<'py>(
    py: Python<'py>,
    class: &str,
    fields: &Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyAny>> {
    python::member(py, "vramp._types", class)?.call((), Some(fields))
}

/// Returns the exception for an object that has no meaning in another process.
pub fn not_pickled(class: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "a vramp.{class} cannot be pickled or copied, because its memory stays in this process: to share \
         memory with another process send a ticket, vramp.ipc.export(allocation).ticket(), and open it \
         there with vramp.ipc.open(ticket)"
    ))
}
