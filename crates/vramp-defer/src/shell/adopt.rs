//! Memory of others that becomes a deferrable buffer.
//!
//! 1. [`SpillManager::adopt`](super::SpillManager::adopt) takes a range of the device, and an owner that
//!    keeps it allocated. The driver adopts the range, so that it can be copied. Nothing is copied.
//! 2. Leases see the adopted addresses, and the owner stays, until all of the buffer has left the card.
//!    Then the driver forgets the range, and the owner is dropped: the memory is free.
//! 3. From then on the buffer is restored at its own addresses.
//!
//! Memory of another pool of the allocator's group is refused: such a pool may be a region, whose pause
//! releases memory and knows no leases.
//!
//! The owner is dropped without a lock, by the thread that evicted the buffer or dropped its last
//! handle: perhaps in the middle of an allocation.

use std::sync::Arc;

use vramp_alloc::{Driver, StreamId, StreamWork};
use vramp_core::{AddrRange, Bytes};

use super::buffer_events::BufferChange;
use super::buffer_handle::DeferrableBuffer;
use super::buffer_owner::Owner;
use super::homes::RangeBacking;
use super::homes::{AdoptFailed, AdoptedMemory};
use super::service::Service;
use super::spill_error::SpillError;
use super::state::{Shared, State};
use crate::planner::RangeId;

impl Shared {
    /// Makes a buffer of the memory at `memory`, which the work queued on `stream` writes.
    pub(super) fn adopt(
        &self,
        service: &Arc<Service>,
        memory: AddrRange,
        owner: Box<dyn Send>,
        stream: StreamId,
    ) -> Result<DeferrableBuffer, Box<AdoptFailed>> {
        if let Err(error) = self.check_open(stream).and_then(|()| self.check_stays(memory)) {
            return Err(Box::new(AdoptFailed { error, owner }));
        }
        let own = match self.allocator.stable_range(memory.len, self.config.piece) {
            Ok(own) => own,
            Err(error) => return Err(Box::new(AdoptFailed { error: error.into(), owner })),
        };
        let adopted = AdoptedMemory::new(&self.driver, memory, owner)?;
        let mut guard = self.lock();
        let state = &mut *guard;
        let added = state.homes.check_apart(memory).and_then(|()| {
            let (token, now_ns) = (state.events.note(stream), self.driver.now_ns());
            Ok(state.core.add_adopted(memory.len, token, now_ns)?)
        });
        let added = match added {
            Ok(added) => added,
            Err(error) => {
                drop(guard);
                return Err(adopted.fail(error));
            }
        };
        let addresses = AddrRange::new(own.range().start, memory.len);
        let mut home = RangeBacking::new(Arc::new(own), false);
        home.adopted = Some(adopted);
        state.homes.insert(added.at.range, home);
        state.emit(added.buffer, BufferChange::Created);
        drop(guard);
        Ok(DeferrableBuffer::new(Owner::adopted(service, added.buffer, addresses)))
    }

    /// Refuses memory of another pool of the group, which may sleep. Memory of the manager's own pool, and
    /// of allocators beside the group, is the owner's to keep. O(pools of the group).
    fn check_stays(&self, memory: AddrRange) -> Result<(), SpillError> {
        match self.allocator.other_pool_at(memory) {
            Some(pool) => Err(SpillError::MemoryOfPool { memory, pool }),
            None => Ok(()),
        }
    }

    /// Returns an error for a stream that is unknown or captures a graph.
    fn check_open(&self, stream: StreamId) -> Result<(), SpillError> {
        match self.allocator.stream_work(stream) {
            None => Err(SpillError::UnknownStream(stream.to_string())),
            Some(StreamWork::Open(raw)) if self.driver.is_capturing(raw)? => {
                Err(SpillError::Capturing(raw))
            }
            Some(_) => Ok(()),
        }
    }
}

impl State {
    /// Takes the adopted memory of a range, to be dropped after unlocking. Returns its length; zero if
    /// contents are there still.
    pub(super) fn release_adopted(&mut self, range: RangeId) -> Bytes {
        if self.core.is_adopted(range) {
            return Bytes::ZERO;
        }
        let adopted = self.homes.get_mut(&range).and_then(|home| home.adopted.take());
        let Some(adopted) = adopted else { return Bytes::ZERO };
        let freed = adopted.range.len;
        self.to_drop.push(Box::new(adopted));
        freed
    }
}
