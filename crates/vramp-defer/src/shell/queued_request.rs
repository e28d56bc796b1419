//! A lease request: tried, queued, granted, and restored, by a thread or a task.
//!
//! 1. Buffers that should be promoted are leased at once, if that takes no waiting.
//! 2. Where an older request of the card's space would starve, the request first waits for a turn there.
//! 3. It is granted, or waits in the queue of leases.
//! 4. The granted lease is restored: the request's work. If something is full, the lease ends, and the
//!    request goes back to step 3, or reserves the bytes that it lacked, in the queue of the card's space.
//!
//! Wherever it waits it has one slot, by which its wait is cancelled and a task is woken. Its ticket, which is its
//! place among the leases, stays the same to the end.

use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use smallvec::SmallVec;

use super::buffer_handle::DeferrableBuffer;
use super::events::{LeaseStream, key};
use super::hand_over::{LeaseSlot, Outcome};
use super::lease_set::{LeaseSet, Named};
use super::pay::{Payer, no_budget};
use super::report::WaitRecord;
use super::spill_error::SpillError;
use super::state::{Shared, State};
use crate::planner::{
    Access, BufferId, GrantedLease, HolderKey, LeaseRefused, LeaseRequest, RestoreRetry, StreamKey,
    Ticket, overwritten,
};
use vramp_alloc::StreamId;
use vramp_core::Bytes;
use vramp_tiers::reserve::{Enqueued, QueuedReservation};
use vramp_tiers::wait::{Step, Waits};
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
    pub deadline: Deadline,
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
    deadline: Deadline,
    /// A task waits: the watching thread ends the wait at the deadline, and wakes it after pauses.
    pub is_task: bool,
    stage: Stage,
    /// Place in the queue, kept until the request ends.
    ticket: Option<Ticket>,
    /// Where the outcome comes while it waits.
    slot: Option<Arc<LeaseSlot>>,
    /// Its request in the space's queue, while it waits for that.
    reserving: Option<Box<QueuedReservation>>,
    granted: Option<GrantedLease>,
    payer: Payer,
    wait: Option<Wait>,
    /// Why the last lease could not be restored.
    lacked: Option<SpillError>,
    /// The number of changes by then, if the manager was at rest.
    was_at_rest: Option<u64>,
    result: Option<Result<LeaseSet, SpillError>>,
}

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    New,
    /// About to request the lease.
    Ready,
    /// In the queue of the card's space.
    Reserving,
    /// In the queue of leases.
    Queued,
    /// It has its lease, which is to be restored.
    Granted,
    Over,
}

/// A wait in progress: its start, and what the request waits for.
struct Wait {
    since: Instant,
    began_ns: u64,
    refused: LeaseRefused,
}

