//! Deferrable buffers: contents that leave a card while no lease holds them.
//!
//! 1. [`Tiers`] are the host memory and the disk below a pool. They keep the pool's allocator. `shared.rs` is
//!    what all their objects share.
//! 2. `buffer.rs` is a buffer. Dropping it, or closing its tiers, frees the contents.
//! 3. `lease.rs` is a lease in Python, and `grant.rs` the [`Grant`] that capsules of its views share. It
//!    ends with the last of them.
//! 4. `view.rs` is an array of a leased buffer, which fails after the end of its lease.
//! 5. `owner.rs` is what a lease belongs to, and `waiting.rs` has the requests of coroutines.
//! 6. `store.rs` is a store of the program in place of a directory.
//! 7. `reservation.rs` is a reserved amount of a tier, `pin.rs` keeps a buffer on the card.
//!
//! Every call runs detached from the interpreter, except those that only read fields. In a forked child
//! each call fails, and objects are left as they are, because a thread of the parent may hold their locks.
//!
//! [`Grant`]: grant::Grant

mod adopt;
mod buffer;
mod events;
mod grant;
mod lease;
mod owner;
mod pin;
mod reservation;
mod shared;
mod store;
mod view;
mod waiting;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use vramp_capi::process::{Failure, PinnedMemory, check_fork};
use vramp_core::Bytes;
use vramp_defer::{Access, SpillConfig, TiersOptions};
use vramp_tiers::config::{HostSpaceConfig, TiersConfig};

pub use buffer::Buffer;
pub use events::Events;
pub use lease::{Lease, LeaseSet};
pub use owner::LeaseOwner;
pub use pin::BufferPin;
pub use reservation::Reservation;
pub use shared::Core;
pub use view::View;
pub use waiting::take_leases;

use crate::arguments::amount;
use crate::calls::synchronize;
use crate::error::{not_pickled, raise, refuse, result};
use crate::pool::Pool;
use crate::python;
use crate::stream::stream_in;
use owner::{Caller, in_scope};

use shared::{Open, StillHeld};

/// The longest time that a wait may be given, in seconds. More means for ever.
const LONGEST: f64 = 1e9;

/// Number of tiers opened so far: the upper part of buffer ids.
static OPENED: AtomicU64 = AtomicU64::new(0);

/// The tiers below a pool.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Tiers {
    core: Arc<Core>,
    /// Dropped after the core, which keeps its allocator.
    pool: Py<Pool>,
}

/// Returns a duration from seconds. `None` for ever.
pub fn seconds(py: Python<'_>, timeout: f64) -> PyResult<Option<Duration>> {
    match timeout {
        wrong if wrong.is_nan() || wrong < 0.0 => {
            let text = format!("timeout is {wrong}: use seconds from 0 on");
            Err(refuse(py, "RangeError", &text))
        }
        long if long >= LONGEST => Ok(None),
        short => Ok(Some(Duration::from_secs_f64(short))),
    }
}

impl Tiers {
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    pub fn pool(&self) -> &Py<Pool> {
        &self.pool
    }

    /// Makes a call detached from the interpreter.
    pub fn call<R: Send, E: Into<Failure> + Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Open) -> Result<R, E> + Send,
    ) -> PyResult<R> {
        let core = &self.core;
        let done = py.detach(|| call(&*core.open()?).map_err(Into::into));
        done.map_err(|failure: Failure| raise(py, failure))
    }
}

impl Tiers {
    /// Restores buffers, all at once.
    pub fn retrieve_all(&self, py: Python<'_>, buffers: &[Py<Buffer>]) -> PyResult<()> {
        if buffers.is_empty() {
            return Ok(());
        }
        let core = &self.core;
        let owner = Caller::get(py)?.owner;
        let done = in_scope(py, owner, || {
            let hold = core.hold()?;
            let Open { tiers, .. } = &*hold.open;
            let inner = buffers.iter().map(|buffer| buffer.get().inner());
            let inner = inner.collect::<Result<Vec<_>, Failure>>()?;
            let wanted: Vec<_> = inner.iter().map(|buffer| (buffer, Access::Shared)).collect();
            let lease = tiers.lease(&wanted, tiers.stream())?;
            tiers.manager().sync_and_unlock(tiers.stream())?;
            lease.end();
            Ok(())
        });
        done.map_err(|failure: Failure| raise(py, failure))
    }
}

