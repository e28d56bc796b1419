//! Threads of one process that wait: one at a time, as the process has one place among those that wait.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lets one thread of the process wait at a time.
#[derive(Debug, Default)]
pub struct Gate {
    is_taken: Mutex<bool>,
    left: Condvar,
}

impl Gate {
    /// Returns `None` once the deadline has passed.
    pub fn enter(&self, deadline: Option<Instant>) -> Option<Entered<'_>> {
        let mut is_taken = self.is_taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *is_taken {
            let left = left_of(deadline);
            if left.is_zero() {
                return None;
            }
            let waited = self.left.wait_timeout(is_taken, left);
            is_taken = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *is_taken = true;
        Some(Entered(self))
    }
}

/// The right to wait, until it is dropped.
#[derive(Debug)]
pub struct Entered<'a>(&'a Gate);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        *self.0.is_taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.left.notify_one();
    }
}

/// Returns the time to wait: a wait without end looks at its deadline once in an hour.
pub fn left_of(deadline: Option<Instant>) -> Duration {
    let hour = Duration::from_secs(3600);
    deadline.map_or(hour, |end| end.saturating_duration_since(Instant::now()).min(hour))
}
