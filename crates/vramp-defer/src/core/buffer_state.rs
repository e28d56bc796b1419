//! One buffer: its pieces, its uses, and what keeps it where it is.

use super::holders::Holders;
use super::piece::Piece;
use super::uses::Uses;
use super::{RangeId, StreamKey};
use vramp_core::Bytes;

/// When the next use of a buffer comes, as the caller expects it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hint {
    /// Unknown: estimated by the last use.
    #[default]
    None,
    /// Soon: others leave first, and it is not copied out ahead of need.
    WillNeed,
    /// Not soon: the cost of restoring it does not count.
    WontNeed,
}

#[derive(Clone, Debug)]
pub(super) struct Buffer {
    pub len: Bytes,
    pub range: RangeId,
    pub offset: Bytes,
    pub pieces: Vec<Piece>,
    /// Length of the pieces whose contents are below the card only.
    pub deferred: Bytes,
    pub priority: i32,
    pub hint: Hint,
    pub last_use_ns: u64,
    /// Stream of the last lease that had one.
    pub last_stream: Option<StreamKey>,
    /// End of the cooldown after a restore, until that was noticed.
    pub cools_at: Option<u64>,
    /// The leases on it.
    pub holders: Holders,
    /// Number of reads in place since a piece was restored.
    pub reads: u32,
    /// Host copies of its spilled pieces are mapped at their addresses.
    pub readable: bool,
    pub uses: Uses,
    pub pins: u32,
    /// Part of its memory is pinned in the pool.
    pub has_pinned_memory: bool,
    /// True if it counts in the range's `unevictable_count`.
    pub is_counted: bool,
    /// True if it counts in the range's `kept_count`.
    pub is_kept: bool,
    /// No handle is left: it ends once nothing holds it.
    pub is_ending: bool,
}

impl Hint {
    /// Returns the one that expects the next use first.
    pub(super) fn sooner(self, other: Hint) -> Hint {
        match (self, other) {
            (Hint::WillNeed, _) | (_, Hint::WillNeed) => Hint::WillNeed,
            (Hint::None, _) | (_, Hint::None) => Hint::None,
            (Hint::WontNeed, Hint::WontNeed) => Hint::WontNeed,
        }
    }
}

impl Buffer {
    /// Returns true if it must stay on the card.
    pub fn is_unevictable(&self) -> bool {
        self.holders.use_card() || self.is_pinned()
    }

    /// Returns true if it must stay on the card even without leases.
    pub fn is_pinned(&self) -> bool {
        self.pins > 0 || self.has_pinned_memory
    }

    /// Returns true if it cannot be a victim now. It may become one when its uses are over.
    pub fn stays(&self) -> bool {
        self.is_unevictable() || self.holders.read_in_place()
    }
}
