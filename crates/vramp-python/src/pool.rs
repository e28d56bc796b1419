//! A pool of a device's memory.

mod methods;

use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use vramp_alloc::device::DeviceInfo;
use vramp_alloc::stats::MemoryStats;
use vramp_capi::process::{Block, CallResult, Exports, OpenAllocator, Session, StreamName};

use crate::calls::{free, id_of};
use crate::error::{raise, refuse};
use crate::python::detached;
use crate::tiers::Core;

/// A pool of device memory.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Pool {
    allocator: OpenAllocator,
    /// True for a pool of the program's own, which ends with its last reference.
    is_owned: bool,
    /// Those of its allocations. Closed while a thread closes the pool, and once it did.
    exports: Exports,
    /// The tiers below it that were not dropped, and some that were.
    tiers: Mutex<Vec<Weak<Core>>>,
}

/// Returns statistics under PyTorch's names.
pub fn named<'py>(py: Python<'py>, stats: &MemoryStats) -> PyResult<Bound<'py, PyDict>> {
    let named = PyDict::new(py);
    for (name, value) in stats.by_name() {
        match (name.as_str(), value) {
            ("max_split_size", u64::MAX) => named.set_item(name, -1)?,
            _ => named.set_item(name, value)?,
        }
    }
    Ok(named)
}

impl Pool {
    pub fn shared(allocator: OpenAllocator) -> Pool {
        Pool { allocator, is_owned: false, exports: Exports::default(), tiers: Mutex::default() }
    }

    pub fn owned(allocator: OpenAllocator) -> Pool {
        Pool { allocator, is_owned: true, exports: Exports::default(), tiers: Mutex::default() }
    }

    pub fn allocator(&self) -> OpenAllocator {
        self.allocator
    }

    /// Makes a call detached from the interpreter.
    pub fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Session) -> CallResult<R> + Send,
    ) -> PyResult<R> {
        let allocator = self.allocator;
        py.detach(|| allocator.with(call)).map_err(|error| raise(py, error))
    }

    /// Returns what the device is.
    pub fn info(&self, py: Python<'_>) -> PyResult<DeviceInfo> {
        self.call(py, |session| Ok(session.allocator().driver().info().clone()))
    }

    /// Counts an export of one of its allocations.
    pub fn begin_export(&self, py: Python<'_>) -> PyResult<()> {
        match self.exports.begin() {
            true => Ok(()),
            false => Err(refuse(py, "ClosedError", "the pool is closed: open another one")),
        }
    }

    /// Ends an export, on any thread.
    pub fn end_export(&self) {
        self.exports.end();
    }

    /// Adds tiers, which end with the pool.
    pub fn add_tiers(&self, core: &Arc<Core>) {
        let mut tiers = self.tiers.lock().unwrap_or_else(PoisonError::into_inner);
        tiers.retain(|core| core.strong_count() > 0);
        tiers.push(Arc::downgrade(core));
    }

    /// A hit stays attached to the interpreter, because it takes no lock that another thread may hold
    /// while it waits for the interpreter, and detaching costs as much as the hit.
    #[inline]
    pub fn place(&self, py: Python<'_>, size: u64, stream: StreamName) -> PyResult<Block> {
        if let Some(block) = self.allocator.malloc_at_hand(size, stream) {
            return Ok(block);
        }
        self.call(py, |session| session.place(size, id_of(session, stream)?))
    }

    /// As `place`.
    #[inline]
    pub fn free(&self, py: Python<'_>, addr: u64, stream: StreamName) -> PyResult<()> {
        if self.allocator.free_at_hand(addr, stream) {
            return Ok(());
        }
        let allocator = self.allocator;
        py.detach(|| free(allocator, addr, stream)).map_err(|error| raise(py, error))
    }

    pub fn note_use(&self, py: Python<'_>, addr: u64, stream: StreamName) -> PyResult<()> {
        self.call(py, |session| session.record_use(addr, id_of(session, stream)?))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.is_owned {
            let allocator = self.allocator;
            // A pool that was closed is unknown by now.
            detached(move || drop(allocator.close()));
        }
    }
}
