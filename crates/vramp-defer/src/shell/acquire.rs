//! Acquiring a lease: request, wait in the queue, order the streams, restore what is missing.
//!
//! 1. The request is granted, or refused with what to wait for ([`QueuedRequest::try_grant`]).
//!    A refused request waits in the queue until its deadline, if waiting can help.
//! 2. The lease's streams wait for earlier work on the buffers and on their memory.
//! 3. `restore.rs` brings memory and contents back. If something is full, the lease is cancelled,
//!    and the request waits again.
//!
//! Each buffer of a set is decided on its own: one that can be read in place stays below, the
//! others come to the card, under one lease, all or nothing.
//!
//! Deliberately absent: which requests are granted, who waits for whom, and which failures are
//! retried. All of that is the planner's.

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

use crate::planner::{Access, BufferId, BufferLeaseId, GrantedLease, LeaseRefused, RestoreRetry};
use vramp_alloc::{Driver, StreamId};

use super::buffer_handle::DeferrableBuffer;
use super::events::{LeaseStream, is_of_copies, key};
use super::lease_set::LeaseSet;
use super::queued_request::QueuedRequest;
use super::report::WaitRecord;
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::Deadline;

/// Which buffers of a lease may be read in place.
#[derive(Clone, Copy)]
pub(super) enum InPlaceMode<'a> {
    /// None.
    Never,
    /// All that are only read, except these, which are to be promoted.
    AllExcept(&'a [BufferId]),
}

/// A wait in progress: its start, and the last refusal.
struct Wait {
    since: Instant,
    began_ns: u64,
    refused: LeaseRefused,
}

impl Shared {
    /// Leases all of the buffers, or none.
    pub(super) fn lease(
        self: &Arc<Shared>,
        wanted: &[(&DeferrableBuffer, Access)],
        streams: &[StreamId],
        deadline: Deadline,
        mode: InPlaceMode<'_>,
    ) -> Result<LeaseSet, SpillError> {
        if wanted.iter().any(|(buffer, _)| !Arc::ptr_eq(&buffer.owner.shared, self)) {
            return Err(SpillError::OtherManager);
        }
        let raw = self.driver_streams(streams)?;
        let named: Vec<(BufferId, Access)> =
            wanted.iter().map(|(buffer, access)| (buffer.owner.id, *access)).collect();
        let granted = self.grant_and_restore(&named, &raw, deadline, mode)?;
        if let InPlaceMode::AllExcept(hot) = mode {
            self.lock().note_reads(&granted, hot);
        }
        Ok(LeaseSet::new(self, granted, wanted, raw))
    }

    /// Leases a set of which what can be read in place stays below. Buffers that were read in place
    /// often are promoted if they can come without waiting.
    pub(super) fn lease_in_place(
        self: &Arc<Shared>,
        wanted: &[(&DeferrableBuffer, Access)],
        streams: &[StreamId],
        deadline: Deadline,
    ) -> Result<LeaseSet, SpillError> {
        let hot = self.hot(wanted);
        if !hot.is_empty() {
            let now = Deadline::from(Instant::now());
            match self.lease(wanted, streams, now, InPlaceMode::AllExcept(&hot)) {
                Err(error) if error.failure().reads_in_place_instead() => {}
                leased => return leased,
            }
        }
        self.lease(wanted, streams, deadline, InPlaceMode::AllExcept(&[]))
    }

    /// Returns the buffers that should be promoted.
    fn hot(&self, wanted: &[(&DeferrableBuffer, Access)]) -> Vec<BufferId> {
        let state = self.lock();
        let buffers = wanted.iter().map(|(buffer, _)| buffer.owner.id);
        buffers.filter(|&id| state.core.is_hot(id)).collect()
    }

    /// Acquires a lease and restores what is missing. A request that waits holds its place in the
    /// queue and nothing else.
    fn grant_and_restore(
        &self,
        buffers: &[(BufferId, Access)],
        streams: &[LeaseStream],
        deadline: Deadline,
        mode: InPlaceMode<'_>,
    ) -> Result<GrantedLease, SpillError> {
        let mut request = QueuedRequest::new(self, buffers, streams, mode);
        loop {
            let granted = self.grant(&mut request, deadline)?;
            let ready = self.order(&granted, streams);
            let ready = ready.and_then(|()| self.order_after_memory(&granted, streams));
            let ready = ready.and_then(|()| self.restore_all(&granted, streams));
            let Err(error) = ready else { return Ok(granted) };
            self.cancel(granted.lease);
            let RestoreRetry { reclaim_host, waits } = error.failure().restore_retry();
            if reclaim_host {
                self.relieve_host(self.mover.config().step);
            }
            if !waits || has_passed(deadline) {
                return Err(error);
            }
            let mut state = self.lock();
            request.enqueue(&mut state)?;
            drop(self.wait_briefly(state));
        }
    }

