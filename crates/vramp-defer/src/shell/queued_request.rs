//! A lease request and its place in the wait queue.

use smallvec::SmallVec;

use crate::planner::{
    Access, BufferId, GrantedLease, HolderKey, LeaseRefused, LeaseRequest, StreamKey, Ticket,
};

use super::acquire::InPlaceMode;
use super::events::{LeaseStream, key};
use super::spill_error::SpillError;
use super::state::{Shared, State};

/// Returns the calling thread's holder key. A number is reused once its thread has ended.
pub(super) fn this_thread() -> HolderKey {
    thread_local!(static HERE: u8 = const { 0 });
    // The address of a thread-local variable is unique among live threads.
    HERE.with(|here| HolderKey(std::ptr::from_ref(here).addr() as u64))
}

/// A lease request. Dropping it, also in a panic, takes it out of the queue.
pub(super) struct QueuedRequest<'a> {
    shared: &'a Shared,
    buffers: &'a [(BufferId, Access)],
    streams: SmallVec<[StreamKey; 2]>,
    mode: InPlaceMode<'a>,
    holder: HolderKey,
    ticket: Option<Ticket>,
}

impl<'a> QueuedRequest<'a> {
    /// A request that is not in the queue.
    pub fn new(
        shared: &'a Shared,
        buffers: &'a [(BufferId, Access)],
        streams: &[LeaseStream],
        mode: InPlaceMode<'a>,
    ) -> QueuedRequest<'a> {
        let streams = streams.iter().map(|stream| key(stream.id)).collect();
        QueuedRequest { shared, buffers, streams, mode, holder: this_thread(), ticket: None }
    }

    /// Requests the lease once. A mapping in progress at the addresses counts as a move in flight.
    pub fn try_grant(&self, state: &mut State, now_ns: u64) -> Result<GrantedLease, LeaseRefused> {
        if self.buffers.iter().any(|&(id, _)| state.is_mapping(id)) {
            return Err(LeaseRefused::Settling { moves: Vec::new() });
        }
        let in_place_allowed = state.in_place_allowed(self.buffers, self.mode);
        state.core.lease_in_place(&self.request(), &in_place_allowed, now_ns)
    }

    /// Buffers that the lease is for.
    pub fn buffers(&self) -> Vec<BufferId> {
        self.buffers.iter().map(|&(buffer, _)| buffer).collect()
    }

    fn request(&self) -> LeaseRequest<'_> {
        let QueuedRequest { buffers, ref streams, holder, ticket, .. } = *self;
        LeaseRequest { buffers, streams, holder, ticket }
    }

    /// Enters the queue, or keeps its place there and updates what may be read in place.
    pub fn enqueue(&mut self, state: &mut State) -> Result<(), SpillError> {
        let in_place_allowed = state.in_place_allowed(self.buffers, self.mode);
        self.ticket = Some(state.core.enqueue(&self.request(), &in_place_allowed)?);
        Ok(())
    }
}

impl Drop for QueuedRequest<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.shared.lock().core.dequeue(ticket);
            // Requests behind it may be granted now.
            self.shared.notify();
        }
    }
}
