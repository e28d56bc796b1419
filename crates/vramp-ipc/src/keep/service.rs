//! What the keeper's thread does for one connection.
//!
//! A connection has one request at a time. A new one ends what the one before it waits for.
//!
//! A process that is killed closes its sockets before or after the driver has ended its work on the GPU, in any
//! order, and both are over when the process is. So a writer that did not say that it closes its hold has the lock
//! until its process is gone, and nothing of it writes any more when another client gets the lock.

use std::collections::{BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::io::Errno;

use super::close::Closer;
use super::core::lock::Lock;
use super::core::message::{
    Kind, MAX_CHUNK, MAX_MESSAGE, Message, NEWEST, OLDEST, Refused, Tag, Writer, encode_current,
    encode_failure, encode_status,
};
use super::core::page::{self, PageState};
use super::core::registry::Registry;
use super::core::registry::types::{
    Client, Effect, NewVersion, Outcome, Restored, Terms, VersionKey,
};
use super::kept::{self, Kept, Upload};
use crate::core::message::MAX_BATCH;
use crate::server::event_loop::{Connected, Next, Service};
use crate::system::{self, Packet};

/// Requests that a connection may make before the next connection is served.
const REQUESTS_IN_TURN: usize = 16;
/// Most names of one reply to a list.
const LISTED: usize = 256;

/// State of one connection.
#[derive(Default)]
pub struct Session {
    is_greeted: bool,
    /// The client said so.
    is_closed: bool,
    /// The connection ended, and the process may still write.
    is_over: bool,
    upload: Upload,
    /// A version of an earlier keeper whose descriptors are on their way.
    restoring: Option<(Restored, OwnedFd)>,
}

/// Replies of one connection that are not sent yet.
#[derive(Default)]
struct Line {
    /// Of the request that is answered next.
    sequence: u32,
    replies: VecDeque<Reply>,
}

/// A reply before its descriptors are duplicated by sending them.
enum Reply {
    Bytes(Vec<u8>),
    Opened { sequence: u32, version: VersionKey },
    Parts { sequence: u32, version: VersionKey, first: usize, most: usize },
}

/// The keeper's state. Its thread alone has it.
pub struct KeepService {
    registry: Registry,
    kept: FxHashMap<VersionKey, Kept>,
    lines: FxHashMap<Client, Line>,
    woken: BTreeSet<Client>,
    closer: Closer,
    /// Replies that wait until so many versions are closed.
    delayed: VecDeque<(u64, Client, Reply)>,
    start: Instant,
    idle_exit: Option<Duration>,
    idle_since: Option<Instant>,
    is_stopping: bool,
    socket_path: PathBuf,
    status: StatusFile,
    /// Descriptors of versions and uploads.
    descriptors: usize,
    most_descriptors: usize,
    buffer: Vec<u8>,
}

/// A file that says which process is the keeper and how many holds it has, for the next one.
pub struct StatusFile {
    file: OwnedFd,
    shown: Option<u64>,
}

impl StatusFile {
    pub fn new(file: OwnedFd) -> StatusFile {
        StatusFile { file, shown: None }
    }

    /// One system call if the number changed.
    fn show_holds(&mut self, holds: u64) {
        if self.shown != Some(holds) {
            let text = format!("{}\n{holds:020}\n", std::process::id());
            // A number that is missing makes the next keeper wait longer.
            let _ = rustix::io::pwrite(&self.file, text.as_bytes(), 0);
            self.shown = Some(holds);
        }
    }
}

/// Returns the process and the number of holds that a status file has.
pub fn read_status(text: &str) -> (Option<u32>, Option<u64>) {
    let mut lines = text.lines();
    let pid = lines.next().and_then(|line| line.parse().ok());
    (pid, lines.next().and_then(|line| line.parse().ok()))
}

/// What a keeper is started with.
pub struct ServiceParts {
    pub limit: Option<u64>,
    pub idle_exit: Option<Duration>,
    /// How long clients of an earlier keeper may restore what they hold, and how many holds it had.
    pub settles_in: Option<(Duration, u64)>,
    pub socket_path: PathBuf,
    pub status: StatusFile,
    pub most_descriptors: usize,
    pub closer: Closer,
}

impl KeepService {
    pub fn new(parts: ServiceParts) -> KeepService {
        let ServiceParts {
            limit,
            idle_exit,
            settles_in,
            socket_path,
            status,
            most_descriptors,
            closer,
        } = parts;
        let expected_holds = settles_in.map_or(0, |(_, holds)| holds);
        let settles_at = settles_in.map(|(settles_in, _)| nanoseconds(settles_in));
        let mut service = KeepService {
            registry: Registry::new(limit, settles_at, expected_holds),
            kept: FxHashMap::default(),
            lines: FxHashMap::default(),
            woken: BTreeSet::new(),
            closer,
            delayed: VecDeque::new(),
            start: Instant::now(),
            idle_exit,
            idle_since: None,
            is_stopping: false,
            socket_path,
            status,
            descriptors: 0,
            most_descriptors,
            buffer: vec![0; MAX_MESSAGE],
        };
        service.run_effects();
        service
    }

    fn set_now(&mut self) {
        self.registry.set_now(nanoseconds(self.start.elapsed()));
    }

    fn until(&self, message: &Message<'_>) -> Option<u64> {
        let wait = message.number(Tag::WaitNs)?;
        Some(nanoseconds(self.start.elapsed()).saturating_add(wait))
    }

    /// Returns `None` if the message breaks the rules.
    fn handle(
        &mut self,
        client: Client,
        session: &mut Session,
        message: &Message<'_>,
        mut packet: Packet,
    ) -> Option<()> {
        match message.kind {
            Kind::Hello => return self.greet(client, session, message),
            _ if !session.is_greeted => return None,
            Kind::Ping => {
                self.answer(client, Writer::new(Kind::Done, message.sequence));
                return Some(());
            }
            Kind::Close => {
                session.is_closed = true;
                return Some(());
            }
            Kind::PutParts => return self.put_parts(client, session, message, packet),
            Kind::PutLayout => return self.put_layout(client, session, message),
            _ => {}
        }
        self.line(client).sequence = message.sequence;
        self.registry.cancel(client);
        match message.kind {
            Kind::Open if self.registry.is_new(client) => {
                let until = self.until(message)?;
                self.registry.open(client, message.name(Tag::Name)?, until);
            }
            Kind::Draft if self.registry.is_new(client) => {
                let until = self.until(message)?;
                let (name, terms) = (message.name(Tag::Name)?, message.terms()?);
                let unless_current = message.number(Tag::UnlessCurrent) == Some(1);
                self.registry.draft(client, name, terms, until, unless_current);
            }
            Kind::Commit if self.registry.has_draft(client) => match packet.descriptors.pop() {
                Some(page) => self.commit(client, session, message, page)?,
                None => self.lacks_page(client, &packet)?,
            },
            Kind::Restore if self.registry.is_new(client) && session.restoring.is_none() => {
                match packet.descriptors.pop() {
                    Some(page) => self.restore(client, session, message, page)?,
                    None => self.lacks_page(client, &packet)?,
                }
            }
            Kind::Restored => self.restored(client, session, message)?,
            Kind::List => self.list(client, message)?,
            Kind::Remove => self.registry.remove(client, message.name(Tag::Name)?),
            Kind::Evict => {
                let bytes = message.number(Tag::Bytes)?;
                self.registry.evict(client, message.name(Tag::Device)?, bytes);
            }
            Kind::Stop => {
                self.is_stopping = true;
                self.answer(client, Writer::new(Kind::Done, message.sequence));
            }
            _ => self.handle_held(client, message)?,
        }
        Some(())
    }

    /// Refuses a request that came without its page, because this process has no descriptor left.
    fn lacks_page(&mut self, client: Client, packet: &Packet) -> Option<()> {
        packet.lost_descriptors.then(|| self.refuse(client, Refused::TooManyFiles))
    }

    /// Handles the request of a client that has a version open.
    fn handle_held(&mut self, client: Client, message: &Message<'_>) -> Option<()> {
        let version = self.registry.held(client)?;
        let sequence = message.sequence;
        match message.kind {
            Kind::Update => {
                let epoch = message.number(Tag::Epoch)?;
                self.registry.update(client, version, message.lock()?, epoch);
            }
            Kind::Lock => {
                let until = self.until(message)?;
                let only_current = message.number(Tag::OnlyCurrent) == Some(1);
                let lock = message.lock()?;
                let has_written = self.has_written(client);
                if lock == Lock::None && self.registry.written(client).is_some() {
                    // The client does not know that it has the lock: the grant came after its deadline.
                    self.registry.release(client, version, has_written);
                } else {
                    self.registry.lock(client, version, lock, until, only_current);
                }
            }
            Kind::Release => {
                let has_written = self.has_written(client);
                self.registry.release(client, version, has_written);
            }
            Kind::RemoveHeld => self.registry.remove_held(client, version),
            Kind::WaitNewer => {
                let until = self.until(message)?;
                self.registry.wait_newer(client, version, message.number(Tag::Epoch)?, until);
            }
            Kind::GetParts => {
                let first = usize::try_from(message.number(Tag::First)?).ok()?;
                if first >= self.kept.get(&version)?.parts.len() {
                    return None;
                }
                let most = message.number(Tag::Parts)?.clamp(1, MAX_BATCH as u64) as usize;
                self.push(client, Reply::Parts { sequence, version, first, most });
            }
            Kind::GetLayout => {
                let first = usize::try_from(message.number(Tag::First)?).ok()?;
                let layout = &self.kept.get(&version)?.layout;
                let rest = layout.get(first..)?;
                let chunk = &rest[..rest.len().min(MAX_CHUNK)];
                let reply = Writer::new(Kind::Done, sequence).bytes(Tag::Chunk, chunk);
                self.answer(client, reply);
            }
            _ => return None,
        }
        Some(())
    }

    fn greet(
        &mut self,
        client: Client,
        session: &mut Session,
        message: &Message<'_>,
    ) -> Option<()> {
        let (oldest, newest) = (message.number(Tag::Oldest)?, message.number(Tag::Newest)?);
        let common = newest.min(NEWEST);
        session.is_greeted = common >= oldest.max(OLDEST);
        let reply = if session.is_greeted {
            Writer::new(Kind::Done, message.sequence).number(Tag::Newest, common)
        } else {
            Writer::new(Kind::Failed, message.sequence)
                .number(Tag::Code, Refused::Version as u64)
                .number(Tag::Oldest, OLDEST)
                .number(Tag::Newest, NEWEST)
        };
        self.answer(client, reply);
        Some(())
    }

    fn put_parts(
        &mut self,
        client: Client,
        session: &mut Session,
        message: &Message<'_>,
        packet: Packet,
    ) -> Option<()> {
        if !self.registry.has_draft(client) && session.restoring.is_none() {
            return None;
        }
        let lengths = message.numbers(Tag::Lengths)?;
        let is_over = self.descriptors + lengths.len() > self.most_descriptors;
        if packet.lost_descriptors || is_over || session.upload.is_short {
            // What arrived is closed, so that others have descriptors; the commit fails.
            session.upload.is_short = true;
            self.descriptors -= session.upload.parts.len();
            self.closer.close(std::mem::take(&mut session.upload.parts));
            return Some(());
        }
        session.upload.add_parts(&lengths, packet.descriptors)?;
        self.descriptors += lengths.len();
        Some(())
    }

    fn put_layout(
        &mut self,
        client: Client,
        session: &mut Session,
        message: &Message<'_>,
    ) -> Option<()> {
        if !self.registry.has_draft(client) && session.restoring.is_none() {
            return None;
        }
        session.upload.add_layout(message.bytes(Tag::Chunk)?)
    }

    /// Takes what a client sent, if all of it came.
    fn take_upload(
        &mut self,
        client: Client,
        session: &mut Session,
        expected: [u64; 2],
    ) -> Option<Option<Upload>> {
        if session.upload.is_short {
            self.refuse(client, Refused::TooManyFiles);
            return Some(None);
        }
        let upload = std::mem::take(&mut session.upload);
        self.descriptors -= upload.parts.len();
        let found = [upload.parts.len() as u64, upload.layout.len() as u64];
        (found == expected).then_some(Some(upload))
    }

    fn commit(
        &mut self,
        client: Client,
        session: &mut Session,
        message: &Message<'_>,
        page: OwnedFd,
    ) -> Option<()> {
        let expected = [message.number(Tag::Parts)?, message.number(Tag::Layout)?];
        let (id, digest) = (message.array(Tag::Id)?, message.array(Tag::Digest)?);
        let then = message.lock()?;
        if self.registry.knows(&id) {
            return None;
        }
        if !kept::is_page(&page) {
            self.refuse(client, Refused::Page);
            return Some(());
        }
        let Some(upload) = self.take_upload(client, session, expected)? else { return Some(()) };
        let new = NewVersion { id, digest, bytes: upload.bytes };
        if let Some(version) = self.registry.commit(client, new, then) {
            self.keep(version, id, digest, page, upload);
        }
        Some(())
    }

    fn keep(
        &mut self,
        version: VersionKey,
        id: [u8; 16],
        digest: [u8; 32],
        page: OwnedFd,
        upload: Upload,
    ) {
        let Upload { parts, layout, .. } = upload;
        let kept = Kept { id, digest, page, parts, layout };
        self.descriptors += kept.descriptors();
        self.kept.insert(version, kept);
    }

    fn restore(
        &mut self,
        client: Client,
        session: &mut Session,
        message: &Message<'_>,
        page: OwnedFd,
    ) -> Option<()> {
        if !kept::is_page(&page) {
            self.refuse(client, Refused::Page);
            return Some(());
        }
        let word = kept::read_word(&page);
        if word.epoch == 0 {
            return None;
        }
        let restored = Restored {
            name: message.name(Tag::Name)?.to_owned(),
            id: message.array(Tag::Id)?,
            terms: message.terms()?,
            digest: message.array(Tag::Digest)?,
            word,
            writer_pid: kept::read_number(&page, page::WRITER_PID) as u32,
            is_superseded: kept::read_number(&page, page::SUPERSEDED) != 0,
            lock: message.lock()?,
        };
        if self.registry.knows(&restored.id) {
            self.registry.restore(client, restored);
        } else {
            session.restoring = Some((restored, page));
            let reply = Writer::new(Kind::Done, message.sequence).number(Tag::Wanted, 1);
            self.answer(client, reply);
        }
        Some(())
    }

    fn restored(
        &mut self,
        client: Client,
        session: &mut Session,
        message: &Message<'_>,
    ) -> Option<()> {
        let (restored, page) = session.restoring.take()?;
        let expected = [message.number(Tag::Parts)?, message.number(Tag::Layout)?];
        let Some(upload) = self.take_upload(client, session, expected)? else { return Some(()) };
        if upload.bytes != restored.terms.bytes {
            return None;
        }
        let (id, digest) = (restored.id, restored.digest);
        let version = self.registry.restore(client, restored);
        // Another client may have restored it meanwhile; then these descriptors are closed.
        if !self.kept.contains_key(&version) {
            self.keep(version, id, digest, page, upload);
        }
        Some(())
    }

    fn list(&mut self, client: Client, message: &Message<'_>) -> Option<()> {
        let after = std::str::from_utf8(message.bytes(Tag::Name)?).ok()?;
        let mut reply = Writer::new(Kind::Done, message.sequence);
        let found = self.registry.list(after, LISTED);
        let mut sent = 0;
        for status in &found {
            let bytes = encode_status(status);
            if reply.len() + bytes.len() + 32 > MAX_MESSAGE {
                break;
            }
            reply = reply.bytes(Tag::Entry, &bytes);
            sent += 1;
        }
        let has_more = sent < found.len() || found.len() == LISTED;
        self.answer(client, reply.number(Tag::More, u64::from(has_more)));
        Some(())
    }

    /// Returns true if the page says that a client may have changed bytes without a commit.
    fn has_written(&self, client: Client) -> bool {
        let kept = self.registry.written(client).and_then(|version| self.kept.get(&version));
        kept.is_some_and(|kept| kept::read_word(&kept.page).state == PageState::Writing)
    }

    // --- Replies ---

    fn line(&mut self, client: Client) -> &mut Line {
        self.lines.entry(client).or_default()
    }

    fn push(&mut self, client: Client, reply: Reply) {
        self.line(client).replies.push_back(reply);
    }

    fn answer(&mut self, client: Client, reply: Writer) {
        self.push(client, Reply::Bytes(reply.finish()));
    }

    fn refuse(&mut self, client: Client, refused: Refused) {
        let sequence = self.line(client).sequence;
        let reply = Writer::new(Kind::Failed, sequence)
            .number(Tag::Code, refused as u64)
            .number(Tag::Limit, system::open_file_limit());
        self.answer(client, reply);
    }

    /// Does what the requests caused, in its order: pages say it before clients hear it.
    fn run_effects(&mut self) {
        // Holds that end with the keeper are what the next one waits for.
        if !self.is_stopping {
            self.status.show_holds(self.registry.holds());
        }
        let closed = self.closer.sent();
        for effect in self.registry.take_effects() {
            match effect {
                Effect::Reply(client, outcome) => {
                    let sequence = self.line(client).sequence;
                    let reply = encode(sequence, outcome);
                    let sent = self.closer.sent();
                    if sent > closed {
                        // It may say that memory is free.
                        self.delayed.push_back((sent, client, reply));
                    } else {
                        self.push(client, reply);
                        self.woken.insert(client);
                    }
                }
                Effect::Page { version, at, value } => {
                    if let Some(kept) = self.kept.get(&version) {
                        kept::write_number(&kept.page, at, value);
                    }
                }
                Effect::Dropped(version) => {
                    if let Some(kept) = self.kept.remove(&version) {
                        self.descriptors -= kept.descriptors();
                        self.closer.close(kept.parts);
                    }
                }
            }
        }
    }

    /// Sends replies whose memory was freed.
    fn send_delayed(&mut self) {
        let done = self.closer.done();
        while self.delayed.front().is_some_and(|(at, ..)| *at <= done) {
            let Some((_, client, reply)) = self.delayed.pop_front() else { return };
            // The client may have ended meanwhile.
            if let Some(line) = self.lines.get_mut(&client) {
                line.replies.push_back(reply);
                self.woken.insert(client);
            }
        }
    }

    /// Sends the replies of a connection until its queue is full.
    fn flush(&mut self, connected: &Connected) -> Next {
        let Some(line) = self.lines.get_mut(&connected.token) else { return Next::Readable };
        while let Some(reply) = line.replies.front() {
            match send(&connected.socket, reply, &self.kept, &self.registry) {
                Ok(()) => drop(line.replies.pop_front()),
                Err(Errno::AGAIN) => return Next::Writable,
                // The client is gone. What it sent before is read nevertheless: it may say that it closes.
                Err(_) => line.replies.clear(),
            }
        }
        Next::Readable
    }
}

impl KeepService {
    fn serve_requests(&mut self, connected: &Connected, session: &mut Session) -> Next {
        let client = connected.token;
        for _ in 0..REQUESTS_IN_TURN {
            match self.flush(connected) {
                Next::Readable => {}
                other => return other,
            }
            let mut buffer = std::mem::take(&mut self.buffer);
            let received = system::receive(&connected.socket, &mut buffer);
            let is_good = match received {
                Err(Errno::AGAIN) => {
                    self.buffer = buffer;
                    return Next::Readable;
                }
                // The kernel says once, before the packets that came earlier, that a reply was not read.
                Err(Errno::CONNRESET) => true,
                Ok(packet) if packet.length > 0 && !packet.is_cut => {
                    Message::decode(&buffer[..packet.length])
                        .and_then(|message| self.handle(client, session, &message, packet))
                        .is_some()
                }
                _ => false,
            };
            self.buffer = buffer;
            self.run_effects();
            if !is_good {
                return Next::End;
            }
        }
        self.flush(connected)
    }
}

impl Service for KeepService {
    type Session = Session;

    fn begin(&mut self, connected: &Connected) -> Session {
        let peer = vramp_host::peer::peer(&connected.socket);
        let pid = peer.ok().and_then(|peer| peer.pid).map_or(0, u32::from);
        self.registry.begin(connected.token, pid);
        self.lines.insert(connected.token, Line::default());
        Session::default()
    }

    fn serve(&mut self, connected: &Connected, session: &mut Session) -> Next {
        self.set_now();
        let client = connected.token;
        let next =
            if session.is_over { Next::End } else { self.serve_requests(connected, session) };
        if next == Next::End && !session.is_closed && self.has_written(client) {
            session.is_over = true;
            self.registry.cancel(client);
            self.run_effects();
            return Next::EndWithProcess;
        }
        next
    }

    fn end(&mut self, connected: &Connected, session: Session) {
        self.set_now();
        let client = connected.token;
        let has_written = self.has_written(client);
        self.registry.end(client, has_written);
        self.descriptors -= session.upload.parts.len();
        self.closer.close(session.upload.parts);
        self.run_effects();
        self.lines.remove(&client);
    }

    fn refusal(&self, admitted_uid: u32) -> Vec<u8> {
        Writer::new(Kind::Failed, 0)
            .number(Tag::Code, Refused::OtherUser as u64)
            .number(Tag::Value, u64::from(admitted_uid))
            .finish()
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.closer.event())
    }

    fn next_woken(&mut self) -> Option<Client> {
        self.woken.pop_first()
    }

    fn deadline(&self) -> Option<Instant> {
        let table = self.registry.next_deadline().map(|ns| self.start + Duration::from_nanos(ns));
        let exit = self.idle_exit.filter(|_| self.registry.is_idle());
        let exit = exit.map(|exit| self.idle_since.map_or_else(Instant::now, |at| at + exit));
        [table, exit].into_iter().flatten().min()
    }

    fn stopping(&mut self) {
        self.is_stopping = true;
        // With holders left, the file tells the next keeper to wait for them.
        if self.registry.holds() == 0 {
            // Another process of the user may have removed it.
            let _ = std::fs::remove_file(&self.socket_path);
        }
    }

    fn tick(&mut self) -> bool {
        self.set_now();
        self.send_delayed();
        self.registry.tick();
        self.run_effects();
        let now = Instant::now();
        if !self.registry.is_idle() {
            self.idle_since = None;
        } else if self.idle_since.is_none() {
            self.idle_since = Some(now);
        }
        let idle = self.idle_since.zip(self.idle_exit);
        let is_over = self.is_stopping || idle.is_some_and(|(since, exit)| since + exit <= now);
        if is_over {
            self.stopping();
        }
        !is_over
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn encode(sequence: u32, outcome: Outcome) -> Reply {
    let done = Writer::new(Kind::Done, sequence);
    let reply = match outcome {
        Outcome::Opened(version) => return Reply::Opened { sequence, version },
        Outcome::Granted { current } => encode_current(done, current),
        Outcome::Committed(epoch) | Outcome::Locked(epoch) | Outcome::Newer(epoch) => {
            done.number(Tag::Epoch, epoch)
        }
        Outcome::Done(value) => done.number(Tag::Value, value),
        Outcome::Restored { lock, .. } => done.number(Tag::Wanted, 0).lock(lock),
        Outcome::Failed(failure) => encode_failure(Writer::new(Kind::Failed, sequence), &failure),
    };
    Reply::Bytes(reply.finish())
}

/// Sends a reply, or nothing if the queue is full.
fn send(
    socket: &OwnedFd,
    reply: &Reply,
    kept: &FxHashMap<VersionKey, Kept>,
    registry: &Registry,
) -> Result<(), Errno> {
    match reply {
        Reply::Bytes(bytes) => system::send(socket, bytes, &[]),
        Reply::Opened { sequence, version } => {
            let known = kept.get(version).ok_or(Errno::BADF)?;
            let bytes = opened(*sequence, known, registry.terms(*version));
            match system::send(socket, &bytes, &[known.page.as_fd()]) {
                Err(Errno::TOOMANYREFS) => system::send(socket, &in_flight(*sequence), &[]),
                result => result,
            }
        }
        Reply::Parts { sequence, version, first, most } => {
            let parts = &kept.get(version).ok_or(Errno::BADF)?.parts;
            let mut count = (parts.len() - first).min(*most);
            loop {
                let batch = &parts[*first..first + count];
                let lengths: Vec<u8> =
                    batch.iter().flat_map(|part| part.len.to_le_bytes()).collect();
                let bytes = Writer::new(Kind::Done, *sequence).bytes(Tag::Lengths, &lengths);
                let descriptors: Vec<_> =
                    batch.iter().map(|part| part.descriptor.as_fd()).collect();
                match system::send(socket, &bytes.finish(), &descriptors) {
                    Err(Errno::TOOMANYREFS) if count > 1 => count /= 2,
                    Err(Errno::TOOMANYREFS) => {
                        return system::send(socket, &in_flight(*sequence), &[]);
                    }
                    result => return result,
                }
            }
        }
    }
}

fn opened(sequence: u32, kept: &Kept, terms: &Terms) -> Vec<u8> {
    Writer::new(Kind::Done, sequence)
        .bytes(Tag::Id, &kept.id)
        .bytes(Tag::Digest, &kept.digest)
        .number(Tag::Parts, kept.parts.len() as u64)
        .number(Tag::Layout, kept.layout.len() as u64)
        .terms(terms)
        .finish()
}

fn in_flight(sequence: u32) -> Vec<u8> {
    Writer::new(Kind::Failed, sequence)
        .number(Tag::Code, Refused::TooManyInFlight as u64)
        .number(Tag::Limit, system::open_file_limit())
        .finish()
}
