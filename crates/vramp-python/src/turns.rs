//! Processes that take turns at a card.
//!
//! 1. `Turns` opens the line of a card, and `Turns.acquire` returns a [`Turn`].
//! 2. A handler is called on a thread of vramp, which takes the interpreter for the time of the call.
//! 3. Waits run detached from the interpreter, and look for signals ten times in a second.
//!
//! A lock of a [`Turn`] is taken only while detached, and never in a forked child, in which a thread that
//! held it may be missing.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use vramp_ipc::turns::{self, AcquireError, Answer, Need, Participant, TurnsConfig, TurnsError};

use crate::error::{refuse, result};
use crate::python::detached;
use crate::tiers::seconds;

/// How long a wait runs without a look at signals.
const SLICE: Duration = Duration::from_millis(100);

#[cold]
fn raise_turns(py: Python<'_>, error: &TurnsError) -> PyErr {
    let class = match error {
        TurnsError::Card { .. } => "OptionError",
        TurnsError::Forked => "ForkedError",
        TurnsError::HasHandler => "InUseError",
        _ => "FileError",
    };
    refuse(py, class, &error.to_string())
}

#[cold]
fn raise_acquire(py: Python<'_>, error: &AcquireError) -> PyErr {
    match error {
        AcquireError::TimedOut(_) => refuse(py, "TurnTimeoutError", &error.to_string()),
        AcquireError::Refused { .. } => refuse(py, "TurnRefusedError", &error.to_string()),
        AcquireError::Turns(error) => raise_turns(py, error),
    }
}

fn process<'py>(py: Python<'py>, found: &Participant) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    fields.set_item("program", &found.program)?;
    fields.set_item("pid", found.pid)?;
    fields.set_item("is_pid_valid", found.is_pid_valid)?;
    let bytes = match found.need {
        Need::Card => None,
        Need::Bytes(bytes) => Some(bytes),
    };
    fields.set_item("bytes", bytes)?;
    fields.set_item("requested", unix_time(found.requested))?;
    result(py, "TurnProcess", &fields)
}

fn processes<'py>(py: Python<'py>, found: &[Participant]) -> PyResult<Bound<'py, PyList>> {
    let processes: PyResult<Vec<_>> = found.iter().map(|found| process(py, found)).collect();
    PyList::new(py, processes?)
}

fn unix_time(time: std::time::SystemTime) -> f64 {
    time.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The line of a card.
#[pyclass(frozen, weakref, module = "vramp.turns")]
pub struct Turns {
    /// `None` only while it is dropped.
    turns: Option<turns::Turns>,
}

impl Turns {
    fn open(&self) -> &turns::Turns {
        self.turns.as_ref().expect("it is taken by the destructor only")
    }
}

#[pymethods]
impl Turns {
    #[new]
    fn new(py: Python<'_>, directory: PathBuf, card: &str, program: &str) -> PyResult<Turns> {
        let config = TurnsConfig { directory: &directory, card, program };
        let turns = py.detach(|| turns::Turns::open(&config));
        Ok(Turns { turns: Some(turns.map_err(|error| raise_turns(py, &error))?) })
    }

    /// Waits for the turn.
    #[pyo3(signature = (timeout = None, *, bytes = None))]
    fn acquire(&self, py: Python<'_>, timeout: Option<f64>, bytes: Option<u64>) -> PyResult<Turn> {
        let turns = self.open();
        let need = bytes.map_or(Need::Card, Need::Bytes);
        let timeout = timeout.map_or(Ok(None), |timeout| seconds(py, timeout))?;
        if timeout.is_some_and(|timeout| timeout.is_zero()) {
            let turn = py.detach(|| turns.acquire(need, Duration::ZERO));
            return Ok(Turn::new(turn.map_err(|error| raise_acquire(py, &error))?));
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let joined = py.detach(|| turns.join(need));
        let mut waiting = joined.map_err(|error| raise_turns(py, &error))?;
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let slice = left.map_or(SLICE, |left| left.min(SLICE));
            let waited = py.detach(|| waiting.wait(slice));
            if waited.map_err(|error| raise_acquire(py, &error))?
                || left.is_some_and(|left| left.is_zero())
            {
                break;
            }
            py.check_signals()?;
        }
        let turn = py.detach(|| match waiting.into_turn() {
            Ok(turn) => Ok(turn),
            Err(waiting) => Err(match waiting.timed_out() {
                Ok(found) => AcquireError::TimedOut(Box::new(turns::TimedOut {
                    timeout: timeout.unwrap_or(found.timeout),
                    ..found
                })),
                Err(error) => error.into(),
            }),
        });
        Ok(Turn::new(turn.map_err(|error| raise_acquire(py, &error))?))
    }

    /// Registers a function that is called when other processes wait.
    fn on_request(&self, py: Python<'_>, handler: &Bound<'_, PyAny>) -> PyResult<()> {
        if !handler.is_callable() {
            let text = format!("a handler is a function, and not {}", handler.get_type());
            return Err(PyTypeError::new_err(text));
        }
        let function = Function(Some(handler.clone().unbind()));
        let registered = py.detach(|| {
            self.open().on_request(move |request| {
                if function.call(request) { Answer::Release } else { Answer::Later }
            })
        });
        registered.map_err(|error| raise_turns(py, &error))
    }

    /// Removes the function.
    fn remove_handler(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.open().remove_handler()).map_err(|error| raise_turns(py, &error))
    }

    /// Returns who holds the turn and who waits.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let status = py.detach(|| self.open().status()).map_err(|error| raise_turns(py, &error))?;
        let fields = PyDict::new(py);
        let holder = status.holder.as_ref();
        let participant = holder.map(|holder| process(py, &holder.participant)).transpose()?;
        fields.set_item("holder", participant)?;
        fields.set_item("since", holder.map(|holder| unix_time(holder.since)))?;
        fields.set_item("waiting", PyTuple::new(py, processes(py, &status.waiting)?)?)?;
        result(py, "TurnStatus", &fields)
    }

    /// The card.
    #[getter]
    fn card(&self) -> &str {
        self.open().card()
    }

    /// The directory of the card.
    #[getter]
    fn directory(&self) -> PathBuf {
        self.open().directory().to_owned()
    }

    fn __repr__(&self) -> String {
        format!("<vramp.turns.Turns of {}>", self.card())
    }
}

