//! One connection to a keeper: one request at a time.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use vramp_host::PrivateFd;

use super::core::message::{
    Kind, MAX_CHUNK, MAX_MESSAGE, Message, NEWEST, OLDEST, Refused, Tag, Writer, decode_failure,
};
use super::core::registry::types::Failure;
use super::error::KeepError;
use super::server::{socket_address, socket_path};
use crate::core::message::MAX_BATCH;
use crate::system::{self, Packet};

/// How long after its deadline a call waits for the reply that says so.
const GRACE: Duration = Duration::from_millis(60);
/// How long a sender waits before it tries again to send descriptors of which too many are on their way.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(1);

/// How long a request may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The caller's deadline, if it waits for other clients.
    pub deadline: Option<Instant>,
    /// How long the keeper may be silent.
    pub silence: Duration,
    pub start: Instant,
    /// A signal ends it.
    pub is_interruptible: bool,
}

impl Limits {
    pub fn new(deadline: Option<Instant>, silence: Duration) -> Limits {
        Limits { deadline, silence, start: Instant::now(), is_interruptible: false }
    }

    /// When a call returns at the latest.
    pub fn end(&self) -> Option<Instant> {
        self.deadline.map(|deadline| deadline.max(self.start) + GRACE)
    }

    /// When a call that gets no answer from now on returns.
    pub fn silent_until(&self) -> Instant {
        let silent = Instant::now() + self.silence;
        self.end().map_or(silent, |end| end.min(silent))
    }

    /// How long the keeper should let the request wait.
    pub fn wait_ns(&self) -> u64 {
        let left = self.deadline.map(|at| at.saturating_duration_since(Instant::now()));
        left.map_or(0, |left| u64::try_from(left.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Why a request failed.
#[derive(Debug)]
pub enum Fault {
    /// The keeper ended.
    Ended,
    /// The table of names has a reason.
    Refused(Failure),
    Error(KeepError),
}

impl From<KeepError> for Fault {
    fn from(error: KeepError) -> Fault {
        Fault::Error(error)
    }
}

/// What an error names.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    pub name: &'a str,
    pub asked: u64,
    pub start: Instant,
    pub directory: &'a Path,
}

impl Fault {
    /// Returns the error of the call.
    pub fn error(self, of: Context<'_>) -> KeepError {
        let (name, waited) = (of.name.to_owned(), of.start.elapsed());
        match self {
            Fault::Error(error) => error,
            Fault::Ended => KeepError::NotRunning { socket: socket_path(of.directory) },
            Fault::Refused(failure) => match failure {
                // The last two are reasons to look again, and never the error of a call.
                Failure::NoSuchEntry | Failure::Superseded | Failure::Exists => {
                    KeepError::NoSuchEntry { name }
                }
                Failure::Busy { pids } => KeepError::Busy { name, holders: pids, waited },
                Failure::Torn { epoch, pid } => KeepError::Torn { name, epoch, pid },
                Failure::Full { limit, held, evictable } => {
                    KeepError::Full { limit, held, evictable, asked: of.asked }
                }
                Failure::NotNewer { epoch } => KeepError::NotNewer { name, epoch, waited },
                Failure::NotLocked => KeepError::NotLocked { name },
                Failure::Uncommitted => KeepError::Uncommitted { name },
            },
        }
    }
}

/// A reply.
pub struct Answer {
    bytes: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
    pub lost_descriptors: bool,
}

impl Answer {
    pub fn message(&self) -> Option<Message<'_>> {
        Message::decode(&self.bytes)
    }

    /// Returns a number of the reply.
    pub fn number(&self, tag: Tag) -> Result<u64, KeepError> {
        self.message().and_then(|message| message.number(tag)).ok_or(MISSING)
    }
}

/// A reply lacks a field.
pub const MISSING: KeepError = KeepError::Protocol { what: "a field is missing" };

/// See the module's page. Forked children do not have it.
#[derive(Debug)]
pub struct Link {
    socket: PrivateFd,
    pub pid: u32,
    sequence: u32,
}

impl Link {
    /// Connects to the keeper of a directory.
    pub fn connect(directory: &Path, limits: Limits) -> Result<Link, Fault> {
        let path = socket_path(directory);
        let Some(address) = socket_address(&path) else {
            return Err(KeepError::Path { socket: path }.into());
        };
        let socket =
            PrivateFd::open(system::socket).map_err(|error| local_error("make a socket", error))?;
        let timeout = limits.silent_until().saturating_duration_since(Instant::now());
        // A timeout of zero would be none.
        let timeout = timeout.max(Duration::from_millis(1));
        let mut link = Link { socket, pid: 0, sequence: 0 };
        if let Err(error) = system::connect(link.descriptor()?, &address, timeout) {
            return Err(match Errno::from_io_error(&error) {
                Some(Errno::NOENT | Errno::CONNREFUSED) => Fault::Ended,
                Some(Errno::AGAIN) => link.timed_out(limits).into(),
                _ => KeepError::System { action: "connect to the keeper", source: error }.into(),
            });
        }
        let peer = vramp_host::peer::peer(link.descriptor()?)
            .map_err(|source| KeepError::System { action: "identify the keeper", source })?;
        let user = rustix::process::geteuid().as_raw();
        if peer.uid != user {
            return Err(KeepError::OtherUser { keeper: peer.uid, user }.into());
        }
        link.pid = peer.pid.map_or(0, u32::from);
        let hello = |writer: Writer| writer.number(Tag::Oldest, OLDEST).number(Tag::Newest, NEWEST);
        link.ask(Kind::Hello, hello, &[], limits)?;
        Ok(link)
    }

    /// Returns the socket. It fails in a forked child.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>, KeepError> {
        self.socket.get().ok_or(KeepError::Forked)
    }

    /// Returns true if the keeper ended. One system call.
    pub fn is_ended(&self) -> bool {
        let Ok(socket) = self.descriptor() else { return true };
        let mut watched = [PollFd::new(&socket, PollFlags::RDHUP)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut watched, Some(&now)), Ok(count) if count > 0)
    }

