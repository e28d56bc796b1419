//! Layouts: where an array lies, with its shape and element type, and NumPy's description of it.

use dlpack_ffi::{DLDataType, DLDevice, DLDeviceType, DLTensor};
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyTuple};
use std::ffi::c_void;
use std::ptr;
use vramp_capi::process::{CallResult, OpenAllocator, Session, StreamName};

use crate::arguments::bytes;
use crate::calls::number_of;
use crate::error::{raise, refuse};
use crate::python;

/// Element type of an array.
pub struct Element {
    /// Name, such as `float32`.
    pub name: String,
    /// Type string of the array interfaces. Empty if they cannot express it.
    code: String,
    dlpack: DLDataType,
    size: u64,
}

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Memory of the host, on the simulator.
    Host,
    Card(i32),
}

impl Place {
    pub fn device(self) -> DLDevice {
        match self {
            Place::Host => DLDevice { device_type: DLDeviceType::kDLCPU, device_id: 0 },
            Place::Card(ordinal) => {
                DLDevice { device_type: DLDeviceType::kDLCUDA, device_id: ordinal }
            }
        }
    }
}

/// Memory that an array may lie in.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub addr: u64,
    /// Bytes that an array has by default.
    pub size: u64,
    /// Bytes that it may have.
    pub usable: u64,
    pub place: Place,
    pub is_read_only: bool,
}

/// A dense array in memory.
pub struct Layout {
    pub element: Element,
    pub shape: Vec<u64>,
    pub addr: u64,
    pub place: Place,
    pub is_read_only: bool,
}

impl Layout {
    pub fn new(
        py: Python<'_>,
        memory: Memory,
        shape: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        offset: u64,
    ) -> PyResult<Layout> {
        let element = element(py, dtype)?;
        let shape = match shape {
            Some(shape) => shape_of(shape)?,
            None => vec![memory.size.saturating_sub(offset) / element.size],
        };
        let count = shape.iter().try_fold(1_u64, |count, len| count.checked_mul(*len));
        let end = count.and_then(|n| n.checked_mul(element.size)?.checked_add(offset));
        if end.is_none_or(|end| end > memory.usable) {
            let text = format!(
                "an array of shape {shape:?} and type {} from byte {offset} on does not fit into {} \
                 bytes: allocate more",
                element.name, memory.usable
            );
            return Err(refuse(py, "RangeError", &text));
        }
        if !offset.is_multiple_of(element.size) {
            let text = format!("the offset {offset} is not a multiple of {} bytes", element.size);
            return Err(refuse(py, "RangeError", &text));
        }
        let Memory { place, is_read_only, .. } = memory;
        Ok(Layout { element, shape, addr: memory.addr + offset, place, is_read_only })
    }

    pub fn nbytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.element.size
    }

    pub fn is_on_host(&self) -> bool {
        self.place == Place::Host
    }

    /// Returns the entries of NumPy's protocol. Fails on a card.
    pub fn array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        match self.place {
            Place::Host => self.interface(py),
            Place::Card(_) => Err(PyAttributeError::new_err(
                "the array is on a card: use a library for CUDA, or copy it to the host",
            )),
        }
    }

    /// Returns the entries of the protocol of CuPy and Numba. Fails on the simulator.
    pub fn cuda_array_interface<'py>(
        &self,
        py: Python<'py>,
        allocator: OpenAllocator,
        stream: StreamName,
    ) -> PyResult<Bound<'py, PyDict>> {
        if self.is_on_host() {
            return Err(PyAttributeError::new_err(
                "the device is simulated, so the memory is the host's: use NumPy or DLPack",
            ));
        }
        let entries = self.interface(py)?;
        let stream = match stream {
            StreamName::Raw(0) => Some(1),
            StreamName::Raw(raw) => Some(raw),
            StreamName::Created(handle) => {
                let number = py.detach(|| number_of(allocator, handle));
                number.map_err(|error| raise(py, error))?
            }
        };
        entries.set_item("stream", stream)?;
        Ok(entries)
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
        entries.set_item("data", (self.addr, self.is_read_only))?;
        entries.set_item("strides", py.None())?;
        entries.set_item("version", 3)?;
        Ok(entries)
    }

    /// Returns the kind and number of the device, as DLPack has them.
    pub fn dlpack_device(&self) -> (u32, i32) {
        let device = self.place.device();
        (device.device_type.0, device.device_id)
    }

    /// Returns the length of the first dimension.
    pub fn len(&self) -> PyResult<usize> {
        match self.shape.first() {
            Some(len) => Ok(usize::try_from(*len)?),
            None => Err(PyTypeError::new_err("an array without dimensions has no length")),
        }
    }

    pub fn tensor(&self, shape: &mut [i64], strides: &mut [i64]) -> DLTensor {
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
pub fn place_of(session: &Session, addr: u64) -> Option<Place> {
    let device = session.allocator().driver().info();
    if device.simulated {
        return session.is_host_memory(addr).then_some(Place::Host);
    }
    let ordinal = device.id.strip_prefix("cuda:").and_then(|number| number.parse().ok());
    Some(Place::Card(ordinal.unwrap_or(0)))
}

/// Returns where memory is, or an error if no program may access it.
pub fn accessible(py: Python<'_>, found: CallResult<Option<Place>>) -> PyResult<Place> {
    let found = found.map_err(|error| raise(py, error))?;
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

/// Returns the type of bytes. No Python code runs, so that arrays can be made while modules end.
fn bytes_type() -> Element {
    let dlpack = DLDataType { code: 1, bits: 8, lanes: 1 };
    Element { name: "uint8".to_owned(), code: "|u1".to_owned(), dlpack, size: 1 }
}

/// Returns the element type of an argument. `vramp._dtypes` knows the names.
fn element(py: Python<'_>, dtype: Option<&Bound<'_, PyAny>>) -> PyResult<Element> {
    let Some(dtype) = dtype else { return Ok(bytes_type()) };
    let parse = python::member(py, "vramp._dtypes", "parse")?;
    let parsed = parse.call1((dtype,))?;
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
