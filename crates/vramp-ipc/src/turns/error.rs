//! Errors of turns.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::status::Participant;
use crate::directory::SharedDirectoryError;

/// The directory of a card's turns cannot be used.
#[derive(Debug, Error)]
pub enum TurnsError {
    /// The name of a card has other characters, or is too long.
    #[error(
        "{card:?} does not name a card: use its UUID, or 1 to 64 letters, digits, `-`, `_`, `:` and `.`"
    )]
    Card {
        /// The caller's text.
        card: String,
    },
    /// The directory, or an entry of this process in it, was removed.
    #[error(
        "{} was removed or cleared while it was in use: another process may hold the same turn; open it \
         again", path.display()
    )]
    Removed {
        /// The directory.
        path: PathBuf,
    },
    /// The object belongs to the process that forked this one.
    #[error(
        "the turns belong to the process that forked this one; open them again in this process"
    )]
    Forked,
    /// A handler of [`Turns::on_request`](super::Turns::on_request) takes the requests.
    #[error("a handler takes the requests; remove it before another call waits for them")]
    HasHandler,
    /// It cannot be opened or used.
    #[error(transparent)]
    Directory(#[from] SharedDirectoryError),
}

/// The turn was not acquired. The caller is not in the line any more.
#[derive(Debug, Error)]
pub enum AcquireError {
    /// The timeout passed.
    #[error("{0}")]
    TimedOut(Box<TimedOut>),
    /// The holder refused.
    #[error("{holder} refused to release the card {card}: {reason}")]
    Refused {
        /// The card.
        card: String,
        /// The process that holds the turn.
        holder: Box<Participant>,
        /// Its reason, at most 1024 bytes.
        reason: String,
    },
    /// The directory cannot be used.
    #[error(transparent)]
    Turns(#[from] TurnsError),
}

/// Why a timeout passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimedOut {
    /// The card.
    pub card: String,
    /// The process that holds the turn, or is about to. `None` if it ended meanwhile.
    pub holder: Option<Participant>,
    /// The holder was stopped, by SIGSTOP or a debugger. False if it is in another PID namespace.
    pub is_holder_stopped: bool,
    /// Number of processes that were ahead, the holder included.
    pub ahead: usize,
    /// The caller's timeout.
    pub timeout: Duration,
}

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TimedOut { card, timeout, ahead, .. } = self;
        let Some(holder) = &self.holder else {
            return write!(f, "the turn of card {card} was free only after {timeout:?}; try again");
        };
        write!(f, "{holder} did not release card {card} within {timeout:?}")?;
        if *ahead > 1 {
            write!(f, ", and {} more were ahead", ahead - 1)?;
        }
        match self.is_holder_stopped {
            true => write!(f, "; it is stopped: continue it with `kill -CONT {}`", holder.pid),
            false => write!(f, "; wait longer, or let it release the card when it is requested"),
        }
    }
}
