//! Why there is no reservation, or it did not become what was asked. Every error says what to do.

use std::fmt;

use crate::ledger::core::{
    MergeError, Owner, ReservationId, SpaceRefusal, StrategyError, UnknownTag,
};
use smallvec::SmallVec;
use vramp_core::Bytes;

/// Why a request was not served, space by space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What was asked.
    pub requested: Bytes,
    /// For each space that would do: what is available, its limit, and who holds the most.
    pub spaces: Vec<SpaceRefusal>,
    /// How many requests wait.
    pub waiting: usize,
}

impl Refusal {
    /// The most that one of the spaces has available.
    pub fn available(&self) -> Bytes {
        self.spaces.iter().map(|space| space.available).max().unwrap_or_default()
    }

    /// The highest limit of the spaces.
    pub fn limit(&self) -> Bytes {
        self.spaces.iter().map(|space| space.limit).max().unwrap_or_default()
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, space) in self.spaces.iter().enumerate() {
            write!(f, "{}{space}", if place == 0 { "" } else { "; " })?;
        }
        match self.waiting {
            0 => Ok(()),
            waiting => write!(f, "; {waiting} requests wait"),
        }
    }
}

/// Who shall give up to end a deadlock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StuckOwner {
    /// Whose request ended.
    pub owner: Owner,
    /// What it has to release so that the others can go on.
    pub reservations: Vec<ReservationId>,
    /// The others of the cycle.
    pub others: Vec<Owner>,
}

impl fmt::Display for StuckOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others: SmallVec<[String; 4]> = self.others.iter().map(Owner::to_string).collect();
        write!(f, "{} waits for memory", self.owner)?;
        if others.is_empty() {
            write!(f, " that it holds itself")?;
        } else {
            write!(f, " of {}, which wait for its own", others.join(", "))?;
        }
        write!(f, ": release its {} reservations and begin again", self.reservations.len())
    }
}

/// Why nothing was reserved. Nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// No space will do.
    #[error(transparent)]
    NoSpace(#[from] StrategyError),
    /// The tag is another manager's.
    #[error(transparent)]
    UnknownTag(#[from] UnknownTag),
    /// It would not fit in an empty space either: waiting cannot help.
    #[error("it fits in no space that will do: {0}")]
    NeverFits(Box<Refusal>),
    /// There is no room now, or others are before it.
    #[error("it cannot be had at once: {0}")]
    NotNow(Box<Refusal>),
    /// The deadline passed.
    #[error("it could not be had by the deadline: {0}")]
    TimedOut(Box<Refusal>),
    /// Its [`CancelToken`](crate::CancelToken) was cancelled.
    #[error("the request was cancelled: {0}")]
    Cancelled(Box<Refusal>),
    /// The manager was shut down, or dropped: nobody may wait any more.
    #[error("the manager is shut down, and nobody may wait: {0}")]
    ShutDown(Box<Refusal>),
    /// A spiller would wait for the memory that it shall free.
    #[error(
        "a spiller cannot wait for memory of the space it empties: reserve before it is called, or \
         where the data goes: {0}"
    )]
    InSpiller(Box<Refusal>),
    /// Waiting on would be for ever.
    #[error("deadlock: {stuck}")]
    Deadlock {
        /// Who gives up what.
        stuck: Box<StuckOwner>,
        /// The spaces as they are.
        refusal: Box<Refusal>,
    },
}

impl ReserveError {
    /// What was asked, what there is, and who has it; `None` for a request that names nothing.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            ReserveError::NoSpace(_) | ReserveError::UnknownTag(_) => None,
            ReserveError::NeverFits(refusal)
            | ReserveError::NotNow(refusal)
            | ReserveError::TimedOut(refusal)
            | ReserveError::Cancelled(refusal)
            | ReserveError::ShutDown(refusal)
            | ReserveError::InSpiller(refusal)
            | ReserveError::Deadlock { refusal, .. } => Some(refusal),
        }
    }
}

/// Why two reservations were not merged. Nothing changed.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct MergeRejected {
    /// Why not.
    pub why: MergeRejection,
    /// Still the caller's.
    pub from: crate::Reservation,
}

/// What stands against a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeRejection {
    /// They are two managers' reservations.
    #[error("reservations of two managers cannot be merged: release one and grow the other")]
    OtherManager,
    /// They lie in different spaces.
    #[error(transparent)]
    Core(#[from] MergeError),
}

/// Why memory outside any reservation was not charged. Nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{refused}")]
pub struct SpaceFull {
    /// The space as it is.
    pub refused: Box<SpaceRefusal>,
}
