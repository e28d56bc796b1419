//! What is said about a member.

use std::fmt;
use std::time::Duration;

/// Bytes of a member by what they are for, as it published them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// In use.
    pub live: u64,
    /// Free in the pools, and can be given back at once.
    pub cached: u64,
    /// Mapped and without contents that are needed: can be given back at once.
    pub parked: u64,
    /// Contents of paused memory, which are not on the card.
    pub asleep: u64,
}

/// A member of a group.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Random number of this membership.
    pub id: u64,
    /// The name that it passed when it joined.
    pub program: String,
    /// Its process id, in its own PID namespace.
    pub pid: u32,
    /// True if it is in the PID namespace of this process, so that `pid` is its id here too.
    pub is_pid_valid: bool,
    /// It was stopped, by SIGSTOP or a debugger. False if it is in another PID namespace.
    pub is_stopped: bool,
    /// The larger is served first.
    pub priority: u8,
    /// Bytes that it may use.
    pub claimed: u64,
    /// Bytes that it can always claim.
    pub guaranteed: u64,
    /// Bytes that it may claim at most; `None` for all of the group's.
    pub limit: Option<u64>,
    /// Bytes by kind.
    pub usage: Usage,
    /// Bytes that it waits for, and for how long.
    pub waiting: Option<(u64, Duration)>,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.is_pid_valid { "" } else { " of another PID namespace" };
        write!(f, "process {}{place} ({})", self.pid, self.program)
    }
}

/// Bytes in a message.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (gib, mib) = ((1_u64 << 30) as f64, (1_u64 << 20) as f64);
        match self.0 {
            bytes if bytes >= 1 << 30 => write!(f, "{:.2} GiB", bytes as f64 / gib),
            bytes => write!(f, "{:.0} MiB", bytes as f64 / mib),
        }
    }
}
