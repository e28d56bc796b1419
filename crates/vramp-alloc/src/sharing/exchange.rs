//! Memory between processes of one user: exports are published, and opened elsewhere.
//!
//! 1. [`Exchange::share`] publishes an export. [`SharedMemory::ticket`] is a small value for the other
//!    process; [`SharedMemory::grant`] one that keeps the memory until it was opened.
//! 2. [`Exchange::open`] imports the memory of a ticket. The exporter's process sends the descriptors
//!    over a Unix socket, each closed once it is imported.
//! 3. The block stays the exporter's, also beyond a free, until every importer closed it or ended,
//!    killed ones included, and the [`SharedMemory`] is dropped.
//!
//! The bytes are whatever work wrote: the exporter synchronizes its stream before it sends a ticket.
//!
//! ```
//! use vramp_alloc::sharing::Exchange;
//! use vramp_alloc::{Allocator, Bytes, Config};
//!
//! # let device = vramp_alloc::open("sim:h200")?;
//! let allocator = Allocator::new(device, Config::default())?;
//! let stream = allocator.create_stream()?;
//! let block = allocator.malloc(Bytes::mib(64), stream)?;
//!
//! let exchange = Exchange::new();
//! let shared = exchange.share(allocator.export(&block)?)?;
//! let ticket = shared.grant()?.to_bytes();             // to the other process
//! allocator.free(block, stream)?;                      // takes effect when all others closed it
//!
//! let opened = exchange.open(&allocator, &ticket)?;    // in the other process
//! println!("{}", opened.range());
//! opened.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Growth: a publish makes the descriptors of the block's handles, 185 us for each that has none, because that
//! is what an open would wait for. At most [`READY_MAX`](super::READY_MAX) of them are kept in a process, however
//! many exports there are; further ones are made when an importer asks. An open takes one message for 64 handles
//! and 34 us of driver calls for each that is not mapped from an earlier open (`imports.rs`).

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use vramp_core::{AddrRange, StreamId};
use vramp_driver::{DriverError, ExportedHandle};
use vramp_host::fork::is_forked;
use vramp_ipc::{
    Connections, Offer, OpenError, OpenOptions, Opened, Published, ServeError, Server, Source,
    Ticket, TicketError,
};

use crate::Allocator;
use crate::error::UseError;
use crate::sharing::export::{Export, ExportError};
use crate::sharing::import::{ImportError, Imported};
use crate::sharing::retention::Retention;
use crate::sharing::windowed::Windowed;
use crate::sharing::wire::{Sent, decode, encode};

/// Publishes exports of this process and opens those of others. One for a process is enough.
///
/// Its server, a thread and four descriptors, starts with the first [`Exchange::share`].
pub struct Exchange {
    server: Mutex<Option<Server>>,
    directory: Option<PathBuf>,
    connections: Connections,
    retention: Arc<Retention>,
}

/// Error of [`Exchange::open`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenMemoryError {
    /// The bytes are no ticket.
    #[error(transparent)]
    Ticket(#[from] TicketError),
    /// The exporter's process refused, or is gone.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// What it sent has no meaning here.
    #[error(
        "the exporting process sent an unknown description: use the same version of vramp in both"
    )]
    Unknown,
    /// The memory could not be imported.
    #[error(transparent)]
    Import(#[from] ImportError<FetchError>),
}

/// A handle did not arrive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The exporter's process refused, or is gone.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It sent fewer handles than it described.
    #[error("the exporting process sent fewer handles than it described")]
    Fewer,
}

impl Exchange {
    /// Returns an exchange whose server has an abstract address: importers are in the same network
    /// namespace, as processes of one container are.
    pub fn new() -> Exchange {
        Exchange::with(None)
    }

    /// Returns an exchange whose server has a socket in a directory, for importers in other network
    /// namespaces that see the directory under the same path.
    pub fn in_directory(directory: &Path) -> Exchange {
        Exchange::with(Some(directory.to_owned()))
    }

    fn with(directory: Option<PathBuf>) -> Exchange {
        let connections = Connections::new(OpenOptions::default());
        let retention = Arc::default();
        Exchange { server: Mutex::default(), directory, connections, retention }
    }

    /// Publishes an export, and makes the descriptors that are not kept from earlier exports: 185 us for each
    /// handle. It stays exported until the result is dropped and no importer has it open.
    ///
    /// # Errors
    /// The server could not be started, or the process is a forked child.
    pub fn share(&self, export: Export) -> Result<SharedMemory, ServeError> {
        if is_forked() {
            return Err(ServeError::Forked);
        }
        export.prepare();
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let started = match server.take() {
            Some(running) => running,
            None => match &self.directory {
                Some(directory) => Server::in_directory(directory)?,
                None => Server::new()?,
            },
        };
        let server = server.insert(started);
        export.notify(server.watchers());
        let published = server.publish(Arc::new(Exported(export)))?;
        Ok(SharedMemory { published })
    }

