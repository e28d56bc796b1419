//! Restoring ahead of need.

use std::sync::Arc;
use std::time::Instant;

use crate::planner::{Access, LeaseRequest};
use vramp_alloc::Driver;
use vramp_tiers::Deadline;

use super::buffer_handle::DeferrableBuffer;
use super::lease_owner::LeaseOwner;
use super::spill_error::SpillError;
use super::state::Shared;

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
