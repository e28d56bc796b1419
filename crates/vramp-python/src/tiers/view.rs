//! An array of a leased buffer.

use std::sync::{Arc, Weak};

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use super::Buffer;
use super::grant::{Grant, Hold, ended};
use crate::arguments::bytes;
use crate::dlpack::{self, Holder, Request};
use crate::error::not_pickled;
use crate::layout::{Layout, Memory};

/// An array of a buffer, for the time of a lease.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct View {
    grant: Weak<Grant>,
    /// The lease, which ends with its last view if the program does not end it.
    lease: Py<PyAny>,
    buffer: Py<Buffer>,
    memory: Memory,
    layout: Layout,
}

impl View {
    pub fn new(
        lease: &Bound<'_, PyAny>,
        grant: &Arc<Grant>,
        buffer: &Py<Buffer>,
        memory: Memory,
        shape: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<View> {
        let py = lease.py();
        let layout = Layout::new(py, memory, shape, dtype, 0)?;
        let (grant, lease) = (Arc::downgrade(grant), lease.clone().unbind());
        Ok(View { grant, lease, buffer: buffer.clone_ref(py), memory, layout })
    }

    /// Fails after the end of the lease.
    fn held(&self, py: Python<'_>) -> PyResult<Hold> {
        match self.grant.upgrade() {
            Some(grant) if !grant.is_released() => Ok(Hold(grant)),
            _ => Err(ended(py)),
        }
    }
}

#[pymethods]
impl View {
    /// Lengths of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.layout.shape)
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &str {
        &self.layout.element.name
    }

    /// Bytes of the elements.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.layout.nbytes()
    }

    /// The buffer that it is an array of.
    #[getter]
    fn buffer(&self, py: Python<'_>) -> Py<Buffer> {
        self.buffer.clone_ref(py)
    }

    /// True if the lease allows no writes.
    #[getter]
    fn is_read_only(&self) -> bool {
        self.layout.is_read_only
    }

    /// True once the lease has ended.
    #[getter]
    fn is_ended(&self, py: Python<'_>) -> bool {
        self.held(py).is_err()
    }

    /// Address of the first element.
    #[getter]
    fn ptr(&self, py: Python<'_>) -> PyResult<u64> {
        self.held(py)?;
        Ok(self.layout.addr)
    }

    /// Returns another array of the buffer, under the same lease.
    #[pyo3(signature = (shape = None, dtype = None, *, offset = None))]
    fn array(
        &self,
        py: Python<'_>,
        shape: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        offset: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<View> {
        self.held(py)?;
        let offset = offset.map_or(Ok(0), |offset| bytes(py, offset, "offset"))?;
        let memory = self.memory;
        let layout = Layout::new(py, memory, shape, dtype, offset)?;
        let (grant, lease) = (self.grant.clone(), self.lease.clone_ref(py));
        Ok(View { grant, lease, buffer: self.buffer.clone_ref(py), memory, layout })
    }

    /// Refuses to be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(not_pickled("View"))
    }

    /// NumPy's protocol. On the simulator only.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.held(py)?;
        self.layout.array_interface(py)
    }

    /// The protocol of CuPy and Numba. On a card only.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let held = self.held(py)?;
        self.layout.cuda_array_interface(py, held.allocator(), held.stream())
    }

    /// The kind and number of the device, as DLPack has them.
    fn __dlpack_device__(&self, py: Python<'_>) -> PyResult<(u32, i32)> {
        self.held(py)?;
        Ok(self.layout.dlpack_device())
    }

    /// Returns a DLPack capsule, which keeps the lease.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let hold = self.held(py)?;
        dlpack::export(py, &self.layout, hold, &Request { stream, max_version, dl_device, copy })
    }

    fn __len__(&self) -> PyResult<usize> {
        self.layout.len()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let end = if self.held(py).is_ok() { "" } else { ", ended" };
        let Layout { shape, element, .. } = &self.layout;
        format!("<vramp.View {shape:?} of {}{end}>", element.name)
    }
}
