//! What waits are made of: of reservations and of leases, in threads and in tasks.
//!
//! 1. A request that has to wait enters its queue, and gets a slot ([`Waiters::add`]). Both happen under
//!    the lock that protects the queue.
//! 2. It goes on in [steps](Waits::step), which never block, and in [work](Waits::work), which may. A
//!    thread calls both, and sleeps in between ([`block_on`]). A task calls them where it is polled.
//! 3. The thread that ends a wait puts the outcome into the slot while it holds the lock
//!    ([`Waiters::complete`]). Once it has unlocked, it wakes the waiters whose waits ended
//!    ([`Waiters::take_ended`], [`WaitSlot::wake`]), and no others.
//! 4. A waiter that gives up takes the lock: it is in the queue and leaves it ([`Waiters::remove`]), or
//!    its outcome is in its slot.
//!
//! Growth: O(log waiters) to add, complete or remove one. A look at the deadlines sees those that have
//! passed and one more.
//!
//! Deliberately absent: which waiter is served. The queues decide it: the [`ledger`](crate::ledger) for
//! reservations, `vramp-defer` for leases.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex, lock};

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;

/// End of a wait: an [`Instant`], or a [`Duration`] from now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// No deadline: the wait ends at the latest with the shutdown of the manager.
    pub const NEVER: Deadline = Deadline(None);

    /// Returns the instant of the deadline, if there is one.
    pub fn instant(self) -> Option<Instant> {
        self.0
    }

    /// Returns true if there is a deadline, and it has passed.
    pub fn has_passed(self) -> bool {
        self.0.is_some_and(|at| at <= Instant::now())
    }
}

impl From<Instant> for Deadline {
    fn from(at: Instant) -> Deadline {
        Deadline(Some(at))
    }
}

impl From<Duration> for Deadline {
    /// A duration beyond the range of the clock means no deadline.
    fn from(time: Duration) -> Deadline {
        Deadline(Instant::now().checked_add(time))
    }
}

/// What a request needs next.
#[derive(Debug)]
#[must_use = "a request that waits needs its next step"]
pub enum Step<T> {
    /// The wait is over.
    Ready(T),
    /// Call [`Waits::work`], which may block, and take the next step.
    Work,
    /// Take the next step when the waker is called, and at the instant if there is one.
    Pending(Option<Instant>),
}

/// A request that may have to wait.
pub trait Waits {
    /// Result of the wait.
    type Output;

    /// Goes on as far as that needs no time. Never blocks. To be called no more once it has returned
    /// [`Step::Ready`].
    fn step(&mut self, waker: &Waker) -> Step<Self::Output>;

    /// Does what [`Step::Work`] stands for, such as spilling. May block.
    fn work(&mut self);
}

/// Waits in this thread, which also does the work.
pub fn block_on<W: Waits>(mut request: W) -> W::Output {
    // Most requests need none.
    let mut bell: Option<(Arc<Bell>, Waker)> = None;
    loop {
        let waker = bell.as_ref().map_or(Waker::noop(), |(_, waker)| waker);
        match request.step(waker) {
            Step::Ready(output) => return output,
            Step::Work => request.work(),
            Step::Pending(until) => match &bell {
                Some((bell, _)) => bell.wait(until),
                None => {
                    let new = Arc::new(Bell::default());
                    bell = Some((Arc::clone(&new), Waker::from(new)));
                }
            },
        }
    }
}

/// Wakes the thread that waits for it. A ring before the wait is kept.
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Default for Bell {
    fn default() -> Bell {
        Bell { rung: Mutex::new(false), changed: Condvar::new() }
    }
}

impl Bell {
    fn wait(&self, until: Option<Instant>) {
        let mut rung = lock(&self.rung);
        while !std::mem::take(&mut *rung) {
            rung = match until {
                None => self.changed.wait(rung).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return;
                    }
                    let woken = self.changed.wait_timeout(rung, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Bell>) {
        *lock(&self.rung) = true;
        self.changed.notify_one();
    }
}

/// Where the outcome of one wait comes. An outcome or a notification that comes before the waiter looks
/// is kept.
#[derive(Debug)]
pub struct WaitSlot<T> {
    state: Mutex<SlotState<T>>,
}

#[derive(Debug)]
struct SlotState<T> {
    outcome: Option<T>,
    is_notified: bool,
    waker: Option<Waker>,
}

impl<T> Default for WaitSlot<T> {
    fn default() -> WaitSlot<T> {
        let state = SlotState { outcome: None, is_notified: false, waker: None };
        WaitSlot { state: Mutex::new(state) }
    }
}

impl<T> WaitSlot<T> {
    /// Puts the outcome in, and wakes the waiter. To be called once, with no lock held.
    pub fn complete(&self, outcome: T) {
        self.put(outcome);
        self.wake();
    }

    fn put(&self, outcome: T) {
        lock(&self.state).outcome = Some(outcome);
    }

    /// Wakes the waiter. Its waker is code of an executor: no lock may be held.
    pub fn wake(&self) {
        let waker = lock(&self.state).waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Wakes the waiter without an outcome: it may try again. With no lock held.
    pub fn notify(&self) {
        lock(&self.state).is_notified = true;
        self.wake();
    }

    /// Takes the outcome. Without one the waker is called when it comes, and at a notification.
    pub fn poll(&self, waker: &Waker) -> Option<T> {
        let mut state = lock(&self.state);
        let outcome = state.outcome.take();
        if outcome.is_none() && !state.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            state.waker = Some(waker.clone());
        }
        outcome
    }

    /// Takes the outcome, if there is one.
    pub fn take(&self) -> Option<T> {
        lock(&self.state).outcome.take()
    }

    /// Returns true once after one or more notifications.
    pub fn take_notified(&self) -> bool {
        std::mem::take(&mut lock(&self.state).is_notified)
    }

    /// Waits for the outcome in this thread; `None` once `until` has passed.
    pub fn wait(&self, until: Option<Instant>) -> Option<T> {
        block_on(Outcome { slot: self, until })
    }
}

/// The wait for the outcome in a slot.
struct Outcome<'a, T> {
    slot: &'a WaitSlot<T>,
    until: Option<Instant>,
}

impl<T> Waits for Outcome<'_, T> {
    type Output = Option<T>;

