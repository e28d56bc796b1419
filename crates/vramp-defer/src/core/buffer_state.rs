//! One buffer: its pieces, its uses, and what keeps it where it is.
//!
//! One piece: the state of its contents, and its move.
//!
//! Places of copies in the indexes by which they are reclaimed.
//!
//! The copies of a card are in an ordered set: those that are not needed first, then the others, the
//! least recently used first. So are the copies on the host. A change of a copy or of its buffer's last
//! use is O(log n), and so is each copy that is taken.

use std::collections::BTreeSet;

use super::uses::{Holders, Uses};
use super::{MoveId, PeerId, PieceId, RangeId, SpillTier, StreamKey, UseToken};
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

/// Valid copies of a piece below the card. Each is complete and equal to the contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    /// In memory of another card.
    pub peer: Option<PeerId>,
    /// In pinned memory.
    pub host: bool,
    /// In a file.
    pub disk: bool,
}

impl Copies {
    /// No copy: contents on the card are *dirty*.
    pub const NONE: Copies = Copies { peer: None, host: false, disk: false };

    /// Returns true if there is a copy: contents on the card are *clean*.
    pub const fn any(self) -> bool {
        self.peer.is_some() || self.host || self.disk
    }

    /// Returns the tier that is read fastest.
    pub const fn best(self) -> Option<SpillTier> {
        match self {
            Copies { peer: Some(peer), .. } => Some(SpillTier::Peer(peer)),
            Copies { host: true, .. } => Some(SpillTier::Host),
            Copies { disk: true, .. } => Some(SpillTier::Disk),
            Copies::NONE => None,
        }
    }

    /// Returns all tiers with a copy, the fastest first.
    pub fn iter(self) -> impl Iterator<Item = SpillTier> {
        let host = self.host.then_some(SpillTier::Host);
        let below = host.into_iter().chain(self.disk.then_some(SpillTier::Disk));
        self.peer.map(SpillTier::Peer).into_iter().chain(below)
    }

    pub(super) fn add(&mut self, lower: SpillTier) {
        match lower {
            SpillTier::Peer(peer) => self.peer = Some(peer),
            SpillTier::Host => self.host = true,
            SpillTier::Disk => self.disk = true,
        }
    }

    pub(super) fn remove(&mut self, lower: SpillTier) {
        match lower {
            SpillTier::Peer(_) => self.peer = None,
            SpillTier::Host => self.host = false,
            SpillTier::Disk => self.disk = false,
        }
    }
}

/// Where a piece's contents are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentPlace {
    /// Nowhere: nothing was written yet.
    Empty,
    /// On the card, with or without copies below.
    Card,
    /// Below the card only.
    SpillTier,
}

/// A move that is neither settled nor abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceMove {
    Out {
        id: MoveId,
        /// Tier of the copy being made. `None` if nothing is dirty.
        to: Option<SpillTier>,
        /// The piece is a victim: its memory becomes free when the move settles.
        leaving: bool,
        /// The contents changed since: the copy is invalid.
        torn: bool,
        /// Token at which the copy is complete, once all of it is queued and has its room.
        queued: Option<UseToken>,
    },
    Restore {
        id: MoveId,
        from: SpillTier,
    },
    /// From another card to the host or the disk, or from the host to the disk.
    Push {
        id: MoveId,
        from: SpillTier,
        to: SpillTier,
    },
}

impl PieceMove {
    pub fn id(self) -> MoveId {
        match self {
            PieceMove::Out { id, .. }
            | PieceMove::Restore { id, .. }
            | PieceMove::Push { id, .. } => id,
        }
    }

    /// Returns true for the move of a victim.
    pub fn is_leaving(self) -> bool {
        matches!(self, PieceMove::Out { leaving: true, .. })
    }

    /// Returns the tier where the move will take room that it does not have yet.
    pub fn promised(self) -> Option<SpillTier> {
        match self {
            PieceMove::Out { to, queued: None, .. } => to,
            PieceMove::Push { to, .. } => Some(to),
            PieceMove::Out { .. } | PieceMove::Restore { .. } => None,
        }
    }
}

