//! What is asked of the queue, and what becomes of it.

use std::fmt;

use smallvec::SmallVec;

use crate::ledger::core::{
    Candidates, Owner, ReservationId, SpaceId, Tag, UnknownSpace, UnknownTag,
};
use vramp_core::Bytes;

/// How important a request is: the larger, the more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(pub i32);

/// A wish for memory in one of several spaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Where, the best first. From a [`Strategy`](super::Strategy).
    pub candidates: Candidates,
    /// How much, all in one space.
    pub bytes: Bytes,
    /// How important.
    pub priority: Priority,
    /// Who asks, and does not go on meanwhile.
    pub owner: Owner,
    /// For what.
    pub tag: Tag,
    /// When to give up, in nanoseconds of the caller's clock. `None` for never.
    pub deadline: Option<u64>,
}

/// How far a waiter may be passed by those behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overtaking {
    /// By so many of them.
    pub count: u32,
    /// By so many bytes, all of them together.
    pub bytes: Bytes,
}

impl Default for Overtaking {
    /// 64 requests of 1 GiB together.
    fn default() -> Overtaking {
        Overtaking { count: 64, bytes: Bytes::gib(1) }
    }
}

/// How fair a queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// How far a waiter may be passed by those behind it.
    pub overtaking: Overtaking,
    /// After how many grants to younger requests of higher priority a waiter goes before all
    /// priorities. `None` for never: strict priorities, under which a waiter can starve.
    pub promote_after: Option<u32>,
}

impl Default for QueueConfig {
    fn default() -> QueueConfig {
        QueueConfig { overtaking: Overtaking::default(), promote_after: Some(256) }
    }
}

/// Names one waiter until it is served or leaves; never used again. Younger ones are larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub(super) u64);

impl WaiterId {
    /// The plain number: how many requests came before it.
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for WaiterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waiter {}", self.0)
    }
}

/// A waiter that was served: it waits no more and has its reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Who.
    pub waiter: WaiterId,
    /// What it waited for.
    pub reservation: ReservationId,
    /// Where.
    pub space: SpaceId,
}

/// Waiters to wake, in the order in which they were served.
pub type Grants = SmallVec<[Granted; 4]>;

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a waiter that nobody remembers cannot be woken"]
pub enum Submitted {
    /// It was served at once.
    Granted {
        /// What it asked for.
        reservation: ReservationId,
        /// Where.
        space: SpaceId,
        /// Waiters that became urgent by this grant and are served too. Nearly always empty.
        others: Grants,
    },
    /// It waits: for a grant, its deadline, or the end.
    Waiting(WaiterId),
}

/// What [`WaitQueue::expire`](super::WaitQueue::expire) did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "these waiters have to be woken"]
pub struct Expired {
    /// Waiters whose deadline has passed, in its order. They wait no more and have nothing.
    pub timed_out: Vec<WaiterId>,
    /// Waiters that were kept back by those.
    pub granted: Grants,
}

/// Why a request was neither served nor queued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// It names no space.
    #[error("the request names no space: give it at least one candidate")]
    NoCandidates,
    /// It names a space that does not exist.
    #[error(transparent)]
    UnknownSpace(#[from] UnknownSpace),
    /// It names a tag that does not exist.
    #[error(transparent)]
    UnknownTag(#[from] UnknownTag),
    /// Waiting could not help.
    #[error(
        "{bytes} fit in none of the candidates, even empty: {}: ask for less",
        limits(limits_of)
    )]
    NeverFits {
        /// What was asked.
        bytes: Bytes,
        /// The candidates and their limits.
        limits_of: Vec<(SpaceId, Bytes)>,
    },
    /// There is no room now, or others are before it, and it shall not wait.
    #[error(
        "{bytes} cannot be had at once ({}; {waiting} requests wait): wait, or ask for less",
        limits(available)
    )]
    NotNow {
        /// What was asked.
        bytes: Bytes,
        /// The candidates and what is available below their limits.
        available: Vec<(SpaceId, Bytes)>,
        /// How many wait.
        waiting: usize,
    },
    /// It does not fit now and its deadline is over.
    #[error("there was no room for {bytes} by the deadline {deadline}, it is {now}")]
    TooLate {
        /// What was asked.
        bytes: Bytes,
        /// When it ended, in nanoseconds.
        deadline: u64,
        /// When it was asked, in nanoseconds.
        now: u64,
    },
    /// It does not fit now and nobody waits any more.
    #[error("there is no room for {bytes}, and the queue is shut down: nobody may wait any more")]
    ShutDown {
        /// What was asked.
        bytes: Bytes,
    },
}

fn limits(of: &[(SpaceId, Bytes)]) -> String {
    let each: Vec<String> = of.iter().map(|(space, bytes)| format!("{space} {bytes}")).collect();
    each.join(", ")
}

/// A waiter that does not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{waiter} does not wait: it was served, timed out, cancelled, or is of another queue")]
pub struct UnknownWaiter {
    /// What was given.
    pub waiter: WaiterId,
}
