//! The slot in which one waiting thread sleeps until its wait is completed.
//!
//! Each waiter has a slot of its own, so that exactly the completed waiters are woken. A completion
//! or a notification that comes before the thread sleeps is kept.

use std::sync::PoisonError;
use std::time::Instant;

use crate::sync::{Condvar, Mutex, lock};

pub(crate) struct WaitSlot<T> {
    state: Mutex<SlotState<T>>,
    changed: Condvar,
}

struct SlotState<T> {
    completion: Option<T>,
    notified: bool,
}

/// Why the wait returned.
pub(crate) enum WaitEnd<T> {
    /// The wait is completed.
    Completed(T),
    /// The waiter was notified: it may try again.
    Notified,
    /// The time is over.
    TimedOut,
}

impl<T> Default for WaitSlot<T> {
    fn default() -> WaitSlot<T> {
        let state = SlotState { completion: None, notified: false };
        WaitSlot { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<T> WaitSlot<T> {
    /// Completes the wait. Called once.
    pub fn complete(&self, completion: T) {
        lock(&self.state).completion = Some(completion);
        self.changed.notify_one();
    }

    /// Wakes the waiter without completing the wait.
    pub fn notify(&self) {
        lock(&self.state).notified = true;
        self.changed.notify_one();
    }

    /// Waits for the completion, through notifications; `None` once `until` has passed.
    pub fn wait(&self, until: Option<Instant>) -> Option<T> {
        loop {
            match self.wait_or_notified(until) {
                WaitEnd::Completed(completion) => return Some(completion),
                WaitEnd::Notified => {}
                WaitEnd::TimedOut => return None,
            }
        }
    }

    /// Waits for the completion or a notification. Several notifications since the last wait are
    /// one.
    pub fn wait_or_notified(&self, until: Option<Instant>) -> WaitEnd<T> {
        let mut state = lock(&self.state);
        loop {
            if let Some(completion) = state.completion.take() {
                return WaitEnd::Completed(completion);
            }
            if std::mem::take(&mut state.notified) {
                return WaitEnd::Notified;
            }
            state = match until {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return WaitEnd::TimedOut;
                    }
                    let woken = self.changed.wait_timeout(state, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
