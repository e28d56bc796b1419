//! The exporting side.
//!
//! 1. [`Server::new`] listens and starts one thread.
//! 2. [`Server::publish`] makes a [`Source`] an export. [`Published::ticket`] or
//!    [`Published::grant`] gives tickets of it.
//! 3. For each importer that opens a ticket the server asks the source for an [`Offer`], and for
//!    descriptors, a batch at a time.
//! 4. The last close, or the end of the last importer, calls [`Source::released`].
//! 5. Dropping [`Published`] withdraws the export: it can no longer be opened. What is open stays
//!    open.
//! 6. Dropping the server ends its thread and with it all connections.

pub(crate) mod event_loop;
mod export;
mod session;
#[cfg(test)]
mod tests;
mod watchers;

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use std::{fmt, fs, io};

use rustc_hash::FxHashMap;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::Mode;

use crate::Ticket;
use crate::core::ticket::{Address, MAX_PATH, ProcessName, TicketParts, hex, is_path};
use crate::error::ServeError;
use crate::system;
pub use event_loop::MAX_CONNECTIONS;
use event_loop::{EventLoop, LoopParts};
use export::Export;
pub use export::{MAX_DESCRIPTION, MAX_DESCRIPTORS, Offer, Source};
use session::Exporter;
pub use session::MAX_OPENS;
pub use watchers::Watchers;

/// Connections that wait to be accepted; the kernel's own limit may be lower.
const BACKLOG: i32 = 4096;

/// Publishes exports of this process, and serves them on one thread.
pub struct Server {
    shared: Arc<Shared>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    /// Removed when the server ends.
    path: Option<PathBuf>,
    connections: Arc<AtomicUsize>,
    watchers: Arc<Watchers>,
}

struct Shared {
    address: Address,
    exporter: ProcessName,
    /// Forks before the server was made. A child has no thread of it, and takes no lock of it.
    depth: u32,
    last_export: AtomicU64,
    exports: Mutex<FxHashMap<u64, Arc<Export>>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, FxHashMap<u64, Arc<Export>>> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_inherited(&self) -> bool {
        vramp_host::fork::depth() != self.depth
    }
}

impl Server {
    /// Starts a server at an abstract address with 128 random bits. Importers must be in the same
    /// network namespace.
    ///
    /// # Errors
    ///
    /// If a system call fails, for instance because no descriptor is left. The server has four.
    pub fn new() -> Result<Server, ServeError> {
        let name = system::random().map_err(system_error("get random bits"))?;
        Server::start(Address::Abstract(name), Admission::here())
    }

    /// Starts a server with a socket in `directory`, for importers in other network namespaces that
    /// see the directory under the same path. Only the user of this process can connect to it.
    ///
    /// The server removes the socket when it is dropped. A process that is killed leaves it.
    ///
    /// # Errors
    ///
    /// If the directory is not absolute or its path too long, or if a system call fails.
    pub fn in_directory(directory: &Path) -> Result<Server, ServeError> {
        let name = system::random().map_err(system_error("get random bits"))?;
        let path = directory.join(format!("vramp-{}", hex(&name)));
        let bytes = path.as_os_str().as_bytes();
        if !is_path(bytes) {
            return Err(ServeError::Path {
                directory: directory.display().to_string(),
                length: bytes.len(),
                max: MAX_PATH,
            });
        }
        Server::start(Address::Path(bytes.to_vec()), Admission::here())
    }

