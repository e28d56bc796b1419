//! One buffer: its pieces, who uses it, and what keeps it where it is.

use smallvec::SmallVec;

use super::piece::Piece;
use super::uses::Uses;
use super::{Access, BufferLeaseId, RangeId};
use vramp_core::Bytes;

/// What the user knows of the next use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hint {
    /// Nothing: its last use tells.
    #[default]
    None,
    /// It comes soon: spill others first, and do not copy it out ahead.
    WillNeed,
    /// It does not come soon: what bringing it back costs does not count.
    WontNeed,
}

/// What is known of pointers that were handed outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Exposures {
    /// Until all leases and noted uses are over.
    pub stream_scoped: bool,
    /// Until the epoch ends.
    pub quiesced: bool,
    /// So many holders have to say that they are done.
    pub opaque: u32,
}

#[derive(Clone, Debug)]
pub(super) struct Buffer {
    pub len: Bytes,
    pub range: RangeId,
    pub offset: Bytes,
    pub pieces: Vec<Piece>,
    pub priority: i32,
    pub hint: Hint,
    pub last_use_ns: u64,
    pub retrieved_ns: Option<u64>,
    pub holders: SmallVec<[(BufferLeaseId, Access); 2]>,
    /// How many of the holders read it where it is.
    pub in_place: u32,
    /// How often it was read where it is since a piece came back.
    pub reads: u32,
    /// Its spilled pieces are readable at their addresses.
    pub readable: bool,
    pub uses: Uses,
    pub pins: u32,
    pub exposed: Exposures,
    /// What [`Buffer::is_unevictable`] said when the range's anchors were counted.
    pub is_counted: bool,
}

impl Buffer {
    /// It stays on the card until somebody says otherwise.
    pub fn is_unevictable(&self) -> bool {
        self.holders.len() > self.in_place as usize || self.is_pinned_or_exposed()
    }

    /// The same if no lease were held.
    pub fn is_pinned_or_exposed(&self) -> bool {
        self.pins > 0 || self.exposed.quiesced || self.exposed.opaque > 0
    }

    /// It cannot be a victim now, though perhaps as soon as its uses are over.
    pub fn stays(&self) -> bool {
        self.is_unevictable() || self.in_place > 0 || self.exposed.stream_scoped
    }
}
