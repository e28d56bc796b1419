//! One piece: where its contents are, and how it is moving.

use super::{MoveId, SpillTier, UseToken};
use vramp_core::Bytes;

/// Which whole and equal copies of a piece exist below the card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    /// In pinned memory.
    pub host: bool,
    /// In a file.
    pub disk: bool,
}

impl Copies {
    /// None: what is on the card is *dirty*.
    pub const NONE: Copies = Copies { host: false, disk: false };

    /// True if there is one: what is on the card is *clean*.
    pub const fn any(self) -> bool {
        self.host || self.disk
    }

    /// The one that is read fastest.
    pub const fn best(self) -> Option<SpillTier> {
        match self {
            Copies { host: true, .. } => Some(SpillTier::Host),
            Copies { disk: true, .. } => Some(SpillTier::Disk),
            Copies::NONE => None,
        }
    }

    /// All of them, the fastest first.
    pub fn iter(self) -> impl Iterator<Item = SpillTier> {
        let host = self.host.then_some(SpillTier::Host);
        host.into_iter().chain(self.disk.then_some(SpillTier::Disk))
    }

    pub(super) fn add(&mut self, lower: SpillTier) {
        match lower {
            SpillTier::Host => self.host = true,
            SpillTier::Disk => self.disk = true,
        }
    }
}

/// Where a piece's contents are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentPlace {
    /// Nowhere: nothing was written yet.
    Empty,
    /// On the card, and perhaps below.
    Card,
    /// Below the card only.
    SpillTier,
}

/// A move that was decided and has neither been settled nor abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceMove {
    Out {
        id: MoveId,
        /// Where a copy is being made; none is needed where nothing is dirty.
        to: Option<SpillTier>,
        /// The memory is to be had when the copy is made.
        leaving: bool,
        /// The contents changed since: the copy is worth nothing.
        torn: bool,
        /// All of the copy is queued, has its room, and is over when this is.
        queued: Option<UseToken>,
    },
    Restore {
        id: MoveId,
        from: SpillTier,
    },
    /// From the host to the disk.
    Push {
        id: MoveId,
    },
}

impl PieceMove {
    pub fn id(self) -> MoveId {
        match self {
            PieceMove::Out { id, .. } | PieceMove::Restore { id, .. } | PieceMove::Push { id } => {
                id
            }
        }
    }

    /// Where it will take room that it does not have yet, as far as is known.
    pub fn promised(self) -> Option<SpillTier> {
        match self {
            PieceMove::Out { to, queued: None, .. } => to,
            PieceMove::Push { .. } => Some(SpillTier::Disk),
            PieceMove::Out { .. } | PieceMove::Restore { .. } => None,
        }
    }
}

/// One piece.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Bytes of contents.
    pub len: Bytes,
    pub place: ContentPlace,
    pub copies: Copies,
    /// It has memory on the card.
    pub backed: bool,
    pub motion: Option<PieceMove>,
}

impl Piece {
    pub fn new(len: Bytes) -> Piece {
        Piece { len, place: ContentPlace::Empty, copies: Copies::NONE, backed: false, motion: None }
    }

    /// The end of a copy that reads it, where that is queued.
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

/// What a piece is and does, as `docs/states.md` draws it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceState {
    /// Nothing was written yet: it is neither copied out nor in.
    Empty,
    /// On the card; clean if there are copies.
    Resident {
        /// Below.
        copies: Copies,
    },
    /// On the card, readable, and a copy is being made.
    Cleaning {
        /// Below, as yet.
        copies: Copies,
        /// Where one more is being made.
        to: SpillTier,
    },
    /// A victim: still on the card, until the copy is made and all uses are over.
    Leaving {
        /// Below, as yet.
        copies: Copies,
        /// Where one is being made, if one is needed.
        to: Option<SpillTier>,
    },
    /// Below the card only.
    Spilled {
        /// At least one.
        copies: Copies,
    },
    /// Being brought back for a lease.
    Restoring {
        /// At least one.
        copies: Copies,
        /// Which of them is read.
        from: SpillTier,
    },
    /// Spilled, and on its way from the host to the disk.
    Pushing {
        /// The host's.
        copies: Copies,
    },
}
