//! The module's functions.

use pyo3::prelude::*;

/// The native part of the Python package `vramp`.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::{
        library_version, missing_card, open, open_all, opened, pool, record_history,
        report_unraisable, snapshot, unused_stats,
    };
    #[pymodule_export]
    use crate::allocation::Allocation;
    #[pymodule_export]
    use crate::analysis::{advise, command, explain, program, replay};
    #[pymodule_export]
    use crate::array::Array;
    #[pymodule_export]
    use crate::budget::{Budget, budget_groups, budget_status};
    #[pymodule_export]
    use crate::ipc::{Exported, Imported};
    #[pymodule_export]
    use crate::kept::Kept;
    #[pymodule_export]
    use crate::kept::methods::{
        keeper_entries, keeper_evict, keeper_pid, keeper_remove, keeper_stop,
    };
    #[pymodule_export]
    use crate::kv::KvArena;
    #[pymodule_export]
    use crate::measure::Measure;
    #[pymodule_export]
    use crate::pin::Pin;
    #[pymodule_export]
    use crate::pool::Pool;
    #[pymodule_export]
    use crate::regions::{
        opened_devices, region_backup, region_begin, region_default_disk, region_disk, region_end,
        region_remove, regions_clean, regions_known, regions_on_pressure, regions_pause,
        regions_prefetch, regions_resume, regions_status, regions_unregister, size_argument,
    };
    #[pymodule_export]
    use crate::shortage::Registration;
    #[pymodule_export]
    use crate::sleep::{region_at, regions_around_sleep};
    #[pymodule_export]
    use crate::stream::Stream;
    #[pymodule_export]
    use crate::tiers::{
        Buffer, BufferPin, Events, Lease, LeaseOwner, LeaseSet, Reservation, Tiers, View,
        take_leases,
    };
    #[pymodule_export]
    use crate::turns::{Turn, TurnRequest, Turns};

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::python::check_first_interpreter()?;
        crate::ending::sleep_instead_of_unwinding();
        vramp_capi::process::map_simulated_cards();
        Ok(())
    }
}

use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyBaseException;
use pyo3::types::PyDict;
use vramp_alloc::stats::MemoryStats;
use vramp_capi::process::{self, OpenAllocator};

use crate::arguments::{event_count, path_text};
use crate::error::{raise, refuse};
use crate::pool::{Pool, named};

/// The shared pools that were asked for, by device.
static SHARED: Mutex<Vec<Option<Py<Pool>>>> = Mutex::new(Vec::new());

/// Returns the version of the native library.
#[pyfunction]
fn library_version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Returns the pool of a device that PyTorch and C programs in this process share.
#[pyfunction]
#[pyo3(signature = (device = 0))]
fn pool(py: Python<'_>, device: i64) -> PyResult<Py<Pool>> {
    let ordinal = ordinal_of(py, device)?;
    // The first call opens the device, which takes 100 ms.
    let allocator = py.detach(|| OpenAllocator::shared(ordinal)).map_err(|e| raise(py, e))?;
    shared(py, ordinal, allocator)
}

/// Returns the shared pool of a device. `None` if no memory of the device was used yet.
#[pyfunction]
fn opened(py: Python<'_>, device: i64) -> PyResult<Option<Py<Pool>>> {
    let ordinal = ordinal_of(py, device)?;
    let allocator = py.detach(|| OpenAllocator::opened(ordinal)).map_err(|e| raise(py, e))?;
    allocator.map(|allocator| shared(py, ordinal, allocator)).transpose()
}

/// Returns the statistics of a device that was not used: `Pool.memory_stats` with zeros.
#[pyfunction]
fn unused_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    named(py, &MemoryStats::default())
}

fn ordinal_of(py: Python<'_>, device: i64) -> PyResult<u32> {
    u32::try_from(device)
        .map_err(|_| refuse(py, "RangeError", &format!("there is no device number {device}")))
}

/// Returns the one object of a device's shared pool.
fn shared(py: Python<'_>, ordinal: u32, allocator: OpenAllocator) -> PyResult<Py<Pool>> {
    // Made before the lock is taken: making it may run a collection, and so any Python code. What
    // happens while the lock is held runs none.
    let made = Py::new(py, Pool::shared(allocator))?;
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let slot = ordinal as usize;
    if shared.len() <= slot {
        shared.resize_with(slot + 1, || None);
    }
    let pool = shared[slot].get_or_insert_with(|| made.clone_ref(py)).clone_ref(py);
    drop(shared);
    Ok(pool)
}

/// Starts to record events of every device that the process shares.
#[pyfunction]
fn record_history(py: Python<'_>, events: i64) -> PyResult<()> {
    let events = event_count(py, events)?;
    py.detach(|| process::record_history_of_devices(events)).map_err(|error| raise(py, error))
}

/// Writes blocks, segments and recorded events of every such device to one file.
#[pyfunction]
fn snapshot(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<()> {
    let path = path_text(py, path)?;
    py.detach(|| process::snapshot_of_devices(&path)).map_err(|error| raise(py, error))
}

/// Returns why the machine has no card that this process may use.
#[pyfunction]
fn missing_card(py: Python<'_>) -> Option<String> {
    py.detach(process::missing_card)
}

/// Passes an exception that no caller can receive to `sys.unraisablehook`.
#[pyfunction]
fn report_unraisable(error: &Bound<'_, PyBaseException>, origin: &Bound<'_, PyAny>) {
    PyErr::from_value(error.clone().into_any()).write_unraisable(origin.py(), Some(origin));
}

/// Opens a pool of the caller's own.
#[pyfunction]
fn open(py: Python<'_>, device: &str, options: &str) -> PyResult<Pool> {
    let opened = py.detach(|| OpenAllocator::open(device, options));
    Ok(Pool::owned(opened.map_err(|error| raise(py, error))?))
}

/// Opens a pool of the caller's own on each device of a machine.
#[pyfunction]
fn open_all(py: Python<'_>, device: &str, options: &str) -> PyResult<Vec<Pool>> {
    let opened = py.detach(|| OpenAllocator::open_all(device, options));
    Ok(opened.map_err(|error| raise(py, error))?.into_iter().map(Pool::owned).collect())
}
