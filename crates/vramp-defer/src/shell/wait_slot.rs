//! The slot in which one waiter, a thread or a future, waits for the outcome of its request.
//!
//! Each waiter has a slot of its own, so that exactly the served waiters are woken. The outcome is put
//! in while the manager's lock is held; the waiter is woken after unlocking. An outcome that comes
//! before the waiter sleeps is kept.

use std::sync::PoisonError;
use std::task::Waker;
use std::time::Instant;

use crate::sync::{Condvar, Mutex, lock};

pub(super) struct WaitSlot<T> {
    state: Mutex<SlotState<T>>,
    completed: Condvar,
}

struct SlotState<T> {
    outcome: Option<T>,
    waker: Option<Waker>,
}

impl<T> Default for WaitSlot<T> {
    fn default() -> WaitSlot<T> {
        let state = SlotState { outcome: None, waker: None };
        WaitSlot { state: Mutex::new(state), completed: Condvar::new() }
    }
}

impl<T> WaitSlot<T> {
    /// Puts the outcome in. Called once.
    pub fn put(&self, outcome: T) {
        lock(&self.state).outcome = Some(outcome);
    }

    /// Wakes the waiter after [`put`](WaitSlot::put). A future's waker is foreign code: no lock is held.
    pub fn wake(&self) {
        self.completed.notify_one();
        let waker = lock(&self.state).waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes the outcome, if there is one.
    pub fn take(&self) -> Option<T> {
        lock(&self.state).outcome.take()
    }

    /// Takes the outcome; without one, keeps the waker to be woken when it comes.
    pub fn poll(&self, waker: &Waker) -> Option<T> {
        let mut state = lock(&self.state);
        let outcome = state.outcome.take();
        if outcome.is_none() && !state.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            state.waker = Some(waker.clone());
        }
        outcome
    }

    /// Waits for the outcome; `None` once `until` has passed.
    pub fn wait(&self, until: Option<Instant>) -> Option<T> {
        let mut state = lock(&self.state);
        loop {
            if let Some(outcome) = state.outcome.take() {
                return Some(outcome);
            }
            state = match until {
                None => self.completed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    let woken = self.completed.wait_timeout(state, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
