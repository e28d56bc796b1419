//! Reserved memory of a tier.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use vramp_alloc::Bytes;
use vramp_capi::process::{Failure, Kind};
use vramp_tiers::{Deadline, Owner, Strategy};

use super::shared::{Member, Membership, end};
use super::{Tiers, seconds, tier_of};
use crate::arguments::amount;
use crate::error::{raise, refuse};

/// Memory of a tier that is kept free for its owner. It ends by `release`, at the end of a `with` block,
/// or with the last reference.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Reservation {
    tiers: Py<Tiers>,
    tier: String,
    nbytes: u64,
    slot: Arc<Slot>,
    _membership: Membership,
}

/// The reservation until its end, or that of the tiers.
struct Slot(Mutex<Option<vramp_tiers::Reservation>>);

impl Slot {
    /// Held for a few instructions.
    fn lock(&self) -> MutexGuard<'_, Option<vramp_tiers::Reservation>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member for Slot {
    fn end(&self) {
        let reserved = self.lock().take();
        drop(reserved);
    }
}

impl Reservation {
    pub fn new(
        tiers: &Bound<'_, Tiers>,
        nbytes: &Bound<'_, PyAny>,
        tier: &str,
        timeout: Option<f64>,
        priority: i32,
        owner: Option<u64>,
    ) -> PyResult<Reservation> {
        let py = tiers.py();
        let (bytes, wanted) = (Bytes::new(amount(py, nbytes, "nbytes")?), tier_of(tier)?);
        let wait = timeout.map_or(Ok(None), |timeout| seconds(py, timeout))?;
        let core = tiers.get().core();
        let reserved = py.detach(|| {
            let hold = core.hold()?;
            let Some(space) = hold.open.tiers.space(wanted) else { return Ok(None) };
            let strategy = Strategy::Specific(space.id());
            let request = hold.open.tiers.reservations().request(strategy, bytes);
            let request = request.priority(priority);
            let request = match owner {
                Some(owner) => request.owner(Owner(owner)),
                None => request,
            };
            let reserved = match wait {
                Some(time) if time.is_zero() => request.now(),
                Some(time) => request.deadline(time).wait(),
                None => request.deadline(Deadline::NEVER).wait(),
            };
            Ok(Some(reserved?))
        });
        let reserved = reserved.map_err(|failure: Failure| {
            let now = failure.kind == Kind::NotNow;
            let hint = if now { "; with timeout= idle buffers leave for it first" } else { "" };
            raise(py, failure.hint(hint))
        });
        let Some(reserved) = reserved? else {
            return Err(refuse(
                py,
                "RangeError",
                &format!("the tiers have no {tier}: configure one"),
            ));
        };
        let nbytes = reserved.bytes().count();
        let slot = Arc::new(Slot(Mutex::new(Some(reserved))));
        let member: Arc<dyn Member> = Arc::<Slot>::clone(&slot);
        let membership =
            core.join(Arc::downgrade(&member)).map_err(|failure| raise(py, failure))?;
        Ok(Reservation {
            tiers: tiers.clone().unbind(),
            tier: tier.to_owned(),
            nbytes,
            slot,
            _membership: membership,
        })
    }

    fn release_all(&self) {
        let reserved = self.slot.lock().take();
        if reserved.is_some() {
            end(reserved);
        }
    }
}

#[pymethods]
impl Reservation {
    /// Reserved bytes: those asked for, rounded up.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// The tier.
    #[getter]
    fn tier(&self) -> &str {
        &self.tier
    }

    /// The tiers that it belongs to.
    #[getter(tiers)]
    fn owner(&self, py: Python<'_>) -> Py<Tiers> {
        self.tiers.clone_ref(py)
    }

    /// True once it was released.
    #[getter]
    fn is_released(&self) -> bool {
        self.slot.lock().is_none()
    }

    /// Releases the memory.
    fn release(&self) {
        self.release_all();
    }

    fn __enter__<'py>(slf: Bound<'py, Reservation>) -> Bound<'py, Reservation> {
        slf
    }

    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) {
        self.release_all();
    }

    fn __repr__(&self) -> String {
        let end = if self.is_released() { ", released" } else { "" };
        format!("<vramp.Reservation of {} bytes of the {}{end}>", self.nbytes, self.tier)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release_all();
    }
}