impl QueuedRequest {
    /// Returns a request that was not tried yet. A driver call for each stream.
    ///
    /// # Errors
    /// A buffer is another manager's, or a stream is unknown or captures.
    pub fn new(shared: &Arc<Shared>, wanted: Wanted<'_>) -> Result<QueuedRequest, SpillError> {
        let Wanted { buffers, streams, in_place, holder, holding, deadline } = wanted;
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
            deadline,
            is_task: false,
            stage: Stage::New,
            ticket: None,
            slot: None,
            reserving: None,
            granted: None,
            payer: Payer::default(),
            wait: None,
            lacked: None,
            was_at_rest: None,
            result: None,
        })
    }

    /// Goes on until something takes time.
    fn go_on(&mut self, waker: &Waker) -> Result<Step<LeaseSet>, SpillError> {
        loop {
            match self.stage {
                Stage::New => {
                    if let Some(promoted) = self.promote() {
                        return Ok(Step::Ready(promoted?));
                    }
                    self.stage = Stage::Ready;
                    let kept = match self.payer.reservation {
                        Some(_) => None,
                        None => self.shared.keeps_from_starving(&self.buffers, &self.holders()),
                    };
                    if let Some(kept) = kept {
                        self.reserve(Bytes::ZERO, kept)?;
                    }
                }
                Stage::Ready => self.submit()?,
                Stage::Reserving => match self.step_reserving(waker)? {
                    Step::Ready(()) => {}
                    Step::Work => return Ok(Step::Work),
                    Step::Pending(until) => return Ok(Step::Pending(until)),
                },
                Stage::Queued => {
                    let slot = self.slot.as_ref().expect("a queued request has a slot");
                    let outcome = match slot.poll(waker) {
                        Some(outcome) => outcome,
                        None if self.is_task => return Ok(Step::Pending(None)),
                        None if self.deadline.has_passed() => self.give_up(),
                        None => return Ok(Step::Pending(self.deadline.instant())),
                    };
                    self.accept(outcome)?;
                }
                Stage::Granted => return Ok(Step::Work),
                Stage::Over => {
                    let result = self.result.take().expect("a request ends once");
                    return Ok(Step::Ready(result?));
                }
            }
        }
    }

    /// Decides what follows a restore that failed.
    ///
    /// # Errors
    /// Waiting does not help, the deadline has passed, or no memory can become free.
    fn try_again(&mut self, error: SpillError) -> Result<(), SpillError> {
        let error = self.refuse_if_stuck(error)?;
        match error {
            SpillError::NoBudget { .. } if !self.deadline.has_passed() => {
                self.reserve(self.payer.lacks, Bytes::ZERO)
            }
            error => self.retry_after(error),
        }
    }

    /// Reserves bytes in the queue of the card's space, or waits there for a turn to keep some.
    ///
    /// # Errors
    /// The bytes never fit, the deadline passed, the space's manager was shut down, or no request may wait.
    fn reserve(&mut self, bytes: Bytes, kept: Bytes) -> Result<(), SpillError> {
        let shared = Arc::clone(&self.shared);
        let Some(space) = &shared.budget else { return Ok(()) };
        let held = shared.lock().core.kept_by(&self.holders());
        let request = space.request(bytes).keeping(kept).holding(held);
        let request = request.at(self.payer.place).deadline(self.deadline);
        let queued = match request.enqueue().map_err(no_budget)? {
            Enqueued::Waiting(queued) => queued,
            Enqueued::Served(reservation) => {
                self.payer.reserved = Some(reservation.into_charge());
                self.stage = Stage::Ready;
                return Ok(());
            }
        };
        self.payer.place = Some(queued.place());
        let mut state = shared.lock();
        if state.waiting.is_cancelled {
            return Err(SpillError::Cancelled);
        }
        let ticket = *self.ticket.get_or_insert_with(|| state.core.ticket());
        self.slot = Some(state.waiting.add(ticket, SmallVec::new(), None));
        if self.deadline.instant().is_none() {
            state.waiting.endless.insert(ticket, self.holders());
        }
        (self.reserving, self.stage) = (Some(queued), Stage::Reserving);
        Ok(())
    }

    /// Takes a step of the wait in the space's queue. Ready if it is over.
    ///
    /// # Errors
    /// The deadline passed, the wait was cancelled, or the space's manager was shut down.
    fn step_reserving(&mut self, waker: &Waker) -> Result<Step<()>, SpillError> {
        let slot = self.slot.as_ref().expect("a request that reserves has a slot");
        if let Some(outcome) = slot.poll(waker) {
            self.reserving = None;
            return self.accept(outcome).map(Step::Ready);
        }
        let reserving = self.reserving.as_mut().expect("a request that reserves is queued there");
        let ticket = self.ticket.expect("a request that reserves has a ticket");
        match reserving.step(waker) {
            Step::Work => Ok(Step::Work),
            Step::Pending(until) if self.is_task => {
                self.shared.lock().waiting.slots.set_deadline(ticket, until);
                Ok(Step::Pending(None))
            }
            Step::Pending(until) => Ok(Step::Pending(until)),
            Step::Ready(reserved) => {
                (self.reserving, self.stage) = (None, Stage::Ready);
                if let Some(Outcome::Cancelled) = self.leave() {
                    return Err(SpillError::Cancelled);
                }
                let reserved = reserved.map_err(no_budget);
                let reserved =
                    reserved.map_err(|error| error.after(self.shared.disk_gate.failure()))?;
                self.payer.reserved = Some(reserved.into_charge());
                Ok(Step::Ready(()))
            }
        }
    }

    /// Returns true if the work may block: a lease without missing contents or memory does not.
    pub fn may_block(&self) -> bool {
        let Some(granted) = &self.granted else { return true };
        let state = self.shared.lock();
        let is_backed = |range| state.homes.get(range).is_some_and(|home| home.fully_backed);
        !granted.restores.is_empty() || !granted.ranges.iter().all(is_backed)
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
        self.payer.reservation = Some(reservation);
        Ok(())
    }

    /// Returns the error of a failed restore, after which the request may wait.
    ///
    /// # Errors
    /// It has no deadline, and no memory can become free: nothing changed since the last attempt.
    fn refuse_if_stuck(&mut self, error: SpillError) -> Result<SpillError, SpillError> {
        if self.deadline.instant().is_some() || !error.failure().restore_retry().waits {
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

    /// Says in the error of a wait that is over whether anything could have left the card: a driver call for each
    /// stream. A request that did not wait has its error as it is.
    fn explained(&self, error: SpillError) -> SpillError {
        let lacks_memory =
            matches!(error, SpillError::NoMemory { .. } | SpillError::NoBudget { .. });
        let waited = lacks_memory && self.ticket.is_some();
        match waited && self.shared.at_rest(&self.holders()).is_some() {
            true => error.when_stuck(),
            false => error,
        }
    }

    /// Returns the holder of the lease, and those whose leases the caller keeps.
    fn holders(&self) -> SmallVec<[HolderKey; 2]> {
        let mut holders = SmallVec::from_slice(&self.holding);
        holders.push(self.holder);
        holders
    }

    /// Leases with the buffers that should be promoted on the card, if that takes no waiting. `None` if
    /// there are none, or they are to be read in place after all.
    fn promote(&mut self) -> Option<Result<LeaseSet, SpillError>> {
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
        let deadline = std::mem::replace(&mut self.deadline, Deadline::from(Instant::now()));
        let promoted = self.submit().and_then(|()| self.restore());
        self.deadline = deadline;
        self.hot.clear();
        match promoted {
            Err(error) if error.failure().reads_in_place_instead() => None,
            done => Some(done),
        }
    }

    /// Requests the lease once. If it has to wait and the deadline has not passed, it enters the queue.
    ///
    /// # Errors
    /// It can never be granted, or the deadline has passed.
    fn submit(&mut self) -> Result<(), SpillError> {
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
                (self.granted, self.stage) = (Some(granted), Stage::Granted);
                return Ok(());
            }
            Err(refused) => refused,
        };
        if !refused.is_transient() || self.deadline.has_passed() {
            return Err(refused.into());
        }
        self.wait = Some(Wait { since: Instant::now(), began_ns: now_ns, refused });
        self.enqueue(state, &allowed)?;
        Ok(())
    }

    fn enqueue(&mut self, state: &mut State, allowed: &[BufferId]) -> Result<Ticket, SpillError> {
        if state.waiting.is_cancelled {
            return Err(SpillError::Cancelled);
        }
        if let Some(reserved) = self.payer.reserved.take() {
            // A waiting request holds no bytes.
            state.to_drop.push(Box::new(reserved));
        }
        let ticket = state.core.enqueue(&self.request(), allowed, self.ticket)?;
        let until = self.deadline.instant().filter(|_| self.is_task);
        self.slot = Some(state.waiting.add(ticket, self.readable_if_mapped(), until));
        (self.ticket, self.stage) = (Some(ticket), Stage::Queued);
        Ok(ticket)
    }

    /// Leaves the queue at the deadline. Returns the outcome, which may have come a moment ago.
    fn give_up(&mut self) -> Outcome {
        let ticket = self.ticket.expect("a queued request has a ticket");
        let refused = self.shared.lock().core.refusal_of(ticket);
        self.leave().unwrap_or(Outcome::TimedOut(refused))
    }

    /// Ends a wait. Returns the outcome if it has one already.
    fn leave(&mut self) -> Option<Outcome> {
        let (ticket, slot) = (self.ticket?, self.slot.take()?);
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        state.waiting.leave(&mut state.core, ticket, &slot)
    }

    /// Takes the outcome of a wait over.
    fn accept(&mut self, outcome: Outcome) -> Result<(), SpillError> {
        self.slot = None;
        let refused = match outcome {
            Outcome::Granted(granted) => {
                self.note_wait(true, None);
                (self.granted, self.stage) = (Some(granted), Stage::Granted);
                return Ok(());
            }
            Outcome::TriedAgain => {
                self.stage = Stage::Ready;
                return Ok(());
            }
            Outcome::Cancelled => {
                self.note_wait(false, None);
                return Err(SpillError::Cancelled);
            }
            Outcome::Refused(refused) => Some(refused),
            Outcome::TimedOut(refused) => refused,
        };
        self.note_wait(false, refused.clone());
        let stalled = || self.lacked.take().expect("only a stalled waiter has no refusal");
        Err(refused.map(SpillError::from).unwrap_or_else(stalled))
    }

    /// Orders the streams and restores what is missing of the granted lease.
    ///
    /// # Errors
    /// Something was full or failed. The lease has ended.
    fn restore(&mut self) -> Result<LeaseSet, SpillError> {
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
            ready.and_then(|()| shared.restore_all(granted, &self.streams, &mut self.payer));
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
    fn retry_after(&mut self, error: SpillError) -> Result<(), SpillError> {
        let RestoreRetry { reclaim_host, waits } = error.failure().restore_retry();
        let freed =
            reclaim_host && !self.shared.relieve_host(self.shared.mover.config().step).is_zero();
        if !waits || self.deadline.has_passed() {
            return Err(error);
        }
        self.lacked = Some(error);
        let shared = Arc::clone(&self.shared);
        let mut guard = shared.lock();
        let state = &mut *guard;
        let began_ns = shared.driver.now_ns();
        let mut allowed = self.readable_if_mapped();
        allowed.retain(|buffer| state.is_mapped(*buffer));
        let ticket = self.enqueue(state, &allowed)?;
        if !freed {
            state.core.stall(ticket);
        }
        let refused = LeaseRefused::NoMemory;
        self.wait.get_or_insert_with(|| Wait { since: Instant::now(), began_ns, refused });
        Ok(())
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

impl Waits for QueuedRequest {
    type Output = Result<LeaseSet, SpillError>;

    fn step(&mut self, waker: &Waker) -> Step<Result<LeaseSet, SpillError>> {
        match self.go_on(waker) {
            Ok(Step::Work) => Step::Work,
            Ok(Step::Pending(until)) => Step::Pending(until),
            Ok(Step::Ready(lease)) => Step::Ready(Ok(lease)),
            Err(error) => Step::Ready(Err(self.explained(error))),
        }
    }

    /// Restores the lease, or spills for the request's turn in the space's queue.
    fn work(&mut self) {
        if self.stage != Stage::Granted {
            self.reserving.iter_mut().for_each(|reserving| reserving.work());
            return;
        }
        let ended = match self.restore() {
            Ok(lease) => Ok(lease),
            Err(error) => match self.try_again(error) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
        };
        (self.result, self.stage) = (Some(ended), Stage::Over);
    }
}

impl Drop for QueuedRequest {
    fn drop(&mut self) {
        if let Some(Outcome::Granted(granted)) = self.leave() {
            self.granted = Some(granted);
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
