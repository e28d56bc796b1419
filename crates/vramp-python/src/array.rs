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

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};

use dlpack_ffi::{
    DLDataType, DLDevice, DLDeviceType, DLManagedTensor, DLManagedTensorVersioned,
    DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION, DLPackVersion, DLTensor,
};
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyInt, PyTuple};
use vramp_capi::process::{CallResult, OpenAllocator, StreamName};

use crate::error::{raise, refuse};
use crate::owner::{Owner, not_pickled};
use crate::pool::{bytes, detached};
use crate::python;

const UNVERSIONED: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

/// Keeps memory from being freed or closed.
pub struct Export(Owner);

impl Export {
    /// Fails if the memory was freed or closed, or its pool is being closed.
    fn begin(py: Python<'_>, owner: Owner) -> PyResult<Export> {
        owner.begin_export(py)?;
        Ok(Export(owner))
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.0.end_export();
    }
}

/// Element type of an array.
struct Element {
    /// Name, such as `float32`.
    name: String,
    /// Type string of the array interfaces. Empty if they cannot express it.
    code: String,
    dlpack: DLDataType,
    size: u64,
}

/// Where the memory is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Memory of the host, on the simulator.
    Host,
    Card(i32),
}

impl Place {
    fn device(self) -> DLDevice {
        match self {
            Place::Host => DLDevice { device_type: DLDeviceType::kDLCPU, device_id: 0 },
            Place::Card(ordinal) => {
                DLDevice { device_type: DLDeviceType::kDLCUDA, device_id: ordinal }
            }
        }
    }
}

/// An array in device memory.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Array {
    export: Export,
    element: Element,
    shape: Vec<u64>,
    addr: u64,
    place: Place,
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
        let element = element(py, dtype)?;
        let shape = match shape {
            Some(shape) => shape_of(shape)?,
            None => vec![block.size().saturating_sub(offset) / element.size],
        };
        let count = shape.iter().try_fold(1_u64, |count, len| count.checked_mul(*len));
        let end = count.and_then(|n| n.checked_mul(element.size)?.checked_add(offset));
        if end.is_none_or(|end| end > block.usable()) {
            let text = format!(
                "an array of shape {shape:?} and type {} from byte {offset} on does not fit into {} \
                 bytes: allocate more",
                element.name,
                block.usable()
            );
            return Err(refuse(py, "RangeError", &text));
        }
        if !offset.is_multiple_of(element.size) {
            let text = format!("the offset {offset} is not a multiple of {} bytes", element.size);
            return Err(refuse(py, "RangeError", &text));
        }
        let place = place(py, block)?;
        let addr = block.addr() + offset;
        Ok(Array { export, element, shape, addr, place })
    }

    fn allocator(&self) -> OpenAllocator {
        self.export.0.allocator()
    }

    /// Returns the entries that both array interfaces share.
    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.element.code.is_empty() {
            let text = format!("NumPy's protocol has no type {}: use DLPack", self.element.name);
            return Err(PyAttributeError::new_err(text));
        }
        let entries = PyDict::new(py);
        entries.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        entries.set_item("typestr", &self.element.code)?;
        entries.set_item("data", (self.addr, false))?;
        entries.set_item("strides", py.None())?;
        entries.set_item("version", 3)?;
        Ok(entries)
    }

    /// Makes the consumer's stream wait for the memory's. Returns the stream that uses the memory.
    fn order(&self, py: Python<'_>, stream: Option<i64>) -> PyResult<Option<StreamName>> {
        if self.place == Place::Host {
            return match stream {
                None => Ok(None),
                Some(_) => Err(PyBufferError::new_err(
                    "the device is simulated, so the memory is the host's and has no streams: pass \
                     stream=None",
                )),
            };
        }
        let consumer = match stream {
            None | Some(1) => StreamName::Raw(0),
            Some(-1) => return Ok(None),
            Some(raw) if raw > 1 => StreamName::Raw(raw as u64),
            Some(raw) => {
                let text = format!(
                    "stream={raw} is ambiguous or no stream: use 1 for the default stream, or -1 if \
                     no order is needed"
                );
                return Err(refuse(py, "RangeError", &text));
            }
        };
        let (allocator, own) = (self.allocator(), self.export.0.stream_name());
        // SAFETY: the package's contract for streams.
        let ordered = py.detach(|| unsafe { allocator.order(consumer, own) });
        ordered.map_err(|error| raise(py, error))?;
        Ok(Some(consumer))
    }

    fn tensor(&self, shape: &mut [i64], strides: &mut [i64]) -> DLTensor {
        DLTensor {
            data: ptr::without_provenance_mut::<c_void>(self.addr as usize),
            device: self.place.device(),
            ndim: shape.len() as i32,
            dtype: self.element.dlpack,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }
}

