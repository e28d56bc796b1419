//! Streams, and what may be passed as one.

use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt};
use vramp_capi::abi::vramp_stream_t;
use vramp_capi::process::{Session, StreamName};

use crate::arguments::bytes;
use crate::calls::number_of;
use crate::error::{raise, refuse};
use crate::pool::Pool;
use crate::python;

/// A stream that a pool created. It is destroyed with the last reference; work queued on it still
/// runs.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Stream {
    pool: Py<Pool>,
    handle: vramp_stream_t,
}

impl Stream {
    pub fn new(pool: Py<Pool>, handle: vramp_stream_t) -> Stream {
        Stream { pool, handle }
    }
}

#[pymethods]
impl Stream {
    /// The pool that created the stream.
    #[getter]
    fn pool(&self, py: Python<'_>) -> Py<Pool> {
        self.pool.clone_ref(py)
    }

    /// Version and address of the stream, for other libraries. On a card only.
    fn __cuda_stream__(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let (allocator, handle) = (self.pool.get().allocator(), self.handle);
        let number = py.detach(|| number_of(allocator, handle));
        match number.map_err(|error| raise(py, error))? {
            Some(number) => Ok((0, number)),
            None => Err(refuse(
                py,
                "UnsupportedError",
                "the stream is simulated: only vramp can use it",
            )),
        }
    }

    fn __repr__(&self) -> String {
        format!("<vramp.Stream {:#x}>", self.handle.id)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let (allocator, name) = (self.pool.get().allocator(), StreamName::Created(self.handle));
        // A closed pool has destroyed its streams. Another failure leaves the stream to the close.
        python::detached(move || drop(allocator.with(|session| session.forget_named(name))));
    }
}

/// Returns the stream that an argument names.
#[inline]
pub fn stream_of(stream: Option<&Bound<'_, PyAny>>) -> PyResult<StreamName> {
    match stream {
        None => Ok(StreamName::Raw(0)),
        Some(stream) => named(stream),
    }
}

/// A stream that an argument names, and the object that was passed for it.
pub struct NamedStream {
    pub name: StreamName,
    /// Keeps the stream alive. `None` for a number.
    pub object: Option<Py<PyAny>>,
}

/// Returns the stream that an argument names, for calls on `pool` that register it there. An object of
/// another library may destroy its stream with its last reference, so it is kept until the pool has
/// forgotten the stream. O(1) amortized.
#[inline]
pub fn stream_in(
    pool: &Bound<'_, Pool>,
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<NamedStream> {
    let Some(stream) = stream else {
        return Ok(NamedStream { name: StreamName::Raw(0), object: None });
    };
    let name = named(stream)?;
    if stream.is_instance_of::<PyInt>() {
        return Ok(NamedStream { name, object: None });
    }
    if let StreamName::Raw(raw) = name {
        let py = pool.py();
        let keep = python::member(py, "vramp._adaptors", "keep_stream")?;
        keep.call1((pool, raw, stream))?;
    }
    Ok(NamedStream { name, object: Some(stream.clone().unbind()) })
}

fn named(stream: &Bound<'_, PyAny>) -> PyResult<StreamName> {
    if stream.is_instance_of::<PyInt>() && !stream.is_instance_of::<PyBool>() {
        return number(stream);
    }
    if let Ok(created) = stream.cast::<Stream>() {
        return Ok(StreamName::Created(created.get().handle));
    }
    let py = stream.py();
    let protocol = match stream.getattr(intern!(py, "__cuda_stream__")) {
        Err(error) if error.is_instance_of::<PyAttributeError>(py) => {
            return Err(PyTypeError::new_err(format!(
                "a stream is None, an int, a vramp.Stream or an object with __cuda_stream__, and not {}",
                stream.get_type().name()?
            )));
        }
        protocol => protocol?,
    };
    // The protocol is a method. Early versions of it were a property.
    let pair = match protocol.is_callable() {
        true => protocol.call0()?,
        false => protocol,
    };
    let (version, handle): (Bound<'_, PyInt>, Bound<'_, PyAny>) = pair.extract()?;
    let version: u64 = version.extract()?;
    if version != 0 {
        let text = format!(
            "__cuda_stream__ has version {version}, and vramp knows version 0: pass the stream's \
             address as an int"
        );
        return Err(refuse(py, "UnsupportedError", &text));
    }
    number(&handle)
}

fn number(stream: &Bound<'_, PyAny>) -> PyResult<StreamName> {
    let py = stream.py();
    let raw = bytes(py, stream, "a stream").map_err(|_| {
        let text = match stream.is_instance_of::<PyInt>() {
            true => format!("{stream} is not the address of a stream"),
            false => format!("an object of {} is not the address of a stream", stream.get_type()),
        };
        refuse(py, "RangeError", &text)
    })?;
    // cudaStreamLegacy is another name of the default stream.
    Ok(StreamName::Raw(if raw == 1 { 0 } else { raw }))
}

/// Creates a stream of `pool`.
pub fn create(pool: &Bound<'_, Pool>) -> PyResult<Stream> {
    let create = |session: &Session| Ok(session.handle_of(session.create_stream()?));
    let handle = pool.get().call(pool.py(), create)?;
    Ok(Stream::new(pool.clone().unbind(), handle))
}
