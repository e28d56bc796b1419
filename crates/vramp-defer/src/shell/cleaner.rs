//! The thread that copies contents out ahead of need.

use std::sync::{Arc, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::spill_config::CleanerConfig;
use super::state::Shared;
use crate::sync::{Condvar, Mutex, lock};

/// Shortest period: a thread that never sleeps would keep the lock from others.
const SHORTEST: Duration = Duration::from_micros(100);

type Bell = Arc<(Mutex<bool>, Condvar)>;

/// The cleaner's thread; dropping this ends it.
pub(super) struct Cleaner {
    bell: Bell,
    thread: Option<JoinHandle<()>>,
}

impl Cleaner {
    pub fn start(shared: &Arc<Shared>, how: CleanerConfig) -> Cleaner {
        let bell = Bell::default();
        let (ring, weak) = (Arc::clone(&bell), Arc::downgrade(shared));
        let builder = std::thread::Builder::new().name("vramp-cleaner".to_owned());
        // Without a thread nothing is copied ahead of need. All else works.
        let thread = builder.spawn(move || work(&ring, &weak, how)).ok();
        Cleaner { bell, thread }
    }
}

fn work((ended, rung): &(Mutex<bool>, Condvar), shared: &Weak<Shared>, how: CleanerConfig) {
    loop {
        let mut over = lock(ended);
        if !*over {
            // A spurious wake-up does no harm.
            let waited = rung.wait_timeout(over, how.every.max(SHORTEST));
            over = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if *over {
            return;
        }
        drop(over);
        let Some(shared) = shared.upgrade() else { return };
        let capacity = shared.capacity();
        let is_above = shared.lock().core.is_above(capacity, how.above);
        if is_above {
            shared.clean(how.budget);
        }
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        *lock(&self.bell.0) = true;
        self.bell.1.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
