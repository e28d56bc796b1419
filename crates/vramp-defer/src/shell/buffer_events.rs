//! Changes of buffers' states, recorded for subscribers.
//!
//! 1. [`SpillManager::events`](super::SpillManager::events) returns an [`EventStream`] with a bounded
//!    queue of its own.
//! 2. Each change is recorded while the manager's lock is held, so a stream has the changes of a buffer
//!    in their order. Recording takes a queue's lock for a moment and calls nothing.
//! 3. Any thread takes events out. A full queue drops its oldest event and counts it:
//!    [`EventStream::take_lost`] returns the count, and
//!    [`SpillManager::statuses`](super::SpillManager::statuses) the present state of all buffers.
//!
//! Cost: without a subscriber nothing. With some, O(1) for each change and subscriber.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::planner::{BufferId, BufferStatus, SpillTier};
use vramp_core::Bytes;

use crate::sync::{Condvar, Mutex, lock};

/// One change of a buffer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferEvent {
    /// The buffer.
    pub buffer: BufferId,
    /// The change.
    pub change: BufferChange,
    /// State of the buffer after the change. Of a freed one, as it was.
    pub status: BufferStatus,
    /// Time on the device's clock.
    pub at_ns: u64,
}

/// What changed. Bytes move a piece at a time, so a long buffer has several events of a kind:
/// [`BufferEvent::status`] says how much is deferred after each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BufferChange {
    /// The buffer was made.
    Created,
    /// Contents left the card.
    Deferred {
        /// Tier that they are restored from.
        to: SpillTier,
        /// Length of the contents.
        bytes: Bytes,
    },
    /// Contents are on the card again, for work queued after their copy.
    Retrieved {
        /// Tier that they were read from.
        from: SpillTier,
        /// Length of the contents.
        bytes: Bytes,
    },
    /// Deferred contents moved to another tier.
    Moved {
        /// Tier that they left.
        from: SpillTier,
        /// Tier that they are on.
        to: SpillTier,
        /// Length of the contents.
        bytes: Bytes,
    },
    /// A lease that overwrote the buffer ended: what was deferred of the old contents is dropped.
    Overwritten {
        /// Length of the old contents.
        bytes: Bytes,
    },
    /// A lease holds the buffer: it does not leave the card.
    Locked,
    /// A lease ended. Work that it queued may run on.
    Unlocked,
    /// The contents were discarded.
    Discarded,
    /// The buffer was freed: its last handle was dropped, and its work is over.
    Freed,
}

/// Why [`EventStream::recv`] returned no event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventsError {
    /// None came in time.
    #[error("no event in the given time: wait again")]
    Empty,
    /// None will come.
    #[error("no more events: the stream was closed, or its manager and all buffers were dropped")]
    Closed,
}

/// Events of one manager's buffers, for one subscriber. Dropping it ends the subscription.
///
/// Several threads may take events; each event goes to one of them.
pub struct EventStream {
    queue: Arc<Queue>,
}

struct Queue {
    capacity: usize,
    events: Mutex<Queued>,
    arrived: Condvar,
}

#[derive(Default)]
struct Queued {
    events: VecDeque<BufferEvent>,
    lost: u64,
    woken: bool,
    closed: bool,
}

impl EventStream {
    /// Takes the oldest event, waiting for at most `timeout`.
    ///
    /// # Errors
    /// None came in time, or none will come. Events that are queued are returned first.
    pub fn recv(&self, timeout: Duration) -> Result<BufferEvent, EventsError> {
        let end = Instant::now().checked_add(timeout);
        let mut queued = lock(&self.queue.events);
        loop {
            if let Some(event) = queued.events.pop_front() {
                return Ok(event);
            }
            if queued.closed {
                return Err(EventsError::Closed);
            }
            if std::mem::take(&mut queued.woken) {
                return Err(EventsError::Empty);
            }
            let Some(end) = end else {
                let woken = self.queue.arrived.wait(queued);
                queued = woken.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(EventsError::Empty);
            }
            let woken = self.queue.arrived.wait_timeout(queued, left);
            queued = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes the oldest event without waiting.
    ///
    /// # Errors
    /// There is none now, or none will come.
    pub fn try_recv(&self) -> Result<BufferEvent, EventsError> {
        self.recv(Duration::ZERO)
    }

    /// Returns the number of events dropped since the last call because the queue was full, the oldest
    /// first.
    pub fn take_lost(&self) -> u64 {
        std::mem::take(&mut lock(&self.queue.events).lost)
    }

    /// Lets one [`recv`](EventStream::recv) that finds no event return at once: one that waits, or the
    /// next. A thread that takes events out learns so that there is something else to do.
    pub fn wake(&self) {
        lock(&self.queue.events).woken = true;
        self.queue.arrived.notify_one();
    }

    /// Ends the subscription and wakes threads in [`recv`](EventStream::recv). Events that are queued
    /// stay.
    pub fn close(&self) {
        self.queue.close();
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.close();
    }
}

impl std::fmt::Debug for EventStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let queued = lock(&self.queue.events);
        write!(f, "{} events of at most {}", queued.events.len(), self.queue.capacity)
    }
}

impl Queue {
    fn close(&self) {
        lock(&self.events).closed = true;
        self.arrived.notify_all();
    }

    /// Returns false if the subscription ended.
    fn push(&self, event: BufferEvent) -> bool {
        let mut queued = lock(&self.events);
        if queued.closed {
            return false;
        }
        if queued.events.len() >= self.capacity {
            queued.events.pop_front();
            queued.lost += 1;
        }
        queued.events.push_back(event);
        drop(queued);
        self.arrived.notify_one();
        true
    }
}

/// The subscribers of one manager.
#[derive(Default)]
pub(super) struct Subscribers {
    queues: Vec<Weak<Queue>>,
}

impl Subscribers {
    /// Returns true if there are none.
    pub fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    /// Adds a subscriber whose queue holds at most `capacity` events, at least one.
    pub fn add(&mut self, capacity: usize) -> EventStream {
        let capacity = capacity.max(1);
        let (events, arrived) = (Mutex::default(), Condvar::new());
        let queue = Arc::new(Queue { capacity, events, arrived });
        self.queues.retain(|queue| queue.strong_count() > 0);
        self.queues.push(Arc::downgrade(&queue));
        EventStream { queue }
    }

    /// Adds an event to each queue.
    pub fn push(&mut self, event: BufferEvent) {
        self.queues.retain(|queue| queue.upgrade().is_some_and(|queue| queue.push(event)));
    }
}

impl Drop for Subscribers {
    fn drop(&mut self) {
        self.queues.iter().filter_map(Weak::upgrade).for_each(|queue| queue.close());
    }
}
