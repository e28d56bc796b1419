//! Errors of budgets.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::facts::{Member, Size};
use crate::directory::SharedDirectoryError;

/// The group of a card cannot be used.
#[derive(Debug, Error)]
pub enum BudgetError {
    /// The name of a card or group has other characters, or is too long.
    #[error(
        "{name:?} does not name a card or a group: use 1 to 64 letters, digits, `-`, `_`, `:` and `.`"
    )]
    Name {
        /// The caller's text.
        name: String,
    },
    /// An amount is larger than a group can count.
    #[error("{} is too much: a group counts less than 4 TiB", Size(*bytes))]
    Amount {
        /// The caller's amount.
        bytes: u64,
    },
    /// A limit, or a guaranteed part, is larger than what it is a part of.
    #[error("{} are guaranteed of a limit of {} and a capacity of {}: make it the smallest", Size(*guaranteed), Size(*limit), Size(*capacity))]
    Order {
        /// Bytes.
        guaranteed: u64,
        /// Bytes.
        limit: u64,
        /// Bytes.
        capacity: u64,
    },
    /// Another member counts with another capacity.
    #[error(
        "{member} joined the group with a capacity of {}, and this process with {}: pass the same to all",
        Size(*theirs), Size(*own)
    )]
    Capacity {
        /// Bytes that this process passed.
        own: u64,
        /// Bytes that the other passed.
        theirs: u64,
        /// The other member.
        member: Box<Member>,
    },
    /// The group has as many members as fit.
    #[error("the group has 512 members already; use another group, or end some")]
    TooManyMembers,
    /// The ledger was removed.
    #[error(
        "the ledger in {} was removed while it was in use: processes that join now do not see this one; \
         end the members and start them again", path.display()
    )]
    Removed {
        /// The directory.
        path: PathBuf,
    },
    /// The object belongs to the process that forked this one.
    #[error("the budget belongs to the process that forked this one; join again in this process")]
    Forked,
    /// There is no such member any more.
    #[error("the member is not in the group any more")]
    Gone,
    /// It cannot be opened or used.
    #[error(transparent)]
    Directory(#[from] SharedDirectoryError),
}

/// The pages were not claimed.
#[derive(Debug, Error)]
pub enum ClaimError {
    /// They would pass the member's own limit.
    #[error("{} and {} more would pass this process's limit of {}; raise it with `set_limit` or `vramp ctl limit`", Size(*claimed), Size(*requested), Size(*limit))]
    Limit {
        /// Bytes that it has claimed.
        claimed: u64,
        /// Bytes that were requested.
        requested: u64,
        /// Its limit.
        limit: u64,
    },
    /// Not even if the others gave back all that they are not guaranteed.
    #[error("{0}")]
    Impossible(Box<Shortfall>),
    /// The timeout passed.
    #[error("{0}")]
    TimedOut(Box<Shortfall>),
    /// The group cannot be used.
    #[error(transparent)]
    Budget(#[from] BudgetError),
}

/// Who has what, when a claim was not served.
#[derive(Clone, Debug, PartialEq)]
pub struct Shortfall {
    /// Bytes that were requested.
    pub requested: u64,
    /// Bytes that this member could have claimed at the end.
    pub available: u64,
    /// Bytes that it could get at most, if the others gave back all that they are not guaranteed.
    pub most: u64,
    /// Bytes that the group shares.
    pub capacity: u64,
    /// The caller's timeout; zero if it was impossible.
    pub timeout: Duration,
    /// The other members, those with the most claimed first.
    pub members: Vec<Member>,
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortfall { requested, available, most, capacity, timeout, members } = self;
        let [requested_, available_, capacity_] = [*requested, *available, *capacity].map(Size);
        if most < requested {
            write!(
                f,
                "{requested_} cannot be had: with all that the others are not guaranteed it would be {} of \
                 {capacity_}",
                Size(*most)
            )?;
        } else {
            write!(
                f,
                "{requested_} were not free within {timeout:?}: {available_} of the group's \
                 {capacity_} were"
            )?;
        }
        for member in members.iter().filter(|member| member.claimed > 0).take(3) {
            write!(f, "; {member} has {}", Size(member.claimed))?;
            if member.guaranteed > 0 {
                write!(f, ", {} of it guaranteed", Size(member.guaranteed.min(member.claimed)))?;
            }
            if member.is_stopped {
                write!(f, ", and is stopped (`kill -CONT {}`)", member.pid)?;
            }
        }
        match most < requested {
            true => write!(f, "; ask for less, or guarantee the others less"),
            false => write!(f, "; wait longer, or register a handler that gives memory back there"),
        }
    }
}
