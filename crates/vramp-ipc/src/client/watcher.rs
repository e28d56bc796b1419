//! Watches of exporters: when memory that was closed here may no longer stay mapped.
//!
//! 1. [`Watcher::watch`] connects to an exporter, once for all its exports, and returns a number.
//! 2. The exporter ends the watch when it releases memory that it had exported, and by ending itself, killed
//!    too. The watcher's thread calls [`Watching::ended`], and then closes the connection: the exporter may wait
//!    for that. The next [`Watcher::watch`] has another number.
//! 3. [`Watcher::call_in`] has the thread call [`Watching::due`] once, after some time.
//! 4. The thread ends with the last watch, and begins with the next.
//!
//! The thread sleeps in one system call until one of these: nothing wakes it periodically.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;

use super::connection::Connection;
use crate::Ticket;
use crate::core::message::{Reply, Request};
use crate::core::ticket::Address;
use crate::error::OpenError;

/// Token of the event that wakes the thread. Watches are numbered from 1.
const WAKE: u64 = 0;

/// Number of the next watch. No other of the process has it.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// What is called on the watcher's thread, without a lock of the watcher.
pub trait Watching: Send + Sync {
    /// The watch ended: the exporter released memory, or ended, or the watcher did. Called once for each watch.
    fn ended(&self, watch: u64);

    /// The time of [`Watcher::call_in`] has come. Returns after which time it is to be called again.
    fn due(&self) -> Option<Duration>;

    /// Returns false if the watch may end. Called after [`Watching::due`].
    fn is_used(&self, watch: u64) -> bool;
}

/// Watches exporters on a thread of its own. Dropping it ends the thread and the watches.
pub struct Watcher {
    shared: Arc<Shared>,
    timeout: Duration,
    depth: u32,
}

struct Shared {
    watching: Arc<dyn Watching>,
    epoll: OwnedFd,
    wake: OwnedFd,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    by_address: FxHashMap<Address, u64>,
    live: FxHashMap<u64, (Address, Connection)>,
    due: Option<Instant>,
    thread: Option<JoinHandle<()>>,
    is_stopped: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A counter that is not full takes the value at once.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

impl Watcher {
    /// Returns a watcher without a thread. An exporter may take `timeout` for its answer.
    ///
    /// # Errors
    /// No descriptor is left: it has two.
    pub fn new(watching: Arc<dyn Watching>, timeout: Duration) -> io::Result<Watcher> {
        vramp_host::fork::watch();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let shared = Arc::new(Shared { watching, epoll, wake, state: Mutex::default() });
        Ok(Watcher { shared, timeout, depth: vramp_host::fork::depth() })
    }

    /// Returns the number of the watch of a ticket's exporter, which is made if there is none. Then it is a
    /// connect and one message each way.
    ///
    /// # Errors
    /// The exporter does not answer, or no descriptor or thread is left.
    pub fn watch(&self, ticket: &Ticket) -> Result<u64, OpenError> {
        if vramp_host::fork::depth() != self.depth {
            return Err(OpenError::Forked);
        }
        let address = &ticket.0.address;
        if let Some(&number) = self.shared.lock().by_address.get(address) {
            return Ok(number);
        }
        // Without the lock: another process answers.
        let connection = Connection::new(&ticket.0, self.timeout)?;
        match connection.turn().request(Request::Watch)?.reply {
            Reply::Watching => {}
            _ => {
                let (pid, what) = (connection.pid(), "no reply to a watch");
                return Err(OpenError::Protocol { pid, what });
            }
        }
        let mut state = self.shared.lock();
        if let Some(&number) = state.by_address.get(address) {
            // Another thread was faster.
            return Ok(number);
        }
        let system = |action| move |source: io::Error| OpenError::System { action, source };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        let data = epoll::EventData::new_u64(number);
        epoll::add(&self.shared.epoll, connection.socket(), data, flags)
            .map_err(|error| system("watch the exporter")(error.into()))?;
        if state.thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("vramp-watch".to_owned());
            state.thread =
                Some(thread.spawn(move || shared.run()).map_err(system("start a thread"))?);
        }
        state.by_address.insert(address.clone(), number);
        state.live.insert(number, (address.clone(), connection));
        Ok(number)
    }

