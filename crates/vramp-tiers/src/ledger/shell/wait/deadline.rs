//! The end of a wait.

use std::time::{Duration, Instant};

/// End of a wait: an [`Instant`], or a [`Duration`] from now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// No deadline: the wait ends at the latest with the shutdown of the manager.
    pub const NEVER: Deadline = Deadline(None);

    /// Returns the instant of the deadline, if there is one.
    pub fn instant(self) -> Option<Instant> {
        self.0
    }
}

impl From<Instant> for Deadline {
    fn from(at: Instant) -> Deadline {
        Deadline(Some(at))
    }
}

impl From<Duration> for Deadline {
    /// A duration beyond the range of the clock means no deadline.
    fn from(time: Duration) -> Deadline {
        Deadline(Instant::now().checked_add(time))
    }
}
