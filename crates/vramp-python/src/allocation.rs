//! A block of memory that frees itself.
//!
//! 1. A malloc returns it, live.
//! 2. Arrays and DLPack capsules over it are its exports. While there are some it is not freed.
//! 3. `free`, the end of a `with` block or the last reference frees it, once.

mod methods;

use pyo3::prelude::*;
use vramp_capi::process::{Block, Exports, NotClosed, StreamName};

use crate::calls::free;
use crate::error::refuse;
use crate::pool::Pool;
use crate::python::detached;
use crate::stream::NamedStream;

/// A block of device memory.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Allocation {
    pool: Py<Pool>,
    block: Block,
    size: u64,
    stream: StreamName,
    /// Keeps the stream alive: what was passed for it.
    stream_object: Option<Py<PyAny>>,
    /// Closed once it was freed.
    exports: Exports,
}

impl Allocation {
    #[inline]
    pub fn new(pool: &Bound<'_, Pool>, block: Block, size: u64, stream: NamedStream) -> Allocation {
        Allocation {
            pool: pool.clone().unbind(),
            block,
            size,
            stream: stream.name,
            stream_object: stream.object,
            exports: Exports::default(),
        }
    }

    pub fn addr(&self) -> u64 {
        self.block.addr
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn usable(&self) -> u64 {
        self.block.len
    }

    pub fn stream_name(&self) -> StreamName {
        self.stream
    }

    pub fn pool(&self) -> &Py<Pool> {
        &self.pool
    }

    /// Returns the stream that it was allocated for, with what keeps it alive.
    pub fn named_stream(&self, py: Python<'_>) -> NamedStream {
        let object = self.stream_object.as_ref().map(|object| object.clone_ref(py));
        NamedStream { name: self.stream, object }
    }

    /// Fails if the block was freed.
    pub fn live_addr(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_live(py)?;
        Ok(self.block.addr)
    }

    fn is_freed(&self) -> bool {
        self.exports.is_closed()
    }

    #[cold]
    fn freed_before(&self, py: Python<'_>) -> PyErr {
        let text = format!("the allocation of {} bytes was freed before", self.size);
        refuse(py, "UnknownPointerError", &text)
    }

    fn check_live(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_freed() { Err(self.freed_before(py)) } else { Ok(()) }
    }

    /// Counts an export.
    pub fn begin_export(&self, py: Python<'_>) -> PyResult<()> {
        self.pool.get().begin_export(py)?;
        if self.exports.begin() {
            return Ok(());
        }
        self.pool.get().end_export();
        Err(self.freed_before(py))
    }

    /// Ends an export, on any thread.
    pub fn end_export(&self) {
        self.exports.end();
        self.pool.get().end_export();
    }

    /// Marks the block as freed, which one caller succeeds in.
    fn claim(&self, py: Python<'_>) -> PyResult<()> {
        match self.exports.close() {
            Ok(()) => Ok(()),
            Err(NotClosed::Closed) => Err(self.freed_before(py)),
            Err(NotClosed::InUse(exports)) => {
                let text = format!(
                    "{exports} arrays or DLPack tensors still use the allocation of {} bytes at {:#x}: \
                     delete them (`del array`) before it is freed",
                    self.size, self.block.addr
                );
                Err(refuse(py, "InUseError", &text))
            }
        }
    }

    #[inline]
    fn free_on(&self, py: Python<'_>, stream: StreamName) -> PyResult<()> {
        self.claim(py)?;
        let freed = self.pool.get().free(py, self.block.addr, stream);
        if freed.is_err() {
            self.exports.reopen();
        }
        freed
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.is_freed() {
            return;
        }
        let (allocator, addr, stream) = (self.pool.get().allocator(), self.block.addr, self.stream);
        if !allocator.free_at_hand(addr, stream) {
            // A closed pool has released the memory.
            detached(move || drop(free(allocator, addr, stream)));
        }
    }
}
