//! Wakers that the watching thread calls at an instant: for tasks that wait outside the queue of leases.
//!
//! Growth: O(log timers) to set, to remove and to take one. A look without a due timer sees one entry.

use std::collections::BTreeMap;
use std::task::Waker;
use std::time::Instant;

#[derive(Default)]
pub(super) struct Timers {
    by_instant: BTreeMap<TimerKey, Waker>,
    made: u64,
}

/// A timer that was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TimerKey {
    at: Instant,
    number: u64,
}

impl Timers {
    /// Sets a timer.
    pub fn set(&mut self, at: Instant, waker: Waker) -> TimerKey {
        self.made += 1;
        let key = TimerKey { at, number: self.made };
        self.by_instant.insert(key, waker);
        key
    }

    /// Removes a timer. Returns its waker, to be dropped after unlocking; `None` if it was due.
    pub fn remove(&mut self, key: TimerKey) -> Option<Waker> {
        self.by_instant.remove(&key)
    }

    /// Removes the timers that are due. Returns their wakers, to be called after unlocking.
    pub fn take_due(&mut self, now: Instant) -> Vec<Waker> {
        let mut due = Vec::new();
        while let Some(first) = self.by_instant.first_entry() {
            if first.key().at > now {
                break;
            }
            due.push(first.remove());
        }
        due
    }

    /// Returns the number of timers.
    pub fn len(&self) -> usize {
        self.by_instant.len()
    }
}
