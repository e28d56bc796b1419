//! What all handles of a buffer share, and pins.

use std::sync::Arc;

use crate::planner::BufferId;
use vramp_core::{AddrRange, DeviceAddr};

use super::service::Service;
use super::state::Shared;

/// Shared by all handles of a buffer. The buffer ends with the last of them.
pub(super) struct Owner {
    pub shared: Arc<Shared>,
    pub id: BufferId,
    pub range: AddrRange,
    /// Its contents were in memory of others at first.
    was_adopted: bool,
    /// Makes room for the buffer as long as it exists.
    _service: Arc<Service>,
}

impl Owner {
    pub fn new(service: &Arc<Service>, id: BufferId, range: AddrRange) -> Owner {
        let shared = Arc::clone(&service.shared);
        Owner { shared, id, range, was_adopted: false, _service: Arc::clone(service) }
    }

    /// The owner of an adopted buffer, whose own addresses these are.
    pub fn adopted(service: &Arc<Service>, id: BufferId, range: AddrRange) -> Owner {
        let mut owner = Owner::new(service, id, range);
        owner.was_adopted = true;
        owner
    }

    /// Returns the buffer's own start.
    pub fn start(&self) -> DeviceAddr {
        self.range.start
    }

    /// Returns where the contents start under a lease that is held.
    pub fn leased_start(&self) -> DeviceAddr {
        self.adopted_memory().map_or(self.range.start, |adopted| adopted.start)
    }

    /// Returns the memory of others that the contents are in.
    pub fn adopted_memory(&self) -> Option<AddrRange> {
        if !self.was_adopted {
            return None;
        }
        let state = self.shared.lock();
        let at = state.core.slice(self.id).expect("a buffer lives as long as its handles");
        state.adopted_memory(at.range)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.core.release_handles(self.id);
        // Work that cannot be queried counts as in flight. What is over and was not seen now ends with a
        // later lease or eviction.
        let _ = state.poll_some();
        state.note_freed();
        drop(state);
        // Copies that went made room below the card.
        self.shared.notify_spillable();
    }
}

/// Keeps a buffer on the card until it is dropped: for memory that is registered with a network
/// card, or shared with another process.
#[must_use = "the pin is taken off when this is dropped"]
pub struct Pin {
    pub(super) owner: Arc<Owner>,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.owner.shared.lock();
        let unpinned = state.core.unpin(self.owner.id);
        debug_assert!(unpinned.is_ok(), "a pin is taken off once: {unpinned:?}");
        state.note_freed();
        drop(state);
        self.owner.shared.notify_spillable();
    }
}
