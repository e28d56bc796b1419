//! One connection to an exporter: requests, and replies by sequence number.
//!
//! A reply that comes after its request timed out is not lost: what it opened is closed. So the
//! connection stays usable, and other opens of it stay open.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::core::message::{Failure, MAX_REPLY, OpenId, Reply, Request};
use crate::core::ticket::TicketParts;
use crate::error::{OpenError, Refusal, Side};
use crate::system::{self, Packet};

/// How long a close waits for an exporter that reads nothing, before it is left for the next call.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

pub struct Connection {
    socket: OwnedFd,
    /// Readable once the exporting process ended; `None` where the kernel cannot say.
    process: Option<OwnedFd>,
    pid: u32,
    timeout: Duration,
    /// Forks before the connection was made. A child sends nothing over it.
    pub(super) depth: u32,
    is_ended: AtomicBool,
    exchange: Mutex<Exchange>,
    /// Closes that did not fit into the exporter's queue.
    unsent: Mutex<Vec<OpenId>>,
}

/// What one request at a time uses.
struct Exchange {
    last_sequence: u32,
    buffer: Vec<u8>,
}

/// The right to make requests, until it is dropped.
pub struct Turn<'a> {
    connection: &'a Connection,
    exchange: MutexGuard<'a, Exchange>,
}

/// A reply with its descriptors.
pub struct Answer<'a> {
    pub reply: Reply<'a>,
    pub descriptors: Vec<OwnedFd>,
    pub lost_descriptors: bool,
}

impl Connection {
    /// Connects to the exporter of a ticket.
    pub fn new(ticket: &TicketParts, timeout: Duration) -> Result<Connection, OpenError> {
        vramp_host::fork::watch();
        let pid = ticket.exporter.pid;
        let socket = system::socket().map_err(|error| local_error("make a socket", error))?;
        system::connect(&socket, &ticket.address, timeout)
            .map_err(|error| connect_error(ticket, timeout, error))?;
        let peer = vramp_host::peer::peer(&socket)
            .map_err(|source| OpenError::System { action: "identify the exporter", source })?;
        let importer = rustix::process::geteuid().as_raw();
        if peer.uid != importer {
            let reason = Refusal::OtherUser { exporter: peer.uid, importer };
            return Err(OpenError::Refused { pid, reason });
        }
        let process = match vramp_host::peer::peer_process(&socket) {
            Ok(process) => Some(process),
            // A forked child of the exporter listens at the address, and serves no request.
            Err(error) if peer.pid.is_some() && is(&error, Errno::SRCH) => {
                return Err(OpenError::ExporterGone { pid });
            }
            Err(error) if system::is_file_limit(&error) => {
                return Err(local_error("watch the exporter", error));
            }
            Err(_) => None,
        };
        Ok(Connection {
            socket,
            process,
            pid,
            timeout,
            depth: vramp_host::fork::depth(),
            is_ended: AtomicBool::new(false),
            exchange: Mutex::new(Exchange { last_sequence: 0, buffer: Vec::new() }),
            unsent: Mutex::default(),
        })
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    pub fn is_inherited(&self) -> bool {
        vramp_host::fork::depth() != self.depth
    }

    /// Returns true if the exporter's process or server ended. One system call until then.
    pub fn is_ended(&self) -> bool {
        if !self.is_ended.load(Ordering::Relaxed) {
            let ended = self.poll(PollFlags::empty(), Some(Instant::now()));
            if matches!(ended, Ok(Ready::Ended)) {
                self.is_ended.store(true, Ordering::Relaxed);
            }
        }
        self.is_ended.load(Ordering::Relaxed)
    }

    /// Waits for other threads' requests.
    pub fn turn(&self) -> Turn<'_> {
        let exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        Turn { connection: self, exchange }
    }

