//! Names of buffers, ranges, pieces, moves, leases and uses.

use std::fmt;

use slotmap::{Key, KeyData, new_key_type};

use vramp_core::Bytes;

new_key_type! {
    /// Names a buffer until it is removed. A stale id misses.
    pub struct BufferId;
    /// Names a range of addresses, of one buffer or of a group. A stale id misses.
    pub struct RangeId;
}

impl BufferId {
    /// The id as one number, for C and Python.
    pub fn number(self) -> u64 {
        self.data().as_ffi()
    }

    /// The id with this number. Any number is safe: one that names nothing misses.
    pub fn from_number(number: u64) -> BufferId {
        KeyData::from_ffi(number).into()
    }
}

impl fmt::Display for BufferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "buffer {:?}", self.data())
    }
}

impl fmt::Display for RangeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "range {:?}", self.data())
    }
}

/// One piece of a buffer: what moves at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceId {
    /// Whose.
    pub buffer: BufferId,
    /// The first is 0.
    pub index: u32,
}

impl fmt::Display for PieceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "piece {} of {}", self.index, self.buffer)
    }
}

/// Names one move of one piece, until it is settled or abandoned; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MoveId(pub(super) u64);

impl fmt::Display for MoveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "move {}", self.0)
    }
}

/// Names one lease until it ends; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferLeaseId(pub(super) u64);

impl fmt::Display for BufferLeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease {}", self.0)
    }
}

/// The place in line of a request that waits; never used again. The older is the smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(super) u64);

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ticket {}", self.0)
    }
}

/// Who takes leases, by a number of the caller's: whoever would wait for its own leases, a thread for
/// example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HolderKey(pub u64);

/// A stream, by a number of the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamKey(pub u64);

/// Work that uses a buffer: a stream up to a point of its own. Numbers of one stream grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UseToken {
    /// Whose work.
    pub stream: StreamKey,
    /// Up to where.
    pub number: u64,
}

impl fmt::Display for UseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "use {} of stream {}", self.number, self.stream.0)
    }
}

/// What a lease allows. The stronger is the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Reading, beside others.
    Shared,
    /// Writing, alone.
    Exclusive,
}

/// Where contents go that leave the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SpillTier {
    /// Pinned memory of the host.
    Host,
    /// Files.
    Disk,
}

impl fmt::Display for SpillTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SpillTier::Host => "host",
            SpillTier::Disk => "disk",
        })
    }
}

/// Where a piece lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeSlice {
    /// In which range.
    pub range: RangeId,
    /// How far from its start.
    pub offset: Bytes,
    /// How many bytes of contents.
    pub len: Bytes,
}
