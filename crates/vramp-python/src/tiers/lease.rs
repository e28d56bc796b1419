//! Leases of buffers.
//!
//! 1. [`Lease`] and [`LeaseSet`] are requests until they are entered, and are entered once.
//! 2. A granted lease is a [`Grant`]. The request has it until its end, and every DLPack capsule of its
//!    views until the consumer deletes the tensor. The buffers are released with the last of them.
//! 3. After the end of the request its views fail, also while capsules keep the buffers.
//!
//! On the simulator the bytes are read by the host, so the lease waits until they are there.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use vramp_capi::process::{Failure, StreamName, check_fork};
use vramp_defer::{Access, DeferrableBuffer, LeaseBuilder, LeaseFuture, LeaseOwner};
use vramp_tiers::Deadline;

use super::grant::{Grant, ended};
use super::owner::Caller;
use super::shared::{Core, Open, OpenHold, end};
use super::view::View;
use super::waiting::{self, Completion, Pending, Waiting};
use super::{Buffer, Tiers, seconds};
use crate::calls::{id_of, synchronize};
use crate::error::{raise, refuse};
use crate::layout::{Memory, Place, accessible};
use crate::python;
use crate::stream::stream_in;

/// How far a request is.
enum State {
    Requested,
    /// A thread enters it.
    Entering,
    /// A coroutine waits for it.
    Waiting(Arc<Waiting>),
    Held(Arc<Grant>),
    /// Ended by the program. Capsules may still have it.
    Ended(Weak<Grant>),
}

/// A request for a lease, and then the lease.
struct Request {
    buffers: Vec<(Py<Buffer>, Access)>,
    core: Arc<Core>,
    place: Place,
    stream: StreamName,
    /// Keeps the stream alive: what was passed for it.
    stream_object: Option<Py<PyAny>>,
    /// `None` for the patience of the tiers.
    timeout: Option<Deadlines>,
    /// What is only read may stay below the card.
    in_place: bool,
    /// Held for a few instructions.
    state: Mutex<State>,
}

/// How long a wait on the main thread takes before signals are handled.
const SLICE: Duration = Duration::from_millis(50);

/// How long a request waits.
#[derive(Clone, Copy)]
enum Deadlines {
    After(Duration),
    Never,
}

/// Returns the access of a word.
fn access_of(word: &str) -> PyResult<Access> {
    match word {
        "r" => Ok(Access::Shared),
        "w" | "rw" => Ok(Access::Exclusive),
        "overwrite" => Ok(Access::Overwrite),
        _ => Err(PyTypeError::new_err(format!(
            "access is {word:?}: use 'r', 'w', 'rw', or 'overwrite' for contents that are not read"
        ))),
    }
}

