//! One reservation, and its ids.

use std::fmt;

use slotmap::{Key, KeyData, new_key_type};

use crate::ledger::core::SpaceId;
use vramp_core::Bytes;

new_key_type! {
    /// Id of a reservation, valid as long as anything is charged to it. A stale id is not found.
    pub struct ReservationId;
}

impl ReservationId {
    /// Returns the id as one number, for C and Python.
    pub fn number(self) -> u64 {
        self.data().as_ffi()
    }

    /// Returns the id with this number. A number without a reservation is not found.
    pub fn from_number(number: u64) -> ReservationId {
        KeyData::from_ffi(number).into()
    }
}

impl fmt::Display for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "reservation {:?}", self.data())
    }
}

/// Owner of reservations: a task or a thread. Deadlock detection assumes that an owner keeps all
/// its reservations while it waits. Work in several threads has several owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub u64);

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "owner {}", self.0)
    }
}

/// A purpose of memory, for statistics; registered by [`Ledger::add_tag`](super::Ledger::add_tag).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub(in crate::ledger::core) u32);

impl Tag {
    /// No purpose.
    pub const NONE: Tag = Tag(0);

    /// Returns the number of the tag. Tags are dense, so it serves as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// State of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationRecord {
    /// Space of the reservation.
    pub space: SpaceId,
    /// Owner of the reservation.
    pub owner: Owner,
    /// Tag for statistics.
    pub tag: Tag,
    /// Bytes kept free for the owner; zero once released.
    pub size: Bytes,
    /// Bytes allocated from it.
    pub used: Bytes,
    /// High-water mark of `used` since the reservation was made or the peak was reset.
    pub peak: Bytes,
    /// True once released: bytes still in use are orphaned.
    pub released: bool,
    /// True if a policy let it grow past the limit.
    pub beyond_limit: bool,
    pub(super) place: u32,
}

impl ReservationRecord {
    /// Bytes charged to the space: the larger of size and use.
    pub fn charged(&self) -> Bytes {
        self.size.max(self.used)
    }

    /// Bytes that can still be allocated from it.
    pub fn unused(&self) -> Bytes {
        self.size.saturating_sub(self.used)
    }

    pub(super) fn share(&self) -> Share {
        let beyond = self.used.saturating_sub(self.size);
        Share {
            reserved: self.size,
            overrun: if self.released { Bytes::ZERO } else { beyond },
            orphaned: if self.released { beyond } else { Bytes::ZERO },
            used: self.used,
        }
    }
}

/// A reservation's share of the sums of its space.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Share {
    pub reserved: Bytes,
    pub overrun: Bytes,
    pub orphaned: Bytes,
    pub used: Bytes,
}

impl Share {
    pub(super) fn charged(&self) -> Bytes {
        self.reserved + self.overrun + self.orphaned
    }
}
