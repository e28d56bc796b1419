//! Processes that share the memory of a card by budgets: the native part of `vramp.budget`.
//!
//! 1. `Budget` joins a group. `Budget.attach` ties a pool to it, whose requests then claim what they lack.
//! 2. Functions of the program are called on the thread of the budget, which takes the interpreter for the
//!    time of the call.
//! 3. Waits run detached from the interpreter, and look for signals ten times in a second.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use vramp_alloc::Bytes;
use vramp_alloc::budget::{
    Ahead, Budget as Native, BudgetConfig, BudgetError, BudgetGroup, ClaimError, GroupStatus,
    JoinBudgetError, Member, PoolBudget, Request, Room, Sleep, Usage, groups,
};
use vramp_alloc::kind::{Classify, Kind};

use crate::arguments::amount;
use crate::error::{refuse, result};
use crate::pool::Pool;
use crate::python::detached;
use crate::tiers::seconds;

/// How long a wait runs without a look at signals.
const SLICE: Duration = Duration::from_millis(100);

/// How long members may take to publish what their memory is used for.
const PUBLISH: Duration = Duration::from_millis(20);

#[cold]
fn raise_budget(py: Python<'_>, error: &BudgetError) -> PyErr {
    let class = match error.kind() {
        Kind::Forked => "ForkedError",
        Kind::Option => "OptionError",
        Kind::InUse => "BudgetError",
        _ if matches!(error, BudgetError::Name { .. }) => "OptionError",
        _ => "FileError",
    };
    refuse(py, class, &error.to_string())
}

#[cold]
fn raise_claim(py: Python<'_>, error: &ClaimError) -> PyErr {
    match error {
        ClaimError::TimedOut(_) => refuse(py, "BudgetTimeoutError", &error.to_string()),
        ClaimError::Limit { .. } | ClaimError::Impossible(_) => {
            refuse(py, "BudgetError", &error.to_string())
        }
        ClaimError::Budget(error) => raise_budget(py, error),
    }
}

fn room<'py>(py: Python<'py>, found: Room) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    fields.set_item("available", found.available)?;
    fields.set_item("obtainable", found.obtainable)?;
    fields.set_item("most", found.most)?;
    result(py, "BudgetRoom", &fields)
}

fn member<'py>(py: Python<'py>, found: &Member) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    fields.set_item("program", &found.program)?;
    fields.set_item("pid", found.pid)?;
    fields.set_item("is_pid_valid", found.is_pid_valid)?;
    fields.set_item("is_stopped", found.is_stopped)?;
    fields.set_item("priority", found.priority)?;
    fields.set_item("claimed", found.claimed)?;
    fields.set_item("guaranteed", found.guaranteed)?;
    fields.set_item("limit", found.limit)?;
    let Usage { live, cached, parked, asleep } = found.usage;
    fields.set_item("live", live)?;
    fields.set_item("cached", cached)?;
    fields.set_item("parked", parked)?;
    fields.set_item("asleep", asleep)?;
    fields.set_item("waits_for", found.waiting.map(|(bytes, _)| bytes))?;
    fields.set_item("waited", found.waiting.map(|(_, waited)| waited.as_secs_f64()))?;
    result(py, "BudgetMember", &fields)
}

fn status<'py>(py: Python<'py>, found: &GroupStatus) -> PyResult<Bound<'py, PyAny>> {
    let members: PyResult<Vec<_>> = found.members.iter().map(|found| member(py, found)).collect();
    let fields = PyDict::new(py);
    fields.set_item("capacity", found.capacity)?;
    fields.set_item("free", found.free())?;
    fields.set_item("members", PyTuple::new(py, members?)?)?;
    result(py, "BudgetStatus", &fields)
}

/// A function of the program.
struct Function(Option<Py<PyAny>>);

impl Function {
    fn new(handler: &Bound<'_, PyAny>) -> PyResult<Function> {
        match handler.is_callable() {
            true => Ok(Function(Some(handler.clone().unbind()))),
            false => Err(PyTypeError::new_err(format!(
                "a handler is a function, and not {}",
                handler.get_type()
            ))),
        }
    }

    /// Calls the function. `None` if it raised an exception, which is reported, and once the interpreter
    /// ends.
    fn call<R>(&self, call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<R>) -> Option<R> {
        let answer = Python::try_attach(|py| {
            let function = self.0.as_ref()?.bind(py);
            let called = call(function);
            called.map_err(|error| error.write_unraisable(py, Some(function))).ok()
        });
        answer.flatten()
    }
}

/// The function's destructor may run any code, and needs the interpreter.
impl Drop for Function {
    fn drop(&mut self) {
        let mut function = self.0.take();
        if Python::try_attach(|_| drop(function.take())).is_none() {
            // The interpreter has ended.
            std::mem::forget(function);
        }
    }
}

/// The budget of this process in a group.
#[pyclass(frozen, weakref, module = "vramp.budget")]
pub struct Budget {
    /// `None` once it was left. Held for a few instructions.
    native: Mutex<Option<Arc<Native>>>,
    pool: OnceLock<PoolBudget>,
}

