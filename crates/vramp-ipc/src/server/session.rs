//! One connection of an importer: what it has open, and the reply that its full queue delays.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustc_hash::FxHashMap;
use rustix::io::Errno;

use super::event_loop::{Connected, Next, Service};
use super::export::{Export, SourceFailure};
use super::watchers::Watchers;
use crate::core::message::{
    Failure, MAX_BATCH, MAX_PART, MAX_REQUEST, OpenId, Reply, Request, Secret,
};
use crate::system;

/// Most opens of one connection.
pub const MAX_OPENS: usize = 1 << 20;
/// Requests that a connection may make before the next connection is served.
const REQUESTS_IN_TURN: usize = 16;

/// Looks an export up by its number.
pub type FindExport = Box<dyn Fn(u64) -> Option<Arc<Export>> + Send>;

/// Serves importers.
pub struct Exporter {
    pub find_export: FindExport,
    pub watchers: Arc<Watchers>,
}

impl Service for Exporter {
    type Session = Session;

    fn begin(&mut self, _connected: &Connected) -> Session {
        Session::default()
    }

    fn serve(&mut self, connected: &Connected, session: &mut Session) -> Next {
        session.serve(connected, self)
    }

    fn end(&mut self, connected: &Connected, session: Session) {
        self.watchers.remove(connected.token);
        drop(session);
    }

    /// Tells the importer the reason with a reply to any request.
    fn refusal(&self, admitted_uid: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let (failure, value) = (Failure::OtherUser, u64::from(admitted_uid));
        Reply::Failed { failure, value, text: String::new() }.encode(0, &mut bytes);
        bytes
    }
}

struct OpenExport {
    export: Arc<Export>,
    descriptors: u32,
}

/// A description of which parts are still to be sent.
struct Transfer {
    open: OpenId,
    description: Vec<u8>,
}

/// A reply before its descriptors are made. It is kept while the importer's queue is full, so that
/// no descriptor is open meanwhile.
enum Plan {
    Opened { open: OpenId, most: u16 },
    Part { open: OpenId, offset: u32 },
    Batch { open: OpenId, first: u32, most: u16 },
    Watching,
    Failed { failure: Failure, value: u64, text: String },
}

/// State of one connection.
#[derive(Default)]
pub struct Session {
    opens: FxHashMap<OpenId, OpenExport>,
    last_open: OpenId,
    /// One at a time: importers receive a description completely before they open the next export.
    transfer: Option<Transfer>,
    delayed: Option<(u32, Plan)>,
}

impl Session {
    /// Serves requests until none is left, the queue is full, or other connections should be served.
    fn serve(&mut self, connected: &Connected, exporter: &Exporter) -> Next {
        let socket = &connected.socket;
        if let Some((sequence, plan)) = self.delayed.take() {
            match self.reply(socket, sequence, plan) {
                Next::Readable => {}
                other => return other,
            }
        }
        let mut buffer = [0; MAX_REQUEST];
        for _ in 0..REQUESTS_IN_TURN {
            let length = match system::receive_bytes(socket, &mut buffer) {
                Ok(Some(0)) => return Next::End,
                Ok(Some(length)) => length,
                Ok(None) => return Next::End,
                Err(Errno::AGAIN) => return Next::Readable,
                Err(_) => return Next::End,
            };
            let Some((sequence, request)) = Request::decode(&buffer[..length]) else {
                return Next::End;
            };
            match self.answer(connected, sequence, request, exporter) {
                Next::Readable => {}
                other => return other,
            }
        }
        Next::Readable
    }