    /// Opens the memory of a ticket for work of an allocator's device.
    ///
    /// Waits for the exporter's process, 30 s for each of its answers at most.
    ///
    /// # Errors
    /// See [`OpenMemoryError`]. Nothing stays open.
    pub fn open(
        &self,
        allocator: &Allocator,
        ticket: &[u8],
    ) -> Result<OpenedMemory, OpenMemoryError> {
        let ticket = Ticket::from_bytes(ticket)?;
        let mut opened = with_spare_descriptors(|| match self.retention.expects_mapped() {
            true => self.connections.open_described(&ticket),
            false => self.connections.open(&ticket),
        })?;
        let Sent { description, fabric, place } =
            decode(opened.description()).ok_or(OpenMemoryError::Unknown)?;
        let mut arrived: VecDeque<OwnedFd> = VecDeque::new();
        let mut next = 0;
        let mut fetch = |index: usize| {
            if let Some(bytes) = fabric.get(index) {
                return Ok(ExportedHandle::Fabric(*bytes));
            }
            // Those between are mapped already.
            arrived.drain(..arrived.len().min(index - next));
            next = index + 1;
            if arrived.is_empty() {
                opened.skip_to(index);
                if let Some(batch) = with_spare_descriptors(|| opened.next_batch())? {
                    arrived.extend(batch.descriptors);
                }
            }
            arrived.pop_front().map(ExportedHandle::PosixFd).ok_or(FetchError::Fewer)
        };
        let watched =
            place.and_then(|place| Some((place, self.retention.watch(allocator, &ticket)?)));
        let in_window = match &watched {
            Some((place, watch)) => {
                Windowed::open(allocator, (&description, place), *watch, &mut fetch).transpose()
            }
            None => None,
        };
        let memory = match in_window {
            Some(windowed) => windowed.map(Memory::Windowed),
            None => allocator.import(&description, fetch).map(Memory::Own),
        };
        let memory = memory.map_err(|error| match error {
            // A driver does not say that the process may open no more: other threads took what was spare.
            ImportError::Driver(_) if spare_descriptors().len() < SPARE => {
                OpenError::too_many_open_files().into()
            }
            other => OpenMemoryError::from(other),
        })?;
        self.retention.note_open(matches!(&memory, Memory::Windowed(of) if of.was_mapped));
        let retention = Arc::clone(&self.retention);
        Ok(OpenedMemory { memory: Some((memory, opened)), retention })
    }

    /// Returns the number of published exports; 0 in a forked child.
    pub fn published(&self) -> usize {
        if is_forked() {
            return 0;
        }
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        server.as_ref().map_or(0, Server::published)
    }
}

/// Descriptors that a driver may open to import one.
const SPARE: usize = 4;

/// Keeps some descriptors free while others are received, so that a batch does not take the last one that
/// the process may open. Four system calls, and four more afterwards.
fn with_spare_descriptors<R>(receive: impl FnOnce() -> R) -> R {
    let spare = spare_descriptors();
    let received = receive();
    drop(spare);
    received
}

/// Takes descriptors that are free, [`SPARE`] at most.
fn spare_descriptors() -> Vec<std::fs::File> {
    (0..SPARE).map_while(|_| std::fs::File::open("/dev/null").ok()).collect()
}

impl Default for Exchange {
    fn default() -> Exchange {
        Exchange::new()
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exchange of {} exports", self.published())
    }
}

/// Memory that other processes may open. Dropping it withdraws it: what is open stays open.
#[derive(Debug)]
pub struct SharedMemory {
    published: Published,
}

impl SharedMemory {
    /// Returns a ticket, which can be opened any number of times while this lives.
    pub fn ticket(&self) -> Ticket {
        self.published.ticket()
    }

    /// Returns a ticket that counts as a holder until it was opened once.
    ///
    /// # Errors
    /// In a forked child.
    pub fn grant(&self) -> Result<Ticket, ServeError> {
        self.published.grant()
    }

    /// Ends the grant of a ticket that was lost on its way. Returns false if it was opened.
    pub fn revoke(&self, ticket: &Ticket) -> bool {
        self.published.revoke(ticket)
    }

    /// Returns the number of opens that importers have not closed.
    pub fn opens(&self) -> usize {
        self.published.opens()
    }

    /// Returns true while an importer has it open, or a grant is on its way.
    pub fn is_held(&self) -> bool {
        self.published.is_held()
    }

    /// Withdraws it as dropping it does, while other threads wait with it. Grants end.
    pub fn close(&self) {
        self.published.close();
    }