    /// Ends the watches that are not used, before the next call of [`Watching::due`] does.
    pub fn end_unused(&self) {
        if vramp_host::fork::depth() == self.depth {
            self.shared.end_unused();
            // Its thread ends if that was the last one.
            self.shared.wake();
        }
    }

    /// Returns true if a watch has not ended. Then [`Watching::ended`] is still to be called.
    pub fn is_live(&self, watch: u64) -> bool {
        self.shared.lock().live.contains_key(&watch)
    }

    /// Calls [`Watching::due`] after some time, unless a call is due already.
    pub fn call_in(&self, after: Duration) {
        let mut state = self.shared.lock();
        if state.due.is_none() {
            state.due = Some(Instant::now() + after);
            drop(state);
            self.shared.wake();
        }
    }

    /// Returns the number of watches.
    pub fn watches(&self) -> usize {
        self.shared.lock().live.len()
    }
}

impl Shared {
    /// Removes a watch. Its connection is closed when the result is dropped.
    fn take(&self, number: u64) -> Option<Connection> {
        let mut state = self.lock();
        let (address, connection) = state.live.remove(&number)?;
        state.by_address.remove(&address);
        let _ = epoll::delete(&self.epoll, connection.socket());
        Some(connection)
    }

    fn run(&self) {
        let mut events = Vec::with_capacity(64);
        loop {
            let Some(timeout) = self.next_timeout() else { return };
            events.clear();
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, spare, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                // Of a valid descriptor and buffer, no other error is possible.
                Err(_) => return,
            }
            for event in &events {
                match event.data.u64() {
                    WAKE => {
                        let mut count = [0; 8];
                        let _ = rustix::io::read(&self.wake, &mut count);
                    }
                    number => self.end(number),
                }
            }
            // Taken before the call: a thread that asks for one during the call gets another.
            if self.lock().due.take_if(|due| *due <= Instant::now()).is_some() {
                if let Some(after) = self.watching.due() {
                    let next = Instant::now() + after;
                    let mut state = self.lock();
                    state.due = Some(state.due.map_or(next, |due| due.min(next)));
                }
                self.end_unused();
            }
        }
    }

    fn end_unused(&self) {
        let watches: Vec<u64> = self.lock().live.keys().copied().collect();
        for watch in watches {
            if !self.watching.is_used(watch) {
                self.end(watch);
            }
        }
    }

    fn end(&self, watch: u64) {
        let ended = self.take(watch);
        if ended.is_some() {
            self.watching.ended(watch);
        }
        // Closed now: the exporter may wait for it.
        drop(ended);
    }

    /// Returns how long to wait: an inner `None` for ever, an outer one if the thread is to end.
    fn next_timeout(&self) -> Option<Option<Timespec>> {
        let mut state = self.lock();
        if state.is_stopped || state.live.is_empty() {
            state.due = None;
            // Not joined: it ends now.
            state.thread = None;
            return None;
        }
        let left = state.due.map(|due| due.saturating_duration_since(Instant::now()));
        Some(left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        }))
    }
}

/// In a forked child it does nothing.
impl Drop for Watcher {
    fn drop(&mut self) {
        if vramp_host::fork::depth() != self.depth {
            // A thread of the parent may have had the lock.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let mut state = self.shared.lock();
        state.is_stopped = true;
        let thread = state.thread.take();
        state.by_address.clear();
        let live = std::mem::take(&mut state.live);
        drop(state);
        live.keys().for_each(|&watch| self.shared.watching.ended(watch));
        drop(live);
        self.shared.wake();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // Its panic is on standard error, and dropping must not panic.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").finish_non_exhaustive()
    }
}
