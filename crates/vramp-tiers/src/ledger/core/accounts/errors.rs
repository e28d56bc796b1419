//! Why a budget said no: what was asked, what there is, and who has it.

use std::fmt;

use smallvec::SmallVec;

use super::{Overrun, Owner, ReservationId, Tag};
use crate::ledger::core::{SpaceConfigError, SpaceId};
use vramp_core::Bytes;

/// A space that the ledger does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no space {space}: name one that the ledger was made with")]
pub struct UnknownSpace {
    /// What was given.
    pub space: SpaceId,
}

/// A tag that the ledger does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{tag:?} is not a tag of this ledger: register its name first")]
pub struct UnknownTag {
    /// What was given.
    pub tag: Tag,
}

/// Why a ledger was not made.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum LedgerError {
    /// There is nothing to account for.
    #[error("a ledger needs at least one space")]
    NoSpaces,
    /// Two spaces of one name.
    #[error("{space} is configured twice: give each space its own index")]
    Duplicate {
        /// Which.
        space: SpaceId,
    },
    /// Levels that make no sense.
    #[error("{space}: {why}")]
    InvalidLevels {
        /// Which space.
        space: SpaceId,
        /// What is wrong with it.
        why: SpaceConfigError,
    },
}

/// A reservation that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StaleReservation {
    /// It ended, with all that was charged to it, or is of another ledger.
    #[error("{id} does not exist: it was released and all its memory freed, or never made")]
    Unknown {
        /// What was given.
        id: ReservationId,
    },
    /// Its owner gave it up; only frees still name it.
    #[error("{id} was released; {used} allocated from it can still be freed, nothing else")]
    Released {
        /// What was given.
        id: ReservationId,
        /// What is still charged to it.
        used: Bytes,
    },
}

/// The bound that a refused request would have passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Up to where reservations are given.
    Limit,
    /// Up to where anything is charged.
    Capacity,
}

/// Who holds how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// By which reservation.
    pub reservation: ReservationId,
    /// Who.
    pub owner: Owner,
    /// For what.
    pub tag: Tag,
    /// The reservation's size; zero once released.
    pub size: Bytes,
    /// What is allocated from it.
    pub used: Bytes,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} reserved {} and uses {}", self.owner, self.size, self.used)
    }
}

/// A request that does not fit now, and everything that explains it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceRefusal {
    /// Where.
    pub space: SpaceId,
    /// What was asked, in whole granules.
    pub requested: Bytes,
    /// What could be had: up to `bound`.
    pub available: Bytes,
    /// Which bound it was measured against.
    pub bound: Bound,
    /// Up to where reservations are given.
    pub limit: Bytes,
    /// Up to where anything is charged.
    pub capacity: Bytes,
    /// The sizes of all reservations.
    pub reserved: Bytes,
    /// Charged outside any reservation, orphaned use included.
    pub unreserved: Bytes,
    /// How many reservations are active.
    pub reservations: usize,
    /// The largest of them, the largest first. Four at most.
    pub largest: SmallVec<[Holder; 4]>,
}

impl SpaceRefusal {
    /// True if it would not fit in an empty space either: waiting cannot help.
    pub fn never_fits(&self) -> bool {
        match self.bound {
            Bound::Limit => self.requested > self.limit,
            Bound::Capacity => self.requested > self.capacity,
        }
    }
}

impl std::error::Error for SpaceRefusal {}

impl fmt::Display for SpaceRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &SpaceRefusal { space, requested, available, limit, capacity, .. } = self;
        let bound = match self.bound {
            Bound::Limit => "limit",
            Bound::Capacity => "capacity",
        };
        write!(
            f,
            "{space} has {available} below its {bound}, {requested} were requested (limit {limit}, \
             capacity {capacity}, {} reservations of {}, {} outside any)",
            self.reservations, self.reserved, self.unreserved
        )?;
        for (place, holder) in self.largest.iter().enumerate() {
            write!(f, "{}{holder}", if place == 0 { "; the largest: " } else { ", " })?;
        }
        f.write_str(match self.never_fits() {
            true => ": ask for less, or configure more",
            false => ": release something, wait, or ask another space",
        })
    }
}

