//! Memory that processes share.
//!
//! 1. `Pool.export` returns an [`Exported`] block. Its tickets are bytes for other processes.
//! 2. `Pool.open_ticket` returns an [`Imported`] block there. Arrays and capsules over it are its exports:
//!    while there are some it is not closed.
//! 3. Both end by `close`, at the end of a `with` block, or with the last reference. A free of the
//!    exported block takes effect once all of them have ended.

mod methods;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use vramp_alloc::sharing::{OpenedMemory, SharedMemory};
use vramp_capi::process::{CallResult, Exports, NotClosed, StreamName, check_fork};

use crate::calls::id_of;
use crate::error::{raise, refuse};
use crate::layout::{Place, place_of};
use crate::pool::Pool;
use crate::python::detached;
use crate::stream::{NamedStream, stream_in};

fn closed(py: Python<'_>, what: &str) -> PyErr {
    refuse(py, "ClosedError", &format!("the {what} is closed"))
}

/// A block that other processes may open.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Exported {
    pool: Py<Pool>,
    addr: u64,
    /// The stream whose work a ticket waits for.
    stream: StreamName,
    /// Keeps the stream alive.
    _stream_object: Option<Py<PyAny>>,
    /// `None` once it was closed. Held for a few instructions.
    shared: Mutex<Option<Arc<SharedMemory>>>,
}

impl Exported {
    /// Exports the block that begins at `addr`, or `size` bytes whatever lies there.
    pub fn new(
        pool: &Bound<'_, Pool>,
        addr: u64,
        size: Option<u64>,
        stream: NamedStream,
    ) -> PyResult<Exported> {
        let shared = pool.get().call(pool.py(), |session| match size {
            None => session.share(addr),
            Some(size) => session.share_range(addr, size),
        })?;
        let shared = Mutex::new(Some(Arc::new(shared)));
        Ok(Exported {
            pool: pool.clone().unbind(),
            addr,
            stream: stream.name,
            _stream_object: stream.object,
            shared,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<SharedMemory>>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, py: Python<'_>) -> PyResult<Arc<SharedMemory>> {
        self.lock().clone().ok_or_else(|| closed(py, "export"))
    }

    fn end(&self, py: Python<'_>) {
        let shared = self.lock().take();
        // The end of the last one takes the pool's lock.
        py.detach(|| {
            if let Some(shared) = shared {
                shared.close();
            }
        });
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        let shared = self.shared.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if shared.is_some() {
            detached(move || drop(shared));
        }
    }
}

/// Memory of another process.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Imported {
    pool: Py<Pool>,
    addr: u64,
    len: u64,
    /// `None` if no program may access it.
    place: Option<Place>,
    stream: StreamName,
    /// Keeps the stream alive.
    _stream_object: Option<Py<PyAny>>,
    /// `None` once it was closed. Locked only while detached from the interpreter.
    block: Mutex<Option<OpenedMemory>>,
    exports: Exports,
}

impl Imported {
    pub fn new(
        pool: &Bound<'_, Pool>,
        ticket: &[u8],
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Imported> {
        let stream = stream_in(pool, stream)?;
        // The other process may take the interpreter to answer, if it is this one.
        let (block, place) = pool.get().call(pool.py(), |session| {
            let block = session.open_shared(ticket)?;
            let place = place_of(session, block.range().start.number());
            Ok((block, place))
        })?;
        Ok(Imported {
            pool: pool.clone().unbind(),
            addr: block.range().start.number(),
            len: block.range().len.count(),
            place,
            stream: stream.name,
            _stream_object: stream.object,
            block: Mutex::new(Some(block)),
            exports: Exports::default(),
        })
    }

    pub fn addr(&self) -> u64 {
        self.addr
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn stream_name(&self) -> StreamName {
        self.stream
    }

    pub fn place(&self) -> Option<Place> {
        self.place
    }

    pub fn pool(&self) -> &Py<Pool> {
        &self.pool
    }

    fn lock(&self) -> MutexGuard<'_, Option<OpenedMemory>> {
        self.block.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_ended(&self) -> bool {
        self.exports.is_closed()
    }

    fn check_open(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_ended() { Err(closed(py, "import")) } else { Ok(()) }
    }

    /// Counts an export.
    pub fn begin_export(&self, py: Python<'_>) -> PyResult<()> {
        if self.exports.begin() { Ok(()) } else { Err(closed(py, "import")) }
    }

    /// Ends an export, on any thread.
    pub fn end_export(&self) {
        self.exports.end();
    }

    /// Records a use. The caller is detached from the interpreter.
    pub fn record(&self, stream: StreamName) -> CallResult<()> {
        let allocator = self.pool.get().allocator();
        match &*self.lock() {
            Some(block) => allocator.with(|session| Ok(block.record_use(id_of(session, stream)?)?)),
            None => Ok(()),
        }
    }

    fn end(&self, py: Python<'_>) -> PyResult<()> {
        match self.exports.close() {
            Ok(()) => {}
            Err(NotClosed::Closed) => return Ok(()),
            Err(NotClosed::InUse(exports)) => {
                let text = format!(
                    "{exports} arrays or DLPack tensors still use the imported memory of {} bytes at \
                     {:#x}: delete them (`del array`) before it is closed",
                    self.len, self.addr
                );
                return Err(refuse(py, "InUseError", &text));
            }
        }
        let ended = py.detach(|| {
            let block = self.lock().take();
            block.map_or(Ok(()), |block| check_fork().and_then(|()| Ok(block.close()?)))
        });
        ended.map_err(|error| raise(py, error))
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let block = self.block.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if block.is_some() {
            detached(move || drop(block));
        }
    }
}
