//! Cards that copies are spilled to, and a value for each.

use std::fmt;
use std::ops::{Index, IndexMut};

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
