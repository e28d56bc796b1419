//! What threads share on the fast path, in the form that the model checker can watch.

#[cfg(not(loom))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
};

#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
};

/// A mutex that a forked child can lock although a thread of its parent held it: there it holds a
/// default value.
#[derive(Default)]
pub(crate) struct ForkMutex<T> {
    value: std::sync::Mutex<T>,
    after_fork: std::sync::Mutex<T>,
}

impl<T: Default> ForkMutex<T> {
    pub(crate) fn lock(&self) -> std::sync::LockResult<std::sync::MutexGuard<'_, T>> {
        let mutex = if vramp_host::fork::is_forked() { &self.after_fork } else { &self.value };
        mutex.lock()
    }
}