    fn start(address: Address, admission: Admission) -> Result<Server, ServeError> {
        let listener = system::socket().map_err(system_error("make a socket"))?;
        // An importer that gave up leaves nothing to accept.
        rustix::io::ioctl_fionbio(&listener, true)
            .map_err(|error| system_error("make a socket")(error.into()))?;
        let path = bind(&listener, &address)?;
        // From here on an error removes the socket's file, because the server is dropped.
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| system_error("make an event")(error.into()))?;
        let shared = Arc::new(Shared {
            address,
            exporter: system::own_process(),
            depth: admission.depth,
            last_export: AtomicU64::new(0),
            exports: Mutex::default(),
        });
        let connections = Arc::new(AtomicUsize::new(0));
        let mut server = Server {
            shared: Arc::clone(&shared),
            stop: Arc::new(stop),
            thread: None,
            path,
            connections: Arc::clone(&connections),
            watchers: Arc::default(),
        };
        rustix::net::listen(&listener, BACKLOG)
            .map_err(|error| system_error("listen")(error.into()))?;
        let parts = LoopParts {
            listener,
            stop: Arc::clone(&server.stop),
            admitted_uid: admission.uid,
            service: Exporter {
                find_export: Box::new(move |number| shared.lock().get(&number).cloned()),
                watchers: Arc::clone(&server.watchers),
            },
            connections,
        };
        let event_loop = EventLoop::new(parts).map_err(system_error("make an epoll instance"))?;
        let thread = std::thread::Builder::new()
            .name("vramp-ipc".to_owned())
            .spawn(move || event_loop.run())
            .map_err(system_error("start a thread"))?;
        server.thread = Some(thread);
        Ok(server)
    }

    /// Publishes a source. No message and one system call, for the secret. O(1).
    ///
    /// # Errors
    ///
    /// In a forked child, and if the kernel gives no random bits.
    pub fn publish(&self, source: Arc<dyn Source>) -> Result<Published, ServeError> {
        if self.shared.is_inherited() {
            return Err(ServeError::Forked);
        }
        let secret = system::random().map_err(system_error("get random bits"))?;
        let number = self.shared.last_export.fetch_add(1, Ordering::Relaxed) + 1;
        let export = Arc::new(Export::new(number, secret, source));
        self.shared.lock().insert(number, Arc::clone(&export));
        Ok(Published { shared: Arc::clone(&self.shared), export })
    }

    /// Returns true if the ticket is one of this server, so that no connection is needed to reach
    /// the memory.
    pub fn is_own(&self, ticket: &Ticket) -> bool {
        !self.shared.is_inherited() && ticket.0.address == self.shared.address
    }

    /// Returns the number of exports that are published; 0 in a forked child.
    pub fn published(&self) -> usize {
        if self.shared.is_inherited() { 0 } else { self.shared.lock().len() }
    }

    /// Returns the importers that keep memory mapped which they have closed.
    pub fn watchers(&self) -> &Arc<Watchers> {
        &self.watchers
    }

    /// Returns the number of connected importers.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("exporter", &self.shared.exporter)
            .field("connections", &self.connections())
            .finish_non_exhaustive()
    }
}

/// Ends the thread and all connections; sources with holders are released first. In a forked child
/// it does nothing.
impl Drop for Server {
    fn drop(&mut self) {
        if self.shared.is_inherited() {
            // The thread does not exist here, so it cannot be joined either.
            std::mem::forget(self.thread.take());
            return;
        }
        if let Some(path) = &self.path {
            // Another process of the user may have removed it.
            let _ = fs::remove_file(path);
        }
        if let Some(thread) = self.thread.take() {
            // A counter that is not full takes the value at once.
            let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
            // A source may drop the server, on the server's own thread, which ends after that.
            if thread.thread().id() != std::thread::current().id() {
                // Its panic is on standard error, and dropping must not panic.
                let _ = thread.join();
            }
        }
    }
}

/// The user and the process that a server is for.
struct Admission {
    uid: u32,
    /// Forks before this process.
    depth: u32,
}

impl Admission {
    /// Returns those of this process.
    fn here() -> Admission {
        vramp_host::fork::watch();
        Admission { uid: rustix::process::geteuid().as_raw(), depth: vramp_host::fork::depth() }
    }
}

/// Binds before anything listens, so that no connection comes before the file has its mode.
fn bind(listener: &OwnedFd, address: &Address) -> Result<Option<PathBuf>, ServeError> {
    let name = system::kernel_address(address).map_err(system_error("use the address"))?;
    rustix::net::bind(listener, &name)
        .map_err(|error| system_error("bind the socket")(error.into()))?;
    let Address::Path(path) = address else { return Ok(None) };
    let path = PathBuf::from(std::ffi::OsStr::from_bytes(path));
    if let Err(error) = rustix::fs::chmod(&path, Mode::RUSR | Mode::WUSR) {
        // It is this call's own file: its name has 128 random bits.
        let _ = fs::remove_file(&path);
        return Err(system_error("restrict the socket to its user")(error.into()));
    }
    Ok(Some(path))
}

fn system_error(action: &'static str) -> impl Fn(io::Error) -> ServeError {
    move |source| ServeError::System { action, source }
}

/// An export of this process. Dropping it withdraws the export.
pub struct Published {
    shared: Arc<Shared>,
    export: Arc<Export>,
}

impl Published {
    fn ticket_with(&self, grant: u64) -> Ticket {
        Ticket(TicketParts {
            address: self.shared.address.clone(),
            exporter: self.shared.exporter,
            export: self.export.number,
            grant,
            secret: self.export.secret,
        })
    }

