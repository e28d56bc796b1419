//! The messages of a connection, as bytes.
//!
//! A message is one packet: a kind, a sequence number, and fields, each with a tag and a length. A reader skips
//! tags that it does not know. A reply has the sequence number of its request. The first request is a hello with
//! the oldest and the newest version that the client speaks; the keeper's has the newest that both speak.
//!
//! Numbers in little-endian order. Unlike those of [`crate::core::message`], messages may grow, because a keeper
//! outlives the programs that it serves.

use super::lock::Lock;
use super::registry::types::{CurrentStatus, Digest, Failure, Holder, Status, Terms};
use crate::core::message::Reader;

/// Versions of the messages that this program speaks.
pub const OLDEST: u64 = 1;
/// See [`OLDEST`].
pub const NEWEST: u64 = 1;
/// Longest message in bytes.
pub const MAX_MESSAGE: usize = 32 * 1024;
/// Most bytes of a layout in one message.
pub const MAX_CHUNK: usize = MAX_MESSAGE - 1024;
/// Most parts of a version.
pub const MAX_PARTS: usize = 65_536;
/// Longest layout in bytes.
pub const MAX_LAYOUT: usize = 16 << 20;
/// Longest name of an entry or a device in bytes.
pub const MAX_NAME: usize = 200;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Hello = 1,
    Open = 2,
    Draft = 3,
    /// Descriptors of a draft or of a restored version. No reply.
    PutParts = 4,
    /// Bytes of the layout of a draft or of a restored version. No reply.
    PutLayout = 5,
    Commit = 6,
    Update = 7,
    Lock = 8,
    GetParts = 9,
    GetLayout = 10,
    WaitNewer = 11,
    List = 12,
    Remove = 13,
    Evict = 14,
    Stop = 15,
    Restore = 16,
    /// Everything of a restored version was sent.
    Restored = 17,
    /// Answered at once, while another request waits too.
    Ping = 18,
    Release = 19,
    /// Removes the version that the client has open.
    RemoveHeld = 20,
    /// The client closes its hold, and its process goes on. No reply.
    Close = 21,
    /// The request succeeded.
    Done = 64,
    /// The request failed.
    Failed = 65,
}

impl Kind {
    const ALL: [Kind; 23] = [
        Kind::Hello,
        Kind::Open,
        Kind::Draft,
        Kind::PutParts,
        Kind::PutLayout,
        Kind::Commit,
        Kind::Update,
        Kind::Lock,
        Kind::GetParts,
        Kind::GetLayout,
        Kind::WaitNewer,
        Kind::List,
        Kind::Remove,
        Kind::Evict,
        Kind::Stop,
        Kind::Restore,
        Kind::Restored,
        Kind::Ping,
        Kind::Release,
        Kind::RemoveHeld,
        Kind::Close,
        Kind::Done,
        Kind::Failed,
    ];
}

/// What a field means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    Oldest = 1,
    Newest = 2,
    Name = 3,
    Device = 4,
    Bytes = 5,
    Priority = 6,
    KeptForNs = 7,
    WaitNs = 8,
    Lock = 9,
    OnlyCurrent = 10,
    Id = 11,
    Digest = 12,
    Epoch = 13,
    Parts = 14,
    Layout = 15,
    First = 16,
    /// Lengths of parts, one number each.
    Lengths = 17,
    Chunk = 18,
    /// 1: send the parts and the layout of a version to restore.
    Wanted = 21,
    Value = 22,
    /// A status of [`encode_status`].
    Entry = 23,
    /// A code of [`encode_failure`], or of [`Refused`].
    Code = 24,
    Limit = 25,
    Held = 26,
    Evictable = 27,
    /// Process ids.
    Pids = 28,
    Pid = 29,
    /// A holder of a status: process id, lock.
    Holder = 30,
    Waiting = 31,
    Older = 32,
    Torn = 33,
    Holders = 34,
    IdleNs = 35,
    /// 1: more follows.
    More = 36,
    /// 1: a draft only of an entry without a current version.
    UnlessCurrent = 37,
}

/// A failure that is not one of the table of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    OtherUser = 100,
    Version = 101,
    /// The keeper may open no more descriptors; `Limit` is its limit.
    TooManyFiles = 102,
    /// Too many descriptors of the user are on their way in sockets.
    TooManyInFlight = 103,
    /// A page that another process could shorten, or that is none.
    Page = 104,
}

/// Builds a message.
pub struct Writer(Vec<u8>);

impl Writer {
    pub fn new(kind: Kind, sequence: u32) -> Writer {
        let mut bytes = vec![kind as u8];
        bytes.extend(sequence.to_le_bytes());
        Writer(bytes)
    }

