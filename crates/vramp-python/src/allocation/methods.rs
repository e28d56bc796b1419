//! What Python calls of an allocation.

use pyo3::prelude::*;
use vramp_capi::process::StreamName;

use super::Allocation;
use crate::arguments::bytes;
use crate::array::{self, Array};
use crate::error::not_pickled;
use crate::owner::Owner;
use crate::pool::Pool;
use crate::stream::stream_in;

#[pymethods]
impl Allocation {
    /// Address of the first byte.
    #[getter]
    fn ptr(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_live(py)?;
        Ok(self.block.addr)
    }

    /// Requested bytes.
    #[getter(size)]
    fn requested(&self) -> u64 {
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
        match (self.stream, &self.stream_object) {
            (StreamName::Raw(raw), _) => Ok(raw.into_pyobject(py)?.into_any().unbind()),
            (StreamName::Created(_), Some(stream)) => Ok(stream.clone_ref(py)),
            (StreamName::Created(_), None) => Ok(py.None()),
        }
    }

    /// The pool that it came from.
    #[getter(pool)]
    fn owner(&self, py: Python<'_>) -> Py<Pool> {
        self.pool.clone_ref(py)
    }

    /// True once it was freed.
    #[getter(is_freed)]
    fn was_freed(&self) -> bool {
        self.is_freed()
    }

    /// Frees the memory.
    #[pyo3(signature = (stream = None))]
    fn free(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let stream = match stream {
            None => self.stream,
            stream => stream_in(self.pool.bind(py), stream)?.name,
        };
        self.free_on(py, stream)
    }

    /// Returns an array in the memory.
    #[pyo3(signature = (shape = None, dtype = None, *, offset = None))]
    fn array(
        slf: &Bound<'_, Allocation>,
        shape: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        offset: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Array> {
        let offset = offset.map_or(Ok(0), |offset| bytes(slf.py(), offset, "offset"))?;
        Array::new(slf.py(), Owner::Block(slf.clone().unbind()), shape, dtype, offset)
    }

    /// Returns a NumPy array of bytes that shares the memory, on the simulator.
    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        slf: &Bound<'py, Allocation>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        array::numpy_bytes(slf.py(), Owner::Block(slf.clone().unbind()), dtype, copy)
    }

    /// Records that work queued on a stream so far uses the memory.
    #[pyo3(signature = (stream = None))]
    fn record_use(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.check_live(py)?;
        let stream = stream_in(self.pool.bind(py), stream)?;
        self.pool.get().note_use(py, self.block.addr, stream.name)
    }

    fn __enter__<'py>(slf: Bound<'py, Allocation>) -> Bound<'py, Allocation> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if self.is_freed() {
            return Ok(());
        }
        let freed = self.free_on(py, self.stream);
        // An exception of the block is not replaced. The last reference frees the memory then.
        if kind.is_none() { freed } else { Ok(()) }
    }

    /// Refuses to be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(not_pickled("Allocation"))
    }

    fn __repr__(&self) -> String {
        match self.is_freed() {
            true => format!("<vramp.Allocation of {} bytes, freed>", self.size),
            false => format!("<vramp.Allocation of {} bytes at {:#x}>", self.size, self.block.addr),
        }
    }
}
