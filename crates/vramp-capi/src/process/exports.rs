//! Counts the uses of memory by others, so that it does not end before them.
//!
//! 1. [`Exports::begin`] counts a use and [`Exports::end`] ends it, on any thread.
//! 2. [`Exports::close`] succeeds for one caller, while there are none. No use begins after that.
//! 3. [`Exports::reopen`] undoes it, where the memory could not be released.
//!
//! What was done with the memory during a use has happened before a close that succeeds.

use std::sync::atomic::Ordering;

use crate::sync::AtomicUsize;

/// The number of uses of memory that ended.
const CLOSED: usize = usize::MAX;

/// Uses of memory that must end before the memory does.
#[derive(Debug)]
pub struct Exports(AtomicUsize);

/// Why memory was not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotClosed {
    /// So many uses have not ended.
    InUse(usize),
    /// It was closed before, or another thread closes it.
    Closed,
}

impl Default for Exports {
    fn default() -> Exports {
        Exports(AtomicUsize::new(0))
    }
}

impl Exports {
    /// Counts a use. Returns false once the memory was closed.
    #[must_use]
    pub fn begin(&self) -> bool {
        let count = |uses| (uses != CLOSED).then(|| uses + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, count).is_ok()
    }

    /// Ends a use that [`Exports::begin`] counted.
    pub fn end(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    /// Lets no further use begin, if there is none.
    ///
    /// # Errors
    /// There are uses, or it was closed before.
    pub fn close(&self) -> Result<(), NotClosed> {
        match self.0.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(CLOSED) => Err(NotClosed::Closed),
            Err(uses) => Err(NotClosed::InUse(uses)),
        }
    }

    /// Lets uses begin again. For the caller whose [`Exports::close`] succeeded.
    pub fn reopen(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// Returns true once it was closed.
    pub fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) == CLOSED
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn memory_is_closed_once_and_only_while_nothing_uses_it() {
        let exports = Exports::default();
        assert!(exports.begin() && exports.begin());
        assert_eq!(exports.close(), Err(NotClosed::InUse(2)));
        exports.end();
        exports.end();
        assert_eq!(exports.close(), Ok(()));
        assert_eq!(exports.close(), Err(NotClosed::Closed));
        assert!(exports.is_closed() && !exports.begin());
        exports.reopen();
        assert!(exports.begin() && !exports.is_closed());
    }
}

#[cfg(all(test, loom))]
mod models {
    use std::sync::Arc;

    use loom::thread;

    use super::*;
    use crate::sync::UnsafeCell;

    /// Memory with its uses. Writing it stands for its release.
    struct Memory {
        exports: Exports,
        is_released: UnsafeCell<bool>,
    }

    // SAFETY: the checker fails a model that accesses the cell from two threads at once.
    unsafe impl Sync for Memory {}
    // SAFETY: as above.
    unsafe impl Send for Memory {}

    impl Memory {
        fn new() -> Arc<Memory> {
            Arc::new(Memory { exports: Exports::default(), is_released: UnsafeCell::new(false) })
        }

        /// Uses it if it is open.
        fn use_it(&self) {
            if self.exports.begin() {
                // SAFETY: the checker says whether another thread releases it meanwhile.
                self.is_released.with(|released| assert!(!unsafe { *released }));
                self.exports.end();
            }
        }

        /// Releases it if nothing uses it. Returns true if it did.
        fn release(&self) -> bool {
            let closed = self.exports.close().is_ok();
            if closed {
                // SAFETY: as above.
                self.is_released.with_mut(|released| unsafe { *released = true });
            }
            closed
        }
    }

    #[test]
    fn no_use_meets_the_release_and_one_caller_releases() {
        loom::model(|| {
            let memory = Memory::new();
            let user = {
                let memory = Arc::clone(&memory);
                thread::spawn(move || memory.use_it())
            };
            let other = {
                let memory = Arc::clone(&memory);
                thread::spawn(move || memory.release())
            };
            let own = memory.release();
            user.join().unwrap();
            let released = usize::from(own) + usize::from(other.join().unwrap());
            assert!(released < 2);
            assert_eq!(memory.release(), released == 0);
        });
    }

    #[test]
    fn a_release_that_failed_lets_uses_begin_again() {
        loom::model(|| {
            let memory = Memory::new();
            let user = {
                let memory = Arc::clone(&memory);
                thread::spawn(move || memory.use_it())
            };
            if memory.exports.close().is_ok() {
                // SAFETY: as above. It is as it was when it is open again.
                memory.is_released.with_mut(|released| unsafe { *released = true });
                // SAFETY: as above.
                memory.is_released.with_mut(|released| unsafe { *released = false });
                memory.exports.reopen();
            }
            user.join().unwrap();
            assert!(memory.exports.begin());
        });
    }
}
