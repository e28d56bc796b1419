//! Arrays over allocations and imports, and how other libraries access them without a copy.
//!
//! 1. [`Array`] is a part of an allocation or an import with a shape and an element type. It counts as an
//!    export of that as long as it lives.
//! 2. NumPy reads `__array_interface__` (simulator) and CuPy or Numba `__cuda_array_interface__` (card).
//!    They keep the array alive.
//! 3. `__dlpack__` returns a capsule, which is an export of its own until the consumer calls its
//!    deleter, on any thread.
//!
//! On the simulator the memory is the host's, and the device is the CPU. On a card, DLPack makes the
//! consumer's stream wait for the stream of the allocation, and the deleter records the consumer's use.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};
use vramp_capi::process::{OpenAllocator, StreamName};

use crate::dlpack::{self, Holder, Request};
use crate::error::not_pickled;
use crate::layout::{Layout, Memory, accessible};
use crate::owner::Owner;
use crate::python;

/// Keeps memory from being freed or closed.
pub struct Export(Owner);

impl Export {
    /// Fails if the memory was freed or closed, or its pool is being closed.
    pub fn begin(py: Python<'_>, owner: Owner) -> PyResult<Export> {
        owner.begin_export(py)?;
        Ok(Export(owner))
    }
}

impl Holder for Export {
    fn allocator(&self) -> OpenAllocator {
        self.0.allocator()
    }

    fn stream(&self) -> StreamName {
        self.0.stream_name()
    }

    fn used_by(&self, consumer: StreamName) {
        self.0.record_use(consumer);
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.0.end_export();
    }
}

/// An array in device memory.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Array {
    export: Export,
    layout: Layout,
}

impl Array {
    pub fn new(
        py: Python<'_>,
        owner: Owner,
        shape: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        offset: u64,
    ) -> PyResult<Array> {
        let export = Export::begin(py, owner)?;
        let block = &export.0;
        let place = accessible(py, block.place())?;
        let (addr, size, usable) = (block.addr(), block.size(), block.usable());
        let memory = Memory { addr, size, usable, place, is_read_only: block.is_read_only() };
        let layout = Layout::new(py, memory, shape, dtype, offset)?;
        Ok(Array { export, layout })
    }

    pub fn addr(&self) -> u64 {
        self.layout.addr
    }

    pub fn len(&self) -> u64 {
        self.layout.nbytes()
    }

    pub fn stream_name(&self) -> StreamName {
        self.export.stream()
    }
}

#[pymethods]
impl Array {
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

    /// Address of the first element.
    #[getter]
    fn ptr(&self) -> u64 {
        self.layout.addr
    }

    /// The allocation, or the import, that the array is a part of.
    #[getter]
    fn allocation(&self, py: Python<'_>) -> Py<PyAny> {
        self.export.0.object(py)
    }

    /// Refuses to be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(not_pickled("Array"))
    }

    /// NumPy's protocol. On the simulator only.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.layout.array_interface(py)
    }

    /// The protocol of CuPy and Numba. On a card only.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.layout.cuda_array_interface(py, self.export.allocator(), self.export.stream())
    }

    /// The kind and number of the device, as DLPack has them.
    fn __dlpack_device__(&self) -> (u32, i32) {
        self.layout.dlpack_device()
    }

    /// Returns a DLPack capsule.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let export = Export::begin(py, self.export.0.clone_ref(py))?;
        let request = Request { stream, max_version, dl_device, copy };
        dlpack::export(py, &self.layout, export, &request)
    }

    fn __len__(&self) -> PyResult<usize> {
        self.layout.len()
    }

    fn __repr__(&self) -> String {
        let place = if self.layout.is_on_host() { "simulated" } else { "on the card" };
        format!("<vramp.Array {:?} of {}, {place}>", self.layout.shape, self.layout.element.name)
    }
}

/// Returns a NumPy array of bytes that shares the memory, on the simulator.
pub fn numpy_bytes<'py>(
    py: Python<'py>,
    owner: Owner,
    dtype: Option<&Bound<'py, PyAny>>,
    copy: Option<bool>,
) -> PyResult<Bound<'py, PyAny>> {
    let array = Bound::new(py, Array::new(py, owner, None, None, 0)?)?;
    // Fails with a reason on a card.
    array.getattr(intern!(py, "__array_interface__"))?;
    let asarray = python::member(py, "numpy", "asarray")?;
    let made = asarray.call1((array,))?;
    let wanted = match dtype {
        Some(dtype) => asarray.call1((&made, dtype))?,
        None => made.clone(),
    };
    match copy {
        Some(true) if wanted.is(&made) => wanted.call_method0(intern!(py, "copy")),
        Some(false) if !wanted.is(&made) => Err(PyValueError::new_err(
            "the memory has bytes, so another type needs a copy: use array(shape, dtype)",
        )),
        _ => Ok(wanted),
    }
}