    fn answer(
        &mut self,
        connected: &Connected,
        sequence: u32,
        request: Request,
        exporter: &Exporter,
    ) -> Next {
        let socket = &connected.socket;
        match request {
            Request::Open { export, grant, secret, most } => {
                let plan = self.open((exporter.find_export)(export), grant, &secret, most);
                self.reply(socket, sequence, plan)
            }
            Request::Part { open, offset } => {
                let is_left = self.transfer.as_ref().is_some_and(|transfer| {
                    transfer.open == open && (offset as usize) < transfer.description.len()
                });
                if !is_left {
                    return Next::End;
                }
                self.reply(socket, sequence, Plan::Part { open, offset })
            }
            Request::Batch { open, first, most } => {
                match self.opens.get(&open) {
                    Some(known) if first < known.descriptors && most > 0 => {}
                    _ => return Next::End,
                }
                self.reply(socket, sequence, Plan::Batch { open, first, most })
            }
            Request::Close { open } => match self.opens.remove(&open) {
                Some(closed) => {
                    self.transfer.take_if(|transfer| transfer.open == open);
                    closed.export.close();
                    Next::Readable
                }
                None => Next::End,
            },
            // Before the reply: from then on the importer relies on it.
            Request::Watch => match exporter.watchers.add(connected.token, socket) {
                Ok(()) => self.reply(socket, sequence, Plan::Watching),
                // No descriptor is left for it.
                Err(_) => Next::End,
            },
        }
    }

    fn open(
        &mut self,
        export: Option<Arc<Export>>,
        grant: u64,
        secret: &Secret,
        most: u16,
    ) -> Plan {
        let failed = |failure, value, text| Plan::Failed { failure, value, text };
        let Some(export) = export else {
            return failed(Failure::Withdrawn, 0, String::new());
        };
        if !export.has_secret(secret) {
            return failed(Failure::WrongSecret, 0, String::new());
        }
        if self.opens.len() >= MAX_OPENS {
            return failed(Failure::TooManyOpens, MAX_OPENS as u64, String::new());
        }
        let offer = match export.open(grant) {
            Ok(offer) => offer,
            Err(SourceFailure::Withdrawn) => {
                return failed(Failure::Withdrawn, 0, String::new());
            }
            Err(SourceFailure::Message(text)) => return failed(Failure::Source, 0, text),
        };
        self.last_open += 1;
        let open = self.last_open;
        // Within `MAX_DESCRIPTORS`, as `Export::open` checked.
        self.opens.insert(open, OpenExport { export, descriptors: offer.descriptors as u32 });
        self.transfer = Some(Transfer { open, description: offer.description });
        Plan::Opened { open, most }
    }

    /// Sends the reply, or keeps it for later if the queue is full.
    fn reply(&mut self, socket: &OwnedFd, sequence: u32, plan: Plan) -> Next {
        match self.send(socket, sequence, &plan) {
            Ok(()) => {
                self.forget_sent(&plan);
                Next::Readable
            }
            Err(Errno::AGAIN) => {
                self.delayed = Some((sequence, plan));
                Next::Writable
            }
            Err(_) => Next::End,
        }
    }

    /// Drops a description of which everything was sent.
    fn forget_sent(&mut self, plan: &Plan) {
        let sent = match *plan {
            Plan::Opened { open, .. } => Some((open, MAX_PART)),
            Plan::Part { open, offset } => Some((open, offset as usize + MAX_PART)),
            Plan::Batch { .. } | Plan::Watching | Plan::Failed { .. } => None,
        };
        if let Some((open, sent)) = sent {
            self.transfer
                .take_if(|transfer| transfer.open == open && transfer.description.len() <= sent);
        }
    }

