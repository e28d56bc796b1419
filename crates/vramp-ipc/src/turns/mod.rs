//! Processes that take turns at a card.
//!
//! Two or more processes of one user use the memory of one card in turn: a trainer and an inference
//! engine, for instance. A process *acquires* the turn, and waits until the one that holds it has put
//! its memory to sleep and *releases* it. There is no server: the line is a directory.
//!
//! ```
//! use std::time::Duration;
//! use vramp_ipc::turns::{AcquireError, Answer, Need, Turns, TurnsConfig};
//!
//! # let folder = tempfile::tempdir()?;
//! # let directory = folder.path().join("vramp");
//! let card = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6";
//! let open = |program| Turns::open(&TurnsConfig { directory: &directory, card, program });
//!
//! // The engine holds the turn while it serves, and gives the card away when it is requested.
//! let engine = open("engine")?;
//! engine.on_request(|request| {
//!     for process in request.waiting() {
//!         println!("{process} waits for the card");
//!     }
//!     // Here it puts its memory to sleep.
//!     Answer::Release
//! })?;
//! let serving = engine.acquire(Need::Card, Duration::from_secs(60))?;
//!
//! // The trainer, in another process.
//! let trainer = open("trainer")?;
//! let training = trainer.acquire(Need::Bytes(8 << 30), Duration::from_secs(60))?;
//! assert!(!serving.is_held());
//!
//! // The engine cannot have the card back yet.
//! let refused = engine.acquire(Need::Card, Duration::ZERO);
//! assert!(matches!(refused, Err(AcquireError::TimedOut(_))));
//! training.release()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Life of a turn
//!
//! 1. [`Turns::open`] opens the directory of a card.
//! 2. [`Turns::acquire`] joins the line and waits. [`Turns::join`] returns a [`Waiting`], for programs
//!    that do something else meanwhile. First come, first served.
//! 3. The holder finds out about it: its handler ([`Turns::on_request`]) is called on a thread of the
//!    object, or it asks at safe points ([`Turn::request`], [`Turn::wait_for_request`]). It releases the
//!    turn at once or later, or refuses.
//! 4. Releasing the turn, dropping it, or the end of the holder's process wakes the next one.
//!
//! # How it works
//!
//! Each candidate has a named pipe in the directory, which it alone keeps open for reading. Its name
//! has the candidate's number, as in Lamport's bakery algorithm (`core/candidate.rs` has the proof). The
//! kernel closes the pipe when the process ends, by SIGKILL too. The one behind it polls the pipe for
//! that, without a timeout of its own: no process polls in intervals, and no process id is relied on.
//! Files of killed processes are removed by the next process that joins or asks for the status.
//!
//! # Costs
//!
//! | call | system calls |
//! |---|---|
//! | [`Turns::acquire`] of a free turn, and its release | 24 |
//! | the same behind others | 20 more, and 3 for each 150 processes in the line |
//! | a process before it in the line leaves | 10 of the next one, which wakes up; none of the others |
//! | [`Turn::request`], no process came since | 1 |
//! | a wait | none until a message, the turn, or the deadline |
//!
//! A wait has 2 descriptors, a held turn 1, an opened [`Turns`] 1, and 2 more and a thread with a
//! handler.
//!
//! # What holds when a process stops or ends
//!
//! - Killed, at any step: the turn passes on, and the next look leaves no file of it.
//! - Stopped (SIGSTOP): others wait until their deadlines; the error names the process.
//! - Forked: the child has neither the turn nor a place in the line, and does not keep its parent's:
//!   every call fails in it with [`TurnsError::Forked`]. Children of a raw `clone` or `vfork` that do
//!   not call `exec` keep them.
//! - The directory is removed while it is used: waits end with [`TurnsError::Removed`]. Processes that
//!   then make it again do not see the holder, which gets the error when it releases.
//!
//! # Containers
//!
//! Processes in different PID and mount namespaces take turns where the same directory is mounted and
//! they run as the same user. Their kernel must be the same: with a virtual machine, or over a network,
//! pipes do not connect, so such file systems are refused. A process id in messages is that of its own
//! namespace.
//!
//! Deliberately absent: memory, cards, priorities, turns of parts of a card, and a way to take the turn
//! away from a process that keeps it.

