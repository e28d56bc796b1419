//! Changes of buffers' states, taken out by a thread of the program.
//!
//! A change is recorded while buffers are locked, and no Python code runs then. `vramp.Controller` has a
//! thread that takes the changes out and calls its clients.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use vramp_capi::process::{Failure, check_fork};
use vramp_defer::events::{BufferChange, BufferEvent, EventStream, EventsError};

use super::shared::Core;
use super::{Tiers, seconds};
use crate::error::raise;

/// Number of changes in a queue. More drop the oldest ones, and the reader compares the states.
const CAPACITY: usize = 1 << 16;

/// Most changes that one call returns.
const BATCH: usize = 1 << 10;

/// A queue of changes.
#[pyclass(frozen, module = "vramp._native")]
pub struct Events {
    core: Arc<Core>,
    stream: EventStream,
}

impl Events {
    pub fn new(tiers: &Bound<'_, Tiers>) -> PyResult<Events> {
        let stream = tiers
            .get()
            .call(tiers.py(), |open| Ok::<_, Failure>(open.tiers.manager().events(CAPACITY)))?;
        Ok(Events { core: Arc::clone(tiers.get().core()), stream })
    }
}

/// Returns the word for a change.
fn word(change: BufferChange) -> &'static str {
    match change {
        BufferChange::Created => "created",
        BufferChange::Freed => "freed",
        _ => "changed",
    }
}

#[pymethods]
impl Events {
    /// Waits for changes, and returns those there are: a word, the buffer's number, deferred bytes, and the
    /// number of its leases. `None` once there will be no more.
    #[pyo3(signature = (timeout = None))]
    fn take<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        check_fork().map_err(|failure| raise(py, failure))?;
        let timeout = timeout.map_or(Ok(None), |timeout| seconds(py, timeout))?;
        let taken = py.detach(|| {
            let mut events: Vec<BufferEvent> = Vec::new();
            match self.stream.recv(timeout.unwrap_or(Duration::MAX)) {
                Ok(first) => events.push(first),
                Err(EventsError::Closed) => return None,
                Err(EventsError::Empty) => return Some(events),
            }
            while events.len() < BATCH
                && let Ok(next) = self.stream.try_recv()
            {
                events.push(next);
            }
            Some(events)
        });
        let Some(taken) = taken else { return Ok(None) };
        let tuple = |event: &BufferEvent| {
            let status = event.status;
            let number = self.core.buffer_number(event.buffer);
            (word(event.change), number, status.deferred.count(), status.leases).into_pyobject(py)
        };
        let tuples = taken.iter().map(tuple).collect::<PyResult<Vec<Bound<'py, PyTuple>>>>()?;
        Ok(Some(PyList::new(py, tuples)?))
    }

    /// Returns the number of changes that were dropped since the last call.
    fn take_lost(&self, py: Python<'_>) -> PyResult<u64> {
        check_fork().map_err(|failure| raise(py, failure))?;
        Ok(py.detach(|| self.stream.take_lost()))
    }

    /// Returns the present states: the number of each buffer, deferred bytes, and the number of its leases.
    fn states<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let states = py.detach(|| Ok(self.core.open()?.tiers.manager().statuses()));
        let states = states.map_err(|failure: Failure| raise(py, failure))?;
        let tuples = states.into_iter().map(|(id, status)| {
            (self.core.buffer_number(id), status.deferred.count(), status.leases)
        });
        PyList::new(py, tuples.collect::<Vec<_>>())
    }

    /// Lets a call of `take` that waits, or else the next one, return at once.
    fn wake(&self, py: Python<'_>) -> PyResult<()> {
        check_fork().map_err(|failure| raise(py, failure))?;
        py.detach(|| self.stream.wake());
        Ok(())
    }

    /// Ends the queue. What is in it can still be taken out.
    fn close(&self, py: Python<'_>) {
        if check_fork().is_ok() {
            py.detach(|| self.stream.close());
        }
    }
}