/// Returns the exception for tiers that cannot be closed.
#[cold]
fn still_held(py: Python<'_>, StillHeld { holds }: StillHeld) -> PyErr {
    let text = format!(
        "{holds} leases, pins and waiting requests use buffers of the tiers: end them, and delete DLPack \
         tensors of their views, before the tiers are closed"
    );
    refuse(py, "InUseError", &text)
}

/// Closes the tiers below a pool that is to be closed.
pub fn close_all(py: Python<'_>, below: Vec<Weak<Core>>) -> PyResult<()> {
    let close = || below.iter().filter_map(Weak::upgrade).try_for_each(|core| core.close());
    py.detach(close).map_err(|held| still_held(py, held))
}

/// Reads the arguments of a constructor, as JSON from `vramp._tiers`, or as the program's TOML.
fn configuration(
    py: Python<'_>,
    arguments: &Bound<'_, PyTuple>,
    named: &Bound<'_, PyDict>,
) -> PyResult<TiersConfig> {
    let convert = python::member(py, "vramp._tiers", "configuration")?;
    let converted = convert.call(arguments, Some(named))?;
    let (form, text): (String, String) = converted.extract()?;
    let wrong =
        |text: String| refuse(py, "OptionError", &format!("the tiers cannot be opened: {text}"));
    if form == "toml" {
        return TiersConfig::from_toml(&text).map_err(|error| wrong(error.to_string()));
    }
    let mut config: TiersConfig =
        serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    if form == "sizes" {
        let hosts = std::mem::take(&mut config.hosts);
        config.hosts = hosts.into_iter().map(HostSpaceConfig::pinned_in_parts).collect();
    }
    Ok(config)
}

#[pymethods]
impl Tiers {
    #[new]
    #[pyo3(signature = (
        pool, config = None, *, host = None, disk = None, disk_limit = None, device = None,
        patience = None, piece = None, store = None, peers = None, promote_after = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword of the constructor in Python")]
    fn new(
        pool: &Bound<'_, Pool>,
        config: Option<&Bound<'_, PyAny>>,
        host: Option<&Bound<'_, PyAny>>,
        disk: Option<&Bound<'_, PyAny>>,
        disk_limit: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
        patience: Option<f64>,
        piece: Option<&Bound<'_, PyAny>>,
        store: Option<&Bound<'_, PyAny>>,
        peers: Option<&Bound<'_, PyAny>>,
        promote_after: Option<u32>,
    ) -> PyResult<Tiers> {
        let py = pool.py();
        check_fork().map_err(|failure| raise(py, failure))?;
        Caller::prepare(py)?;
        let named = PyDict::new(py);
        named.set_item("host", host)?;
        named.set_item("disk", disk)?;
        let (objects, disk_limit) = match (store, disk_limit) {
            (None, limit) => (None, limit),
            (Some(store), Some(limit)) => {
                (Some(store::tier(store, Bytes::new(amount(py, limit, "disk_limit")?))?), None)
            }
            (Some(_), None) => {
                let text = "a store needs disk_limit, the most bytes in it: pass that too";
                return Err(refuse(py, "OptionError", text));
            }
        };
        named.set_item("disk_limit", disk_limit)?;
        named.set_item("device", device)?;
        named.set_item("peers", peers)?;
        let info = pool.get().info(py)?;
        named.set_item("ordinal", info.ordinal)?;
        let mut config = configuration(py, &PyTuple::new(py, [config])?, &named)?;
        config.promote_after = promote_after.or(config.promote_after);
        let mut spill = SpillConfig::default();
        if let Some(patience) = patience {
            spill.patience = seconds(py, patience)?.unwrap_or(Duration::MAX);
        }
        if let Some(piece) = piece {
            spill.piece = Bytes::new(amount(py, piece, "piece")?);
        }
        let patience = spill.patience;
        let others = pool.get().call(py, |session| Ok(session.others(&config)))?;
        let options = TiersOptions { spill, objects, others, ..TiersOptions::default() };
        let allocator = pool.get().allocator();
        let kept = pool.get().call(py, |session| Ok(Arc::clone(session.shared_allocator())))?;
        let opened = py.detach(|| {
            let tiers = options.on(kept, &config)?;
            let host = allocator.with(|session| Ok(session.lend_host_memory(&tiers)))?;
            Ok(Open { host, tiers, allocator, patience })
        });
        let open = opened.map_err(|failure: Failure| raise(py, failure))?;
        let core = Core::new(open, OPENED.fetch_add(1, Ordering::Relaxed));
        pool.get().add_tiers(&core);
        Ok(Tiers { core, pool: pool.clone().unbind() })
    }