/// Why nothing was reserved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LedgerReserveError {
    /// There is no such space.
    #[error(transparent)]
    UnknownSpace(#[from] UnknownSpace),
    /// There is no such tag.
    #[error(transparent)]
    UnknownTag(#[from] UnknownTag),
    /// No room.
    #[error(transparent)]
    Refused(#[from] Box<SpaceRefusal>),
}

/// Why a reservation did not grow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrowError {
    /// There is room, but those who wait for it have been passed often enough.
    #[error("{id} cannot grow by {by} before those who wait ({waiting}): wait for its turn")]
    Behind {
        /// Which.
        id: ReservationId,
        /// What was asked, in whole granules.
        by: Bytes,
        /// How many requests wait.
        waiting: usize,
    },
    /// There is no such reservation.
    #[error(transparent)]
    Stale(#[from] StaleReservation),
    /// No room.
    #[error(transparent)]
    Refused(#[from] Box<SpaceRefusal>),
}

/// Why a reservation was not split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// There is no such reservation.
    #[error(transparent)]
    Stale(#[from] StaleReservation),
    /// More than its unused part.
    #[error("{requested} cannot be split off: {unused} of the reservation are unused")]
    TooLarge {
        /// What was asked, in whole granules.
        requested: Bytes,
        /// What could be split off.
        unused: Bytes,
    },
}

/// Why two reservations were not merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// One of them does not exist.
    #[error(transparent)]
    Stale(#[from] StaleReservation),
    /// It is one reservation.
    #[error("{id} cannot be merged with itself")]
    Itself {
        /// Which.
        id: ReservationId,
    },
    /// Bytes do not move between spaces by a merge.
    #[error("a reservation in {from} cannot be merged into one in {into}")]
    OtherSpace {
        /// Where the one is.
        from: SpaceId,
        /// Where the other is.
        into: SpaceId,
    },
}

/// Why an allocation over its reservation was not charged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChargeError {
    /// There is no such reservation.
    #[error(transparent)]
    Stale(#[from] StaleReservation),
    /// The policy is to fail, or grants less than needed.
    #[error(
        "{} in {}: an allocation of {} exceeds it by {}: {} of {} are used; reserve more, or let it \
         grow", over.reservation, over.space, over.bytes, over.by, over.used, over.size
    )]
    OverReservation {
        /// The allocation.
        over: Overrun,
    },
    /// The space has no room for it.
    #[error(transparent)]
    Refused(#[from] Box<SpaceRefusal>),
}

/// Why a free was not credited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnchargeError {
    /// Nothing is charged to such a reservation.
    #[error(transparent)]
    Stale(#[from] StaleReservation),
    /// More than was charged.
    #[error("{freed} cannot be freed from {id}: only {used} are charged to it")]
    TooMuch {
        /// The origin that was given.
        id: ReservationId,
        /// What was to be credited, in whole granules.
        freed: Bytes,
        /// What there is.
        used: Bytes,
    },
}

/// Why memory outside any reservation was not accounted for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnreservedError {
    /// There is no such space.
    #[error(transparent)]
    UnknownSpace(#[from] UnknownSpace),
    /// There is no such tag.
    #[error(transparent)]
    UnknownTag(#[from] UnknownTag),
    /// The space has no room for it.
    #[error(transparent)]
    Refused(#[from] Box<SpaceRefusal>),
    /// More than was charged.
    #[error("{freed} cannot be freed: only {used} are charged to {space} under this tag")]
    TooMuch {
        /// Where.
        space: SpaceId,
        /// What was to be freed, in whole granules.
        freed: Bytes,
        /// What there is.
        used: Bytes,
    },
}
