//! A version that this process has open.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use vramp_host::{SharedTable, TableShape};

use super::adrift::{Castaway, Rescue};
use super::core::lock::Lock;
use super::core::message::{Kind, MAX_LAYOUT, MAX_PARTS, Tag, Writer};
use super::core::page::{self, PageState, Word};
use super::core::registry::types::{Failure, Terms};
use super::error::KeepError;
use super::kept;
use super::link::{Answer, Fault, Limits, Link, MISSING, local_error, too_many_files};
use super::shared::Shared;
use super::turn::{Taken, Turns};
use crate::core::message::MAX_BATCH;

/// How long a call waits before it looks again for a new keeper.
const RETRY: Duration = Duration::from_millis(20);
/// Shape of the page of a version.
const SHAPE: TableShape = TableShape { numbers: page::NUMBERS, bells: 0 };

/// One descriptor of a version.
#[derive(Debug)]
pub struct Part {
    /// Bytes that it stands for, by its publisher.
    pub len: u64,
    /// Closed on exec. The memory stays while it is open.
    pub descriptor: OwnedFd,
}

/// What does not change while a version exists.
#[derive(Debug)]
pub struct Content {
    pub name: String,
    pub id: [u8; 16],
    pub digest: [u8; 32],
    pub terms: Terms,
    pub layout: Vec<u8>,
    pub parts: Vec<Part>,
    pub page: OwnedFd,
}

/// A version that this process has open, with a lock or without. Dropping it closes it; a write lock that was not
/// committed leaves the version torn.
///
/// Calls of several threads are made one after the other.
pub struct Hold {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    content: Content,
    page: SharedTable,
    wire: Turns<Wire>,
    /// Its number at the rescuer; 0 before it has one.
    number: AtomicU64,
    /// The lock, for those that ask without a turn.
    lock: AtomicU8,
    is_adrift: AtomicBool,
    /// Forks before it was opened.
    depth: u32,
}

/// The connection, and what this client has by it.
#[derive(Debug)]
struct Wire {
    link: Option<Link>,
    lock: Lock,
    /// Epoch at which the write lock was taken.
    locked_epoch: u64,
    was_torn: bool,
}

impl Hold {
    /// Returns a hold with the lock that the keeper gave.
    pub(super) fn new(
        shared: Arc<Shared>,
        content: Content,
        link: Option<Link>,
        lock: Lock,
    ) -> Result<Hold, KeepError> {
        if !kept::is_page(&content.page) {
            return Err(KeepError::Protocol { what: "no page" });
        }
        let page = SharedTable::map(&content.page, SHAPE)
            .map_err(|error| local_error("map a page", error))?;
        let is_adrift = link.is_none();
        let wire = Wire { link: None, lock: Lock::None, locked_epoch: 0, was_torn: false };
        let inner = Inner {
            shared,
            content,
            page,
            wire: Turns::new(wire),
            number: AtomicU64::new(0),
            lock: AtomicU8::new(0),
            is_adrift: AtomicBool::new(is_adrift),
            depth: vramp_host::fork::depth(),
        };
        let hold = Hold { inner: Arc::new(inner) };
        hold.begin(link, lock).map_err(|error| local_error("watch the keeper", error))?;
        Ok(hold)
    }

    /// Notes connection and lock, and lets a thread restore the hold when the connection ends.
    fn begin(&self, link: Option<Link>, lock: Lock) -> io::Result<()> {
        let inner = &self.inner;
        let weak: Weak<Inner> = Arc::downgrade(inner);
        // The thread may look at once, and finds the lock then.
        let mut wire = inner.wire.take(Instant::now()).expect("no other thread has it yet");
        inner.locked(&mut wire, lock, inner.word().epoch);
        let number = inner.shared.rescuer.enter(weak)?;
        inner.number.store(number, Ordering::Relaxed);
        wire.link = link;
        match &wire.link {
            Some(link) => inner.watch(link),
            None => {
                inner.shared.rescuer.lost(number);
                Ok(())
            }
        }
    }