/// Returns where the memory at an address is. `None` if no program may access it.
pub fn place_of(allocator: OpenAllocator, addr: u64) -> CallResult<Option<Place>> {
    let device = allocator.device()?;
    if device.simulated {
        return Ok(allocator.is_host_memory(addr)?.then_some(Place::Host));
    }
    let ordinal = device.id.strip_prefix("cuda:").and_then(|number| number.parse().ok());
    Ok(Some(Place::Card(ordinal.unwrap_or(0))))
}

fn place(py: Python<'_>, memory: &Owner) -> PyResult<Place> {
    let found = memory.place().map_err(|error| raise(py, error))?;
    found.ok_or_else(|| {
        refuse(
            py,
            "UnsupportedError",
            "this simulated memory has addresses only, which no program may access: the driver's own \
             pool (preset stream-ordered, and small requests of vpmm) is simulated so, and so is a \
             pool that C code opened before vramp was imported",
        )
    })
}

/// Returns the element type of an argument. `vramp._dtypes` knows the names.
fn element(py: Python<'_>, dtype: Option<&Bound<'_, PyAny>>) -> PyResult<Element> {
    let parse = python::member(py, "vramp._dtypes", "parse")?;
    let parsed = python::call(&parse, &PyTuple::new(py, [dtype])?, None)?;
    let (name, code, kind, bits): (String, String, u8, u8) = parsed.extract()?;
    let dlpack = DLDataType { code: kind, bits, lanes: 1 };
    Ok(Element { name, code, dlpack, size: u64::from(bits) / 8 })
}

fn shape_of(shape: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let py = shape.py();
    if shape.is_instance_of::<PyInt>() {
        return Ok(vec![bytes(py, shape, "shape")?]);
    }
    let lengths = python::elements(shape).map_err(|_| {
        PyTypeError::new_err("a shape is an int or a sequence of ints, such as (1024, 768)")
    })?;
    lengths.iter().map(|len| bytes(py, &len, "a length of the shape")).collect()
}

/// What a capsule points to. `tensor` is first, and the deleter finds the rest behind it.
#[repr(C)]
struct Managed<T> {
    tensor: T,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    export: Option<Export>,
    /// The stream that uses the memory until the deleter is called.
    consumer: Option<StreamName>,
}

impl<T> Drop for Managed<T> {
    fn drop(&mut self) {
        let Some(export) = self.export.take() else { return };
        let Some(consumer) = self.consumer else { return };
        detached(|| export.0.record_use(consumer));
    }
}

/// # Safety
/// `tensor` points to a `Managed<T>` that was boxed, and is not used afterwards.
unsafe fn delete<T>(tensor: *mut T) {
    if !tensor.is_null() {
        // SAFETY: this function's contract; the tensor is the first field.
        drop(unsafe { Box::from_raw(tensor.cast::<Managed<T>>()) });
    }
}

unsafe extern "C" fn delete_unversioned(tensor: *mut DLManagedTensor) {
    // SAFETY: the consumer passes what the capsule had, once.
    unsafe { delete(tensor) };
}

unsafe extern "C" fn delete_versioned(tensor: *mut DLManagedTensorVersioned) {
    // SAFETY: as above.
    unsafe { delete(tensor) };
}

/// Deletes the tensor of a capsule that no consumer took: a consumer renames it.
///
/// # Safety
/// `capsule` is a capsule of a tensor of this type under this name.
unsafe fn end_capsule<T>(capsule: *mut pyo3::ffi::PyObject, name: &CStr) {
    // SAFETY: a capsule that is being destroyed is valid.
    if unsafe { pyo3::ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: it is valid under this name.
    let tensor = unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) };
    // SAFETY: it was not taken, so it is deleted here only.
    unsafe { delete(tensor.cast::<T>()) };
}

unsafe extern "C" fn end_unversioned(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: it is the destructor of such capsules.
    unsafe { end_capsule::<DLManagedTensor>(capsule, UNVERSIONED) };
}

unsafe extern "C" fn end_versioned(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: it is the destructor of such capsules.
    unsafe { end_capsule::<DLManagedTensorVersioned>(capsule, VERSIONED) };
}

/// Returns the strides of a dense array in elements, last dimension first in memory.
fn strides(shape: &[i64]) -> Box<[i64]> {
    let mut strides = vec![1_i64; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1));
    }
    strides.into_boxed_slice()
}