impl Request {
    fn new(
        py: Python<'_>,
        tiers: &Tiers,
        buffers: Vec<(Py<Buffer>, Access)>,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        in_place: bool,
    ) -> PyResult<Request> {
        let stream = stream_in(tiers.pool().bind(py), stream)?;
        let timeout = match timeout {
            None => None,
            Some(timeout) => Some(match seconds(py, timeout)? {
                Some(time) => Deadlines::After(time),
                None => Deadlines::Never,
            }),
        };
        let place = match buffers.first() {
            Some((buffer, _)) => accessible(py, buffer.get().place())?,
            None => Place::Host,
        };
        Ok(Request {
            buffers,
            core: Arc::clone(tiers.core()),
            place,
            stream: stream.name,
            stream_object: stream.object,
            timeout,
            in_place,
            state: Mutex::new(State::Requested),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the lease.
    fn enter(&self, py: Python<'_>) -> PyResult<Arc<Grant>> {
        let caller = Caller::get(py)?;
        self.leave_requested(py, State::Entering)?;
        let entered = self.acquire(py, caller).map(|set| self.grant(py, set));
        *self.state() = match &entered {
            Ok(grant) => State::Held(Arc::clone(grant)),
            Err(_) => State::Requested,
        };
        entered
    }

    /// Requests the lease for a coroutine. Returns true if it does not have to wait.
    fn begin(&self, py: Python<'_>, number: u64) -> PyResult<bool> {
        let owner = Caller::get(py)?.owner;
        self.leave_requested(py, State::Entering)?;
        let begun = py.detach(|| {
            let future =
                |request: LeaseBuilder<'_>| request.restore_on(waiting::restore).into_future();
            let (future, hold) = self.request(owner, future)?;
            let complete = self.completion();
            let waiting = Waiting::new(number, Pending { future, hold, complete });
            let is_done = waiting.advance();
            Ok((waiting, is_done))
        });
        let (state, begun) = match begun {
            Ok((waiting, is_done)) => (State::Waiting(waiting), Ok(is_done)),
            Err(failure) => (State::Requested, Err(failure)),
        };
        *self.state() = state;
        begun.map_err(|failure: Failure| raise(py, failure))
    }

    /// Returns the lease that a coroutine has waited for.
    fn finish(&self, py: Python<'_>) -> PyResult<Arc<Grant>> {
        let outcome = match &*self.state() {
            State::Waiting(waiting) => waiting.take(),
            _ => None,
        };
        let Some(outcome) = outcome else {
            return Err(refuse(py, "InUseError", "the lease is not granted yet: wait for it"));
        };
        let entered = outcome.map(|set| self.grant(py, set));
        *self.state() = match &entered {
            Ok(grant) => State::Held(Arc::clone(grant)),
            Err(_) => State::Requested,
        };
        entered.map_err(|failure| raise(py, failure))
    }

    /// Ends the wait of a coroutine, or the lease.
    fn cancel(&self, py: Python<'_>) {
        let mut state = self.state();
        if !matches!(*state, State::Waiting(_)) {
            drop(state);
            return self.release();
        }
        let waiting = std::mem::replace(&mut *state, State::Requested);
        drop(state);
        if let State::Waiting(waiting) = waiting
            && check_fork().is_ok()
        {
            py.detach(|| waiting.cancel());
        }
    }

    /// Changes the state of a request that was not entered.
    fn leave_requested(&self, py: Python<'_>, to: State) -> PyResult<()> {
        let mut state = self.state();
        let text = match *state {
            State::Requested => {
                *state = to;
                return Ok(());
            }
            State::Entering | State::Waiting(_) | State::Held(_) => {
                Some("the lease is entered already: request another one")
            }
            State::Ended(_) => None,
        };
        drop(state);
        Err(text.map_or_else(|| ended(py), |text| refuse(py, "InUseError", text)))
    }

    /// Makes the request of vramp, with all its settings. The caller is detached.
    fn request<R>(
        &self,
        owner: LeaseOwner,
        finish: impl FnOnce(LeaseBuilder<'_>) -> R,
    ) -> Result<(R, OpenHold), Failure> {
        let hold = self.core.hold()?;
        let Open { tiers, allocator, patience, .. } = &*hold.open;
        let buffers = self.buffers.iter();
        let buffers = buffers.map(|(buffer, access)| Ok((buffer.get().inner()?, *access)));
        let buffers = buffers.collect::<Result<Vec<(DeferrableBuffer, Access)>, Failure>>()?;
        let wanted: Vec<_> = buffers.iter().map(|(buffer, access)| (buffer, *access)).collect();
        let stream = allocator.with(|session| id_of(session, self.stream))?;
        let deadline = match self.timeout {
            None => Deadline::from(*patience),
            Some(Deadlines::Never) => Deadline::NEVER,
            Some(Deadlines::After(time)) => Deadline::from(time),
        };
        let mut request = tiers.manager().request(&wanted).stream(stream);
        if self.in_place {
            request = request.in_place();
        }
        let finished = finish(request.deadline(deadline).owner(owner));
        Ok((finished, hold))
    }

    /// Returns what a granted lease waits for before the host may use it.
    fn completion(&self) -> Completion {
        let (name, is_on_host) = (self.stream, self.place == Place::Host);
        Box::new(move |hold| {
            if is_on_host {
                synchronize(hold.open.allocator, name)?;
            }
            Ok(())
        })
    }

    fn acquire(
        &self,
        py: Python<'_>,
        caller: Caller,
    ) -> PyResult<(vramp_defer::LeaseSet, OpenHold)> {
        let raise = |failure: Failure| raise(py, failure);
        let owner = caller.owner;
        let (set, hold) = if caller.is_main {
            let begun = py.detach(|| self.request(owner, |request| request.into_future()));
            let (future, hold) = begun.map_err(raise)?;
            (interruptible(py, future)?, hold)
        } else {
            let leased = py.detach(|| {
                let (set, hold) = self.request(owner, |request| request.wait())?;
                Ok((set?, hold))
            });
            leased.map_err(raise)?
        };
        let complete = self.completion();
        match py.detach(|| complete(&hold)) {
            Ok(()) => Ok((set, hold)),
            Err(failure) => {
                end((set, hold));
                Err(raise(failure))
            }
        }
    }

    fn grant(&self, py: Python<'_>, set: (vramp_defer::LeaseSet, OpenHold)) -> Arc<Grant> {
        for (buffer, _) in &self.buffers {
            buffer.get().leased_for(self.stream);
        }
        let addrs = set.0.addresses().map(|range| range.start.number()).collect();
        Arc::new(Grant {
            set: Some(set),
            addrs,
            allocator: self.core.allocator,
            stream: self.stream,
            _stream_object: self.stream_object.as_ref().map(|object| object.clone_ref(py)),
            is_released: AtomicBool::new(false),
        })
    }

    /// Ends the lease, if it is held.
    fn release(&self) {
        let mut state = self.state();
        let State::Held(grant) = &*state else { return };
        grant.is_released.store(true, Ordering::Release);
        let ended = State::Ended(Arc::downgrade(grant));
        let held = std::mem::replace(&mut *state, ended);
        // The end of the last one takes the manager's lock.
        drop(state);
        drop(held);
    }

    /// Returns true if a buffer is read in place under the lease.
    fn is_in_place(&self, index: usize) -> bool {
        match &*self.state() {
            State::Held(grant) => grant.set.as_ref().is_some_and(|(set, _)| set.is_in_place(index)),
            _ => false,
        }
    }

    fn is_held(&self) -> bool {
        match &*self.state() {
            State::Held(_) => true,
            State::Ended(grant) => grant.strong_count() > 0,
            State::Requested | State::Entering | State::Waiting(_) => false,
        }
    }

    fn view(
        &self,
        lease: &Bound<'_, PyAny>,
        grant: &Arc<Grant>,
        index: usize,
        shape: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<View> {
        let (buffer, access) = &self.buffers[index];
        let (addr, len) = (grant.addrs[index], buffer.get().len());
        let is_read_only = *access == Access::Shared;
        let memory = Memory { addr, size: len, usable: len, place: self.place, is_read_only };
        View::new(lease, grant, buffer, memory, shape, dtype)
    }

    fn words(&self) -> &'static str {
        match &*self.state() {
            State::Requested => "requested",
            State::Entering | State::Waiting(_) => "waiting",
            State::Held(_) => "held",
            State::Ended(grant) if grant.strong_count() > 0 => "ended, kept by DLPack tensors",
            State::Ended(_) => "ended",
        }
    }
}

/// Waits for a lease on the main thread. A signal's handler that raises ends the wait.
fn interruptible(py: Python<'_>, mut future: LeaseFuture) -> PyResult<vramp_defer::LeaseSet> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut advance = || {
        let mut context = Context::from_waker(&waker);
        Pin::new(&mut future).poll(&mut context)
    };
    let mut leased = py.detach(&mut advance);
    loop {
        if let Poll::Ready(leased) = leased {
            return leased.map_err(|error| raise(py, error));
        }
        if let Err(error) = py.check_signals() {
            end(future);
            return Err(error);
        }
        leased = py.detach(|| {
            std::thread::park_timeout(SLICE);
            advance()
        });
    }
}

/// Wakes a thread that is parked.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Unpark>) {
        self.0.unpark();
    }
}

/// Returns a coroutine of `vramp._leases`.
fn coroutine<'py>(lease: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    let py = lease.py();
    python::member(py, "vramp._leases", name)?.call1((lease,))
}

