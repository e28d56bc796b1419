//! Handing leases over to waiters: the thread that makes a change decides which waiters are served.
//!
//! 1. A refused request enters the planner's queue, with a slot here.
//! 2. A change marks waiters in the planner. Before the manager's lock is released, the marked ones are
//!    checked in order of arrival, and each that is served gets its lease in its slot
//!    ([`Waiting::hand_over`]).
//! 3. After unlocking, exactly those are woken.
//! 4. A waiter that gives up takes the lock: it is in the queue and leaves it, or its outcome is in its
//!    slot ([`Waiting::leave`]).
//!
//! A request that lacks budget is not in the planner's queue, and has a slot here all the same: what ends all
//! waits ends its wait too, and its deadline and pauses are looked at with the others (`pay.rs`).
//!
//! A wake-up is counted, one for each waiter that was served, refused for good, cancelled, or timed out
//! here. Growth: as [`Waiters`], and one entry more for a request that lacks budget and has no deadline.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use smallvec::SmallVec;

use super::events::LeaseStream;
use crate::planner::{
    BufferId, BufferLeaseId, Deferrables, GrantedLease, HolderKey, LeaseRefused, Ticket,
    WrittenRange,
};
use crate::sync::{Condvar, Mutex, lock};
use vramp_core::Bytes;
use vramp_tiers::wait::{WaitSlot, Waiters};

pub(super) type LeaseSlot = WaitSlot<Outcome>;

/// How a wait ended.
pub(super) enum Outcome {
    Granted(GrantedLease),
    /// The request can never be granted.
    Refused(LeaseRefused),
    /// The deadline has passed. Without a refusal, memory was lacking.
    TimedOut(Option<LeaseRefused>),
    /// The request lacks budget that no other owner can return: it is to be tried again, and refused if that fails.
    TriedAgain,
    /// The wait was cancelled.
    Cancelled,
}

/// What the manager does for the hand-over.
pub(super) struct Hooks<'a> {
    /// Returns true for a buffer of which all that is spilled is mapped.
    pub is_mapped: &'a dyn Fn(&Deferrables, BufferId) -> bool,
    /// Called directly after each grant.
    pub on_grant: &'a mut dyn FnMut(&Deferrables, BufferLeaseId),
}

/// The requests that wait: in the planner's queue, or in the queue of the card's space.
#[derive(Default)]
pub(super) struct Waiting {
    /// Their slots, and when tasks are to be woken.
    pub slots: Waiters<Ticket, Outcome>,
    /// Those in the space's queue that have no deadline, and the holders that they have to do without.
    pub endless: BTreeMap<Ticket, SmallVec<[HolderKey; 2]>>,
    /// Buffers that they may read in place while all that is spilled of them is mapped.
    in_place: BTreeMap<Ticket, SmallVec<[BufferId; 2]>>,
    /// No request may wait.
    pub is_cancelled: bool,
}

impl Waiting {
    /// Adds a waiter that is in the planner's queue, and ends its wait at `until`.
    pub fn add(
        &mut self,
        ticket: Ticket,
        in_place: SmallVec<[BufferId; 2]>,
        until: Option<Instant>,
    ) -> Arc<LeaseSlot> {
        if !in_place.is_empty() {
            self.in_place.insert(ticket, in_place);
        }
        self.slots.add(ticket, until)
    }

    pub fn complete(&mut self, ticket: Ticket, outcome: Outcome) {
        self.in_place.remove(&ticket);
        self.endless.remove(&ticket);
        self.slots.complete(ticket, outcome);
    }

    /// Serves all waiters that can be served.
    pub fn hand_over(&mut self, core: &mut Deferrables, hooks: Hooks<'_>, now_ns: u64) {
        let Hooks { is_mapped, on_grant } = hooks;
        while let Some(ticket) = core.next_to_check() {
            let mut allowed = self.in_place.get(&ticket).cloned().unwrap_or_default();
            allowed.retain(|buffer| is_mapped(core, *buffer));
            match core.recheck(ticket, &allowed, now_ns) {
                Ok(Some(granted)) => {
                    on_grant(core, granted.lease);
                    self.complete(ticket, Outcome::Granted(granted));
                }
                Ok(None) => {}
                Err(refused) => self.complete(ticket, Outcome::Refused(refused)),
            }
        }
    }

    /// Removes a waiter that gives up. Returns the outcome if it has one already.
    pub fn leave(
        &mut self,
        core: &mut Deferrables,
        ticket: Ticket,
        slot: &LeaseSlot,
    ) -> Option<Outcome> {
        if !self.slots.remove(ticket) {
            return slot.take();
        }
        core.dequeue(ticket);
        self.in_place.remove(&ticket);
        self.endless.remove(&ticket);
        None
    }

    /// Ends all waits, and refuses others until they are allowed again.
    pub fn cancel(&mut self, core: &mut Deferrables) {
        self.is_cancelled = true;
        for ticket in self.slots.ids() {
            core.dequeue(ticket);
            self.complete(ticket, Outcome::Cancelled);
        }
    }

    /// Ends the waits whose deadlines have passed, the earliest first. One in the
    /// space's queue takes its next step.
    pub fn expire(&mut self, core: &mut Deferrables, now: Instant) {
        let Waiting { slots, in_place, .. } = self;
        slots.expire(now, |ticket| {
            let refused = core.refusal_of(ticket);
            let is_queued = core.dequeue(ticket);
            in_place.remove(&ticket);
            is_queued.then_some(Outcome::TimedOut(refused))
        });
    }
}

/// The free bytes of host and disk when they were looked at last.
#[derive(Clone, Copy, Default)]
pub(super) struct SeenRoom {
    pub host: Bytes,
    pub disk: Bytes,
}

/// The thread that watches for waiters (`watch.rs`), once it was needed.
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

/// Arguments to end a lease.
pub(super) struct LeaseEnding {
    pub lease: BufferLeaseId,
    pub buffers: Vec<BufferId>,
    pub streams: SmallVec<[LeaseStream; 2]>,
    pub written: Option<Vec<WrittenRange>>,
}
