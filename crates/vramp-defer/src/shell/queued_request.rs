//! A request's place among those who wait.

use crate::planner::{
    Access, BufferId, GrantedLease, HolderKey, LeaseRefused, LeaseRequest, StreamKey, Ticket,
};
use smallvec::SmallVec;
use vramp_driver::Stream;

use super::acquire::InPlaceMode;
use super::events::key;
use super::spill_error::SpillError;
use super::state::{Shared, State};

/// The thread as one who takes leases. A number is used again once its thread has ended.
pub(super) fn this_thread() -> HolderKey {
    thread_local!(static HERE: u8 = const { 0 });
    // A thread's own variable lies where nobody else's does.
    HERE.with(|here| HolderKey(std::ptr::from_ref(here).addr() as u64))
}

/// What is asked for, and since when. Whoever gives up, or panics, leaves the line with it.
pub(super) struct QueuedRequest<'a> {
    shared: &'a Shared,
    buffers: &'a [(BufferId, Access)],
    streams: SmallVec<[StreamKey; 2]>,
    stay: InPlaceMode<'a>,
    holder: HolderKey,
    ticket: Option<Ticket>,
}

impl<'a> QueuedRequest<'a> {
    /// Nobody waits yet.
    pub fn new(
        shared: &'a Shared,
        buffers: &'a [(BufferId, Access)],
        streams: &[Stream],
        stay: InPlaceMode<'a>,
    ) -> QueuedRequest<'a> {
        let streams = streams.iter().map(|&stream| key(stream)).collect();
        QueuedRequest { shared, buffers, streams, stay, holder: this_thread(), ticket: None }
    }

    /// Asks once. What is being mapped at the addresses is waited for as for a move.
    pub fn ask(&self, state: &mut State, now_ns: u64) -> Result<GrantedLease, LeaseRefused> {
        if self.buffers.iter().any(|&(id, _)| state.is_mapping(id)) {
            return Err(LeaseRefused::Settling { moves: Vec::new() });
        }
        let in_place_allowed = state.in_place_allowed(self.buffers, self.stay);
        state.core.lease_in_place(&self.request(), &in_place_allowed, now_ns)
    }

    /// What it is for.
    pub fn buffers(&self) -> Vec<BufferId> {
        self.buffers.iter().map(|&(buffer, _)| buffer).collect()
    }

    fn request(&self) -> LeaseRequest<'_> {
        let QueuedRequest { buffers, ref streams, holder, ticket, .. } = *self;
        LeaseRequest { buffers, streams, holder, ticket }
    }

    /// It waits, from its first time on; each time for what cannot be read where it is by then.
    pub fn enqueue(&mut self, state: &mut State) -> Result<(), SpillError> {
        let in_place_allowed = state.in_place_allowed(self.buffers, self.stay);
        self.ticket = Some(state.core.enqueue(&self.request(), &in_place_allowed)?);
        Ok(())
    }
}

impl Drop for QueuedRequest<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.shared.lock().core.dequeue(ticket);
            // Those behind it may be served now.
            self.shared.notify();
        }
    }
}