    /// Sends a close, which has no reply. One system call. While the exporter's queue is full, the
    /// first close waits a second at most; those after it are left for a later call.
    pub fn close(&self, open: OpenId) {
        if self.is_inherited() || self.is_ended.load(Ordering::Relaxed) {
            return;
        }
        if !self.send_unsent() {
            return self.lock_unsent().push(open);
        }
        let deadline = Instant::now() + CLOSE_PATIENCE.min(self.timeout);
        loop {
            match self.send(0, Request::Close { open }) {
                Err(Errno::AGAIN) => {}
                Ok(()) => return,
                Err(_) => return self.is_ended.store(true, Ordering::Relaxed),
            }
            match self.poll(PollFlags::OUT, Some(deadline)) {
                Ok(Ready::Now) => {}
                Ok(Ready::Ended) => return self.is_ended.store(true, Ordering::Relaxed),
                Ok(Ready::Never) | Err(_) => return self.lock_unsent().push(open),
            }
        }
    }

    fn lock_unsent(&self) -> MutexGuard<'_, Vec<OpenId>> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends closes that did not fit earlier, as many as fit now. Returns true if none is left.
    fn send_unsent(&self) -> bool {
        let mut unsent = self.lock_unsent();
        while let Some(open) = unsent.last() {
            match self.send(0, Request::Close { open: *open }) {
                Ok(()) => unsent.pop(),
                Err(_) => return false,
            };
        }
        true
    }

    fn send(&self, sequence: u32, request: Request) -> Result<(), Errno> {
        let mut bytes = Vec::new();
        request.encode(sequence, &mut bytes);
        system::send(&self.socket, &bytes, &[])
    }

    /// Waits for the socket, the end of the exporter or the deadline.
    fn poll(&self, wanted: PollFlags, deadline: Option<Instant>) -> Result<Ready, Errno> {
        let mut watched = vec![PollFd::new(&self.socket, wanted)];
        watched.extend(self.process.as_ref().map(|process| PollFd::new(process, PollFlags::IN)));
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let left = left.map(|left| Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            });
            match poll(&mut watched, left.as_ref()) {
                Ok(0) => return Ok(Ready::Never),
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        let found = watched[0].revents();
        let ended = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        // What was sent before the end is still received.
        let has_packet = wanted.contains(PollFlags::IN) && found.contains(PollFlags::IN);
        let is_ready = found.intersects(wanted) && !found.intersects(ended);
        Ok(if has_packet || is_ready { Ready::Now } else { Ready::Ended })
    }

    fn ended(&self) -> OpenError {
        self.is_ended.store(true, Ordering::Relaxed);
        OpenError::ExporterGone { pid: self.pid }
    }

    fn protocol(&self, what: &'static str) -> OpenError {
        OpenError::Protocol { pid: self.pid, what }
    }
}

/// What a poll found.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ready {
    Now,
    Ended,
    Never,
}

