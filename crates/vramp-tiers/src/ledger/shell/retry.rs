//! How often and how fast something is tried again.

use std::time::Duration;

/// How often and how fast something is tried again: an allocation, whatever its handler says, and
/// spilling for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// So often at most, after the first try.
    pub most: u32,
    /// The first pause of [`RecoveryAction::RetryAfterPause`]; each one is twice the last.
    pub first_pause: Duration,
    /// But not longer than this.
    pub max_pause: Duration,
}

impl Default for RetryPolicy {
    /// 16 retries, with pauses from 1 ms to 250 ms.
    fn default() -> RetryPolicy {
        RetryPolicy {
            most: 16,
            first_pause: Duration::from_millis(1),
            max_pause: Duration::from_millis(250),
        }
    }
}

impl RetryPolicy {
    /// The pause before the retry with this number, from 1.
    pub(crate) fn pause(&self, attempt: u32) -> Duration {
        let doublings = attempt.saturating_sub(1).min(31);
        self.first_pause.saturating_mul(1 << doublings).min(self.max_pause)
    }
}
