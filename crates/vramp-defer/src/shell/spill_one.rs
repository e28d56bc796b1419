//! Spilling one buffer that the caller names.

use crate::planner::{BufferId, EvictError, SpillDemand, SpillTier};
use vramp_core::Bytes;

use super::spill_error::SpillError;
use super::state::{Shared, State};

/// Most times that room is made, or that what came back meanwhile is evicted again.
const ATTEMPTS: usize = 4;

impl Shared {
    /// Evicts a buffer, and moves its copies down to `to` if one is given. Returns the bytes of the card
    /// that became free. Waits for the copies and for work in flight on the buffer.
    pub(super) fn spill_buffer(
        &self,
        buffer: BufferId,
        to: Option<SpillTier>,
    ) -> Result<Bytes, SpillError> {
        if self.allocator.any_captures()? {
            return Err(SpillError::CaptureInProgress);
        }
        self.disk_gate.open();
        let freed = self.evict_buffer(buffer, to)?;
        if let Some(to) = to {
            self.push_buffer(buffer, to)?;
        }
        self.retry_stalled();
        Ok(freed)
    }

    fn evict_buffer(&self, buffer: BufferId, to: Option<SpillTier>) -> Result<Bytes, SpillError> {
        let mut freed = Bytes::ZERO;
        for attempt in 1.. {
            let room = self.room();
            let chosen = {
                let mut guard = self.lock();
                let state = &mut *guard;
                state.poll()?;
                state.note_pins(&self.allocator);
                let demand = state.demand(room);
                state.core.evict_buffer(buffer, to, &demand)
            };
            let moves = match chosen {
                Ok(moves) if moves.is_empty() => return Ok(freed),
                Ok(moves) => moves,
                Err(EvictError::NoRoom { needed, .. })
                    if attempt < ATTEMPTS && !self.relieve_host(needed).is_zero() =>
                {
                    continue;
                }
                Err(error) => return Err(self.no_room(error)),
            };
            let moves = moves.into_iter().map(|out| (out, None)).collect();
            let evicted = self.evict(moves, &|| Bytes::new(u64::MAX));
            freed += evicted.freed;
            if let Some(failed) = evicted.failed {
                return Err(SpillError::NotSpilled(Box::new(failed)));
            }
            if attempt == ATTEMPTS {
                break;
            }
        }
        // Room was taken by others each time, or leases brought pieces back.
        let status = self.lock().core.status(buffer)?;
        let needed = status.len.saturating_sub(status.deferred);
        Err(self.no_room(EvictError::NoRoom { buffer, needed }))
    }

    /// Returns the error of an eviction; that of the disk where it is closed.
    fn no_room(&self, error: EvictError) -> SpillError {
        let failed = self.disk_gate.failure().filter(|_| self.disk_gate.is_closed());
        match (&error, failed) {
            (EvictError::NoRoom { .. }, Some(failed)) => SpillError::NotSpilled(Box::new(failed)),
            _ => error.into(),
        }
    }

    /// Moves copies of a buffer from faster tiers down to one.
    fn push_buffer(&self, buffer: BufferId, to: SpillTier) -> Result<(), SpillError> {
        let room = self.room();
        let (choice, failures) = {
            let mut guard = self.lock();
            let state = &mut *guard;
            let demand = state.demand(room);
            let choice = state.core.push_buffer(buffer, to, &demand)?;
            state.drop_copies(&choice.stale);
            (choice, state.stats.failures)
        };
        let mut moved = Bytes::ZERO;
        let wanted: Bytes = choice.pushes.iter().map(|push| push.len).sum();
        for push in &choice.pushes {
            moved += self.push(push);
        }
        let needed = choice.missing + wanted.saturating_sub(moved);
        match self.failed_since(failures) {
            Some(failed) if moved < wanted => Err(SpillError::NotSpilled(failed)),
            _ if needed.is_zero() => Ok(()),
            _ => Err(EvictError::NoRoom { buffer, needed }.into()),
        }
    }
}

impl State {
    /// Returns the rates and the room for moves of one buffer.
    fn demand(&self, room: crate::planner::SpillRoom) -> SpillDemand {
        SpillDemand { deficit: Bytes::ZERO, rates: self.rates, room }
    }
}
