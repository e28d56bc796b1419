//! The lock of the manager and its condition variables. What waits in threads or tasks has its slots from
//! [`vramp_tiers::wait`], whose loom models are there.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

use std::sync::PoisonError;

/// Locks even after a panic in another thread: what it protects is changed in single steps.
#[inline]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
