//! DLPack capsules of arrays.
//!
//! 1. [`export`] makes the consumer's stream wait for the memory's, and returns a capsule. The capsule has
//!    a holder, which keeps the memory.
//! 2. A consumer takes the tensor out of the capsule and calls its deleter, on any thread. Without a
//!    consumer the end of the capsule does that.
//! 3. The deleter tells the holder the consumer's stream, and drops it.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};

use dlpack_ffi::{
    DLManagedTensor, DLManagedTensorVersioned, DLPACK_FLAG_BITMASK_READ_ONLY, DLPACK_MAJOR_VERSION,
    DLPACK_MINOR_VERSION, DLPackVersion,
};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use vramp_capi::process::{OpenAllocator, StreamName};

use crate::calls;
use crate::error::{raise, refuse};
use crate::layout::Layout;
use crate::python::detached;

const UNVERSIONED: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

/// Keeps memory while a capsule or its consumer has it.
pub trait Holder: Send + Sync + 'static {
    fn allocator(&self) -> OpenAllocator;

    /// Returns the stream whose work on the memory comes before the consumer's.
    fn stream(&self) -> StreamName;

    /// Orders what follows after the work that the consumer queued on its stream so far. Called detached
    /// from the interpreter, before the holder is dropped.
    fn used_by(&self, consumer: StreamName);
}

/// Arguments of `__dlpack__`.
pub struct Request {
    pub stream: Option<i64>,
    pub max_version: Option<(u32, u32)>,
    pub dl_device: Option<(u32, i32)>,
    pub copy: Option<bool>,
}

/// Returns a capsule over an array.
pub fn export<'py, H: Holder>(
    py: Python<'py>,
    layout: &Layout,
    holder: H,
    request: &Request,
) -> PyResult<Bound<'py, PyCapsule>> {
    if request.copy == Some(true) {
        return Err(PyBufferError::new_err("vramp does not copy: pass copy=False or None"));
    }
    if request.dl_device.is_some_and(|wanted| wanted != layout.dlpack_device()) {
        return Err(PyBufferError::new_err(
            "the array is on another device, and vramp does not copy: pass dl_device=None",
        ));
    }
    let consumer = order(py, layout, &holder, request.stream)?;
    let mut shape: Box<[i64]> = layout.shape.iter().map(|len| *len as i64).collect();
    let mut strides = strides(&shape);
    let dl_tensor = layout.tensor(&mut shape, &mut strides);
    let holder = Some(holder);
    if request.max_version.is_some_and(|(major, _)| major >= DLPACK_MAJOR_VERSION) {
        let tensor = DLManagedTensorVersioned {
            version: DLPackVersion { major: DLPACK_MAJOR_VERSION, minor: DLPACK_MINOR_VERSION },
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete_versioned::<H>),
            flags: if layout.is_read_only { DLPACK_FLAG_BITMASK_READ_ONLY.into() } else { 0 },
            dl_tensor,
        };
        let managed = Managed { tensor, shape, strides, holder, consumer };
        return capsule(py, managed, VERSIONED, end_versioned::<H>);
    }
    let tensor = DLManagedTensor {
        dl_tensor,
        manager_ctx: ptr::null_mut(),
        deleter: Some(delete_unversioned::<H>),
    };
    let managed = Managed { tensor, shape, strides, holder, consumer };
    capsule(py, managed, UNVERSIONED, end_unversioned::<H>)
}

/// Makes the consumer's stream wait for the memory's. Returns the stream that uses the memory.
fn order(
    py: Python<'_>,
    layout: &Layout,
    holder: &impl Holder,
    stream: Option<i64>,
) -> PyResult<Option<StreamName>> {
    if layout.is_on_host() {
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
    let (allocator, own) = (holder.allocator(), holder.stream());
    let ordered = py.detach(|| calls::order(allocator, consumer, own));
    ordered.map_err(|error| raise(py, error))?;
    Ok(Some(consumer))
}

/// Returns the strides of a dense array in elements, last dimension first in memory.
fn strides(shape: &[i64]) -> Box<[i64]> {
    let mut strides = vec![1_i64; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1));
    }
    strides.into_boxed_slice()
}

/// What a capsule points to. `tensor` is first, and the deleter finds the rest behind it.
#[repr(C)]
struct Managed<T, H: Holder> {
    tensor: T,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    holder: Option<H>,
    /// The stream that uses the memory until the deleter is called.
    consumer: Option<StreamName>,
}

impl<T, H: Holder> Drop for Managed<T, H> {
    fn drop(&mut self) {
        let Some(holder) = self.holder.take() else { return };
        let Some(consumer) = self.consumer else { return };
        detached(|| holder.used_by(consumer));
    }
}

/// # Safety
/// `tensor` points to a `Managed<T, H>` that was boxed, and is not used afterwards.
unsafe fn delete<T, H: Holder>(tensor: *mut T) {
    if !tensor.is_null() {
        // SAFETY: this function's contract; the tensor is the first field.
        drop(unsafe { Box::from_raw(tensor.cast::<Managed<T, H>>()) });
    }
}

unsafe extern "C" fn delete_unversioned<H: Holder>(tensor: *mut DLManagedTensor) {
    // SAFETY: the consumer passes what the capsule had, once.
    unsafe { delete::<_, H>(tensor) };
}

unsafe extern "C" fn delete_versioned<H: Holder>(tensor: *mut DLManagedTensorVersioned) {
    // SAFETY: as above.
    unsafe { delete::<_, H>(tensor) };
}

/// Deletes the tensor of a capsule that no consumer took: a consumer renames it.
///
/// # Safety
/// `capsule` is a capsule of a tensor of this type and holder under this name.
unsafe fn end_capsule<T, H: Holder>(capsule: *mut pyo3::ffi::PyObject, name: &CStr) {
    // SAFETY: a capsule that is being destroyed is valid.
    if unsafe { pyo3::ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: it is valid under this name.
    let tensor = unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) };
    // SAFETY: it was not taken, so it is deleted here only.
    unsafe { delete::<T, H>(tensor.cast::<T>()) };
}

unsafe extern "C" fn end_unversioned<H: Holder>(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: it is the destructor of such capsules.
    unsafe { end_capsule::<DLManagedTensor, H>(capsule, UNVERSIONED) };
}

unsafe extern "C" fn end_versioned<H: Holder>(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: it is the destructor of such capsules.
    unsafe { end_capsule::<DLManagedTensorVersioned, H>(capsule, VERSIONED) };
}

fn capsule<'py, T, H: Holder>(
    py: Python<'py>,
    managed: Managed<T, H>,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut pyo3::ffi::PyObject),
) -> PyResult<Bound<'py, PyCapsule>> {
    let managed = NonNull::from(Box::leak(Box::new(managed)));
    // SAFETY: the pointer is valid until the destructor, or a consumer, deletes it.
    let made = unsafe {
        PyCapsule::new_with_pointer_and_destructor(
            py,
            managed.cast::<c_void>(),
            name,
            Some(destructor),
        )
    };
    made.inspect_err(|_| {
        // SAFETY: no capsule has the pointer.
        drop(unsafe { Box::from_raw(managed.as_ptr()) });
    })
}