impl Budget {
    fn native(&self, py: Python<'_>) -> PyResult<Arc<Native>> {
        let native = self.native.lock().unwrap_or_else(PoisonError::into_inner).clone();
        native
            .ok_or_else(|| refuse(py, "ClosedError", "the process has left the group: join again"))
    }

    /// Makes a call detached from the interpreter.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Native) -> Result<R, BudgetError> + Send,
    ) -> PyResult<R> {
        let native = self.native(py)?;
        let called = py.detach(move || call(&native));
        called.map_err(|error| raise_budget(py, &error))
    }
}

fn patience(py: Python<'_>, timeout: Option<f64>) -> PyResult<Duration> {
    timeout.map_or(Ok(Duration::MAX), |timeout| {
        seconds(py, timeout).map(|timeout| timeout.unwrap_or(Duration::MAX))
    })
}

#[pymethods]
impl Budget {
    #[new]
    #[pyo3(signature = (directory, card, group, program, capacity, guaranteed, limit, priority, timeout))]
    #[allow(clippy::too_many_arguments, reason = "the call of vramp.budget.join names them")]
    fn new(
        py: Python<'_>,
        directory: PathBuf,
        card: &str,
        group: &str,
        program: &str,
        capacity: &Bound<'_, PyAny>,
        guaranteed: &Bound<'_, PyAny>,
        limit: Option<&Bound<'_, PyAny>>,
        priority: u8,
        timeout: Option<f64>,
    ) -> PyResult<Budget> {
        let config = BudgetConfig {
            directory: &directory,
            card,
            group,
            program,
            capacity: amount(py, capacity, "capacity")?,
            guaranteed: amount(py, guaranteed, "guaranteed")?,
            limit: limit.map(|limit| amount(py, limit, "limit")).transpose()?,
            priority,
            timeout: patience(py, timeout)?,
        };
        let native = py.detach(|| Native::join(&config));
        let native = native.map_err(|error| raise_claim(py, &error))?;
        Ok(Budget { native: Mutex::new(Some(Arc::new(native))), pool: OnceLock::new() })
    }

    /// Ties a pool to the budget.
    #[pyo3(signature = (pool, *, ahead = None, patience = 5.0))]
    fn attach(
        &self,
        py: Python<'_>,
        pool: &Bound<'_, Pool>,
        ahead: Option<&Bound<'_, PyAny>>,
        patience: Option<f64>,
    ) -> PyResult<()> {
        let native = self.native(py)?;
        let bytes =
            ahead.map_or(Ok(Ahead::default().bytes.count()), |it| amount(py, it, "ahead"))?;
        let ahead = Ahead { bytes: Bytes::new(bytes), patience: self::patience(py, patience)? };
        let joined =
            pool.get().call(py, |session| Ok(session.allocator().join_budget(native, ahead)))?;
        let tied = joined.map_err(|error| match &error {
            JoinBudgetError::Claim { error, .. } => raise_claim(py, error),
            JoinBudgetError::HasBudget => refuse(py, "InUseError", &error.to_string()),
            JoinBudgetError::Alloc(_) => refuse(py, "BudgetError", &error.to_string()),
        })?;
        if self.pool.set(tied).is_err() {
            return Err(refuse(py, "InUseError", "the budget has a pool already"));
        }
        Ok(())
    }

    /// Claims bytes, and waits for them.
    #[pyo3(signature = (nbytes, timeout = None))]
    fn claim(
        &self,
        py: Python<'_>,
        nbytes: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (native, bytes) = (self.native(py)?, amount(py, nbytes, "nbytes")?);
        let timeout = patience(py, timeout)?;
        let mut raised = None;
        let claimed = py.detach(|| {
            let mut looked = Instant::now();
            native.claim_while(bytes, timeout, || {
                if looked.elapsed() < SLICE {
                    return true;
                }
                looked = Instant::now();
                let signals = Python::try_attach(|py| py.check_signals());
                raised = signals.and_then(Result::err);
                raised.is_none()
            })
        });
        match (raised, claimed) {
            (Some(raised), Err(_)) => Err(raised),
            (_, claimed) => claimed.map_err(|error| raise_claim(py, &error)),
        }
    }

    /// Gives bytes back.
    fn give_back(&self, py: Python<'_>, nbytes: &Bound<'_, PyAny>) -> PyResult<u64> {
        let bytes = amount(py, nbytes, "nbytes")?;
        self.call(py, |native| native.give_back(bytes))
    }

    /// Returns idle memory of the pool to the card and gives it back.
    fn give_back_idle(&self, py: Python<'_>) -> PyResult<u64> {
        self.native(py)?;
        let Some(pool) = self.pool.get() else { return Ok(0) };
        let given = py.detach(|| pool.give_back_idle());
        given.map(Bytes::count).map_err(|error| raise_budget(py, &error))
    }

    /// Publishes what the memory is used for.
    #[pyo3(signature = (*, live = 0, cached = 0, parked = 0, asleep = 0))]
    fn publish(
        &self,
        py: Python<'_>,
        live: u64,
        cached: u64,
        parked: u64,
        asleep: u64,
    ) -> PyResult<()> {
        self.call(py, |native| native.publish(&Usage { live, cached, parked, asleep }))
    }

