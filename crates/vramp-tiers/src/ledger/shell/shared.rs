//! The one lock, what it protects, and who is told what happened behind it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use crate::ledger::core::{
    Granted, Ledger, Links, Owner, Request, ReservationId, Resolution, SpaceId, UnknownSpace,
    WaitQueue, WaiterId,
};
use vramp_core::Bytes;

use crate::ledger::shell::error::{Refusal, StuckOwner};
use crate::ledger::shell::manager::{DeadlockCheck, ManagerConfig};
use crate::ledger::shell::notify::{EventNotifier, NotificationChannel};
use crate::ledger::shell::pressure::Subscriber;
use crate::ledger::shell::retry::RetryPolicy;
use crate::ledger::shell::spill::Registered;
use crate::ledger::shell::wait::WaitSlot;
use crate::sync::{Mutex, MutexGuard, lock};

/// How a wait ended.
pub(crate) enum Outcome {
    Granted(Granted),
    TimedOut,
    Cancelled,
    ShutDown,
    Deadlock(Box<StuckOwner>),
}

type Completion = (Arc<WaitSlot<Outcome>>, Outcome);

/// Owners of requests without a named one: never a user's number by accident.
const FIRST_NAMELESS: u64 = 1 << 63;

/// Checks that were put off cost at most one part in so many of the time.
const REST_PER_CHECK: u32 = 20;

pub(crate) struct State {
    pub ledger: Ledger,
    pub queue: WaitQueue,
    seats: BTreeMap<WaiterId, Arc<WaitSlot<Outcome>>>,
    pub subscribers: Vec<Arc<Subscriber>>,
    /// The most important first.
    pub spillers: Vec<Arc<Registered>>,
    /// With their notifiers: as long as the space is there, it may notify.
    pub channels: Vec<(SpaceId, NotificationChannel, EventNotifier)>,
    next_owner: u64,
    next_check: Instant,
    /// What is to be said once the lock is free.
    gifts: Vec<Completion>,
    returned: Vec<SpaceId>,
}

pub(crate) struct Shared {
    state: Mutex<State>,
    /// Sorted.
    pub spaces: Box<[SpaceId]>,
    start: Instant,
    check: DeadlockCheck,
    /// Of spilling.
    pub retries: RetryPolicy,
    links: RwLock<Links>,
    panics: AtomicU64,
}

impl State {
    /// An owner that nobody named.
    pub fn nameless(&mut self) -> Owner {
        self.next_owner += 1;
        Owner(self.next_owner)
    }

    /// Wakes those who were served, once the lock is free.
    pub fn give(&mut self, grants: impl IntoIterator<Item = Granted>) {
        for granted in grants {
            self.end(granted.waiter, Outcome::Granted(granted));
        }
    }

    fn end(&mut self, waiter: WaiterId, outcome: Outcome) {
        if let Some(seat) = self.seats.remove(&waiter) {
            self.gifts.push((seat, outcome));
        }
    }

    /// Has to follow whatever may have returned memory to a space.
    pub fn returned(&mut self, space: SpaceId, bytes: Bytes) {
        if bytes.is_zero() {
            return;
        }
        let grants = self.queue.serve_waiters(&mut self.ledger, space);
        if !grants.is_empty() {
            self.give(grants);
        }
        if !self.channels.is_empty() {
            self.returned.push(space);
        }
    }

    /// What the queue would do with a request that fits while nobody waits, who could be passed: the
    /// common case, in half the time. `None` for everything else.
    #[inline]
    pub fn serve(&mut self, request: &Request) -> Option<(ReservationId, SpaceId)> {
        if !self.queue.is_empty() {
            return None;
        }
        let Request { bytes, owner, tag, ref candidates, .. } = *request;
        let fits = |space| self.ledger.can_reserve(space, bytes).unwrap_or(false);
        let space = candidates.iter().copied().find(|&space| fits(space))?;
        Some((self.ledger.reserve(space, bytes, owner, tag).ok()?, space))
    }

