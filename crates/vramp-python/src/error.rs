//! Converts failures to exceptions. The classes are in `vramp._errors`, in Python.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use vramp_capi::process::{Failure, Kind};

use crate::python;

/// Returns the exception of a failure.
#[cold]
pub fn raise(py: Python<'_>, failure: impl Into<Failure>) -> PyErr {
    let failure = failure.into();
    let text = match failure.kind {
        // The text of the C interface has numbers and functions that Python's has not.
        Kind::UnknownAllocator => "the pool is closed: open another one",
        _ => &failure.text,
    };
    let exception = exception(py, failure.class(), text);
    let with_numbers = exception.and_then(|exception| {
        let set = |name: &str, value: u64| exception.setattr(name, value);
        if let Some(report) = &failure.report {
            let short = &report.shortage;
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
        if let Some(tag) = &failure.region {
            exception.setattr("tag", tag)?;
        }
        if let Some(callback) = &failure.callback {
            exception.setattr("callback", callback)?;
        }
        if let Some(needed) = failure.room.needed {
            set("needed", needed.count())?;
        }
        if let Some(capacity) = failure.room.capacity {
            set("capacity", capacity.count())?;
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
