//! Panics in callbacks of the program, which are caught and counted.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

/// Calls callbacks of the program and counts those that panicked.
#[derive(Default)]
pub(crate) struct Panics {
    count: AtomicU64,
}

impl Panics {
    /// Calls a callback of the program; `None` if it panicked, which is counted.
    pub fn catch<R>(&self, call: impl FnOnce() -> R) -> Option<R> {
        let panic = match catch_unwind(AssertUnwindSafe(call)) {
            Ok(result) => return Some(result),
            Err(panic) => panic,
        };
        self.count.fetch_add(1, Ordering::Relaxed);
        // What was thrown may panic when it is dropped.
        if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            std::mem::forget(second);
        }
        None
    }

    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}
