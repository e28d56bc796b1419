//! Functions of Python around the sleep of regions: the native part of `vramp.around_sleep`.
//!
//! 1. A pause or a resume calls them on its thread, which takes the interpreter for the time of the call. The thread
//!    holds no lock of vramp.
//! 2. What one raises is noted for the thread: the exception of the pause or the resume has it as its cause.
//! 3. The end of the registration, or of the pool, drops them.

use std::cell::RefCell;

use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::prelude::*;
use vramp_tiers::regions::{CallbackError, SleepCallbacks};

use crate::pool::Pool;

thread_local! {
    /// The first exception of a function since the last call of `forget_raised` on this thread.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Forgets what functions raised on this thread.
pub fn forget_raised() {
    drop(RAISED.take());
}

/// Returns an exception with what a function raised on this thread as its cause. What is no error of the function,
/// such as KeyboardInterrupt, is returned itself.
#[cold]
pub fn with_cause(py: Python<'_>, error: PyErr) -> PyErr {
    match RAISED.take() {
        None => error,
        Some(raised) if !raised.is_instance_of::<PyException>(py) => raised,
        Some(raised) => {
            error.set_cause(py, Some(raised));
            error
        }
    }
}

fn call(function: Option<&Py<PyAny>>) -> Result<(), CallbackError> {
    let Some(function) = function else { return Ok(()) };
    let called = Python::try_attach(|py| {
        let Err(error) = function.call0(py) else { return Ok(()) };
        let text = error.to_string();
        let before = RAISED.take();
        RAISED.set(Some(before.unwrap_or(error)));
        Err(text.into())
    });
    called.unwrap_or_else(|| Err("the interpreter has ended".into()))
}

/// Registers functions of no arguments around the sleep of regions of a pool. Returns the number of the registration.
#[pyfunction]
#[pyo3(signature = (pool, name, before, after, tags, collective))]
pub fn regions_around_sleep(
    py: Python<'_>,
    pool: &Bound<'_, Pool>,
    name: String,
    before: Option<Bound<'_, PyAny>>,
    after: Option<Bound<'_, PyAny>>,
    tags: Option<Vec<String>>,
    collective: bool,
) -> PyResult<u64> {
    let [before, after] = [before, after].map(|function| match function {
        Some(function) if !function.is_callable() => Err(PyTypeError::new_err(format!(
            "a callback is a function without arguments, and not {}",
            function.get_type()
        ))),
        function => Ok(function.map(Bound::unbind)),
    });
    let (before, after) = (before?, after?);
    let callbacks = SleepCallbacks {
        name,
        tags,
        is_collective: collective,
        before: Box::new(move || call(before.as_ref())),
        after: Box::new(move || call(after.as_ref())),
    };
    pool.get().call(py, |session| session.around_sleep(callbacks))
}

/// Returns the tag of the region of a pool that has these addresses. `None` if they are in no region.
#[pyfunction]
pub fn region_at(
    py: Python<'_>,
    pool: &Bound<'_, Pool>,
    address: u64,
    size: u64,
) -> PyResult<Option<String>> {
    pool.get().call(py, |session| Ok(session.region_at(address, size)))
}
