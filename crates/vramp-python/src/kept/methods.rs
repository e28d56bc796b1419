//! What Python calls of kept memory, and of the keeper.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use vramp_alloc::Bytes;
use vramp_alloc::sharing::kept::{EntryStatus, KeepError, KeptError, KeptMemory, Lock, MapAs};
use vramp_capi::process::CallResult;

use super::{Kept, SLICE, State, deadline, keeper, lock_named};
use crate::arguments::{amount, bytes};
use crate::array::{self, Array};
use crate::error::{not_pickled, raise, refuse, result};
use crate::owner::Owner;
use crate::pool::Pool;
use crate::stream::stream_in;

#[pymethods]
impl Kept {
    /// Name of the memory.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The pool that opened it.
    #[getter(pool)]
    fn owner(&self, py: Python<'_>) -> Py<Pool> {
        self.pool.clone_ref(py)
    }

    /// Address of the first byte in this process.
    #[getter]
    fn ptr(&self) -> u64 {
        self.addr
    }

    /// Bytes in use.
    #[getter]
    fn size(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.len())
    }

    /// True if work may only read it.
    #[getter]
    fn readonly(&self) -> bool {
        self.is_read_only()
    }

    /// True before the commit.
    #[getter]
    #[pyo3(name = "is_draft")]
    fn is_a_draft(&self, py: Python<'_>) -> bool {
        py.detach(|| self.is_draft())
    }

    /// True once it was closed.
    #[getter]
    fn is_closed(&self) -> bool {
        self.exports.is_closed()
    }

    /// Epoch and digest that the name had when the draft began; None for a new name.
    #[getter]
    fn current<'py>(&self, py: Python<'py>) -> PyResult<Option<(u64, Bound<'py, PyBytes>)>> {
        let found = py.detach(|| -> CallResult<_> {
            match &*self.state()? {
                State::Draft(draft) => Ok(Some(draft.current())),
                _ => Ok(None),
            }
        });
        let current = found.map_err(|error| raise(py, error))?.ok_or_else(|| {
            refuse(
                py,
                "KeepError",
                &format!("`{}` is no draft: it has `epoch` and `digest`", self.name),
            )
        })?;
        Ok(current.map(|(epoch, digest)| (epoch, PyBytes::new(py, &digest))))
    }

    /// Places bytes in a draft, and returns their distance from `ptr`.
    fn place(&self, py: Python<'_>, size: &Bound<'_, PyAny>) -> PyResult<u64> {
        let size = amount(py, size, "size")?;
        let placed = py.detach(|| -> CallResult<_> {
            let Some(mut draft) = self.take_draft(State::Placing(Vec::new()))? else {
                return Ok(None);
            };
            // Without the lock: handlers of a shortage may use this object.
            let placed = draft.place(Bytes::new(size));
            self.used.store(draft.used().count(), Ordering::Relaxed);
            let mut state = self.state()?;
            if let State::Placing(recorded) = &mut *state {
                for stream in std::mem::take(recorded) {
                    // A stream that ended meanwhile has no work.
                    let _ = draft.record_use(stream);
                }
                *state = State::Draft(draft);
            }
            Ok(Some(placed))
        });
        match placed.map_err(|error| raise(py, error))? {
            Some(Ok(range)) => Ok(range.start.number() - self.addr),
            Some(Err(error)) => Err(raise(py, error)),
            None => Err(refuse(py, "KeepError", &format!("`{}` is no draft any more", self.name))),
        }
    }

    /// Gives a draft's name up for others. Arrays keep the memory, which is this process's own.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        let abandoned = py.detach(|| -> CallResult<bool> {
            let mut state = self.state()?;
            match std::mem::replace(&mut *state, State::Closed) {
                State::Draft(draft) => {
                    *state = State::Private { _memory: draft.abandon() };
                    Ok(true)
                }
                other => {
                    *state = other;
                    Ok(false)
                }
            }
        });
        match abandoned.map_err(|error| raise(py, error))? {
            true => Ok(()),
            false => Err(refuse(py, "KeepError", &format!("`{}` is no draft any more", self.name))),
        }
    }

    /// Commits a draft. Returns the epoch.
    #[pyo3(signature = (layout = None, digest = None, readonly = true))]
    fn commit_draft(
        &self,
        py: Python<'_>,
        layout: Option<&[u8]>,
        digest: Option<[u8; 32]>,
        readonly: bool,
    ) -> PyResult<u64> {
        let map = if readonly { MapAs::ReadOnly } else { MapAs::Writable };
        let committed = py.detach(|| -> CallResult<Option<Result<u64, KeptError>>> {
            let mut state = self.state()?;
            let draft = match std::mem::replace(&mut *state, State::Closed) {
                State::Draft(draft) => draft,
                other => {
                    *state = other;
                    return Ok(None);
                }
            };
            match draft.commit(layout.unwrap_or_default(), digest.unwrap_or_default(), map) {
                Ok(memory) => {
                    let epoch = memory.epoch();
                    *state = State::Open(Arc::new(memory));
                    Ok(Some(Ok(epoch)))
                }
                Err(failed) => {
                    *state = State::Private { _memory: failed.memory };
                    Ok(Some(Err(*failed.error)))
                }
            }
        });
        match committed.map_err(|error| raise(py, error))? {
            Some(Ok(epoch)) => {
                self.is_read_only.store(readonly, Ordering::Relaxed);
                Ok(epoch)
            }
            Some(Err(error)) => Err(raise(py, error)),
            None => Err(refuse(py, "KeepError", &format!("`{}` is no draft any more", self.name))),
        }
    }

    /// The publisher's description.
    #[getter]
    fn layout<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let layout = self.open(py, |memory| Ok(memory.layout().to_vec()))?;
        Ok(PyBytes::new(py, &layout))
    }

    /// The publisher's digest of the contents.
    #[getter]
    fn digest<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let digest = self.open(py, |memory| Ok(memory.hold().digest()))?;
        Ok(PyBytes::new(py, &digest))
    }

    /// Number of the last commit in this memory.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.open(py, |memory| Ok(memory.epoch()))
    }

    /// True if a writer ended without a commit.
    #[getter]
    fn is_torn(&self, py: Python<'_>) -> PyResult<bool> {
        self.open(py, |memory| Ok(memory.hold().is_torn()))
    }

    /// True if the name has other memory by now.
    #[getter]
    fn is_superseded(&self, py: Python<'_>) -> PyResult<bool> {
        self.open(py, |memory| Ok(memory.hold().is_superseded()))
    }

    /// True while the keeper is gone.
    #[getter]
    fn is_adrift(&self, py: Python<'_>) -> PyResult<bool> {
        self.open(py, |memory| Ok(memory.hold().is_adrift()))
    }

    /// True if another process waits to write.
    #[getter]
    fn writer_waits(&self, py: Python<'_>) -> PyResult<bool> {
        self.open(py, |memory| Ok(memory.hold().writer_waits()))
    }

    /// Takes the lock for reading. Returns the epoch.
    #[pyo3(signature = (timeout = 30.0))]
    fn read(&self, py: Python<'_>, timeout: f64) -> PyResult<u64> {
        let until = deadline(py, timeout)?;
        self.open(py, |memory| memory.read(until))
    }

    /// Takes the lock for writing. Returns the epoch before.
    #[pyo3(signature = (timeout = 30.0))]
    fn write(&self, py: Python<'_>, timeout: f64) -> PyResult<u64> {
        let until = deadline(py, timeout)?;
        self.open(py, |memory| memory.write(until))
    }

    /// Gives any lock back.
    #[pyo3(signature = (timeout = 30.0))]
    fn unlock(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let until = deadline(py, timeout)?;
        self.open(py, |memory| memory.unlock(until))
    }

    /// Lets a waiting writer write, and takes the lock for reading again. Returns the epoch.
    #[pyo3(signature = (timeout = 30.0))]
    fn yield_to_writer(&self, py: Python<'_>, timeout: f64) -> PyResult<u64> {
        let until = deadline(py, timeout)?;
        self.open(py, |memory| memory.yield_to_writer(until))
    }

    /// Makes what was written the next epoch, and returns its number.
    #[pyo3(signature = (*, lock = "none"))]
    fn commit(&self, py: Python<'_>, lock: &str) -> PyResult<u64> {
        let then = lock_named(py, lock)?;
        self.open(py, |memory| memory.commit(then))
    }

    /// Gives the lock for writing back, if nothing was written.
    fn release_unchanged(&self, py: Python<'_>) -> PyResult<()> {
        self.open(py, KeptMemory::release_unchanged)
    }

    /// Waits until the name has a later epoch, and returns its number; None at the timeout.
    #[pyo3(signature = (than, timeout = 30.0))]
    fn wait_newer(&self, py: Python<'_>, than: u64, timeout: f64) -> PyResult<Option<u64>> {
        let until = deadline(py, timeout)?;
        loop {
            let slice = until.min(Instant::now() + SLICE);
            match self.open(py, |memory| match memory.wait_newer(than, slice) {
                Err(KeptError::Keeper(KeepError::NotNewer { .. })) => Ok(None),
                other => other.map(Some),
            })? {
                None if Instant::now() < until => py.check_signals()?,
                found => return Ok(found),
            }
        }
    }

    /// Records that work queued on a stream, so far and from now on, uses the memory.
    #[pyo3(signature = (stream = None))]
    fn record_stream(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let stream = stream_in(self.pool.bind(py), stream)?.name;
        py.detach(|| self.record(stream)).map_err(|error| raise(py, error))
    }

    /// Returns an array in the memory.
    #[pyo3(signature = (shape = None, dtype = None, *, offset = None))]
    fn array(
        slf: &Bound<'_, Kept>,
        shape: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        offset: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Array> {
        let offset = offset.map_or(Ok(0), |offset| bytes(slf.py(), offset, "offset"))?;
        Array::new(slf.py(), Owner::Kept(slf.clone().unbind()), shape, dtype, offset)
    }

    /// Returns a NumPy array of bytes that shares the memory, on the simulator.
    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        slf: &Bound<'py, Kept>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        array::numpy_bytes(slf.py(), Owner::Kept(slf.clone().unbind()), dtype, copy)
    }

    /// Waits for recorded work, unmaps the memory, and gives the lock back. The keeper goes on keeping it.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py)
    }

    fn __enter__<'py>(slf: Bound<'py, Kept>) -> Bound<'py, Kept> {
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
        Err(not_pickled("Kept"))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let of_forked = |_| format!("<vramp.keep.Kept {}, of the process that forked>", self.name);
        py.detach(|| {
            self.state().map_or_else(of_forked, |state| match &*state {
                State::Draft(draft) => {
                    format!("<vramp.keep.Kept {}, draft of {}>", self.name, draft.used())
                }
                State::Open(memory) => format!(
                    "<vramp.keep.Kept {}, epoch {}, {} at {:#x}>",
                    self.name,
                    memory.epoch(),
                    memory.range().len,
                    self.addr
                ),
                State::Placing(_) => format!("<vramp.keep.Kept {}, draft>", self.name),
                State::Private { .. } => format!("<vramp.keep.Kept {}, not committed>", self.name),
                State::Closed => format!("<vramp.keep.Kept {}, closed>", self.name),
            })
        })
    }
}

