//! The state that the lock protects, and what is delivered after unlocking.
//!
//! 1. [`Shared::update`] takes the lock and changes the ledger and the queue. Waits that end, level
//!    crossings and notifications that follow are collected meanwhile.
//! 2. Once the lock is free they are delivered: waiters are woken, channels notified, and subscribers
//!    called. No callback runs while the lock is held.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use crate::ledger::core::{
    Candidates, Granted, Ledger, Links, Owner, Request, ReservationId, Resolution, SpaceId,
    UnknownSpace, WaitQueue, WaiterId,
};
use vramp_core::{Bytes, Inconsistency};

use crate::ledger::shell::error::{Refusal, StuckOwner};
use crate::ledger::shell::manager_config::RetryPolicy;
use crate::ledger::shell::manager_config::{DeadlockCheck, ManagerConfig};
use crate::ledger::shell::notify::{EventNotifier, NotificationChannel};
use crate::ledger::shell::panics::Panics;
use crate::ledger::shell::panics::Subscriber;
use crate::ledger::shell::reclaim::RegisteredReclaimer;
use crate::ledger::shell::spill::Registered;
use crate::ledger::shell::tracked::{Attachments, Payers};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::wait::{WaitSlot, Waiters};

/// How a wait ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Granted(Granted),
    TimedOut,
    Cancelled,
    ShutDown,
    Deadlock(Box<StuckOwner>),
}

/// Where the outcome of a wait comes.
pub(crate) type ReservationSlot = WaitSlot<Outcome>;

/// First owner of requests without a named owner, above the numbers that programs use.
const FIRST_ANONYMOUS: u64 = 1 << 63;

/// Postponed deadlock checks take at most this part of the time: one in so many.
const REST_PER_CHECK: u32 = 20;

pub(crate) struct State {
    pub ledger: Ledger,
    pub queue: WaitQueue,
    /// The slots and deadlines of the requests in the queue.
    pub waiters: Waiters<WaiterId, Outcome>,
    pub subscribers: Vec<Arc<Subscriber>>,
    /// The highest priority first.
    pub spillers: Vec<Arc<Registered>>,
    /// Who pays for allocations, for each tracked allocator.
    pub payers: Payers,
    pub reclaimers: Vec<Arc<RegisteredReclaimer>>,
    /// With a notifier each, so that no listener sees an idle channel while the manager lives.
    pub channels: Vec<(SpaceId, NotificationChannel, EventNotifier)>,
    next_owner: u64,
    /// `None` for never.
    next_check: Option<Instant>,
    /// Spaces to which memory came back, for their channels.
    returned: Vec<SpaceId>,
}

pub(crate) struct Shared {
    state: Mutex<State>,
    /// Sorted.
    pub spaces: Box<[SpaceId]>,
    check: DeadlockCheck,
    /// Retries of spilling.
    pub spill_retries: RetryPolicy,
    links: RwLock<Links>,
    pub attachments: Attachments,
    directories: Mutex<BTreeMap<SpaceId, PathBuf>>,
    pub panics: Panics,
}

impl State {
    /// Returns a new owner for a request without a named one.
    pub fn anonymous_owner(&mut self) -> Owner {
        self.next_owner += 1;
        Owner(self.next_owner)
    }

    /// Completes the waits of served waiters, once the lock is free.
    #[inline]
    pub fn complete_granted(&mut self, grants: impl IntoIterator<Item = Granted>) {
        for granted in grants {
            self.waiters.complete(granted.waiter, Outcome::Granted(granted));
        }
    }

    /// Serves waiters after `bytes` came back to a space. Follows every change that may return
    /// memory.
    pub fn returned(&mut self, space: SpaceId, bytes: Bytes) {
        if bytes.is_zero() {
            return;
        }
        if !self.queue.is_empty() {
            let grants = self.queue.serve_waiters(&mut self.ledger, space);
            self.complete_granted(grants);
        }
        if !self.channels.is_empty() {
            self.returned.push(space);
        }
    }

    /// Returns the slots of the waiters that wait for a space.
    pub fn slots_waiting_for(&self, space: SpaceId) -> Vec<Arc<ReservationSlot>> {
        let waiting = self.queue.waiting();
        let here = waiting.filter(|(_, request)| request.candidates.contains(&space));
        here.filter_map(|(waiter, _)| self.waiters.slot(waiter).map(Arc::clone)).collect()
    }