    /// The pool that the buffers' memory is taken from.
    #[getter(pool)]
    fn owner(&self, py: Python<'_>) -> Py<Pool> {
        self.pool.clone_ref(py)
    }

    /// True once they were closed.
    #[getter]
    fn is_closed(&self) -> bool {
        self.core.is_closed()
    }

    /// Returns an empty buffer.
    #[pyo3(signature = (nbytes, *, priority = 0, readable = false))]
    fn buffer(
        slf: &Bound<'_, Tiers>,
        nbytes: &Bound<'_, PyAny>,
        priority: i32,
        readable: bool,
    ) -> PyResult<Buffer> {
        let py = slf.py();
        let len = Bytes::new(amount(py, nbytes, "nbytes")?);
        let buffer = slf.get().call(py, |open| {
            let buffer = open.tiers.buffer(len)?;
            if readable {
                buffer.readable_while_spilled()?;
            }
            if priority != 0 {
                buffer.set_priority(priority);
            }
            Ok::<_, vramp_defer::SpillError>(buffer)
        })?;
        Buffer::new(slf, buffer, priority)
    }

    /// Makes a buffer of memory.
    #[pyo3(signature = (memory, *, stream = None))]
    fn adopt(
        slf: &Bound<'_, Tiers>,
        memory: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Buffer> {
        adopt::adopt(slf, memory, stream)
    }

    /// Restores buffers, and waits until they are there.
    #[pyo3(signature = (*buffers))]
    fn retrieve(&self, py: Python<'_>, buffers: &Bound<'_, PyTuple>) -> PyResult<()> {
        let buffers = buffers.iter().map(|buffer| Ok(buffer.cast::<Buffer>()?.clone().unbind()));
        self.retrieve_all(py, &buffers.collect::<PyResult<Vec<_>>>()?)
    }

    /// Waits for the work queued on a stream.
    #[pyo3(signature = (stream = None))]
    fn synchronize(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let name = stream_in(self.pool.bind(py), stream)?.name;
        self.call(py, |open| synchronize(open.allocator, name))
    }

    /// Returns a queue of the changes of buffers' states from now on.
    fn _events(slf: &Bound<'_, Tiers>) -> PyResult<Events> {
        Events::new(slf)
    }

    /// Returns a request for a lease on several buffers.
    #[pyo3(signature = (wanted, stream = None, *, timeout = None, in_place = false))]
    fn lease(
        slf: &Bound<'_, Tiers>,
        wanted: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        in_place: bool,
    ) -> PyResult<LeaseSet> {
        LeaseSet::new(slf, wanted, stream, timeout, in_place)
    }

    /// Evicts buffers.
    fn evict(&self, py: Python<'_>, nbytes: &Bound<'_, PyAny>) -> PyResult<u64> {
        let bytes = Bytes::new(amount(py, nbytes, "nbytes")?);
        let spilled = self.call(py, |open| Ok::<_, Failure>(open.tiers.manager().spill(bytes)))?;
        Ok(spilled.freed.count())
    }

    /// Reserves memory of a tier.
    #[pyo3(signature = (nbytes, tier = "device", *, timeout = 0.0, priority = 0, owner = None))]
    fn reserve(
        slf: &Bound<'_, Tiers>,
        nbytes: &Bound<'_, PyAny>,
        tier: &str,
        timeout: Option<f64>,
        priority: i32,
        owner: Option<u64>,
    ) -> PyResult<Reservation> {
        Reservation::new(slf, nbytes, tier, timeout, priority, owner)
    }

    /// Returns where the contents are, and the counts so far.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (census, stats, pinned) = self.call(py, |open| {
            let manager = open.tiers.manager();
            let pinned = PinnedMemory::of([open.tiers.host_pool()]);
            Ok::<_, Failure>((manager.census(), manager.stats(), pinned))
        })?;
        let fields = PyDict::new(py);
        let set = |name: &str, value: u64| fields.set_item(name, value);
        set("buffers", census.buffers as u64)?;
        set("leases", census.leases as u64)?;
        set("waiting", census.waiting as u64)?;
        set("moves", census.moves as u64)?;
        set("total", census.total.count())?;
        set("empty", census.empty.count())?;
        set("resident", census.resident.count())?;
        set("deferred", census.spilled.count())?;
        set("device_copies", census.peer_copies.count())?;
        set("host", census.host_copies.count())?;
        set("disk", census.disk_copies.count())?;
        set("evictions", stats.spills)?;
        set("evicted", stats.freed_bytes)?;
        set("to_host", stats.to_host_bytes)?;
        set("from_host", stats.from_host_bytes)?;
        set("to_disk", stats.to_disk_bytes)?;
        set("from_disk", stats.from_disk_bytes)?;
        set("waits", stats.waits)?;
        set("waited_ns", stats.waited_ns)?;
        set("failures", stats.failures)?;
        set("host_pinned", pinned.pinned.count())?;
        set("host_used", pinned.used.count())?;
        set("to_device", stats.to_peer_bytes)?;
        set("from_device", stats.from_peer_bytes)?;
        set("reads_in_place", stats.reads_in_place)?;
        set("promotions", stats.promotions)?;
        result(py, "TierStats", &fields)
    }

    /// Checks every invariant.
    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |open| open.tiers.manager().audit())
    }

    /// Closes the tiers.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_fork().map_err(|failure| raise(py, failure))?;
        py.detach(|| self.core.close()).map_err(|held| still_held(py, held))
    }

    fn __enter__<'py>(slf: Bound<'py, Tiers>) -> Bound<'py, Tiers> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let closed = self.close(py);
        // An exception of the block is not replaced. The last reference closes the tiers then.
        if kind.is_none() { closed } else { Ok(()) }
    }

    /// Refuses to be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(not_pickled("Tiers"))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let census = self.call(py, |open| Ok::<_, Failure>(open.tiers.manager().census()));
        match census {
            Ok(census) => format!(
                "<vramp.Tiers with {} buffers, {} of {} on the card>",
                census.buffers, census.resident, census.total
            ),
            Err(_) => "<vramp.Tiers, closed>".to_owned(),
        }
    }
}

/// Returns the tier of a name.
fn tier_of(name: &str) -> PyResult<vramp_tiers::Tier> {
    match name {
        "device" => Ok(vramp_tiers::Tier::Gpu),
        "host" => Ok(vramp_tiers::Tier::Host),
        "disk" => Ok(vramp_tiers::Tier::Disk),
        _ => Err(PyTypeError::new_err(format!("tier is {name:?}: use 'device', 'host' or 'disk'"))),
    }
}
