//! Acquiring a lease: request, wait in the queue, order the streams, restore what is missing.
//!
//! 1. The request is granted, or refused with what to wait for
//!    ([`QueuedRequest::submit`]). A refused request waits in the queue until its deadline, if waiting
//!    can help (`hand_over.rs`).
//! 2. The lease's streams wait for earlier work on the buffers and on their memory.
//! 3. `pay.rs` pays for the memory, and `restore.rs` brings memory and contents back. If something is
//!    full, the lease is cancelled, and the request goes back to its place in the queue until memory may
//!    be free, or waits for its budget.
//!
//! Each buffer of a set is decided on its own: one that can be read in place stays below, the
//! others come to the card, under one lease, all or nothing.
//!
//! Deliberately absent: which requests are granted, who waits for whom, and which failures are
//! retried. All of that is the planner's.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

use super::buffer_events::BufferChange;
use super::buffer_handle::DeferrableBuffer;
use super::events::{LeaseStream, is_of_copies, key};
use super::hand_over::Hooks;
use super::lease_owner::LeaseOwner;
use super::lease_set::LeaseSet;
use super::mapped_copy::is_mapped;
use super::queued_request::{QueuedRequest, Wanted};
use super::spill_error::SpillError;
use super::state::{Shared, State};
use crate::planner::{Access, BufferId, BufferLeaseId, BufferStatus, GrantedLease, LeaseRequest};
use vramp_alloc::{Driver, StreamId};
use vramp_tiers::Deadline;
use vramp_tiers::wait::block_on;

impl Shared {
    /// Leases all of the buffers, or none, for the calling thread. With `in_place`, what can be read in
    /// place stays below; buffers that were read in place often are promoted if they can come without
    /// waiting.
    pub(super) fn lease(
        self: &Arc<Shared>,
        buffers: &[(&DeferrableBuffer, Access)],
        streams: &[StreamId],
        deadline: Deadline,
        in_place: bool,
    ) -> Result<LeaseSet, SpillError> {
        let holder = LeaseOwner::of_this_thread().key;
        let holding = SmallVec::new();
        let wanted = Wanted { buffers, streams, in_place, holder, holding, deadline };
        block_on(QueuedRequest::new(self, wanted)?)
    }

    /// Returns the driver's streams. One driver call each, which queries whether it captures.
    pub(super) fn driver_streams(
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

    /// Makes the streams wait for the work that used the buffers before.
    pub(super) fn order(
        &self,
        granted: &GrantedLease,
        streams: &[LeaseStream],
    ) -> Result<(), SpillError> {
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
    pub(super) fn order_after_memory(
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
        let leased = state.leased_for_events(lease);
        if let Ok(less) = state.core.cancel_lease(lease) {
            state.emit_unlocked(&leased);
            state.account.cancel(lease, state.core.occupied());
            for range in less {
                state.lend(range);
            }
            state.reap();
        }
        drop(guard);
        self.notify_spillable();
    }

    /// Records that memory may be free again, and retries the oldest stalled waiter.
    pub(super) fn retry_stalled(&self) {
        self.lock().note_freed();
    }
}

impl State {
    /// Processes what is complete, and serves the waiters before another request comes. A query for each
    /// stream with work, and for 64 of them at most.
    ///
    /// # Errors
    /// Work could not be queried.
    pub(super) fn prepare(&mut self, shared: &Shared) -> Result<(), SpillError> {
        self.poll_some()?;
        let capacity = shared.capacity();
        self.core.set_capacity(capacity);
        if self.has_pinned_memory {
            // Memory that was unpinned since may be spilled.
            self.note_pins(&shared.allocator);
        }
        self.hand_over(shared.driver.now_ns());
        Ok(())
    }

    /// Serves the waiters that can be served. O(1) if no change marked one.
    pub(super) fn hand_over(&mut self, now_ns: u64) {
        let State { core, waiting, copies, account, subscribers, .. } = self;
        let mut locked: Vec<(BufferId, BufferStatus)> = Vec::new();
        let hooks = Hooks {
            is_mapped: &|core, buffer| is_mapped(core, copies, buffer),
            on_grant: &mut |core, lease| {
                account.begin(lease, core.occupied());
                if !subscribers.is_empty() {
                    // As they are after this grant, and before the next.
                    let status = |buffer| Some((buffer, core.status(buffer).ok()?));
                    locked.extend(core.leased(lease).filter_map(status));
                }
            },
        };
        waiting.hand_over(core, hooks, now_ns);
        for (buffer, status) in locked {
            self.emit_with(buffer, BufferChange::Locked, status);
        }
    }

    /// Counts the buffers that a lease reads in place, and those that it promoted.
    pub(super) fn note_reads(&mut self, granted: &GrantedLease, hot: &[BufferId]) {
        self.stats.reads_in_place += granted.in_place.len() as u64;
        if hot.is_empty() {
            return;
        }
        let restored: BTreeSet<BufferId> =
            granted.restores.iter().map(|restore| restore.piece.buffer).collect();
        self.stats.promotions += hot.iter().filter(|id| restored.contains(id)).count() as u64;
    }
}

impl Shared {
    /// Restores a buffer in the order of the manager's own stream. A piece that leaves stays instead.
    pub(super) fn prefetch(
        self: &Arc<Shared>,
        buffer: &DeferrableBuffer,
    ) -> Result<(), SpillError> {
        if self.keep_on_card(buffer)? {
            return Ok(());
        }
        let now = Deadline::from(Instant::now());
        let wanted = [(buffer, Access::Shared)];
        // No work is in flight on a buffer with spilled pieces, except for earlier restores. So the
        // stream waits for those only.
        let streams = [self.stream.id];
        self.lease(&wanted, &streams, now, false)?.cancel();
        Ok(())
    }

    /// Keeps a buffer on the card whose contents are all there. Returns false if some are not.
    fn keep_on_card(&self, buffer: &DeferrableBuffer) -> Result<bool, SpillError> {
        let mut guard = self.lock();
        guard.poll()?;
        if !guard.core.is_on_card(buffer.id())? {
            return Ok(false);
        }
        let capacity = self.capacity();
        guard.core.set_capacity(capacity);
        let buffers = [(buffer.id(), Access::Shared)];
        let request = LeaseRequest {
            buffers: &buffers,
            holder: LeaseOwner::of_this_thread().key,
            ..LeaseRequest::default()
        };
        let kept = guard.core.keep(&request, self.driver.now_ns());
        kept.map_err(SpillError::Refused)?;
        Ok(true)
    }
}
