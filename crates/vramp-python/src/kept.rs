//! Memory that outlives its process: the native part of `vramp.keep`.
//!
//! 1. `Pool.kept_draft` begins memory of a name, and `Pool.kept_open` opens it. Both return a [`Kept`].
//! 2. A draft places memory until `Kept.commit`; its addresses stay the same then. Arrays and capsules over it are its
//!    exports: while there are some it is not closed.
//! 3. Calls that wait for other processes run detached from the interpreter, until their timeout.

pub mod methods;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use vramp_alloc::sharing::Imported as Memory;
use vramp_alloc::sharing::kept::{
    KeepError, Keeper, KeptDraft, KeptError, KeptMemory, KeptOptions, Lock, MapAs, OpenKept,
};
use vramp_alloc::{Bytes, StreamId};
use vramp_capi::process::{CallResult, Exports, NotClosed, StreamName, check_fork};

use crate::calls::id_of;
use crate::error::{raise, refuse};
use crate::pool::Pool;
use crate::python::detached;
use crate::tiers::seconds;

/// Stands for no timeout.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);

/// How long a wait runs without a look at signals.
const SLICE: Duration = Duration::from_millis(100);

fn deadline(py: Python<'_>, timeout: f64) -> PyResult<Instant> {
    Ok(Instant::now() + seconds(py, timeout)?.unwrap_or(LONGEST))
}

/// Clients by directory and timeout, so that what they have open is restored by one thread. Locked by threads that are
/// attached to the interpreter, for a moment, so that a fork finds it free.
static KEEPERS: Mutex<BTreeMap<(PathBuf, Duration), Keeper>> = Mutex::new(BTreeMap::new());

/// Returns the client of the keeper of a directory. `timeout` is that of one reply.
fn keeper(py: Python<'_>, directory: PathBuf, timeout: f64) -> PyResult<Keeper> {
    let timeout = seconds(py, timeout)?.unwrap_or(LONGEST);
    let new = Keeper::new(&directory, timeout).interruptible();
    let Ok(mut keepers) = KEEPERS.try_lock() else { return Ok(new) };
    Ok(keepers.entry((directory, timeout)).or_insert(new).clone())
}

/// Repeats a call that a signal interrupted, unless the signal's handler raises.
fn waiting<R>(
    py: Python<'_>,
    mut call: impl FnMut() -> PyResult<Result<R, KeptError>>,
) -> PyResult<R> {
    loop {
        match call()? {
            Err(KeptError::Keeper(KeepError::Interrupted)) => py.check_signals()?,
            answer => return answer.map_err(|error| raise(py, error)),
        }
    }
}

fn lock_named(py: Python<'_>, name: &str) -> PyResult<Lock> {
    match name {
        "none" => Ok(Lock::None),
        "read" => Ok(Lock::Read),
        "write" => Ok(Lock::Write),
        other => {
            let text = format!("lock is {other:?}: use \"none\", \"read\" or \"write\"");
            Err(refuse(py, "OptionError", &text))
        }
    }
}

enum State {
    Draft(Box<KeptDraft>),
    /// A call places memory in the draft, and may run handlers of the program. Streams that were recorded meanwhile.
    Placing(Vec<StreamId>),
    /// Calls that wait have it too.
    Open(Arc<KeptMemory>),
    /// A commit failed: the memory is this process's own.
    Private {
        _memory: Memory,
    },
    Closed,
}

/// Memory of a name.
#[pyclass(frozen, weakref, module = "vramp.keep")]
pub struct Kept {
    pool: Py<Pool>,
    name: String,
    addr: u64,
    /// Read-only from the start. A commit for reading only sets it.
    is_read_only: AtomicBool,
    /// Bytes that arrays may have.
    used: AtomicU64,
    /// Held for a few instructions, and only while detached from the interpreter.
    state: Mutex<State>,
    exports: Exports,
}

