//! Ids of buffers, ranges, pieces, moves, leases and uses. Unit tests count the comparisons of some.

use std::fmt;
use std::ops::{Index, IndexMut};

use slotmap::{Key, KeyData, new_key_type};

use vramp_core::Bytes;

new_key_type! {
    /// Id of a buffer until it is removed. A stale id misses.
    pub struct BufferId;
    /// Id of an address range, of one buffer or of a group. A stale id misses.
    pub struct RangeId;
    /// Id of a set of groups. A stale id misses.
    pub struct GroupSetId;
}

impl BufferId {
    /// Returns the id as a number, for C and Python.
    pub fn number(self) -> u64 {
        self.data().as_ffi()
    }

    /// Returns the id with this number. One that names no buffer misses.
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

/// One piece of a buffer: the unit of moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceId {
    /// The buffer.
    pub buffer: BufferId,
    /// Index of the piece; the first is 0.
    pub index: u32,
}

impl PieceId {
    /// Returns ids that no other one is before or after.
    pub(super) fn bounds() -> (PieceId, PieceId) {
        let first = PieceId { buffer: BufferId::from_number(0), index: 0 };
        (first, PieceId { buffer: BufferId::from_number(u64::MAX), index: u32::MAX })
    }
}

impl fmt::Display for PieceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "piece {} of {}", self.index, self.buffer)
    }
}

/// Id of one move of one piece; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MoveId(pub(super) u64);

impl fmt::Display for MoveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "move {}", self.0)
    }
}

/// Id of a lease on buffers; never reused.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), derive(PartialEq, Eq, PartialOrd, Ord, Hash))]
pub struct BufferLeaseId(pub(super) u64);

impl fmt::Display for BufferLeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease {}", self.0)
    }
}

/// Place of a request in the wait queue; never reused. The older is the smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(crate) u64);

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ticket {}", self.0)
    }
}

/// Holder of leases, by a number of the caller's choice. One that waits for its own lease would
/// deadlock: a thread, for example.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(not(test), derive(PartialEq, Eq, PartialOrd, Ord, Hash))]
pub struct HolderKey(pub u64);

/// A stream, by a number of the caller's choice.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), derive(PartialEq, Eq, PartialOrd, Ord, Hash))]
pub struct StreamKey(pub u64);

impl fmt::Display for StreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {}", self.0)
    }
}

/// Work on a stream up to a point. The numbers of one stream grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UseToken {
    /// The stream.
    pub stream: StreamKey,
    /// The point, counted by stream.
    pub number: u64,
}

impl fmt::Display for UseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "use {} of {}", self.number, self.stream)
    }
}

/// Access that a lease allows. The stronger is the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Reading, together with other readers.
    Shared,
    /// Writing all of it, alone: what was spilled is not restored. When the lease ends all counts as
    /// written; if it is cancelled the contents are as before.
    Overwrite,
    /// Reading and writing, alone.
    Exclusive,
}

impl Access {
    /// Returns true if no other lease may use the buffer meanwhile.
    pub fn is_exclusive(self) -> bool {
        self != Access::Shared
    }

    /// Returns the access that holds the buffer: overwriting excludes others as writing does.
    pub(super) fn held(self) -> Access {
        if self.is_exclusive() { Access::Exclusive } else { Access::Shared }
    }
}

/// Tiers that contents are spilled to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SpillTier {
    /// Free memory of another card, reached over the link between the two.
    Peer(PeerId),
    /// Pinned memory of the host.
    Host,
    /// Files.
    Disk,
}

impl fmt::Display for SpillTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SpillTier::Peer(peer) => peer.fmt(f),
            SpillTier::Host => f.write_str("host"),
            SpillTier::Disk => f.write_str("disk"),
        }
    }
}

/// A part of a range: the addresses of a buffer or a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeSlice {
    /// The range.
    pub range: RangeId,
    /// Offset from the start of the range.
    pub offset: Bytes,
    /// Length in bytes of contents.
    pub len: Bytes,
}

/// A card whose free memory holds copies, by its ordinal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(u8);

impl PeerId {
    /// Number of cards that may hold copies: those with the ordinals below it.
    pub const COUNT: usize = 16;

    /// Returns the id of the card with this ordinal; `None` from [`PeerId::COUNT`] on.
    pub const fn new(ordinal: u32) -> Option<PeerId> {
        if ordinal < PeerId::COUNT as u32 { Some(PeerId(ordinal as u8)) } else { None }
    }

    /// Returns the ordinal of the card.
    pub const fn ordinal(self) -> u32 {
        self.0 as u32
    }

    /// Returns all ids, by ordinal.
    pub fn all() -> impl Iterator<Item = PeerId> {
        (0..PeerId::COUNT as u8).map(PeerId)
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "card {}", self.0)
    }
}

/// A value for each card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerTable<T>([T; PeerId::COUNT]);

impl<T> PeerTable<T> {
    /// Returns the values, by ordinal.
    pub fn iter(&self) -> impl Iterator<Item = (PeerId, &T)> {
        PeerId::all().zip(&self.0)
    }
}

impl<T> Index<PeerId> for PeerTable<T> {
    type Output = T;

    fn index(&self, peer: PeerId) -> &T {
        &self.0[usize::from(peer.0)]
    }
}

impl<T> IndexMut<PeerId> for PeerTable<T> {
    fn index_mut(&mut self, peer: PeerId) -> &mut T {
        &mut self.0[usize::from(peer.0)]
    }
}