    /// Sends a request and returns its reply. One message each way.
    pub fn ask(
        &mut self,
        kind: Kind,
        build: impl FnOnce(Writer) -> Writer,
        descriptors: &[BorrowedFd<'_>],
        limits: Limits,
    ) -> Result<Answer, Fault> {
        self.sequence = self.sequence.wrapping_add(1).max(1);
        let bytes = build(Writer::new(kind, self.sequence)).finish();
        self.send(&bytes, descriptors, limits)?;
        self.receive(limits)
    }

    /// Ends a lock that a request may still get although its caller has returned. It has no reply that anybody
    /// reads.
    pub fn abandon(&mut self) {
        self.sequence = self.sequence.wrapping_add(1).max(1);
        let request = Writer::new(Kind::Lock, self.sequence);
        let request = request.lock(super::core::lock::Lock::None).number(Tag::WaitNs, 0);
        if let Ok(socket) = self.descriptor() {
            // A queue that is full has a request that ends the wait as well.
            let _ = system::send(socket, &request.finish(), &[]);
        }
    }

    /// Says that the connection is closed by this process, and not by its end.
    pub fn close(&mut self) {
        if let Ok(socket) = self.descriptor() {
            // Without it the keeper waits for the end of the process, if this is a writer.
            let _ = system::send(socket, &Writer::new(Kind::Close, 0).finish(), &[]);
        }
    }

    /// Sends descriptors and a layout before a commit.
    pub fn upload<'a>(
        &mut self,
        parts: &[(u64, BorrowedFd<'a>)],
        layout: &[u8],
        limits: Limits,
    ) -> Result<(), Fault> {
        let mut rest = parts;
        let mut most = MAX_BATCH;
        let mut patience = limits.silent_until();
        while !rest.is_empty() {
            let count = rest.len().min(most);
            let lengths: Vec<u8> =
                rest[..count].iter().flat_map(|(len, _)| len.to_le_bytes()).collect();
            let descriptors: Vec<BorrowedFd<'a>> =
                rest[..count].iter().map(|(_, fd)| *fd).collect();
            let bytes = Writer::new(Kind::PutParts, 0).bytes(Tag::Lengths, &lengths).finish();
            match self.send(&bytes, &descriptors, limits) {
                Ok(()) => {
                    rest = &rest[count..];
                    patience = limits.silent_until();
                }
                Err(Fault::Error(KeepError::TooManyInFlight { .. })) if count > 1 => {
                    most = count / 2;
                }
                Err(Fault::Error(KeepError::TooManyInFlight { .. }))
                    if Instant::now() < patience =>
                {
                    std::thread::sleep(IN_FLIGHT_PAUSE);
                }
                Err(fault) => return Err(fault),
            }
        }
        for chunk in layout.chunks(MAX_CHUNK) {
            let bytes = Writer::new(Kind::PutLayout, 0).bytes(Tag::Chunk, chunk).finish();
            self.send(&bytes, &[], limits)?;
        }
        Ok(())
    }

    fn send(
        &mut self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        limits: Limits,
    ) -> Result<(), Fault> {
        let until = limits.silent_until();
        loop {
            match system::send(self.descriptor()?, bytes, descriptors) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) => {}
                // A refusal may lie in this end's queue.
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                    return Err(self.last_words());
                }
                Err(Errno::TOOMANYREFS) => {
                    let limit = system::open_file_limit();
                    return Err(KeepError::TooManyInFlight { limit }.into());
                }
                Err(error) => {
                    return Err(KeepError::System { action: "send", source: error.into() }.into());
                }
            }
            if !self.poll(PollFlags::OUT, until, limits)? {
                return Err(self.timed_out(limits).into());
            }
        }
    }

    /// Returns what the keeper sent before it closed the connection.
    fn last_words(&mut self) -> Fault {
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            match self.descriptor().map(|socket| system::receive(socket, &mut buffer)) {
                Ok(Ok(packet)) if packet.length > 0 => {
                    let answer = self.answer(&buffer, packet);
                    if let Some(Err(Fault::Error(error))) = answer {
                        return error.into();
                    }
                }
                _ => return Fault::Ended,
            }
        }
    }

    fn receive(&mut self, limits: Limits) -> Result<Answer, Fault> {
        let mut buffer = vec![0; MAX_MESSAGE];
        let mut silent_until = limits.silent_until();
        let mut is_pinged = false;
        let mut is_reset = false;
        loop {
            match system::receive(self.descriptor()?, &mut buffer) {
                Ok(Packet { length: 0, .. }) => return Err(Fault::Ended),
                Ok(packet) => {
                    if let Some(answer) = self.answer(&buffer, packet) {
                        return answer;
                    }
                    silent_until = limits.silent_until();
                    is_pinged = false;
                    continue;
                }
                Err(Errno::AGAIN) => {}
                // The kernel reports this once, before the packets that came earlier.
                Err(Errno::CONNRESET) if !is_reset => {
                    is_reset = true;
                    continue;
                }
                Err(Errno::CONNRESET | Errno::PIPE | Errno::NOTCONN) => return Err(Fault::Ended),
                Err(error) => {
                    return Err(
                        KeepError::System { action: "receive", source: error.into() }.into()
                    );
                }
            }
            // A keeper that is asked to wait may be silent, but not when it is asked whether it is there.
            let ping_at = silent_until.checked_sub(limits.silence / 2).unwrap_or(silent_until);
            let until = if is_pinged { silent_until } else { ping_at.max(Instant::now()) };
            if self.poll(PollFlags::IN, until.min(silent_until), limits)? {
                continue;
            }
            if is_pinged || Instant::now() >= silent_until {
                return Err(self.timed_out(limits).into());
            }
            is_pinged = true;
            let _ = system::send(self.descriptor()?, &Writer::new(Kind::Ping, 0).finish(), &[]);
        }
    }

    /// Returns the reply of the last request; `None` for others.
    fn answer(&self, buffer: &[u8], packet: Packet) -> Option<Result<Answer, Fault>> {
        let Packet { length, is_cut, lost_descriptors, descriptors } = packet;
        if is_cut {
            return Some(Err(KeepError::Protocol { what: "too long" }.into()));
        }
        let Some(message) = Message::decode(&buffer[..length]) else {
            return Some(Err(KeepError::Protocol { what: "not a reply" }.into()));
        };
        match (message.kind, message.sequence) {
            (Kind::Failed, sequence) if sequence == self.sequence || sequence == 0 => {
                Some(Err(failed(&message)))
            }
            (Kind::Done, sequence) if sequence == self.sequence => {
                let bytes = buffer[..length].to_vec();
                Some(Ok(Answer { bytes, descriptors, lost_descriptors }))
            }
            _ => None,
        }
    }

    /// Returns false at the time.
    fn poll(&self, wanted: PollFlags, until: Instant, limits: Limits) -> Result<bool, Fault> {
        let socket = self.descriptor()?;
        let mut watched = [PollFd::new(&socket, wanted)];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let limit = left.try_into().ok();
            match rustix::event::poll(&mut watched, limit.as_ref()) {
                Ok(count) => return Ok(count > 0),
                Err(Errno::INTR) if limits.is_interruptible => {
                    return Err(KeepError::Interrupted.into());
                }
                Err(Errno::INTR) => {}
                Err(error) => {
                    return Err(KeepError::System { action: "wait", source: error.into() }.into());
                }
            }
        }
    }

    fn timed_out(&self, limits: Limits) -> KeepError {
        KeepError::TimedOut { pid: self.pid, waited: limits.start.elapsed() }
    }
}

