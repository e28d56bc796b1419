//! The slot in which one waiter, a thread or a task, sleeps until its wait is completed.
//!
//! Each waiter has a slot of its own, so that exactly the completed waiters are woken. A completion
//! or a notification that comes before the waiter sleeps is kept.

use std::sync::PoisonError;
use std::task::Waker;
use std::time::Instant;

use crate::sync::{Condvar, Mutex, lock};

pub(crate) struct WaitSlot<T> {
    state: Mutex<SlotState<T>>,
    changed: Condvar,
}

struct SlotState<T> {
    completion: Option<T>,
    notified: bool,
    /// Wakes the task that waits.
    waker: Option<Waker>,
}

impl<T> SlotState<T> {
    /// Takes what has happened since the last wait.
    fn take(&mut self) -> Option<WaitEnd<T>> {
        if let Some(completion) = self.completion.take() {
            return Some(WaitEnd::Completed(completion));
        }
        std::mem::take(&mut self.notified).then_some(WaitEnd::Notified)
    }
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
        let state = SlotState { completion: None, notified: false, waker: None };
        WaitSlot { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<T> WaitSlot<T> {
    /// Completes the wait. Called once.
    pub fn complete(&self, completion: T) {
        self.change(|state| state.completion = Some(completion));
    }

    /// Wakes the waiter without completing the wait.
    pub fn notify(&self) {
        self.change(|state| state.notified = true);
    }

    fn change(&self, change: impl FnOnce(&mut SlotState<T>)) {
        let mut state = lock(&self.state);
        change(&mut state);
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_one();
        // Code of the task's executor: no lock is held.
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Returns what has happened since the last wait; without that, stores the waker.
    pub fn poll(&self, waker: &Waker) -> Option<WaitEnd<T>> {
        let mut state = lock(&self.state);
        let end = state.take();
        if end.is_none() && !state.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            state.waker = Some(waker.clone());
        }
        end
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
            if let Some(end) = state.take() {
                return end;
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