    /// Returns the slots of the first waiters for a space that together lack `bytes`, at least one.
    pub fn slots_lacking(&self, space: SpaceId, bytes: Bytes) -> Vec<Arc<ReservationSlot>> {
        let mut left = bytes;
        let mut slots = Vec::new();
        for (waiter, request) in self.queue.waiting() {
            if left.is_zero() {
                break;
            }
            if request.candidates.contains(&space) {
                left = left.saturating_sub(request.bytes);
                slots.extend(self.waiters.slot(waiter).map(Arc::clone));
            }
        }
        slots
    }

    /// Claims what a new waiter lacks in a space that has a spiller. False if no candidate has one.
    pub fn claim_first_spillable(&mut self, waiter: WaiterId, candidates: &Candidates) -> bool {
        let State { ledger, queue, spillers, .. } = self;
        let has_spiller = |space| spillers.iter().any(|known| known.space() == space);
        queue.claim_first_spillable(ledger, waiter, candidates, has_spiller)
    }

    fn audit(&self) -> Result<(), Inconsistency> {
        self.ledger.audit()?;
        self.queue.audit()?;
        if self.waiters.len() != self.queue.len() {
            let what = format!("{} slots for {} waiters", self.waiters.len(), self.queue.len());
            return Err(Inconsistency { what });
        }
        Ok(())
    }
}

impl Shared {
    pub fn new(ledger: Ledger, config: ManagerConfig) -> Shared {
        let ManagerConfig { queue, deadlock: check, spill_retries } = config;
        let spaces = ledger.spaces().collect();
        let state = State {
            ledger,
            queue: WaitQueue::new(queue),
            waiters: Waiters::default(),
            subscribers: Vec::new(),
            spillers: Vec::new(),
            payers: Payers::default(),
            reclaimers: Vec::new(),
            channels: Vec::new(),
            next_owner: FIRST_ANONYMOUS,
            next_check: Some(Instant::now()),
            returned: Vec::new(),
        };
        Shared {
            state: Mutex::new(state),
            spaces,
            check,
            spill_retries,
            links: RwLock::default(),
            attachments: Attachments::default(),
            directories: Mutex::default(),
            panics: Panics::default(),
        }
    }

    pub fn links(&self) -> RwLockReadGuard<'_, Links> {
        self.links.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_links(&self, links: Links) {
        *self.links.write().unwrap_or_else(PoisonError::into_inner) = links;
    }

    pub fn directory(&self, space: SpaceId) -> Option<PathBuf> {
        lock(&self.directories).get(&space).cloned()
    }

    pub fn set_directory(&self, space: SpaceId, directory: &Path) {
        lock(&self.directories).insert(space, directory.to_owned());
    }

    /// Locks the state for reading. Changes that may complete a wait or cross a level go through
    /// [`Shared::update`].
    pub fn read(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Changes the state while holding the lock, and delivers what follows after unlocking.
    #[inline]
    pub fn update<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = lock(&self.state);
        let result = change(&mut state);
        if !state.waiters.has_ended() && state.subscribers.is_empty() && state.returned.is_empty() {
            return result;
        }
        self.deliver(state);
        result
    }

    #[cold]
    fn deliver(&self, mut guard: MutexGuard<'_, State>) {
        let state = &mut *guard;
        let ended = state.waiters.take_ended();
        let returned = std::mem::take(&mut state.returned);
        let crossed: Vec<Arc<Subscriber>> = state
            .subscribers
            .iter()
            .filter(|subscriber| subscriber.record(&state.ledger))
            .map(Arc::clone)
            .collect();
        let channels = state.channels.iter().filter(|(space, ..)| returned.contains(space));
        let channels: Vec<_> = channels.map(|(_, channel, _)| channel.clone()).collect();
        drop(guard);
        ended.iter().for_each(|slot| slot.wake());
        channels.iter().for_each(NotificationChannel::notify);
        crossed.iter().for_each(|subscriber| subscriber.call(&self.panics));
    }

    /// Ends the waits whose deadline has passed.
    pub fn expire(&self) {
        self.update(|state| {
            let mut late = Vec::new();
            state.waiters.expire(Instant::now(), |waiter| {
                late.push(waiter);
                Some(Outcome::TimedOut)
            });
            let grants = state.queue.leave(&mut state.ledger, &late);
            state.complete_granted(grants);
        });
    }

