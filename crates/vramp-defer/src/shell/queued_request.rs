//! A lease request: tried, queued, granted, and restored.

use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use smallvec::SmallVec;

use super::buffer_handle::DeferrableBuffer;
use super::events::{LeaseStream, key};
use super::hand_over::{Entry, LeaseSlot, Outcome};
use super::lease_set::{LeaseSet, Named};
use super::pay::{Payment, PaymentPoll};
use super::report::WaitRecord;
use super::spill_error::SpillError;
use super::state::{Shared, State};
use crate::planner::{
    Access, BufferId, GrantedLease, HolderKey, LeaseRefused, LeaseRequest, RestoreRetry, StreamKey,
    Ticket, overwritten,
};
use vramp_alloc::StreamId;
use vramp_tiers::{Deadline, Reservation};

/// What a lease is requested for.
pub(super) struct Wanted<'a> {
    pub buffers: &'a [(&'a DeferrableBuffer, Access)],
    pub streams: &'a [StreamId],
    /// Buffers that are only read stay below where that is possible.
    pub in_place: bool,
    pub holder: HolderKey,
    /// Other holders whose leases the caller keeps while it waits.
    pub holding: SmallVec<[HolderKey; 1]>,
}

/// A lease request. Dropping it, also in a panic, takes it out of the queue and ends a lease that it was
/// granted.
pub(super) struct QueuedRequest {
    shared: Arc<Shared>,
    /// In the order of the request. Keeps the buffers alive.
    named: Vec<Named>,
    buffers: SmallVec<[(BufferId, Access); 4]>,
    streams: SmallVec<[LeaseStream; 2]>,
    keys: SmallVec<[StreamKey; 2]>,
    in_place: bool,
    /// Buffers that were read in place often enough to be promoted: they are not read in place.
    hot: Vec<BufferId>,
    holder: HolderKey,
    holding: SmallVec<[HolderKey; 1]>,
    /// Place in the queue, kept until the request ends.
    ticket: Option<Ticket>,
    /// Where the outcome comes while it is in the queue.
    slot: Option<Arc<LeaseSlot>>,
    granted: Option<GrantedLease>,
    payment: Payment,
    wait: Option<Wait>,
    /// Why the last lease could not be restored.
    lacked: Option<SpillError>,
    /// The number of changes by then, if the manager was at rest.
    was_at_rest: Option<u64>,
}

/// A wait in progress: its start, and what the request waits for.
struct Wait {
    since: Instant,
    began_ns: u64,
    refused: LeaseRefused,
}

/// Whether the request of a call is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Submitted {
    Granted,
    Queued,
}

impl QueuedRequest {
    /// Returns a request that was not tried yet. A driver call for each stream.
    ///
    /// # Errors
    /// A buffer is another manager's, or a stream is unknown or captures.
    pub fn new(shared: &Arc<Shared>, wanted: Wanted<'_>) -> Result<QueuedRequest, SpillError> {
        let Wanted { buffers, streams, in_place, holder, holding } = wanted;
        if buffers.iter().any(|(buffer, _)| !Arc::ptr_eq(&buffer.owner.shared, shared)) {
            return Err(SpillError::OtherManager);
        }
        let streams = shared.driver_streams(streams)?;
        Ok(QueuedRequest {
            shared: Arc::clone(shared),
            named: buffers.iter().map(|(buffer, access)| buffer.named(*access)).collect(),
            buffers: buffers
                .iter()
                .map(|(buffer, access)| (buffer.owner.id, buffer.granted(*access)))
                .collect(),
            keys: streams.iter().map(|stream| key(stream.id)).collect(),
            streams,
            in_place,
            hot: Vec::new(),
            holder,
            holding,
            ticket: None,
            slot: None,
            granted: None,
            payment: Payment::default(),
            wait: None,
            lacked: None,
            was_at_rest: None,
        })
    }

    /// Leases, waiting until the deadline. A request that waits holds its place in the queue and nothing
    /// else.
    ///
    /// # Errors
    /// The request was refused, or memory or contents could not be restored.
    pub fn wait(mut self, deadline: Deadline) -> Result<LeaseSet, SpillError> {
        if let Some(promoted) = self.promote() {
            return promoted;
        }
        self.queue_behind_starving(deadline)?;
        self.payment.wait(&self.shared)?;
        let mut submitted = self.submit(deadline, None)?;
        loop {
            if submitted == Submitted::Queued {
                self.sleep(deadline)?;
            }
            let error = match self.restore() {
                Ok(lease) => return Ok(lease),
                Err(error) => self.refuse_if_stuck(error, deadline)?,
            };
            submitted = match self.waits_for_budget(&error, deadline) {
                true => {
                    self.queue_for_budget(deadline)?;
                    self.payment.wait(&self.shared)?;
                    self.submit(deadline, None)?
                }
                false => self.retry_after(error, deadline, None)?,
            };
        }
    }

