//! Owners of leases: tasks of asyncio, and threads.
//!
//! Tasks share a thread, so a lease of a task belongs to the task. Else a task would overtake requests
//! that wait for a lease of another one.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::python;

/// Owner of the leases of a task.
#[pyclass(frozen, module = "vramp._native")]
pub struct LeaseOwner(vramp_defer::LeaseOwner);

#[pymethods]
impl LeaseOwner {
    #[new]
    fn new() -> LeaseOwner {
        LeaseOwner(vramp_defer::LeaseOwner::new())
    }
}

/// What makes a call.
#[derive(Clone, Copy)]
pub struct Caller {
    pub owner: vramp_defer::LeaseOwner,
    /// True on the thread that runs the handlers of signals.
    pub is_main: bool,
}

/// `vramp._owners.caller`. An interpreter that ends imports nothing any more.
static CALLER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

impl Caller {
    /// Imports what [`Caller::get`] calls.
    pub fn prepare(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
        let import = || python::member(py, "vramp._owners", "caller").map(Bound::unbind);
        Ok(CALLER.get_or_try_init(py, import)?.bind(py))
    }

    /// Returns the task that runs on this thread, or the thread.
    pub fn get(py: Python<'_>) -> PyResult<Caller> {
        let caller = Caller::prepare(py)?.call0()?;
        let (owner, is_main): (Option<Bound<'_, LeaseOwner>>, bool) = caller.extract()?;
        let thread = vramp_defer::LeaseOwner::of_this_thread;
        Ok(Caller { owner: owner.map_or_else(thread, |owner| owner.get().0), is_main })
    }
}

/// Makes a call detached from the interpreter. The leases that it takes belong to `owner`.
pub fn in_scope<R: Send>(
    py: Python<'_>,
    owner: vramp_defer::LeaseOwner,
    call: impl FnOnce() -> R + Send,
) -> R {
    py.detach(|| owner.scope(call))
}