    /// Returns a ticket. It can be opened while the export is published, which the caller ensures.
    pub fn ticket(&self) -> Ticket {
        self.ticket_with(0)
    }

    /// Returns a ticket with a grant: it counts as a holder until it was opened once or revoked, so
    /// that [`Source::released`] is not called while it is on its way. O(log grants).
    ///
    /// A ticket that is lost keeps its grant. The caller revokes it, with the end of the process to
    /// which it was sent, for instance.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn grant(&self) -> Result<Ticket, ServeError> {
        if self.shared.is_inherited() {
            return Err(ServeError::Forked);
        }
        let grant = self.export.grant().ok_or(ServeError::Withdrawn)?;
        Ok(self.ticket_with(grant))
    }

    /// Ends the grant of a ticket that was not opened. Returns false if it was opened or revoked
    /// before, or is of another export. [`Source::released`] is not called for it: use
    /// [`Published::is_held`].
    pub fn revoke(&self, ticket: &Ticket) -> bool {
        let is_of_this = !self.shared.is_inherited()
            && ticket.0.export == self.export.number
            && ticket.0.secret == self.export.secret;
        is_of_this && self.export.revoke(ticket.0.grant)
    }

    /// Returns the number of opens that importers have not closed. No lock; in a forked child the
    /// number at the fork.
    pub fn opens(&self) -> usize {
        self.export.opens()
    }

    /// Returns how often the export was opened. No lock; in a forked child the number at the fork.
    pub fn ever_opened(&self) -> u64 {
        self.export.ever_opened()
    }

    /// Returns the number of grants that are neither opened nor revoked; 0 in a forked child.
    pub fn grants(&self) -> usize {
        if self.shared.is_inherited() { 0 } else { self.export.grants() }
    }

    /// Returns true while something is open, being opened or being released, or a grant is
    /// outstanding. False in a forked child.
    pub fn is_held(&self) -> bool {
        !self.shared.is_inherited() && self.export.is_held()
    }

    /// Waits until nothing is open, no grant is outstanding and [`Source::released`] returned.
    /// Returns false at the deadline. Not for methods of a source. True in a forked child.
    pub fn wait_released(&self, deadline: Instant) -> bool {
        self.shared.is_inherited() || self.export.wait_released(deadline)
    }

    /// Waits until the export was opened `times` times since it was published. Returns false at the
    /// deadline, and in a forked child.
    pub fn wait_opened(&self, times: u64, deadline: Instant) -> bool {
        !self.shared.is_inherited() && self.export.wait_opened(times, deadline)
    }

    /// Withdraws the export: later opens fail with [`OpenError::Withdrawn`](crate::OpenError), and
    /// grants are revoked. What is open stays open; the returned handle waits for its end.
    ///
    /// To free the memory exactly once: free it here if [`Withdrawn::is_pending`] is false, and in
    /// [`Source::ended`] otherwise.
    pub fn withdraw(self) -> Withdrawn {
        let is_pending = self.remove();
        Withdrawn { published: self, is_pending }
    }

    /// Withdraws the export as dropping it does, while other threads wait with this handle. Idempotent.
    pub fn close(&self) {
        self.remove();
    }

    /// Returns whether the source's end is still to come.
    fn remove(&self) -> bool {
        if self.shared.is_inherited() {
            return false;
        }
        self.shared.lock().remove(&self.export.number);
        self.export.withdraw()
    }
}

impl fmt::Debug for Published {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Published")
            .field("export", &self.export.number)
            .field("opens", &self.opens())
            .finish_non_exhaustive()
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        self.remove();
    }
}

/// An export that was withdrawn and may still be open in importers.
#[derive(Debug)]
pub struct Withdrawn {
    published: Published,
    is_pending: bool,
}

impl Withdrawn {
    /// Returns true if something was open, or being opened, when the export was withdrawn. Then
    /// [`Source::ended`] is called once; otherwise never.
    pub fn is_pending(&self) -> bool {
        self.is_pending
    }

    /// Returns the number of opens that importers have not closed.
    pub fn opens(&self) -> usize {
        self.published.opens()
    }

    /// Returns true while something is open, being opened or being released.
    pub fn is_held(&self) -> bool {
        self.published.is_held()
    }

    /// Waits until nothing is open and [`Source::released`] returned. Returns false at the deadline.
    pub fn wait_released(&self, deadline: Instant) -> bool {
        self.published.wait_released(deadline)
    }
}