    /// A seat for one who begins to wait.
    pub fn sit(&mut self, waiter: WaiterId) -> Arc<WaitSlot<Outcome>> {
        let seat = Arc::new(WaitSlot::default());
        self.seats.insert(waiter, Arc::clone(&seat));
        seat
    }

    /// The seats of those who wait for a space.
    pub fn seats_at(&self, space: SpaceId) -> Vec<Arc<WaitSlot<Outcome>>> {
        let waiting = self.queue.waiting();
        let here = waiting.filter(|(_, request)| request.candidates.contains(&space));
        here.filter_map(|(waiter, _)| self.seats.get(&waiter).map(Arc::clone)).collect()
    }

    fn audit(&self) -> Result<(), vramp_core::Inconsistency> {
        self.ledger.audit()?;
        self.queue.audit()?;
        if self.seats.len() != self.queue.len() {
            let what = format!("{} have a seat, {} wait", self.seats.len(), self.queue.len());
            return Err(vramp_core::Inconsistency { what });
        }
        Ok(())
    }
}

impl Shared {
    pub fn new(ledger: Ledger, config: ManagerConfig) -> Shared {
        let ManagerConfig { queue, deadlock: check, spill: retries } = config;
        let start = Instant::now();
        let spaces = ledger.spaces().collect();
        let state = State {
            ledger,
            queue: WaitQueue::new(queue),
            seats: BTreeMap::new(),
            subscribers: Vec::new(),
            spillers: Vec::new(),
            channels: Vec::new(),
            next_owner: FIRST_NAMELESS,
            next_check: start,
            gifts: Vec::new(),
            returned: Vec::new(),
        };
        Shared {
            state: Mutex::new(state),
            spaces,
            start,
            check,
            retries,
            links: RwLock::default(),
            panics: AtomicU64::new(0),
        }
    }

    pub fn links(&self) -> RwLockReadGuard<'_, Links> {
        self.links.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_links(&self, links: Links) {
        *self.links.write().unwrap_or_else(PoisonError::into_inner) = links;
    }

    /// To look; whatever changes something goes through [`Shared::act`].
    pub fn look(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Does something behind the lock, and tells everybody concerned once it is free.
    #[inline]
    pub fn act<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        let mut state = lock(&self.state);
        let result = act(&mut state);
        if state.gifts.is_empty() && state.subscribers.is_empty() && state.returned.is_empty() {
            return result;
        }
        self.tell(state);
        result
    }

    #[cold]
    fn tell(&self, mut guard: MutexGuard<'_, State>) {
        let state = &mut *guard;
        let gifts = std::mem::take(&mut state.gifts);
        let returned = std::mem::take(&mut state.returned);
        let concerned: Vec<Arc<Subscriber>> = state
            .subscribers
            .iter()
            .filter(|subscriber| subscriber.note(&state.ledger))
            .map(Arc::clone)
            .collect();
        let posts = state.channels.iter().filter(|(space, ..)| returned.contains(space));
        let posts: Vec<_> = posts.map(|(_, channel, _)| channel.clone()).collect();
        drop(guard);
        gifts.into_iter().for_each(|(seat, outcome)| seat.give(outcome));
        posts.iter().for_each(NotificationChannel::notify);
        concerned.iter().for_each(|subscriber| subscriber.call(self));
    }

    /// Nanoseconds since the manager was made: the queue's clock.
    pub fn now(&self) -> u64 {
        self.number(Instant::now())
    }

    /// An instant on the queue's clock.
    pub fn number(&self, instant: Instant) -> u64 {
        let since = instant.saturating_duration_since(self.start).as_nanos();
        u64::try_from(since).unwrap_or(u64::MAX)
    }

    /// Ends the waits whose deadline has passed.
    pub fn expire(&self) {
        let now = self.now();
        self.act(|state| {
            let expired = state.queue.expire(&mut state.ledger, now);
            for waiter in expired.timed_out {
                state.end(waiter, Outcome::TimedOut);
            }
            state.give(expired.granted);
        });
    }