    /// Receives what an `Opened` reply announces.
    pub(super) fn receive(
        shared: &Arc<Shared>,
        name: &str,
        mut link: Link,
        mut opened: Answer,
        limits: Limits,
    ) -> Result<Hold, Fault> {
        let Some(page) = opened.descriptors.pop() else {
            return Err(if opened.lost_descriptors { too_many_files() } else { MISSING }.into());
        };
        let message = opened.message().ok_or(MISSING)?;
        let terms = message.terms().ok_or(MISSING)?;
        let id = message.array(Tag::Id).ok_or(MISSING)?;
        let digest = message.array(Tag::Digest).ok_or(MISSING)?;
        let [parts_len, layout_len] = [Tag::Parts, Tag::Layout]
            .map(|tag| message.number(tag).and_then(|number| usize::try_from(number).ok()));
        let parts_len = parts_len.filter(|len| *len <= MAX_PARTS).ok_or(MISSING)?;
        let layout_len = layout_len.filter(|len| *len <= MAX_LAYOUT).ok_or(MISSING)?;
        let parts = receive_parts(&mut link, parts_len, limits)?;
        let mut layout = Vec::with_capacity(layout_len);
        while layout.len() < layout_len {
            let first = layout.len() as u64;
            let build = |writer: Writer| writer.number(Tag::First, first);
            let answer = link.ask(Kind::GetLayout, build, &[], limits)?;
            let chunk = answer.message().and_then(|message| message.bytes(Tag::Chunk));
            let chunk = chunk.filter(|chunk| !chunk.is_empty()).ok_or(MISSING)?;
            layout.extend(chunk);
        }
        let name = name.to_owned();
        let content = Content { name, id, digest, terms, layout, parts, page };
        Ok(Hold::new(Arc::clone(shared), content, Some(link), Lock::None)?)
    }

    /// Returns the name of the entry.
    pub fn name(&self) -> &str {
        &self.inner.content.name
    }

    /// Returns the device of the version, as its publisher named it.
    pub fn device(&self) -> &str {
        &self.inner.content.terms.device
    }

    /// Returns 128 random bits that no other version has.
    pub fn version_id(&self) -> [u8; 16] {
        self.inner.content.id
    }

    /// Returns the bytes that the publisher committed with the parts.
    pub fn layout(&self) -> &[u8] {
        &self.inner.content.layout
    }

    /// Returns the digest that the publisher committed.
    pub fn digest(&self) -> [u8; 32] {
        self.inner.content.digest
    }

    /// Returns the descriptors, in address order. They stay open while the hold exists: a new keeper gets them
    /// from here.
    pub fn parts(&self) -> &[Part] {
        &self.inner.content.parts
    }

    /// Returns the epoch of the last commit of this version. No call.
    pub fn epoch(&self) -> u64 {
        self.inner.word().epoch
    }

    /// Returns true if a client changed bytes and ended without a commit. No call.
    pub fn is_torn(&self) -> bool {
        self.inner.word().state == PageState::Torn
    }

    /// Returns true if the name has another version, or none. This one stays as it is; the next
    /// [`Keeper::open`](super::Keeper::open) returns the other one. No call.
    pub fn is_superseded(&self) -> bool {
        self.inner.number(page::SUPERSEDED) != 0
    }

    /// Returns true while no keeper knows of this hold. What is mapped stays valid. No call.
    pub fn is_adrift(&self) -> bool {
        self.inner.is_adrift.load(Ordering::Relaxed)
    }

    /// Returns the lock of this hold. A read lock can be lost if the keeper ended and this process was stopped
    /// until a new one had given the write lock to another client. No call.
    pub fn held_lock(&self) -> Lock {
        match self.inner.lock.load(Ordering::Relaxed) {
            0 => Lock::None,
            1 => Lock::Read,
            _ => Lock::Write,
        }
    }

    /// Returns true if a client waits for the write lock of this version. No call.
    pub fn writer_waits(&self) -> bool {
        self.inner.number(page::WRITERS) > 0
    }

    /// Takes another lock, and returns the epoch at which this client has it. From read to write the read lock is
    /// released first, so other writers may come before; after an error the hold has no lock. One message each
    /// way.
    ///
    /// # Errors
    /// [`KeepError::Busy`] at the deadline, [`KeepError::Torn`] for a read lock of a torn version,
    /// [`KeepError::Uncommitted`] if it has the write lock.
    pub fn lock(&self, lock: Lock, deadline: Instant) -> Result<u64, KeepError> {
        let limits = self.inner.shared.limits(Some(deadline));
        self.lock_within(lock, false, limits).map_err(|fault| self.inner.error(fault, limits))
    }

