//! Places of copies in the indexes by which they are reclaimed.
//!
//! The copies of a card are in an ordered set: those that are not needed first, then the others, the
//! least recently used first. So are the copies on the host. A change of a copy or of its buffer's last
//! use is O(log n), and so is each copy that is taken.

use std::collections::BTreeSet;

use super::PieceId;
use super::peer_id::PeerId;

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
