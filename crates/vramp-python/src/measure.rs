//! Peaks and counts of a part of a program.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use vramp_alloc::stats::{ScopeId, ScopePeaks, Stats};
use vramp_capi::process::{CallResult, Session};

use crate::error::refuse;
use crate::pool::Pool;
use crate::python::detached;

/// What happens in a pool while a `with` block runs.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Measure {
    pool: Py<Pool>,
    state: Mutex<State>,
}

enum State {
    Fresh,
    Open { scope: ScopeId, start: Box<Stats> },
    Over(Box<Measured>),
}

#[derive(Clone)]
struct Measured {
    start: Stats,
    end: Stats,
    peaks: ScopePeaks,
}

impl Measured {
    fn of(session: &Session, start: Stats, peaks: Option<ScopePeaks>) -> CallResult<Measured> {
        Ok(Measured { start, end: session.total_stats()?, peaks: peaks.unwrap_or_default() })
    }
}

impl Measure {
    pub fn new(pool: Py<Pool>) -> Measure {
        Measure { pool, state: Mutex::new(State::Fresh) }
    }

    /// Held for a few instructions, while no Python code runs.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what was measured so far.
    fn read<R>(&self, py: Python<'_>, read: impl FnOnce(&Measured) -> R) -> PyResult<R> {
        // No Python code runs while the state is locked, not even to make an exception.
        let open = match &*self.state() {
            State::Over(measured) => return Ok(read(measured)),
            State::Open { scope, start } => Some((*scope, **start)),
            State::Fresh => None,
        };
        let Some((scope, start)) = open else {
            let text = "nothing was measured: use it as `with pool.measure() as m:`";
            return Err(refuse(py, "VrampError", text));
        };
        let so_far = self.pool.get().call(py, |session| {
            Measured::of(session, start, session.allocator().scope_peaks(scope)?)
        })?;
        Ok(read(&so_far))
    }
}

#[pymethods]
impl Measure {
    fn __enter__<'py>(slf: Bound<'py, Measure>) -> PyResult<Bound<'py, Measure>> {
        let py = slf.py();
        let measure = slf.get();
        if !matches!(&*measure.state(), State::Fresh) {
            let text = "the block was measured already: call pool.measure() for each block";
            return Err(refuse(py, "VrampError", text));
        }
        let (scope, start) = measure
            .pool
            .get()
            .call(py, |session| Ok((session.allocator().begin_scope()?, session.total_stats()?)))?;
        *measure.state() = State::Open { scope, start: Box::new(start) };
        Ok(slf)
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (scope, start) = {
            let mut state = self.state();
            let State::Open { scope, start } = &*state else { return Ok(()) };
            let open = (*scope, **start);
            *state = State::Fresh;
            open
        };
        let measured = self.pool.get().call(py, |session| {
            Measured::of(session, start, session.allocator().end_scope(scope)?)
        })?;
        *self.state() = State::Over(Box::new(measured));
        Ok(())
    }

    /// Most requested bytes of live allocations.
    #[getter]
    fn live_peak(&self, py: Python<'_>) -> PyResult<u64> {
        self.read(py, |measured| measured.peaks.live.count())
    }

    /// Most physical memory.
    #[getter]
    fn reserved_peak(&self, py: Python<'_>) -> PyResult<u64> {
        self.read(py, |measured| {
            measured.peaks.reserved.max(measured.start.reserved).max(measured.end.reserved).count()
        })
    }

    /// Live bytes at the begin.
    #[getter]
    fn live_start(&self, py: Python<'_>) -> PyResult<u64> {
        self.read(py, |measured| measured.start.live.count())
    }

    /// Live bytes at the end, or now.
    #[getter]
    fn live_end(&self, py: Python<'_>) -> PyResult<u64> {
        self.read(py, |measured| measured.end.live.count())
    }

    /// Number of allocations.
    #[getter]
    fn allocated(&self, py: Python<'_>) -> PyResult<u64> {
        self.read(py, |measured| measured.end.placed - measured.start.placed)
    }

    /// Number of frees.
    #[getter]
    fn freed(&self, py: Python<'_>) -> PyResult<u64> {
        self.read(py, |measured| measured.end.freed - measured.start.freed)
    }

    /// Allocations without a driver call for memory.
    #[getter]
    fn hits(&self, py: Python<'_>) -> PyResult<u64> {
        self.read(py, |measured| measured.end.hits.saturating_sub(measured.start.hits))
    }

    /// Allocations that needed driver calls.
    #[getter]
    fn misses(&self, py: Python<'_>) -> PyResult<u64> {
        self.read(py, |measured| measured.end.misses.saturating_sub(measured.start.misses))
    }

    fn __repr__(&self) -> &'static str {
        match &*self.state() {
            State::Fresh => "<vramp.Measure, not begun>",
            State::Open { .. } => "<vramp.Measure, open>",
            State::Over(_) => "<vramp.Measure, over>",
        }
    }
}

impl Drop for Measure {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let State::Open { scope, .. } = *state {
            let allocator = self.pool.get().allocator();
            detached(move || {
                drop(allocator.with(|session| Ok(session.allocator().end_scope(scope)?)));
            });
        }
    }
}
