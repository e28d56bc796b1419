//! Regions by tag: the native part of `vramp._regions`.
//!
//! Every call that may wait runs detached from the interpreter. Which devices a call is about is decided
//! in Python.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict, PyList};
use vramp_capi::process::{
    self, ScopeTarget, begin_scope_of_region, end_scope_of_region, set_default_region_disk,
    set_region_disk,
};
use vramp_core::{Bytes, DeviceAddr};
use vramp_tiers::regions::{
    Backup, PauseOptions, Phase, RegionError, RegionOptions, RegionStatus, Regions,
};

use crate::error::{raise, refuse, result};
use crate::pool::Pool;
use crate::sleep::{forget_raised, with_cause};

fn options(
    py: Python<'_>,
    backup: &str,
    readonly: bool,
    graph_pins: bool,
) -> PyResult<RegionOptions> {
    let backup = match backup {
        "host" => Backup::Host,
        "none" => Backup::None,
        "disk" => Backup::Disk,
        other => {
            let text = format!("backup is \"host\", \"disk\" or \"none\", and not {other:?}");
            return Err(refuse(py, "OptionError", &text));
        }
    };
    Ok(RegionOptions { backup, read_only: readonly, graph_pins })
}

/// Starts a scope on this thread: of a pool, of a device, or of all shared pools. Without a tag requests
/// go to the pool itself. Returns its number.
#[pyfunction]
#[pyo3(signature = (tag, backup, readonly, graph_pins, device, pool))]
pub fn region_begin(
    py: Python<'_>,
    tag: Option<&str>,
    backup: &str,
    readonly: bool,
    graph_pins: bool,
    device: Option<i64>,
    pool: Option<&Bound<'_, Pool>>,
) -> PyResult<u64> {
    let options = options(py, backup, readonly, graph_pins)?;
    let target = match (pool, device) {
        (Some(pool), _) => ScopeTarget::Allocator(pool.get().allocator()),
        (None, None) => ScopeTarget::AllDevices,
        (None, Some(device)) => ScopeTarget::Device(u16::try_from(device).map_err(|_| {
            refuse(py, "RangeError", &format!("there is no device number {device}"))
        })?),
    };
    let region = tag.map(|tag| (tag, options));
    // Creating a region makes driver calls.
    py.detach(|| begin_scope_of_region(target, region)).map_err(|error| raise(py, error))
}

/// Ends a scope of this thread.
#[pyfunction]
pub fn region_end(py: Python<'_>, scope: u64) -> PyResult<()> {
    end_scope_of_region(scope).map_err(|error| raise(py, error))
}

/// Returns the numbers of the devices whose shared pools are open.
#[pyfunction]
pub fn opened_devices(py: Python<'_>) -> PyResult<Vec<u32>> {
    let opened = py.detach(process::OpenAllocator::all_opened);
    let opened = opened.map_err(|error| raise(py, error))?;
    Ok(opened.into_iter().map(|(device, _)| device).collect())
}

fn call(
    py: Python<'_>,
    pool: &Bound<'_, Pool>,
    tags: &[String],
    call: impl Fn(&Regions, &[&str]) -> Result<(), RegionError> + Send,
) -> PyResult<()> {
    forget_raised();
    let called = pool.get().call(py, |session| session.with_regions(tags, call));
    called.map_err(|error| with_cause(py, error))
}

/// Names the directory of backups on the disk where the program names none. Opens nothing.
#[pyfunction]
pub fn region_default_disk(py: Python<'_>, directory: PathBuf) -> PyResult<()> {
    py.detach(|| set_default_region_disk(&directory)).map_err(|error| raise(py, error))
}

fn size(py: Python<'_>, name: &str, text: &str) -> PyResult<Bytes> {
    text.parse().map_err(|error| {
        refuse(py, "OptionError", &format!("{name} is a size such as \"2GiB\": {error}"))
    })
}

/// Returns the bytes that a size such as `2GiB` stands for, in the argument `name`.
#[pyfunction]
pub fn size_argument(py: Python<'_>, name: &str, text: &str) -> PyResult<u64> {
    size(py, name, text).map(Bytes::count)
}

/// Puts regions of a pool to sleep, and with `discard` gives their contents up.
#[pyfunction]
pub fn regions_pause(
    py: Python<'_>,
    pool: &Bound<'_, Pool>,
    tags: Vec<String>,
    keep: u64,
    discard: bool,
) -> PyResult<()> {
    let options = PauseOptions { keep: Bytes::new(keep), discard };
    call(py, pool, &tags, |regions, tags| regions.pause(tags, options))
}

/// Reads contents of sleeping regions of a pool from the disk into pinned host memory.
#[pyfunction]
pub fn regions_prefetch(py: Python<'_>, pool: &Bound<'_, Pool>, tags: Vec<String>) -> PyResult<()> {
    call(py, pool, &tags, |regions, tags| tags.iter().try_for_each(|tag| regions.prefetch(tag)))
}

