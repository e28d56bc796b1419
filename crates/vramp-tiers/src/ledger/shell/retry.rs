//! Retries and their pauses.

use std::time::Duration;

/// Number and pauses of retries: of an allocation that failed for lack of memory, and of spilling
/// for a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Maximum number of retries after the first attempt.
    pub max_retries: u32,
    /// First pause. Each further one is twice as long.
    pub first_pause: Duration,
    /// Longest pause.
    pub max_pause: Duration,
}

impl Default for RetryPolicy {
    /// 16 retries, with pauses from 1 ms to 250 ms.
    fn default() -> RetryPolicy {
        RetryPolicy {
            max_retries: 16,
            first_pause: Duration::from_millis(1),
            max_pause: Duration::from_millis(250),
        }
    }
}

impl RetryPolicy {
    /// Returns the pause before a retry, numbered from 1.
    pub(crate) fn pause(&self, retry: u32) -> Duration {
        let doublings = retry.saturating_sub(1).min(31);
        self.first_pause.saturating_mul(1 << doublings).min(self.max_pause)
    }
}