    fn step(&mut self, waker: &Waker) -> Step<Option<T>> {
        match self.slot.poll(waker) {
            None if !Deadline(self.until).has_passed() => Step::Pending(self.until),
            outcome => Step::Ready(outcome),
        }
    }

    fn work(&mut self) {}
}

/// The waiters of a queue: the slot of each, and its deadline. Belongs under the queue's lock.
#[derive(Debug)]
pub struct Waiters<I, T> {
    waiting: BTreeMap<I, Waiter<T>>,
    by_deadline: BTreeSet<(Instant, I)>,
    /// Slots whose waiters are to be woken.
    ended: Vec<Arc<WaitSlot<T>>>,
    completed: u64,
    deadline_steps: u64,
}

#[derive(Debug)]
struct Waiter<T> {
    slot: Arc<WaitSlot<T>>,
    until: Option<Instant>,
}

impl<I, T> Default for Waiters<I, T> {
    fn default() -> Waiters<I, T> {
        Waiters {
            waiting: BTreeMap::new(),
            by_deadline: BTreeSet::new(),
            ended: Vec::new(),
            completed: 0,
            deadline_steps: 0,
        }
    }
}

impl<I: Copy + Ord, T> Waiters<I, T> {
    /// Adds a waiter, at which [`expire`](Waiters::expire) looks at `until`.
    ///
    /// # Panics
    /// It is there already.
    pub fn add(&mut self, id: I, until: Option<Instant>) -> Arc<WaitSlot<T>> {
        let slot = Arc::new(WaitSlot::default());
        let waiter = Waiter { slot: Arc::clone(&slot), until };
        self.by_deadline.extend(until.map(|until| (until, id)));
        assert!(self.waiting.insert(id, waiter).is_none(), "a waiter has one slot");
        slot
    }

    /// Removes a waiter without an outcome. Returns false if it is not there: then its slot has one.
    pub fn remove(&mut self, id: I) -> bool {
        self.take(id).is_some()
    }

    fn take(&mut self, id: I) -> Option<Waiter<T>> {
        let waiter = self.waiting.remove(&id)?;
        if let Some(until) = waiter.until {
            self.by_deadline.remove(&(until, id));
        }
        Some(waiter)
    }

    /// Ends the wait of a waiter that is there. It is to be woken after unlocking, see
    /// [`take_ended`](Waiters::take_ended).
    pub fn complete(&mut self, id: I, outcome: T) {
        if let Some(waiter) = self.take(id) {
            waiter.slot.put(outcome);
            self.ended.push(waiter.slot);
            self.completed += 1;
        }
    }

    /// Sets when [`expire`](Waiters::expire) looks at a waiter that is there.
    pub fn set_deadline(&mut self, id: I, until: Option<Instant>) {
        let Some(waiter) = self.waiting.get_mut(&id) else { return };
        if let Some(before) = std::mem::replace(&mut waiter.until, until) {
            self.by_deadline.remove(&(before, id));
        }
        self.by_deadline.extend(until.map(|until| (until, id)));
    }

    /// Ends the waits whose deadlines have passed, the earliest first. A waiter without an outcome stays, and
    /// takes its next step: to be woken as those that ended.
    pub fn expire(&mut self, now: Instant, mut end: impl FnMut(I) -> Option<T>) {
        while let Some(&(until, id)) = self.by_deadline.first() {
            self.deadline_steps += 1;
            if until > now {
                break;
            }
            match end(id) {
                Some(outcome) => self.complete(id, outcome),
                None => {
                    self.set_deadline(id, None);
                    self.ended.extend(self.slot(id).map(Arc::clone));
                }
            }
        }
    }

    /// Takes the slots of the waiters to be [woken](WaitSlot::wake) after unlocking: their waits ended, or are to
    /// take a step.
    #[must_use = "these waiters have to be woken"]
    pub fn take_ended(&mut self) -> Vec<Arc<WaitSlot<T>>> {
        std::mem::take(&mut self.ended)
    }

    /// Returns true if [`take_ended`](Waiters::take_ended) has waiters.
    #[inline]
    pub fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Returns the slot of a waiter that is there.
    pub fn slot(&self, id: I) -> Option<&Arc<WaitSlot<T>>> {
        self.waiting.get(&id).map(|waiter| &waiter.slot)
    }

    /// Returns all waiters that are there.
    pub fn ids(&self) -> Vec<I> {
        self.waiting.keys().copied().collect()
    }

    /// Returns the number of waiters.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns true if there is no waiter.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns true if a waiter has a deadline.
    pub fn has_deadlines(&self) -> bool {
        !self.by_deadline.is_empty()
    }

    /// Returns the number of waits that were completed so far.
    pub fn completed(&self) -> u64 {
        self.completed
    }
}
