//! Functions of Python that free memory before a request fails.
//!
//! 1. `Pool.on_shortage` registers a function.
//! 2. A request that finds no memory calls it, on the thread of the request, which takes the
//!    interpreter for the time of the call. The thread holds no lock of vramp, so threads that hold the
//!    interpreter and wait for such a lock do not wait for it.
//! 3. `close` removes the function, waits for calls in progress on other threads, and drops it. The
//!    end of the pool drops it too.
//!
//! Deliberately absent: a collection of a pool that only its own handler refers to. The pool keeps its
//! handlers until one of the two is closed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use vramp_alloc::observe::Shortage;
use vramp_capi::process::Kind;

use crate::error::raise;
use crate::pool::Pool;

/// A function that the program registered.
struct Handler {
    /// `None` once it was removed.
    function: Mutex<Option<Py<PyAny>>>,
}

impl Handler {
    /// Held for a few instructions, while no Python code runs.
    fn function(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.function.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the function freed memory. False if it raised an exception, which is reported,
    /// and once the interpreter ends.
    fn call(&self, requested: u64) -> bool {
        let freed = Python::try_attach(|py| {
            let Some(function) = self.function().as_ref().map(|f| f.clone_ref(py)) else {
                return false;
            };
            let function = function.into_bound(py);
            ask(&function, requested).unwrap_or_else(|error| {
                error.write_unraisable(py, Some(&function));
                false
            })
        });
        freed.unwrap_or(false)
    }
}

fn ask(function: &Bound<'_, PyAny>, requested: u64) -> PyResult<bool> {
    let answer = function.call1((requested,))?;
    answer.extract().map_err(|_| {
        PyTypeError::new_err(format!(
            "a shortage handler returns True if it freed memory, else False, and not {}",
            answer.get_type()
        ))
    })
}

/// A shortage handler that is registered.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Registration {
    pool: Py<Pool>,
    /// Zero once it was closed.
    number: AtomicU64,
    handler: Arc<Handler>,
}

/// Registers `function`.
pub fn register(pool: &Bound<'_, Pool>, function: &Bound<'_, PyAny>) -> PyResult<Registration> {
    if !function.is_callable() {
        return Err(PyTypeError::new_err(format!(
            "a shortage handler is a function of the requested bytes, and not {}",
            function.get_type()
        )));
    }
    let function = Mutex::new(Some(function.clone().unbind()));
    let handler = Arc::new(Handler { function });
    let called = Arc::clone(&handler);
    let called = move |shortage: &Shortage| called.call(shortage.requested.count());
    let number = pool
        .get()
        .call(pool.py(), |session| Ok(session.allocator().on_shortage(called).number()))?;
    Ok(Registration { pool: pool.clone().unbind(), number: AtomicU64::new(number), handler })
}

#[pymethods]
impl Registration {
    /// Removes the handler.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let pool = self.pool.get();
        let number = self.number.swap(0, Ordering::AcqRel);
        if number == 0 {
            return Ok(());
        }
        let allocator = pool.allocator();
        match py.detach(|| allocator.with(|session| Ok(session.unobserve(number)))) {
            // A closed pool has removed it.
            Err(error) if error.kind != Kind::UnknownAllocator => {
                self.number.store(number, Ordering::Release);
                return Err(raise(py, error));
            }
            _ => {}
        }
        let function = self.handler.function().take();
        // Runs the function's destructor, and so any Python code, after unlocking.
        drop(function);
        Ok(())
    }

    /// True once it was closed.
    #[getter]
    fn is_closed(&self) -> bool {
        self.number.load(Ordering::Acquire) == 0
    }

    fn __enter__<'py>(slf: Bound<'py, Registration>) -> Bound<'py, Registration> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        match self.number.load(Ordering::Acquire) {
            0 => "<vramp.Registration, closed>".to_owned(),
            number => format!("<vramp.Registration {number} of a shortage handler>"),
        }
    }
}