    /// Returns what this process can have.
    fn room<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        room(py, self.call(py, Native::room)?)
    }

    /// Returns the members of the group.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        status(py, &self.call(py, Native::status)?)
    }

    /// Changes the limit.
    fn set_limit(&self, py: Python<'_>, limit: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let limit = limit.map(|limit| amount(py, limit, "limit")).transpose()?;
        self.call(py, |native| native.set_limit(limit))
    }

    /// Registers a function that gives memory back.
    fn on_request(&self, py: Python<'_>, handler: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.pool.get().is_some() {
            let text = "the pool answers requests: use on_reclaim";
            return Err(refuse(py, "InUseError", text));
        }
        let function = Function::new(handler)?;
        let give = move |request: &Request| {
            let Request { bytes, may_lose } = *request;
            function.call(|function| function.call1((bytes, may_lose))?.extract()).unwrap_or(0)
        };
        self.call(py, |native| native.on_request(give))
    }

    /// Registers a function that frees memory of the pool for another process.
    fn on_reclaim(&self, py: Python<'_>, handler: &Bound<'_, PyAny>) -> PyResult<()> {
        self.native(py)?;
        let Some(pool) = self.pool.get() else {
            return Err(refuse(py, "OptionError", "the budget has no pool: attach one first"));
        };
        let function = Function::new(handler)?;
        let reclaim = move |bytes: Bytes| {
            function.call(|function| function.call1((bytes.count(),)).map(drop));
        };
        py.detach(|| pool.on_reclaim(reclaim));
        Ok(())
    }

    /// Registers a function that pauses and resumes the process's memory.
    fn on_sleep(&self, py: Python<'_>, handler: &Bound<'_, PyAny>) -> PyResult<()> {
        let function = Function::new(handler)?;
        let sleep = move |sleep: Sleep| {
            let action = match sleep {
                Sleep::Pause => "pause",
                Sleep::Resume => "resume",
            };
            let done = function.call(|function| {
                let answer = function.call1((action,))?;
                if answer.is_none() { Ok(true) } else { answer.extract() }
            });
            done.unwrap_or(false)
        };
        self.call(py, |native| native.on_sleep(sleep))
    }

    /// Leaves the group.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        if self.pool.get().is_some() {
            let text = "the memory of a pool is claimed in the budget, which ends with the pool";
            return Err(refuse(py, "InUseError", text));
        }
        let native = self.native.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(native));
        Ok(())
    }

    #[getter]
    fn claimed(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.native(py)?.claimed())
    }

    #[getter]
    fn guaranteed(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.native(py)?.guaranteed())
    }

    #[getter]
    fn limit(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(self.native(py)?.limit())
    }

    #[getter]
    fn capacity(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.native(py)?.capacity())
    }

    /// The group.
    #[getter]
    fn group(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.native(py)?.group().to_owned())
    }

    /// The card.
    #[getter]
    fn card(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.native(py)?.card().to_owned())
    }

    fn __enter__<'py>(slf: Bound<'py, Budget>) -> Bound<'py, Budget> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let left = self.leave(py);
        // An exception of the block is not replaced.
        if kind.is_none() { left } else { Ok(()) }
    }

    /// Refuses to be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(crate::error::not_pickled("Budget"))
    }

    fn __repr__(&self) -> String {
        let native = self.native.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match native {
            Some(native) => {
                let claimed = Bytes::new(native.claimed());
                format!("<vramp.budget.Budget of {}, {claimed} claimed>", native.group())
            }
            None => "<vramp.budget.Budget, left>".to_owned(),
        }
    }
}

/// Waits for a call of a handler, which may wait for the interpreter. Once the interpreter ends, the call
/// may wait for ever, and the end of the process ends the budget.
impl Drop for Budget {
    fn drop(&mut self) {
        let native = self.native.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let pool = self.pool.take();
        // SAFETY: the function may always be called.
        match unsafe { ffi::Py_IsInitialized() } {
            0 => std::mem::forget((native, pool)),
            _ => detached(move || drop((native, pool))),
        }
    }
}

/// Returns the cards and names of the groups in a directory.
#[pyfunction]
pub fn budget_groups(py: Python<'_>, directory: PathBuf) -> PyResult<Bound<'_, PyList>> {
    let found = py.detach(|| groups(&directory));
    PyList::new(py, found.into_iter().map(|name| (name.card, name.group)))
}

/// Returns the members of a group, of which this process need not be one.
#[pyfunction]
pub fn budget_status<'py>(
    py: Python<'py>,
    directory: PathBuf,
    card: &str,
    group: &str,
) -> PyResult<Bound<'py, PyAny>> {
    let found = py.detach(|| {
        let group = BudgetGroup::open(&directory, card, group)?;
        group.refresh()?;
        std::thread::sleep(PUBLISH);
        group.status()
    });
    status(py, &found.map_err(|error| raise_budget(py, &error))?)
}
