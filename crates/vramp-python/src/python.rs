//! What several files ask of the interpreter.

use pyo3::exceptions::{PyImportError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

/// Returns the member `member` of the module `name`, which is imported if it was not.
pub fn member<'py>(py: Python<'py>, name: &str, member: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import(PyString::intern(py, name))?.getattr(PyString::intern(py, member))
}

/// Returns the elements of a sequence or an iterable.
pub fn elements<'py>(iterable: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
    let made = iterable.py().get_type::<PyTuple>().call1((iterable,))?;
    made.cast_into::<PyTuple>().map_err(|_| PyTypeError::new_err("tuple() returned no tuple"))
}

/// Returns an error in another interpreter than the first of the process. Classes and shared pools are those
/// of the process, and would outlive an interpreter that made them.
pub fn check_first_interpreter() -> PyResult<()> {
    // SAFETY: the thread is attached.
    let interpreter = unsafe { ffi::PyInterpreterState_Get() };
    // SAFETY: it is that of the thread.
    match unsafe { ffi::PyInterpreterState_GetID(interpreter) } {
        0 => Ok(()),
        _ => Err(PyImportError::new_err(
            "vramp works only in the first interpreter of a process, and not in subinterpreters: use \
             threads or processes",
        )),
    }
}

/// Runs `work` detached from the interpreter, also from a destructor and while the interpreter
/// ends.
pub fn detached(work: impl FnOnce() + Send) {
    let mut work = Some(work);
    let mut run = || {
        if let Some(work) = work.take() {
            work();
        }
    };
    if Python::try_attach(|py| py.detach(&mut run)).is_none() {
        run();
    }
}
