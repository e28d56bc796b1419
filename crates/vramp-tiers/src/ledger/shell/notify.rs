//! Notification channels: broadcasts that memory came back to a space.
//!
//! Requests do not need them: a waiting request is woken with its reservation made. A channel is
//! for threads that do something else when memory comes back. Every listener gets every
//! notification.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex, lock};

/// Why [`Listener::wait`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitStatus {
    /// No notifier is left.
    Idle,
    /// There was a notification since the last wait of this listener.
    Notified,
    /// The channel was shut down.
    Shutdown,
    /// The time was over.
    TimedOut,
}

/// Broadcasts notifications to its listeners. Clones are handles of one channel.
#[derive(Clone, Default)]
pub struct NotificationChannel {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    state: Mutex<ChannelState>,
    changed: Condvar,
}

#[derive(Default)]
struct ChannelState {
    /// Number of notifications so far.
    count: u64,
    notifiers: usize,
    shut_down: bool,
}

/// Receiver of notifications, also of those made between its waits.
#[derive(Clone)]
pub struct Listener {
    channel: NotificationChannel,
    seen: u64,
}

/// Sender of notifications. Listeners wait as long as there is one.
pub struct EventNotifier {
    channel: NotificationChannel,
}

/// Notifies a channel when it is dropped.
pub struct NotifyOnExit {
    notifier: EventNotifier,
}

impl NotificationChannel {
    /// Returns a channel without notifiers.
    pub fn new() -> NotificationChannel {
        NotificationChannel::default()
    }

    /// Notifies every listener, and wakes those that wait.
    pub fn notify(&self) {
        lock(&self.inner.state).count += 1;
        self.inner.changed.notify_all();
    }

    /// Ends all waits, present and future ones.
    pub fn shutdown(&self) {
        lock(&self.inner.state).shut_down = true;
        self.inner.changed.notify_all();
    }

    /// Returns a notifier.
    pub fn notifier(&self) -> EventNotifier {
        lock(&self.inner.state).notifiers += 1;
        EventNotifier { channel: self.clone() }
    }

    /// Returns a listener for all notifications from now on.
    pub fn listen(&self) -> Listener {
        Listener { channel: self.clone(), seen: lock(&self.inner.state).count }
    }
}

impl Listener {
    /// Waits for a notification. Several notifications since the last wait count as one.
    pub fn wait(&mut self) -> WaitStatus {
        self.wait_until(None)
    }

    /// As [`wait`](Listener::wait), for at most `time`. A time beyond the range of the clock means no
    /// bound.
    pub fn wait_for(&mut self, time: Duration) -> WaitStatus {
        self.wait_until(Instant::now().checked_add(time))
    }

    fn wait_until(&mut self, until: Option<Instant>) -> WaitStatus {
        let inner = &*self.channel.inner;
        let mut state = lock(&inner.state);
        loop {
            if state.shut_down {
                return WaitStatus::Shutdown;
            }
            if state.count > self.seen {
                self.seen = state.count;
                return WaitStatus::Notified;
            }
            if state.notifiers == 0 {
                return WaitStatus::Idle;
            }
            state = match until {
                None => inner.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return WaitStatus::TimedOut;
                    }
                    let woken = inner.changed.wait_timeout(state, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl EventNotifier {
    /// Notifies every listener of the channel.
    pub fn post(&self) {
        self.channel.notify();
    }
}

impl Drop for EventNotifier {
    fn drop(&mut self) {
        let mut state = lock(&self.channel.inner.state);
        state.notifiers -= 1;
        let last = state.notifiers == 0;
        drop(state);
        if last {
            self.channel.inner.changed.notify_all();
        }
    }
}

/// Returns a guard that notifies when it is dropped, also by a panic or an early return.
pub fn notify_on_exit(notifier: EventNotifier) -> NotifyOnExit {
    NotifyOnExit { notifier }
}

impl Drop for NotifyOnExit {
    fn drop(&mut self) {
        self.notifier.post();
    }
}