/// Returns the process of the keeper of a directory; None if there is none.
#[pyfunction]
pub fn keeper_pid(py: Python<'_>, directory: PathBuf, timeout: f64) -> PyResult<Option<u32>> {
    let keeper = keeper(py, directory, timeout)?;
    Ok(py.detach(|| keeper.is_running()))
}

fn lock_name(lock: Lock) -> &'static str {
    match lock {
        Lock::None => "none",
        Lock::Read => "read",
        Lock::Write => "write",
    }
}

/// Returns what a keeper has, by name.
#[pyfunction]
pub fn keeper_entries<'py>(
    py: Python<'py>,
    directory: PathBuf,
    timeout: f64,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let keeper = keeper(py, directory, timeout)?;
    let entries = py.detach(|| keeper.entries()).map_err(|error| raise(py, error))?;
    entries.iter().map(|found| entry(py, found)).collect()
}

fn entry<'py>(py: Python<'py>, found: &EntryStatus) -> PyResult<Bound<'py, PyAny>> {
    let current = found.current.as_ref();
    let mut holders = Vec::new();
    for holder in current.iter().flat_map(|current| &current.holders) {
        let fields = PyDict::new(py);
        fields.set_item("pid", holder.pid)?;
        fields.set_item("lock", lock_name(holder.lock))?;
        holders.push(result(py, "KeptHolder", &fields)?);
    }
    let is_written = current
        .is_some_and(|current| current.holders.iter().any(|holder| holder.lock == Lock::Write));
    let state = match current {
        None => "draft",
        Some(_) if is_written => "writing",
        Some(current) if current.is_torn => "torn",
        Some(_) => "whole",
    };
    let fields = PyDict::new(py);
    fields.set_item("name", &found.name)?;
    fields.set_item("device", current.map(|current| &current.device))?;
    fields.set_item("bytes", current.map_or(0, |current| current.bytes))?;
    fields.set_item("epoch", current.map_or(0, |current| current.epoch))?;
    fields.set_item("state", state)?;
    fields.set_item("holders", PyTuple::new(py, holders)?)?;
    fields.set_item("waiting", found.waiting)?;
    fields.set_item("draft_pid", found.draft_pid)?;
    fields.set_item("superseded", found.superseded)?;
    let idle = current.and_then(|current| current.idle);
    fields.set_item("idle", idle.map(|idle| idle.as_secs_f64()))?;
    fields.set_item("priority", current.map_or(0, |current| current.priority))?;
    result(py, "KeptEntry", &fields)
}

/// Removes a name.
#[pyfunction]
pub fn keeper_remove(py: Python<'_>, directory: PathBuf, timeout: f64, name: &str) -> PyResult<()> {
    let keeper = keeper(py, directory, timeout)?;
    py.detach(|| keeper.remove(name)).map_err(|error| raise(py, error))
}

/// Frees memory of a card that no process has open. Returns how many bytes.
#[pyfunction]
pub fn keeper_evict(
    py: Python<'_>,
    directory: PathBuf,
    timeout: f64,
    device: &str,
    nbytes: &Bound<'_, PyAny>,
) -> PyResult<u64> {
    let (keeper, nbytes) = (keeper(py, directory, timeout)?, amount(py, nbytes, "nbytes")?);
    py.detach(|| keeper.evict(device, nbytes)).map_err(|error| raise(py, error))
}

/// Ends a keeper.
#[pyfunction]
pub fn keeper_stop(py: Python<'_>, directory: PathBuf, timeout: f64) -> PyResult<()> {
    let keeper = keeper(py, directory, timeout)?;
    py.detach(|| keeper.stop()).map_err(|error| raise(py, error))
}
