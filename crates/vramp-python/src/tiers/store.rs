//! Stores of Python in place of a directory.
//!
//! A function of the store is called on a thread that holds no lock of vramp, with the interpreter. The
//! threads that wait for the move do not hold the interpreter: every call of this package that may move
//! contents releases it. An exception is the failure of a move: the contents stay where they were.

use std::sync::Arc;

use pyo3::exceptions::{PyMemoryError, PyOSError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use vramp_core::Bytes;
use vramp_defer::ObjectTier;
use vramp_tiers::disk::{ObjectStore, StoreError};

use super::buffer::contents;
use crate::python;

/// A store of the program.
struct PythonStore {
    put: Py<PyAny>,
    get: Py<PyAny>,
    delete: Py<PyAny>,
}

/// Returns the tier of a store.
pub fn tier(store: &Bound<'_, PyAny>, capacity: Bytes) -> PyResult<ObjectTier> {
    let py = store.py();
    let convert = python::member(py, "vramp._tiers", "store_functions")?;
    let functions = convert.call1((store,))?;
    let (put, get, delete) = functions.extract()?;
    Ok(ObjectTier::new(Arc::new(PythonStore { put, get, delete }), capacity))
}

impl ObjectStore for PythonStore {
    fn put(&self, key: u64, bytes: &[u8]) -> Result<(), StoreError> {
        attached(|py| self.put.call1(py, (key, PyBytes::new(py, bytes))).map(drop))
    }

    fn get(&self, key: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let len = attached(|py| {
            let object = contents(&self.get.bind(py).call1((key,))?)?;
            let found = object.as_bytes();
            if found.len() == into.len() {
                into.copy_from_slice(found);
            }
            Ok(found.len())
        })?;
        match len == into.len() {
            true => Ok(()),
            false => Err(StoreError::failed(format!(
                "the store returned {len} bytes for key {key}, of {} that it was given",
                into.len()
            ))),
        }
    }

    fn delete(&self, key: u64) -> Result<(), StoreError> {
        attached(|py| self.delete.call1(py, (key,)).map(drop))
    }
}

/// Calls Python code. Its exception is the error.
fn attached<R>(call: impl FnOnce(Python<'_>) -> PyResult<R>) -> Result<R, StoreError> {
    let called = Python::try_attach(|py| call(py).map_err(|error| failure(py, &error)));
    called.unwrap_or_else(|| Err(StoreError::failed("the interpreter ends")))
}

/// Returns the error of an exception.
fn failure(py: Python<'_>, error: &PyErr) -> StoreError {
    const NO_SPACE: i32 = 28;
    let has_no_space = |error: &PyErr| {
        let number = error.value(py).getattr("errno").and_then(|number| number.extract::<i32>());
        error.is_instance_of::<PyOSError>(py) && number.is_ok_and(|number| number == NO_SPACE)
    };
    match error.is_instance_of::<PyMemoryError>(py) || has_no_space(error) {
        true => StoreError::full(error.to_string()),
        false => StoreError::failed(error.to_string()),
    }
}
