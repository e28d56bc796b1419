//! A deferrable buffer.

mod methods;

use std::sync::atomic::AtomicI32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use vramp_capi::process::{CallResult, Failure, Kind, StreamName, check_fork};
use vramp_core::Bytes;
use vramp_defer::{DeferrableBuffer, SpillError};

use super::Tiers;
use super::owner::{Caller, in_scope};
use super::shared::{Core, Member, Membership, end};
use crate::arguments::bytes;
use crate::error::raise;
use crate::layout::{Place, place_of};
use crate::python;

/// A buffer whose contents may leave the card while no lease holds it.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Buffer {
    tiers: Py<Tiers>,
    slot: Arc<Slot>,
    _membership: Membership,
    number: u128,
    priority: AtomicI32,
    /// Held for a few instructions.
    last_stream: Mutex<Option<StreamName>>,
    addr: u64,
    len: u64,
}

/// The buffer until its end, or that of the tiers.
struct Slot(Mutex<Option<DeferrableBuffer>>);

impl Slot {
    /// Held for a few instructions.
    fn lock(&self) -> MutexGuard<'_, Option<DeferrableBuffer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member for Slot {
    fn end(&self) {
        let buffer = self.lock().take();
        drop(buffer);
    }
}

impl Buffer {
    pub fn new(
        tiers: &Bound<'_, Tiers>,
        buffer: DeferrableBuffer,
        priority: i32,
    ) -> PyResult<Buffer> {
        let core = tiers.get().core();
        let (range, id) = (buffer.addresses(), buffer.id());
        let slot = Arc::new(Slot(Mutex::new(Some(buffer))));
        let member: Arc<dyn Member> = Arc::<Slot>::clone(&slot);
        let membership = core.join(Arc::downgrade(&member));
        let membership = membership.map_err(|failure| raise(tiers.py(), failure))?;
        Ok(Buffer {
            tiers: tiers.clone().unbind(),
            slot,
            _membership: membership,
            number: core.buffer_number(id),
            priority: AtomicI32::new(priority),
            last_stream: Mutex::new(None),
            addr: range.start.number(),
            len: range.len.count(),
        })
    }

    pub fn core(&self) -> &Arc<Core> {
        self.tiers().core()
    }

    pub fn tiers(&self) -> &Tiers {
        self.tiers.get()
    }

    /// Returns the buffer for one call.
    pub fn inner(&self) -> Result<DeferrableBuffer, Failure> {
        check_fork()?;
        self.slot.lock().clone().ok_or_else(|| {
            Failure::new(Kind::Closed, "the tiers of the buffer are closed: make another one")
        })
    }

    pub fn addr(&self) -> u64 {
        self.addr
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns where its memory is under a lease. `None` if no program may access it.
    pub fn place(&self) -> CallResult<Option<Place>> {
        self.core().allocator.with(|session| Ok(place_of(session, self.addr)))
    }

    /// Returns its id: unique in the process.
    pub fn number(&self) -> u128 {
        self.number
    }

    fn stream_slot(&self) -> MutexGuard<'_, Option<StreamName>> {
        self.last_stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the stream of a lease.
    pub fn leased_for(&self, stream: StreamName) {
        *self.stream_slot() = Some(stream);
    }

    /// Makes a call detached from the interpreter.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&DeferrableBuffer) -> Result<R, SpillError> + Send,
    ) -> PyResult<R> {
        let done = py.detach(|| Ok(call(&self.inner()?)?));
        done.map_err(|failure: Failure| raise(py, failure))
    }

    /// Makes a call that takes a lease for the task or thread which makes it.
    fn call_leasing<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&DeferrableBuffer) -> Result<R, SpillError> + Send,
    ) -> PyResult<R> {
        let owner = Caller::get(py)?.owner;
        let done = in_scope(py, owner, || Ok(call(&self.inner()?)?));
        done.map_err(|failure: Failure| raise(py, failure))
    }

    /// Returns an offset, and the length from there on if none is given.
    fn part(
        &self,
        py: Python<'_>,
        offset: &Bound<'_, PyAny>,
        len: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(Bytes, usize)> {
        let offset = bytes(py, offset, "offset")?;
        let len = match len {
            Some(len) => bytes(py, len, "nbytes")?,
            None => self.len.saturating_sub(offset),
        };
        Ok((Bytes::new(offset), usize::try_from(len)?))
    }
}

/// Returns the bytes of an object. Bytes never change, so they are read without the interpreter. Others
/// are copied before.
pub fn contents<'py>(data: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let py = data.py();
    if let Ok(data) = data.cast::<PyBytes>() {
        return Ok(data.clone());
    }
    let view = python::member(py, "builtins", "memoryview")?;
    let copy = view.call1((data,))?.call_method0(pyo3::intern!(py, "tobytes"))?;
    Ok(copy.cast_into::<PyBytes>()?)
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let buffer = self.slot.lock().take();
        if buffer.is_some() {
            end(buffer);
        }
    }
}
