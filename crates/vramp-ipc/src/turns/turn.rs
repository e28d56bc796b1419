//! The turn that this process holds.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::core::entry::Message;
use super::core::entry::{Entry, Key};
use super::directory::{self, OwnEntry, system_error};
use super::error::TurnsError;
use super::status::Participant;
use super::{Inner, now_ms, reach};

/// The exclusive use of a card. Dropping it releases the turn to the next process in the line.
#[derive(Debug)]
pub struct Turn {
    held: Arc<Held>,
}

/// A held turn, shared with the thread that calls the handler.
#[derive(Debug)]
pub struct Held {
    inner: Arc<Inner>,
    entry: Entry,
    shared: Arc<TurnState>,
    state: Mutex<State>,
}

/// What any thread, and a forked child, can ask about a turn without a lock. It does not keep the turn.
#[derive(Debug)]
pub struct TurnState {
    is_held: AtomicBool,
    /// Forks before the turn was acquired.
    depth: u32,
}

impl TurnState {
    /// Returns true until the turn is released. No system call.
    pub fn is_held(&self) -> bool {
        self.is_held.load(Ordering::Acquire)
    }

    /// Returns an error in a child of a fork, in which locks of the turn may never be released.
    ///
    /// # Errors
    ///
    /// [`TurnsError::Forked`].
    pub fn check_fork(&self) -> Result<(), TurnsError> {
        let is_own = vramp_host::fork::depth() == self.depth;
        is_own.then_some(()).ok_or(TurnsError::Forked)
    }
}

#[derive(Debug)]
struct State {
    /// `None` once it was released.
    own: Option<OwnEntry>,
    /// A process may wait.
    may_be_requested: bool,
    /// The processes that waited at the last look, in order. A number may be used again, a key is not.
    known: Vec<Key>,
}

/// Processes that wait for the turn that this process holds.
#[derive(Clone, Debug)]
pub struct Request {
    inner: Arc<Inner>,
    holder: Entry,
    waiting: Vec<Entry>,
}

impl Request {
    /// Returns the waiting processes, in the order in which they get the turn. There is at least one.
    pub fn waiting(&self) -> Vec<Participant> {
        self.waiting.iter().map(|entry| Participant::new(entry, self.inner.namespace)).collect()
    }

    /// Refuses to release the turn: the wait of each of these processes fails with `reason`, of which
    /// 1024 bytes are sent.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used.
    pub fn refuse(&self, reason: &str) -> Result<(), TurnsError> {
        self.inner.check_fork()?;
        let (holder, reason) = (self.holder.clone(), reason.to_owned());
        let message = Message::Refusal { holder, reason };
        for entry in &self.waiting {
            self.inner.directory.send(entry, &message)?;
        }
        Ok(())
    }
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `look` with the pipe of messages, unless the turn was released.
    pub fn with_pipe<R>(&self, look: impl FnOnce(std::os::fd::BorrowedFd<'_>) -> R) -> Option<R> {
        let state = self.lock();
        state.own.as_ref().and_then(|own| own.pipe().ok()).map(look)
    }

    /// Returns the live processes behind this one. One read if there are none; otherwise O(n log n).
    pub fn request(&self, is_new_only: bool) -> Result<Option<Request>, TurnsError> {
        self.inner.check_fork()?;
        let mut state = self.lock();
        let Some(own) = &state.own else { return Ok(None) };
        let has_messages = !own.receive()?.is_empty();
        state.may_be_requested |= has_messages;
        if !state.may_be_requested {
            return Ok(None);
        }
        let mut waiting = Vec::new();
        for entry in self.inner.directory.list()?.entries {
            if entry.key > self.entry.key && self.inner.directory.probe(&entry)?.is_some() {
                waiting.push(entry);
            }
        }
        waiting.sort_unstable_by_key(|entry| entry.key);
        let keys: Vec<Key> = waiting.iter().map(|entry| entry.key).collect();
        let has_new = keys.iter().any(|key| state.known.binary_search(key).is_err());
        state.may_be_requested = !keys.is_empty();
        state.known = keys;
        if waiting.is_empty() || (is_new_only && !has_new) {
            return Ok(None);
        }
        let (inner, holder) = (Arc::clone(&self.inner), self.entry.clone());
        Ok(Some(Request { inner, holder, waiting }))
    }

    /// Releases the turn. Returns false if it was released before.
    pub fn release(self: &Arc<Held>) -> Result<bool, TurnsError> {
        // A lock may be held by a thread that a forked child does not have.
        self.inner.check_fork()?;
        self.shared.is_held.store(false, Ordering::Release);
        self.inner.clear_current(self);
        let own = self.lock().own.take();
        own.map_or(Ok(false), |own| own.remove().map(|()| true))
    }
}

impl Turn {
    pub(super) fn new(inner: Arc<Inner>, own: OwnEntry) -> Turn {
        inner.directory.mark_held(&own.entry, now_ms());
        reach("held");
        let shared = TurnState { is_held: AtomicBool::new(true), depth: inner.depth };
        let held = Arc::new(Held {
            inner,
            entry: own.entry.clone(),
            shared: Arc::new(shared),
            state: Mutex::new(State { own: Some(own), may_be_requested: true, known: Vec::new() }),
        });
        held.inner.set_current(&held);
        Turn { held }
    }

    /// Returns true until the turn is released, by this object or by the answer of a handler. No system
    /// call.
    pub fn is_held(&self) -> bool {
        self.held.shared.is_held()
    }

    /// Returns what other threads can ask about the turn.
    pub fn state(&self) -> Arc<TurnState> {
        Arc::clone(&self.held.shared)
    }

    /// Returns the processes that wait for this turn, if there are some. One system call if none came
    /// since the last call and none waits; otherwise O(n log n) for n processes.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used, or a handler takes the requests.
    pub fn request(&self) -> Result<Option<Request>, TurnsError> {
        self.held.inner.check_handler()?;
        self.held.request(false)
    }

    /// Waits until a process waits for this turn. `None` after `timeout`, and once the turn is released.
    ///
    /// # Errors
    ///
    /// As for [`Turn::request`].
    pub fn wait_for_request(&self, timeout: Duration) -> Result<Option<Request>, TurnsError> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let request = self.request()?;
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if request.is_some() || !self.is_held() || left.is_some_and(|left| left.is_zero()) {
                return Ok(request);
            }
            let waited = self.held.with_pipe(|pipe| {
                directory::wait(&mut [PollFd::from_borrowed_fd(pipe, PollFlags::IN)], left)
            });
            let path = &self.held.inner.directory.path;
            waited.unwrap_or(Ok(())).map_err(|error| system_error("wait in", path, error))?;
        }
    }

    /// Releases the turn to the next process in the line. It does nothing if a handler's answer released
    /// it.
    ///
    /// # Errors
    ///
    /// [`TurnsError::Removed`] if another program removed the entry of this process: then another one
    /// may have held the turn as well. In a forked child the turn stays the parent's.
    pub fn release(self) -> Result<(), TurnsError> {
        self.held.release().map(|_| ())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // The error is that of `release`, which a program calls if it wants it.
        let _ = self.held.release();
    }
}
