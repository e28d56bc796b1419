//! Requests to the wait queue, and their results.

use std::fmt;

use smallvec::SmallVec;

use crate::ledger::core::{
    Candidates, Owner, ReservationId, SpaceId, Tag, UnknownSpace, UnknownTag,
};
use vramp_core::Bytes;

/// Priority of a request or of a spiller: the larger number goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(pub i32);

/// A request for memory in one of several spaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Candidate spaces, the best first. A [`Strategy`](crate::Strategy) computes them.
    pub candidates: Candidates,
    /// Bytes to reserve, all in one space.
    pub bytes: Bytes,
    /// Bytes that are charged already, and that the request keeps from waiters which would have them spilled.
    /// They need no room, unless the request overtakes waiters.
    pub kept: Bytes,
    /// Bytes of its candidates that the owner keeps outside reservations until it is served: waiters that need
    /// them wait for this request.
    pub held: Bytes,
    /// Priority in the queue.
    pub priority: Priority,
    /// The place that the caller had in the queue before. Without one, or while it is taken, the end.
    pub place: Option<WaiterId>,
    /// Owner, which does not run while the request waits.
    pub owner: Owner,
    /// Tag for statistics.
    pub tag: Tag,
}

impl Request {
    /// Returns what the request takes from the waiters that it overtakes.
    pub(super) fn takes(&self) -> Bytes {
        self.bytes.checked_add(self.kept).unwrap_or(Bytes::MAX)
    }
}

/// How far requests behind a waiter may overtake it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overtaking {
    /// Maximum number of overtaking requests.
    pub count: u32,
    /// Maximum sum of their sizes.
    pub bytes: Bytes,
}

impl Default for Overtaking {
    /// 64 requests of 1 GiB together.
    fn default() -> Overtaking {
        Overtaking { count: 64, bytes: Bytes::gib(1) }
    }
}

/// Fairness of a wait queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// How far requests behind a waiter may overtake it.
    pub overtaking: Overtaking,
    /// Grants to younger requests of higher priority after which a waiter becomes urgent and goes
    /// before all priorities. `None` for never: priorities are strict, and a waiter can starve.
    pub promote_after: Option<u32>,
}

impl Default for QueueConfig {
    fn default() -> QueueConfig {
        QueueConfig { overtaking: Overtaking::default(), promote_after: Some(256) }
    }
}

/// Id of a waiter, never reused. A younger waiter has a larger id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub(in crate::ledger::core) u64);

impl WaiterId {
    /// Returns the id as a number: the number of requests before it.
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for WaiterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waiter {}", self.0)
    }
}

/// A waiter that was served: it is out of the queue and has its reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// The waiter to wake.
    pub waiter: WaiterId,
    /// Its reservation.
    pub reservation: ReservationId,
    /// Space of the reservation.
    pub space: SpaceId,
}

/// Waiters to wake, in the order in which they were served.
pub type Grants = SmallVec<[Granted; 4]>;

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a waiter whose id is lost cannot be woken"]
pub enum Submitted {
    /// The request was served at once.
    Granted {
        /// Its reservation.
        reservation: ReservationId,
        /// Space of the reservation.
        space: SpaceId,
        /// Waiters that became urgent by this grant and were served too. Nearly always empty.
        others: Grants,
    },
    /// The request waits for a grant, or until its caller gives up.
    Waiting(WaiterId),
}

/// Why a request was neither served nor queued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The request has no candidate.
    #[error("the request names no space: give it at least one candidate")]
    NoCandidates,
    /// A candidate does not exist.
    #[error(transparent)]
    UnknownSpace(#[from] UnknownSpace),
    /// The tag does not exist.
    #[error(transparent)]
    UnknownTag(#[from] UnknownTag),
    /// The request is larger than every candidate's limit: waiting cannot help.
    #[error("{bytes} exceed the limit of every candidate: {}: ask for less", list(limits_of))]
    NeverFits {
        /// Requested bytes.
        bytes: Bytes,
        /// Limit of each candidate.
        limits_of: Vec<(SpaceId, Bytes)>,
    },
    /// There is no room now, or waiters go first, and the request may not wait.
    #[error(
        "{bytes} are not available now ({}; {waiting} requests wait): wait, or ask for less",
        list(available)
    )]
    NotNow {
        /// Requested bytes.
        bytes: Bytes,
        /// Bytes available below the limit of each candidate.
        available: Vec<(SpaceId, Bytes)>,
        /// Number of waiters.
        waiting: usize,
    },
    /// There is no room now, and the queue accepts no waiter after its shutdown.
    #[error("there is no room for {bytes}, and the queue is shut down: no request may wait")]
    ShutDown {
        /// Requested bytes.
        bytes: Bytes,
    },
}

fn list(amounts: &[(SpaceId, Bytes)]) -> String {
    let each: Vec<String> =
        amounts.iter().map(|(space, bytes)| format!("{space} {bytes}")).collect();
    each.join(", ")
}

/// A [`WaiterId`] that is not in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{waiter} is not in this queue: it was served, timed out, cancelled, or is another queue's"
)]
pub struct UnknownWaiter {
    /// The given id.
    pub waiter: WaiterId,
}
