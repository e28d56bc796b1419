//! Configuration of a reservation manager.

use std::time::Duration;

use crate::ledger::core::QueueConfig;

/// When a manager checks for deadlocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadlockCheck {
    /// At the start of each wait.
    OnWait {
        /// Maximum number of steps of such a check. A check takes up to
        /// `waiters * (waiters + reservations)` steps of a few nanoseconds. A longer one is
        /// postponed.
        max_steps: usize,
        /// Time after which a postponed check is made, if the request still waits. At most a
        /// twentieth of the time goes to postponed checks.
        delay: Duration,
    },
    /// Only in [`ReservationManager::break_deadlocks`](crate::ReservationManager::break_deadlocks).
    OnDemand,
}

impl Default for DeadlockCheck {
    /// At once up to 64 Ki steps, otherwise after 100 ms.
    fn default() -> DeadlockCheck {
        DeadlockCheck::OnWait { max_steps: 1 << 16, delay: Duration::from_millis(100) }
    }
}

/// Configuration of a manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ManagerConfig {
    /// Fairness of the wait queue.
    pub queue: QueueConfig,
    /// When deadlocks are checked for.
    pub deadlock: DeadlockCheck,
    /// Retries of spilling for a waiting request.
    pub spill_retries: RetryPolicy,
}

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
