//! A pin keeps a buffer on the card.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use vramp_capi::process::Failure;
use vramp_defer::Access;
use vramp_defer::Pin;

use super::Buffer;
use super::owner::{Caller, in_scope};
use super::shared::{OpenHold, end};
use crate::error::raise;

/// Keeps a buffer on the card. It ends by `unpin`, at the end of a `with` block, or with the last
/// reference.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct BufferPin {
    buffer: Py<Buffer>,
    /// `None` once it has ended. Held for a few instructions.
    pin: Mutex<Option<(Pin, OpenHold)>>,
}

impl BufferPin {
    pub fn new(buffer: &Bound<'_, Buffer>) -> PyResult<BufferPin> {
        let memory = buffer.get();
        let owner = Caller::get(buffer.py())?.owner;
        let pinned = in_scope(buffer.py(), owner, || {
            let hold = memory.core().hold()?;
            let lease = memory.inner()?.lease(Access::Shared, hold.open.tiers.stream())?;
            let pin = lease.pin(0)?;
            drop(lease);
            Ok((pin, hold))
        });
        let pin = pinned.map_err(|failure: Failure| raise(buffer.py(), failure))?;
        Ok(BufferPin { buffer: buffer.clone().unbind(), pin: Mutex::new(Some(pin)) })
    }

    fn take(&self) -> Option<(Pin, OpenHold)> {
        self.pin.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl BufferPin {
    /// The buffer.
    #[getter]
    fn buffer(&self, py: Python<'_>) -> Py<Buffer> {
        self.buffer.clone_ref(py)
    }

    /// Address of the first byte.
    #[getter]
    fn ptr(&self) -> u64 {
        self.buffer.get().addr()
    }

    /// True once it has ended.
    #[getter]
    fn is_unpinned(&self) -> bool {
        self.pin.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Ends the pin.
    fn unpin(&self) {
        end(self.take());
    }

    fn __enter__<'py>(slf: Bound<'py, BufferPin>) -> Bound<'py, BufferPin> {
        slf
    }

    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) {
        end(self.take());
    }

    fn __repr__(&self) -> String {
        let end = if self.is_unpinned() { ", ended" } else { "" };
        format!("<vramp.BufferPin of buffer {}{end}>", self.buffer.get().number())
    }
}

impl Drop for BufferPin {
    fn drop(&mut self) {
        let pin = self.take();
        if pin.is_some() {
            end(pin);
        }
    }
}
