//! News that something was returned, for whoever wants to look again.
//!
//! Waiting for memory needs none of this: a waiting request is served in order, with its reservation
//! in hand. A channel tells those who do something else with the news, each of them every time.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex, lock};

/// Why a [`Listener::wait`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitStatus {
    /// Nobody is left who could notify.
    Idle,
    /// Somebody notified since the last wait of this listener.
    Notified,
    /// The channel was shut down.
    Shutdown,
    /// The time was over. Only where one was given.
    TimedOut,
}

/// Tells all its listeners that something happened. Clones are the same channel.
#[derive(Clone, Default)]
pub struct NotificationChannel {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    state: Mutex<News>,
    changed: Condvar,
}

#[derive(Default)]
struct News {
    /// How often somebody notified.
    count: u64,
    notifiers: usize,
    shut_down: bool,
}

/// One who hears of every notification, even of those made while it did something else.
#[derive(Clone)]
pub struct Listener {
    channel: NotificationChannel,
    heard: u64,
}

/// May notify a channel. While there is one, waiting makes sense.
pub struct EventNotifier {
    channel: NotificationChannel,
}

/// Notifies when it goes out of scope.
pub struct NotifyOnExit {
    notifier: EventNotifier,
}

impl NotificationChannel {
    /// A channel without notifiers.
    pub fn new() -> NotificationChannel {
        NotificationChannel::default()
    }

    /// Tells every listener. Wakes all who wait.
    pub fn notify(&self) {
        lock(&self.inner.state).count += 1;
        self.inner.changed.notify_all();
    }

    /// Ends all waits, now and later.
    pub fn shutdown(&self) {
        lock(&self.inner.state).shut_down = true;
        self.inner.changed.notify_all();
    }

    /// One who may notify.
    pub fn notifier(&self) -> EventNotifier {
        lock(&self.inner.state).notifiers += 1;
        EventNotifier { channel: self.clone() }
    }

    /// One who hears of all notifications from now on.
    pub fn listen(&self) -> Listener {
        Listener { channel: self.clone(), heard: lock(&self.inner.state).count }
    }
}

impl Listener {
    /// Waits for news. Several notifications since the last wait are one piece of news.
    pub fn wait(&mut self) -> WaitStatus {
        self.wait_until(None)
    }

    /// As [`wait`](Listener::wait), but not longer than `time`.
    pub fn wait_for(&mut self, time: Duration) -> WaitStatus {
        self.wait_until(Some(Instant::now() + time))
    }

    fn wait_until(&mut self, until: Option<Instant>) -> WaitStatus {
        let inner = &*self.channel.inner;
        let mut news = lock(&inner.state);
        loop {
            if news.shut_down {
                return WaitStatus::Shutdown;
            }
            if news.count > self.heard {
                self.heard = news.count;
                return WaitStatus::Notified;
            }
            if news.notifiers == 0 {
                return WaitStatus::Idle;
            }
            news = match until {
                None => inner.changed.wait(news).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return WaitStatus::TimedOut;
                    }
                    let woken = inner.changed.wait_timeout(news, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl EventNotifier {
    /// Tells every listener of the channel.
    pub fn post(&self) {
        self.channel.notify();
    }
}

impl Drop for EventNotifier {
    fn drop(&mut self) {
        let mut news = lock(&self.channel.inner.state);
        news.notifiers -= 1;
        let last = news.notifiers == 0;
        drop(news);
        if last {
            self.channel.inner.changed.notify_all();
        }
    }
}

/// Notifies when the result goes out of scope, also by a panic or an early return.
pub fn notify_on_exit(notifier: EventNotifier) -> NotifyOnExit {
    NotifyOnExit { notifier }
}

impl Drop for NotifyOnExit {
    fn drop(&mut self) {
        self.notifier.post();
    }
}
