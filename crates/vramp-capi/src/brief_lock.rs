//! A mutex for a few instructions, with one locked instruction for a lock and its unlock.
//!
//! 1. [`BriefLock::lock`] sets a flag. If it was set, the thread tries again for a while, and then
//!    says that it waits and sleeps.
//! 2. Dropping the guard clears the flag with a plain store, and wakes a thread that waits. A
//!    barrier stands between, which is light here and heavy for the thread that is about to sleep.
//!
//! A thread that just comes may go before one that sleeps. Nothing grows, and nothing is poisoned by
//! a panic: what the lock protects changes in single steps.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, UnsafeCell, heavy, light};

/// How often a thread looks at the flag before it sleeps.
const SPINS: usize = if cfg!(loom) { 0 } else { 100 };

pub(crate) struct BriefLock<T> {
    is_locked: AtomicBool,
    /// Threads that sleep, or are about to.
    sleepers: AtomicUsize,
    asleep: Mutex<()>,
    unlocked: Condvar,
    value: UnsafeCell<T>,
}

// SAFETY: the lock moves the value between threads.
unsafe impl<T: Send> Sync for BriefLock<T> {}

impl<T> BriefLock<T> {
    pub fn new(value: T) -> BriefLock<T> {
        BriefLock {
            is_locked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            asleep: Mutex::new(()),
            unlocked: Condvar::new(),
            value: UnsafeCell::new(value),
        }
    }

    #[inline]
    pub fn lock(&self) -> BriefGuard<'_, T> {
        if !self.try_lock() {
            self.wait();
        }
        BriefGuard { lock: self }
    }

    /// Locks it if that takes no longer than a few instructions of another thread.
    #[inline]
    pub fn lock_at_once(&self) -> Option<BriefGuard<'_, T>> {
        let is_locked = self.try_lock() || self.spin();
        // Made only with the lock: dropping a guard unlocks, also what another thread locked.
        is_locked.then(|| BriefGuard { lock: self })
    }

    #[inline]
    fn try_lock(&self) -> bool {
        let exchanged =
            self.is_locked.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        exchanged.is_ok()
    }

    /// Tries for a while. Returns true if it is locked for the caller.
    #[cold]
    fn spin(&self) -> bool {
        for _ in 0..SPINS {
            if !self.is_locked.load(Ordering::Relaxed) && self.try_lock() {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    #[cold]
    fn wait(&self) {
        if self.spin() {
            return;
        }
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        heavy();
        while !self.try_lock() {
            asleep = self.unlocked.wait(asleep).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    #[cold]
    fn wake(&self) {
        // Taken so that a thread that has just found the flag set already sleeps.
        drop(self.asleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.unlocked.notify_one();
    }
}

/// The right to use the value, until it is dropped.
pub(crate) struct BriefGuard<'a, T> {
    lock: &'a BriefLock<T>,
}

impl<T> Deref for BriefGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the flag is set for this guard alone.
        self.lock.value.with(|value| unsafe { &*value })
    }
}

impl<T> DerefMut for BriefGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed mutably.
        self.lock.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T> Drop for BriefGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.is_locked.store(false, Ordering::Release);
        light();
        if self.lock.sleepers.load(Ordering::Relaxed) > 0 {
            self.lock.wake();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn threads_that_share_a_lock_lose_no_step_and_none_sleeps_for_ever() {
        let lock = BriefLock::new(0u64);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for step in 0..20_000 {
                        let mut count = lock.lock();
                        *count += 1;
                        if step % 100 == 0 {
                            // Others come to sleep meanwhile.
                            thread::yield_now();
                        }
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 80_000);
        assert_eq!(lock.sleepers.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_thread_that_does_not_get_the_lock_leaves_it_locked() {
        let lock = BriefLock::new(1);
        let held = lock.lock();
        for _ in 0..3 {
            assert!(lock.lock_at_once().is_none());
        }
        drop(held);
        assert_eq!(lock.lock_at_once().as_deref(), Some(&1));
        assert!(lock.lock_at_once().is_some(), "its guard unlocked");
    }

    #[test]
    fn a_panic_unlocks() {
        let lock = BriefLock::new(1);
        let panicked = thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _guard = lock.lock();
                panic!("while it is locked");
            });
            holder.join().is_err()
        });
        assert!(panicked);
        assert_eq!(*lock.lock(), 1);
    }
}

#[cfg(all(test, loom))]
mod models {
    use std::sync::Arc;

    use loom::thread;

    use super::*;

    #[test]
    fn one_thread_at_a_time_has_the_value_and_each_that_sleeps_is_woken() {
        loom::model(|| {
            let lock = Arc::new(BriefLock::new(0));
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let lock = Arc::clone(&lock);
                    thread::spawn(move || *lock.lock() += 1)
                })
                .collect();
            *lock.lock() += 1;
            for other in others {
                other.join().unwrap();
            }
            assert_eq!(*lock.lock(), 3);
        });
    }

    #[test]
    fn a_lock_that_is_not_waited_for_excludes_others_too() {
        loom::model(|| {
            let lock = Arc::new(BriefLock::new(0));
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let lock = Arc::clone(&lock);
                    thread::spawn(move || {
                        // The second attempt comes while another thread may hold the lock.
                        let steps = (0..2).filter_map(|_| lock.lock_at_once());
                        steps.map(|mut count| *count += 1).count()
                    })
                })
                .collect();
            *lock.lock() += 1;
            let steps: usize = others.into_iter().map(|other| other.join().unwrap()).sum();
            assert_eq!(*lock.lock(), 1 + steps);
        });
    }
}
