//! Where one waiter sits until it gets something in hand.
//!
//! Each waiter has a seat of its own, so that exactly those are woken who were given something, and
//! what was given before the waiter sat down is not lost.

use std::sync::PoisonError;
use std::time::Instant;

use crate::sync::{Condvar, Mutex, lock};

pub(crate) struct Seat<T> {
    given: Mutex<Option<T>>,
    woken: Condvar,
}

impl<T> Default for Seat<T> {
    fn default() -> Seat<T> {
        Seat { given: Mutex::new(None), woken: Condvar::new() }
    }
}

impl<T> Seat<T> {
    /// Gives its waiter something, once.
    pub fn give(&self, gift: T) {
        *lock(&self.given) = Some(gift);
        self.woken.notify_one();
    }

    /// What is given, as soon as it is; `None` once `until` has passed.
    pub fn wait(&self, until: Option<Instant>) -> Option<T> {
        let mut given = lock(&self.given);
        loop {
            if let Some(gift) = given.take() {
                return Some(gift);
            }
            given = match until {
                None => self.woken.wait(given).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    let woken = self.woken.wait_timeout(given, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
