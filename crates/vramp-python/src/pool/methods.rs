//! What Python calls of a pool.

use std::path::PathBuf;
use std::sync::PoisonError;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyString, PyTuple};
use vramp_alloc::device::HandleType;
use vramp_alloc::sharing::AccessChange;
use vramp_capi::process::{NotClosed, Session};

use super::{Pool, named};
use crate::allocation::Allocation;
use crate::arguments::{amount, bytes, event_count, path_text};
use crate::error::{not_pickled, raise, refuse, result};
use crate::ipc::{Exported, Imported};
use crate::kept::{self, Kept};
use crate::measure::Measure;
use crate::pin::Pin;
use crate::shortage::{self, Registration};
use crate::stream::{self, Stream, stream_in, stream_of};
use crate::tiers::close_all;

/// Returns the address of an argument that is an allocation or an address, and the allocation.
fn address<'a>(memory: &'a Bound<'_, PyAny>) -> PyResult<(u64, Option<&'a Allocation>)> {
    let py = memory.py();
    match memory.cast::<Allocation>() {
        Ok(block) => Ok((block.get().live_addr(py)?, Some(block.get()))),
        Err(_) if memory.is_instance_of::<PyInt>() => Ok((bytes(py, memory, "an address")?, None)),
        Err(_) => Err(PyTypeError::new_err(format!(
            "memory is a vramp.Allocation or an address as an int, and not {}",
            memory.get_type()
        ))),
    }
}

fn access_change<'py>(py: Python<'py>, change: AccessChange) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    fields.set_item("calls", change.calls)?;
    fields.set_item("bytes", change.bytes.count())?;
    result(py, "AccessChange", &fields)
}

