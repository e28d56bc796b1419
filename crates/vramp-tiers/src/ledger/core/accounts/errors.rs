//! Errors of the ledger, with the amounts and the largest reservations.

use std::fmt;

use smallvec::SmallVec;

use super::{Overrun, Owner, ReservationId, Tag};
use crate::ledger::core::{SpaceConfigError, SpaceId};
use vramp_core::Bytes;

/// A space that the ledger does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no space {space}: use one that the ledger was created with")]
pub struct UnknownSpace {
    /// The given value.
    pub space: SpaceId,
}

/// A tag that the ledger does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{tag:?} is not a tag of this ledger: register its name first")]
pub struct UnknownTag {
    /// The given value.
    pub tag: Tag,
}

/// Why a ledger or a manager was not created.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum LedgerError {
    /// There is no space.
    #[error("a ledger needs at least one space")]
    NoSpaces,
    /// Two spaces have the same id.
    #[error("{space} is configured twice: give each space its own index")]
    Duplicate {
        /// Id of the space.
        space: SpaceId,
    },
    /// The levels of a space are invalid.
    #[error("{space}: {error}")]
    InvalidLevels {
        /// Id of the space.
        space: SpaceId,
        /// Reason.
        error: SpaceConfigError,
    },
}

/// A reservation that does not exist any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StaleReservation {
    /// It ended and nothing is charged to it, or it is another ledger's.
    #[error("{id} does not exist: it was released and its memory freed, or never made")]
    Unknown {
        /// The given id.
        id: ReservationId,
    },
    /// It was released. Only frees may still use its id.
    #[error("{id} was released; the {used} allocated from it can only be freed")]
    Released {
        /// The given id.
        id: ReservationId,
        /// Bytes still charged to it.
        used: Bytes,
    },
}

/// The level against which a request is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Upper bound of reservations.
    Limit,
    /// Upper bound of all charges.
    Capacity,
}

/// A reservation listed by a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Id of the reservation.
    pub reservation: ReservationId,
    /// Owner of the reservation.
    pub owner: Owner,
    /// Tag of the reservation.
    pub tag: Tag,
    /// Size of the reservation; zero once released.
    pub size: Bytes,
    /// Bytes allocated from it.
    pub used: Bytes,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} reserved {} and uses {}", self.owner, self.size, self.used)
    }
}

/// Report of a space that has no room for a request now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceRefusal {
    /// Id of the space.
    pub space: SpaceId,
    /// Requested bytes, in whole granules.
    pub requested: Bytes,
    /// Bytes available below `bound`.
    pub available: Bytes,
    /// Level against which the request was measured.
    pub bound: Bound,
    /// Upper bound of reservations.
    pub limit: Bytes,
    /// Upper bound of all charges.
    pub capacity: Bytes,
    /// Sum of the sizes of all reservations.
    pub reserved: Bytes,
    /// Bytes charged outside any reservation, overruns and orphaned bytes included.
    pub unreserved: Bytes,
    /// Number of active reservations.
    pub reservations: usize,
    /// The largest reservations, the largest first. Four at most.
    pub largest: SmallVec<[Holder; 4]>,
}

impl SpaceRefusal {
    /// True if the request would not fit in the empty space: waiting cannot help.
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
            "{space} has {available} available below its {bound}, {requested} were requested \
             (limit {limit}, capacity {capacity}, {} reservations of {} in all, {} outside reservations)",
            self.reservations, self.reserved, self.unreserved
        )?;
        for (place, holder) in self.largest.iter().enumerate() {
            write!(f, "{}{holder}", if place == 0 { "; the largest: " } else { ", " })?;
        }
        f.write_str(match self.never_fits() {
            true => ": ask for less, or configure a larger space",
            false => ": release a reservation, wait, or try another space",
        })
    }
}

/// Why the ledger reserved nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LedgerReserveError {
    /// There is no such space.
    #[error(transparent)]
    UnknownSpace(#[from] UnknownSpace),
    /// There is no such tag.
    #[error(transparent)]
    UnknownTag(#[from] UnknownTag),
    /// The space has no room.
    #[error(transparent)]
    Refused(#[from] Box<SpaceRefusal>),
}

/// Why a reservation did not grow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrowError {
    /// There is room, but waiters have been overtaken up to their bound.
    #[error("{id} cannot grow by {by} before the {waiting} waiters: use a growth that waits")]
    Behind {
        /// Id of the reservation.
        id: ReservationId,
        /// Requested growth, in whole granules.
        by: Bytes,
        /// Number of waiters.
        waiting: usize,
    },
    /// There is no such reservation.
    #[error(transparent)]
    Stale(#[from] StaleReservation),
    /// The space has no room.
    #[error(transparent)]
    Refused(#[from] Box<SpaceRefusal>),
}

/// Why a reservation was not split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// There is no such reservation.
    #[error(transparent)]
    Stale(#[from] StaleReservation),
    /// The size exceeds the unused part.
    #[error("{requested} cannot be split off: {unused} of the reservation are unused")]
    TooLarge {
        /// Requested bytes, in whole granules.
        requested: Bytes,
        /// Unused bytes of the reservation.
        unused: Bytes,
    },
}

/// Why two reservations were not merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// One of them does not exist.
    #[error(transparent)]
    Stale(#[from] StaleReservation),
    /// Both are the same reservation.
    #[error("{id} cannot be merged with itself")]
    Itself {
        /// Id of the reservation.
        id: ReservationId,
    },
    /// They are in different spaces.
    #[error("a reservation in {from} cannot be merged into one in {into}")]
    OtherSpace {
        /// Space of the reservation to release.
        from: SpaceId,
        /// Space of the reservation to grow.
        into: SpaceId,
    },
}

/// Why an allocation was not charged to a reservation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChargeError {
    /// There is no such reservation.
    #[error(transparent)]
    Stale(#[from] StaleReservation),
    /// It exceeds the reservation, and the policy fails it or grows the reservation by too little.
    #[error(
        "an allocation of {} exceeds {} in {} by {} ({} of {} are used): reserve more, or set a \
         policy that lets it grow",
        overrun.bytes,
        overrun.reservation,
        overrun.space,
        overrun.by,
        overrun.used,
        overrun.size
    )]
    OverReservation {
        /// The allocation and its reservation.
        overrun: Overrun,
    },
    /// The space has no room.
    #[error(transparent)]
    Refused(#[from] Box<SpaceRefusal>),
}

/// Why a free was not credited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnchargeError {
    /// There is no such reservation.
    #[error(transparent)]
    Stale(#[from] StaleReservation),
    /// More bytes than are charged.
    #[error("{freed} cannot be freed from {id}: only {used} are charged to it")]
    TooMuch {
        /// Id of the reservation.
        id: ReservationId,
        /// Bytes of the free, in whole granules.
        freed: Bytes,
        /// Bytes charged.
        used: Bytes,
    },
}

/// Why memory outside any reservation was not charged or credited.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnreservedError {
    /// There is no such space.
    #[error(transparent)]
    UnknownSpace(#[from] UnknownSpace),
    /// There is no such tag.
    #[error(transparent)]
    UnknownTag(#[from] UnknownTag),
    /// The space has no room.
    #[error(transparent)]
    Refused(#[from] Box<SpaceRefusal>),
    /// More bytes than are charged.
    #[error("{freed} cannot be freed: only {used} are charged to {space} under this tag")]
    TooMuch {
        /// Id of the space.
        space: SpaceId,
        /// Bytes of the free, in whole granules.
        freed: Bytes,
        /// Bytes charged.
        used: Bytes,
    },
}
