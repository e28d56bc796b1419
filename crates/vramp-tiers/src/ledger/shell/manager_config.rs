//! Configuration of a reservation manager.

use std::time::Duration;

use crate::ledger::core::QueueConfig;

use crate::ledger::shell::retry::RetryPolicy;

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