mod core;
mod directory;
mod error;
mod handler;
mod status;
#[cfg(test)]
mod tests;
mod turn;
mod waiting;

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

pub use self::core::entry::Need;
use self::core::entry::{Entry, Key, MAX_NAME, shortened};
use directory::CardDirectory;
pub use error::{AcquireError, TimedOut, TurnsError};
pub use handler::Answer;
use handler::{Control, Handler};
pub use status::{Holder, Participant, TurnsStatus};
use turn::Held;
pub use turn::{Request, Turn, TurnState};
pub use waiting::Waiting;

/// What a process says when it opens the turns of a card.
#[derive(Clone, Copy, Debug)]
pub struct TurnsConfig<'a> {
    /// A directory that only the user may use. It is made if it is missing, and its parent is there.
    /// `$XDG_RUNTIME_DIR/vramp` or `/tmp/vramp-UID` is usual: processes of which only some have a runtime
    /// directory do not exclude each other.
    pub directory: &'a Path,
    /// The card, by its UUID: the same text in all processes.
    pub card: &'a str,
    /// Name of the program in messages. 64 bytes of it are used.
    pub program: &'a str,
}

/// The turns of one card, for one program. All methods can be called from several threads, which
/// compete as processes do.
pub struct Turns {
    inner: Arc<Inner>,
    handler: Mutex<Option<Handler>>,
}

/// Shared with turns, waits and the handler's thread.
#[derive(Debug)]
struct Inner {
    directory: Arc<CardDirectory>,
    card: String,
    program: String,
    namespace: u64,
    /// Forks before it was opened.
    depth: u32,
    wake_ups: AtomicU64,
    current: Mutex<Current>,
}

#[derive(Debug, Default)]
struct Current {
    held: Option<Arc<Held>>,
    control: Option<Arc<Control>>,
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_fork(&self) -> Result<(), TurnsError> {
        let is_own = vramp_host::fork::depth() == self.depth;
        is_own.then_some(()).ok_or(TurnsError::Forked)
    }

    fn check_handler(&self) -> Result<(), TurnsError> {
        self.check_fork()?;
        if self.lock().control.is_some() { Err(TurnsError::HasHandler) } else { Ok(()) }
    }

    fn current(&self) -> Option<Arc<Held>> {
        self.lock().held.clone()
    }

    fn set_current(&self, held: &Arc<Held>) {
        let mut current = self.lock();
        current.held = Some(Arc::clone(held));
        if let Some(control) = &current.control {
            control.watch(held);
        }
    }

    fn clear_current(&self, held: &Arc<Held>) {
        let mut current = self.lock();
        let is_this = current.held.as_ref().is_some_and(|other| Arc::ptr_eq(other, held));
        // Dropped after unlocking.
        let removed = if is_this { current.held.take() } else { None };
        drop(current);
        drop(removed);
    }

    fn count_wake_up(&self) {
        self.wake_ups.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns an entry of this process, without its key.
    fn entry(&self, need: Need) -> Entry {
        Entry {
            key: Key { number: 0, random: 0 },
            pid: std::process::id(),
            namespace: self.namespace,
            since_ms: now_ms(),
            need,
            program: self.program.clone(),
        }
    }
}

impl Turns {
    /// Opens the turns of a card. 10 system calls.
    ///
    /// # Errors
    ///
    /// If the directory cannot be made or opened, is not this user's alone, or is on a file system that
    /// other machines may share.
    pub fn open(config: &TurnsConfig<'_>) -> Result<Turns, TurnsError> {
        vramp_host::fork::watch();
        let directory = Arc::new(CardDirectory::open(config.directory, config.card)?);
        let inner = Inner {
            directory,
            card: config.card.to_owned(),
            program: shortened(config.program, MAX_NAME),
            namespace: crate::system::pid_namespace(),
            depth: vramp_host::fork::depth(),
            wake_ups: AtomicU64::new(0),
            current: Mutex::default(),
        };
        Ok(Turns { inner: Arc::new(inner), handler: Mutex::new(None) })
    }

