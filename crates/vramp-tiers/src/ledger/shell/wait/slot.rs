//! Where one waiter sits until it gets something in hand.
//!
//! Each waiter has a seat of its own, so that exactly those are woken who were given something, and
//! what was given before the waiter sat down is not lost. Neither is a call to get up and try again.

use std::sync::PoisonError;
use std::time::Instant;

use crate::sync::{Condvar, Mutex, lock};

pub(crate) struct WaitSlot<T> {
    slot: Mutex<Slot<T>>,
    woken: Condvar,
}

struct Slot<T> {
    given: Option<T>,
    called: bool,
}

/// Why a waiter got up.
pub(crate) enum Woken<T> {
    /// It was given something.
    Given(T),
    /// There is something new that it may try.
    Called,
    /// The time is over.
    Late,
}

impl<T> Default for WaitSlot<T> {
    fn default() -> WaitSlot<T> {
        let slot = Slot { given: None, called: false };
        WaitSlot { slot: Mutex::new(slot), woken: Condvar::new() }
    }
}

impl<T> WaitSlot<T> {
    /// Gives its waiter something, once.
    pub fn give(&self, gift: T) {
        lock(&self.slot).given = Some(gift);
        self.woken.notify_one();
    }

    /// Calls its waiter.
    pub fn call(&self) {
        lock(&self.slot).called = true;
        self.woken.notify_one();
    }

    /// What is given, as soon as it is; `None` once `until` has passed.
    pub fn wait(&self, until: Option<Instant>) -> Option<T> {
        loop {
            match self.wait_or_call(until) {
                Woken::Given(gift) => return Some(gift),
                Woken::Called => {}
                Woken::Late => return None,
            }
        }
    }

    /// The same for one that comes when it is called, once for all calls since the last time.
    pub fn wait_or_call(&self, until: Option<Instant>) -> Woken<T> {
        let mut slot = lock(&self.slot);
        loop {
            if let Some(gift) = slot.given.take() {
                return Woken::Given(gift);
            }
            if std::mem::take(&mut slot.called) {
                return Woken::Called;
            }
            slot = match until {
                None => self.woken.wait(slot).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Woken::Late;
                    }
                    let woken = self.woken.wait_timeout(slot, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
