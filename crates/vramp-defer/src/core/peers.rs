//! Cards that copies are spilled to, and which copies lie on each.
//!
//! The copies of a card are in an ordered set: those that are not needed first, then the others, the
//! least recently used first. A change of a copy or of its buffer's last use is O(log n), and so is
//! each copy that [`reclaim_peer`](super::Deferrables::reclaim_peer) takes.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::{Index, IndexMut};

use super::piece::ContentPlace;
use super::{BufferId, Deferrables, PieceId};

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

/// Place of a copy among those of its card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PeerKey {
    pub peer: PeerId,
    /// The contents are nowhere else.
    pub is_sole: bool,
    pub last_use_ns: u64,
}

/// The copies on all cards.
pub(super) type PeerCopies = BTreeSet<(PeerKey, PieceId)>;

impl Deferrables {
    /// Returns where a piece belongs in the index; `None` without a copy on a card.
    pub(super) fn peer_key(&self, id: PieceId) -> Option<PeerKey> {
        let piece = self.piece(id);
        let peer = piece.copies.peer?;
        let below = piece.place == ContentPlace::SpillTier;
        let is_sole = below && !piece.copies.host && !piece.copies.disk;
        Some(PeerKey { peer, is_sole, last_use_ns: self.buffers[id.buffer].last_use_ns })
    }

    /// Updates the index after a change of a piece's place or copies. O(log n).
    pub(super) fn reindex(&mut self, id: PieceId) {
        let (now, before) = (self.peer_key(id), self.piece(id).peer_key);
        if now == before {
            return;
        }
        if let Some(key) = before {
            self.peer_copies.remove(&(key, id));
        }
        if let Some(key) = now {
            self.peer_copies.insert((key, id));
        }
        self.piece_mut(id).peer_key = now;
    }

    /// Updates the index after a change of a buffer. O(pieces log n).
    pub(super) fn reindex_buffer(&mut self, buffer: BufferId) {
        for index in 0..self.buffers[buffer].pieces.len() as u32 {
            self.reindex(PieceId { buffer, index });
        }
    }

    /// Returns the bounds of the copies on a card in the index.
    pub(super) fn peer_bounds(
        peer: PeerId,
        is_sole: bool,
    ) -> std::ops::RangeInclusive<(PeerKey, PieceId)> {
        let key = |last_use_ns| PeerKey { peer, is_sole, last_use_ns };
        let first = PieceId { buffer: BufferId::from_number(0), index: 0 };
        let last = PieceId { buffer: BufferId::from_number(u64::MAX), index: u32::MAX };
        (key(0), first)..=(key(u64::MAX), last)
    }
}