    /// Joins the line and waits for the turn. With a timeout of zero it does neither: the turn is free
    /// and it gets it, or it fails. `Duration::MAX` waits for ever.
    ///
    /// The thread must not hold the turn of the card already: it would wait for itself.
    ///
    /// # Errors
    ///
    /// [`AcquireError::TimedOut`] names the process that holds the turn. After an error this process is
    /// not in the line.
    pub fn acquire(&self, need: Need, timeout: Duration) -> Result<Turn, AcquireError> {
        let mut waiting = Waiting::join(&self.inner, need)?;
        if !timeout.is_zero() && !waiting.is_first() {
            waiting.send_request()?;
            waiting.wait(timeout)?;
        }
        waiting.into_turn().map_err(|waiting| match waiting.timed_out() {
            Ok(found) => AcquireError::TimedOut(Box::new(TimedOut { timeout, ..found })),
            Err(error) => error.into(),
        })
    }

    /// Joins the line, and lets the holder find out about it. It does not wait.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used.
    pub fn join(&self, need: Need) -> Result<Waiting, TurnsError> {
        let waiting = Waiting::join(&self.inner, need)?;
        if !waiting.is_first() {
            waiting.send_request()?;
        }
        Ok(waiting)
    }

    /// Starts a thread that calls `handler` when other processes wait for a turn that this object
    /// holds: once for each process that joins the line, or for several at once. It replaces an earlier
    /// handler.
    ///
    /// The handler may wait, for a safe point of the program for instance, and may drop the turn itself.
    /// No lock is held meanwhile. A panic counts as [`Answer::Later`].
    ///
    /// # Errors
    ///
    /// If no thread or descriptor is left.
    pub fn on_request(
        &self,
        handler: impl Fn(&Request) -> Answer + Send + Sync + 'static,
    ) -> Result<(), TurnsError> {
        self.remove_handler()?;
        let handler = Handler::start(&self.inner, Arc::new(handler))?;
        let mut current = self.inner.lock();
        current.control = Some(Arc::clone(handler.control()));
        if let (Some(held), Some(control)) = (&current.held, &current.control) {
            control.watch(held);
        }
        drop(current);
        // Another thread may have registered one at the same time.
        let replaced = self.lock_handler().replace(handler);
        drop(replaced);
        Ok(())
    }

    /// Removes the handler. Returns after a call of it that is in progress, unless that call removes it.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn remove_handler(&self) -> Result<(), TurnsError> {
        self.inner.check_fork()?;
        let handler = self.lock_handler().take();
        self.inner.lock().control = None;
        // Waits for its thread after unlocking.
        drop(handler);
        Ok(())
    }

    fn lock_handler(&self) -> MutexGuard<'_, Option<Handler>> {
        self.handler.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns who holds the turn and who waits. O(n log n), and 2 system calls for each process.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used.
    pub fn status(&self) -> Result<TurnsStatus, TurnsError> {
        self.inner.check_fork()?;
        let directory = &self.inner.directory;
        let mut listing = directory.list()?;
        directory.remove_unfinished(&listing);
        listing.entries.sort_unstable_by_key(|entry| entry.key);
        let mut status = TurnsStatus { holder: None, waiting: Vec::new() };
        for entry in &listing.entries {
            if directory.probe(entry)?.is_none() {
                continue;
            }
            let participant = Participant::new(entry, self.inner.namespace);
            let is_first = status.holder.is_none() && status.waiting.is_empty();
            match directory.held_since(entry).filter(|_| is_first) {
                Some(since) => {
                    let since = status::time(since);
                    status.holder = Some(Holder { participant, since });
                }
                None => status.waiting.push(participant),
            }
        }
        Ok(status)
    }

    /// Returns how often waits of this object woke up, for tests of costs.
    pub fn wake_ups(&self) -> u64 {
        self.inner.wake_ups.load(Ordering::Relaxed)
    }

    /// Returns the directory of the card.
    pub fn directory(&self) -> &Path {
        &self.inner.directory.path
    }

    /// Returns the card.
    pub fn card(&self) -> &str {
        &self.inner.card
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns").field("inner", &self.inner).finish_non_exhaustive()
    }
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// A step after which tests end the process.
#[cfg(test)]
fn reach(step: &'static str) {
    tests::reach(step);
}

#[cfg(not(test))]
fn reach(_step: &'static str) {}
