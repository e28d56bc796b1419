//! Arguments of calls: numbers of bytes and of events, and paths.

use std::path::PathBuf;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString};
use vramp_alloc::Bytes;

use crate::error::refuse;
use crate::python;

/// Returns a number of bytes.
pub fn bytes(py: Python<'_>, size: &Bound<'_, PyAny>, what: &str) -> PyResult<u64> {
    let index = match size.is_instance_of::<PyInt>() {
        true => size.clone(),
        false => size
            .call_method0(intern!(py, "__index__"))
            .ok()
            .filter(|index| index.is_instance_of::<PyInt>())
            .ok_or_else(|| {
                let text = format!("{what} is a number of bytes, and not {}", size.get_type());
                PyTypeError::new_err(text)
            })?,
    };
    index.extract::<u64>().map_err(|_| {
        refuse(py, "RangeError", &format!("{what} is {index}: use a number from 0 to 2**64 - 1"))
    })
}

/// Returns a number of bytes, from an int or a text such as `8GiB`.
pub fn amount(py: Python<'_>, size: &Bound<'_, PyAny>, what: &str) -> PyResult<u64> {
    let Ok(text) = size.cast::<PyString>() else { return bytes(py, size, what) };
    let parsed: Result<Bytes, _> = text.to_cow()?.parse();
    parsed.map(Bytes::count).map_err(|_| {
        refuse(py, "RangeError", &format!("{what} is {text:?}: use a size such as '8GiB'"))
    })
}

/// Returns the number of events to record.
pub fn event_count(py: Python<'_>, events: i64) -> PyResult<u32> {
    u32::try_from(events)
        .map_err(|_| refuse(py, "RangeError", &format!("events is {events}: use 0 to 10,000,000")))
}

/// Returns the text of a path, which may be an object of a class in Python.
pub fn path_text(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<String> {
    let fspath = python::member(py, "os", "fspath")?;
    let path = fspath.call1((path,))?.extract::<PathBuf>()?;
    path.into_os_string().into_string().map_err(|path| {
        PyValueError::new_err(format!("the path {path:?} is not UTF-8: use another name"))
    })
}