#[pymethods]
impl Pool {
    /// Allocates memory for work on a stream.
    #[pyo3(signature = (size, stream = None))]
    fn malloc(
        slf: &Bound<'_, Pool>,
        size: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Allocation> {
        let py = slf.py();
        let size = amount(py, size, "size")?;
        let stream = stream_in(slf, stream)?;
        let block = slf.get().place(py, size, stream.name)?;
        Ok(Allocation::new(slf, block, size, stream))
    }

    /// Allocates memory and returns its address.
    #[pyo3(signature = (size, stream = None))]
    fn allocate(
        slf: &Bound<'_, Pool>,
        size: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let py = slf.py();
        let size = amount(py, size, "size")?;
        Ok(slf.get().place(py, size, stream_in(slf, stream)?.name)?.addr)
    }

    /// Frees the memory at an address.
    #[pyo3(signature = (ptr, stream = None))]
    fn deallocate(
        slf: &Bound<'_, Pool>,
        ptr: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let addr = bytes(slf.py(), ptr, "ptr")?;
        slf.get().free(slf.py(), addr, stream_in(slf, stream)?.name)
    }

    /// Records that work queued on a stream so far uses the memory at an address.
    #[pyo3(signature = (ptr, stream = None))]
    fn record_use(
        slf: &Bound<'_, Pool>,
        ptr: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let addr = bytes(slf.py(), ptr, "ptr")?;
        slf.get().note_use(slf.py(), addr, stream_in(slf, stream)?.name)
    }

    /// Creates a stream on the device.
    fn create_stream(slf: &Bound<'_, Pool>) -> PyResult<Stream> {
        stream::create(slf)
    }

    /// Returns the counts so far.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (stats, card, host) = self.call(py, |session| {
            let card = session.allocator().driver().memory_info()?;
            Ok((session.total_stats()?, card, session.host_memory()))
        })?;
        let fields = PyDict::new(py);
        let set = |name: &str, value: u64| fields.set_item(name, value);
        set("live", stats.live.count())?;
        set("live_peak", stats.live_peak.count())?;
        set("reserved", stats.reserved.count())?;
        set("reserved_peak", stats.reserved_peak.count())?;
        set("allocated", stats.placed)?;
        set("freed", stats.freed)?;
        set("hits", stats.hits)?;
        set("misses", stats.misses)?;
        set("chunks_created", stats.chunks_created)?;
        set("chunks_moved", stats.chunks_moved)?;
        set("chunks_reactivated", stats.chunks_reactivated)?;
        set("chunks_released", stats.chunks_released)?;
        set("moved", stats.moved.count())?;
        set("plans_undone", stats.plans_undone)?;
        set("quarantined", stats.quarantined.count())?;
        set("quarantined_addresses", stats.quarantined_addresses.count())?;
        set("device_free", card.free.count())?;
        set("device_total", card.total.count())?;
        set("host_pinned", host.pinned.count())?;
        set("host_used", host.used.count())?;
        result(py, "Stats", &fields)
    }

    /// Returns the statistics of `torch.cuda.memory_stats` under PyTorch's names.
    fn memory_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        named(py, &self.call(py, Session::memory_stats)?)
    }

    /// Sets all peaks to the current values.
    fn reset_peaks(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |session| {
            session.reset_peaks();
            Ok(())
        })
    }

    /// The limit of reserved bytes.
    #[getter]
    fn limit(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.call(py, |session| Ok(session.allocator().limit().map(|limit| limit.count())))
    }

    #[setter]
    fn set_limit(&self, py: Python<'_>, limit: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let text = match limit {
            None => None,
            Some(limit) if limit.is_instance_of::<PyString>() => Some(limit.extract::<String>()?),
            Some(limit) if limit.is_instance_of::<PyInt>() && !limit.is_instance_of::<PyBool>() => {
                Some(bytes(py, limit, "limit")?.to_string())
            }
            Some(limit) => {
                return Err(PyTypeError::new_err(format!(
                    "a limit is None, an int of bytes, or a text such as '80GiB' or '90%', and not {}",
                    limit.get_type()
                )));
            }
        };
        self.call(py, |session| session.set_limit_text(text.as_deref()))
    }

    /// Releases idle memory.
    #[pyo3(signature = (keep = None))]
    fn trim(&self, py: Python<'_>, keep: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let keep = keep.map_or(Ok(0), |keep| amount(py, keep, "keep"))?;
        self.call(py, |session| session.trim(keep))
    }

    /// Checks every invariant of the pool.
    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, Session::audit)
    }

    /// Starts to record events.
    fn record_history(&self, py: Python<'_>, events: i64) -> PyResult<()> {
        let events = event_count(py, events)?;
        self.call(py, |session| session.record_history(events))
    }

    /// Writes blocks, segments and recorded events to a file.
    fn snapshot(&self, py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<()> {
        let path = path_text(py, path)?;
        self.call(py, |session| session.write_snapshot(&path))
    }

    /// Name of the device.
    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.info(py)?.id)
    }

    /// What the device is and can.
    #[getter]
    fn device_info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let info = self.info(py)?;
        let fields = PyDict::new(py);
        fields.set_item("id", info.id)?;
        fields.set_item("name", info.name)?;
        fields.set_item("driver", info.driver)?;
        fields.set_item("is_simulated", info.simulated)?;
        fields.set_item("memory", info.limits.memory.count())?;
        fields.set_item("page", info.limits.page.count())?;
        fields.set_item("has_virtual_memory", info.capabilities.virtual_memory)?;
        fields.set_item("has_stream_ordered_pool", info.capabilities.stream_ordered_pool)?;
        fields.set_item("uuid", info.uuid)?;
        fields.set_item("ordinal", info.ordinal)?;
        fields.set_item("peers", PyTuple::new(py, info.peers)?)?;
        fields.set_item("has_posix_fd", info.capabilities.posix_fd)?;
        fields.set_item("has_fabric", info.capabilities.fabric)?;
        fields.set_item("has_rdma", info.capabilities.rdma)?;
        fields.set_item("has_dma_buf", info.capabilities.dma_buf)?;
        result(py, "DeviceInfo", &fields)
    }

    /// True if the device is simulated.
    #[getter]
    fn is_simulated(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.info(py)?.simulated)
    }

    /// Handle for the C interface.
    #[getter]
    fn handle(&self) -> u64 {
        self.allocator.handle().id
    }

    /// Closes a pool of the program's own.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        // In a forked child, and once it is closed, that is what counts.
        self.info(py)?;
        match self.exports.close() {
            Ok(()) => {}
            // Only the thread whose close may fail lets arrays be made again.
            Err(NotClosed::Closed) => {
                return Err(refuse(py, "ClosedError", "another thread closes the pool"));
            }
            Err(NotClosed::InUse(exports)) => {
                let text = format!(
                    "{exports} arrays or DLPack tensors still use memory of the pool: delete them \
                     before it is closed"
                );
                return Err(refuse(py, "InUseError", &text));
            }
        }
        let below = self.tiers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let closed = close_all(py, below).and_then(|()| {
            let allocator = self.allocator;
            py.detach(|| allocator.close()).map_err(|error| raise(py, error))
        });
        if closed.is_err() && !self.is_closed(py) {
            self.exports.reopen();
        }
        closed
    }

    /// True once it was closed.
    #[getter]
    fn is_closed(&self, py: Python<'_>) -> bool {
        self.info(py).is_err()
    }

    /// Exports a block, or addresses, to other processes.
    #[pyo3(signature = (memory, stream = None, *, size = None))]
    fn export(
        slf: &Bound<'_, Pool>,
        memory: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
        size: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Exported> {
        let (addr, own) = address(memory)?;
        let py = slf.py();
        let size = size.map(|size| bytes(py, size, "size")).transpose()?;
        let stream = match (stream, own) {
            (None, Some(block)) => block.named_stream(py),
            _ => stream_in(slf, stream)?,
        };
        Exported::new(slf, addr, size, stream)
    }

    /// Opens the memory of a ticket.
    #[pyo3(signature = (ticket, stream = None))]
    fn open_ticket(
        slf: &Bound<'_, Pool>,
        ticket: &[u8],
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Imported> {
        Imported::new(slf, ticket, stream)
    }

    /// Begins memory of a name that a keeper holds.
    #[pyo3(signature = (directory, reply_timeout, name, size, *, part = None, priority = 0, kept_for = None, timeout = 30.0))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python call")]
    fn kept_draft(
        slf: &Bound<'_, Pool>,
        directory: PathBuf,
        reply_timeout: f64,
        name: &str,
        size: &Bound<'_, PyAny>,
        part: Option<&Bound<'_, PyAny>>,
        priority: i32,
        kept_for: Option<f64>,
        timeout: f64,
    ) -> PyResult<Kept> {
        let py = slf.py();
        let size = amount(py, size, "size")?;
        let part = part.map(|part| amount(py, part, "part")).transpose()?;
        kept::draft(slf, directory, reply_timeout, name, size, part, priority, kept_for, timeout)
    }

    /// Opens memory of a name that a keeper holds.
    #[pyo3(signature = (directory, reply_timeout, name, *, readonly = true, lock = "read", same_addresses = true, timeout = 30.0))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python call")]
    fn kept_open(
        slf: &Bound<'_, Pool>,
        directory: PathBuf,
        reply_timeout: f64,
        name: &str,
        readonly: bool,
        lock: &str,
        same_addresses: bool,
        timeout: f64,
    ) -> PyResult<Kept> {
        kept::open(slf, directory, reply_timeout, name, readonly, lock, same_addresses, timeout)
    }

    /// Grants another card access to the memory.
    fn grant_access<'py>(&self, py: Python<'py>, device: u32) -> PyResult<Bound<'py, PyAny>> {
        access_change(py, self.call(py, |session| Ok(session.allocator().grant_access(device)?))?)
    }

    /// Takes back the access of a card.
    fn revoke_access<'py>(&self, py: Python<'py>, device: u32) -> PyResult<Bound<'py, PyAny>> {
        access_change(py, self.call(py, |session| Ok(session.allocator().revoke_access(device)?))?)
    }

    /// Pins memory.
    #[pyo3(signature = (memory, size = None))]
    fn pin(
        slf: &Bound<'_, Pool>,
        memory: &Bound<'_, PyAny>,
        size: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Pin> {
        let (addr, _) = address(memory)?;
        let size = size.map(|size| bytes(slf.py(), size, "size")).transpose()?;
        Pin::new(slf, addr, size)
    }

    /// Makes a pool for memory that communication libraries register.
    #[pyo3(signature = (name = "comm"))]
    fn comm_pool(&self, py: Python<'_>, name: &str) -> PyResult<Pool> {
        let allocator = self.allocator;
        let made = py.detach(|| allocator.comm_pool(name));
        Ok(Pool::owned(made.map_err(|error| raise(py, error))?))
    }

    /// How the memory can be shared, and how much is.
    #[getter]
    fn sharing<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (sharing, exported, (pinned, pinned_bytes)) = self.call(py, |session| {
            let (exported, pinned) = session.exported_and_pinned();
            Ok((session.allocator().sharing(), exported, pinned))
        })?;
        let fields = PyDict::new(py);
        let handle_type = match sharing.handle_type {
            HandleType::None => "none",
            HandleType::PosixFd => "posix-fd",
            HandleType::Fabric => "fabric",
        };
        fields.set_item("handle_type", handle_type)?;
        fields.set_item("rdma", sharing.rdma)?;
        fields.set_item("fallback", sharing.fallback)?;
        fields.set_item("peers", PyTuple::new(py, sharing.peers)?)?;
        fields.set_item("exported", exported)?;
        fields.set_item("pinned", pinned)?;
        fields.set_item("pinned_bytes", pinned_bytes.count())?;
        result(py, "Sharing", &fields)
    }

    /// Refuses to be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(not_pickled("Pool"))
    }

    /// Registers a function that frees memory.
    fn on_shortage(slf: &Bound<'_, Pool>, handler: &Bound<'_, PyAny>) -> PyResult<Registration> {
        shortage::register(slf, handler)
    }

    /// Returns a context manager that measures peaks and counts.
    fn measure(slf: &Bound<'_, Pool>) -> Measure {
        Measure::new(slf.clone().unbind())
    }

    /// Forgets a stream, before its owner destroys it.
    fn forget_stream(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let name = stream_of(Some(stream))?;
        self.call(py, |session| session.forget_named(name))
    }

    fn __enter__<'py>(slf: Bound<'py, Pool>) -> Bound<'py, Pool> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if self.is_closed(py) {
            return Ok(());
        }
        let closed = self.close(py);
        // An exception of the block is not replaced. The last reference closes the pool then.
        if kind.is_none() { closed } else { Ok(()) }
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.info(py) {
            Ok(device) => format!("<vramp.Pool of {} ({})>", device.id, device.name),
            Err(_) => "<vramp.Pool, closed>".to_owned(),
        }
    }
}
