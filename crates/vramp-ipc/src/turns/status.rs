//! What can be read about the processes of a card.

use std::fmt;
use std::time::{Duration, SystemTime};

use super::core::entry::{Entry, Need};
use crate::system;

/// A process that holds a turn or waits for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Participant {
    /// The name that it passed to [`Turns::open`](super::Turns::open).
    pub program: String,
    /// Its process id, in its own PID namespace.
    pub pid: u32,
    /// True if it is in the PID namespace of this process, so that `pid` is its id here too.
    pub is_pid_valid: bool,
    /// What it wants of the card.
    pub need: Need,
    /// When it requested the turn, by the system's clock.
    pub requested: SystemTime,
}

impl Participant {
    pub(super) fn new(entry: &Entry, own_namespace: u64) -> Participant {
        Participant {
            program: entry.program.clone(),
            pid: entry.pid,
            is_pid_valid: own_namespace != 0 && entry.namespace == own_namespace,
            need: entry.need,
            requested: time(entry.since_ms),
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.is_pid_valid && system::is_stopped(self.pid)
    }
}

impl fmt::Display for Participant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.is_pid_valid { "" } else { " of another PID namespace" };
        write!(f, "process {}{place} ({})", self.pid, self.program)
    }
}

pub(super) fn time(ms: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms)).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// The process that holds a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process.
    pub participant: Participant,
    /// Since when it holds the turn, by the system's clock.
    pub since: SystemTime,
}

/// Who holds the turn of a card, and who waits for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnsStatus {
    /// `None` if the turn is free, or about to be taken by the first that waits. A holder whose mark found
    /// no space on the disk is listed as the first that waits.
    pub holder: Option<Holder>,
    /// In the order in which they get the turn.
    pub waiting: Vec<Participant>,
}