    pub(super) fn lock_within(
        &self,
        lock: Lock,
        only_current: bool,
        limits: Limits,
    ) -> Result<u64, Fault> {
        let inner = &*self.inner;
        let mut wire = inner.turn(limits)?;
        if wire.link.is_none() {
            inner.reconnect(&mut wire, limits)?;
        }
        if wire.lock == lock {
            return Ok(inner.word().epoch);
        }
        if wire.lock == Lock::Write {
            return Err(Fault::Refused(Failure::Uncommitted));
        }
        inner.set_lock(&mut wire, Lock::None);
        let only_current = u64::from(only_current);
        let build = |writer: Writer| {
            writer
                .lock(lock)
                .number(Tag::WaitNs, limits.wait_ns())
                .number(Tag::OnlyCurrent, only_current)
        };
        match inner.ask(&mut wire, Kind::Lock, build, limits) {
            Ok(answer) => {
                let epoch = answer.number(Tag::Epoch)?;
                inner.locked(&mut wire, lock, epoch);
                Ok(epoch)
            }
            Err(fault) => {
                if let (Fault::Error(_), Some(link)) = (&fault, &mut wire.link) {
                    link.abandon();
                }
                Err(fault)
            }
        }
    }

    /// Lets a waiting writer write: releases the read lock, takes it again behind the writer, and returns the
    /// epoch. No call if no writer waits and the hold has the read lock.
    ///
    /// # Errors
    /// As [`Hold::lock`].
    pub fn yield_to_writer(&self, deadline: Instant) -> Result<u64, KeepError> {
        if self.held_lock() == Lock::Read && !self.writer_waits() {
            return Ok(self.epoch());
        }
        self.lock(Lock::None, deadline)?;
        self.lock(Lock::Read, deadline)
    }

    /// Commits what was written in place, and returns the new epoch. The write lock becomes `then`. One message
    /// each way. After [`KeepError::TimedOut`] or [`KeepError::Adrift`] it can be called again, and counts
    /// once; then the lock is `then` only if no other client was first ([`Hold::held_lock`]).
    ///
    /// # Errors
    /// [`KeepError::NotLocked`] without the write lock.
    pub fn commit(&self, then: Lock) -> Result<u64, KeepError> {
        let limits = self.inner.shared.limits(None);
        self.commit_within(then, limits).map_err(|fault| self.inner.error(fault, limits))
    }

    fn commit_within(&self, then: Lock, limits: Limits) -> Result<u64, Fault> {
        let inner = &*self.inner;
        let mut wire = inner.turn(limits)?;
        loop {
            if wire.lock != Lock::Write {
                return Err(Fault::Refused(Failure::NotLocked));
            }
            if inner.word().epoch > wire.locked_epoch {
                return self.committed_before(wire, then, limits);
            }
            let epoch = wire.locked_epoch;
            let Some(link) = &mut wire.link else {
                inner.reconnect(&mut wire, limits)?;
                continue;
            };
            let build = |writer: Writer| writer.lock(then).number(Tag::Epoch, epoch);
            match link.ask(Kind::Update, build, &[], limits) {
                Ok(answer) => {
                    let epoch = answer.number(Tag::Epoch)?;
                    inner.locked(&mut wire, then, epoch);
                    return Ok(epoch);
                }
                Err(Fault::Ended) => inner.lose(&mut wire),
                Err(Fault::Refused(_)) if inner.word().epoch > epoch => {
                    return self.committed_before(wire, then, limits);
                }
                Err(Fault::Refused(failure)) => {
                    inner.set_lock(&mut wire, Lock::None);
                    return Err(Fault::Refused(failure));
                }
                Err(fault) => return Err(fault),
            }
        }
    }

    /// Returns the epoch of a commit whose reply did not come in time, and takes the lock if it is free.
    fn committed_before(
        &self,
        mut wire: Taken<'_, Wire>,
        then: Lock,
        limits: Limits,
    ) -> Result<u64, Fault> {
        let inner = &*self.inner;
        let epoch = inner.word().epoch;
        inner.set_lock(&mut wire, Lock::None);
        // The keeper may have given the lock for which the earlier call asked.
        let build = |writer: Writer| writer.lock(Lock::None).number(Tag::WaitNs, 0);
        let released = inner.ask(&mut wire, Kind::Lock, build, limits);
        drop(wire);
        // Without a lock the commit is one nevertheless.
        let _ = released.and_then(|_| self.lock_within(then, false, limits));
        Ok(epoch)
    }

    /// Ends the write lock of a client that changed nothing: the version is as it was before. Also ends a read
    /// lock. One message each way.
    ///
    /// # Errors
    /// If the keeper does not answer. The lock is released anyway, at the latest with the hold.
    pub fn release_unchanged(&self) -> Result<(), KeepError> {
        let inner = &*self.inner;
        let limits = inner.shared.limits(None);
        let released = inner.turn(limits).and_then(|mut wire| {
            let word = inner.word();
            if wire.lock == Lock::Write && word.state == PageState::Writing {
                inner.set_word(Word { state: PageState::Whole, ..word });
            }
            inner.set_lock(&mut wire, Lock::None);
            inner.ask(&mut wire, Kind::Release, |writer| writer, limits)
        });
        released.map(drop).map_err(|fault| inner.error(fault, limits))
    }