    /// Returns the driver's streams. One driver call each, which queries whether it captures.
    fn driver_streams(
        &self,
        streams: &[StreamId],
    ) -> Result<SmallVec<[LeaseStream; 2]>, SpillError> {
        let raw = |&id: &StreamId| {
            let raw = self.allocator.stream(id);
            let raw = raw.ok_or_else(|| SpillError::UnknownStream(id.to_string()))?;
            match self.driver.is_capturing(raw)? {
                true => Err(SpillError::Capturing(raw)),
                false => Ok(LeaseStream { id, raw }),
            }
        };
        streams.iter().map(raw).collect()
    }

    /// Requests the lease until it is granted, or the deadline passes.
    fn grant(
        &self,
        request: &mut QueuedRequest<'_>,
        deadline: Deadline,
    ) -> Result<GrantedLease, SpillError> {
        let mut waits: Option<Wait> = None;
        let mut guard = self.lock();
        loop {
            guard.poll()?;
            let capacity = self.capacity();
            let state = &mut *guard;
            state.core.set_capacity(capacity);
            if state.has_pinned_memory {
                // Memory that was unpinned since may be spilled.
                state.note_pins(&self.allocator);
            }
            let now_ns = self.driver.now_ns();
            let refused = match request.try_grant(state, now_ns) {
                Ok(granted) => {
                    state.allow_pins(&granted);
                    if let Some(wait) = waits {
                        state.note_wait(wait, request, true);
                    }
                    return Ok(granted);
                }
                Err(refused) => refused,
            };
            if !refused.is_transient() || has_passed(deadline) {
                if let Some(wait) = waits {
                    state.note_wait(Wait { refused: refused.clone(), ..wait }, request, false);
                }
                return Err(match refused {
                    LeaseRefused::Unknown(unknown) => unknown.into(),
                    refused => SpillError::Refused(refused),
                });
            }
            request.enqueue(state)?;
            let (since, began_ns) =
                waits.map_or_else(|| (Instant::now(), now_ns), |wait| (wait.since, wait.began_ns));
            waits = Some(Wait { since, began_ns, refused });
            guard = self.wait_briefly(guard);
        }
    }

    /// Makes the streams wait for the work that used the buffers before.
    fn order(&self, granted: &GrantedLease, streams: &[LeaseStream]) -> Result<(), SpillError> {
        for &token in &granted.after {
            let event = self.lock().events.of(token)?;
            let Some(event) = event else { continue };
            for stream in streams.iter().filter(|stream| key(stream.id) != token.stream) {
                self.driver.wait(stream.raw, event.event())?;
            }
            if is_of_copies(token) {
                // Restores run after the manager's own stream.
                self.driver.wait(self.stream.raw, event.event())?;
            }
            if streams.is_empty() {
                self.driver.synchronize_event(event.event())?;
            }
        }
        Ok(())
    }

    /// Makes the streams wait for earlier work on the memory of buffers that stay where they are.
    fn order_after_memory(
        &self,
        granted: &GrantedLease,
        streams: &[LeaseStream],
    ) -> Result<(), SpillError> {
        for &buffer in &granted.in_place {
            let mut state = self.lock();
            let range = state.core.slice(buffer)?.range;
            let ready_after = state.homes[&range].ready_after;
            let event = state.event_of(ready_after)?;
            drop(state);
            let Some(event) = event else { continue };
            streams.iter().try_for_each(|stream| self.driver.wait(stream.raw, event.event()))?;
            if streams.is_empty() {
                self.driver.synchronize_event(event.event())?;
            }
        }
        Ok(())
    }

    /// Ends a lease under which nothing was launched.
    pub(super) fn cancel(&self, lease: BufferLeaseId) {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Ok(less) = state.core.cancel_lease(lease) {
            for range in less {
                state.lend(range);
            }
            state.reap();
        }
        drop(guard);
        self.notify();
    }
}

fn has_passed(deadline: Deadline) -> bool {
    deadline.instant().is_some_and(|end| Instant::now() >= end)
}

impl State {
    /// Returns the buffers that may be read in place: all that is spilled of them is mapped.
    pub fn in_place_allowed(
        &self,
        wanted: &[(BufferId, Access)],
        mode: InPlaceMode<'_>,
    ) -> Vec<BufferId> {
        let InPlaceMode::AllExcept(hot) = mode else { return Vec::new() };
        let wanted = wanted.iter().map(|&(id, _)| id);
        wanted.filter(|id| !hot.contains(id) && self.is_mapped(*id)).collect()
    }

    /// Counts the buffers that a lease reads in place, and those that it promoted.
    fn note_reads(&mut self, granted: &GrantedLease, hot: &[BufferId]) {
        self.stats.reads_in_place += granted.in_place.len() as u64;
        let was_restored =
            |id: &&BufferId| granted.restores.iter().any(|restore| restore.piece.buffer == **id);
        self.stats.promotions += hot.iter().filter(was_restored).count() as u64;
    }

    fn note_wait(&mut self, wait: Wait, request: &QueuedRequest<'_>, served: bool) {
        let Wait { since, began_ns, refused } = wait;
        let waited_ns = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.stats.waits += 1;
        self.stats.waited_ns += waited_ns;
        let buffers = request.buffers();
        self.history.push_wait(WaitRecord { buffers, began_ns, waited_ns, refused, served });
    }
}
