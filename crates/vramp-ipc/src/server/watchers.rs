//! Importers that are to hear when the exporter releases memory that it had exported.
//!
//! 1. An importer connects once more and watches. It may then keep memory mapped that it has closed.
//! 2. [`Watchers::notify`] ends the sending side of each such connection: the importer finds the end of its
//!    watch, unmaps what it kept, and closes the connection.
//! 3. [`Watchers::wait`] waits for these closes, for a moment at most: a stopped importer delays an exporter no
//!    longer, and only once.
//!
//! Growth: a notification is one system call for each watch that has not ended.

use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

/// The watches of one server.
#[derive(Debug, Default)]
pub struct Watchers {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Duplicates of the connections' sockets, by connection.
    live: FxHashMap<u64, OwnedFd>,
    /// Watches that ended, and whose importers have not closed them yet.
    ended: FxHashSet<u64>,
    /// Some importer has since the last wait.
    has_closed: bool,
}

impl Watchers {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the connection of an importer.
    pub(super) fn add(&self, connection: u64, socket: &OwnedFd) -> std::io::Result<()> {
        self.lock().live.insert(connection, socket.try_clone()?);
        Ok(())
    }

    /// Removes a connection that ended, if it is here.
    pub(super) fn remove(&self, connection: u64) {
        let mut state = self.lock();
        state.live.remove(&connection);
        if state.ended.remove(&connection) {
            state.has_closed = true;
            self.changed.notify_all();
        }
    }

    /// Ends all watches: the importers unmap what they have closed. Waits for nothing.
    pub fn notify(&self) {
        let mut state = self.lock();
        let State { live, ended, .. } = &mut *state;
        for (connection, socket) in live.drain() {
            // It fails only if the connection has ended, which the server finds too.
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Write);
            ended.insert(connection);
        }
    }

    /// Waits until the importers whose watches ended have unmapped what they kept. Returns false at once if no
    /// watch has ended since the last wait. Importers that take longer than `patience` are not waited for again.
    pub fn wait(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        if state.ended.is_empty() && !state.has_closed {
            return false;
        }
        while !state.ended.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.ended.clear();
                break;
            }
            let woken = self.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.has_closed = false;
        true
    }
}