    /// Takes this version off its name, if it is the current one: a newer one that was published meanwhile stays.
    /// Returns false then. Clients that have it open keep it, this one too. One message each way.
    ///
    /// # Errors
    /// If the keeper does not answer.
    pub fn remove(&self) -> Result<bool, KeepError> {
        let inner = &*self.inner;
        let limits = inner.shared.limits(None);
        inner
            .turn(limits)
            .and_then(|mut wire| inner.ask(&mut wire, Kind::RemoveHeld, |writer| writer, limits))
            .and_then(|answer| Ok(answer.number(Tag::Value)? == 1))
            .map_err(|fault| inner.error(fault, limits))
    }

    /// Waits until the entry's current version, this or another one, has an epoch after `than`, and returns it. No
    /// call if this version has it.
    ///
    /// # Errors
    /// [`KeepError::NotNewer`] at the deadline.
    pub fn wait_newer(&self, than: u64, deadline: Instant) -> Result<u64, KeepError> {
        let inner = &*self.inner;
        let epoch = self.epoch();
        if epoch > than && !self.is_superseded() {
            return Ok(epoch);
        }
        let limits = inner.shared.limits(Some(deadline));
        let build =
            |writer: Writer| writer.number(Tag::Epoch, than).number(Tag::WaitNs, limits.wait_ns());
        inner
            .turn(limits)
            .and_then(|mut wire| inner.ask(&mut wire, Kind::WaitNewer, build, limits))
            .and_then(|answer| Ok(answer.number(Tag::Epoch)?))
            .map_err(|fault| inner.error(fault, limits))
    }
}

fn receive_parts(link: &mut Link, count: usize, limits: Limits) -> Result<Vec<Part>, Fault> {
    let mut parts = Vec::with_capacity(count);
    let mut most = MAX_BATCH;
    while parts.len() < count {
        let first = parts.len() as u64;
        let build =
            |writer: Writer| writer.number(Tag::First, first).number(Tag::Parts, most as u64);
        let answer = link.ask(Kind::GetParts, build, &[], limits)?;
        let lengths = answer.message().and_then(|message| message.numbers(Tag::Lengths));
        let lengths = lengths.filter(|lengths| !lengths.is_empty()).ok_or(MISSING)?;
        if answer.lost_descriptors {
            // Those that came are the front of the batch.
            if answer.descriptors.is_empty() {
                return Err(too_many_files().into());
            }
            most = answer.descriptors.len();
        } else if answer.descriptors.len() != lengths.len() {
            return Err(MISSING.into());
        }
        for (len, descriptor) in lengths.into_iter().zip(answer.descriptors) {
            parts.push(Part { len, descriptor });
        }
        if parts.len() > count {
            return Err(MISSING.into());
        }
    }
    Ok(parts)
}

/// Closes the connection, and with it the hold.
impl Drop for Inner {
    fn drop(&mut self) {
        let number = *self.number.get_mut();
        // In a forked child the thread does not exist, and its lock may be taken for ever.
        if number != 0 && vramp_host::fork::depth() == self.depth {
            self.shared.rescuer.leave(number);
        }
        if let Some(link) = self.wire.get_mut().and_then(|wire| wire.link.as_mut()) {
            link.close();
        }
    }
}

impl Castaway for Inner {
    fn set_adrift(&self) {
        self.is_adrift.store(true, Ordering::Relaxed);
    }

    fn rescue(&self) -> Rescue {
        let Some(mut wire) = self.wire.take(Instant::now()) else { return Rescue::Busy };
        if wire.link.as_ref().is_some_and(|link| !link.is_ended()) {
            self.is_adrift.store(false, Ordering::Relaxed);
            return Rescue::Safe;
        }
        self.lose(&mut wire);
        match self.restore(&mut wire) {
            Ok(()) => Rescue::Safe,
            Err(_) => Rescue::NoKeeper,
        }
    }
}

impl Inner {
    fn watch(&self, link: &Link) -> io::Result<()> {
        let Ok(socket) = link.descriptor() else { return Ok(()) };
        self.shared.rescuer.watch(self.number.load(Ordering::Relaxed), socket)
    }

    fn number(&self, at: usize) -> u64 {
        self.page.number(at).load(Ordering::Acquire)
    }

    fn word(&self) -> Word {
        Word::decode(self.number(page::WORD))
    }

    fn set_word(&self, word: Word) {
        self.page.number(page::WORD).store(word.encode(), Ordering::Release);
    }