impl Kept {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state. A thread that has the lock for ever in a forked child is never waited for.
    fn state(&self) -> CallResult<MutexGuard<'_, State>> {
        check_fork()?;
        Ok(self.lock())
    }

    /// Takes the draft and leaves `next`. `None` if it is no draft, or another call has it.
    fn take_draft(&self, next: State) -> CallResult<Option<Box<KeptDraft>>> {
        let mut state = self.state()?;
        match std::mem::replace(&mut *state, next) {
            State::Draft(draft) => Ok(Some(draft)),
            other => {
                *state = other;
                Ok(None)
            }
        }
    }

    /// Runs a call on open memory, detached from the interpreter.
    fn open<R: Send>(
        &self,
        py: Python<'_>,
        mut call: impl FnMut(&KeptMemory) -> Result<R, KeptError> + Send,
    ) -> PyResult<R> {
        waiting(py, || {
            let called = py.detach(|| -> CallResult<_> {
                let memory = match &*self.state()? {
                    State::Open(memory) => Arc::clone(memory),
                    _ => return Ok(None),
                };
                Ok(Some(call(&memory)))
            });
            called.map_err(|error| raise(py, error))?.ok_or_else(|| self.not_open(py))
        })
    }

    fn not_open(&self, py: Python<'_>) -> PyErr {
        let (class, text) = match (self.exports.is_closed(), py.detach(|| self.is_draft())) {
            (true, _) => ("ClosedError", format!("`{}` is closed here: open it again", self.name)),
            (_, true) => ("KeepError", format!("`{}` is a draft: commit it first", self.name)),
            _ => (
                "KeepError",
                format!("the commit of `{}` failed: close it and begin again", self.name),
            ),
        };
        refuse(py, class, &text)
    }

    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Returns the bytes that arrays may have.
    pub fn len(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    fn is_draft(&self) -> bool {
        self.state().is_ok_and(|state| matches!(&*state, State::Draft(_) | State::Placing(_)))
    }

    pub fn is_read_only(&self) -> bool {
        self.is_read_only.load(Ordering::Relaxed)
    }

    pub fn pool(&self) -> &Py<Pool> {
        &self.pool
    }

    /// Counts an export.
    pub fn begin_export(&self, py: Python<'_>) -> PyResult<()> {
        match self.exports.begin() {
            true => Ok(()),
            false => Err(refuse(py, "ClosedError", &format!("`{}` is closed", self.name))),
        }
    }

    /// Ends an export, on any thread.
    pub fn end_export(&self) {
        self.exports.end();
    }

    /// Records a use. The caller is detached from the interpreter.
    pub fn record(&self, stream: StreamName) -> CallResult<()> {
        let allocator = self.pool.get().allocator();
        allocator.with(|session| {
            let stream = id_of(session, stream)?;
            match &mut *self.state()? {
                State::Draft(draft) => Ok(draft.record_use(stream)?),
                State::Placing(recorded) => {
                    recorded.push(stream);
                    Ok(())
                }
                State::Open(memory) => Ok(memory.record_use(stream)?),
                State::Private { _memory } => Ok(_memory.record_use(stream)?),
                State::Closed => Ok(()),
            }
        })
    }

    fn end(&self, py: Python<'_>) -> PyResult<()> {
        match self.exports.close() {
            Ok(()) => {}
            Err(NotClosed::Closed) => return Ok(()),
            Err(NotClosed::InUse(exports)) => {
                let text = format!(
                    "{exports} arrays or DLPack tensors still use `{}`: delete them before it is closed",
                    self.name
                );
                return Err(refuse(py, "InUseError", &text));
            }
        }
        let ended = py.detach(|| -> CallResult<()> {
            let state = std::mem::replace(&mut *self.state()?, State::Closed);
            match state {
                State::Open(memory) => match Arc::into_inner(memory) {
                    Some(memory) => Ok(memory.close()?),
                    // The call of another thread that waits closes it when it ends.
                    None => Ok(()),
                },
                other => {
                    drop(other);
                    Ok(())
                }
            }
        });
        ended.map_err(|error| raise(py, error))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let state = std::mem::replace(state, State::Closed);
        if !matches!(state, State::Closed) {
            detached(move || drop(state));
        }
    }
}

/// Begins memory of a name: what `Pool.kept_draft` does.
#[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python call")]
pub fn draft(
    pool: &Bound<'_, Pool>,
    directory: PathBuf,
    reply_timeout: f64,
    name: &str,
    size: u64,
    part: Option<u64>,
    priority: i32,
    kept_for: Option<f64>,
    timeout: f64,
) -> PyResult<Kept> {
    let py = pool.py();
    let keeper = keeper(py, directory, reply_timeout)?;
    let kept_for = kept_for.map(|kept| seconds(py, kept)).transpose()?.flatten();
    let usual = KeptOptions::default();
    let part = part.map_or(usual.part, Bytes::new);
    let options = KeptOptions { bytes: Bytes::new(size), part, priority, kept_for };
    let until = deadline(py, timeout)?;
    let draft = waiting(py, || {
        pool.get()
            .call(py, |session| Ok(session.allocator().draft_kept(&keeper, name, &options, until)))
    })?;
    Ok(Kept {
        pool: pool.clone().unbind(),
        name: name.to_owned(),
        addr: draft.range().start.number(),
        is_read_only: AtomicBool::new(false),
        used: AtomicU64::new(0),
        state: Mutex::new(State::Draft(Box::new(draft))),
        exports: Exports::default(),
    })
}

/// Opens memory of a name: what `Pool.kept_open` does.
#[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python call")]
pub fn open(
    pool: &Bound<'_, Pool>,
    directory: PathBuf,
    reply_timeout: f64,
    name: &str,
    readonly: bool,
    lock: &str,
    same_addresses: bool,
    timeout: f64,
) -> PyResult<Kept> {
    let py = pool.py();
    let keeper = keeper(py, directory, reply_timeout)?;
    let map = if readonly { MapAs::ReadOnly } else { MapAs::Writable };
    let options = OpenKept { map, lock: lock_named(py, lock)?, same_addresses };
    let until = deadline(py, timeout)?;
    let memory = waiting(py, || {
        pool.get()
            .call(py, |session| Ok(session.allocator().open_kept(&keeper, name, options, until)))
    })?;
    Ok(Kept {
        pool: pool.clone().unbind(),
        name: name.to_owned(),
        addr: memory.range().start.number(),
        is_read_only: AtomicBool::new(readonly),
        used: AtomicU64::new(memory.range().len.count()),
        state: Mutex::new(State::Open(Arc::new(memory))),
        exports: Exports::default(),
    })
}