    /// Enters the space's queue if an older request there would starve.
    ///
    /// # Errors
    /// As [`queue_for_budget`](QueuedRequest::queue_for_budget).
    pub fn queue_behind_starving(&mut self, deadline: Deadline) -> Result<(), SpillError> {
        let holders = self.holders();
        let Self { shared, buffers, payment, .. } = self;
        shared.queue_behind_starving(buffers, &holders, payment, deadline)
    }

    /// Sets the reservation that pays.
    ///
    /// # Errors
    /// It is not of the space that the buffers are charged to.
    pub fn pay_by(&mut self, reservation: Arc<Reservation>) -> Result<(), SpillError> {
        if let Some(space) = &self.shared.budget
            && !space.contains(&reservation)
        {
            let (reserved, charged) = (reservation.space(), space.id());
            return Err(SpillError::OtherSpace { reserved, charged });
        }
        self.payment.reservation = Some(reservation);
        Ok(())
    }

    /// Returns true if a request whose restore failed should wait in the space's queue. One that may
    /// have to be refused is tried once more first.
    pub fn waits_for_budget(&self, error: &SpillError, deadline: Deadline) -> bool {
        matches!(error, SpillError::NoBudget { .. })
            && self.was_at_rest.is_none()
            && !has_passed(deadline)
    }

    /// Returns the error of a failed restore, after which the request may wait.
    ///
    /// # Errors
    /// It has no deadline, and no memory can become free: nothing changed since the last attempt.
    pub fn refuse_if_stuck(
        &mut self,
        error: SpillError,
        deadline: Deadline,
    ) -> Result<SpillError, SpillError> {
        if deadline.instant().is_some() || !error.failure().restore_retry().waits {
            return Ok(error);
        }
        let at_rest = self.shared.at_rest(&self.holders());
        let before = std::mem::replace(&mut self.was_at_rest, at_rest);
        match at_rest {
            Some(_) if at_rest == before => {
                Err(SpillError::NothingCanLeave { error: Box::new(error) })
            }
            _ => Ok(error),
        }
    }

    /// Returns the holder of the lease, and those whose leases the caller keeps.
    fn holders(&self) -> SmallVec<[HolderKey; 2]> {
        let mut holders = SmallVec::from_slice(&self.holding);
        holders.push(self.holder);
        holders
    }

    /// Enters the space's queue for what the failed restore lacked, and keeps neither a lease nor a place
    /// in the queue of leases.
    ///
    /// # Errors
    /// The bytes never fit, or the deadline passed.
    pub fn queue_for_budget(&mut self, deadline: Deadline) -> Result<(), SpillError> {
        self.ticket = None;
        let holders = self.holders();
        self.shared.queue_for_budget(&mut self.payment, &holders, deadline)
    }

    /// Returns how it is with the request's turn in the space's queue.
    ///
    /// # Errors
    /// The deadline passed.
    pub fn poll_budget(&mut self, waker: &Waker) -> Result<PaymentPoll, SpillError> {
        self.payment.poll(&self.shared, waker)
    }

    /// Spills for the request's turn in the space's queue.
    pub fn spill_for_budget(&mut self) {
        self.payment.spill();
    }

    /// Leases with the buffers that should be promoted on the card, if that takes no waiting. `None` if
    /// there are none, or they are to be read in place after all.
    pub fn promote(&mut self) -> Option<Result<LeaseSet, SpillError>> {
        if !self.in_place {
            return None;
        }
        let buffers = self.buffers.iter().map(|&(id, _)| id);
        {
            let state = self.shared.lock();
            self.hot = buffers.filter(|&id| state.core.is_hot(id)).collect();
        }
        if self.hot.is_empty() {
            return None;
        }
        let now = Deadline::from(Instant::now());
        let promoted = self.submit(now, None).and_then(|_| self.restore());
        self.hot.clear();
        match promoted {
            Err(error) if error.failure().reads_in_place_instead() => None,
            done => Some(done),
        }
    }

