//! Memory that stays at its addresses while something outside has registered it.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use vramp_alloc::sharing::PinnedRange;

use crate::pool::Pool;
use crate::python::detached;

/// A pin. It ends by `unpin`, at the end of a `with` block, or with the last reference.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Pin {
    pool: Py<Pool>,
    addr: u64,
    size: u64,
    pinned_bytes: u64,
    /// `None` once it has ended. Held for a few instructions.
    pinned: Mutex<Option<PinnedRange>>,
}

impl Pin {
    pub fn new(pool: &Bound<'_, Pool>, addr: u64, size: Option<u64>) -> PyResult<Pin> {
        let pinned = pool.get().call(pool.py(), |session| {
            session.pin(addr, size.map_or_else(|| session.usable(addr), Ok)?)
        })?;
        Ok(Pin {
            pool: pool.clone().unbind(),
            addr,
            size: pinned.range().len.count(),
            pinned_bytes: pinned.bytes().count(),
            pinned: Mutex::new(Some(pinned)),
        })
    }

    fn end(&self, py: Python<'_>) {
        let pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(pinned));
    }
}

#[pymethods]
impl Pin {
    /// Address of the first byte.
    #[getter]
    fn ptr(&self) -> u64 {
        self.addr
    }

    /// Bytes that were asked for.
    #[getter]
    fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of the physical handles that they lie in.
    #[getter]
    fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    /// The pool of the memory.
    #[getter]
    fn pool(&self, py: Python<'_>) -> Py<Pool> {
        self.pool.clone_ref(py)
    }

    /// True once it has ended.
    #[getter]
    fn is_unpinned(&self) -> bool {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Ends the pin.
    fn unpin(&self, py: Python<'_>) {
        self.end(py);
    }

    fn __enter__<'py>(slf: Bound<'py, Pin>) -> Bound<'py, Pin> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) {
        self.end(py);
    }

    fn __repr__(&self) -> String {
        match self.is_unpinned() {
            true => format!("<vramp.Pin of {} bytes, ended>", self.size),
            false => format!("<vramp.Pin of {} bytes at {:#x}>", self.size, self.addr),
        }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let pinned = self.pinned.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if pinned.is_some() {
            detached(move || drop(pinned));
        }
    }
}