/// A lease of one buffer.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct Lease {
    request: Request,
    shape: Option<Py<PyAny>>,
    dtype: Option<Py<PyAny>>,
}

impl Lease {
    pub fn new(
        buffer: &Bound<'_, Buffer>,
        access: &str,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        (shape, dtype): (Option<&Bound<'_, PyAny>>, Option<&Bound<'_, PyAny>>),
        in_place: bool,
    ) -> PyResult<Lease> {
        let py = buffer.py();
        let tiers = buffer.get().tiers();
        let buffers = vec![(buffer.clone().unbind(), access_of(access)?)];
        Ok(Lease {
            request: Request::new(py, tiers, buffers, stream, timeout, in_place)?,
            shape: shape.map(|shape| shape.clone().unbind()),
            dtype: dtype.map(|dtype| dtype.clone().unbind()),
        })
    }
}

impl Lease {
    fn only_view(slf: &Bound<'_, Lease>, grant: &Arc<Grant>) -> PyResult<View> {
        let (py, Lease { request, shape, dtype }) = (slf.py(), slf.get());
        let shape = shape.as_ref().map(|shape| shape.bind(py));
        let dtype = dtype.as_ref().map(|dtype| dtype.bind(py));
        let view = request.view(slf.as_any(), grant, 0, shape, dtype);
        view.inspect_err(|_| request.release())
    }
}