    /// Requests the lease once. If it has to wait and the deadline has not passed, it enters the queue;
    /// `until` is the deadline of a waiter that does not watch the clock itself.
    ///
    /// # Errors
    /// It can never be granted, or the deadline has passed.
    pub fn submit(
        &mut self,
        deadline: Deadline,
        until: Option<Instant>,
    ) -> Result<Submitted, SpillError> {
        let shared = Arc::clone(&self.shared);
        let mut guard = shared.lock();
        guard.prepare(&shared)?;
        let state = &mut *guard;
        let now_ns = shared.driver.now_ns();
        let mut allowed = self.readable_if_mapped();
        allowed.retain(|buffer| state.is_mapped(*buffer));
        let refused = match state.core.lease_in_place(&self.request(), &allowed, now_ns) {
            Ok(granted) => {
                state.account.begin(granted.lease, state.core.occupied());
                state.emit_locked(granted.lease);
                self.granted = Some(granted);
                return Ok(Submitted::Granted);
            }
            Err(refused) => refused,
        };
        if !refused.is_transient() || has_passed(deadline) {
            return Err(refused.into());
        }
        self.wait = Some(Wait { since: Instant::now(), began_ns: now_ns, refused });
        self.enqueue(state, &allowed, until)?;
        Ok(Submitted::Queued)
    }

    fn enqueue(
        &mut self,
        state: &mut State,
        allowed: &[BufferId],
        until: Option<Instant>,
    ) -> Result<Ticket, SpillError> {
        if state.waiting.is_cancelled {
            return Err(SpillError::Cancelled);
        }
        if let Some(prepaid) = self.payment.prepaid.take() {
            // A waiting request holds no bytes.
            state.to_drop.push(Box::new(prepaid));
        }
        let ticket = state.core.enqueue(&self.request(), allowed, self.ticket)?;
        let slot = Arc::new(LeaseSlot::default());
        (self.ticket, self.slot) = (Some(ticket), Some(Arc::clone(&slot)));
        state.waiting.add(ticket, Entry { slot, in_place: self.readable_if_mapped(), until });
        Ok(ticket)
    }

    /// Sleeps until the request has its outcome, or leaves the queue at the deadline.
    fn sleep(&mut self, deadline: Deadline) -> Result<(), SpillError> {
        let slot = Arc::clone(self.slot.as_ref().expect("a queued request has a slot"));
        if let Some(outcome) = slot.wait(deadline.instant()) {
            return self.accept(outcome);
        }
        let shared = Arc::clone(&self.shared);
        let mut guard = shared.lock();
        let state = &mut *guard;
        let ticket = self.ticket.expect("a queued request has a ticket");
        let refused = state.core.refusal_of(ticket);
        let left = state.waiting.leave(&mut state.core, ticket, &slot);
        drop(guard);
        // It may have been served a moment ago.
        self.accept(left.unwrap_or(Outcome::TimedOut(refused)))
    }

    /// Takes the outcome of a wait over.
    pub fn accept(&mut self, outcome: Outcome) -> Result<(), SpillError> {
        self.slot = None;
        let (granted, refused) = match outcome {
            Outcome::Granted(granted) => (Some(granted), None),
            Outcome::Refused(refused) => (None, Some(refused)),
            Outcome::TimedOut(refused) => (None, refused),
            Outcome::Cancelled => {
                self.note_wait(false, None);
                return Err(SpillError::Cancelled);
            }
        };
        let served = granted.is_some();
        self.granted = granted;
        self.note_wait(served, refused.clone());
        match (served, refused) {
            (true, _) => Ok(()),
            (false, Some(refused)) => Err(refused.into()),
            // It was stalled.
            (false, None) => Err(self.lacked.take().expect("only a stalled waiter has no refusal")),
        }
    }

    /// Returns the slot in which the outcome comes.
    pub fn slot(&self) -> Option<&LeaseSlot> {
        self.slot.as_deref()
    }

    /// Returns true if the granted lease moves contents or memory: the thread that restores it may wait
    /// for evictions and the disk.
    pub fn has_to_restore(&self) -> bool {
        let Some(granted) = &self.granted else { return false };
        let state = self.shared.lock();
        !granted.restores.is_empty()
            || granted
                .ranges
                .iter()
                .any(|range| state.homes.get(range).is_none_or(|home| !home.fully_backed))
    }

