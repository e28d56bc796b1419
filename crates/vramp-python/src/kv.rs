//! Arenas for caches: the native part of `vramp.kv`.
//!
//! 1. [`KvArena`] reserves addresses of a pool. Arrays and DLPack capsules over them are its exports.
//! 2. `commit`, `take` and `park` move pages, detached from the interpreter.
//! 3. `close`, the end of a `with` block or the last reference ends it. While there are exports it is not closed.

mod methods;

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use vramp_alloc::StreamId;
use vramp_alloc::kv::{Arena, Layout, Options};
use vramp_capi::process::{CallResult, Exports, NotClosed, Session, StreamName};

use crate::calls::id_of;
use crate::error::refuse;
use crate::pool::Pool;
use crate::python::detached;
use crate::stream::stream_in;

/// An arena for caches. It is the base of `vramp.kv.Arena`.
#[pyclass(frozen, weakref, subclass, module = "vramp.kv")]
pub struct KvArena {
    pool: Py<Pool>,
    layout: Layout,
    pages: u32,
    addr: u64,
    size: u64,
    /// Closed once the arena was.
    exports: Exports,
    /// `None` once it was closed. Held for a few instructions.
    arena: Mutex<Option<Arc<Arena>>>,
}

/// Addresses of an arena that an array may lie in.
pub struct Part {
    pub arena: Py<KvArena>,
    pub addr: u64,
    pub size: u64,
}

impl Part {
    pub fn clone_ref(&self, py: Python<'_>) -> Part {
        Part { arena: self.arena.clone_ref(py), ..*self }
    }
}

impl KvArena {
    /// Reserves the addresses.
    fn reserve(pool: &Bound<'_, Pool>, layout: Layout, options: Options) -> PyResult<KvArena> {
        let arena = pool.get().call(pool.py(), |session| session.kv_arena(layout, options))?;
        let whole = arena.whole();
        Ok(KvArena {
            pool: pool.clone().unbind(),
            layout,
            pages: arena.pages(),
            addr: whole.start.number(),
            size: whole.len.count(),
            exports: Exports::default(),
            arena: Mutex::new(Some(Arc::new(arena))),
        })
    }

    pub fn pool(&self) -> &Py<Pool> {
        &self.pool
    }

    /// Counts an export.
    pub fn begin_export(&self, py: Python<'_>) -> PyResult<()> {
        self.pool.get().begin_export(py)?;
        if self.exports.begin() {
            return Ok(());
        }
        self.pool.get().end_export();
        Err(closed(py))
    }

    /// Ends an export, on any thread.
    pub fn end_export(&self) {
        self.exports.end();
        self.pool.get().end_export();
    }

    /// Records that work queued on a stream so far uses the memory. A failure means that the pool or the arena is
    /// closed, or in a forked child: then nothing is reused.
    pub fn record_use(&self, stream: StreamName) {
        let Some(arena) = self.arena() else { return };
        drop(self.pool.get().allocator().with(|session| {
            arena.record_use(id_of(session, stream)?);
            Ok(())
        }));
    }

    fn arena(&self) -> Option<Arc<Arena>> {
        self.arena.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes a call detached from the interpreter.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Session, &Arena) -> CallResult<R> + Send,
    ) -> PyResult<R> {
        let arena = self.arena();
        self.pool
            .get()
            .call(py, |session| {
                Ok(match arena {
                    Some(arena) => Some(call(session, &arena)?),
                    None => None,
                })
            })?
            .ok_or_else(|| closed(py))
    }

    /// Makes a call with the stream that an argument names; `None` means any.
    fn call_on<R: Send>(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        call: impl FnOnce(&Session, &Arena, Option<StreamId>) -> CallResult<R> + Send,
    ) -> PyResult<R> {
        let name = match stream {
            None => None,
            stream => Some(stream_in(self.pool.bind(py), stream)?.name),
        };
        self.call(py, |session, arena| {
            let stream = name.map(|name| id_of(session, name)).transpose()?;
            call(session, arena, stream)
        })
    }

    /// Ends the arena, unless it ended before. Fails while something uses it.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        match self.exports.close() {
            Ok(()) => {
                let arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner).take();
                py.detach(|| drop(arena));
                Ok(())
            }
            Err(NotClosed::Closed) => Ok(()),
            Err(NotClosed::InUse(exports)) => {
                let text = format!(
                    "{exports} arrays or tensors still use the arena at {:#x}: delete them (`del tensor`) \
                     before it is closed",
                    self.addr
                );
                Err(refuse(py, "InUseError", &text))
            }
        }
    }
}

#[cold]
fn closed(py: Python<'_>) -> PyErr {
    refuse(py, "ClosedError", "the arena is closed: make another one with vramp.kv.arena")
}

impl Drop for KvArena {
    fn drop(&mut self) {
        let arena = self.arena.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if arena.is_some() {
            detached(move || drop(arena));
        }
    }
}
