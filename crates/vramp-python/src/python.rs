//! Calls of Python code, during which the interpreter may end.
//!
//! Python before 3.14 ends a thread that needs the interpreter once it finalizes with `pthread_exit`,
//! which unwinds the thread's stack. Where frames of Rust are on it, that is undefined: in practice
//! the process aborts. Each function here puts a frame below the Python code that stops the unwinding
//! first: the thread sleeps until the process has ended, as in Python 3.14. PyO3 does the same where a
//! thread attaches.
//!
//! So whatever may run Python code is called through this file: functions, attributes, imports. Calls
//! that only run C code of the interpreter are not.

use pyo3::exceptions::{PyImportError, PyTypeError};
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

// PyO3 declares them as functions that never unwind. A compiler has one declaration of a symbol, and where that
// is PyO3's it leaves the frame out that stops the unwinding. So they are called by `hidden` addresses only.
unsafe extern "C-unwind" {
    fn PyObject_Call(
        callable: *mut PyObject,
        arguments: *mut PyObject,
        named: *mut PyObject,
    ) -> *mut PyObject;
    fn PyObject_GetAttr(object: *mut PyObject, name: *mut PyObject) -> *mut PyObject;
    fn PyImport_Import(name: *mut PyObject) -> *mut PyObject;
    fn PyErr_WriteUnraisable(object: *mut PyObject);
    fn PyErr_CheckSignals() -> std::ffi::c_int;
}

type Object = *mut PyObject;
type Call = unsafe extern "C-unwind" fn(Object, Object, Object) -> Object;
type GetAttr = unsafe extern "C-unwind" fn(Object, Object) -> Object;
type Import = unsafe extern "C-unwind" fn(Object) -> Object;
type Report = unsafe extern "C-unwind" fn(Object);
type CheckSignals = unsafe extern "C-unwind" fn() -> std::ffi::c_int;

/// Returns the address of a function of the interpreter, about which the compiler knows nothing then.
fn hidden<F: Copy>(function: F) -> F {
    std::hint::black_box(function)
}

/// Sleeps until the process has ended when the stack is unwound.
struct Sleep;

impl Drop for Sleep {
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}

/// Runs code of the interpreter. `code` has nothing to drop.
fn run<R: Copy>(code: impl FnOnce() -> R) -> R {
    let sleep = Sleep;
    let result = code();
    std::mem::forget(sleep);
    result
}

/// Calls `callable`.
pub fn call<'py>(
    callable: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyTuple>,
    named: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, named) = (callable.py(), named.map_or(std::ptr::null_mut(), Bound::as_ptr));
    let (callable, arguments) = (callable.as_ptr(), arguments.as_ptr());
    let function: Call = hidden(PyObject_Call);
    // SAFETY: the thread is attached, and the objects live until the call has returned.
    let result = run(|| unsafe { function(callable, arguments, named) });
    // SAFETY: the result is a new reference, or null with an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, result) }
}

/// Returns an attribute, which may be a property.
pub fn attribute<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, object, name) = (object.py(), object.as_ptr(), name.as_ptr());
    let function: GetAttr = hidden(PyObject_GetAttr);
    // SAFETY: as in `call`.
    let result = run(|| unsafe { function(object, name) });
    // SAFETY: as in `call`.
    unsafe { Bound::from_owned_ptr_or_err(py, result) }
}

/// Returns the member `member` of the module `name`, which is imported if it was not.
pub fn member<'py>(py: Python<'py>, name: &str, member: &str) -> PyResult<Bound<'py, PyAny>> {
    let (module, member) = (PyString::intern(py, name), PyString::intern(py, member));
    let name = module.as_ptr();
    let function: Import = hidden(PyImport_Import);
    // SAFETY: as in `call`.
    let module = run(|| unsafe { function(name) });
    // SAFETY: as in `call`.
    let module = unsafe { Bound::from_owned_ptr_or_err(py, module) }?;
    attribute(&module, &member)
}

/// Passes an exception that no caller can receive to `sys.unraisablehook`.
pub fn report(error: PyErr, origin: &Bound<'_, PyAny>) {
    error.restore(origin.py());
    let origin = origin.as_ptr();
    let function: Report = hidden(PyErr_WriteUnraisable);
    // SAFETY: as in `call`; an exception is set.
    run(|| unsafe { function(origin) });
}

/// Returns the elements of a sequence or an iterable.
pub fn elements<'py>(iterable: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
    let py = iterable.py();
    let tuple = py.get_type::<PyTuple>();
    let made = call(tuple.as_any(), &PyTuple::new(py, [iterable])?, None)?;
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

/// Runs the handlers of signals that arrived, such as that of Ctrl-C. Returns the exception of one.
pub fn handle_signals(py: Python<'_>) -> PyResult<()> {
    let function: CheckSignals = hidden(PyErr_CheckSignals);
    // SAFETY: the thread is attached.
    match run(|| unsafe { function() }) {
        0 => Ok(()),
        _ => Err(PyErr::fetch(py)),
    }
}