    /// Orders the streams and restores what is missing of the granted lease.
    ///
    /// # Errors
    /// Something was full or failed. The lease has ended.
    pub fn restore(&mut self) -> Result<LeaseSet, SpillError> {
        let granted = self.granted.as_mut().expect("the lease was granted");
        let shared = &self.shared;
        {
            let mut state = shared.lock();
            let overwritten = overwritten(&self.buffers);
            if !overwritten.is_empty() {
                state.core.overwrite(granted, overwritten);
            }
            state.allow_pins(granted);
        }
        let ready = shared.order(granted, &self.streams);
        let ready = ready.and_then(|()| shared.order_after_memory(granted, &self.streams));
        let ready =
            ready.and_then(|()| shared.restore_all(granted, &self.streams, &mut self.payment));
        let granted = self.granted.take().expect("it was there above");
        if let Err(error) = ready {
            shared.cancel(granted.lease);
            return Err(error);
        }
        if self.in_place || self.lacked.is_some() {
            let mut state = shared.lock();
            if self.in_place {
                state.note_reads(&granted, &self.hot);
            }
            if self.lacked.take().is_some() {
                // There may be memory for the next one.
                state.core.retry_stalled();
            }
        }
        let named = std::mem::take(&mut self.named);
        let streams = std::mem::take(&mut self.streams);
        Ok(LeaseSet::new(&self.shared, granted, named, streams, self.holder))
    }

    /// Puts the request back to its place in the queue after a failed restore: until memory may be free.
    ///
    /// # Errors
    /// Waiting does not help, or the deadline has passed.
    pub fn retry_after(
        &mut self,
        error: SpillError,
        deadline: Deadline,
        until: Option<Instant>,
    ) -> Result<Submitted, SpillError> {
        let RestoreRetry { reclaim_host, waits } = error.failure().restore_retry();
        let freed =
            reclaim_host && !self.shared.relieve_host(self.shared.mover.config().step).is_zero();
        if !waits || has_passed(deadline) {
            return Err(error);
        }
        self.lacked = Some(error);
        let shared = Arc::clone(&self.shared);
        let mut guard = shared.lock();
        let state = &mut *guard;
        let began_ns = shared.driver.now_ns();
        let mut allowed = self.readable_if_mapped();
        allowed.retain(|buffer| state.is_mapped(*buffer));
        let ticket = self.enqueue(state, &allowed, until)?;
        if !freed {
            state.core.stall(ticket);
        }
        let refused = LeaseRefused::NoMemory;
        self.wait.get_or_insert_with(|| Wait { since: Instant::now(), began_ns, refused });
        Ok(Submitted::Queued)
    }

    fn request(&self) -> LeaseRequest<'_> {
        let QueuedRequest { buffers, keys, holder, holding, .. } = self;
        LeaseRequest { buffers, streams: keys, holder: *holder, holding }
    }

    fn readable_if_mapped(&self) -> SmallVec<[BufferId; 2]> {
        match self.in_place {
            true => {
                let all = self.buffers.iter().map(|&(id, _)| id);
                all.filter(|id| !self.hot.contains(id)).collect()
            }
            false => SmallVec::new(),
        }
    }

    fn note_wait(&mut self, served: bool, refused: Option<LeaseRefused>) {
        let Some(Wait { since, began_ns, refused: first }) = self.wait.take() else { return };
        let waited_ns = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let buffers = self.buffers.iter().map(|&(buffer, _)| buffer).collect();
        let refused = refused.unwrap_or(first);
        let mut state = self.shared.lock();
        state.stats.waits += 1;
        state.stats.waited_ns += waited_ns;
        state.history.push_wait(WaitRecord { buffers, began_ns, waited_ns, refused, served });
    }
}

impl Drop for QueuedRequest {
    fn drop(&mut self) {
        self.payment.stop_timer(&self.shared);
        if let (Some(ticket), Some(slot)) = (self.ticket, self.slot.take()) {
            let mut guard = self.shared.lock();
            let state = &mut *guard;
            if let Some(Outcome::Granted(granted)) =
                state.waiting.leave(&mut state.core, ticket, &slot)
            {
                self.granted = Some(granted);
            }
        }
        if let Some(granted) = self.granted.take() {
            let mut state = self.shared.lock();
            for restore in &granted.restores {
                // Those that are complete are not in flight.
                let _ = state.core.abandon(restore.id);
            }
            drop(state);
            self.shared.cancel(granted.lease);
        }
        if self.lacked.is_some() {
            // The next one may have more luck.
            self.shared.retry_stalled();
        }
    }
}

pub(super) fn has_passed(deadline: Deadline) -> bool {
    deadline.instant().is_some_and(|end| Instant::now() >= end)
}
