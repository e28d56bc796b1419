//! What Python calls of memory that processes share.

use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use vramp_alloc::sharing::Ticket;
use vramp_capi::process::check_fork;

use super::{Exported, Imported};
use crate::arguments::bytes;
use crate::array::{self, Array};
use crate::calls::id_of;
use crate::error::{not_pickled, raise, refuse};
use crate::owner::Owner;
use crate::pool::Pool;
use crate::python;
use crate::stream::stream_in;

/// How long a wait runs without a look at signals.
const SLICE: Duration = Duration::from_millis(100);

/// The longest time that a wait may be given. More means for ever.
const LONGEST: f64 = 1e9;

#[pymethods]
impl Exported {
    /// Returns a ticket for another process.
    #[pyo3(signature = (keep_until_opened = true, *, synchronize = true))]
    fn ticket<'py>(
        &self,
        py: Python<'py>,
        keep_until_opened: bool,
        synchronize: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let shared = self.open(py)?;
        if synchronize {
            let stream = self.stream;
            self.pool.get().call(py, |session| session.synchronize(id_of(session, stream)?))?;
        }
        check_fork().map_err(|error| raise(py, error))?;
        let ticket = match keep_until_opened {
            true => shared.grant().map_err(|error| raise(py, error))?,
            false => shared.ticket(),
        };
        let class = python::member(py, "vramp.ipc", "Ticket")?;
        class.call1((PyBytes::new(py, &ticket.to_bytes()),))
    }

    /// Ends the hold of a ticket that did not arrive.
    fn revoke(&self, py: Python<'_>, ticket: &[u8]) -> PyResult<bool> {
        let shared = self.open(py)?;
        check_fork().map_err(|error| raise(py, error))?;
        let ticket = Ticket::from_bytes(ticket);
        Ok(shared.revoke(&ticket.map_err(|error| refuse(py, "TicketError", &error.to_string()))?))
    }

    /// Number of opens that importers have not closed.
    #[getter]
    fn opens(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.open(py)?.opens())
    }

    /// True while an importer has it open, or a ticket that keeps it was not opened.
    #[getter]
    fn is_held(&self, py: Python<'_>) -> PyResult<bool> {
        let shared = self.open(py)?;
        Ok(py.detach(|| shared.is_held()))
    }

    /// Waits until it is not held.
    #[pyo3(signature = (timeout = None))]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let shared = self.open(py)?;
        let limit = match timeout {
            Some(seconds) if seconds.is_nan() || seconds < 0.0 => {
                let text = format!("timeout is {seconds}: use seconds from 0 on, or None");
                return Err(refuse(py, "RangeError", &text));
            }
            Some(seconds) if seconds < LONGEST => {
                Some(Instant::now() + Duration::from_secs_f64(seconds))
            }
            _ => None,
        };
        loop {
            let slice = Instant::now() + SLICE;
            let until = limit.map_or(slice, |limit| limit.min(slice));
            if py.detach(|| shared.wait_released(until)) {
                return Ok(true);
            }
            if limit.is_some_and(|limit| limit <= Instant::now()) {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    /// Closes the export.
    fn close(&self, py: Python<'_>) {
        self.end(py);
    }

    /// True once it was closed.
    #[getter]
    fn is_closed(&self) -> bool {
        self.lock().is_none()
    }

    /// Address of the block in this process.
    #[getter]
    fn ptr(&self) -> u64 {
        self.addr
    }

    /// The pool of the block.
    #[getter]
    fn pool(&self, py: Python<'_>) -> Py<Pool> {
        self.pool.clone_ref(py)
    }

    fn __enter__<'py>(slf: Bound<'py, Exported>) -> Bound<'py, Exported> {
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

    /// Refuses to be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(not_pickled("Exported"))
    }

    fn __repr__(&self) -> String {
        match &*self.lock() {
            Some(shared) => {
                format!("<vramp.Exported at {:#x}, open {} times>", self.addr, shared.opens())
            }
            None => "<vramp.Exported, closed>".to_owned(),
        }
    }
}

#[pymethods]
impl Imported {
    /// Address of the first byte in this process.
    #[getter]
    fn ptr(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_open(py)?;
        Ok(self.addr)
    }

    /// Bytes of the exporter's block.
    #[getter]
    fn size(&self) -> u64 {
        self.len
    }

    /// The pool that opened it.
    #[getter(pool)]
    fn owner(&self, py: Python<'_>) -> Py<Pool> {
        self.pool.clone_ref(py)
    }

    /// True once it was closed.
    #[getter]
    fn is_closed(&self) -> bool {
        self.is_ended()
    }

    /// Records that work queued on a stream, so far and from now on, uses the memory.
    #[pyo3(signature = (stream = None))]
    fn record_stream(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.check_open(py)?;
        let stream = stream_in(self.pool.bind(py), stream)?.name;
        py.detach(|| self.record(stream)).map_err(|error| raise(py, error))
    }

    /// Returns an array in the memory.
    #[pyo3(signature = (shape = None, dtype = None, *, offset = None))]
    fn array(
        slf: &Bound<'_, Imported>,
        shape: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        offset: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Array> {
        let offset = offset.map_or(Ok(0), |offset| bytes(slf.py(), offset, "offset"))?;
        Array::new(slf.py(), Owner::Imported(slf.clone().unbind()), shape, dtype, offset)
    }

    /// Returns a NumPy array of bytes that shares the memory, on the simulator.
    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        slf: &Bound<'py, Imported>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        array::numpy_bytes(slf.py(), Owner::Imported(slf.clone().unbind()), dtype, copy)
    }

    /// Waits for recorded work, unmaps the memory, and closes it at the exporter.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py)
    }

    fn __enter__<'py>(slf: Bound<'py, Imported>) -> Bound<'py, Imported> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let ended = self.end(py);
        // An exception of the block is not replaced. The last reference closes the memory then.
        if kind.is_none() { ended } else { Ok(()) }
    }

    /// Refuses to be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(not_pickled("Imported"))
    }

    fn __repr__(&self) -> String {
        match self.is_ended() {
            true => format!("<vramp.Imported of {} bytes, closed>", self.len),
            false => format!("<vramp.Imported of {} bytes at {:#x}>", self.len, self.addr),
        }
    }
}
