//! The background thread of a pool (`ahead.rs`): what it is woken for, and its end.

use std::sync::Arc;
use std::thread::JoinHandle;

use crate::sync::{Condvar, Mutex, lock};

/// What a thread wakes the background thread for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wake {
    /// Few blocks are free.
    Grow,
    /// Memory may have become idle.
    Age,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Requests {
    pub grow: bool,
    pub age: bool,
    pub end: bool,
}

pub(super) type Signal = Arc<(Mutex<Requests>, Condvar)>;

/// The background thread of a pool. It starts with the first request and ends with the pool.
#[derive(Default)]
pub(super) struct Background {
    pub signal: Signal,
    pub thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Background {
    fn drop(&mut self) {
        let (requests, changed) = &*self.signal;
        lock(requests).end = true;
        changed.notify_one();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // The thread itself may drop the last handle of the pool.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