    /// Waits until no importer has it open and no grant is on its way. Returns false at the deadline.
    pub fn wait_released(&self, deadline: Instant) -> bool {
        self.published.wait_released(deadline)
    }
}

/// Memory of another process, open here. Dropping it closes it.
///
/// If the work on it cannot be waited for, it stays mapped until the device is dropped, and the exporter
/// keeps its block until this process ends.
#[derive(Debug)]
pub struct OpenedMemory {
    /// `None` once it is closed.
    memory: Option<(Memory, Opened)>,
    retention: Arc<Retention>,
}

/// How opened memory is mapped.
#[derive(Debug)]
enum Memory {
    /// By itself.
    Own(Imported),
    /// In a window, where other blocks may use the same handles.
    Windowed(Windowed),
}

impl OpenedMemory {
    /// Returns the addresses of the exporter's block here. Memory that is open twice may have the same ones.
    pub fn range(&self) -> AddrRange {
        match self.memory() {
            Memory::Own(imported) => imported.range(),
            Memory::Windowed(windowed) => windowed.range(),
        }
    }

    fn memory(&self) -> &Memory {
        &self.memory.as_ref().expect("it is closed when it is dropped").0
    }

    /// Grants a card access to the memory: see [`Imported::grant_access`].
    ///
    /// # Errors
    /// The driver call failed.
    pub fn grant_access(&self, ordinal: u32) -> Result<(), DriverError> {
        match self.memory() {
            Memory::Own(imported) => imported.grant_access(ordinal),
            Memory::Windowed(windowed) => windowed.grant_access(ordinal),
        }
    }

    /// Notes that work on `stream` uses the memory: see [`Imported::record_use`].
    ///
    /// # Errors
    /// The stream is not one of the allocator's, or was destroyed.
    pub fn record_use(&self, stream: StreamId) -> Result<(), UseError> {
        match self.memory() {
            Memory::Own(imported) => imported.record_use(stream),
            Memory::Windowed(windowed) => windowed.record_use(stream),
        }
    }

    /// Waits on the host for the noted work, and closes the memory at the exporter. It may stay mapped for the
    /// next open for ten seconds, as long as the exporter keeps its handles and this process is not short of
    /// memory.
    ///
    /// # Errors
    /// The wait failed, as while a noted stream captures, or a driver call. The exporter keeps its block
    /// then.
    pub fn close(mut self) -> Result<(), DriverError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), DriverError> {
        let Some((memory, opened)) = self.memory.take() else { return Ok(()) };
        let ended = match memory {
            Memory::Own(imported) => imported.close(),
            Memory::Windowed(mut windowed) => {
                let ended = windowed.end();
                self.retention.note_close();
                ended
            }
        };
        // The close is sent after what may stay mapped is entered: the exporter may release it then.
        ended.inspect_err(|_| {
            // It may still be mapped, and used by work.
            std::mem::forget(opened);
        })
    }
}

impl Drop for OpenedMemory {
    fn drop(&mut self) {
        // A drop cannot report a failure; `close` does.
        let _ = self.end();
    }
}

/// An export as the server sees it. It ends with the server's last reference.
struct Exported(Export);

impl Source for Exported {
    fn open(&self) -> Result<Offer, String> {
        self.0.check_open().map_err(|error| error.to_string())?;
        let description = self.0.description();
        let fabric = fabric_of(&self.0).map_err(|error| error.to_string())?;
        let descriptors = if fabric.is_empty() { description.handles.len() } else { 0 };
        Ok(Offer { description: encode(description, &fabric, self.0.place()), descriptors })
    }

    fn descriptor(&self, index: usize) -> std::io::Result<OwnedFd> {
        match self.0.descriptor_to_send(index) {
            Ok(ExportedHandle::PosixFd(descriptor)) => Ok(descriptor),
            Ok(ExportedHandle::Fabric(_)) => {
                Err(std::io::Error::other("a fabric handle has no descriptor"))
            }
            // A driver does not say that the process may open no more. Then fewer are sent at once.
            Err(error) => match std::fs::File::open("/dev/null") {
                Err(limit) => Err(limit),
                Ok(_) => Err(std::io::Error::other(error.to_string())),
            },
        }
    }

    fn released(&self) {}
}

/// Returns the fabric handles of an export; none if it has descriptors.
fn fabric_of(export: &Export) -> Result<Vec<[u8; 64]>, ExportError> {
    if !export.is_fabric() {
        return Ok(Vec::new());
    }
    let handles =
        (0..export.description().handles.len()).map(|index| export.descriptor_to_send(index));
    let handles = handles.map(|handle| match handle? {
        ExportedHandle::Fabric(bytes) => Ok(bytes),
        ExportedHandle::PosixFd(_) => unreachable!("all handles of an allocator are of one type"),
    });
    handles.collect()
}
