//! Restores holds at a new keeper, when the one that had them ends.
//!
//! 1. [`Rescuer::enter`] names a hold, [`Rescuer::watch`] its connection. The first hold starts a thread.
//! 2. The thread waits for the end of a connection. While the keeper lives it never runs.
//! 3. Then it restores each hold that lost its connection: at once, and while no keeper answers again after
//!    20 ms and twice as long each time, up to a second.
//! 4. [`Rescuer::leave`] with the last hold ends the thread.
//!
//! Three system calls for each hold, and two descriptors while there is one.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};

/// How long the thread waits after the first attempt.
const FIRST_DELAY: Duration = Duration::from_millis(20);
/// How long it waits at most.
const LONGEST_DELAY: Duration = Duration::from_secs(1);
/// Number of the event that wakes the thread. Holds have others.
const WAKE: u64 = 0;

/// What an attempt to restore a hold found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rescue {
    /// A keeper has the hold.
    Safe,
    /// A call uses the connection, and restores the hold itself if it has to.
    Busy,
    /// No keeper answers.
    NoKeeper,
}

/// A hold.
pub trait Castaway: Send + Sync {
    /// The connection ended.
    fn set_adrift(&self);

    /// Restores the hold, if a keeper answers.
    fn rescue(&self) -> Rescue;
}

/// The holds of a client. See the module's page.
#[derive(Default)]
pub struct Rescuer {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    holds: BTreeMap<u64, Weak<dyn Castaway>>,
    last: u64,
    /// Those that have no connection from the start.
    lost: Vec<u64>,
    /// What the thread waits for; `None` without a thread.
    watched: Option<Arc<Watched>>,
}

struct Watched {
    epoll: OwnedFd,
    wake: OwnedFd,
}

impl State {
    fn wake(&self) {
        if let Some(watched) = &self.watched {
            // A counter that is not full takes the value at once.
            let _ = rustix::io::write(&watched.wake, &1_u64.to_ne_bytes());
        }
    }
}

impl Watched {
    fn new() -> io::Result<Watched> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Watched { epoll, wake })
    }
}

impl Rescuer {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a hold, and returns its number.
    pub fn enter(self: &Arc<Self>, hold: Weak<dyn Castaway>) -> io::Result<u64> {
        let mut state = self.lock();
        if state.watched.is_none() {
            let watched = Arc::new(Watched::new()?);
            let (rescuer, of_thread) = (Arc::clone(self), Arc::clone(&watched));
            std::thread::Builder::new()
                .name("vramp-restore".to_owned())
                .spawn(move || rescuer.run(&of_thread))?;
            state.watched = Some(watched);
        }
        state.last += 1;
        let number = state.last;
        state.holds.insert(number, hold);
        Ok(number)
    }

    /// Watches a connection of a hold, until it is closed.
    pub fn watch(&self, hold: u64, socket: BorrowedFd<'_>) -> io::Result<()> {
        let state = self.lock();
        let Some(watched) = &state.watched else { return Ok(()) };
        // Replies are read by calls; only the end is an event, once.
        let flags = epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
        Ok(epoll::add(&watched.epoll, socket, epoll::EventData::new_u64(hold), flags)?)
    }

    /// Restores a hold soon that has no connection.
    pub fn lost(&self, hold: u64) {
        let mut state = self.lock();
        state.lost.push(hold);
        state.wake();
    }

    /// Removes a hold.
    pub fn leave(&self, hold: u64) {
        let mut state = self.lock();
        state.holds.remove(&hold);
        if state.holds.is_empty() {
            state.wake();
        }
    }

    fn run(&self, watched: &Watched) {
        let mut adrift = BTreeSet::new();
        let mut delay = FIRST_DELAY;
        let mut retry_at: Option<Instant> = None;
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            let left = retry_at.map(|at| at.saturating_duration_since(Instant::now()));
            let timeout = left.and_then(|left| left.try_into().ok());
            let spare = rustix::buffer::spare_capacity(&mut events);
            // A signal is a reason to look, and nothing else fails.
            let _ = epoll::wait(&watched.epoll, spare, timeout.as_ref());
            for event in &events {
                match event.data.u64() {
                    WAKE => {
                        let _ = rustix::io::read(&watched.wake, &mut [0; 8]);
                        let lost = std::mem::take(&mut self.lock().lost);
                        if !lost.is_empty() {
                            adrift.extend(lost);
                            (delay, retry_at) = (FIRST_DELAY, Some(Instant::now()));
                        }
                    }
                    hold => {
                        adrift.insert(hold);
                        (delay, retry_at) = (FIRST_DELAY, Some(Instant::now()));
                        self.with(hold, |hold| hold.set_adrift());
                    }
                }
            }
            if self.is_over() {
                return;
            }
            if retry_at.is_some_and(|at| at <= Instant::now()) {
                self.rescue(&mut adrift);
                retry_at = (!adrift.is_empty()).then(|| Instant::now() + delay);
                delay = (delay * 2).min(LONGEST_DELAY);
            }
        }
    }

    /// Ends the thread if there is no hold. The next one starts another thread.
    fn is_over(&self) -> bool {
        let mut state = self.lock();
        let is_over = state.holds.is_empty();
        if is_over {
            state.watched = None;
        }
        is_over
    }

    /// Restores what it can, until no keeper answers.
    fn rescue(&self, adrift: &mut BTreeSet<u64>) {
        for hold in adrift.clone() {
            match self.with(hold, |hold| hold.rescue()) {
                None | Some(Rescue::Safe) => drop(adrift.remove(&hold)),
                Some(Rescue::Busy) => {}
                Some(Rescue::NoKeeper) => return,
            }
        }
    }

    /// Calls a hold without the lock, because it may be the last reference to it.
    fn with<T>(&self, hold: u64, call: impl FnOnce(&dyn Castaway) -> T) -> Option<T> {
        let found = self.lock().holds.get(&hold).and_then(Weak::upgrade);
        found.map(|hold| call(&*hold))
    }
}

impl std::fmt::Debug for Rescuer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rescuer").finish_non_exhaustive()
    }
}