    /// Ends one wait, unless it has ended.
    pub fn cancel(&self, waiter: WaiterId) {
        self.act(|state| {
            if let Ok(grants) = state.queue.cancel(&mut state.ledger, waiter) {
                state.end(waiter, Outcome::Cancelled);
                state.give(grants);
            }
        });
    }

    pub fn shutdown(&self) {
        self.act(|state| {
            for waiter in state.queue.shutdown() {
                state.end(waiter, Outcome::ShutDown);
            }
        });
        let channels = std::mem::take(&mut self.look().channels);
        channels.iter().for_each(|(_, channel, _)| channel.shutdown());
    }

    pub fn release(&self, id: ReservationId, space: SpaceId) {
        self.act(|state| {
            if let Ok(bytes) = state.ledger.release(id) {
                state.returned(space, bytes);
            }
        });
    }

    /// Looks for deadlock as somebody begins to wait. False if that was put off, for there is much
    /// to look at.
    pub fn check_at_start(&self, state: &mut State) -> bool {
        let DeadlockCheck::OnWait { steps, .. } = self.check else { return true };
        let waiters = state.queue.len();
        let most = steps / waiters.max(1);
        if waiters + state.ledger.reservations().take(most + 1).count() > most {
            return false;
        }
        break_deadlocks(state);
        true
    }

    /// How long to wait before a check that was put off.
    pub fn put_off(&self) -> Option<Duration> {
        match self.check {
            DeadlockCheck::OnWait { later, .. } => Some(later),
            DeadlockCheck::OnDemand => None,
        }
    }

    /// Makes a check that was put off, unless there was one just now.
    pub fn check_late(&self) {
        let DeadlockCheck::OnWait { later, .. } = self.check else { return };
        let begin = Instant::now();
        self.act(|state| {
            if begin >= state.next_check {
                break_deadlocks(state);
                state.next_check = begin + later.max(begin.elapsed() * REST_PER_CHECK);
            }
        });
    }

    /// Why `request` is not served now.
    pub fn refusal(&self, request: &Request) -> Box<Refusal> {
        let state = self.look();
        let explain = |&space| -> Result<_, UnknownSpace> {
            Ok(*state.ledger.explain(space, request.bytes)?)
        };
        let spaces = request.candidates.iter().map(explain).filter_map(Result::ok).collect();
        Box::new(Refusal { requested: request.bytes, spaces, waiting: state.queue.len() })
    }

    pub fn audit(&self) -> Result<(), vramp_core::Inconsistency> {
        self.look().audit()
    }

    /// Calls foreign code; `None` if it panicked, which is counted.
    pub fn contain<R>(&self, call: impl FnOnce() -> R) -> Option<R> {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        if result.is_err() {
            self.panics.fetch_add(1, Ordering::Relaxed);
        }
        result.ok()
    }

    pub fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }
}

/// Ends deadlocks, one after the other, and says how many. Each round ends the wait of one.
pub(crate) fn break_deadlocks(state: &mut State) -> usize {
    let mut broken = 0;
    while let Some(deadlock) = state.queue.deadlock(&state.ledger) {
        match deadlock.resolution {
            Resolution::Abort { owner, waiter, reservations } => {
                let Ok(grants) = state.queue.cancel(&mut state.ledger, waiter) else { break };
                let others = deadlock.cycle.iter().map(|link| link.owner);
                let others = others.filter(|&other| other != owner).collect();
                let stuck = StuckOwner { owner, reservations, others };
                state.end(waiter, Outcome::Deadlock(Box::new(stuck)));
                state.give(grants);
            }
            Resolution::GrantOutOfOrder(waiter) => {
                match state.queue.grant_out_of_order(&mut state.ledger, waiter) {
                    Ok(grants) if !grants.is_empty() => state.give(grants),
                    _ => break,
                }
            }
        }
        broken += 1;
    }
    broken
}
