//! The thread that watches for waiters (`watch.rs`): its bell and its end.

use std::sync::Arc;
use std::thread::JoinHandle;

use crate::sync::{Condvar, Mutex, lock};

/// The thread, once it was needed.
#[derive(Default)]
pub(super) struct Watcher {
    pub inner: Arc<(Mutex<Bell>, Condvar)>,
}

#[derive(Default)]
pub(super) struct Bell {
    /// There are waiters to watch for.
    pub is_needed: bool,
    pub is_over: bool,
    pub thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Ends the thread and waits for it.
    pub fn end(&self) {
        let mut bell = lock(&self.inner.0);
        bell.is_over = true;
        let thread = bell.thread.take();
        drop(bell);
        self.inner.1.notify_one();
        // A waker that it calls may drop the last buffer.
        if let Some(thread) = thread.filter(|it| it.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}