#[pymethods]
impl Lease {
    /// The leased buffer.
    #[getter]
    fn buffer(&self, py: Python<'_>) -> Py<Buffer> {
        self.request.buffers[0].0.clone_ref(py)
    }

    /// True while the buffer stays where it is for it.
    #[getter]
    fn is_held(&self) -> bool {
        self.request.is_held()
    }

    /// True while the buffer is read in place for it.
    #[getter]
    fn is_in_place(&self) -> bool {
        self.request.is_in_place(0)
    }

    /// Waits for the lease.
    fn acquire(slf: &Bound<'_, Lease>) -> PyResult<View> {
        let grant = slf.get().request.enter(slf.py())?;
        Lease::only_view(slf, &grant)
    }

    /// Requests it for a coroutine. Returns true if it does not have to wait.
    fn _begin(&self, py: Python<'_>, number: u64) -> PyResult<bool> {
        self.request.begin(py, number)
    }

    /// Returns the view that a coroutine has waited for.
    fn _finish(slf: &Bound<'_, Lease>) -> PyResult<View> {
        let grant = slf.get().request.finish(slf.py())?;
        Lease::only_view(slf, &grant)
    }

    /// Ends the wait of a coroutine, or the lease.
    fn _cancel(&self, py: Python<'_>) {
        self.request.cancel(py);
    }

    /// Ends the lease.
    fn release(&self) {
        self.request.release();
    }

    fn __enter__(slf: &Bound<'_, Lease>) -> PyResult<View> {
        Lease::acquire(slf)
    }

    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) {
        self.request.release();
    }

    fn __aenter__<'py>(slf: &Bound<'py, Lease>) -> PyResult<Bound<'py, PyAny>> {
        coroutine(slf.as_any(), "enter")
    }

    fn __aexit__<'py>(
        slf: &Bound<'py, Lease>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        coroutine(slf.as_any(), "leave")
    }

    fn __repr__(&self) -> String {
        let buffer = self.request.buffers[0].0.get();
        format!("<vramp.Lease of buffer {}, {}>", buffer.number(), self.request.words())
    }
}