    fn turn(&self, limits: Limits) -> Result<Taken<'_, Wire>, Fault> {
        if vramp_host::fork::depth() != self.depth {
            return Err(KeepError::Forked.into());
        }
        let timed_out = || KeepError::TimedOut { pid: 0, waited: limits.start.elapsed() };
        self.wire.take(limits.silent_until()).ok_or_else(|| timed_out().into())
    }

    fn set_lock(&self, wire: &mut Wire, lock: Lock) {
        wire.lock = lock;
        let number = match lock {
            Lock::None => 0,
            Lock::Read => 1,
            Lock::Write => 2,
        };
        self.lock.store(number, Ordering::Relaxed);
    }

    /// Notes a lock. A writer's page says so before the caller may write.
    fn locked(&self, wire: &mut Wire, lock: Lock, epoch: u64) {
        self.set_lock(wire, lock);
        wire.locked_epoch = epoch;
        wire.was_torn = self.word().state == PageState::Torn;
        if lock == Lock::Write && !wire.was_torn {
            let pid = u64::from(std::process::id());
            self.page.number(page::WRITER_PID).store(pid, Ordering::Release);
            self.set_word(Word { epoch, state: PageState::Writing });
        }
    }

    fn lose(&self, wire: &mut Wire) {
        wire.link = None;
        self.is_adrift.store(true, Ordering::Relaxed);
    }

    /// Makes a request, of a new keeper if the old one ended.
    fn ask(
        &self,
        wire: &mut Wire,
        kind: Kind,
        build: impl Fn(Writer) -> Writer,
        limits: Limits,
    ) -> Result<Answer, Fault> {
        loop {
            let Some(link) = &mut wire.link else {
                self.reconnect(wire, limits)?;
                continue;
            };
            match link.ask(kind, &build, &[], limits) {
                Err(Fault::Ended) => self.lose(wire),
                result => return result,
            }
        }
    }

    /// Connects to a new keeper and restores the hold there.
    fn reconnect(&self, wire: &mut Wire, limits: Limits) -> Result<(), Fault> {
        let until = limits.silent_until();
        loop {
            match self.restore(wire) {
                Err(Fault::Ended) => {}
                result => return result,
            }
            if Instant::now() + RETRY >= until {
                return Err(KeepError::Adrift { name: self.content.name.clone() }.into());
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Restores the hold, if a keeper answers. No deadline of a call cuts it short: the keeper would take what it
    /// had got of the lock for another client's.
    fn restore(&self, wire: &mut Wire) -> Result<(), Fault> {
        let limits = self.shared.limits(None);
        let mut link = self.shared.connect(limits)?;
        let restored = self.restore_by(&mut link, wire.lock, limits);
        let lock = restored.inspect_err(|_| link.close())?;
        self.set_lock(wire, lock);
        wire.link = Some(link);
        self.is_adrift.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the lock that the keeper gave.
    fn restore_by(&self, link: &mut Link, lock: Lock, limits: Limits) -> Result<Lock, Fault> {
        let content = &self.content;
        let build = |writer: Writer| {
            writer
                .bytes(Tag::Name, content.name.as_bytes())
                .bytes(Tag::Id, &content.id)
                .bytes(Tag::Digest, &content.digest)
                .terms(&content.terms)
                .lock(lock)
        };
        let mut answer = link.ask(Kind::Restore, build, &[content.page.as_fd()], limits)?;
        if answer.number(Tag::Wanted)? == 1 {
            let parts: Vec<(u64, BorrowedFd<'_>)> =
                content.parts.iter().map(|part| (part.len, part.descriptor.as_fd())).collect();
            link.upload(&parts, &content.layout, limits)?;
            let build = |writer: Writer| {
                writer
                    .number(Tag::Parts, content.parts.len() as u64)
                    .number(Tag::Layout, content.layout.len() as u64)
            };
            answer = link.ask(Kind::Restored, build, &[], limits)?;
        }
        let lock = answer.message().and_then(|message| message.lock()).ok_or(MISSING)?;
        self.watch(link).map_err(|error| local_error("watch the keeper", error))?;
        Ok(lock)
    }

    fn error(&self, fault: Fault, limits: Limits) -> KeepError {
        let name = &self.content.name;
        match fault {
            Fault::Ended => KeepError::Adrift { name: name.clone() },
            fault => fault.error(self.shared.context(name, limits)),
        }
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("name", &self.name())
            .field("epoch", &self.epoch())
            .field("lock", &self.held_lock())
            .field("is_adrift", &self.is_adrift())
            .finish_non_exhaustive()
    }
}