    /// Cancels one wait, unless it has ended.
    pub fn cancel(&self, waiter: WaiterId) {
        self.update(|state| {
            if let Ok(grants) = state.queue.cancel(&mut state.ledger, waiter) {
                state.waiters.complete(waiter, Outcome::Cancelled);
                state.complete_granted(grants);
            }
        });
    }

    /// Takes a waiter out of the queue, without an outcome. Returns the one that it has already.
    pub fn leave(&self, waiter: WaiterId, slot: &ReservationSlot) -> Option<Outcome> {
        self.update(|state| {
            if let Ok(grants) = state.queue.cancel(&mut state.ledger, waiter) {
                state.waiters.remove(waiter);
                state.complete_granted(grants);
            }
        });
        slot.take()
    }

    pub fn shutdown(&self) {
        self.update(|state| {
            for waiter in state.queue.shutdown() {
                state.waiters.complete(waiter, Outcome::ShutDown);
            }
        });
        let channels = std::mem::take(&mut self.read().channels);
        channels.iter().for_each(|(_, channel, _)| channel.shutdown());
    }

    pub fn release(&self, id: ReservationId, space: SpaceId) {
        self.update(|state| {
            if let Ok(bytes) = state.ledger.release(id) {
                state.returned(space, bytes);
            }
        });
    }

    /// Checks for deadlock at the start of a wait. False if the check is postponed, because it
    /// would take too many steps.
    pub fn check_deadlock_now(&self, state: &mut State) -> bool {
        let DeadlockCheck::OnWait { max_steps, .. } = self.check else { return true };
        if !state.queue.deadlock_check_is_within(&state.ledger, max_steps) {
            return false;
        }
        break_deadlocks(state);
        true
    }

    /// Returns the time after which a postponed check is made.
    pub fn deadlock_check_delay(&self) -> Option<Duration> {
        match self.check {
            DeadlockCheck::OnWait { delay, .. } => Some(delay),
            DeadlockCheck::OnDemand => None,
        }
    }

    /// Makes a postponed check, unless another one was made recently.
    pub fn check_deadlock_late(&self) {
        let DeadlockCheck::OnWait { delay, .. } = self.check else { return };
        let begin = Instant::now();
        self.update(|state| {
            if state.next_check.is_some_and(|at| begin >= at) {
                break_deadlocks(state);
                let rest = begin.elapsed().saturating_mul(REST_PER_CHECK);
                state.next_check = begin.checked_add(delay.max(rest));
            }
        });
    }

    /// Returns the report of a request that is not served now.
    pub fn refusal(&self, request: &Request) -> Box<Refusal> {
        let state = self.read();
        let explain = |&space| -> Result<_, UnknownSpace> {
            Ok(*state.ledger.explain(space, request.bytes)?)
        };
        let spaces = request.candidates.iter().map(explain).filter_map(Result::ok).collect();
        Box::new(Refusal { requested: request.bytes, spaces, waiting: state.queue.len() })
    }

    pub fn audit(&self) -> Result<(), Inconsistency> {
        self.read().audit()
    }
}

/// Ends deadlocks one after the other, each by ending or serving one wait. Returns their number.
pub(crate) fn break_deadlocks(state: &mut State) -> usize {
    let mut broken = 0;
    while let Some(deadlock) = state.queue.deadlock(&state.ledger) {
        match deadlock.resolution {
            Resolution::Abort { owner, waiter, reservations } => {
                let Ok(grants) = state.queue.cancel(&mut state.ledger, waiter) else { break };
                let others = deadlock.cycle.iter().map(|member| member.owner);
                let others = others.filter(|&other| other != owner).collect();
                let stuck = StuckOwner { owner, reservations, others };
                state.waiters.complete(waiter, Outcome::Deadlock(Box::new(stuck)));
                state.complete_granted(grants);
            }
            Resolution::GrantOutOfOrder(waiter) => {
                match state.queue.grant_out_of_order(&mut state.ledger, waiter) {
                    Ok(grants) if !grants.is_empty() => state.complete_granted(grants),
                    _ => break,
                }
            }
        }
        broken += 1;
    }
    broken
}