/// One piece of a buffer.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Bytes of contents.
    pub len: Bytes,
    pub place: ContentPlace,
    pub copies: Copies,
    /// Memory on the card is mapped at its address.
    pub backed: bool,
    pub motion: Option<PieceMove>,
    /// Its place in the index of copies on cards.
    pub peer_key: Option<PeerKey>,
    /// Its place in the index of copies on the host.
    pub host_key: Option<HostKey>,
    /// True if it counts in the sum of clean contents.
    pub is_counted_clean: bool,
    /// Its last use in the list of what may be copied ahead of need.
    pub clean_key: Option<u64>,
    /// It changed since it was listed.
    pub is_changed: bool,
}

impl Piece {
    pub fn new(len: Bytes) -> Piece {
        let (place, copies) = (ContentPlace::Empty, Copies::NONE);
        Piece {
            len,
            place,
            copies,
            backed: false,
            motion: None,
            peer_key: None,
            host_key: None,
            is_counted_clean: false,
            clean_key: None,
            is_changed: false,
        }
    }

    /// Returns the token at which a queued copy has read the piece.
    pub fn copied_until(&self) -> Option<UseToken> {
        match self.motion {
            Some(PieceMove::Out { queued, .. }) => queued,
            _ => None,
        }
    }

    pub fn is_dirty(&self) -> bool {
        self.place == ContentPlace::Card && !self.copies.any()
    }

    pub fn state(&self) -> PieceState {
        let copies = self.copies;
        match (self.place, self.motion) {
            (_, Some(PieceMove::Out { to, leaving: true, .. })) => {
                PieceState::Leaving { copies, to }
            }
            (_, Some(PieceMove::Out { to: Some(to), .. })) => PieceState::Cleaning { copies, to },
            (_, Some(PieceMove::Restore { from, .. })) => PieceState::Restoring { copies, from },
            (_, Some(PieceMove::Push { .. })) => PieceState::Pushing { copies },
            (ContentPlace::Empty, _) => PieceState::Empty,
            (ContentPlace::Card, _) => PieceState::Resident { copies },
            (ContentPlace::SpillTier, _) => PieceState::Spilled { copies },
        }
    }
}

/// State of a piece, as `docs/background/states.md` draws it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceState {
    /// No contents: it is neither copied out nor restored.
    Empty,
    /// On the card; clean if there are copies.
    Resident {
        /// Copies below the card.
        copies: Copies,
    },
    /// On the card and usable; a copy is being made ahead of need.
    Cleaning {
        /// Copies below the card, without the one in flight.
        copies: Copies,
        /// Tier of the copy in flight.
        to: SpillTier,
    },
    /// A victim: on the card until its copy is complete and all uses are over.
    Leaving {
        /// Copies below the card, without the one in flight.
        copies: Copies,
        /// Tier of the copy in flight. `None` if none is needed.
        to: Option<SpillTier>,
    },
    /// Below the card only.
    Spilled {
        /// Copies below the card; at least one.
        copies: Copies,
    },
    /// Being restored for a lease.
    Restoring {
        /// Copies below the card; at least one.
        copies: Copies,
        /// Tier that is read.
        from: SpillTier,
    },
    /// Spilled, and being moved from another card to the host or the disk, or from the host to the
    /// disk.
    Pushing {
        /// Copies below the card; that which is moved at least.
        copies: Copies,
    },
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

/// Why a host copy is kept. The lower are reclaimed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum HostCopyUse {
    /// The contents are on the card too.
    OnCard,
    /// The contents are on another card or on the disk too.
    Elsewhere,
    /// The contents are nowhere else.
    Sole,
    /// It is mapped to be read in place, and the contents are on the disk too.
    MappedAndOnDisk,
    /// It is mapped to be read in place.
    Mapped,
}

/// Place of a copy among those on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HostKey {
    pub kept_for: HostCopyUse,
    pub last_use_ns: u64,
}

/// All copies on the host.
pub(super) type HostCopies = BTreeSet<(HostKey, PieceId)>;
