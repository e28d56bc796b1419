//! One reservation, and the names it goes by.

use std::fmt;

use slotmap::{Key, KeyData, new_key_type};

use crate::ledger::core::SpaceId;
use vramp_core::Bytes;

new_key_type! {
    /// Names a reservation for as long as anything is charged to it. A stale id misses.
    pub struct ReservationId;
}

impl ReservationId {
    /// The id as one number, for C and Python.
    pub fn number(self) -> u64 {
        self.data().as_ffi()
    }

    /// The id with this number. Any number is safe: one that names nothing misses.
    pub fn from_number(number: u64) -> ReservationId {
        KeyData::from_ffi(number).into()
    }
}

impl fmt::Display for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "reservation {:?}", self.data())
    }
}

/// One line of work: a task, or a thread. While it waits it does not go on, so that what it holds
/// is held until it is served. Work that goes on in several threads has several owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub u64);

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "owner {}", self.0)
    }
}

/// What memory is for: a name registered by [`Ledger::add_tag`](super::Ledger::add_tag).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub(in crate::ledger::core) u32);

impl Tag {
    /// For nothing in particular.
    pub const NONE: Tag = Tag(0);

    /// The plain number: tags are dense, so it serves as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One reservation as it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationRecord {
    /// Where.
    pub space: SpaceId,
    /// Whose.
    pub owner: Owner,
    /// For what.
    pub tag: Tag,
    /// What it keeps free for its owner; zero once released.
    pub size: Bytes,
    /// What is allocated from it.
    pub used: Bytes,
    /// The most that was allocated from it at once, since it was made or its peak was reset.
    pub peak: Bytes,
    /// Its owner has given it up: what is still used is orphaned.
    pub released: bool,
    /// A policy let it grow past the limit.
    pub beyond_limit: bool,
    pub(super) place: u32,
}

impl ReservationRecord {
    /// What it takes from the space: the larger of its size and its use.
    pub fn charged(&self) -> Bytes {
        self.size.max(self.used)
    }

    /// What can still be allocated from it.
    pub fn unused(&self) -> Bytes {
        self.size.saturating_sub(self.used)
    }

    pub(super) fn share(&self) -> Share {
        let beyond = self.used.saturating_sub(self.size);
        Share {
            reserved: self.size,
            over: if self.released { Bytes::ZERO } else { beyond },
            orphaned: if self.released { beyond } else { Bytes::ZERO },
            used: self.used,
        }
    }
}

/// What one reservation adds to the sums of its space.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Share {
    pub reserved: Bytes,
    pub over: Bytes,
    pub orphaned: Bytes,
    pub used: Bytes,
}

impl Share {
    pub(super) fn charged(&self) -> Bytes {
        self.reserved + self.over + self.orphaned
    }
}
