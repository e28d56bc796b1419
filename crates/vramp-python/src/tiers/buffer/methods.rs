//! What Python calls of a buffer.

use std::sync::atomic::Ordering;

use pyo3::basic::CompareOp;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use vramp_capi::process::StreamName;
use vramp_core::Bytes;
use vramp_defer::{DeferrableBuffer, SpillError, SpillTier};
use vramp_tiers::Tier;

use super::super::lease::Lease;
use super::super::pin::BufferPin;
use super::super::{Tiers, tier_of};
use super::{Buffer, contents};
use crate::arguments::bytes;
use crate::calls::number_of;
use crate::error::raise;

#[pymethods]
impl Buffer {
    /// Number of the buffer, unique in the process.
    #[getter]
    fn id(&self) -> u128 {
        self.number()
    }

    /// Bytes of the buffer.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.len()
    }

    /// Address of the first byte.
    #[getter]
    fn ptr(&self) -> u64 {
        self.addr()
    }

    /// The tiers that it belongs to.
    #[getter(tiers)]
    fn owner(&self, py: Python<'_>) -> Py<Tiers> {
        self.tiers.clone_ref(py)
    }

    /// True if all contents are on the card now.
    #[getter]
    fn is_resident(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, |buffer| Ok(buffer.is_resident()))
    }

    /// True if contents are below the card.
    #[getter]
    fn is_deferred(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, |buffer| Ok(buffer.is_deferred()))
    }

    /// True if a lease holds it.
    #[getter]
    fn is_locked(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, |buffer| Ok(buffer.is_locked()))
    }

    /// Priority. Buffers of lower priority leave first.
    #[getter]
    fn priority(&self) -> i32 {
        self.priority.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_priority(&self, py: Python<'_>, priority: i32) -> PyResult<()> {
        self.call(py, |buffer| {
            buffer.set_priority(priority);
            self.priority.store(priority, Ordering::Relaxed);
            Ok(())
        })
    }

    /// True while the contents are in memory that was adopted.
    #[getter]
    fn is_adopted(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, |buffer| Ok(buffer.is_adopted()))
    }

    /// Number of the stream of the last lease.
    #[getter]
    fn last_stream(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        match *self.stream_slot() {
            None => Ok(None),
            Some(StreamName::Raw(raw)) => Ok(Some(raw)),
            Some(StreamName::Created(handle)) => {
                let allocator = self.core().allocator;
                let number = py.detach(|| number_of(allocator, handle));
                // A simulated stream has the number of its handle, and so has one that was destroyed.
                Ok(Some(number.ok().flatten().unwrap_or(handle.id)))
            }
        }
    }

    /// Evicts it.
    fn spill(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.call(py, DeferrableBuffer::spill)?.count())
    }

    /// Evicts it to a tier.
    fn spill_to(&self, py: Python<'_>, tier: &str) -> PyResult<u64> {
        let to = match tier_of(tier)? {
            Tier::Host => SpillTier::Host,
            Tier::Disk => SpillTier::Disk,
            Tier::Gpu => {
                return Err(PyTypeError::new_err("a buffer leaves the card: use 'host' or 'disk'"));
            }
        };
        Ok(self.call(py, |buffer| buffer.spill_to(to))?.count())
    }

    /// Returns a request for a lease.
    #[pyo3(signature = (
        access = "rw", stream = None, *, timeout = None, shape = None, dtype = None, in_place = false,
    ))]
    fn lease(
        slf: &Bound<'_, Buffer>,
        access: &str,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        shape: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        in_place: bool,
    ) -> PyResult<Lease> {
        Lease::new(slf, access, stream, timeout, (shape, dtype), in_place)
    }

    /// Restores it ahead of need.
    fn prefetch(&self, py: Python<'_>) -> PyResult<()> {
        self.call_leasing(py, DeferrableBuffer::prefetch)
    }

    /// Restores it, and waits until it is there.
    fn retrieve(slf: &Bound<'_, Buffer>) -> PyResult<()> {
        slf.get().tiers.get().retrieve_all(slf.py(), &[slf.clone().unbind()])
    }

    /// Hints that it is needed soon.
    fn will_need(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |buffer| {
            buffer.will_need();
            Ok(())
        })
    }

    /// Hints that it is not needed soon.
    fn wont_need(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |buffer| {
            buffer.wont_need();
            Ok(())
        })
    }

    /// Discards the contents.
    fn discard(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, DeferrableBuffer::discard)
    }

    /// Keeps it on the card.
    fn pin(slf: &Bound<'_, Buffer>) -> PyResult<BufferPin> {
        BufferPin::new(slf)
    }

    /// Returns contents.
    #[pyo3(signature = (offset = None, nbytes = None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: Option<&Bound<'py, PyAny>>,
        nbytes: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let zero = 0_u8.into_pyobject(py)?.into_any();
        let (offset, len) = self.part(py, offset.unwrap_or(&zero), nbytes)?;
        // Fails before memory of the result is taken.
        let end = offset.checked_add(Bytes::new(len as u64));
        if end.is_none_or(|end| end > Bytes::new(self.len)) {
            let whole = Bytes::new(self.len);
            let len = Bytes::new(len as u64);
            return Err(raise(py, SpillError::Outside { offset, len, whole }));
        }
        PyBytes::new_with(py, len, |into| self.call_leasing(py, |buffer| buffer.read(offset, into)))
    }

    /// Writes contents.
    #[pyo3(signature = (data, offset = None))]
    fn write(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        offset: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let offset = offset.map_or(Ok(0), |offset| bytes(py, offset, "offset"))?;
        let data = contents(data)?;
        let data = data.as_bytes();
        self.call_leasing(py, |buffer| buffer.write(Bytes::new(offset), data))
    }

    /// Refuses to be an array: without a lease the memory may leave while a library uses it.
    #[pyo3(signature = (*_arguments, **_named))]
    fn array(
        &self,
        _arguments: &Bound<'_, PyTuple>,
        _named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a vramp.Buffer has no memory of its own until it is leased: with buffer.lease() as view, and then \
             view.array(...)",
        ))
    }

    /// Refuses to be an array, as NumPy asks for one.
    #[pyo3(signature = (*arguments, **named))]
    fn __array__(
        &self,
        arguments: &Bound<'_, PyTuple>,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        self.array(arguments, named)
    }

    /// Refuses to be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a vramp.Buffer cannot be pickled or copied, because its memory stays in this process: send \
             buffer.read(), and write it to a buffer there",
        ))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.len())?)
    }

    /// Records of freed buffers compare themselves.
    fn __richcmp__<'py>(
        &self,
        other: &Bound<'py, PyAny>,
        order: CompareOp,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = other.py();
        let same = other.cast::<Buffer>().ok().map(|other| other.get().number() == self.number());
        let equal = match (order, same) {
            (CompareOp::Eq, Some(same)) => same,
            (CompareOp::Ne, Some(same)) => !same,
            _ => return Ok(py.NotImplemented().into_bound(py)),
        };
        Ok(equal.into_pyobject(py)?.to_owned().into_any())
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        self.number().into_pyobject(py)?.hash()
    }

    fn __repr__(&self) -> String {
        format!("<vramp.Buffer {} of {} bytes at {:#x}>", self.number(), self.len(), self.addr())
    }
}
