//! What requests are about, and what follows from them.

use crate::keep::core::lock::Lock;
use crate::keep::core::page::Word;

/// A connection.
pub type Client = u64;
/// A version, by a number that is never used again.
pub type VersionKey = u64;
/// 128 random bits.
pub type VersionId = [u8; 16];
/// Bytes of the publisher's choice.
pub type Digest = [u8; 32];

/// Stands for clients of an earlier keeper that have not restored their holds yet.
pub const GHOST: Client = 0;
/// Most processes that a failure names.
pub const MAX_PIDS: usize = 16;
/// Most holders that a status names.
pub const MAX_HOLDERS: usize = 256;

/// What a draft asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    pub device: String,
    pub bytes: u64,
    /// Idle entries of a lower priority are evicted first.
    pub priority: i32,
    /// How long the entry stays without a hold, in nanoseconds; `None` for ever.
    pub kept_for_ns: Option<u64>,
}

/// The version that a draft becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewVersion {
    pub id: VersionId,
    pub bytes: u64,
    pub digest: Digest,
}

/// A version as a client of an earlier keeper has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    pub name: String,
    pub id: VersionId,
    pub terms: Terms,
    pub digest: Digest,
    pub word: Word,
    pub writer_pid: u32,
    pub is_superseded: bool,
    pub lock: Lock,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    NoSuchEntry,
    /// Processes that have the lock or the right.
    Busy {
        pids: Vec<u32>,
    },
    Torn {
        epoch: u64,
        pid: u32,
    },
    Full {
        limit: u64,
        held: u64,
        evictable: u64,
    },
    Superseded,
    NotNewer {
        epoch: u64,
    },
    NotLocked,
    Uncommitted,
    /// The entry has a current version, and the draft was for an entry without one.
    Exists,
}

/// What a request returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Opened(VersionKey),
    Granted {
        current: Option<(u64, Digest)>,
    },
    Committed(u64),
    /// The client has the lock, at this epoch.
    Locked(u64),
    Newer(u64),
    Done(u64),
    Restored {
        version: VersionKey,
        lock: Lock,
    },
    Failed(Failure),
}

/// What follows from a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Reply(Client, Outcome),
    Page { version: VersionKey, at: usize, value: u64 },
    Dropped(VersionKey),
}

/// A client that has a version open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    pub lock: Lock,
}

/// One name and what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub name: String,
    /// `None` if only a draft or older versions exist.
    pub current: Option<CurrentStatus>,
    /// Requests that wait for a lock of the current version or for the right to build.
    pub waiting: u64,
    /// Process that has the right to build.
    pub draft_pid: Option<u32>,
    /// Older versions that clients hold.
    pub superseded: u64,
}

/// The current version of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentStatus {
    pub terms: Terms,
    pub epoch: u64,
    pub is_torn: bool,
    /// [`MAX_HOLDERS`] at most.
    pub holders: Vec<Holder>,
    pub holders_len: u64,
    pub idle_ns: Option<u64>,
}