#[pymethods]
impl Array {
    /// Lengths of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &str {
        &self.element.name
    }

    /// Bytes of the elements.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.element.size
    }

    /// Address of the first element.
    #[getter]
    fn ptr(&self) -> u64 {
        self.addr
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
        match self.place {
            Place::Host => self.interface(py),
            Place::Card(_) => Err(PyAttributeError::new_err(
                "the array is on a card: use a library for CUDA, or copy it to the host",
            )),
        }
    }

    /// The protocol of CuPy and Numba. On a card only.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.place == Place::Host {
            return Err(PyAttributeError::new_err(
                "the device is simulated, so the memory is the host's: use NumPy or DLPack",
            ));
        }
        let entries = self.interface(py)?;
        let stream = match self.export.0.stream_name() {
            StreamName::Raw(0) => Some(1),
            StreamName::Raw(raw) => Some(raw),
            StreamName::Created(handle) => {
                let allocator = self.allocator();
                let number = py.detach(|| allocator.stream_number(handle));
                number.map_err(|error| raise(py, error))?
            }
        };
        entries.set_item("stream", stream)?;
        Ok(entries)
    }

    /// The kind and number of the device, as DLPack has them.
    fn __dlpack_device__(&self) -> (u32, i32) {
        let device = self.place.device();
        (device.device_type.0, device.device_id)
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
        if copy == Some(true) {
            return Err(PyBufferError::new_err("vramp does not copy: pass copy=False or None"));
        }
        if dl_device.is_some_and(|wanted| wanted != self.__dlpack_device__()) {
            return Err(PyBufferError::new_err(
                "the array is on another device, and vramp does not copy: pass dl_device=None",
            ));
        }
        let consumer = self.order(py, stream)?;
        let mut shape: Box<[i64]> = self.shape.iter().map(|len| *len as i64).collect();
        let mut strides = strides(&shape);
        let dl_tensor = self.tensor(&mut shape, &mut strides);
        let export = Some(Export::begin(py, self.export.0.clone_ref(py))?);
        if max_version.is_some_and(|(major, _)| major >= DLPACK_MAJOR_VERSION) {
            let tensor = DLManagedTensorVersioned {
                version: DLPackVersion { major: DLPACK_MAJOR_VERSION, minor: DLPACK_MINOR_VERSION },
                manager_ctx: ptr::null_mut(),
                deleter: Some(delete_versioned),
                flags: 0,
                dl_tensor,
            };
            let managed = Managed { tensor, shape, strides, export, consumer };
            return capsule(py, managed, VERSIONED, end_versioned);
        }
        let tensor = DLManagedTensor {
            dl_tensor,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete_unversioned),
        };
        let managed = Managed { tensor, shape, strides, export, consumer };
        capsule(py, managed, UNVERSIONED, end_unversioned)
    }

    fn __len__(&self) -> PyResult<usize> {
        match self.shape.first() {
            Some(len) => Ok(usize::try_from(*len)?),
            None => Err(PyTypeError::new_err("an array without dimensions has no length")),
        }
    }

    fn __repr__(&self) -> String {
        let place = if self.place == Place::Host { "simulated" } else { "on the card" };
        format!("<vramp.Array {:?} of {}, {place}>", self.shape, self.element.name)
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
    let made = python::call(&asarray, &PyTuple::new(py, [array])?, None)?;
    let wanted = match dtype {
        Some(dtype) => python::call(&asarray, &PyTuple::new(py, [&made, dtype])?, None)?,
        None => made.clone(),
    };
    match copy {
        Some(true) if wanted.is(&made) => {
            let copy = python::attribute(&wanted, intern!(py, "copy"))?;
            python::call(&copy, &PyTuple::empty(py), None)
        }
        Some(false) if !wanted.is(&made) => Err(PyValueError::new_err(
            "the memory has bytes, so another type needs a copy: use array(shape, dtype)",
        )),
        _ => Ok(wanted),
    }
}

fn capsule<'py, T>(
    py: Python<'py>,
    managed: Managed<T>,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut pyo3::ffi::PyObject),
) -> PyResult<Bound<'py, PyCapsule>> {
    let managed = NonNull::from(Box::leak(Box::new(managed)));
    // SAFETY: the pointer is valid until the destructor, or a consumer, deletes it.
    let made = unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, managed.cast(), name, Some(destructor))
    };
    made.inspect_err(|_| {
        // SAFETY: no capsule has the pointer.
        drop(unsafe { Box::from_raw(managed.as_ptr()) });
    })
}
