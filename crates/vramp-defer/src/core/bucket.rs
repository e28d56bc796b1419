//! What leaves together, and what the cost of its eviction depends on.

use super::buffer_state::{Buffer, Hint};
use super::piece::{ContentPlace, Piece};
use super::{PieceId, RangeId, SpillTier};
use vramp_core::Bytes;

/// Classes of victims. A lower class leaves first, whatever it costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EvictionClass {
    /// No reason to keep it.
    #[default]
    Idle,
    /// Restored within the cooldown, or hinted as needed soon.
    NeededSoon,
    /// Work on it is in flight: freeing its memory takes a wait.
    InUse,
}

/// What leaves together: a piece, or all pieces of a group that have memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Unit {
    Piece(PieceId),
    Group(RangeId),
}

/// All that the cost of evicting a unit depends on, except for its last use. In the order of the
/// classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BucketKey {
    pub standing: EvictionClass,
    pub priority: i32,
    pub hint: Hint,
    /// Memory that becomes free.
    pub frees: Bytes,
    /// Contents without a copy, rounded up.
    pub dirty: Bytes,
    /// Contents with a copy, rounded up.
    pub clean: Bytes,
    /// Slowest tier that clean contents are restored from.
    pub from: Option<SpillTier>,
    /// Other cards may hold the contents.
    pub may_use_peers: bool,
}

impl BucketKey {
    /// Adds a piece that leaves together with the others.
    pub fn add(&mut self, piece: &Piece, buffer: &Buffer) {
        self.standing = self.standing.max(standing(buffer));
        self.priority = self.priority.max(buffer.priority);
        self.hint = self.hint.sooner(buffer.hint);
        if piece.place != ContentPlace::Card {
            return;
        }
        match piece.copies.best() {
            None => {
                self.dirty += piece.len;
                self.may_use_peers &= !buffer.readable;
            }
            Some(from) => {
                self.clean += piece.len;
                self.from = self.from.max(Some(from));
            }
        }
    }
}

fn standing(buffer: &Buffer) -> EvictionClass {
    if !buffer.uses.is_empty() {
        EvictionClass::InUse
    } else if buffer.hint == Hint::WillNeed || buffer.cools_at.is_some() {
        EvictionClass::NeededSoon
    } else {
        EvictionClass::Idle
    }
}