/// Returns the bytes of a block in a sleeping region, from its copy. Allocates nothing for bytes that it has not.
#[pyfunction]
pub fn region_backup<'py>(
    py: Python<'py>,
    pool: &Bound<'py, Pool>,
    address: u64,
    size: u64,
) -> PyResult<Bound<'py, PyByteArray>> {
    let address = DeviceAddr::new(address);
    let check = |regions: &Regions| regions.check_backup(address, Bytes::new(size));
    pool.get().call(py, |session| session.with_backups(check))?;
    let too_large = |_| refuse(py, "RangeError", &format!("{size} bytes are too many"));
    PyByteArray::new_with(py, usize::try_from(size).map_err(too_large)?, |bytes| {
        let read = |regions: &Regions| regions.read_backup(address, bytes);
        pool.get().call(py, |session| session.with_backups(read))
    })
}

/// Names the directory of backups on the disk, and the most bytes there.
#[pyfunction]
pub fn region_disk(py: Python<'_>, directory: PathBuf, limit: Option<&str>) -> PyResult<()> {
    let limit = limit.map(|limit| size(py, "limit", limit)).transpose()?;
    py.detach(|| set_region_disk(&directory, limit)).map_err(|error| raise(py, error))
}

/// Brings regions of a pool back.
#[pyfunction]
pub fn regions_resume(py: Python<'_>, pool: &Bound<'_, Pool>, tags: Vec<String>) -> PyResult<()> {
    call(py, pool, &tags, |regions, tags| regions.resume(tags))
}

/// Copies the contents of regions of a pool ahead of a pause.
#[pyfunction]
pub fn regions_clean(py: Python<'_>, pool: &Bound<'_, Pool>, tags: Vec<String>) -> PyResult<()> {
    call(py, pool, &tags, |regions, tags| tags.iter().try_for_each(|tag| regions.clean(tag)))
}

/// Lets regions of a pool sleep when a request finds no memory. Returns the number of the registration.
#[pyfunction]
pub fn regions_on_pressure(
    py: Python<'_>,
    pool: &Bound<'_, Pool>,
    tags: Vec<String>,
) -> PyResult<u64> {
    pool.get().call(py, |session| session.pause_regions_on_pressure(&tags))
}

/// Ends a registration of `regions_on_pressure` or `regions_around_sleep`. Waits for calls in progress on other threads.
#[pyfunction]
pub fn regions_unregister(py: Python<'_>, pool: &Bound<'_, Pool>, number: u64) -> PyResult<bool> {
    pool.get().call(py, |session| Ok(session.unobserve(number)))
}

/// Removes a region of a pool.
#[pyfunction]
pub fn region_remove(py: Python<'_>, pool: &Bound<'_, Pool>, tag: &str) -> PyResult<()> {
    pool.get().call(py, |session| session.remove_region(tag))
}

/// Returns those of some tags that have a region in a pool.
#[pyfunction]
pub fn regions_known(
    py: Python<'_>,
    pool: &Bound<'_, Pool>,
    tags: Vec<String>,
) -> PyResult<Vec<String>> {
    pool.get().call(py, |session| {
        let regions = session.regions_if_any();
        let has = |tag: &String| regions.as_ref().is_some_and(|regions| regions.has(tag));
        Ok(tags.into_iter().filter(has).collect())
    })
}

/// Returns the states of the regions of a pool, by tag, or of those with some tags.
#[pyfunction]
#[pyo3(signature = (pool, device, tags = None))]
pub fn regions_status<'py>(
    py: Python<'py>,
    pool: &Bound<'py, Pool>,
    device: Option<i64>,
    tags: Option<Vec<String>>,
) -> PyResult<Bound<'py, PyList>> {
    let found = pool.get().call(py, |session| {
        let Some(regions) = session.regions_if_any() else { return Ok(Vec::new()) };
        Ok(match &tags {
            Some(tags) => regions.status_of(&tags.iter().map(String::as_str).collect::<Vec<_>>()),
            None => regions.status(),
        })
    })?;
    let list = PyList::empty(py);
    for status in &found {
        list.append(described(py, status, device)?)?;
    }
    Ok(list)
}

fn described<'py>(
    py: Python<'py>,
    status: &RegionStatus,
    device: Option<i64>,
) -> PyResult<Bound<'py, PyAny>> {
    let backup = match status.options.backup {
        Backup::Host => "host",
        Backup::Disk => "disk",
        Backup::None => "none",
    };
    let phase = match status.phase {
        Phase::Awake => "awake",
        Phase::Pausing => "pausing",
        Phase::Asleep => "asleep",
        Phase::Resuming => "resuming",
    };
    let fields = PyDict::new(py);
    fields.set_item("tag", &status.tag)?;
    fields.set_item("backup", backup)?;
    fields.set_item("readonly", status.options.read_only)?;
    fields.set_item("graph_pins", status.options.graph_pins)?;
    fields.set_item("phase", phase)?;
    for (name, amount) in [
        ("on_card", status.on_card),
        ("asleep", status.asleep),
        ("on_host", status.on_host),
        ("on_disk", status.on_disk),
        ("copied", status.copied),
        ("to_copy", status.to_copy),
    ] {
        fields.set_item(name, amount.count())?;
    }
    fields.set_item("device", device)?;
    result(py, "RegionStatus", &fields)
}