    pub fn number(self, tag: Tag, value: u64) -> Writer {
        self.bytes(tag, &value.to_le_bytes())
    }

    /// Adds a number if there is one.
    pub fn optional(self, tag: Tag, value: Option<u64>) -> Writer {
        match value {
            Some(value) => self.number(tag, value),
            None => self,
        }
    }

    /// Adds bytes, 65,535 at most.
    pub fn bytes(mut self, tag: Tag, bytes: &[u8]) -> Writer {
        debug_assert!(bytes.len() <= usize::from(u16::MAX), "{tag:?}");
        self.0.push(tag as u8);
        self.0.extend((bytes.len() as u16).to_le_bytes());
        self.0.extend(bytes);
        self
    }

    pub fn terms(self, terms: &Terms) -> Writer {
        self.bytes(Tag::Device, terms.device.as_bytes())
            .number(Tag::Bytes, terms.bytes)
            .number(Tag::Priority, i64::from(terms.priority).cast_unsigned())
            .optional(Tag::KeptForNs, terms.kept_for_ns)
    }

    pub fn lock(self, lock: Lock) -> Writer {
        self.number(Tag::Lock, lock_number(lock))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

fn lock_number(lock: Lock) -> u64 {
    match lock {
        Lock::None => 0,
        Lock::Read => 1,
        Lock::Write => 2,
    }
}

fn lock_of(number: u64) -> Option<Lock> {
    [Lock::None, Lock::Read, Lock::Write].into_iter().find(|lock| lock_number(*lock) == number)
}

/// A message that was received. What lacks a field that its reader needs is no message of that kind.
#[derive(Clone, Debug)]
pub struct Message<'a> {
    pub kind: Kind,
    pub sequence: u32,
    fields: Vec<(u8, &'a [u8])>,
}

impl<'a> Message<'a> {
    /// Returns the message. `None` if the bytes are none.
    pub fn decode(bytes: &'a [u8]) -> Option<Message<'a>> {
        let mut reader = Reader::new(bytes);
        let kind = reader.u8()?;
        let kind = Kind::ALL.into_iter().find(|known| *known as u8 == kind)?;
        let sequence = reader.u32()?;
        let fields = fields(reader.rest())?;
        Some(Message { kind, sequence, fields })
    }

    /// Returns the first field with the tag.
    pub fn bytes(&self, tag: Tag) -> Option<&'a [u8]> {
        self.all(tag).next()
    }

    /// Returns the fields with the tag.
    pub fn all(&self, tag: Tag) -> impl Iterator<Item = &'a [u8]> {
        self.fields.iter().filter(move |(known, _)| *known == tag as u8).map(|(_, bytes)| *bytes)
    }

    pub fn number(&self, tag: Tag) -> Option<u64> {
        self.array(tag).map(u64::from_le_bytes)
    }

    pub fn array<const N: usize>(&self, tag: Tag) -> Option<[u8; N]> {
        self.bytes(tag)?.try_into().ok()
    }

    /// Returns numbers of 8 bytes each.
    pub fn numbers(&self, tag: Tag) -> Option<Vec<u64>> {
        let (numbers, rest) = self.bytes(tag)?.as_chunks();
        rest.is_empty().then(|| numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
    }

    /// Returns a name of an entry or a device.
    pub fn name(&self, tag: Tag) -> Option<&'a str> {
        std::str::from_utf8(self.bytes(tag)?).ok().filter(|name| is_name(name))
    }

    pub fn lock(&self) -> Option<Lock> {
        lock_of(self.number(Tag::Lock)?)
    }

    pub fn terms(&self) -> Option<Terms> {
        Some(Terms {
            device: self.name(Tag::Device)?.to_owned(),
            bytes: self.number(Tag::Bytes)?,
            priority: i32::try_from(self.number(Tag::Priority)?.cast_signed()).ok()?,
            kept_for_ns: self.number(Tag::KeptForNs),
        })
    }
}

fn fields(bytes: &[u8]) -> Option<Vec<(u8, &[u8])>> {
    let mut reader = Reader::new(bytes);
    let mut fields = Vec::new();
    while let Some(tag) = reader.u8() {
        let length = reader.u16()?;
        fields.push((tag, reader.bytes(usize::from(length))?));
    }
    Some(fields)
}

/// Returns true if the text can be the name of an entry or a device.
pub fn is_name(name: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"._/:-".contains(&byte);
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(is_good)
}

/// Adds a failure of the table of names.
pub fn encode_failure(writer: Writer, failure: &Failure) -> Writer {
    let code = |writer: Writer, code| writer.number(Tag::Code, code);
    match failure {
        Failure::NoSuchEntry => code(writer, 1),
        Failure::Busy { pids } => {
            let pids: Vec<u8> = pids.iter().flat_map(|pid| u64::from(*pid).to_le_bytes()).collect();
            code(writer, 2).bytes(Tag::Pids, &pids)
        }
        Failure::Torn { epoch, pid } => {
            code(writer, 3).number(Tag::Epoch, *epoch).number(Tag::Pid, u64::from(*pid))
        }
        Failure::Full { limit, held, evictable } => code(writer, 4)
            .number(Tag::Limit, *limit)
            .number(Tag::Held, *held)
            .number(Tag::Evictable, *evictable),
        Failure::Superseded => code(writer, 5),
        Failure::NotNewer { epoch } => code(writer, 6).number(Tag::Epoch, *epoch),
        Failure::NotLocked => code(writer, 7),
        Failure::Uncommitted => code(writer, 8),
        Failure::Exists => code(writer, 9),
    }
}

/// Reads a failure of the table of names; `None` if it is not one.
pub fn decode_failure(message: &Message<'_>) -> Option<Failure> {
    let pid = |number: u64| u32::try_from(number).ok();
    Some(match message.number(Tag::Code)? {
        1 => Failure::NoSuchEntry,
        2 => {
            let pids = message.numbers(Tag::Pids)?.into_iter().map(pid).collect::<Option<_>>()?;
            Failure::Busy { pids }
        }
        3 => Failure::Torn {
            epoch: message.number(Tag::Epoch)?,
            pid: pid(message.number(Tag::Pid)?)?,
        },
        4 => Failure::Full {
            limit: message.number(Tag::Limit)?,
            held: message.number(Tag::Held)?,
            evictable: message.number(Tag::Evictable)?,
        },
        5 => Failure::Superseded,
        6 => Failure::NotNewer { epoch: message.number(Tag::Epoch)? },
        7 => Failure::NotLocked,
        8 => Failure::Uncommitted,
        9 => Failure::Exists,
        _ => return None,
    })
}

/// Returns a status as the bytes of a field.
pub fn encode_status(status: &Status) -> Vec<u8> {
    let mut writer = Writer(Vec::new())
        .bytes(Tag::Name, status.name.as_bytes())
        .number(Tag::Waiting, status.waiting)
        .number(Tag::Older, status.superseded)
        .optional(Tag::Pid, status.draft_pid.map(u64::from));
    if let Some(current) = &status.current {
        writer = writer
            .terms(&current.terms)
            .number(Tag::Epoch, current.epoch)
            .number(Tag::Torn, u64::from(current.is_torn))
            .number(Tag::Holders, current.holders_len)
            .optional(Tag::IdleNs, current.idle_ns);
        for holder in &current.holders {
            let mut bytes = holder.pid.to_le_bytes().to_vec();
            bytes.push(lock_number(holder.lock) as u8);
            writer = writer.bytes(Tag::Holder, &bytes);
        }
    }
    writer.finish()
}

/// Reads a status.
pub fn decode_status(bytes: &[u8]) -> Option<Status> {
    let message = Message { kind: Kind::List, sequence: 0, fields: fields(bytes)? };
    let holder = |bytes: &[u8]| {
        let mut reader = Reader::new(bytes);
        Some(Holder { pid: reader.u32()?, lock: lock_of(reader.u8()?.into())? })
    };
    let current = match message.number(Tag::Epoch) {
        None => None,
        Some(epoch) => Some(CurrentStatus {
            terms: message.terms()?,
            epoch,
            is_torn: message.number(Tag::Torn)? != 0,
            holders: message.all(Tag::Holder).map(holder).collect::<Option<_>>()?,
            holders_len: message.number(Tag::Holders)?,
            idle_ns: message.number(Tag::IdleNs),
        }),
    };
    Some(Status {
        name: message.name(Tag::Name)?.to_owned(),
        current,
        waiting: message.number(Tag::Waiting)?,
        draft_pid: message.number(Tag::Pid).and_then(|pid| u32::try_from(pid).ok()),
        superseded: message.number(Tag::Older)?,
    })
}

/// Adds what is current when the right to build is granted.
pub fn encode_current(writer: Writer, current: Option<(u64, Digest)>) -> Writer {
    match current {
        Some((epoch, digest)) => writer.number(Tag::Epoch, epoch).bytes(Tag::Digest, &digest),
        None => writer,
    }
}