    fn send(&self, socket: &OwnedFd, sequence: u32, plan: &Plan) -> Result<(), Errno> {
        match plan {
            Plan::Opened { open, most } => {
                let known = self.open_export(*open);
                let (description, part) = self.part(*open, 0);
                let descriptors = known.descriptors;
                // Without a descriptor in it, the importer's next request gets the error.
                let (batch, _) = self.batch(known, 0, *most);
                send_batch(socket, batch, sequence, |count| Reply::Opened {
                    open: *open,
                    description: description as u32,
                    descriptors,
                    count,
                    part,
                })
                .or_else(|error| match error {
                    BatchError::InFlight => {
                        let opened = Reply::Opened {
                            open: *open,
                            description: description as u32,
                            descriptors,
                            count: 0,
                            part,
                        };
                        send_bytes(socket, sequence, &opened)
                    }
                    BatchError::Socket(error) => Err(error),
                })
            }
            Plan::Part { open, offset } => {
                let (_, part) = self.part(*open, *offset as usize);
                send_bytes(socket, sequence, &Reply::Part { offset: *offset, part })
            }
            Plan::Batch { open, first, most } => {
                let (batch, error) = self.batch(self.open_export(*open), *first, *most);
                if let (true, Some(error)) = (batch.is_empty(), error) {
                    return send_bytes(socket, sequence, &no_descriptor(&error));
                }
                send_batch(socket, batch, sequence, |count| Reply::Batch { first: *first, count })
                    .or_else(|error| match error {
                        BatchError::InFlight => send_bytes(
                            socket,
                            sequence,
                            &Reply::Failed {
                                failure: Failure::TooManyInFlight,
                                value: system::open_file_limit(),
                                text: String::new(),
                            },
                        ),
                        BatchError::Socket(error) => Err(error),
                    })
            }
            Plan::Watching => send_bytes(socket, sequence, &Reply::Watching),
            Plan::Failed { failure, value, text } => {
                let (failure, value, text) = (*failure, *value, text.clone());
                send_bytes(socket, sequence, &Reply::Failed { failure, value, text })
            }
        }
    }

    fn open_export(&self, open: OpenId) -> &OpenExport {
        // A close is read only after the reply, and nothing else removes an open.
        self.opens.get(&open).expect("a reply is planned for an export that is open")
    }

    /// Returns the length of the description, and its part from `offset` on.
    fn part(&self, open: OpenId, offset: usize) -> (usize, &[u8]) {
        let transfer = self.transfer.as_ref().filter(|transfer| transfer.open == open);
        let description = &transfer.expect("a description is kept until it was sent").description;
        let end = description.len().min(offset + MAX_PART);
        (description.len(), &description[offset..end])
    }

    /// Makes descriptors until there are enough or one cannot be made.
    fn batch(
        &self,
        known: &OpenExport,
        first: u32,
        most: u16,
    ) -> (Vec<OwnedFd>, Option<io::Error>) {
        let left = (known.descriptors - first) as usize;
        let wanted = left.min(usize::from(most)).min(MAX_BATCH);
        let mut made = Vec::with_capacity(wanted);
        for index in 0..wanted {
            match known.export.descriptor(first as usize + index) {
                Ok(descriptor) => made.push(descriptor),
                Err(error) => return (made, Some(error)),
            }
        }
        (made, None)
    }
}

/// Closes everything that the connection had open.
impl Drop for Session {
    fn drop(&mut self) {
        for (_, open) in self.opens.drain() {
            open.export.close();
        }
    }
}

/// Sends as many of the descriptors as may be on their way.
fn send_batch<'a>(
    socket: &OwnedFd,
    mut batch: Vec<OwnedFd>,
    sequence: u32,
    reply: impl Fn(u16) -> Reply<'a>,
) -> Result<(), BatchError> {
    loop {
        let mut bytes = Vec::new();
        reply(batch.len() as u16).encode(sequence, &mut bytes);
        let borrowed: Vec<_> = batch.iter().map(AsFd::as_fd).collect();
        match system::send(socket, &bytes, &borrowed) {
            Err(Errno::TOOMANYREFS) if batch.len() > 1 => batch.truncate(batch.len() / 2),
            Err(Errno::TOOMANYREFS) => return Err(BatchError::InFlight),
            result => return result.map_err(BatchError::Socket),
        }
    }
}

fn send_bytes(socket: &OwnedFd, sequence: u32, reply: &Reply<'_>) -> Result<(), Errno> {
    let mut bytes = Vec::new();
    reply.encode(sequence, &mut bytes);
    system::send(socket, &bytes, &[])
}

enum BatchError {
    /// Not even one descriptor may be on its way.
    InFlight,
    Socket(Errno),
}

fn no_descriptor(error: &io::Error) -> Reply<'static> {
    if system::is_file_limit(error) {
        let value = system::open_file_limit();
        Reply::Failed { failure: Failure::TooManyFiles, value, text: String::new() }
    } else {
        Reply::Failed { failure: Failure::Source, value: 0, text: error.to_string() }
    }
}