impl Turn<'_> {
    /// Makes a request and returns its reply. One message each way.
    pub fn request(&mut self, request: Request) -> Result<Answer<'_>, OpenError> {
        let connection = self.connection;
        // What does not fit now is sent by a later call.
        let _ = connection.send_unsent();
        self.exchange.last_sequence = self.exchange.last_sequence.wrapping_add(1).max(1);
        let sequence = self.exchange.last_sequence;
        let deadline = Instant::now() + connection.timeout;
        let timed_out = || OpenError::TimedOut { pid: connection.pid, timeout: connection.timeout };
        loop {
            match connection.send(sequence, request) {
                Ok(()) => break,
                Err(Errno::AGAIN) => {}
                // A refusal may lie in this end's queue.
                Err(Errno::PIPE | Errno::CONNRESET) => break,
                Err(error) => {
                    return Err(OpenError::System { action: "send", source: error.into() });
                }
            }
            match connection.poll(PollFlags::OUT, Some(deadline)) {
                Ok(Ready::Now) => {}
                Ok(Ready::Ended) => break,
                Ok(Ready::Never) => return Err(timed_out()),
                Err(error) => {
                    return Err(OpenError::System { action: "wait", source: error.into() });
                }
            }
        }
        let mut is_reset = false;
        let (packet, length) = loop {
            let buffer = &mut self.exchange.buffer;
            buffer.resize(MAX_REPLY, 0);
            match system::receive(&connection.socket, buffer) {
                Ok(Packet { length: 0, .. }) => return Err(connection.ended()),
                Ok(packet) if packet.is_cut => return Err(connection.protocol("too long")),
                Ok(packet) => {
                    let length = packet.length;
                    match Reply::decode(&buffer[..length]) {
                        None => return Err(connection.protocol("not a reply")),
                        Some((found, _)) if found == sequence => break (packet, length),
                        // It refuses every request.
                        Some((0, Reply::Failed { .. })) => break (packet, length),
                        // The reply of a request that timed out. Its descriptors are closed here.
                        Some((_, Reply::Opened { open, .. })) => connection.close(open),
                        Some(_) => {}
                    }
                }
                Err(Errno::AGAIN) => match connection.poll(PollFlags::IN, Some(deadline)) {
                    Ok(Ready::Now) => {}
                    Ok(Ready::Ended) => return Err(connection.ended()),
                    Ok(Ready::Never) => return Err(timed_out()),
                    Err(error) => {
                        return Err(OpenError::System { action: "wait", source: error.into() });
                    }
                },
                // The kernel reports this once, before the packets that came earlier.
                Err(Errno::CONNRESET) if !is_reset => is_reset = true,
                Err(Errno::CONNRESET | Errno::PIPE) => return Err(connection.ended()),
                Err(error) => {
                    return Err(OpenError::System { action: "receive", source: error.into() });
                }
            }
        };
        let Some((_, reply)) = Reply::decode(&self.exchange.buffer[..length]) else {
            return Err(connection.protocol("not a reply"));
        };
        if let Reply::Failed { failure, value, text } = reply {
            return Err(failed(connection.pid, failure, value, text));
        }
        let Packet { descriptors, lost_descriptors, .. } = packet;
        Ok(Answer { reply, descriptors, lost_descriptors })
    }
}

/// In a forked child, only this process's copies of the descriptors are closed.
impl Drop for Connection {
    fn drop(&mut self) {
        if !self.is_inherited() {
            system::shut_down(&self.socket);
        }
    }
}

fn failed(pid: u32, failure: Failure, value: u64, message: String) -> OpenError {
    match failure {
        Failure::Withdrawn => OpenError::Withdrawn { pid },
        Failure::WrongSecret => OpenError::Refused { pid, reason: Refusal::WrongSecret },
        Failure::OtherUser => {
            let exporter = u32::try_from(value).unwrap_or(u32::MAX);
            let importer = rustix::process::geteuid().as_raw();
            OpenError::Refused { pid, reason: Refusal::OtherUser { exporter, importer } }
        }
        Failure::Source => OpenError::Source { pid, message },
        Failure::TooManyFiles => OpenError::TooManyOpenFiles { side: Side::Exporter, limit: value },
        Failure::TooManyOpens => OpenError::TooManyOpens { pid, limit: value },
        Failure::TooManyInFlight => OpenError::TooManyInFlight { pid, limit: value },
    }
}

fn connect_error(ticket: &TicketParts, timeout: Duration, source: io::Error) -> OpenError {
    let pid = ticket.exporter.pid;
    if is(&source, Errno::AGAIN) {
        return OpenError::TimedOut { pid, timeout };
    }
    let is_absent = is(&source, Errno::CONNREFUSED) || is(&source, Errno::NOENT);
    if is_absent && !system::is_running(ticket.exporter) {
        return OpenError::ExporterGone { pid };
    }
    OpenError::Unreachable { pid, source }
}

fn local_error(action: &'static str, source: io::Error) -> OpenError {
    if system::is_file_limit(&source) {
        return OpenError::too_many_open_files();
    }
    OpenError::System { action, source }
}

fn is(error: &io::Error, code: Errno) -> bool {
    error.raw_os_error() == Some(code.raw_os_error())
}
