//! The right of one thread at a time to use something, with a time limit.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A value that one thread at a time takes.
#[derive(Debug)]
pub struct Turns<T> {
    value: Mutex<Option<T>>,
    returned: Condvar,
}

/// The value, until it is dropped.
pub struct Taken<'a, T> {
    turns: &'a Turns<T>,
    value: Option<T>,
}

impl<T> Turns<T> {
    pub fn new(value: T) -> Turns<T> {
        Turns { value: Mutex::new(Some(value)), returned: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the value, which no other thread can have.
    pub fn get_mut(&mut self) -> Option<&mut T> {
        self.value.get_mut().unwrap_or_else(PoisonError::into_inner).as_mut()
    }

    /// Waits for other threads. `None` at the time.
    pub fn take(&self, until: Instant) -> Option<Taken<'_, T>> {
        let mut slot = self.lock();
        loop {
            if let Some(value) = slot.take() {
                return Some(Taken { turns: self, value: Some(value) });
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.returned.wait_timeout(slot, left);
            slot = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("it is returned by dropping only")
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("it is returned by dropping only")
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        *self.turns.lock() = self.value.take();
        self.turns.returned.notify_one();
    }
}
