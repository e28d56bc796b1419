//! The thread that watches for waiters what notifies no thread.
//!
//! A waiter may lack room or memory that becomes free outside the manager: a free of the allocator, a
//! reservation that ends, memory of the host. Or it waits for a lease that ends when a capture does. None
//! of these calls the manager. The same holds for a request in the queue of the card's space whose
//! bytes cannot leave the card for lack of room below (`pay.rs`). While there is such a waiter this one
//! thread looks again, after a pause that doubles from [`SHORTEST`] to [`LONGEST`], and retries the oldest
//! stalled waiter. It also ends the waits of tasks at their deadlines, and wakes those that lack budget after
//! their pauses. All other waiters are served by the thread that makes the change.
//!
//! The thread starts with the first such waiter, sleeps while there is none, and ends with the manager.

use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::hand_over::Bell;
use super::state::Shared;
use crate::sync::{Condvar, Mutex, lock};

const SHORTEST: Duration = Duration::from_micros(200);
const LONGEST: Duration = Duration::from_millis(10);

fn work((bell, rung): &(Mutex<Bell>, Condvar), shared: &Weak<Shared>) {
    let mut pause = SHORTEST;
    loop {
        let mut state = lock(bell);
        while !state.is_needed && !state.is_over {
            state = rung.wait(state).unwrap_or_else(PoisonError::into_inner);
            pause = SHORTEST;
        }
        if !state.is_over {
            // A spurious wake-up does no harm.
            state = rung.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.is_over {
            return;
        }
        // Unlocking rings again if there are still waiters to watch for.
        state.is_needed = false;
        drop(state);
        let Some(shared) = shared.upgrade() else { return };
        shared.look_again();
        pause = (pause * 2).min(LONGEST);
    }
}

impl Shared {
    /// Sets what the thread will look at: this.
    pub(super) fn watch(self: &Arc<Shared>) {
        let _ = self.this.set(Arc::downgrade(self));
    }

    /// Wakes the thread, or starts it. O(1).
    pub(super) fn ring_watcher(&self) {
        let inner = &self.watcher.inner;
        let mut bell = lock(&inner.0);
        if bell.is_needed || bell.is_over {
            return;
        }
        bell.is_needed = true;
        if bell.thread.is_none() {
            let shared = self.this.get().cloned().unwrap_or_default();
            let watched = Arc::clone(inner);
            let builder = std::thread::Builder::new().name("vramp-leases".to_owned());
            // Without a thread a waiter is served at the next change in the manager.
            bell.thread = builder.spawn(move || work(&watched, &shared)).ok();
        }
        inner.1.notify_one();
    }

    /// Serves waiters by what changed outside the manager.
    fn look_again(&self) {
        self.watch_reserving();
        let mut guard = self.lock();
        guard.stats.looks += 1;
        // Work that cannot be queried counts as in flight.
        let _ = guard.poll();
        let capacity = self.capacity();
        let state = &mut *guard;
        if state.has_pinned_memory {
            state.note_pins(&self.allocator);
        }
        state.core.set_capacity(capacity);
        state.core.retry_stalled();
        let now = Instant::now();
        state.waiting.expire(&mut state.core, now);
    }
}
