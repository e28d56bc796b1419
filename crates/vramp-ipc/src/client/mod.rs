//! The importing side.
//!
//! 1. [`Connections::open`] connects to the exporter of a ticket, once for each exporter, and opens
//!    the export.
//! 2. [`Opened::description`] and [`Opened::next_batch`] return what the exporter offers.
//! 3. Dropping [`Opened`] closes the export.
//! 4. The connection ends once [`Connections`] and everything opened through it are dropped, or
//!    with the process. The exporter then closes what was open.

mod connection;
mod opened;
#[cfg(test)]
mod tests;
mod watcher;

use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::Ticket;
use crate::core::message::MAX_BATCH;
use crate::core::ticket::Address;
use crate::error::OpenError;
use connection::Connection;
pub use opened::{Batch, Opened};
pub use watcher::{Watcher, Watching};

/// How exports are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenOptions {
    /// How long an exporter may take for one reply; 30 s by default.
    pub timeout: Duration,
    /// Most descriptors that are received at once, from 1 to 253; 64 by default. The exporter too has
    /// that many open at a time, for each importer that it answers.
    pub batch: u16,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions { timeout: Duration::from_secs(30), batch: 64 }
    }
}

/// Connections of this process to exporters, one for each.
///
/// In a forked child the connections of the parent are not used: the child makes its own.
#[derive(Debug)]
pub struct Connections {
    options: OpenOptions,
    /// Forks before this was made.
    depth: u32,
    known: Mutex<Known>,
    /// Those of a forked child, which must not take the lock: a thread of the parent may have it.
    child: OnceLock<Box<Connections>>,
}

/// Connections by address.
#[derive(Debug, Default)]
struct Known {
    by_address: FxHashMap<Address, Arc<Slot>>,
    /// At this many connections those that ended are removed, which is O(1) for each connect.
    sweep_at: usize,
}

/// The connection to one address. Its lock is held while a thread connects.
#[derive(Default)]
struct Slot(Mutex<Option<Arc<Connection>>>);

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

impl Connections {
    /// Returns a set without connections. The batch is limited to what the kernel allows.
    pub fn new(options: OpenOptions) -> Connections {
        vramp_host::fork::watch();
        let options = OpenOptions { batch: options.batch.clamp(1, MAX_BATCH as u16), ..options };
        Connections {
            options,
            depth: vramp_host::fork::depth(),
            known: Mutex::default(),
            child: OnceLock::new(),
        }
    }

    /// Opens the export of a ticket. One message each way if the connection exists, the description
    /// is shorter than 32 KiB and the descriptors are no more than a batch.
    ///
    /// It waits for the exporter's server. So it must not be called in a method of a
    /// [`Source`](crate::Source) for an export of this process.
    ///
    /// # Errors
    ///
    /// See [`OpenError`]. Nothing stays open.
    pub fn open(&self, ticket: &Ticket) -> Result<Opened, OpenError> {
        self.open_with(ticket, self.options.batch)
    }

    /// Opens the export of a ticket as [`Connections::open`] does, and receives no descriptor with the
    /// description: for a caller that expects to need none. The first batch is a request then.
    ///
    /// # Errors
    ///
    /// Those of [`Connections::open`].
    pub fn open_described(&self, ticket: &Ticket) -> Result<Opened, OpenError> {
        self.open_with(ticket, 0)
    }

    fn open_with(&self, ticket: &Ticket, first: u16) -> Result<Opened, OpenError> {
        if vramp_host::fork::depth() != self.depth {
            return self
                .child
                .get_or_init(|| Box::new(Connections::new(self.options)))
                .open_with(ticket, first);
        }
        let connection = self.connection(ticket)?;
        let opened = Opened::new(&connection, ticket, first, self.options.batch);
        if opened.is_err() && connection.is_ended() {
            self.lock().remove(&ticket.0.address, |known| {
                known.as_ref().is_some_and(|known| Arc::ptr_eq(known, &connection))
            });
        }
        opened
    }

    /// Returns the number of connections, those to exporters that ended included.
    pub fn connections(&self) -> usize {
        if vramp_host::fork::depth() != self.depth {
            return self.child.get().map_or(0, |child| child.connections());
        }
        self.lock().by_address.len()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the connection to the ticket's address, which is made if there is none.
    fn connection(&self, ticket: &Ticket) -> Result<Arc<Connection>, OpenError> {
        let slot = self.lock().slot(&ticket.0.address);
        // Two threads share one connection; the second waits until the first has made it.
        let mut connection = slot.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(existing) = &*connection {
            return Ok(Arc::clone(existing));
        }
        match Connection::new(&ticket.0, self.options.timeout) {
            Ok(made) => Ok(Arc::clone(connection.insert(Arc::new(made)))),
            Err(error) => {
                drop(connection);
                // Another thread that waited for the slot may have connected meanwhile.
                self.lock().remove(&ticket.0.address, Option::is_none);
                Err(error)
            }
        }
    }
}

impl Known {
    fn slot(&mut self, address: &Address) -> Arc<Slot> {
        if self.by_address.len() > self.sweep_at.max(16) {
            self.by_address.retain(|_, slot| !slot.is_ended());
            self.sweep_at = 2 * self.by_address.len();
        }
        match self.by_address.entry(address.clone()) {
            Entry::Occupied(known) => Arc::clone(known.get()),
            Entry::Vacant(vacant) => Arc::clone(vacant.insert(Arc::default())),
        }
    }

    /// Removes the slot of an address if its connection is as expected, and no thread connects.
    fn remove(
        &mut self,
        address: &Address,
        is_expected: impl FnOnce(&Option<Arc<Connection>>) -> bool,
    ) {
        if let Entry::Occupied(known) = self.by_address.entry(address.clone())
            && known.get().0.try_lock().is_ok_and(|connection| is_expected(&connection))
        {
            known.remove();
        }
    }
}

impl Slot {
    /// Returns true if its exporter ended. A slot in which a thread is connecting has not.
    fn is_ended(&self) -> bool {
        let connection = self.0.try_lock();
        connection.is_ok_and(|known| known.as_ref().is_some_and(|known| known.is_ended()))
    }
}