/// Waits for a call of the handler, which may wait for the interpreter. Once the interpreter ends, the call
/// may wait for ever, and the end of the process ends the turns.
impl Drop for Turns {
    fn drop(&mut self) {
        let turns = self.turns.take();
        // SAFETY: the function may always be called.
        match unsafe { ffi::Py_IsInitialized() } {
            0 => std::mem::forget(turns),
            _ => detached(move || drop(turns)),
        }
    }
}

/// A function of the program.
struct Function(Option<Py<PyAny>>);

impl Function {
    /// Returns true if the turn is to be released. False if the function raised an exception, which is
    /// reported, and once the interpreter ends.
    fn call(&self, request: &turns::Request) -> bool {
        let answer = Python::try_attach(|py| {
            let Some(function) = self.0.as_ref().map(|function| function.bind(py)) else {
                return false;
            };
            ask(function, request).unwrap_or_else(|error| {
                error.write_unraisable(py, Some(function));
                false
            })
        });
        answer.unwrap_or(false)
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

fn ask(function: &Bound<'_, PyAny>, request: &turns::Request) -> PyResult<bool> {
    let py = function.py();
    let request = Py::new(py, TurnRequest { request: request.clone() })?;
    let answer = function.call1((request,))?;
    if answer.is_none() {
        return Ok(false);
    }
    answer.extract().map_err(|_| {
        PyTypeError::new_err(format!(
            "a handler returns True to release the turn, False or None to keep it, and not {}",
            answer.get_type()
        ))
    })
}

/// Processes that wait for a turn of this process.
#[pyclass(frozen, module = "vramp.turns")]
pub struct TurnRequest {
    request: turns::Request,
}

#[pymethods]
impl TurnRequest {
    /// The processes, in the order in which they get the turn.
    #[getter]
    fn waiting<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        processes(py, &self.request.waiting())
    }

    /// Lets the waits of these processes fail.
    fn refuse(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        py.detach(|| self.request.refuse(reason)).map_err(|error| raise_turns(py, &error))
    }

    fn __repr__(&self) -> String {
        format!("<vramp.turns.TurnRequest of {} processes>", self.request.waiting().len())
    }
}

/// The exclusive use of a card.
#[pyclass(frozen, weakref, module = "vramp.turns")]
pub struct Turn {
    /// `None` once it was released.
    turn: Mutex<Option<turns::Turn>>,
    /// Answers without the lock.
    state: Arc<turns::TurnState>,
}

impl Turn {
    fn new(turn: turns::Turn) -> Turn {
        let state = turn.state();
        Turn { turn: Mutex::new(Some(turn)), state }
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.state.check_fork().map_err(|error| raise_turns(py, &error))
    }

    fn lock(&self) -> MutexGuard<'_, Option<turns::Turn>> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, py: Python<'_>) -> PyResult<()> {
        self.check(py)?;
        let released = py.detach(|| {
            let turn = self.lock().take();
            turn.map_or(Ok(()), turns::Turn::release)
        });
        released.map_err(|error| raise_turns(py, &error))
    }

    fn requested(&self, py: Python<'_>, timeout: Duration) -> PyResult<Option<TurnRequest>> {
        let found = py.detach(|| match &*self.lock() {
            Some(turn) => turn.wait_for_request(timeout),
            None => Ok(None),
        });
        let found = found.map_err(|error| raise_turns(py, &error))?;
        Ok(found.map(|request| TurnRequest { request }))
    }
}

#[pymethods]
impl Turn {
    /// Releases the turn.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py)
    }

    /// True until the turn is released.
    #[getter]
    fn is_held(&self, py: Python<'_>) -> PyResult<bool> {
        self.check(py)?;
        Ok(self.state.is_held())
    }

    /// Returns the processes that wait.
    fn request(&self, py: Python<'_>) -> PyResult<Option<TurnRequest>> {
        self.check(py)?;
        self.requested(py, Duration::ZERO)
    }

    /// Waits until a process waits.
    #[pyo3(signature = (timeout = None))]
    fn wait_for_request(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
    ) -> PyResult<Option<TurnRequest>> {
        self.check(py)?;
        let timeout = timeout.map_or(Ok(None), |timeout| seconds(py, timeout))?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let found = self.requested(py, left.map_or(SLICE, |left| left.min(SLICE)))?;
            if found.is_some() || !self.state.is_held() || left.is_some_and(|left| left.is_zero()) {
                return Ok(found);
            }
            py.check_signals()?;
        }
    }

    fn __enter__<'py>(slf: Bound<'py, Turn>) -> Bound<'py, Turn> {
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
        // An exception of the block is not replaced.
        if kind.is_none() { ended } else { Ok(()) }
    }

    /// Refuses to be pickled.
    fn __reduce__(&self) -> PyResult<()> {
        Err(crate::error::not_pickled("Turn"))
    }

    fn __repr__(&self) -> String {
        let state = if self.state.is_held() { "held" } else { "released" };
        format!("<vramp.turns.Turn, {state}>")
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let turn = self.turn.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if turn.is_some() {
            detached(move || drop(turn));
        }
    }
}