fn failed(message: &Message<'_>) -> Fault {
    if let Some(failure) = decode_failure(message) {
        return Fault::Refused(failure);
    }
    let number = |tag| message.number(tag).unwrap_or(0);
    let code = number(Tag::Code);
    let is = |refused: Refused| code == refused as u64;
    let error = if is(Refused::OtherUser) {
        let keeper = number(Tag::Value) as u32;
        KeepError::OtherUser { keeper, user: rustix::process::geteuid().as_raw() }
    } else if is(Refused::Version) {
        let theirs = (number(Tag::Oldest), number(Tag::Newest));
        KeepError::Version { ours: (OLDEST, NEWEST), theirs }
    } else if is(Refused::TooManyFiles) {
        KeepError::TooManyFiles { is_keeper: true, limit: number(Tag::Limit) }
    } else if is(Refused::TooManyInFlight) {
        KeepError::TooManyInFlight { limit: number(Tag::Limit) }
    } else {
        KeepError::Protocol { what: "an unknown failure" }
    };
    error.into()
}

/// Returns the error of a call of this process.
pub fn local_error(action: &'static str, source: std::io::Error) -> KeepError {
    if system::is_file_limit(&source) {
        return too_many_files();
    }
    KeepError::System { action, source }
}

/// This process has no descriptor left.
pub fn too_many_files() -> KeepError {
    KeepError::TooManyFiles { is_keeper: false, limit: system::open_file_limit() }
}
