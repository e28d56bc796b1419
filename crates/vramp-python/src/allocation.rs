//! A block of memory that frees itself.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use vramp_capi::process::{Block, StreamName};

use crate::error::refuse;
use crate::pool::{Pool, detached};
use crate::stream::{Stream, stream_of};

/// A block of device memory.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Allocation {
    pool: Py<Pool>,
    block: Block,
    size: u64,
    stream: StreamName,
    /// Keeps a stream of the pool alive.
    created: Option<Py<Stream>>,
    is_freed: AtomicBool,
}

impl Allocation {
    #[inline]
    pub fn new(
        pool: &Bound<'_, Pool>,
        block: Block,
        size: u64,
        stream: StreamName,
        created: Option<&Bound<'_, Stream>>,
    ) -> Allocation {
        Allocation {
            pool: pool.clone().unbind(),
            block,
            size,
            stream,
            created: created.map(|stream| stream.clone().unbind()),
            is_freed: AtomicBool::new(false),
        }
    }

    fn freed_before(&self, py: Python<'_>) -> PyErr {
        let text = format!("the allocation of {} bytes was freed before", self.size);
        refuse(py, "UnknownPointerError", &text)
    }

    fn check_live(&self, py: Python<'_>) -> PyResult<()> {
        match self.is_freed.load(Ordering::Acquire) {
            true => Err(self.freed_before(py)),
            false => Ok(()),
        }
    }
}

#[pymethods]
impl Allocation {
    /// Address of the first byte.
    #[getter]
    fn ptr(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_live(py)?;
        Ok(self.block.addr)
    }

    /// Requested bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.size
    }

    /// Usable bytes.
    #[getter]
    fn usable_size(&self) -> u64 {
        self.block.len
    }

    /// The stream that it was allocated for.
    #[getter]
    fn stream(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match (&self.created, self.stream) {
            (Some(stream), _) => Ok(stream.clone_ref(py).into_any()),
            (None, StreamName::Raw(raw)) => Ok(raw.into_pyobject(py)?.into_any().unbind()),
            (None, StreamName::Created(_)) => Ok(py.None()),
        }
    }

    /// The pool that it came from.
    #[getter]
    fn pool(&self, py: Python<'_>) -> Py<Pool> {
        self.pool.clone_ref(py)
    }

    /// True once it was freed.
    #[getter]
    fn is_freed(&self) -> bool {
        self.is_freed.load(Ordering::Acquire)
    }

    /// Frees the memory.
    #[pyo3(signature = (stream = None))]
    fn free(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let stream = match stream {
            None => self.stream,
            stream => stream_of(stream)?,
        };
        if self.is_freed.swap(true, Ordering::AcqRel) {
            return Err(self.freed_before(py));
        }
        let freed = self.pool.get().free(py, self.block.addr, stream);
        if freed.is_err() {
            self.is_freed.store(false, Ordering::Release);
        }
        freed
    }

    /// Records that work queued on a stream so far uses the memory.
    #[pyo3(signature = (stream = None))]
    fn record_use(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.check_live(py)?;
        self.pool.get().note_use(py, self.block.addr, stream_of(stream)?)
    }

    fn __enter__<'py>(slf: Bound<'py, Allocation>) -> Bound<'py, Allocation> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if self.is_freed() { Ok(()) } else { self.free(py, None) }
    }

    fn __repr__(&self) -> String {
        match self.is_freed() {
            true => format!("<vramp.Allocation of {} bytes, freed>", self.size),
            false => format!("<vramp.Allocation of {} bytes at {:#x}>", self.size, self.block.addr),
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if *self.is_freed.get_mut() {
            return;
        }
        let (allocator, addr, stream) = (self.pool.get().allocator(), self.block.addr, self.stream);
        // SAFETY: the package's contract for streams. A closed pool has released the memory.
        detached(move || drop(unsafe { allocator.free(addr, stream) }));
    }
}
