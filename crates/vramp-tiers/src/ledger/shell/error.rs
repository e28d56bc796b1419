//! Errors of reservations. Each says what to do.

use std::fmt;

use crate::ledger::core::{Owner, ReservationId, SpaceRefusal, StrategyError, UnknownTag};
use smallvec::SmallVec;
use vramp_core::Bytes;

/// Report of a request that was not served, with each candidate space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Requested bytes.
    pub requested: Bytes,
    /// For each candidate: available bytes, limit, and the largest reservations.
    pub spaces: Vec<SpaceRefusal>,
    /// Number of waiting requests.
    pub waiting: usize,
}

impl Refusal {
    /// Returns the largest number of bytes available in one of the spaces.
    pub fn available(&self) -> Bytes {
        self.spaces.iter().map(|space| space.available).max().unwrap_or_default()
    }

    /// Returns the highest limit of the spaces.
    pub fn limit(&self) -> Bytes {
        self.spaces.iter().map(|space| space.limit).max().unwrap_or_default()
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, space) in self.spaces.iter().enumerate() {
            write!(f, "{}{space}", if nth == 0 { "" } else { "; " })?;
        }
        match self.waiting {
            0 => Ok(()),
            waiting => write!(f, "; {waiting} requests wait"),
        }
    }
}

/// Owner whose wait was ended because of a deadlock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StuckOwner {
    /// Owner of the request.
    pub owner: Owner,
    /// Reservations that it has to release so that the other owners can go on.
    pub reservations: Vec<ReservationId>,
    /// Other owners of the cycle.
    pub others: Vec<Owner>,
}

impl fmt::Display for StuckOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others: SmallVec<[String; 4]> = self.others.iter().map(Owner::to_string).collect();
        write!(f, "{} waits for memory", self.owner)?;
        if others.is_empty() {
            write!(f, " that it has reserved itself")?;
        } else {
            write!(f, " of {}, who wait for memory of {}", others.join(", "), self.owner)?;
        }
        write!(f, ": release its {} reservations, then request anew", self.reservations.len())
    }
}

/// Why nothing was reserved. Nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The strategy has no candidate.
    #[error(transparent)]
    NoSpace(#[from] StrategyError),
    /// The tag is another manager's.
    #[error(transparent)]
    UnknownTag(#[from] UnknownTag),
    /// The request exceeds the limit of every candidate: waiting cannot help.
    #[error("the request fits in no candidate space: {0}")]
    NeverFits(Box<Refusal>),
    /// There is no room now, or waiters go first.
    #[error("there is no room now: {0}")]
    NotNow(Box<Refusal>),
    /// The deadline passed.
    #[error("there was no room before the deadline: {0}")]
    TimedOut(Box<Refusal>),
    /// Its [`CancelToken`](crate::CancelToken) was cancelled.
    #[error("the request was cancelled: {0}")]
    Cancelled(Box<Refusal>),
    /// The manager was shut down or dropped: no request may wait.
    #[error("the manager is shut down, no request may wait: {0}")]
    ShutDown(Box<Refusal>),
    /// A spiller would wait for memory of the space that it has to empty.
    #[error(
        "a spiller cannot wait for memory of the space that it empties: reserve before the call, \
         or in the space where the data goes: {0}"
    )]
    InSpiller(Box<Refusal>),
    /// The wait was part of a deadlock.
    #[error("deadlock: {stuck}")]
    Deadlock {
        /// Owner, and the reservations it has to release.
        stuck: Box<StuckOwner>,
        /// State of the candidate spaces.
        refusal: Box<Refusal>,
    },
}

impl ReserveError {
    /// Returns the report of the candidate spaces; `None` for an invalid request.
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

/// Why memory outside any reservation was not charged. Nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{refusal}")]
pub struct SpaceFull {
    /// State of the space.
    pub refusal: Box<SpaceRefusal>,
}