/// A lease of several buffers.
#[pyclass(frozen, weakref, module = "vramp")]
pub struct LeaseSet {
    request: Request,
}

impl LeaseSet {
    pub fn new(
        tiers: &Bound<'_, Tiers>,
        wanted: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        in_place: bool,
    ) -> PyResult<LeaseSet> {
        let py = tiers.py();
        let pair = |pair: Bound<'_, PyAny>| {
            let wrong =
                || PyTypeError::new_err("a lease takes pairs of a vramp.Buffer and an access");
            let pair = python::elements(&pair).map_err(|_| wrong())?;
            let (buffer, access): (Bound<'_, Buffer>, Bound<'_, PyString>) =
                pair.extract().map_err(|_| wrong())?;
            Ok((buffer.unbind(), access_of(&access.to_cow()?)?))
        };
        let buffers = python::elements(wanted)?.iter().map(pair).collect::<PyResult<Vec<_>>>()?;
        if buffers.is_empty() {
            return Err(refuse(py, "RangeError", "the lease has no buffer: name at least one"));
        }
        let request = Request::new(py, tiers.get(), buffers, stream, timeout, in_place)?;
        Ok(LeaseSet { request })
    }

    fn views<'py>(slf: &Bound<'py, LeaseSet>, grant: &Arc<Grant>) -> PyResult<Bound<'py, PyTuple>> {
        let (py, request) = (slf.py(), &slf.get().request);
        let view = |index| request.view(slf.as_any(), grant, index, None, None);
        let views = (0..request.buffers.len()).map(view).collect::<PyResult<Vec<_>>>();
        let views = views.and_then(|views| PyTuple::new(py, views));
        views.inspect_err(|_| request.release())
    }
}

#[pymethods]
impl LeaseSet {
    /// The leased buffers.
    #[getter]
    fn buffers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.request.buffers.iter().map(|(buffer, _)| buffer.clone_ref(py)))
    }

    /// True while the buffers stay where they are for it.
    #[getter]
    fn is_held(&self) -> bool {
        self.request.is_held()
    }

    /// Whether each buffer is read in place for it.
    #[getter]
    fn in_place<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let buffers = 0..self.request.buffers.len();
        PyTuple::new(py, buffers.map(|index| self.request.is_in_place(index)))
    }

    /// Waits for the lease.
    fn acquire<'py>(slf: &Bound<'py, LeaseSet>) -> PyResult<Bound<'py, PyTuple>> {
        let grant = slf.get().request.enter(slf.py())?;
        LeaseSet::views(slf, &grant)
    }

    /// Requests it for a coroutine. Returns true if it does not have to wait.
    fn _begin(&self, py: Python<'_>, number: u64) -> PyResult<bool> {
        self.request.begin(py, number)
    }

    /// Returns the views that a coroutine has waited for.
    fn _finish<'py>(slf: &Bound<'py, LeaseSet>) -> PyResult<Bound<'py, PyTuple>> {
        let grant = slf.get().request.finish(slf.py())?;
        LeaseSet::views(slf, &grant)
    }

    /// Ends the wait of a coroutine, or the lease.
    fn _cancel(&self, py: Python<'_>) {
        self.request.cancel(py);
    }

    /// Ends the lease.
    fn release(&self) {
        self.request.release();
    }

    fn __enter__<'py>(slf: &Bound<'py, LeaseSet>) -> PyResult<Bound<'py, PyTuple>> {
        LeaseSet::acquire(slf)
    }

    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) {
        self.request.release();
    }

    fn __aenter__<'py>(slf: &Bound<'py, LeaseSet>) -> PyResult<Bound<'py, PyAny>> {
        coroutine(slf.as_any(), "enter")
    }

    fn __aexit__<'py>(
        slf: &Bound<'py, LeaseSet>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        coroutine(slf.as_any(), "leave")
    }

    fn __repr__(&self) -> String {
        let count = self.request.buffers.len();
        format!("<vramp.LeaseSet of {count} buffers, {}>", self.request.words())
    }
}
